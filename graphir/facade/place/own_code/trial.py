"""Trials of a call of a module's own code, with numbers that are drawn."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor

from ...plan_cache import ModuleGuard
from ...plan_cache.inventory import is_same
from .call import OwnCall, others_of, storages

__all__ = ["Meta", "Trial", "checked", "leaves_beyond", "reached", "tried"]

_LONGEST: Final = 120
"""Seconds after which a trial is taken to wait for the thread that waits for it."""


class Meta(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, place: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=place)

    def drawn(self, place: torch.device, whole: int) -> Tensor:
        """Numbers as they may be; *whole* is the one for integers and bools, which may be positions or lengths."""
        made = self.empty(place).fill_(whole)
        if made.is_floating_point():
            made.copy_(torch.randn(self.shape, generator=torch.Generator().manual_seed(0)))
        return made

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A tensor that lies as this one does.

        Raises:
            RuntimeError: it has another shape or element type.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise RuntimeError(f"a result is {tensor.dtype} of shape {list(tensor.shape)}, not {list(self.shape)}")
        return tensor if tensor.stride() == self.strides else self.empty(tensor.device).copy_(tensor)


class Trial(NamedTuple):
    """What a call returns of some numbers.

    Attributes:
        outputs: its tensors.
        needing: the positions of those among them that need a gradient.
        reached: the positions of the operands that these come from.
        gradients: by position, the gradients of those that have one.
        drew: whether the call drew random numbers.
        leaves: the leaves of the output, with :data:`.call.TENSOR` for each tensor.
        spec: how these are put together.
    """

    outputs: tuple[Meta, ...]
    needing: tuple[int, ...]
    reached: tuple[int, ...]
    gradients: Mapping[int, Meta]
    drew: bool
    leaves: tuple[Any, ...]
    spec: Any

    def is_like(self, other: Trial) -> bool:
        """Whether two trials differ in sizes alone."""
        mine, theirs = self._traits(), other._traits()
        return mine == theirs and is_same(self.leaves, other.leaves)

    def _traits(self) -> object:
        dtypes = [(meta.dtype, len(meta.shape)) for meta in self.outputs]
        return dtypes, self.needing, self.reached, list(self.gradients), self.drew, self.spec


def tried(
    call: OwnCall, double: torch.nn.Module, operands: Sequence[Tensor], came: Sequence[int] | None = None
) -> Trial:
    """Try a call of a copy twice with numbers that are drawn, in another thread, where nothing is recorded and torch's
    functions are its own; with a backward of the outputs for which gradients *came*, by default all that need one.

    Raises:
        RuntimeError: the code does what no operator does.
        Exception: of the code.
    """
    return _in_another_thread(lambda: _tried_with_some(call, double, operands, came))


def _in_another_thread(function: Callable[[], Trial]) -> Trial:
    """What a function returns in a thread of its own; one that never ends does not keep the process from its end."""
    done: SimpleQueue[tuple[Trial | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((function(), None))
        except Exception as e:
            done.put((None, e))

    threading.Thread(target=run, name="graphir trial", daemon=True).start()
    try:
        found, error = done.get(timeout=_LONGEST)
    except Empty:
        raise RuntimeError(
            f"a trial of it in another thread has not ended after {_LONGEST} s: does it wait for a lock that this "
            "thread holds?"
        ) from None
    if error is not None:
        raise error
    assert found is not None
    return found


def _tried_with_some(
    call: OwnCall, double: torch.nn.Module, operands: Sequence[Tensor], came: Sequence[int] | None
) -> Trial:
    try:
        return _tried_twice(call, double, operands, came, 0)
    except Exception as e:
        if all(t.is_floating_point() for t in operands):
            raise
        error = e.with_traceback(None)  # whose frames would keep a graph
    with contextlib.suppress(Exception):  # lengths are no zeros
        return _tried_twice(call, double, operands, came, 1)
    raise error


def _tried_twice(
    call: OwnCall, double: torch.nn.Module, operands: Sequence[Tensor], came: Sequence[int] | None, whole: int
) -> Trial:
    places = list(dict.fromkeys([t.device for t in operands]))
    if len(places) != 1:
        raise RuntimeError("it has operands on several devices" if places else "it has no operands")
    before = ModuleGuard({"": double}, in_place=True)
    for name in before.moving():
        raise RuntimeError(f"it has a generator or iterator of its own, {name!r}")
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        first, values, probes = _tried(call, double, operands, before.plain, came, whole, 0)
        for changed in ModuleGuard({"": double}, in_place=True).changes_to(before):
            if not changed.attribute.startswith("Module."):  # torch.compile changes torch's own class
                raise RuntimeError(f"it changes {changed.attribute!r} of the module")
        if _are_there(probes):
            raise RuntimeError("something beside its outputs keeps its graph: a global, a closure, or an attribute")
        # With another seed, too, what does not draw returns the same.
        second, others, _ = _tried(call, double, operands, before.plain, came, whole, 0 if first.drew else 1)
    same = len(values) == len(others) and all(map(_equal, values, others))
    if not same or not first.is_like(second):
        raise RuntimeError("two calls with the same numbers return other things")
    return first


def _tried(
    call: OwnCall,
    double: torch.nn.Module,
    operands: Sequence[Tensor],
    plain: Sequence[Tensor],
    came: Sequence[int] | None,
    whole: int,
    seed: int,
) -> tuple[Trial, list[Tensor], list[weakref.ref[_Probe]]]:
    place = operands[0].device
    state = [*double.parameters(), *double.buffers()]
    with torch.set_grad_enabled(call.grads):
        given = [Meta.of(t).drawn(place, whole) for t in operands]
        with torch.no_grad():
            for tensor, numbers in zip(state, given[call.given :], strict=True):
                tensor.copy_(numbers)
        arguments = call.leaves(given)
        known = [*arguments, *state]
        kept, numbers_before = [*known, *plain], [t.detach().clone() for t in (*known, *plain)]
        probes, accumulating = _probes([known[i] for i in call.graded])
        torch.manual_seed(seed)
        states = _random_states(place)
        leaves, spec = call(double, arguments, None)
        del accumulating
        drew = not _same_states(states, place)
        if call.grads and any(t.requires_grad != (i in call.graded) for i, t in enumerate(known)):
            raise RuntimeError("it sets requires_grad of a parameter or a buffer")
        outputs = checked(known, leaves, storages(plain))
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        came_from = reached([outputs[i] for i in needing], known)
        wanted = needing if came is None else came
        ones = [torch.ones_like(outputs[i]) for i in wanted]
        graded = [known[i] for i in call.graded]
        found: Sequence[Tensor | None] = ()
        if wanted and graded:
            found = torch.autograd.grad([outputs[i] for i in wanted], graded, ones, allow_unused=True)
        if not all(map(_equal, kept, numbers_before)):
            raise RuntimeError("it overwrites an argument, a parameter, a buffer, or another tensor of its own")
    if any(t is not None and t.layout != torch.strided for t in found):
        raise RuntimeError("a gradient of it has no strides")
    gradients = {i: Meta.of(t) for i, t in zip(call.graded, found, strict=False) if t is not None}
    if any(vars(t) for t in outputs):
        raise RuntimeError("it sets an attribute of a tensor that it returns")
    values, others = [t.detach() for t in outputs], others_of(leaves)
    del leaves, outputs
    trial = Trial(tuple(map(Meta.of, values)), needing, came_from, gradients, drew, others, spec)
    return trial, values, probes


class _Probe:
    """Is there as long as a node of autograd is."""


def _are_there(probes: Sequence[weakref.ref[_Probe]]) -> bool:
    if any(probe() is not None for probe in probes):
        gc.collect()
    return any(probe() is not None for probe in probes)


def _probes(graded: Sequence[Tensor]) -> tuple[list[weakref.ref[_Probe]], list[Any]]:
    """For each tensor that needs a gradient what tells whether a graph leads to it; and the nodes at these ends, which
    a graph takes as long as they are there."""
    probes, nodes = [], []
    for tensor in graded:
        node: Any = torch.autograd.graph.get_gradient_edge(tensor).node
        probe = node.metadata["graphir"] = _Probe()
        probes.append(weakref.ref(probe))
        nodes.append(node)
    return probes, nodes


def _random_states(place: torch.device) -> list[Any]:
    """The states of the generators that code may draw from without being given one."""
    cards = [torch.cuda.get_rng_state(place)] if place.type == "cuda" else []
    numbers = numpy.random.get_state(legacy=False)["state"]
    return [torch.get_rng_state(), *cards, numbers["key"].tobytes(), numbers["pos"], random.getstate()]


def _same_states(before: Sequence[Any], place: torch.device) -> bool:
    """Whether the generators have the states of :func:`_random_states` before."""
    pairs = zip(before, _random_states(place), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def checked(known: Sequence[Tensor], leaves: Sequence[Any], others: set[int]) -> list[Tensor]:
    """The tensors among the leaves that a call has returned.

    Args:
        known: what its code was given, and the module's parameters and buffers.
        leaves: what it has returned.
        others: the memory of other tensors that the module has.

    Raises:
        RuntimeError: it has done something else than to compute these.
    """
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not outputs:
        raise RuntimeError("it returns no tensor, in what torch's pytree knows")
    if any(t.layout != torch.strided for t in outputs):
        raise RuntimeError("it returns a tensor that has no strides")
    taken = storages(known) | others
    for output in outputs:
        if (storage := output.untyped_storage()._cdata) in taken:
            raise RuntimeError("it returns an argument, a tensor of its own, or one tensor twice, or a view of these")
        taken.add(storage)
    return outputs


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal numbers, or none at the same places."""
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def reached(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of the operands that autograd comes to from outputs.

    Raises:
        RuntimeError: it comes to other tensors, too.
    """
    if leaves_beyond(outputs, operands):
        raise RuntimeError("a gradient of it goes to a tensor that is neither an argument nor its own")
    found = {id(t) for t in (*outputs, *_leaves_of(outputs))}
    return tuple([i for i, t in enumerate(operands) if id(t) in found])


def leaves_beyond(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that autograd comes to from outputs, and that are no operands."""
    known = set(map(id, operands))
    return [leaf for leaf in _leaves_of(outputs) if id(leaf) not in known]


def _leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that autograd comes to from outputs."""
    found = []
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return found
