"""A module's own code as an operator, and as another one its backward.

The operator computes what the code computes, and does nothing else: what the code changes beside its outputs would be
changed twice, since the backward runs the code once more. Trials find what cannot be an operator; what a trial has not
shown, a call finds, which fails then before anybody has its outputs.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ...ir.registration import register_operator
from ..plan_cache import ModuleGuard
from ..plan_cache.inventory import VALUES, is_same

__all__ = ["NAMESPACE", "OwnCall", "OwnCode", "Trial", "read_own_call", "tried"]

NAMESPACE: Final = "placed."
"""What the types of such operators begin with."""

_SEEDS: Final = 2**62
_TENSOR: Final = object()
"""Stands for a tensor among the leaves of arguments and outputs."""

_numbers: Final = itertools.count()


class OwnCall(NamedTuple):
    """A kind of call of a module's own code.

    Attributes:
        module: itself.
        spec: how its arguments are put together.
        others: the leaves of these, with :data:`_TENSOR` for each tensor.
        state: the names of its parameters, and of its buffers.
        buffers: how many these are; the code has copies of them.
        graded: the positions of the operands that need a gradient; operands are the tensors among the arguments, and
            the state.
        grads: whether gradients are computed.
        modes: which of its modules are in training.
        kind: of the device.
        cast: the element type of autocast; None without.
        key: equal for calls that one operator may stand for.
    """

    module: Callable[[], torch.nn.Module | None]
    spec: Any
    others: tuple[Any, ...]
    state: tuple[str, ...]
    buffers: int
    graded: tuple[int, ...]
    grads: bool
    modes: tuple[bool, ...]
    kind: str
    cast: torch.dtype | None
    key: Hashable

    def __call__(self, operands: Sequence[Tensor], seed: Tensor | None) -> tuple[list[Any], Any]:
        """What the module returns, as leaves, and how these are put together.

        Raises:
            RuntimeError: the code changes a list, a dict, a buffer or a parameter.
        """
        module = self.module()
        if module is None:
            raise RuntimeError("the module is gone")
        tensors = iter(operands)
        leaves = [next(tensors) if other is _TENSOR else other for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        state = {f"module.{name}": tensor for name, tensor in zip(self.state, tensors, strict=True)}
        cast = torch.autocast(self.kind, self.cast or torch.bfloat16, self.cast is not None, cache_enabled=False)
        cards = [operands[0].device] if self.kind == "cuda" else []
        with cast, _in_modes(module, self.modes), torch.random.fork_rng(cards, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(int(seed))
            output = functional_call(_Alone(module), state, args, kwargs)
        after, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise RuntimeError("it changes a list or dict that it is given")
        return pytree.tree_flatten(output)

    def leaves(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands without their history."""
        own = len(operands) - self.buffers
        plain = [t.detach() if i < own else t.detach().clone() for i, t in enumerate(operands)]
        return [t.requires_grad_(i in self.graded) for i, t in enumerate(plain)]


def read_own_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OwnCall, list[Tensor]]:
    """A call of a module, and its operands."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    others = _others(leaves)
    buffers = dict(module.named_buffers())
    state = {**dict(module.named_parameters()), **buffers}
    operands = [*[leaf for leaf in leaves if isinstance(leaf, Tensor)], *state.values()]
    kind = operands[0].device.type if operands else "cpu"
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grads = torch.is_grad_enabled()
    graded = tuple([i for i, t in enumerate(operands) if grads and t.requires_grad])
    modes = tuple([inner.training for inner in module.modules()])
    # The call keeps each object that is no value: no other object comes by the object's id.
    told = tuple([(type(o), repr(o)) if isinstance(o, VALUES) else id(o) for o in others])
    traits = tuple([(t.dtype, t.dim()) for t in operands])
    key = (spec, told, tuple(state), graded, grads, modes, kind, cast, traits)
    call = OwnCall(weakref.ref(module), spec, others, tuple(state), len(buffers), graded, grads, modes, kind, cast, key)
    return call, operands


def _others(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves, with :data:`_TENSOR` for each tensor."""
    return tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])


@contextlib.contextmanager
def _in_modes(module: torch.nn.Module, modes: Sequence[bool]) -> Iterator[None]:
    """While this is active, modules are in training as they were in a call."""
    modules = list(module.modules())
    before = [inner.training for inner in modules]
    if before == list(modes):
        yield
        return
    try:
        for inner, mode in zip(modules, modes, strict=True):
            inner.training = mode
        yield
    finally:
        for inner, mode in zip(modules, before, strict=True):
            inner.training = mode


def _recorded() -> AbstractContextManager[Any]:
    """While this is active, autograd records: an operator with a gradient is called below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


class _Alone(torch.nn.Module):
    """A module's own ``forward``, without its hooks, which are called around the operator."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = [*self.module.buffers(), *self.module.parameters()]
        found = type(self.module).forward(self.module, *args, **kwargs)
        now = [*self.module.buffers(), *self.module.parameters()]
        if len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True)):
            raise RuntimeError("it puts another tensor in the place of a buffer or parameter")
        return found


class _Meta(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, place: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=place)

    def drawn(self, place: torch.device) -> Tensor:
        """Numbers as they may be: whole ones are zero, as they may be positions."""
        made = self.empty(place).zero_()
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
        leaves: the leaves of the output, with :data:`_TENSOR` for each tensor.
        spec: how these are put together.
    """

    outputs: tuple[_Meta, ...]
    needing: tuple[int, ...]
    reached: tuple[int, ...]
    gradients: Mapping[int, _Meta]
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


def tried(call: OwnCall, operands: Sequence[Tensor], came: Sequence[int] | None = None) -> Trial:
    """Try a call twice with numbers that are drawn, in another thread, where nothing is recorded and torch's functions
    are its own; with a backward of the outputs for which gradients *came*, by default all that need one.

    Raises:
        RuntimeError: the code does what no operator does.
        Exception: of the code.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried_twice, call, operands, came).result()


def _tried_twice(call: OwnCall, operands: Sequence[Tensor], came: Sequence[int] | None) -> Trial:
    places = list(dict.fromkeys([t.device for t in operands]))
    if len(places) != 1:
        raise RuntimeError("it has operands on several devices" if places else "it has no operands")
    module = call.module()
    assert module is not None
    before = ModuleGuard({"": module})
    versions = _versions(before.plain)
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        first, values = _tried(call, operands, places[0], came, 0)
        changed = next(ModuleGuard({"": module}).changes_to(before), None)
        if changed is not None:
            raise RuntimeError(f"it changes {changed.attribute!r} of the module")
        if _versions(before.plain) != versions:
            raise RuntimeError("it overwrites a tensor that is neither parameter nor buffer")
        # With another seed, too, what does not draw returns the same.
        second, others = _tried(call, operands, places[0], came, 0 if first.drew else 1)
    same = len(values) == len(others) and all(map(_equal, values, others))
    if not same or not first.is_like(second):
        raise RuntimeError("two calls with the same numbers return other things")
    return first


def _tried(
    call: OwnCall, operands: Sequence[Tensor], place: torch.device, came: Sequence[int] | None, seed: int
) -> tuple[Trial, list[Tensor]]:
    with torch.set_grad_enabled(call.grads):
        given = [_Meta.of(t).drawn(place) for t in operands]
        drawn = call.leaves(given)
        # A leaf cannot be overwritten; that this can, and was, its version says.
        inner = [torch.ops.aten.alias(t) if t.requires_grad else t for t in drawn]
        before, numbers = _versions(inner), [t.clone() for t in given]
        torch.manual_seed(seed)
        states = _random_states(place)
        leaves, spec = call(inner, None)
        drew = not _same_states(states, place)
        if _versions(inner) != before or not all(map(_equal, given, numbers)):
            raise RuntimeError("it overwrites an argument or a buffer")
        outputs = _checked(call, drawn, given, leaves)
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        reached = _reached([outputs[i] for i in needing], drawn)
        wanted = needing if came is None else came
        ones = [torch.ones_like(outputs[i]) for i in wanted]
        found = _gradients(call, drawn, [outputs[i] for i in wanted], ones) if wanted and call.graded else []
    if any(t is not None and t.layout != torch.strided for t in found):
        raise RuntimeError("a gradient of it has no strides")
    gradients = {i: _Meta.of(t) for i, t in zip(call.graded, found, strict=False) if t is not None}
    values = [t.detach() for t in outputs]
    return Trial(tuple(map(_Meta.of, values)), needing, reached, gradients, drew, _others(leaves), spec), values


def _random_states(place: torch.device) -> list[Any]:
    """The states of the generators that code may draw from without being given one."""
    cards = [torch.cuda.get_rng_state(place)] if place.type == "cuda" else []
    numbers = numpy.random.get_state(legacy=False)["state"]
    return [torch.get_rng_state(), *cards, numbers["key"].tobytes(), numbers["pos"], random.getstate()]


def _same_states(before: Sequence[Any], place: torch.device) -> bool:
    pairs = zip(before, _random_states(place), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _gradients(
    call: OwnCall, operands: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the operands that need one; None for those that the outputs do not come from."""
    graded = [operands[i] for i in call.graded]
    return torch.autograd.grad(outputs, graded, given, allow_unused=True)


def _checked(call: OwnCall, operands: Sequence[Tensor], given: Sequence[Tensor], leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors among the leaves that a call has returned.

    Args:
        call: itself.
        operands: the leaves of what its code was given.
        given: the same before buffers were copied.
        leaves: what it has returned.

    Raises:
        RuntimeError: it has done something else than to compute these.
    """
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not outputs:
        raise RuntimeError("it returns no tensor")
    if any(t.layout != torch.strided for t in outputs):
        raise RuntimeError("it returns a tensor that has no strides")
    known = {t.untyped_storage()._cdata for t in operands}
    for output in outputs:
        if (storage := output.untyped_storage()._cdata) in known:
            raise RuntimeError("it returns an argument, a tensor of its own, or one tensor twice, or a view of these")
        known.add(storage)
    if any(t.grad is not None for t in operands):
        raise RuntimeError("it makes gradients of its own")
    own = len(operands) - call.buffers
    if any(not _equal(a, b) for a, b in zip(operands[own:], given[own:], strict=True)):
        raise RuntimeError("it overwrites an argument or a buffer")
    return outputs


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal numbers, or none at the same places."""
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [t._version for t in tensors if not t.is_inference()]


def _reached(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of the operands that autograd comes to from outputs.

    Raises:
        RuntimeError: it comes to other tensors, too.
    """
    positions = {id(t): i for i, t in enumerate(operands)}
    found = {positions[id(t)] for t in outputs if id(t) in positions}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) not in positions:
                raise RuntimeError("a gradient of it goes to a tensor that is neither an argument nor its own")
            found.add(positions[id(leaf)])
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return tuple(sorted(found))


class OwnCode:
    """A kind of call as an operator, and as another one its backward.

    Args:
        name: of the module's class.
        call: what is called.
        trial: of one such call.
        count: how many operands it has.

    Attributes:
        double: in whose place of the module trials are made, while the module is captured.
    """

    def __init__(self, name: str, call: OwnCall, trial: Trial, count: int) -> None:
        self._call, self._first = call, trial
        self.double: torch.nn.Module | None = None
        self._trials: dict[object, Trial] = {}
        self._backwards: dict[tuple[int, ...], Any] = {}
        self._name = f"placed::{name}_{next(_numbers)}"
        self._operands = [*(["seed"] if trial.drew else []), *[f"a{i}" for i in range(count)]]
        schema = _schema(self._name, self._operands, len(trial.outputs))
        self._forward = register_operator(schema, kernel=self._run, fake=self._like_outputs)
        if trial.gradients:
            torch.library.register_autograd(self._name, self._derive, setup_context=_keep)

    def __call__(self, operands: Sequence[Tensor], trial: Trial) -> Any:
        """What the module returns, in a capture.

        Raises:
            RuntimeError: what it returns depends on sizes, and not by its sizes alone.
        """
        if not trial.is_like(self._first):
            raise RuntimeError("what it returns depends on sizes, and not by sizes alone")
        self._trials[tuple(map(_Meta.of, operands)), self._first.needing] = trial
        seed = [torch.randint(_SEEDS, (), device=operands[0].device)] if trial.drew else []
        found = self._forward(*seed, *operands)
        tensors = [found] if isinstance(found, Tensor) else found
        needing = trial.needing if trial.gradients else ()
        given = iter([t if i in needing else t.detach() for i, t in enumerate(tensors)])
        return pytree.tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in trial.leaves], trial.spec)

    def _trial(self, operands: Sequence[Tensor], came: tuple[int, ...] | None = None) -> Trial:
        """The trial of operands of these sizes, with a backward of the outputs for which gradients *came*."""
        came = self._first.needing if came is None else came
        key = tuple(map(_Meta.of, operands)), came
        if key not in self._trials:
            double = self.double
            call = self._call if double is None else self._call._replace(module=lambda: double)
            self._trials[key] = tried(call, operands, came)
        return self._trials[key]

    def _like_outputs(self, *given: Tensor) -> Any:
        operands = self._taken(given)[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).outputs])

    def _like_gradients(self, came: tuple[int, ...], *given: Tensor) -> Any:
        operands = self._taken(given[len(came) :])[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands, came).gradients.values()])

    def _backward(self, came: tuple[int, ...], trial: Trial) -> Any:
        """The operator of a backward of some outputs."""
        if came not in self._backwards:
            name = f"{self._name}_backward{''.join([f'_{i}' for i in came])}"
            schema = _schema(name, [*[f"g{i}" for i in came], *self._operands], len(trial.gradients))
            self._backwards[came] = register_operator(
                schema, kernel=partial(self._run_back, came), fake=partial(self._like_gradients, came)
            )
        return self._backwards[came]

    def _run(self, *given: Tensor) -> Any:
        """The kernel of the forward."""
        seed, operands = self._taken(given)
        trial = self._trial(operands)
        with _recorded(), torch.set_grad_enabled(self._call.grads):  # kernels may be others without
            outputs = self._returned(self._call.leaves(operands), operands, seed)
        return _one_or_all([meta.laid_out(t.detach()) for meta, t in zip(trial.outputs, outputs, strict=True)])

    def _run_back(self, came: tuple[int, ...], *given: Tensor) -> Any:
        """The kernel of a backward."""
        seed, operands = self._taken(given[len(came) :])
        trial = self._trial(operands, came)
        with _recorded(), torch.enable_grad():
            inner = self._call.leaves(operands)
            outputs = self._returned(inner, operands, seed)
            found = _gradients(self._call, inner, [outputs[i] for i in came], given[: len(came)])
        made = {i: t for i, t in zip(self._call.graded, found, strict=True) if t is not None}
        if made.keys() != trial.gradients.keys():
            raise RuntimeError(
                "the backward of a module's own code has gradients for other tensors than when it was tried"
            )
        return _one_or_all([meta.laid_out(made[i]) for i, meta in trial.gradients.items()])

    def _returned(self, inner: Sequence[Tensor], operands: Sequence[Tensor], seed: Tensor | None) -> list[Tensor]:
        """The tensors that the module returns.

        Raises:
            RuntimeError: it does, or returns, something else than in its trial.
        """
        first, place = self._first, operands[0].device
        before, states = _versions(inner), _random_states(place)
        leaves, _ = self._call(inner, seed)
        if _versions(inner) != before:
            raise RuntimeError("it overwrites an argument or a buffer")
        if not _same_states(states, place):
            raise RuntimeError("it draws random numbers, as it did not when it was tried")
        if not is_same(_others(leaves), first.leaves):
            raise RuntimeError("it returns other things that are no tensors than when it was tried")
        outputs = _checked(self._call, inner, operands, leaves)
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        reached = _reached([outputs[i] for i in needing], inner)
        if self._call.graded and (needing != first.needing or reached != first.reached):
            raise RuntimeError("gradients of it go to other operands than when it was tried")
        return outputs

    def _taken(self, given: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        return (given[0], given[1:]) if self._first.drew else (None, given)

    def _derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd calls in a capture."""
        operands = ctx.saved_tensors
        seed, own = self._taken(operands)
        came = tuple([i for i in self._first.needing if grads[i] is not None])
        made: Mapping[int, Tensor] = {}
        if came and (trial := self._trial(own, came)).gradients:
            found = self._backward(came, trial)(*[grads[i] for i in came], *operands)
            made = dict(zip(trial.gradients, [found] if isinstance(found, Tensor) else found, strict=True))
        return (*([] if seed is None else [None]), *[made.get(i) for i in range(len(own))])


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _schema(name: str, taken: Sequence[str], count: int) -> str:
    operands = ", ".join([f"Tensor {operand}" for operand in taken])
    results = ", ".join(["Tensor"] * count)
    return f"{name}({operands}) -> {results if count == 1 else f'({results})'}"


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
