"""A module's own code as an operator, and as another one its backward.

The operator computes what the code computes, and does nothing else: what the code changes beside its outputs would be
changed twice, since the backward runs the code once more. Trials find what cannot be an operator; what a trial has not
shown, a call finds, which fails then before anybody has its outputs.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ...ir.registration import register_operator
from ..plan_cache.guard import ModuleGuard
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
            RuntimeError: it overwrites a buffer.
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
            return pytree.tree_flatten(functional_call(_Alone(module), state, args, kwargs))

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
    others = tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    buffers = dict(module.named_buffers())
    state = {**dict(module.named_parameters()), **buffers}
    operands = [*[leaf for leaf in leaves if isinstance(leaf, Tensor)], *state.values()]
    kind = operands[0].device.type if operands else "cpu"
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grads = torch.is_grad_enabled()
    graded = tuple([i for i, t in enumerate(operands) if grads and t.requires_grad])
    modes = tuple([inner.training for inner in module.modules()])
    # What is no value is itself; the call keeps it, so that no other object comes by its id.
    told = tuple([(type(o), repr(o)) if isinstance(o, VALUES) else id(o) for o in others])
    traits = tuple([(t.dtype, t.dim()) for t in operands])
    key = (spec, told, tuple(state), graded, grads, modes, kind, cast, traits)
    call = OwnCall(weakref.ref(module), spec, others, tuple(state), len(buffers), graded, grads, modes, kind, cast, key)
    return call, operands


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


def tried(call: OwnCall, operands: Sequence[Tensor]) -> Trial:
    """Try a call twice with numbers that are drawn, in another thread, where nothing is recorded and torch's functions
    are its own.

    Raises:
        RuntimeError: the code does what no operator does.
        Exception: of the code.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried_twice, call, operands).result()


def _tried_twice(call: OwnCall, operands: Sequence[Tensor]) -> Trial:
    places = list(dict.fromkeys([t.device for t in operands]))
    if len(places) != 1:
        raise RuntimeError("it has operands on several devices" if places else "it has no operands")
    module = call.module()
    assert module is not None
    before = ModuleGuard({"": module})
    versions = [t._version for t in before.plain]
    with torch.random.fork_rng([place for place in places if place.type == "cuda"]):
        first, values = _tried(call, operands, places[0])
        changed = next(ModuleGuard({"": module}).changes_to(before), None)
        if changed is not None:
            raise RuntimeError(f"it changes {changed.attribute!r} of the module")
        if [t._version for t in before.plain] != versions:
            raise RuntimeError("it overwrites a tensor that is neither parameter nor buffer")
        second, others = _tried(call, operands, places[0])
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(values, others, strict=True))
    if not same or not first.is_like(second):
        raise RuntimeError("two calls with the same numbers return other things")
    return first


def _tried(call: OwnCall, operands: Sequence[Tensor], place: torch.device) -> tuple[Trial, list[Tensor]]:
    with torch.set_grad_enabled(call.grads):
        drawn = call.leaves([_Meta.of(t).drawn(place) for t in operands])
        # A leaf cannot be overwritten; that this can, and was, its version says.
        inner = [torch.ops.aten.alias(t) if t.requires_grad else t for t in drawn]
        before = [t._version for t in inner]
        torch.manual_seed(0)
        states = _random_states(place)
        leaves, spec = call(inner, None)
        drew = any(not torch.equal(a, b) for a, b in zip(states, _random_states(place), strict=True))
        if [t._version for t in inner] != before:
            raise RuntimeError("it overwrites an argument or a buffer")
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not outputs:
            raise RuntimeError("it returns no tensor")
        if any(t.layout != torch.strided for t in outputs):
            raise RuntimeError("it returns a tensor that has no strides")
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        reached = _reached([outputs[i] for i in needing], drawn)
        given = [torch.zeros_like(outputs[i]) for i in needing]
        found = call_backward(call, drawn, [outputs[i] for i in needing], given) if needing else []
    if any(t is not None and t.layout != torch.strided for t in found):
        raise RuntimeError("a gradient of it has no strides")
    gradients = {i: _Meta.of(t) for i, t in zip(call.graded, found, strict=False) if t is not None}
    plain = tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    values = _apart(outputs, inner)
    metas = tuple(map(_Meta.of, values))
    return Trial(metas, needing, reached, gradients, drew, plain, spec), values


def _random_states(place: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(place)] if place.type == "cuda" else [])]


def call_backward(
    call: OwnCall, operands: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """The gradients of the operands that need one; None for those that the outputs do not come from."""
    graded = [operands[i] for i in call.graded]
    return torch.autograd.grad(outputs, graded, given, allow_unused=True)


def _reached(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[int, ...]:
    """The positions of the operands that autograd comes to from outputs."""
    positions = {id(t): i for i, t in enumerate(operands)}
    found = {positions[id(t)] for t in outputs if id(t) in positions}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    known = set(nodes)
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in positions:
            found.add(positions[id(leaf)])
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return tuple(sorted(found))


def _apart(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Outputs without history, each in memory of its own."""
    known = {t.untyped_storage()._cdata for t in operands}
    found = []
    for output in outputs:
        storage = output.untyped_storage()._cdata
        found.append(_copied(output.detach()) if storage in known else output.detach())
        known.add(storage)
    return found


def _copied(tensor: Tensor) -> Tensor:
    """A copy that lies as the tensor does."""
    if not tensor.numel():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.as_strided((span,), (1,)).clone()
    return whole.as_strided(tensor.shape, tensor.stride(), 0)


class OwnCode:
    """A kind of call as an operator, and as another one its backward.

    Args:
        name: of the module's class.
        call: what is called.
        trial: of one such call.
        count: how many operands it has.
    """

    def __init__(self, name: str, call: OwnCall, trial: Trial, count: int) -> None:
        self._call, self._first = call, trial
        self._trials: dict[tuple[_Meta, ...], Trial] = {}
        name = f"placed::{name}_{next(_numbers)}"
        taken = [*(["seed"] if trial.drew else []), *[f"a{i}" for i in range(count)]]
        schema = _schema(name, taken, len(trial.outputs))
        self._forward = register_operator(schema, kernel=self._run, fake=self._like_outputs)
        if trial.gradients:
            gradients = [f"g{i}" for i in trial.needing]
            schema = _schema(f"{name}_backward", [*gradients, *taken], len(trial.gradients))
            self._backward = register_operator(schema, kernel=self._run_back, fake=self._like_gradients)
            torch.library.register_autograd(name, self._derive, setup_context=_keep)

    def __call__(self, operands: Sequence[Tensor], trial: Trial) -> Any:
        """What the module returns, in a capture.

        Raises:
            RuntimeError: what it returns depends on sizes, and not by its sizes alone.
        """
        if not trial.is_like(self._first):
            raise RuntimeError("what it returns depends on sizes, and not by sizes alone")
        self._trials[tuple(map(_Meta.of, operands))] = trial
        seed = [torch.randint(_SEEDS, (), device=operands[0].device)] if trial.drew else []
        found = self._forward(*seed, *operands)
        tensors = [found] if isinstance(found, Tensor) else found
        needing = trial.needing if trial.gradients else ()
        given = iter([t if i in needing else t.detach() for i, t in enumerate(tensors)])
        return pytree.tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in trial.leaves], trial.spec)

    def _trial(self, operands: Sequence[Tensor]) -> Trial:
        key = tuple(map(_Meta.of, operands))
        if key not in self._trials:
            self._trials[key] = tried(self._call, operands)
        return self._trials[key]

    def _like_outputs(self, *given: Tensor) -> Any:
        operands = self._taken(given)[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).outputs])

    def _like_gradients(self, *given: Tensor) -> Any:
        operands = self._taken(given[len(self._first.needing) :])[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).gradients.values()])

    def _run(self, *given: Tensor) -> Any:
        """The kernel of the forward."""
        seed, operands = self._taken(given)
        trial = self._trial(operands)
        with _recorded(), torch.set_grad_enabled(self._call.grads):  # kernels may be others without
            inner = self._call.leaves(operands)
            leaves = self._returned(inner, seed)
        outputs = _apart(leaves, inner)
        return _one_or_all([meta.laid_out(t) for meta, t in zip(trial.outputs, outputs, strict=True)])

    def _run_back(self, *given: Tensor) -> Any:
        """The kernel of the backward."""
        count = len(self._first.needing)
        seed, operands = self._taken(given[count:])
        trial = self._trial(operands)
        with _recorded(), torch.enable_grad():
            inner = self._call.leaves(operands)
            outputs = self._returned(inner, seed)
            found = call_backward(self._call, inner, [outputs[i] for i in self._first.needing], given[:count])
        by_position = dict(zip(self._call.graded, found, strict=True))
        return _one_or_all(
            [
                meta.empty(operands[i].device).zero_() if (t := by_position[i]) is None else meta.laid_out(t)
                for i, meta in trial.gradients.items()
            ]
        )

    def _returned(self, operands: Sequence[Tensor], seed: Tensor | None) -> list[Tensor]:
        """The tensors that the module returns.

        Raises:
            RuntimeError: it does, or returns, something else than in its trial.
        """
        first, place = self._first, operands[0].device
        before, states = [t._version for t in operands], _random_states(place)
        leaves, _ = self._call(operands, seed)
        if [t._version for t in operands] != before:
            raise RuntimeError("it overwrites an argument or a buffer")
        if any(not torch.equal(a, b) for a, b in zip(states, _random_states(place), strict=True)):
            raise RuntimeError("it draws random numbers, as it did not when it was tried")
        if not is_same(tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]), first.leaves):
            raise RuntimeError("it returns other things that are no tensors than when it was tried")
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        needing = [t for t in outputs if t.requires_grad]
        if self._call.graded and (
            [i for i, t in enumerate(outputs) if t.requires_grad] != list(first.needing)
            or _reached(needing, operands) != first.reached
        ):
            raise RuntimeError("gradients of it go to other operands than when it was tried")
        return outputs

    def _taken(self, given: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        return (given[0], given[1:]) if self._first.drew else (None, given)

    def _derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd calls in a capture."""
        operands = ctx.saved_tensors
        seed, own = self._taken(operands)
        trial = self._trial(own)
        wanted = [
            own[0].new_zeros(meta.shape, dtype=meta.dtype) if grads[i] is None else grads[i]
            for i, meta in enumerate(trial.outputs)
            if i in trial.needing
        ]
        found = self._backward(*wanted, *operands)
        made = dict(zip(trial.gradients, [found] if isinstance(found, Tensor) else found, strict=True))
        return (*([] if seed is None else [None]), *[made.get(i) for i in range(len(own))])


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _schema(name: str, taken: Sequence[str], count: int) -> str:
    operands = ", ".join([f"Tensor {operand}" for operand in taken])
    results = ", ".join(["Tensor"] * count)
    return f"{name}({operands}) -> {results if count == 1 else f'({results})'}"


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
