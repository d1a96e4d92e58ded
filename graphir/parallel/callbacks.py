"""Callbacks of replication: modules that are told which copy they are, and share an object with their other copies.

The interface is that of Jiayuan Mao's Synchronized-BatchNorm-PyTorch and Jacinle. A module defines
``__data_parallel_replicate__(self, ctx, copy_id)``; it is called on each copy, after all copies are made and before any
of them runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..errors import counted
from ..replication import OWN_CALLBACK, CallbackContext
from .data_parallel import DataParallel
from .errors import ReplicationTypeError, ReplicationValueError
from .rounds import Round

__all__ = [
    "ReplicationCallbackDataParallel",
    "exec_data_parallel_replication_callback",
    "patch_replication_callback",
]

_M = TypeVar("_M", bound=nn.Module)


def exec_data_parallel_replication_callback(modules: Sequence[nn.Module]) -> None:
    """Tell the copies of a module, and of each module in it, which copies they are.

    Where a module defines it, ``__data_parallel_replicate__(ctx, copy_id)`` is called, in the order of ``modules()``:
    on all of the master copy, which is copy 0, then on all of copy 1, and so on. The copies of one module, and nothing
    else, share *ctx*.

    Args:
        modules: the copies, as ``torch.nn.parallel.replicate`` or :class:`graphir.DataParallel` makes them.

    Raises:
        ReplicationValueError: a callback raised, whose exception is the cause; or these are no copies of one module.
    """
    if not modules:
        return
    names = [name for name, _ in modules[0].named_modules()]
    copies = [list(copy.modules()) for copy in modules]
    contexts = [CallbackContext() for _ in names]
    for copy_id, copied in enumerate(copies):
        if len(copied) != len(names):
            raise ReplicationValueError(
                f"copy 0 has {counted(len(names), 'module')} and copy {copy_id} has {len(copied)}",
                where="exec_data_parallel_replication_callback",
                fix="give copies of one module",
            )
    for copy_id, copied in enumerate(copies):
        for name, module, context in zip(names, copied, contexts, strict=True):
            if hasattr(module, OWN_CALLBACK):
                _call(name, module, context, copy_id)


def _call(name: str, module: Any, context: CallbackContext, copy_id: int) -> None:
    try:
        getattr(module, OWN_CALLBACK)(context, copy_id)
    except Exception as e:
        raise ReplicationValueError(
            f"a replication callback failed: {type(e).__name__}: {e}",
            where=f"module {name or '(the outermost)'} of type {type(module).__name__}, copy {copy_id}",
            fix=f"see the cause, raised in {type(module).__name__}.{OWN_CALLBACK}",
        ) from e


class ReplicationCallbackDataParallel(DataParallel):
    """:class:`graphir.DataParallel` that calls the modules' replication callbacks each time it has made replicas.

    Example::

        net = ReplicationCallbackDataParallel(SynchronizedBatchNorm1d(10, eps=1e-5, affine=False), device_ids=[0, 1])
    """

    def replicate(self, module: _M, device_ids: Sequence[int | torch.device]) -> list[_M]:
        """Make the replicas, and call their callbacks."""
        copies = super().replicate(module, device_ids)
        exec_data_parallel_replication_callback(copies)
        return copies


def patch_replication_callback(data_parallel: nn.DataParallel[Any]) -> None:
    """Let an object that there is already call replication callbacks: torch's DataParallel, ours, or a subclass's.

    Its ``replicate`` and ``parallel_apply`` are replaced, on this object alone; the second so that modules which meet
    their copies find them. A second patch changes nothing.

    Args:
        data_parallel: the object.

    Raises:
        ReplicationTypeError: it is no ``torch.nn.DataParallel``.
    """
    if not isinstance(data_parallel, nn.DataParallel):
        raise ReplicationTypeError(
            f"{type(data_parallel).__name__} is no torch.nn.DataParallel",
            where="patch_replication_callback",
            fix="wrap the module in graphir.DataParallel or torch.nn.DataParallel first",
        )
    if isinstance(data_parallel, ReplicationCallbackDataParallel):
        return
    if not isinstance(vars(data_parallel).get("replicate"), _Replicate):
        vars(data_parallel)["replicate"] = _Replicate(data_parallel, vars(data_parallel).get("replicate"))
        if not isinstance(data_parallel, DataParallel):
            vars(data_parallel)["parallel_apply"] = _Apply(data_parallel, vars(data_parallel).get("parallel_apply"))


class _Replaced:
    """What stands in the place of a method of one object. It is copied and pickled with it.

    Attributes:
        owner: the object.
        before: what the object itself had there, if anything.
    """

    def __init__(self, owner: nn.DataParallel[Any], before: Any) -> None:
        self.owner, self.before = owner, before


class _Replicate(_Replaced):
    def __call__(self, module: nn.Module, device_ids: Any) -> list[nn.Module]:
        if self.before is None:
            copies: list[nn.Module] = type(self.owner).replicate(self.owner, module, device_ids)
        else:
            copies = self.before(module, device_ids)
        exec_data_parallel_replication_callback(copies)
        return copies


class _Apply(_Replaced):
    def __call__(self, replicas: Sequence[nn.Module], inputs: Any, kwargs: Any) -> list[Any]:
        round = Round(len(replicas))
        met = [_Attending(module, round, copy) for copy, module in enumerate(replicas)]
        if self.before is None:
            return type(self.owner).parallel_apply(self.owner, met, inputs, kwargs)
        return self.before(met, inputs, kwargs)  # type: ignore[no-any-return]


class _Attending:
    """A replica that attends a round as it is called."""

    def __init__(self, module: nn.Module, round: Round, copy: int) -> None:
        self._module, self._round, self._copy = module, round, copy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._round.attend(self._copy, self._module):
            return self._module(*args, **kwargs)
