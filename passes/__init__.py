"""What one can do to a program: one pass a file, each a function from program to program.

In the order in which they are usually run: replicate or shard, shift_modules or shift_activations, inject_copies,
share_storage, emit.
"""

from .activations import find_activations
from .base import Gpu, Pass, Pipeline, Run, Timing, build, register
from .copies import InjectCopies, inject_caffe2_copies, inject_copies
from .emit import emit
from .replicate import Replicate, replicate
from .shard import Shard, shard
from .shift import ShiftActivations, shift_activations
from .shift_modules import ShiftModules, shift_modules
from .storage import ShareStorage, share_storage

__all__ = [
    "Gpu",
    "InjectCopies",
    "Pass",
    "Pipeline",
    "Replicate",
    "Run",
    "Shard",
    "ShareStorage",
    "ShiftActivations",
    "ShiftModules",
    "Timing",
    "build",
    "emit",
    "find_activations",
    "inject_caffe2_copies",
    "inject_copies",
    "register",
    "replicate",
    "shard",
    "share_storage",
    "shift_activations",
    "shift_modules",
]
