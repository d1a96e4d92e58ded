"""Data parallelism over modules: replicas that run eagerly, callbacks of replication, synchronised batch norm.

::

    DataParallel.forward: scatter ─▶ replicate ─▶ (callbacks) ─▶ parallel_apply ─▶ gather
                                                                       │
                                           each replica in its thread: its round, where copies meet,
                                           and its generators
"""

from __future__ import annotations

from ..replication import CallbackContext
from .apply import parallel_apply
from .callbacks import (
    ReplicationCallbackDataParallel,
    exec_data_parallel_replication_callback,
    patch_replication_callback,
)
from .collective import all_gather
from .compiled import CompiledReplicas
from .data_parallel import DataParallel, data_parallel
from .errors import (
    ReplicationAssertionError,
    ReplicationIndexError,
    ReplicationRuntimeError,
    ReplicationTypeError,
    ReplicationValueError,
)
from .gather import gather
from .replicas import replicate
from .scatter import scatter, scatter_kwargs
from .sync_batch_norm import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_sync_batch_norm,
)
from .user_scattered import UserScattered

__all__ = [
    "CallbackContext",
    "CompiledReplicas",
    "DataParallel",
    "ReplicationAssertionError",
    "ReplicationCallbackDataParallel",
    "ReplicationIndexError",
    "ReplicationRuntimeError",
    "ReplicationTypeError",
    "ReplicationValueError",
    "SynchronizedBatchNorm1d",
    "SynchronizedBatchNorm2d",
    "SynchronizedBatchNorm3d",
    "UserScattered",
    "all_gather",
    "convert_sync_batch_norm",
    "data_parallel",
    "exec_data_parallel_replication_callback",
    "gather",
    "parallel_apply",
    "patch_replication_callback",
    "replicate",
    "scatter",
    "scatter_kwargs",
]
