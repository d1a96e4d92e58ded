"""A call of a placed model, as it is read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.runtime.machine.surroundings import FORKS

from ...capturing.isolate.global_state import SETTINGS
from ...ir.tensor import PLAIN
from ..plan_cache.captures import Unfit

__all__ = ["PlacedCall", "read_call"]

_SCALARS: Final = (bool, int, float, str, type(None))
_FLAT: Final = (Tensor, *_SCALARS)


class PlacedCall(NamedTuple):
    """A call of a placed model.

    Attributes:
        args, kwargs: as given.
        leaves: of both, in their order.
        graded: the positions of the leaves that need a gradient, where gradients are computed; of those that are one
            tensor, the first.
        kind: equal for calls that one plan may stand for.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Any]
    graded: tuple[int, ...]
    kind: Any

    @property
    def tensors(self) -> list[Tensor]:
        """The leaves that need a gradient."""
        return [self.leaves[i] for i in self.graded]

    def versions(self) -> list[int]:
        """The versions of the tensors among the leaves."""
        return [t._version for t in self.leaves if isinstance(t, Tensor) and not t.is_inference()]


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], modes: Sequence[Hashable]) -> PlacedCall:
    """Read a call.

    Raises:
        Unfit: no plan can stand for such a call.
    """
    leaves: list[Any] = [*args, *kwargs.values()]
    spec: Hashable = len(args), tuple(kwargs)
    if not all(isinstance(leaf, _FLAT) for leaf in leaves):  # taking structures apart takes as long as a short plan
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    graded: list[int] = []
    described: list[Hashable] = []
    first: dict[int, int] = {}
    grades = torch.is_grad_enabled()
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN or leaf.layout != torch.strided or leaf.is_meta:
                raise Unfit(f"an argument is a {type(leaf).__name__} of layout {leaf.layout} on {leaf.device}")
            if vars(leaf):  # which a forward may read
                raise Unfit(f"an argument has an attribute, {next(iter(vars(leaf)))!r}, that is set on the tensor")
            same = first.setdefault(id(leaf), i)  # a forward may ask whether two arguments are one tensor
            if grades and leaf.requires_grad and same == i:
                graded.append(i)
            described.append((leaf.dtype, leaf.dim(), _order(leaf), grades and leaf.requires_grad, same))
        elif isinstance(leaf, _SCALARS):
            described.append((type(leaf), repr(leaf)))
        else:
            raise Unfit(f"an argument has a {type(leaf).__name__} in it")
    settings = tuple([setting.get() for setting in SETTINGS.values()])
    state = tuple(modes), torch.is_inference_mode_enabled(), torch.get_num_threads(), FORKS[0]
    return PlacedCall(args, dict(kwargs), leaves, tuple(graded), (spec, tuple(described), settings, state))


def _order(tensor: Tensor) -> tuple[int, ...]:
    """How a tensor lies in memory: its dimensions from the outermost on; nothing for a contiguous one."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
