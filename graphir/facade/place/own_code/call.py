"""One kind of call of a module's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ...plan_cache.inventory import VALUES
from .writes import WritesRefused

__all__ = ["DRAWN_SEEDS", "TENSOR", "OwnCall", "others_of", "read_own_call", "seeded_alone"]

DRAWN_SEEDS: Final = 2**62
"""How many seeds there are, of which a call that draws is given one."""

TENSOR: Final = object()
"""Stands for a tensor among the leaves of arguments and outputs."""

_LISTS: Final = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent modules."""


class OwnCall(NamedTuple):
    """A kind of call of a module's own code.

    Attributes:
        module: itself.
        spec: how its arguments are put together.
        others: the leaves of these, with :data:`TENSOR` for each tensor.
        state: the names of its parameters, and of its buffers.
        buffers: how many these are; the code has copies of them.
        graded: the positions of the operands that need a gradient; operands are the tensors among the arguments, and
            the state.
        grads: whether gradients are computed.
        modes: which of its modules are in training.
        kind: of the device.
        cast: the element type of autocast; None without.
        key: equal for calls that one operator may stand for.
        loose: likewise but for the objects among the arguments, of which the class counts here.
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
    loose: Hashable

    def __call__(
        self, operands: Sequence[Tensor], seed: Tensor | None, plain: Iterable[Tensor]
    ) -> tuple[list[Any], Any]:
        """What the module returns, as leaves, and how these are put together.

        Args:
            operands: as :meth:`leaves` makes them.
            seed: what its random numbers come from; None where it draws none.
            plain: tensors of the module that are neither parameters nor buffers.

        Raises:
            RuntimeError: the code changes something beside its outputs.
        """
        module = self.module()
        if module is None:
            raise RuntimeError("the module is gone")
        arguments = len(operands) - len(self.state)
        # A leaf cannot be overwritten, but what eager PyTorch gives the code is none.
        given = [torch.ops.aten.alias(t) if i < arguments and t.requires_grad else t for i, t in enumerate(operands)]
        places = [t.detach() for t in given]
        tensors = iter(given)
        leaves = [next(tensors) if other is TENSOR else other for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        state = {f"module.{name}": tensor for name, tensor in zip(self.state, tensors, strict=True)}
        kept = [*given[: len(given) - self.buffers], *plain]  # buffers are copies, and compared
        cast = torch.autocast(self.kind, self.cast or torch.bfloat16, self.cast is not None, cache_enabled=False)
        with cast, _in_modes(module, self.modes), _weights_listed(module), seeded_alone(seed), WritesRefused(kept):
            output = functional_call(_Alone(module), state, args, kwargs)
        after, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise RuntimeError("it changes a list or dict that it is given")
        self._check(given, places)
        return pytree.tree_flatten(output)

    def _check(self, given: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        """Raise where something else than the numbers of an operand has changed.

        Args:
            given: the operands.
            places: for each of them a tensor that lies where it has lain.
        """
        for i, (tensor, place) in enumerate(zip(given, places, strict=True)):
            if not tensor.is_set_to(place):
                raise RuntimeError("it sets .data of an argument, a parameter or a buffer")
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks or tensor.retains_grad:
                raise RuntimeError("it puts a hook on the gradient of an argument or of a parameter")
            if tensor.requires_grad != (i in self.graded):
                raise RuntimeError("it sets requires_grad of an argument, a parameter or a buffer")

    def leaves(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands without their history; parameters are parameters, with their attributes."""
        module = self.module()
        state = len(operands) - len(self.state)
        own = len(operands) - self.buffers
        named = {} if module is None else dict(module.named_parameters())
        made: list[Tensor] = []
        for i, tensor in enumerate(operands):
            plain = tensor.detach() if i < own else tensor.detach().clone()
            param = named.get(self.state[i - state]) if state <= i < own else None
            if param is not None:
                plain = torch.nn.Parameter(plain, requires_grad=False)
                vars(plain).update(vars(param))
            made.append(plain.requires_grad_(i in self.graded))
        return made


def read_own_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OwnCall, list[Tensor]]:
    """A call of a module, and its operands."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    others = others_of(leaves)
    buffers = dict(module.named_buffers())
    state = {**dict(module.named_parameters()), **buffers}
    operands = [*[leaf for leaf in leaves if isinstance(leaf, Tensor)], *state.values()]
    kind = operands[0].device.type if operands else "cpu"
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grads = torch.is_grad_enabled()
    graded = tuple([i for i, t in enumerate(operands) if grads and t.requires_grad])
    modes = tuple([inner.training for inner in module.modules()])
    values = tuple([(type(o), repr(o) if isinstance(o, VALUES) else None) for o in others])
    # The call keeps each object that is no value: no other object comes by the object's id.
    objects = tuple([id(o) for o in others if not isinstance(o, VALUES)])
    traits = tuple([(t.dtype, t.dim()) for t in operands])
    loose = (spec, values, tuple(state), graded, grads, modes, kind, cast, traits)
    own = OwnCall(
        ref(module), spec, others, tuple(state), len(buffers), graded, grads, modes, kind, cast, (loose, objects), loose
    )
    return own, operands


def others_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves, with :data:`TENSOR` for each tensor."""
    return tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])


@contextlib.contextmanager
def seeded_alone(seed: Tensor | None) -> Iterator[None]:
    """While this is active, torch's generators begin with a seed, and afterwards are as before; nothing without one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([seed.device] if seed.device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield


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


@contextlib.contextmanager
def _weights_listed(module: torch.nn.Module) -> Iterator[None]:
    """At the end, recurrent modules list their own weights again: they look whether those are others, and take them."""
    recurrent = [vars(inner) for inner in module.modules() if isinstance(inner, torch.nn.RNNBase)]
    before = [(table, name, table[name], list(table[name])) for table in recurrent for name in _LISTS if name in table]
    try:
        yield
    finally:
        for table, name, listed, weights in before:
            listed[:] = weights
            table[name] = listed


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
