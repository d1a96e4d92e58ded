"""One kind of call of a module's own code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...plan_cache.inventory import VALUES

__all__ = [
    "DRAWN_SEEDS",
    "TENSOR",
    "NoOperatorError",
    "OwnCall",
    "others_of",
    "read_own_call",
    "seeded_alone",
    "storage_of",
    "storages",
]

DRAWN_SEEDS: Final = 2**62
"""How many seeds there are, of which a call that draws is given one."""

TENSOR: Final = object()
"""Stands for a tensor among the leaves of arguments and outputs."""


class NoOperatorError(RuntimeError):
    """A module's own code has done what no operator does; the module is what the sentence begins with."""


class OwnCall(NamedTuple):
    """A kind of call of a module's own code.

    Attributes:
        module: itself.
        spec: how its arguments are put together.
        others: the leaves of these, with :data:`TENSOR` for each tensor.
        given: how many tensors are among the arguments, each once, but the module's own; operands are these, the
            module's parameters, and its buffers.
        places: of each tensor among the leaves, the operand that it is.
        graded: the positions of the operands that need a gradient.
        grads: whether gradients are computed.
        kind: of the device.
        cast: the element type of autocast; None without.
        key: equal for calls that one operator may stand for.
        loose: likewise but for the objects among the arguments, of which the class counts here.
    """

    module: Callable[[], torch.nn.Module | None]
    spec: Any
    others: tuple[Any, ...]
    given: int
    places: tuple[int, ...]
    graded: tuple[int, ...]
    grads: bool
    kind: str
    cast: torch.dtype | None
    key: Hashable
    loose: Hashable

    def __call__(
        self,
        module: torch.nn.Module,
        arguments: Sequence[Tensor],
        seed: Tensor | None,
        returned: Callable[[Any], None] | None = None,
    ) -> tuple[list[Any], Any]:
        """What a module's own ``forward`` returns, as leaves, and how these are put together.

        Args:
            module: itself, or a copy; its hooks are called around the operator.
            arguments: as :meth:`leaves` makes them.
            seed: what its random numbers come from; None where it draws none.
            returned: is given what the code has returned, before that is checked.

        Raises:
            NoOperatorError: the code does to an argument what no operator does.
        """
        # A leaf cannot be overwritten, but what eager PyTorch gives the code is none.
        given = [torch.ops.aten.alias(t) if t.requires_grad else t for t in arguments]
        places = [t.detach() for t in given]
        own = [*given, *module.parameters(), *module.buffers()]
        tensors = iter([own[place] for place in self.places])
        leaves = [next(tensors) if other is TENSOR else other for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        cast = torch.autocast(self.kind, self.cast or torch.bfloat16, self.cast is not None, cache_enabled=False)
        with cast, seeded_alone(seed):
            output = type(module).forward(module, *args, **kwargs)
        if returned is not None:
            returned(output)
        after, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.spec or any(a is not b for a, b in zip(after, leaves, strict=True)):
            raise NoOperatorError("it changes a list or dict that it is given")
        for i, (tensor, place) in enumerate(zip(given, places, strict=True)):
            if not tensor.is_set_to(place):
                raise NoOperatorError("it sets .data of an argument")
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks or tensor.retains_grad:
                raise NoOperatorError("it puts a hook on the gradient of an argument")
            if tensor.requires_grad != (i in self.graded):
                raise NoOperatorError("it sets requires_grad of an argument")
            if vars(tensor):
                raise NoOperatorError("it sets an attribute of an argument")
        return pytree.tree_flatten(output)

    def leaves(self, operands: Sequence[Tensor], lent: Container[int] = ()) -> list[Tensor]:
        """The arguments among the operands, without their history.

        Args:
            operands: of a call.
            lent: memory that is not the plan's own: what the code could overwrite there is copied.
        """
        with torch.inference_mode(False):  # which have versions
            return [
                t.detach().requires_grad_() if i in self.graded else _alone(t, lent)
                for i, t in enumerate(operands[: self.given])
            ]


def read_own_call(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[OwnCall, list[Tensor]]:
    """A call of a module, and its operands.

    Raises:
        RuntimeError: an argument has more than an operator sees.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    others = others_of(leaves)
    params, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for other in others:
        if any(isinstance(value, Tensor) for value in getattr(other, "__dict__", {}).values()):
            raise RuntimeError(
                f"an argument is a {type(other).__name__} with tensors, which torch's pytree does not know"
            )
    state = [*params.values(), *buffers.values()]
    own = set(map(id, state))
    if any(vars(tensor).keys() - _of_fakes() for tensor in tensors if id(tensor) not in own):
        raise RuntimeError("an argument has an attribute that is set on the tensor")
    arguments = list({id(tensor): tensor for tensor in tensors if id(tensor) not in own}.values())
    operands = [*arguments, *state]
    at = {id(tensor): i for i, tensor in reversed(list(enumerate(operands)))}
    places = tuple([at[id(tensor)] for tensor in tensors])
    kind = operands[0].device.type if operands else "cpu"
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    grads = torch.is_grad_enabled()
    graded = tuple([i for i, t in enumerate(operands) if grads and t.requires_grad])
    modes = tuple([inner.training for inner in module.modules()])
    values = tuple([(type(o), repr(o) if isinstance(o, VALUES) else None) for o in others])
    # The call keeps each object that is no value: no other object comes by the object's id.
    objects = tuple([id(o) for o in others if not isinstance(o, VALUES)])
    traits = tuple([(t.dtype, t.dim()) for t in operands])
    loose = (spec, values, tuple(params), tuple(buffers), places, graded, grads, modes, kind, cast, traits)
    key = loose, objects
    return OwnCall(ref(module), spec, others, len(arguments), places, graded, grads, kind, cast, key, loose), operands


def _alone(tensor: Tensor, lent: Container[int]) -> Tensor:
    """A tensor that needs no gradient, with a version where its maker gave it none."""
    if storage_of(tensor) in lent:
        return tensor.clone()
    if not tensor.is_inference():
        return tensor.detach()
    return tensor.new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


@cache
def _of_fakes() -> frozenset[str]:
    """The attributes that each fake tensor has; the first who asks is being recorded."""
    with _disable_current_modes(), FakeTensorMode():
        return frozenset(vars(torch.empty(0)))


def others_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The leaves, with :data:`TENSOR` for each tensor."""
    return tuple([TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """The memory of tensors: what tells a storage from others that are alive."""
    return set(map(storage_of, tensors))


def storage_of(tensor: Tensor) -> int:
    """The memory of a tensor, as :func:`storages` tells it."""
    found: int = tensor.untyped_storage()._cdata
    return found


@contextlib.contextmanager
def seeded_alone(seed: Tensor | None) -> Iterator[None]:
    """While this is active, torch's generators begin with a seed, and afterwards are as before; nothing without one."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([seed.device] if seed.device.type == "cuda" else []):
        torch.manual_seed(int(seed))
        yield
