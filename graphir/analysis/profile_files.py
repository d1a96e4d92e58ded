"""The file of a profile: JSON, written whole or not at all, to which several processes can add at once.

Processes take turns: each reads what is there, adds its own and replaces the file, while it holds a lock on the file of
the same name with ``.lock`` at its end, which stays.

By default a machine's file is ``profile-<digest of machine and versions>.json`` in the folder ``graphir`` of
``$XDG_CACHE_HOME`` (``~/.cache``): one of the host, and one of each kind of card. The variable ``GRAPHIR_PROFILE``
names another file for the host's, and cards have theirs beside it, with a digest at the end of the name; where it is
empty, there is none.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import FileError, ProfileWarning, warn
from ..ir.files.disk import atomic_write, damaged, path_of, read_bytes
from ..ir.files.records import Header
from ..ir.size import LARGEST
from .profiles import Machine, Measured, Profile, cards, machine
from .topology import Topology

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "MOST_BYTES",
    "add",
    "alone",
    "at_hand",
    "cache_file",
    "cached",
    "default_path",
    "profile_of",
    "read_profile",
]

_FORMAT: Final = "graphir.profile"
_VERSION: Final = 1

MOST_BYTES: Final = 1 << 26
"""The size above which a profile is not read (64 MiB)."""

_PATIENCE: Final = 30.0
"""Seconds that a process waits for others to write a file."""

Bytes: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _MachineRecord(_Record):
    device: str
    torch: str
    graphir: str
    driver: str = ""


class _CallRecord(_Record):
    scratch: Bytes
    kept: Annotated[int, Field(ge=-LARGEST, le=LARGEST)] = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    bound: bool = False
    beside: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    launches: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    issue: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class _ProfileFile(_Record):
    format: Literal["graphir.profile"]
    version: Literal[1]
    machine: _MachineRecord
    calls: dict[str, _CallRecord]


def default_path(of: Machine | None = None) -> Path | None:
    """The file of a machine's profile, by default this host's, whether it is there or not; None where the environment
    wants none, or the user has no home."""
    digest = hashlib.sha256(str(of or machine()).encode()).hexdigest()[:16]
    path = cache_file("GRAPHIR_PROFILE", f"profile-{digest}.json")
    if path is not None and of is not None and of.driver and os.environ.get("GRAPHIR_PROFILE"):
        return path.with_name(f"{path.name}.{digest}")  # the file that the environment names is the host's
    return path


def cache_file(variable: str, name: str) -> Path | None:
    """The file that an environment *variable* names, else the one of that *name* among this user's caches; None where
    the variable is empty, or the user has no home."""
    named = os.environ.get(variable)
    if named is not None:
        return path_of(named) if named else None
    folder = os.environ.get("XDG_CACHE_HOME", "")
    # Relative ones are to be ignored, says the XDG Base Directory Specification.
    root = Path(folder) if Path(folder).is_absolute() else Path(os.path.expanduser("~/.cache"))  # noqa: PTH111  # no error
    return root / "graphir" / name if root.is_absolute() else None


def read_profile(path: str | Path) -> Profile:
    """See :meth:`Profile.load`."""
    path = path_of(path)
    text = read_bytes(path, MOST_BYTES)
    fix = "remove it, and profile again"
    try:
        header = Header.model_validate_json(text)
        if header.format != _FORMAT:
            raise FileError(f"the file holds a {header.format!r}, not a profile", where=str(path), fix="name another")
        if header.version != _VERSION:
            raise FileError(
                f"the file has version {header.version} of its format, this graphir reads version {_VERSION}",
                where=str(path),
                fix=fix,
            )
        found = _ProfileFile.model_validate_json(text)
    except ValidationError as e:
        raise damaged(e, str(path), fix) from None
    of = Machine(**found.machine.model_dump())
    calls = {key: Measured(**call.model_dump()) for key, call in found.calls.items()}
    return Profile(of, MappingProxyType(calls))


def add(path: Path, profile: Profile) -> Profile:
    """Add what was measured to a file, which is made where there is none; what the file has then.

    Raises:
        FileError: the file cannot be read or written, is damaged, or is of another machine; it is as it was.
    """
    with alone(path):
        before = of_machine(path, profile.machine) if path.exists() else None
        calls = {**(before.calls if before else {}), **profile.calls}
        if profile.calls:
            _write(path, profile.machine, calls)
    return Profile(profile.machine, MappingProxyType(calls), profile.failed)


def of_machine(path: Path, wanted: Machine) -> Profile:
    """The profile in a file.

    Raises:
        FileError: as :func:`read_profile`, or it is of another machine or version.
    """
    found = read_profile(path)
    if found.machine != wanted:
        raise FileError(
            f"the profile is of another machine or version: {found.machine}; this is {wanted}",
            where=str(path),
            fix="name another file, or remove this one",
        )
    return found


def _write(path: Path, of: Machine, calls: Mapping[str, Measured]) -> None:
    records = {key: _CallRecord(**call._asdict()) for key, call in sorted(calls.items())}
    file = _ProfileFile(format="graphir.profile", version=1, machine=_MachineRecord(**of._asdict()), calls=records)
    text = file.model_dump_json(exclude_defaults=True, indent=1).encode()
    if len(text) > MOST_BYTES:
        raise FileError(
            f"the profile would have {len(text)} bytes; more than {MOST_BYTES} are not read",
            where=str(path),
            fix="remove the file, and profile again",
        )
    with atomic_write(path) as temporary:
        temporary.write_bytes(text)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Until its end no other process adds to the file. Where the system has no ``flock``, nothing keeps them apart."""
    first = path.parts[0]
    if first.startswith("~") and not Path(first).exists():
        raise FileError(
            f"there is no folder {first!r} here, and only a shell takes ~ for a home",
            where=str(path),
            fix="write the path out: Path(...).expanduser()",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(path.name + ".lock").open("ab")
    except OSError as e:
        raise FileError(
            f"the file cannot be written: {e.strerror or e}", where=str(path), fix="check the path, or name another"
        ) from None
    with lock:
        if fcntl is not None:
            _take(lock.fileno(), path)
        yield


def _take(lock: int, path: Path) -> None:
    """Lock a file; closing it, or the end of the process, unlocks it."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise FileError(
                    f"another process has been writing the file for {_PATIENCE:.0f} s",
                    where=str(path),
                    fix="end it, or name another file",
                ) from None
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return


class _Kept(NamedTuple):
    """A profile that was read, and what its file was then."""

    stamp: tuple[int, int, int]
    profile: Profile | None


_kept: dict[Path, _Kept] = {}


def cached(of: Machine | None = None) -> Profile | None:
    """A machine's profile, if there is one; by default this host's. What cannot be used is told of by a
    :class:`ProfileWarning`, once.

    It is read anew when its file has changed.
    """
    wanted = of or machine()
    path = default_path(wanted)
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    stamp = found.st_mtime_ns, found.st_size, found.st_ino
    kept = _kept.get(path)
    if kept is None or kept.stamp != stamp:
        kept = _kept[path] = _Kept(stamp, _usable(path, wanted))
    return kept.profile if kept.profile is not None and kept.profile.machine == wanted else None


def at_hand() -> Profile | None:
    """What files have of this host, and of each ``gpu`` the card of that number, where this process sees cards."""
    return _joined(cached(), {f"gpu:{number}": found for number, found in enumerate(cards())})


def profile_of(topology: Topology) -> Profile | None:
    """What files have of the machines that a topology's devices were measured on."""
    host = str(machine())
    names = {device: speed.machine or topology.machine for device, speed in topology.devices.items()}
    others = {speed.machine for speed in topology.devices.values()} - {"", host}
    known = {str(found): found for found in cards()} if others else {}
    of = {device: known[name] for device, name in names.items() if name in known}
    return _joined(cached() if host in names.values() else None, of)


def _joined(host: Profile | None, on_cards: Mapping[str, Machine]) -> Profile | None:
    """A host's profile with those of the cards that devices are; None where nothing was measured."""
    found = {of: cached(of) or Profile(of, {}) for of in dict.fromkeys(on_cards.values())}
    if host is None and not any(profile.calls for profile in found.values()):
        return None
    devices = {device: found[of] for device, of in on_cards.items()}
    return replace(host or Profile(machine(), {}), devices=devices)


def _usable(path: Path, wanted: Machine) -> Profile | None:
    """The profile in the file, None where it is not this machine's, or cannot be read."""
    try:
        return of_machine(path, wanted)
    except FileError as e:
        warn(f"{path} is left out of predictions: {e.what} (fix: {e.fix})", ProfileWarning)
        return None
