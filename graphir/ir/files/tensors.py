"""A program's state on disk: a safetensors file, whose tensors are read when they are first asked for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import FileError, GraphirError
from ..blob import overlaps
from ..program import Program
from ..symbols import to_symbol
from ..tensor import byte_view
from .records import TensorRecord

__all__ = ["StoredTensors", "describe", "stored_layouts", "write_tensors"]

_FIX: Final = "save the program again with state=True; its two files belong together"

_MOST_GAPPED: Final = 1 << 24
_MOST_TIMES: Final = 64
"""The most elements that a tensor's strides may span: the larger of the first number and the second times the elements
that the tensor holds."""


def describe(state: Mapping[str, torch.Tensor]) -> dict[str, TensorRecord]:
    """What a program's file says about the tensors beside it.

    Raises:
        GraphirError: a tensor has an element type that graphir has no name for.
    """
    return {
        name: TensorRecord(dtype=str(to_symbol(tensor.dtype)), shape=tuple(tensor.shape), crc32=_checksum(tensor))
        for name, tensor in state.items()
    }


def _checksum(tensor: torch.Tensor) -> int | None:
    """The CRC-32 of the tensor's elements in row-major order; None for a tensor on the meta device."""
    if tensor.is_meta:
        return None
    return zlib.crc32(byte_view(tensor).numpy().data)


def write_tensors(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the tensors, each dense and on its own: the file format knows neither strides nor shared memory.

    Raises:
        FileError: a tensor cannot be written, such as one on the meta device.
    """
    try:
        save_file({name: _own(tensor) for name, tensor in state.items()}, path)
    except (SafetensorError, RuntimeError, NotImplementedError, KeyError) as e:
        raise FileError(f"the state cannot be written: {e}", where=str(path)) from e


def _own(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu().contiguous()
    whole = dense.untyped_storage().nbytes() == dense.numel() * dense.element_size()
    return dense if whole and dense.data_ptr() != tensor.data_ptr() else dense.clone()


def stored_layouts(program: Program) -> dict[str, tuple[int, ...]]:
    """The strides of each state tensor whose blob is not contiguous, by the tensor's name."""
    found: dict[str, tuple[int, ...]] = {}
    for op in program.init.ops:
        key, blob = op.args.get("key"), program.init.blobs.get(op.outputs[0]) if op.outputs else None
        if op.type == "graphir.load" and isinstance(key, str) and blob is not None and blob.strides is not None:
            found[key] = tuple(size for size in blob.strides if isinstance(size, int))
    return found


class StoredTensors(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, by name. Each is read when it is first asked for, held against its checksum,
    and kept.

    Args:
        path: of the file.
        expected: what the program's file says about the tensors.
        layouts: strides of the tensors that are not contiguous.

    Raises:
        FileError: the file is missing or damaged, or holds other tensors than *expected*; a tensor whose bytes are
            damaged, when it is asked for.
    """

    def __init__(
        self, path: Path, expected: Mapping[str, TensorRecord], layouts: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._path, self._expected, self._layouts = path, expected, layouts
        self._read: dict[str, torch.Tensor] = {}
        if not path.is_file():
            raise FileError("the file of the program's tensors is missing", where=str(path), fix=_FIX)
        try:
            self._file: Any = cast(Any, safe_open)(path, framework="pt")  # a class without annotations
            held = set(self._file.keys())
        except (SafetensorError, OSError) as e:
            raise FileError(f"the program's tensors cannot be read: {e}", where=str(path), fix=_FIX) from None
        if held != set(expected):
            odd = min(held ^ set(expected))
            what = f"tensor {odd!r} is in one of the program's files and not in the other"
            raise FileError(what, where=str(path), fix=_FIX)
        for name, record in expected.items():
            found = tuple(self._file.get_slice(name).get_shape())
            if found != record.shape:
                what = f"tensor {name!r} is of shape {list(found)}, but its program says {list(record.shape)}"
                raise FileError(what, where=str(path), fix=_FIX)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._read:
            record = self._expected[name]
            tensor: torch.Tensor = self._file.get_tensor(name)
            if _dtype(tensor) != record.dtype:
                what = f"tensor {name!r} is of type {tensor.dtype}, but its program says {record.dtype}"
                raise FileError(what, where=str(self._path))
            if record.crc32 is not None and _checksum(tensor) != record.crc32:
                what = f"tensor {name!r} is damaged: its bytes do not match the checksum in the program"
                raise FileError(what, where=str(self._path), fix=_FIX)
            strides = self._layouts.get(name)
            if strides is not None and len(strides) == tensor.dim():
                tensor = self._laid_out(name, tensor, strides)
            self._read[name] = tensor
        return self._read[name]

    def _laid_out(self, name: str, tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        # Along a dimension of stride 0 all elements are one, and torch refuses to write to them through the view.
        held = tensor[tuple([slice(1 if stride == 0 else None) for stride in strides])]
        span = sum((size - 1) * stride for size, stride in zip(held.shape, strides, strict=True))
        if overlaps(held.shape, strides) or span > max(_MOST_GAPPED, _MOST_TIMES * held.numel()):
            what = f"tensor {name!r} of shape {list(tensor.shape)} cannot have the strides {list(strides)}"
            raise FileError(what, where=str(self._path), fix=_FIX)
        return torch.empty_strided(held.shape, strides, dtype=tensor.dtype).copy_(held).expand(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._expected)

    def __len__(self) -> int:
        return len(self._expected)


def _dtype(tensor: torch.Tensor) -> str:
    try:
        return str(to_symbol(tensor.dtype))
    except GraphirError:
        return str(tensor.dtype)
