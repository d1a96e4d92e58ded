"""What one can do to a program: one pass a file, each a function from program to program.

In the order in which they are usually run: replicate or shard, replication_callback, sync_batch_norm, shift_modules or
shift_activations, recompute, park (or balance, which chooses these), inject_copies, split_gradients, pipeline,
share_storage, emit. A pass that may not come behind another one says so in its class, and is refused with the right
order before anything is built (:mod:`.standing`).
"""

from .activations import find_activations
from .balance import Balance, balance
from .base import Gpu, Pass, Pipeline, Run, Timing, build, register
from .choice.report import Balanced
from .copies import InjectCopies, inject_caffe2_copies, inject_copies
from .emit import emit
from .park import Park, park
from .pipeline import PipelineSchedule, pipeline
from .recompute import Recompute, recompute
from .replica import Replica
from .replicate import Replicate, replicate
from .replication_callback import ReplicationCallback, replication_callback
from .shard import Shard, shard
from .shift import ShiftActivations, shift_activations
from .shift_modules import ShiftModules, shift_modules
from .split_backward import Halves, split_backward
from .split_gradients import SplitGradients, split_gradients
from .storage import ShareStorage, share_storage
from .sync_batch_norm import SyncBatchNorm, sync_batch_norm

__all__ = [
    "Balance",
    "Balanced",
    "Gpu",
    "Halves",
    "InjectCopies",
    "Park",
    "Pass",
    "Pipeline",
    "PipelineSchedule",
    "Recompute",
    "Replica",
    "Replicate",
    "ReplicationCallback",
    "Run",
    "Shard",
    "ShareStorage",
    "ShiftActivations",
    "ShiftModules",
    "SplitGradients",
    "SyncBatchNorm",
    "Timing",
    "balance",
    "build",
    "emit",
    "find_activations",
    "inject_caffe2_copies",
    "inject_copies",
    "park",
    "pipeline",
    "recompute",
    "register",
    "replicate",
    "replication_callback",
    "shard",
    "share_storage",
    "shift_activations",
    "shift_modules",
    "split_backward",
    "split_gradients",
    "sync_batch_norm",
]
