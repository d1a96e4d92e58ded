"""Batch norm over the rows of all replicas.

A copy computes the count, the mean and the sum of squared deviations of its rows. In forward the copies gather those
from each other, and each merges them (Chan, Golub and LeVeque, *Updating formulae and a pairwise algorithm for
computing sample variances*, 1979), which is accurate where a sum of squares is not. Gradients flow back through
:func:`all_gather`, so that backward does not meet.

The variance is torch's: without Bessel's correction for normalising, with it for the running variance, and eps is added
to it. Outside of replicas, and in evaluation by running statistics, the modules are torch's own, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.overrides import TorchFunctionMode

from ..capturing.record.single_values import REFUSAL
from .collective import all_gather
from .errors import ReplicationRuntimeError, ReplicationValueError
from .rounds import Attendance, here

__all__ = ["SynchronizedBatchNorm1d", "SynchronizedBatchNorm2d", "SynchronizedBatchNorm3d", "convert_sync_batch_norm"]

_M = TypeVar("_M", bound=nn.Module)


class _Place:
    """Where the copies of one module meet; a module's shallow copies have the same one."""


class _Synchronized(_BatchNorm):
    """Lets the forward of a batch norm, torch's or a subclass's, normalise over all copies' rows."""

    statistics_over_replicas = True
    """So that ``graphir.passes.replicate`` synchronises it in a program, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._place = _Place()

    def forward(self, input: Tensor) -> Tensor:
        attendance = here()
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if attendance is None and by_batch and getattr(self, "_is_replica", False):
            raise ReplicationRuntimeError(
                f"{_described(self)} is a copy and cannot meet the others",
                where=f"{type(self).__name__}.forward, outside of a forward of replicas",
                fix="wrap the module in graphir.DataParallel; give torch.nn.DataParallel to graphir."
                "patch_replication_callback; run copies of your own by graphir.parallel.parallel_apply; "
                "activation checkpoints must not contain the module",
            )
        if attendance is None or attendance.round.copies == 1:
            return super().forward(input)
        with _OverAllCopies(attendance, self._place, lambda: _named(self, attendance.root)):
            return super().forward(input)


class SynchronizedBatchNorm1d(_Synchronized, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` whose statistics are those of the whole batch, where it is replicated.

    In :class:`graphir.DataParallel` the copies meet in forward. They must all come to it, in the same order. Rows may
    be split unevenly, and a copy may have a single one. Arguments and state are torch's.
    """


class SynchronizedBatchNorm2d(_Synchronized, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d``, as :class:`SynchronizedBatchNorm1d` is of ``BatchNorm1d``."""


class SynchronizedBatchNorm3d(_Synchronized, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d``, as :class:`SynchronizedBatchNorm1d` is of ``BatchNorm1d``."""


_KINDS: Final[Mapping[type[_BatchNorm], type[_Synchronized]]] = {
    nn.BatchNorm1d: SynchronizedBatchNorm1d,
    nn.BatchNorm2d: SynchronizedBatchNorm2d,
    nn.BatchNorm3d: SynchronizedBatchNorm3d,
}


def convert_sync_batch_norm(module: _M) -> _M:
    """Replace each batch norm in a module by one over the rows of all replicas.

    The new modules hold the same parameters and buffers, so an optimizer stays valid, and the same hooks. Subclasses of
    torch's batch norms, such as timm's with an activation, keep their own forward.

    Args:
        module: is changed, except where it is itself a batch norm.

    Returns:
        The module, or the one that takes its place.

    Raises:
        ReplicationValueError: a batch norm has no shape yet; nothing has changed.
    """
    for name, part in module.named_modules():
        if isinstance(part, _LazyNormBase):
            raise ReplicationValueError(
                f"{name or 'the module'} has no shape yet",
                where="convert_sync_batch_norm",
                fix="call the module once on a batch first",
            )
    converted: dict[nn.Module, nn.Module] = {}
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, _BatchNorm) and not isinstance(child, _Synchronized):
                if child not in converted:
                    converted[child] = _converted(child)
                parent._modules[name] = converted[child]
    if isinstance(module, _BatchNorm) and not isinstance(module, _Synchronized):
        return cast(_M, _converted(module))
    return module


def _converted(module: Any) -> Any:
    made = _new(type(module))
    vars(made).update(vars(module), _place=_Place())
    return made


def _new(kind: type[_BatchNorm]) -> Any:
    """An object without attributes of the synchronised kind."""
    found = _synchronized(cast(Any, kind))
    return found.__new__(found)


@cache
def _synchronized(kind: type[_BatchNorm]) -> type[_Synchronized]:
    """The synchronised kind of a batch norm."""
    if kind in _KINDS:
        return _KINDS[kind]

    def reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:  # pickle finds no class that was made here
        return _new, (kind,), vars(module)

    return type(f"Synchronized{kind.__name__}", (_Synchronized, kind), {"__reduce_ex__": reduce})


class _OverAllCopies(TorchFunctionMode):
    """While it is active, ``torch.nn.functional.batch_norm`` normalises over the rows of all copies."""

    def __init__(self, attendance: Attendance, place: _Place, described: Callable[[], str]) -> None:
        super().__init__()
        self._attendance, self._place, self._described = attendance, place, described

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        count, mean, squares = self._statistics(x)
        if count <= 1:
            raise ReplicationValueError(
                f"{REFUSAL}, got input size {tuple(input.shape)}",
                where=f"{self._described()}, over all replicas",
                fix="train on more rows",
            )
        var = squares / count
        with torch.no_grad():
            _follow(running_mean, mean, momentum)
            _follow(running_var, squares / (count - 1), momentum)
        scale = torch.rsqrt(var + eps)
        if weight is not None:
            scale = scale * weight
        result = (x - _along(mean, x)) * _along(scale, x)
        if bias is not None:
            result = result + _along(bias, x)
        return result.to(input.dtype)

    def _statistics(self, x: Tensor) -> tuple[int, Tensor, Tensor]:
        """How many values a channel has in all copies, their mean, and the sum of their squared deviations from it."""
        dims = [dim for dim in range(x.dim()) if dim != 1]
        own_count = x.numel() // x.shape[1]
        own_mean = x.sum(dims) / max(own_count, 1)
        own = torch.stack([own_mean, (x - _along(own_mean, x)).square().sum(dims)])
        counts, gathered = self._attendance.meet(self._place, self._described, (own_count, own), _combined)
        means, squares = gathered.unbind(1)
        weights = means.new_tensor(counts).unsqueeze(1)
        total = sum(counts)
        mean = (weights * means).sum(0) / max(total, 1)
        return total, mean, (squares + weights * (means - mean).square()).sum(0)


def _combined(given: list[tuple[int, Tensor]]) -> list[tuple[list[int], Tensor]]:
    counts = [count for count, _ in given]
    return [(counts, gathered) for gathered in all_gather([statistics for _, statistics in given])]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """One value a channel, to be broadcast over *x*, whose channels are dimension 1."""
    return channels.view(-1, *[1] * (x.dim() - 2))


def _follow(running: Tensor | None, now: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)


def _named(module: nn.Module, root: object) -> str:
    """A module's path in the replica *root*, and what it is."""
    inside = root.named_modules() if isinstance(root, nn.Module) else ()
    path = next((path for path, found in inside if found is module), "")
    return f"module {path!r}, {_described(module)}" if path else _described(module)


def _described(module: nn.Module) -> str:
    return f"{type(module).__name__}({module.extra_repr()})"
