"""graphir: a computational-graph IR and device-placement compiler for PyTorch training steps."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

# In a checkout, passes/ and runtime/ stand beside this folder; installed, they are inside it. Where the siblings
# exist, this lets `graphir.passes` and `graphir.runtime` be found without installing.
_root = Path(__file__).resolve().parent.parent
if (_root / "passes" / "base.py").is_file() and (_root / "runtime" / "session.py").is_file():
    __path__.append(str(_root))
