"""Semantic mutations of programs: what they are made of, how they are made, and what tells them from the original."""

import sys
from pathlib import Path

for folder in ("zoo", "caffe2"):  # whose modules are imported by name, as their own tests do
    path = str(Path(__file__).resolve().parents[1] / folder)
    if path not in sys.path:
        sys.path.append(path)
