"""Caffe2's nets: read and write ``NetDef`` files without Caffe2. ``protobuf`` is imported when a file is."""

from .lower import lower
from .program import load_net, load_program, save_net

__all__ = ["load_net", "load_program", "lower", "save_net"]
