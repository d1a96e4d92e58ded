"""Files of Caffe2's nets: ``NetDef`` in binary (``.pb``) and as text (``.pbtxt``), each also compressed (``.gz``).

A file is read whole and refused where this schema cannot say everything that it says, so that nothing is lost when the
net is written again. Files are written whole or not at all, with the same bytes for the same net.
"""

from __future__ import annotations

import zlib
from gzip import BadGzipFile, GzipFile
from io import BytesIO
from pathlib import Path
from typing import Final

from ..errors import FileError, nearest
from ..ir.files.disk import MOST_BYTES, atomic_write, path_of, read_bytes, read_stream
from .schema import Message, messages

__all__ = ["read_net", "write_net"]

_SUFFIXES: Final = (".pb", ".pbtxt", ".pb.gz", ".pbtxt.gz")
_ONE_NET: Final = "give the file of one NetDef; a plan, a workspace and another framework's model are none"
_MOST_SHOWN: Final = 200
_UNPACKED: Final = 1 << 21
_TIMES_PACKED: Final = 32
"""A compressed file unpacks to at most so many bytes, or so many times its own: packed, nets have a thirteenth of their
size, their text a twenty-fifth. So a small file takes little time and memory, whatever it says."""
_DEEPEST: Final = "nets are nested up to 33 deep, as protobuf reads 100 messages in one another"


def read_net(path: str | Path) -> Message:
    """Read a ``NetDef``.

    Raises:
        FileError: the file is missing, damaged or too large, or holds something else than a ``NetDef``.
    """
    path = path_of(path)
    suffix = _suffix(path)
    content = read_bytes(path)
    if suffix.endswith(".gz"):
        content = _unpacked(content, path)
    message = _from_text(content, path) if suffix.startswith(".pbtxt") else _from_bytes(content, path)
    _refuse_partial(message, path)
    return message


def write_net(message: Message, path: str | Path) -> None:
    """Write a ``NetDef``, in the form that the end of the file's name says.

    Raises:
        FileError: the file cannot be written; one that stood there before is as it was.
    """
    path = path_of(path)
    suffix = _suffix(path)
    _refuse_deep(message, path)
    content: bytes = message.SerializeToString(deterministic=True)
    if not content:
        raise FileError("the net has no name and no operator, and an empty file is not read", where=str(path))
    if suffix.startswith(".pbtxt"):
        from google.protobuf import text_format

        content = text_format.MessageToString(message, as_utf8=False).encode()
    if len(content) > MOST_BYTES:
        raise FileError(
            f"the file would have {len(content)} bytes; more than {MOST_BYTES} are not read", where=str(path)
        )
    if suffix.endswith(".gz"):
        size, content = len(content), _packed(content)
        if size > _most_unpacked(content):
            what = f"the file would have {len(content)} bytes and unpack to {size}; more than {_most_unpacked(content)}"
            raise FileError(f"{what} are not read", where=str(path), fix="write it without .gz")
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def _suffix(path: Path) -> str:
    found = "".join(path.suffixes[-2:] if path.suffix == ".gz" else path.suffixes[-1:])
    if found not in _SUFFIXES:
        what = f"the name {path.name!r} does not say how the net is written{nearest(found, _SUFFIXES)}"
        raise FileError(what, where=str(path), fix=f"end it in {', '.join(_SUFFIXES)}")
    return found


def _packed(content: bytes) -> bytes:
    """Compressed, without the time and the file's name, so that one net has one file."""
    packed = BytesIO()
    with GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as file:
        file.write(content)
    return packed.getvalue()


def _unpacked(packed: bytes, path: Path) -> bytes:
    most = _most_unpacked(packed)
    try:
        with GzipFile(fileobj=BytesIO(packed)) as file:
            content = read_stream(file, most)
    except (BadGzipFile, EOFError, zlib.error) as e:
        raise FileError(f"the file is not compressed, or damaged: {e}", where=str(path), fix="write it again") from None
    if len(content) > most:
        what = f"the file of {len(packed)} bytes unpacks to more than {most}, which are not read"
        raise FileError(what, where=str(path), fix="unpack it if you trust it, and give the unpacked file")
    return content


def _most_unpacked(packed: bytes) -> int:
    return min(MOST_BYTES, max(_UNPACKED, _TIMES_PACKED * len(packed)))


def _from_bytes(content: bytes, path: Path) -> Message:
    from google.protobuf.message import DecodeError

    try:
        return messages().NetDef.FromString(content)
    except (DecodeError, UnicodeDecodeError):
        raise FileError(
            "the file is not a NetDef, or it was cut short or damaged", where=str(path), fix=f"{_ONE_NET}; {_DEEPEST}"
        ) from None


def _from_text(content: bytes, path: Path) -> Message:
    from google.protobuf import text_format

    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        where = f"{path}, at line {content.count(10, 0, e.start) + 1}"
        raise FileError("the file is not text in UTF-8", where=where, fix=_ONE_NET) from None
    try:
        message = text_format.Parse(text, messages().NetDef())
    except text_format.ParseError as e:
        line, lines = e.GetLine() or 1, text.split("\n")
        what = str(e).removeprefix(f"{line}:{e.GetColumn()} : ").partition("\n")[0]
        at = lines[line - 1].strip()[:_MOST_SHOWN]
        raise FileError(
            f"the file is not a NetDef: {what}", at=at, where=f"{path}, at line {line}", fix=_ONE_NET
        ) from None
    except RecursionError:
        raise FileError("the nets in the file are nested too deep", where=str(path), fix=_DEEPEST) from None
    _refuse_deep(message, path)
    return message


def _refuse_deep(message: Message, path: Path) -> None:
    """Refuse what protobuf writes but does not read."""
    from google.protobuf.message import DecodeError

    try:
        messages().NetDef.FromString(message.SerializePartialToString())
    except DecodeError:
        raise FileError("the nets are nested too deep", where=str(path), fix=_DEEPEST) from None


def _refuse_partial(message: Message, path: Path) -> None:
    """Refuse what parses but is no net, or not all of one."""
    for position, op in enumerate(message.op):
        if not op.type:
            raise FileError("an operator has no type", where=f"{path}, at op[{position}]", fix=_ONE_NET)
    if not message.IsInitialized():
        missing = message.FindInitializationErrors()[0]
        raise FileError("a required field is missing", where=f"{path}, at {missing}", fix=_ONE_NET)
    if not message.ByteSize():
        raise FileError("the file is empty", where=str(path), fix=_ONE_NET)
    if _has_unknown(message):
        positions = (position for position, op in enumerate(message.op) if _has_unknown(op))
        place = next((f"{path}, at op[{position}]" for position in positions), str(path))
        what = "the file has fields or values that a NetDef does not have, so that they would be lost"
        raise FileError(what, where=place, fix=f"{_ONE_NET}, as Caffe2 in torch 1.8.1 writes it")


def _has_unknown(message: Message) -> bool:
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return bool(known.ByteSize() != message.ByteSize())
