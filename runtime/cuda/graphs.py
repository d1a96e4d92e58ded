"""Steps as CUDA graphs: what a step issues is captured once for each size, and then replayed in one call.

A graph replays kernels with the numbers that they were captured with. So what reads numbers of the host, such as the
optimizers' updates with their learning rates and step counts, is not in it: it is issued after each replay, by the same
kernels as without a graph, and gives the same bits. (Kernels that read a learning rate from the device round it to
single precision.) The rest of the plan runs on its lanes' streams, which the capture forks from the gate and joins::

    gate             batch into its place, seeds ── replay ─────────────────────────── updates ──▶
                                                     └ gpu:0.compute: run … record ┐ ┘
                                                       gpu:1.copy_in: wait … copy  ┘

The first step of a size is issued without a graph, which warms libraries up and takes the buffers; the second one is
captured, if it comes from the same thread: libraries keep what they have for each.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from graphir.errors import RunError, SessionError
from graphir.ir.calls import Argument, Bound
from graphir.ir.device import Device
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan
from graphir.ir.seeds import mix
from graphir.ir.size import Dims
from graphir.ir.text import operator_text

from ..codegen.handoffs import Handoffs, Handover
from ..codegen.statements import Statements
from ..codegen.values import Values
from ..codegen.writer import ThreadCode, Writer
from ..executor import Feedable, Setting
from ..executors.generated import Generated
from ..failures.faults import reason_of
from ..kernels.buffers import Buffer
from ..kernels.communication import spanned
from ..kernels.ctc import CTC
from ..kernels.optimizers import UPDATES
from ..kernels.sparse import SPARSE
from .codegen import StreamStatements, StreamWriter
from .executor import Cuda, Fence
from .streams import Graph, Machine

__all__ = ["CudaGraphs"]

_KEPT_GRAPHS: Final = 8
"""For how many sizes graphs are kept; each has memory of its own."""


class _Draw(NamedTuple):
    """A random operator's own generator, and what its seed is mixed from."""

    generator: torch.Generator
    replica: int
    seed: int


class _Captured(NamedTuple):
    """A graph, and what is around it.

    Attributes:
        graph: of the captured part.
        inputs: where it reads the step's inputs; None where it does not.
        outputs: those of the step that it makes, which every replay overwrites, by number.
        draws: whose generators are seeded before a replay.
        late: the function of the rest, with the values that the graph hands it.
        kept: what the graph uses and must outlive it.
    """

    graph: Graph
    inputs: list[Tensor | None]
    outputs: Mapping[int, Tensor]
    draws: Sequence[_Draw]
    late: Generated
    kept: object


class CudaGraphs(Cuda):
    """See :mod:`graphir.runtime.cuda.graphs`.

    Raises:
        SessionError: the plan's devices are not one GPU, or something else than an update needs the host.
    """

    def __init__(
        self,
        setting: Setting,
        threads: int | None = None,
        machine: Machine | None = None,
        places: Mapping[Device, torch.device] | None = None,
    ) -> None:
        self.late = late_instructions(setting.plan, places or setting.binding)
        apart = replace(setting, plan=_with_buffers_apart(setting.plan, self.late))
        super().__init__(apart, threads, machine=machine, places=places)
        self.warm: set[tuple[int, tuple[int, ...]]] = set()
        self.graphs: dict[tuple[int, ...], _Captured] = {}

    def run(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """One step; see :class:`.executor.Executor`."""
        key = tuple(dims.values())
        if key not in self.graphs:
            if (here := (threading.get_ident(), key)) not in self.warm:
                self.warm.add(here)
                return super().run(dims, inputs, step)
            if len(self.graphs) >= _KEPT_GRAPHS:
                self.forget(next(iter(self.graphs)))
            self.graphs[key] = self.between(dims, step, lambda: self.capture(dims, inputs, step))
        captured = self.graphs[key]
        return self.between(dims, step, lambda: self.replay(captured, dims, inputs, step))

    def start_anew(self) -> None:
        """Give receive buffers back, except those that graphs use; each size takes its own again before its capture."""
        super().start_anew()
        self.warm.clear()

    def replay(self, captured: _Captured, dims: Dims, inputs: Sequence[Feedable], step: int) -> Sequence[Tensor]:
        """Issue a captured step behind the gate."""
        self.machine.use(self.gate)
        for place, value in zip(captured.inputs, inputs, strict=True):
            if place is not None and isinstance(value, Tensor):
                spanned(place).copy_(spanned(value), non_blocking=True)
        for draw in captured.draws:
            draw.generator.manual_seed(mix(step, draw.replica, draw.seed))
        (function,), (code,) = captured.late.functions(dims), captured.late.threads
        try:
            captured.graph.replay()
            found = {**captured.outputs, **dict(zip(code.outputs, function(step, *_given(code, inputs)), strict=True))}
        except BaseException as e:
            self.settle()
            if not isinstance(e, Exception):
                raise
            error = captured.late.blame([e], dims, step)
            raise error from error.__cause__
        return [found[i] for i in range(len(found))]

    def capture(self, dims: Dims, inputs: Sequence[Feedable], step: int) -> _Captured:
        """Capture a step of these sizes; nothing of it is executed."""
        early, late, draws, slots = _generate(self)
        fence = Fence(self.machine, self.gate, list(self.lanes.streams.values()))
        taken = set(early.inputs)
        for draw in draws:
            draw.generator.manual_seed(mix(step, draw.replica, draw.seed))
        failure: Exception | None = None
        outputs: Sequence[Tensor] = ()
        try:
            self.machine.use(self.gate)
            static = [
                self.placed(value) if i in taken and isinstance(value, Tensor) else None
                for i, value in enumerate(inputs)
            ]
            with self.machine.capture(self.gate, [draw.generator for draw in draws]) as graph:
                try:
                    fence.fork()
                    outputs = early.bind(dims)(step, *[static[i] for i in early.inputs])
                except Exception as e:
                    failure = e
                finally:
                    self.machine.use(self.gate)
                    fence.join()  # otherwise torch's allocator would not learn that the capture is over
        except Exception as e:
            failure = failure or e
        if failure is not None:
            raise self.refusal(early, failure, dims, step) from failure
        kept = (slots, [buffer.room for buffer in self.buffers.values()], fence)  # a larger size takes other rooms
        return _Captured(
            graph, static, dict(zip(early.outputs, outputs, strict=True)), draws, Generated(self.setting, [late]), kept
        )

    def placed(self, value: Tensor) -> Tensor:
        """Memory of the gate's stream with the geometry of an input, into which each replay's input is copied."""
        return Buffer(lambda nbytes: self.machine.empty(nbytes, self.gate.device)).receive(value)

    def refusal(self, code: ThreadCode, failure: Exception, dims: Dims, step: int) -> RunError:
        """The error for what cannot be captured."""
        error = Generated(self.setting, [code]).blame([failure], dims, step)
        return RunError(
            f"the step cannot be captured as a CUDA graph: {reason_of(failure)}",
            at=error.at,
            where=f"plan {self.setting.plan.name!r}, step {step}",
            fix="make the session with cuda_graph=False",
        )

    def forget(self, key: tuple[int, ...]) -> None:
        """Give a graph's memory back."""
        self.settle()
        self.graphs.pop(key).graph.reset()

    def close(self) -> None:
        """Give every graph's memory back, too."""
        for key in list(self.graphs):
            self.forget(key)
        super().close()


def _given(code: ThreadCode, inputs: Sequence[Feedable]) -> list[Feedable]:
    return [inputs[i] for i in code.inputs]


def late_instructions(plan: Plan, places: Mapping[Device, torch.device]) -> frozenset[int]:
    """The positions of what a graph leaves out: updates, what depends on them, and the frees of what they use.

    Raises:
        SessionError: the devices are not one GPU, or something that is no update needs the host.
    """
    net, where = plan.step, f"plan {plan.name!r}"
    fix = "bind all devices to one GPU, or make the session with cuda_graph=False"
    used = {places[net.blobs[name].device] for op in net.ops for name in op.outputs if op.type not in UPDATES}
    gpus = sorted(str(place) for place in used if place.type == "cuda")
    if len(gpus) != 1:
        raise SessionError(
            f"cuda_graph=True: a graph is of one GPU, the plan is on {', '.join(gpus) or 'none'}", where=where, fix=fix
        )
    late, touched, written = set[int](), set[str](), set[str]()
    for position, instruction in enumerate(plan.instructions):
        if instruction.kind == "free" and instruction.storage in touched:
            late.add(position)
        if instruction.op < 0:
            continue
        op = net.ops[instruction.op]
        reads = {net.blobs[name].storage for name in op.inputs}
        views = op.effects.viewing
        writes = {net.blobs[name].storage for i, name in enumerate(op.outputs) if i not in views}
        on_host = any(places[net.blobs[name].device].type == "cpu" for name in (*op.inputs, *op.outputs))
        on_host |= (
            op.type in SPARSE or op.type in CTC
        )  # the host asks how many rows are there, or how long sequences are
        if not (on_host or op.type in UPDATES or reads & written or writes & touched):
            continue
        if op.phase != "update":
            raise SessionError(
                "cuda_graph=True: an operator that is no update needs the host, or comes after one",
                at=operator_text(op, net),
                where=where,
                fix="make the session with cuda_graph=False",
            )
        late.add(position)
        touched |= reads | writes
        written |= writes
    return frozenset(late)


def _with_buffers_apart(plan: Plan, late: Collection[int]) -> Plan:
    """The plan in which copies that the late instructions read have receive buffers of their own: the graph would fill
    shared ones again before these run."""
    ops = [plan.step.ops[plan.instructions[position].op] for position in late if plan.instructions[position].op >= 0]
    read = {plan.step.blobs[name].storage for op in ops for name in op.inputs}
    return plan.with_(buffers={storage: number for storage, number in plan.buffers.items() if storage not in read})


class _Early(StreamStatements):
    """The statements of what is captured: every random operator has a generator of its own, seeded from outside."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.draws: list[_Draw] = []

    def seed(self, op: Operator) -> list[str]:
        assert op.seed is not None
        generator = torch.Generator(self.setting.binding[op.device])
        self.draws.append(_Draw(generator, self.setting.replica(op), op.seed))
        return []

    def argument(self, op: Operator, argument: Argument, inputs: Sequence[str]) -> str:
        if argument is Bound.GENERATOR:
            return self.writer.bind(self.draws[-1].generator, "g")
        return super().argument(op, argument, inputs)


class _Late(Statements):
    """The statements of the rest."""

    def __init__(self, *args: Any, places: Mapping[Device, torch.device]) -> None:
        super().__init__(*args)
        self.places = places

    def buffer_of(self, storage: str) -> Buffer | None:
        """None on the host, which reads at once what it copies: a buffer is still being filled by then."""
        on_host = self.places[self.net.blobs[storage].device].type == "cpu"
        return None if on_host else super().buffer_of(storage)


def _generate(executor: CudaGraphs) -> tuple[ThreadCode, ThreadCode, Sequence[_Draw], list[Tensor | None]]:
    """The function to capture and the one of the rest, which finds the first one's values in the slots."""
    setting, plan = executor.setting, executor.setting.plan
    moved = [
        instruction._replace(lane="late") if position in executor.late else instruction
        for position, instruction in enumerate(plan.instructions)
    ]
    thread = {**dict.fromkeys(plan.lanes, 0), "late": 1}
    values = Values(replace(setting, plan=plan.with_(instructions=tuple(moved))), thread)
    handover = Handover(Handoffs(0, {}, {}), (), (), [])
    first = StreamWriter(values.kept, plan, executor.lanes)
    early = _Early(setting, first, values, executor.lanes, executor.buffers, handover=handover)
    then = Writer(values.kept)
    late = _Late(setting, then, values, handover, 1, executor.buffers, places=executor.places)
    for position, instruction in enumerate(plan.instructions):
        (late if position in executor.late else early).add(position, instruction)
    early.finish()
    late.flush()
    for index, name in enumerate(plan.step.external_outputs):
        owner, variable = values.last(name)
        (then if owner else first).returns(index, variable)
    return first.finish(), then.finish(), early.draws, handover.values
