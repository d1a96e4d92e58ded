"""CUDA devices that are not here: their calls are noted, their kernels run on the host, and races are found.

Every tensor is on the host, and has a place where it is pretended to be. To torch that place is a CPU with a number,
:func:`stand_in`: it makes tensors there, and says their device is ``cpu``. Each stream has a vector clock; an event
carries a stream's clock to another one, as cudaEventRecord and cudaStreamWaitEvent do. A kernel must come after the
last write of what it reads and after every use of what it writes. Memory that is let go of belongs to the stream on
which it was taken: that stream's next allocation may get it, and must come after every use. What the host reads or
writes itself must come after the host has waited for it.
"""

from __future__ import annotations

import bisect
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from graphir.runtime import Session
from graphir.runtime.cuda.executor import Cuda
from graphir.runtime.cuda.streams import FIGURES
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("cpu")


def stand_in(place: torch.device) -> torch.device:
    """What torch here takes a place for."""
    return HOST if place == HOST else torch.device("cpu", place.index + 1)


def stood_for(device: torch.device) -> torch.device:
    """The place that a device of the host stands for."""
    return torch.device("cuda", device.index - 1) if device.index else HOST


class FakeStream:
    """A stream with its vector clock."""

    def __init__(self, machine: FakeMachine, device: torch.device, name: str) -> None:
        self.machine, self.device, self.name = machine, device, name
        self.clock: dict[str, int] = {name: 0}
        self.graph: FakeGraph | None = None

    def query(self) -> bool:
        self.machine.only_outside(f"a query of {self.name}")
        return self.name != self.machine.hangs

    def synchronize(self) -> None:
        self.machine.only_outside(f"a wait of the host for {self.name}")
        self.machine.calls.append(("synchronize", self.name))
        self.machine.merge(self.machine.host, self.clock)

    def tick(self) -> tuple[str, int]:
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def knows(self, stamp: tuple[str, int]) -> bool:
        return self.clock.get(stamp[0], -1) >= stamp[1]


class FakeEvent:
    """An event; ``number`` is the order in which events were made."""

    def __init__(self, machine: FakeMachine, number: int, timed: bool) -> None:
        self.machine, self.number, self.timed = machine, number, timed
        self.graph: FakeGraph | None = None
        self.clock: dict[str, int] | None = None
        self.device: torch.device | None = None
        self.hung = "none"

    def record(self, stream: FakeStream) -> None:
        if self.device not in (None, stream.device):
            self.machine.races.append(f"event {self.number} of {self.device} is recorded on {stream.name}")
        self.device, self.hung, self.graph = stream.device, stream.name, stream.graph
        self.machine.merge(stream, self.machine.host.clock)
        self.clock = dict(stream.clock)
        self.machine.calls.append(("record", self.number, stream.name))

    def wait(self, stream: FakeStream) -> None:
        if self.clock is None:
            self.machine.races.append(f"{stream.name} waits for event {self.number} before it is recorded")
            return
        if self.graph is not None and self.graph is self.machine.capturing:
            stream.graph = self.graph
            stream.tick()
            self.graph.streams.append(stream)
        elif self.graph is not stream.graph:
            self.machine.races.append(f"{stream.name} waits for event {self.number} across the border of a capture")
        self.machine.calls.append(("wait", self.number, stream.name))
        self.machine.waits += 1
        if self.machine.waits != self.machine.dropped:
            self.machine.merge(stream, self.clock)

    def query(self) -> bool:
        self.machine.only_outside(f"a query of event {self.number}")
        return self.hung != self.machine.hangs

    def synchronize(self) -> None:
        self.machine.only_outside(f"a wait of the host for event {self.number}")
        self.machine.calls.append(("stop", self.number))
        if self.clock is None:
            self.machine.races.append(f"the host waits for event {self.number} before it is recorded")
        else:
            self.machine.merge(self.machine.host, self.clock)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        for event in (self, end_event):
            known = self.machine.host.clock
            done = event.clock is not None and all(known.get(name, -1) >= time for name, time in event.clock.items())
            if not (event.timed and done and event.device == self.device):
                self.machine.races.append(f"event {event.number} has no time yet, or none at all")
        return float(end_event.number - self.number)


class Block:
    """Memory: where it is pretended to be, whose it is, and its uses."""

    def __init__(self, end: int, place: torch.device, owner: FakeStream, name: str, pinned: bool = False) -> None:
        self.end, self.place, self.owner, self.name, self.pinned = end, place, owner, name, pinned
        self.written: tuple[str, int] | None = None
        self.read: dict[str, int] = {}
        self.tensors = 0


class FakeMachine:
    """A :class:`graphir.runtime.cuda.streams.Machine`.

    Attributes:
        calls: in their order.
        moved: bytes that copies between places have brought.
        races: what was not ordered, as text.
        dropped: which wait is not done, counted from 1; 0 for none.
        hangs: the name of a stream that does nothing any more.
        fails: what operators raise, by name and place; ``empty`` is the allocator.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.races: list[str] = []
        self.waits = self.dropped = self.events = self.made = self.moved = 0
        self.host = FakeStream(self, HOST, "host")
        self.current: dict[torch.device, FakeStream] = {}
        self.device = torch.device("cuda:0")
        self.blocks: dict[int, Block] = {}
        self.starts: list[int] = []
        self.known: set[int] = set()
        self.free: dict[str, list[Block]] = {}
        self.state: list[Tensor] = []
        self.capturing: FakeGraph | None = None
        self.hangs = ""
        self.fails: dict[tuple[str, torch.device], Exception] = {}

    def stream(self, place: torch.device) -> FakeStream:
        self.made += 1
        return FakeStream(self, place, f"stream {self.made}")

    def event(self, timed: bool = False) -> FakeEvent:
        self.events += 1
        return FakeEvent(self, self.events, timed)

    def use(self, stream: FakeStream) -> None:
        self.calls.append(("use", stream.name))
        self.current[stream.device], self.device = stream, stream.device

    def caller(self, place: torch.device) -> FakeStream:
        return self.current.setdefault(place, FakeStream(self, place, f"caller of {place}"))

    @contextmanager
    def kept(self, places: Sequence[torch.device]) -> Iterator[list[FakeStream]]:
        streams, device = [self.caller(place) for place in places], self.device
        try:
            yield streams
        finally:
            self.current.update((stream.device, stream) for stream in streams)
            self.device = device

    def empty(self, nbytes: int, place: torch.device) -> Tensor:
        self.fail("empty", place)
        with _disable_current_modes():
            made = torch.empty(nbytes, dtype=torch.uint8)
        self.adopt(made, place, self.taker(place), f"buffer on {place}").pinned = place == HOST
        self.calls.append(("empty", str(place)))
        return made

    def fail(self, name: str, place: torch.device) -> None:
        if (name, place) in self.fails:
            raise self.fails[name, place]

    def like(self, tensor: Tensor, place: torch.device) -> Tensor:
        with _disable_current_modes():
            made = torch.empty_like(tensor, device=HOST)
        self.adopt(made, place, self.taker(place), f"memory on {place}")
        return made

    def elements(self, count: int, dtype: torch.dtype, place: torch.device) -> Tensor:
        with _disable_current_modes():
            like = torch.empty(count, dtype=dtype, device="meta")
        return self.like(like, place)

    def taker(self, place: torch.device) -> FakeStream:
        return self.host if place == HOST else self.caller(place)

    def all_reduce(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], streams: Sequence[FakeStream]) -> None:
        self.calls.append(("all_reduce", *[stream.name for stream in streams]))
        for tensor, stream in zip(inputs, streams, strict=True):
            self.access(stream, tensor, write=False, what="all_reduce")
        for tensor, stream in zip(outputs, streams, strict=True):
            self.access(stream, tensor, write=True, what="all_reduce")
        with _disable_current_modes():
            total = sum(reversed(inputs), torch.zeros(()))  # in another order than the participants'
            for tensor in outputs:
                tensor.copy_(total)

    @contextmanager
    def capture(self, stream: FakeStream, generators: Sequence[torch.Generator]) -> Iterator[FakeGraph]:
        self.calls.append(("capture", stream.name, len(generators)))
        self.free.clear()  # torch waits for the devices, and a graph takes memory of its own
        self.current[stream.device], self.device = stream, stream.device
        before = [(tensor, tensor.clone()) for tensor in self.state]
        graph = stream.graph = self.capturing = FakeGraph(self, stream, generators)
        try:
            yield graph
        finally:
            self.capturing = None
            self.races += [
                f"{one.name} does not come back to {stream.name} within the capture"
                for one in graph.streams
                if stream.clock.get(one.name, -1) < one.clock[one.name]
            ]
            for one in graph.streams:
                one.graph = None
        self.free.clear()
        with _disable_current_modes():  # a capture executes nothing
            for tensor, value in before:
                tensor.copy_(value)
        if self.current[stream.device] is not stream or self.device != stream.device:
            self.races.append("the capture ends on another stream than it began on")
        self.calls.append(("captured", stream.name))

    def only_outside(self, what: str) -> None:
        """Note what CUDA refuses while a graph is captured."""
        if self.capturing is not None:
            self.races.append(f"{what} within a capture")

    def statistics(self, place: torch.device) -> Mapping[str, int]:
        return {name: 1000 * i for i, name in enumerate(FIGURES)}

    def merge(self, stream: FakeStream, clock: Mapping[str, int]) -> None:
        for name, time in clock.items():
            stream.clock[name] = max(time, stream.clock.get(name, -1))

    def adopt(self, tensor: Tensor, place: torch.device, owner: FakeStream, name: str) -> Block:
        """Note a tensor's memory."""
        self.reuse(owner)
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in self.blocks:
            bisect.insort(self.starts, start)
        block = self.blocks[start] = Block(start + storage.nbytes(), place, owner, name)
        if place.type == "cuda":
            block.written = owner.tick()  # other streams come after the allocation, too
        self.hold(tensor, start, block)
        return block

    def hold(self, tensor: Tensor, start: int, block: Block) -> None:
        if id(tensor) in self.known:
            return
        self.known.add(id(tensor))
        block.tensors += 1
        weakref.finalize(tensor, self.drop, id(tensor), start, block).atexit = False

    def drop(self, tensor: int, start: int, block: Block) -> None:
        self.known.discard(tensor)
        block.tensors -= 1
        if block.tensors or self.blocks.get(start) is not block:
            return
        del self.blocks[start]
        self.starts.remove(start)
        if block.place.type == "cuda":
            self.free.setdefault(block.owner.name, []).append(block)
        elif block.pinned:  # torch knows of the streams that use it by its first byte only
            self.reused(block, self.host)

    def reuse(self, owner: FakeStream) -> None:
        """What the next allocation of a stream may get: memory of that stream, whatever else may still use it."""
        for block in self.free.pop(owner.name, []):
            self.reused(block, owner)

    def reused(self, block: Block, owner: FakeStream) -> None:
        uses = [*block.read.items(), *([block.written] if block.written else [])]
        if late := [use for use in uses if not owner.knows(use)]:
            self.races.append(f"{block.name} is used again by {owner.name}, which does not come after {late}")

    def block(self, tensor: Tensor) -> Block | None:
        address = tensor.untyped_storage().data_ptr()
        index = bisect.bisect_right(self.starts, address) - 1
        found = self.blocks[self.starts[index]] if index >= 0 else None
        if found is None or address >= found.end:
            return None
        self.hold(tensor, self.starts[index], found)
        return found

    def access(self, stream: FakeStream, tensor: Tensor, write: bool, what: str) -> None:
        block = self.block(tensor)
        if block is None:
            return
        self.merge(stream, self.host.clock)  # what the host did before it issued this
        before = [block.written] if block.written else []
        before += list(block.read.items()) if write else []
        if late := [use for use in before if not stream.knows(use)]:
            verb = "writes" if write else "reads"
            self.races.append(f"{what} on {stream.name} {verb} {block.name} without coming after {late}")
        name, time = stream.tick()
        if write:
            block.written, block.read = (name, time), {}
        elif block.place.type == "cuda" or block.pinned or stream is self.host:
            block.read[name] = time


class FakeGraph:
    """A graph, whose replay does what was captured by doing it again.

    Args:
        machine: whose.
        stream: that the capture begins on.
        generators: that it may draw from.

    Attributes:
        streams: that have come into the capture.
    """

    def __init__(self, machine: FakeMachine, stream: FakeStream, generators: Sequence[torch.Generator]) -> None:
        self.machine, self.streams = machine, [stream]
        self.generators = {generator._cdata for generator in generators}
        self.kernels: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before = set(machine.blocks.values())
        self.taken: set[Block] = set()

    def add(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Note a kernel, with tensors of its own: a graph knows addresses, it keeps no memory."""
        own: dict[int, Tensor] = {}

        def alias(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if (block := self.machine.block(value)) in self.before:
                self.taken.add(block)
            return own.setdefault(id(value), value.as_strided(value.size(), value.stride(), value.storage_offset()))

        with _disable_current_modes():
            self.kernels.append((func, *tree_map(alias, (args, kwargs, made))))

    def replay(self) -> None:
        self.machine.calls.append(("replay", self.machine.current[self.machine.device].name))
        for block in self.taken - set(self.machine.blocks.values()):
            self.machine.races.append(f"a graph uses {block.name}, which was given back")
        with _disable_current_modes():
            for func, args, kwargs, made in self.kernels:
                again = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for old, new in zip(made, again, strict=True):
                    if old is not new:
                        old.copy_(new)

    def reset(self) -> None:
        self.machine.calls.append(("reset",))


class Watch(TorchDispatchMode):
    """Every operator of torch, as a kernel on the current stream of its device or as work of the host.

    Args:
        machine: whose.
        strict: whether its device has to be the current one. Torch itself does without.
    """

    def __init__(self, machine: FakeMachine, strict: bool = True) -> None:
        super().__init__()
        self.machine, self.strict = machine, strict

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine, kwargs = self.machine, kwargs or {}
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        given = [
            (tensor, a.alias_info is not None and a.alias_info.is_write)
            for a, value in named
            for tensor in tree_leaves(value)
            if isinstance(tensor, Tensor)
        ]
        asked = [value for a, value in named if a.name == "device" and value is not None]
        found = func(*args, **kwargs)
        made = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        if func.is_view or func.name() == "aten::set_.source_Storage_storage_offset":
            for tensor in made:
                machine.block(tensor)
            return found
        name = func.name()
        if machine.capturing is not None:
            machine.capturing.add(func, args, kwargs, made)
            drawn: Any = kwargs.get("generator")
            if drawn is not None and drawn._cdata not in machine.capturing.generators:
                machine.only_outside(f"{name} by a generator that the graph does not know")
        if name == "aten::copy_":
            ahead = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            self.copy(given, ahead)
            return found
        operands = [(tensor, write, self.place(tensor)) for tensor, write in given]
        devices = [place for _, _, place in operands if place != HOST]
        place = stood_for(asked[0]) if asked else devices[0] if devices else HOST
        machine.fail(name, place)
        if wrong := {str(at) for t, _, at in operands if at != place and not (at == HOST and t.dim() == 0)}:
            machine.races.append(f"{name} on {place} has operands on {', '.join(sorted(wrong))}")
        if self.strict and place not in (HOST, machine.device):
            machine.races.append(f"{name} on {place} while {machine.device} is current")
        stream = machine.taker(place)
        if stream.graph is not machine.capturing and (given or any(t.untyped_storage().nbytes() for t in made)):
            machine.only_outside(f"{name} on {stream.name}, which does not belong to it,")
        machine.calls.append(("run", name, stream.name))
        self.uses(stream, [(tensor, write) for tensor, write, at in operands if at != HOST], name)
        self.uses(machine.host, [(tensor, write) for tensor, write, at in operands if at == HOST], name)
        if name == "aten::_local_scalar_dense" and place != HOST:
            stream.synchronize()
        for tensor in made:
            if tensor.untyped_storage().nbytes() and machine.block(tensor) is None:
                machine.adopt(tensor, place, stream, f"result of {name}")
                machine.access(stream, tensor, True, name)
        return found

    def place(self, tensor: Tensor) -> torch.device:
        """Where a tensor is; the host where nobody knows it, for memory of devices comes from this machine only."""
        block = self.machine.block(tensor)
        return HOST if block is None else block.place

    def copy(self, given: Sequence[tuple[Tensor, bool]], ahead: bool) -> None:
        """On the source's current stream, between it and the destination's where that is another device."""
        machine, name = self.machine, "aten::copy_"
        to, source = [self.place(tensor) for tensor, _ in given]
        if machine.capturing is not None and HOST in (to, source):
            machine.only_outside("a copy from or to the host")
        if to == source == HOST:
            machine.calls.append(("run", name, "host"))
            self.uses(machine.host, given, name)
            return
        stream = machine.caller(to if source == HOST else source)
        machine.calls.append(("copy", stream.name))
        machine.moved += given[0][0].nbytes
        across = HOST not in (to, source) and to != source
        if across:
            machine.merge(stream, machine.caller(to).clock)
        self.uses(stream, given, name)
        if HOST in (to, source) and not ahead:
            stream.synchronize()
        if across:
            machine.merge(machine.caller(to), stream.clock)
            machine.calls.append(("then", machine.caller(to).name))

    def uses(self, stream: FakeStream, given: Sequence[tuple[Tensor, bool]], name: str) -> None:
        for tensor, write in sorted(given, key=lambda use: use[1]):
            self.machine.access(stream, tensor, write, name)


class OnCards(TorchFunctionMode):
    """Tensors of devices say that they are on CUDA, by which graphir's kernels choose what they call."""

    def __init__(self, machine: FakeMachine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = getattr(getattr(func, "__self__", None), "__name__", "")
        if asked in ("is_cpu", "is_cuda"):
            block = self.machine.block(args[0])
            return (block is not None and block.place.type == "cuda") is (asked == "is_cuda")
        return func(*args, **(kwargs or {}))


_NO_KERNELS = ("aten::_unsafe_view", "aten::empty_like", "aten::item")
"""What Watch takes for kernels, and launches none."""


def issued_in(session: Session, machine: FakeMachine, batch: Sequence[Tensor], before: int = 1) -> Counter[str]:
    """What the host calls to issue a step to CUDA, after some steps *before*, which take buffers: how often of each
    kind."""
    with session, OnCards(machine):
        for _ in range(before):
            session.step(*batch)
        machine.calls.clear()
        session.step(*batch)
        calls = list(machine.calls)
    launched = [call for call in calls if call[0] == "run" and call[-1] != "host" and call[1] not in _NO_KERNELS]
    found = Counter(call[0] for call in calls if call[0] != "run")
    return found + Counter({"kernel": len(launched)})


class Watched:
    """An executor under watch."""

    def __init__(self, executor: Cuda, machine: FakeMachine) -> None:
        self.executor, self.machine, self.setting, self.clock = executor, machine, executor.setting, executor.clock
        self.ledger, self.aside, self.close = executor.ledger, executor.aside, executor.close
        self.kept = executor.kept
        machine.state = list(self.setting.state.values())
        for name, tensor in self.setting.state.items():
            self.take(name, tensor)

    def take(self, name: str, tensor: Tensor) -> None:
        place = self.executor.places[self.setting.plan.step.blobs[name].device]
        if self.machine.block(tensor) is None:
            self.machine.adopt(tensor, place, self.machine.taker(place), name)
        self.machine.access(self.machine.taker(place), tensor, True, name)

    def run(self, dims: Any, inputs: Any, step: int) -> Any:
        return self.watch(self.executor.run, dims, inputs, step)

    def run_observed(self, dims: Any, inputs: Any, step: int, probe: Any) -> Any:
        return self.watch(self.executor.run_observed, dims, inputs, step, probe)

    def watch(self, run: Any, dims: Any, inputs: Any, *rest: Any) -> Any:
        for name, tensor in zip(self.setting.inputs, inputs, strict=True):
            if isinstance(tensor, Tensor):
                self.take(name, tensor)
        with Watch(self.machine):
            outputs = run(dims, inputs, *rest)
        for tensor in outputs:
            block = self.machine.block(tensor)
            if block is not None:
                self.machine.access(self.machine.taker(block.place), tensor, False, "the caller")
        return outputs


def watched(
    plan: Any,
    state: Any,
    binding: Mapping[str, str],
    kind: type[Cuda] = Cuda,
    deadline: float | None = None,
    check_finite: bool = False,
    **options: Any,
) -> tuple[Session, FakeMachine]:
    """A session whose executor believes in these devices; those that the binding does not name are on the host."""
    machine = FakeMachine()
    places = {device: torch.device(binding.get(str(device), "cpu")) for device in plan.devices}
    stand_ins = {str(device): stand_in(place) for device, place in places.items() if not device.is_host}
    session = Session(
        plan, state, binding=stand_ins, executor="reference", deadline=deadline, check_finite=check_finite
    )
    session._executor = Watched(kind(session._setting, machine=machine, places=places, **options), machine)
    session._places = places
    if session._watch is not None and session._observed is not None:
        session._observed.executor = session._executor
        start = session._watch.start

        def watched_start(*given: Any) -> None:
            with Watch(machine, strict=False):
                start(*given)

        session._watch.start = watched_start
    return session, machine
