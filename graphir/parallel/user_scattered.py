"""Data parallelism over shares that the caller has made: batches of other sizes on each device. ::

    [share 0, share 1] ─┬─▶ replica 0 on device 0
                        └─▶ replica 1 on device 1

The interface is that of Jacinle's ``UserScatteredDataParallel``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import counted
from .compiled import CompiledReplicas
from .data_parallel import DataParallel
from .devices import DeviceId
from .errors import ReplicationTypeError, ReplicationValueError
from .scatter import has_rows, moved

__all__ = ["UserScattered"]


class UserScattered(DataParallel):
    """:class:`graphir.DataParallel` that is called with a list of shares, and splits nothing.

    ``model([share_0, share_1])``: each share is the only argument of one replica's forward, a tensor or a structure of
    tensors, and may have as many rows as it likes. There may be fewer shares than devices; the last devices are idle
    then. With ``idle="skip"`` shares without rows are left out, and the others go to the first devices.

    Arguments, outputs and gradients are those of :class:`graphir.DataParallel`. Plans run the replicas where they can
    stand for them; the shares are put together on the first device for these.

    Source: ``jactorch.parallel.UserScatteredDataParallel``, which wants as many shares as devices.

    Raises:
        ReplicationTypeError: ``shares=`` is given, or the call has another argument than a list or tuple of shares.
        ReplicationValueError: there are no shares, or more than devices.
    """

    _splits = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of all replicas, gathered in the order of the shares."""
        shares = self._shares(inputs, kwargs)
        return super().forward(shares) if self.device_ids else self.module(shares[0])

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device_ids: Sequence[DeviceId]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """The shares, each on its device, as the positional arguments of the replicas."""
        shares, places = self._shares(inputs, kwargs or {}), self._places(device_ids)
        args = tuple((moved(share, place, self.dim),) for share, place in zip(shares, places, strict=False))
        return args, tuple({} for _ in args)

    def _shares(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        if len(inputs) != 1 or kwargs or type(inputs[0]) not in (list, tuple):
            raise ReplicationTypeError(
                "the argument is not a list of shares, or not the only one",
                where="UserScattered.forward",
                fix="call it with a list of what each replica's forward takes: model([share_0, share_1])",
            )
        shares = list(inputs[0])
        if self.idle == "skip":
            shares = [share for share in shares if has_rows(share, self.dim)] or shares[:1]
        most = max(len(self.device_ids), 1)  # without devices the module itself runs
        if not 0 < len(shares) <= most:
            raise ReplicationValueError(
                f"there are {counted(len(shares), 'share')} for {counted(most, 'device')}",
                where="UserScattered.forward",
                fix="give at least one share, and at most one for each device",
            )
        return shares

    def _planned(self, plans: CompiledReplicas, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        whole = _joined(self._shares(inputs, kwargs), self.src_device_obj, self.dim)
        return None if whole is None else plans((whole[0],), {}, whole[1])

    @staticmethod
    def _own_steps() -> type[DataParallel]:
        return UserScattered


def _joined(shares: list[Any], place: torch.device, dim: int) -> tuple[Any, tuple[int, ...]] | None:
    """One argument that is cut into these shares, and the rows of each; None where there is none."""
    leaves, specs = zip(*map(pytree.tree_flatten, shares), strict=True)
    if any(spec != specs[0] for spec in specs):
        return None
    joined: list[Any] = []
    sizes: tuple[int, ...] | None = None
    for parts in zip(*leaves, strict=True):
        if not isinstance(parts[0], torch.Tensor):
            if any(type(part) is not type(parts[0]) or repr(part) != repr(parts[0]) for part in parts):
                return None
            joined.append(parts[0])
            continue
        rows = _rows(parts, dim)
        if rows is None or sizes not in (None, rows):
            return None
        sizes = rows
        joined.append(torch.cat([part.to(place) for part in parts], dim))
    return None if sizes is None else (pytree.tree_unflatten(joined, specs[0]), sizes)


def _rows(parts: Sequence[Any], dim: int) -> tuple[int, ...] | None:
    """How many rows each part has; None where they are not the parts of one tensor."""
    first = parts[0]
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dtype != first.dtype or part.dim() != first.dim() or dim < 0:
            return None
        if part.dim() <= dim or _others(part, dim) != _others(first, dim):
            return None
        if part.layout != torch.strided or part.requires_grad != first.requires_grad:
            return None
    return tuple([int(part.shape[dim]) for part in parts])


def _others(part: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*part.shape[:dim], *part.shape[dim + 1 :])
