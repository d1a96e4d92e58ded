"""Short names of element types, as printed in ``f32[64,1024]``, and their sizes in bytes."""

from __future__ import annotations

from typing import Final

__all__ = ["ITEMSIZE", "TORCH_NAME"]

_TABLE: Final = (
    ("f64", "float64", 8),
    ("f32", "float32", 4),
    ("f16", "float16", 2),
    ("bf16", "bfloat16", 2),
    ("f8e4m3", "float8_e4m3fn", 1),
    ("f8e5m2", "float8_e5m2", 1),
    ("i64", "int64", 8),
    ("i32", "int32", 4),
    ("i16", "int16", 2),
    ("i8", "int8", 1),
    ("u8", "uint8", 1),
    ("bool", "bool", 1),
    ("c64", "complex64", 8),
    ("c128", "complex128", 16),
)

ITEMSIZE: Final[dict[str, int]] = {short: nbytes for short, _, nbytes in _TABLE}
"""Bytes of one element."""

TORCH_NAME: Final[dict[str, str]] = {short: name for short, name, _ in _TABLE}
"""The attribute of ``torch`` that each short name stands for."""
