"""Files of nets, programs and plans: JSON, written whole or not at all, and refused if damaged.

Reading builds values and nothing else. A program's tensors stand beside it, as ``<path>.safetensors``. The cost of
reading is bounded: :data:`MOST_BYTES` limits the size of a file, the JSON parser its nesting.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO, Final

import pydantic_core
from pydantic import ValidationError

from ...collector import collector_paused
from ...errors import FileError, GraphirError, nearest
from ..net import Net
from ..plan import Plan
from ..program import Program
from ..verify import require
from .decode import value_of
from .encode import document_of
from .records import (
    FIELDS_SINCE,
    OLDEST,
    OPTIMIZERS_SINCE,
    VERSION,
    AnyFile,
    Header,
    NetFile,
    PlanFile,
    ProgramFile,
    TensorRecord,
)
from .tensors import StoredTensors, describe, stored_layouts, write_tensors
from .upgrade import with_fields, with_optimizers

__all__ = [
    "MOST_BYTES",
    "atomic_write",
    "damaged",
    "load",
    "load_stream",
    "path_of",
    "read_bytes",
    "read_stream",
    "save",
    "to_json",
]

MOST_BYTES: Final = 1 << 30
"""The size above which a JSON file is not read (1 GiB)."""

_CHUNK: Final = 1 << 20

_HEAD: Final = 512
"""The leading bytes that tell files of tensors. They hold the first entry of an archive of torch.save."""

_FORMATS: Final[Mapping[str, type[AnyFile]]] = {
    "graphir.net": NetFile,
    "graphir.program": ProgramFile,
    "graphir.plan": PlanFile,
}

_PICKLES: Final = tuple([bytes((0x80, protocol)) for protocol in range(2, 6)])
"""The first bytes of a pickle. torch.save wrote bare pickles before it wrote archives."""

_TEXTS: Final = (b"init net ", b"net ", b"program ", b"plan ")
"""How the text form begins, which :func:`load` does not read."""


def save(x: Net | Program | Plan, path: str | Path, state: bool = False) -> None:
    """Write a net, a program or a plan as JSON, whole or not at all; :func:`load` reads it.

    Args:
        x: what is written. A program's module and witness are left out.
        path: of the file; an existing file is replaced.
        state: of a program: write its tensors too, beside the file as ``<path>.safetensors``.

    Raises:
        GraphirError: *x* is none of these, or *state* is asked for and *x* has none.
        FileError: the file cannot be written; an existing file is unchanged.
    """
    require(x, (Net, Program, Plan), "save")
    path = path_of(path)
    if not state:
        _save(x, path)
        return
    if not isinstance(x, Program):
        kind = type(x).__name__.lower()
        raise GraphirError(f"a {kind} has no state to save", fix=f"save the {kind}, and its program with state=True")
    if not x.state:
        raise GraphirError(
            f"program {x.name!r} has no state to save", fix="capture a model that is not on meta, or state=False"
        )
    tensors = dict(x.state)
    records = describe(tensors)
    with atomic_write(_tensors_path(path)) as beside:
        write_tensors(tensors, beside)
        _save(x, path, records)


def load(path: str | Path) -> Net | Program | Plan:
    """Read a net, a program or a plan; the file says which.

    Saved tensors of a program are read when they are first asked for, with the strides of their blobs. Damage to the
    bytes of a tensor raises a FileError only then.

    Raises:
        FileError: the file is missing, too large, damaged, of another kind or of a newer format.
    """
    path = path_of(path)
    found, value = _read(read_bytes(path), str(path))
    if isinstance(found, ProgramFile) and isinstance(value, Program) and found.program.state is not None:
        return value.with_(state=StoredTensors(_tensors_path(path), found.program.state, stored_layouts(value)))
    return value


def load_stream(stream: BinaryIO, where: str) -> Net | Program | Plan:
    """Read a net, a program or a plan from a stream; a program without its tensors.

    Args:
        stream: of bytes.
        where: the stream's name in errors.

    Raises:
        FileError: as :func:`load`.
    """
    text = read_stream(stream, MOST_BYTES)
    refuse_tensors(text[:_HEAD], where)
    if len(text) > MOST_BYTES:
        raise FileError(f"more than {MOST_BYTES} bytes are not read", where=where)
    return _read(text, where)[1]


def to_json(x: Net | Program | Plan) -> str:
    """The JSON text of a net, a program or a plan, indented, without a program's tensors."""
    return pydantic_core.to_json(document_of(x), indent=2).decode()


def _read(text: bytes, where: str) -> tuple[AnyFile, Net | Program | Plan]:
    try:
        header = Header.model_validate_json(text)
    except ValidationError as e:
        if text.startswith(_TEXTS):
            fix = "read the text by graphir.parse(text); save() writes files"
            raise FileError("the file holds graphir's text, not its JSON", where=where, fix=fix) from None
        raise damaged(e, where, "this is not a file of graphir's, or the file was cut short") from None
    model = _FORMATS.get(header.format)
    if model is None:
        raise FileError(
            f"files of format {header.format!r} cannot be read{nearest(header.format, _FORMATS)}",
            where=where,
            fix=f"formats: {', '.join(_FORMATS)}",
        )
    if 1 <= header.version < OLDEST:
        raise FileError(
            f"the file has version {header.version} of its format, written by a development version",
            where=where,
            fix="load and save it with commit 75f5c08",
        )
    if not OLDEST <= header.version <= VERSION:
        raise FileError(
            f"the file has version {header.version} of its format, this graphir reads versions {OLDEST} to {VERSION}",
            where=where,
            fix="install a graphir that reads this version, or write the file again with this graphir",
        )
    try:
        with collector_paused():
            found = model.model_validate_json(text if header.version >= OPTIMIZERS_SINCE else with_optimizers(text))
            value = value_of(found)
            if header.version < FIELDS_SINCE:
                value = with_fields(value)
    except ValidationError as e:
        raise damaged(e, where, "the file was damaged or edited; write the file again") from None
    except GraphirError as e:
        raise FileError(e.what, where=f"{where}, at {e.where}", fix=e.fix) from None
    return found, value


def path_of(path: object) -> Path:
    """The path that a caller gave.

    Raises:
        FileError: *path* is not a path, or no file can have it.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise FileError(
            f"a path was expected, not {type(path).__name__}", fix="give the path of a file, a str or a Path"
        )
    try:
        possible = b"\0" not in os.fsencode(text) and Path(text).name != ""
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise FileError(f"no file can have the path {text!r}", fix="give the path of a file")
    return Path(text)


def _tensors_path(path: Path) -> Path:
    return path.with_name(path.name + ".safetensors")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        FileError: the file cannot be read, is a device other than a terminal, or has more than *most* bytes.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISBLK(found.st_mode) or (stat.S_ISCHR(found.st_mode) and not file.isatty()):
                raise FileError("the path names a device", where=str(path), fix="give the path of a file")
            nbytes = found.st_size
            refuse_tensors(file.peek(_HEAD)[:_HEAD], str(path))
            text = read_stream(file, most) if nbytes <= most else b""
    except OSError as e:
        raise FileError(f"the file cannot be read: {e.strerror}", where=str(path), fix="check the path") from None
    if max(nbytes, len(text)) > most:
        raise FileError(f"the file has {max(nbytes, len(text))} bytes; more than {most} are not read", where=str(path))
    return text


def refuse_tensors(head: bytes, where: str) -> None:
    """Refuse a file of tensors by its first bytes.

    Raises:
        FileError: *head* begins a checkpoint of torch.save or a safetensors file.
    """
    if head[:2] in _PICKLES or (head.startswith(b"PK") and b"data.pkl" in head):
        raise FileError(
            "the file is a checkpoint, as torch.save writes it",
            where=where,
            fix="read it by torch.load(path, weights_only=True), and load what it holds into the model before it is "
            "captured, or by session.load_state_dict",
        )
    if head[8:].startswith(b'{"') and int.from_bytes(head[:8], "little") < MOST_BYTES:
        raise FileError(
            "the file holds tensors, as safetensors writes them",
            where=where,
            fix="read it by safetensors.torch.load_file; of a program saved with its state, load the other file",
        )


def read_stream(stream: BinaryIO | BufferedIOBase, most: int) -> bytes:
    """The bytes of a stream, at most one more than *most*. The stream is read in chunks: a single read would allocate
    all *most* bytes at once."""
    chunks: list[bytes] = []
    left = most + 1
    while left and (chunk := stream.read(min(left, _CHUNK))):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def damaged(e: ValidationError, where: str, fix: str) -> FileError:
    """The error for a file that does not fit its model. It names the first mismatch."""
    first = e.errors(include_url=False, include_input=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return FileError(f"the file is damaged: {first['msg']}", where=f"{where}, at {place}" if place else where, fix=fix)


def _save(x: Net | Program | Plan, path: Path, state: Mapping[str, TensorRecord] | None = None) -> None:
    try:
        with collector_paused():
            text = pydantic_core.to_json(document_of(x, state))
    except (pydantic_core.PydanticSerializationError, UnicodeEncodeError) as e:
        raise FileError(f"the value cannot be written as JSON: {e}", where=str(path)) from e
    if len(text) > MOST_BYTES:
        raise FileError(f"the file would have {len(text)} bytes; more than {MOST_BYTES} are not read", where=str(path))
    with atomic_write(path) as temporary:
        temporary.write_bytes(text)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A new file in the same folder, which replaces *path* at the end, or is removed if anything fails.

    If *path* is a link, the new file replaces the link's target. A device or a pipe is never replaced.
    """
    file = Path(os.path.realpath(path))
    temporary = file.parent / f".{file.name}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise FileError("the path names a device or a pipe", where=str(path), fix="give the path of a file")
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # the writer may have replaced it by a private file
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException as e:
        with suppress(OSError):  # if the parent is no folder, there is nothing to remove
            temporary.unlink()
        if not isinstance(e, OSError):
            raise
        raise FileError(
            f"the file cannot be written: {e.strerror or e}", where=str(path), fix="check the path"
        ) from None
