"""What a call gives to replicas: its leaves, and what kind of call it is."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.runtime.machine.surroundings import FORKS

from ..capturing.isolate.global_state import SETTINGS
from ..facade.plan_cache.captures import Unfit
from ..ir.shares import divided
from ..ir.tensor import PLAIN

__all__ = ["ReplicatedCall", "TooFewRows", "read_call", "watched"]


_MAPPED: Final = (tuple, list, dict, OrderedDict, namedtuple)
"""Containers of which scatter splits what is in them, by pytree's types. It knows others, and users register some."""


class TooFewRows(Exception):
    """There are replicas without rows."""


class ReplicatedCall(NamedTuple):
    """A call.

    Attributes:
        args, kwargs: as given.
        tensors: those among their leaves that require a gradient, where gradients are computed.
        at: their positions among the leaves.
        sizes: the rows of each replica.
        kind: equal for calls that one plan may stand for.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: Hashable

    def of_this_size(self) -> ReplicatedCall:
        """The call as one of a kind that has these rows alone."""
        return self._replace(kind=(self.kind, self.sizes))

    def shares(
        self, dim: int, values: Mapping[tuple[int, int], Tensor] | None = None
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of each replica; gradients flow through them to :attr:`tensors`.

        Args:
            dim: along which they are cut.
            values: by position among the leaves and replica: what was in the share, if that is not to be looked up now.
        """
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        replicas = len(self.sizes)
        cut = [list(leaf.split(self.sizes, dim)) if isinstance(leaf, Tensor) else [leaf] * replicas for leaf in leaves]
        for (i, replica), value in (values or {}).items():
            cut[i][replica] = _Copied.apply(cut[i][replica], value)  # type: ignore[no-untyped-call]
        return [pytree.tree_unflatten([parts[replica] for parts in cut], spec) for replica in range(replicas)]


class _Copied(torch.autograd.Function):
    """A tensor with the value of a copy that was made of it earlier."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Tensor) -> Tensor:
        return copy.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def read_call(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dim: int,
    shares: Sequence[int],
    place: torch.device,
    modes: Hashable,
    sizes: tuple[int, ...] | None = None,
) -> ReplicatedCall:
    """Read a call.

    Args:
        args, kwargs: of the call.
        dim: along which tensors are cut.
        shares: of the batch, by replica.
        place: the device of the module's parameters.
        modes: of the module; calls in others are of another kind.
        sizes: the rows of each replica; None: by the shares.

    Raises:
        Unfit: no plan can stand for such a call.
        TooFewRows: eager replicas take it, and fewer of them than there are.
    """
    if why := watched():
        raise Unfit(why)
    if dim < 0:
        raise Unfit(f"dim is {dim}, counted from the last dimension")
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if foreign := _not_mapped(spec):
        raise Unfit(f"an argument has a {foreign} in it")
    graded = torch.is_grad_enabled()
    described: list[Hashable] = []
    rows = -1
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, (bool, int, float, str, type(None))):
                raise Unfit(f"an argument has a {type(leaf).__name__} in it")
            described.append((type(leaf), repr(leaf)))
            continue
        if type(leaf) not in PLAIN or leaf.layout != torch.strided:
            raise Unfit(f"an argument is a {type(leaf).__name__} of layout {leaf.layout}")
        shape = leaf.shape
        if len(shape) <= dim or leaf.device != place:
            raise Unfit(f"an argument has no dimension {dim}, or is not on {place}")
        if rows not in (-1, shape[dim]):
            raise Unfit(f"arguments have {rows} and {shape[dim]} rows")
        rows = shape[dim]
        strides = None if leaf.is_contiguous() else leaf.stride()
        described.append((leaf.dtype, shape[:dim], shape[dim + 1 :], strides, graded and leaf.requires_grad))
    if rows < 0:
        raise Unfit("no argument is a tensor")
    if sizes is None:
        sizes = tuple(divided(rows, shares))
    if len(sizes) < len(shares) or 0 in sizes:
        raise TooFewRows
    settings = tuple([setting.get() for setting in SETTINGS.values()])
    modes = modes, torch.is_inference_mode_enabled(), torch.get_num_threads(), FORKS[0]
    at = tuple([i for i, leaf in enumerate(leaves) if graded and isinstance(leaf, Tensor) and leaf.requires_grad])
    kind = spec, tuple(described), settings, modes
    return ReplicatedCall(args, kwargs, tuple([leaves[i] for i in at]), at, sizes, kind)


def _not_mapped(spec: pytree.TreeSpec) -> str:
    """The type of a structure that scatter hands to each replica as it is, or maps in its own way; empty if none is."""
    if spec.is_leaf():
        return ""
    if spec.type not in _MAPPED:
        return str(spec.type.__name__)
    return next(filter(None, map(_not_mapped, spec.children())), "")


def watched() -> str:
    """What watches the call's operators, each of which an eager replica would show it; empty where nothing does."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a mode of torch watches the operators"
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "a transform of torch.func, or forward differentiation, is active"
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return "the call is being compiled or traced"
    return ""
