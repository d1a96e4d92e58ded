"""graphir: a computational-graph IR and device-placement compiler for PyTorch training steps.

The way through: ``capture`` a module into a :class:`Program`, transform it with ``graphir.passes``, ``emit`` a
:class:`Plan`, run it in a ``graphir.runtime.Session``.
"""

from pathlib import Path

# In a checkout, passes/ and runtime/ stand beside this folder; installed, they are inside it. Where the siblings
# exist, this lets `graphir.passes` and `graphir.runtime` be found without installing.
_root = Path(__file__).resolve().parent.parent
if (_root / "passes" / "base.py").is_file() and (_root / "runtime" / "session.py").is_file():
    __path__.append(str(_root))

from . import caffe2 as caffe2
from .analysis.certify import Certificate, certify
from .analysis.diff import Diff, diff
from .analysis.estimate import Estimate
from .analysis.memory import Memory, memory
from .analysis.overlap import Overlap, overlap
from .analysis.placed import PlacedModules, placed
from .analysis.profiles import Profile
from .analysis.topology import Topology
from .analysis.traffic import Traffic, traffic
from .capturing.capture import capture
from .capturing.seeded import seeded
from .errors import (
    CaptureError,
    CoverageError,
    EagerWarning,
    EquivalenceError,
    FileError,
    GraphirError,
    ParseError,
    PassError,
    PassWarning,
    PipelineWarning,
    PlacementError,
    PlanError,
    ProfileWarning,
    RecaptureWarning,
    ReplicationError,
    RunError,
    SessionError,
    TrainingWarning,
    VerifyError,
)
from .ir.admitted import allow_operators
from .ir.blob import Blob
from .ir.device import Device
from .ir.files import load, save
from .ir.net import Net
from .ir.operator import Operator
from .ir.plan import Plan
from .ir.program import Program
from .ir.registration import register_operator
from .ir.text import parse, show
from .ir.verify import verify
from .version import __version__ as __version__

# These stand on passes and runtime, which import all of the above.
from .facade.compile import Compiled, compile  # isort: skip
from .parallel import (  # isort: skip
    DataParallel,
    ReplicationCallbackDataParallel,
    data_parallel,
    exec_data_parallel_replication_callback,
    patch_replication_callback,
)
from .facade.estimate import estimate  # isort: skip
from .facade.fx import to_exported, to_fx  # isort: skip
from .facade.place import place  # isort: skip
from .facade.largest_batch import LargestBatch, largest_batch  # isort: skip
from .facade.profile import profile  # isort: skip

__all__ = [
    "Blob",
    "CaptureError",
    "Certificate",
    "Compiled",
    "CoverageError",
    "DataParallel",
    "Device",
    "Diff",
    "EagerWarning",
    "EquivalenceError",
    "Estimate",
    "FileError",
    "GraphirError",
    "LargestBatch",
    "Memory",
    "Net",
    "Operator",
    "Overlap",
    "ParseError",
    "PassError",
    "PassWarning",
    "PipelineWarning",
    "PlacedModules",
    "PlacementError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileWarning",
    "Program",
    "RecaptureWarning",
    "ReplicationCallbackDataParallel",
    "ReplicationError",
    "RunError",
    "SessionError",
    "Topology",
    "Traffic",
    "TrainingWarning",
    "VerifyError",
    "allow_operators",
    "capture",
    "certify",
    "compile",
    "data_parallel",
    "diff",
    "estimate",
    "exec_data_parallel_replication_callback",
    "largest_batch",
    "load",
    "memory",
    "overlap",
    "parse",
    "patch_replication_callback",
    "place",
    "placed",
    "profile",
    "register_operator",
    "save",
    "seeded",
    "show",
    "to_exported",
    "to_fx",
    "traffic",
    "verify",
]
