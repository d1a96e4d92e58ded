"""Machines, as predictions see them: how fast each device computes, and what each directed link carries.

A link belongs to an ordered pair of devices, so that its two directions have their own bandwidth each, and a pair
without a link cannot exchange anything. A topology is a value: build it by hand, take a :meth:`Topology.named` one, or
keep it in a JSON file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from ..errors import FileError, GraphirError, nearest
from ..ir.device import Device, DeviceName
from ..ir.dtype import ITEMSIZE
from ..ir.files.disk import atomic_write, damaged, path_of, read_bytes
from ..ir.files.records import Header
from ..ir.size import LARGEST
from ..ir.text.nbytes import nbytes_of, nbytes_text
from .cost import Rates
from .tables import seconds_text, table

__all__ = ["MOST_BYTES", "Host", "Link", "Speed", "Topology"]

MOST_BYTES: Final = 1 << 24
"""The size above which a file is not read (16 MiB)."""

_FORMAT: Final = "graphir.topology"
_VERSION: Final = 1
_MOST_DEVICES: Final = 4096
_MOST_LINKS: Final = 1 << 16
_THIS: Final = "this "
"""How the name of the machine begins that this process runs on."""

PerSecond: TypeAlias = Annotated[float, Field(gt=0, le=1e24, allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Name: TypeAlias = Annotated[str, Field(pattern=r"^\P{Cc}*$", max_length=200)]


def _named_device(given: Any) -> str:
    try:
        return str(Device.parse(given))
    except GraphirError as e:
        raise ValueError(e.what) from None


MachineName: TypeAlias = Annotated[str, Field(pattern=r"^\P{Cc}*$", max_length=1000)]
Named: TypeAlias = Annotated[str, BeforeValidator(_named_device)]
"""A device, in any spelling that :meth:`~graphir.ir.device.Device.parse` takes, kept as it is printed."""


def _each_once(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """Devices, none of which is named twice in two spellings."""
    found = read(given)
    if len(found) < len(given):
        raise ValueError("a device is named twice: 'cpu' is 'cpu:0', 'cuda:0' is 'gpu:0'")
    return found


def _nbytes(given: Any) -> int:
    try:
        return nbytes_of(given)
    except GraphirError as e:
        raise ValueError(e.what) from None


class _Record(BaseModel):
    """Raises a GraphirError where it is not what it should be."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as e:
            first = e.errors(include_url=False, include_input=False)[0]
            name = type(self).__name__
            place = ".".join(map(str, first["loc"]))
            raise GraphirError(
                f"no {name.lower()}: {first['msg'].removeprefix('Value error, ')}",
                where=f"{name}(...), at {place}" if place else f"{name}(...)",
                fix="give positive finite numbers, devices as 'gpu:0' or 'cpu', and links between them",
            ) from None


class Speed(_Record):
    """How fast one device computes, and what it holds.

    Attributes:
        flops_per_second: of large matrix products, by element type (``f32``, ``bf16``, …); that of ``f32``, which has
            to be there, holds for what has none of its own.
        bytes_per_second: of its own memory.
        memory: bytes that it holds, as a number or as text like ``80 GiB``; None where nobody says.
        free: bytes of it that nobody held when the machine was asked; None where nobody says. Files do not keep them.
        seconds_per_call: what an operator takes however small it is: a launch, or a call.
        seconds_per_view: what one takes that makes nothing but views.
        machine: what this was measured on, as :class:`.Profile` names it, so that a profile of the same machine goes
            before the rates here; empty for figures from elsewhere.
    """

    flops_per_second: Annotated[dict[str, PerSecond], Field(max_length=len(ITEMSIZE))]
    bytes_per_second: PerSecond
    memory: Annotated[int, BeforeValidator(_nbytes), Field(le=LARGEST)] | None = None
    free: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    seconds_per_call: Seconds = 0.0
    seconds_per_view: Seconds = 0.0
    machine: MachineName = ""

    @field_validator("flops_per_second")
    @classmethod
    def _known_types(cls, given: dict[str, float]) -> dict[str, float]:
        for dtype in given:
            if dtype not in ITEMSIZE:
                raise ValueError(f"{dtype!r} is no element type{nearest(dtype, ITEMSIZE)}")
        if "f32" not in given:
            raise ValueError("the figure of f32 is missing, which holds for all types that have none of their own")
        return given

    def rates(self) -> Rates:
        """What operators there cost by."""
        return Rates(self.flops_per_second, self.bytes_per_second, self.seconds_per_call, self.seconds_per_view)


class Link(_Record):
    """What is carried from one device to another, in this direction.

    Attributes:
        source: the device that is read.
        destination: the one that is written.
        bytes_per_second: of large copies; to and from the host of pinned memory.
        latency: seconds that a copy takes however small it is.
        peer: whether the devices reach each other's memory; else copies between cards go through the host's.
        pageable_bytes_per_second: of large copies of memory of the host that is not pinned; None where nobody says.
    """

    source: Named
    destination: Named
    bytes_per_second: PerSecond
    latency: Seconds = 0.0
    peer: bool = False
    pageable_bytes_per_second: PerSecond | None = None

    @model_validator(mode="after")
    def _apart(self) -> Link:
        if self.source == self.destination:
            raise ValueError(f"a link leads from {self.source} to itself")
        return self

    def seconds(self, nbytes: int) -> float:
        """What a copy of so many bytes takes when it has the link to itself."""
        return self.latency + nbytes / self.bytes_per_second


class Host(_Record):
    """What devices share that are threads of one host.

    Attributes:
        cores: how many kernels compute at once.
        slowdown: how many times as long a kernel takes beside another one, since they share caches and memory.
    """

    cores: Annotated[int, Field(ge=1, le=1 << 16)]
    slowdown: Annotated[float, Field(ge=1, le=100, allow_inf_nan=False)] = 1.0


class Topology(_Record):
    """Devices and the links between them.

    Attributes:
        name: what tables call it.
        devices: how fast each is, by its name in programs, such as ``gpu:0`` or ``cpu:0``.
        links: directed, at most one from each device to each other one.
        host: what the devices share if they are threads of one host; None where each computes for itself.
        machine: which machine this was measured on; empty for figures from elsewhere. Of a host, as :class:`.Profile`
            names it: that holds for all devices that name no machine of their own.
        measured: the date of that, as ``2026-11-28``; empty where nothing was measured.
        source: whence the figures are where nothing was measured, as reports say it.
        seconds_to_issue: what one host thread takes, in Python, to issue a short kernel to a card; None where nobody
            says, and 5 µs are assumed.
    """

    name: Name
    devices: Annotated[dict[Named, Speed], Field(min_length=1, max_length=_MOST_DEVICES), WrapValidator(_each_once)]
    links: Annotated[tuple[Link, ...], Field(max_length=_MOST_LINKS)] = ()
    host: Host | None = None
    machine: MachineName = ""
    measured: Annotated[str, Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")] = ""
    source: Name = ""
    seconds_to_issue: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Topology:
        pairs = set()
        for link in self.links:
            pair = link.source, link.destination
            for device in pair:
                if device not in self.devices:
                    raise ValueError(f"a link leads from {pair[0]} to {pair[1]}, and there is no {device}")
            if pair in pairs:
                raise ValueError(f"two links lead from {pair[0]} to {pair[1]}")
            pairs.add(pair)
        return self

    @staticmethod
    def named(name: str) -> Topology:
        """A machine of which the makers' figures are public: ``h200x8``, ``a100x8`` or ``cpu``.

        They are peaks, which no kernel reaches quite; a step takes longer. See :mod:`.machines`.

        Raises:
            GraphirError: there is none of that name.
        """
        from .machines import MACHINES

        if not isinstance(name, str) or name not in MACHINES:
            raise GraphirError(
                f"no topology has the name {name!r}{nearest(name, MACHINES)}",
                fix=f"named ones: {', '.join(MACHINES)}; or Topology.load(path), or build one by hand",
            )
        return MACHINES[name]()

    @staticmethod
    def of(*cards: str, link: str = "pcie4x16", tf32: bool = False) -> Topology:
        """A machine with these cards, by public figures: ``Topology.of("rtx3090", "rtx4090", link="pcie4x8")``.

        Args:
            cards: their names, of ``gpu:0``, ``gpu:1``, …; see :mod:`.cards`.
            link: between each two of them, such as ``pcie4x16`` or ``nvlink4``. PCI Express leads to the host too.
            tf32: whether f32 is multiplied in TF32, as ``torch.set_float32_matmul_precision("high")`` has it.

        Raises:
            GraphirError: no card or no link has such a name.
        """
        from .cards import topology_of

        return topology_of(cards, link, tf32=tf32)

    @staticmethod
    def here(devices: Sequence[DeviceName] = (), *, threads: int = 1, refresh: bool = False) -> Topology:
        """The machine that this process runs on: where predictions are of no other machine.

        Its CUDA cards, the links between them and to the host, and the host: measured in some seconds, and kept in a
        file until driver, cards or versions change. Free bytes are asked anew each time. A machine without cards is its
        host, for logical devices whose kernels share its cores.

        Args:
            devices: the logical devices that the machine is for: of a host as many as wanted, by default as many gpus
                as it has cores. Each gpu has to be one of the cards, which are all there in any case.
            threads: how many threads one kernel of a logical device of the host uses.
            refresh: measure anew.

        Raises:
            GraphirError: *devices* or *threads* are none, there is no card of that number, or a card has no room for
                what it is measured with.
            FileError: the file that the environment names has the figures of another machine, or something else.
        """
        from graphir.runtime.machine.here import here

        return here(devices, threads=threads, refresh=refresh)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a topology that :meth:`save` wrote, or a text editor.

        Raises:
            FileError: the file is missing, too large, damaged, of another kind or of a newer format.
        """
        path = path_of(path)
        text = read_bytes(path, MOST_BYTES)
        fix = "write it again with Topology.save, or mend it"
        try:
            header = Header.model_validate_json(text)
            if header.format != _FORMAT:
                raise FileError(
                    f"the file holds a {header.format!r}, not a topology", where=str(path), fix="name another"
                )
            if header.version != _VERSION:
                raise FileError(
                    f"the file has version {header.version} of its format, this graphir reads version {_VERSION}",
                    where=str(path),
                    fix=fix,
                )
            return _TopologyFile.model_validate_json(text).topology
        except ValidationError as e:
            raise damaged(e, str(path), fix) from None
        except GraphirError as e:
            if isinstance(e, FileError):
                raise
            raise FileError(f"the file is damaged: {e.what}", where=str(path), fix=fix) from None

    def save(self, path: str | Path) -> None:
        """Write the topology as JSON, whole or not at all; :meth:`load` reads it.

        Free bytes are those of a moment, and left out; *this* machine is *the* machine for whoever reads the file.

        Raises:
            FileError: the file cannot be written.
        """
        with atomic_write(path_of(path)) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """What :meth:`save` writes, as text."""
        speeds = {device: speed.model_copy(update={"free": None}) for device, speed in self.devices.items()}
        name = f"the {self.name.removeprefix(_THIS)}" if self.name.startswith(_THIS) else self.name
        kept = self.model_copy(update={"devices": speeds, "name": name})
        file = _TopologyFile(format="graphir.topology", version=1, topology=kept)
        return file.model_dump_json(exclude_defaults=True, indent=1)

    @property
    def whence(self) -> str:
        """Whence the figures are: ``measured 2026-11-28``, ``by its makers' figures``, …"""
        return f"measured {self.measured}" if self.measured else self.source or "figures given"

    @property
    def about(self) -> str:
        """The machine as reports say it, with whence its figures are."""
        return f"{self.name}, {self.whence}"

    def __str__(self) -> str:
        types = list(dict.fromkeys(dtype for speed in self.devices.values() for dtype in speed.flops_per_second))
        head = ("device", "memory", "free", *[f"{dtype} TFLOP/s" for dtype in types], "GB/s", "a call", "a view")
        rows = [
            (
                device,
                *["-" if n is None else nbytes_text(n) for n in (speed.memory, speed.free)],
                *[f"{speed.flops_per_second.get(dtype, 0.0) / 1e12:,.3g}" for dtype in types],
                f"{speed.bytes_per_second / 1e9:,.4g}",
                seconds_text(speed.seconds_per_call),
                seconds_text(speed.seconds_per_view),
            )
            for device, speed in self.devices.items()
        ]
        lines = [self.about, *table(head, rows)]
        if self.seconds_to_issue is not None:
            lines.append(f"the host issues a kernel in {seconds_text(self.seconds_to_issue)}")
        links = []
        for link in self.links:
            pageable = link.pageable_bytes_per_second
            figures = f"{link.bytes_per_second / 1e9:,.4g}", "-" if pageable is None else f"{pageable / 1e9:,.4g}"
            peer = "peers" if link.peer else ""
            links.append((f"{link.source} -> {link.destination}", *figures, seconds_text(link.latency), peer))
        return "\n".join([*lines, *table(("link", "GB/s", "pageable", "latency", ""), links)])

    @cached_property
    def _links(self) -> Mapping[tuple[str, str], Link]:
        return {(link.source, link.destination): link for link in self.links}

    def speed(self, device: str) -> Speed:
        """How fast a device is.

        Raises:
            GraphirError: the topology does not have it.
        """
        found = self.devices.get(device)
        if found is None:
            raise GraphirError(
                f"topology {self.name!r} has no device {device}{nearest(device, self.devices)}",
                fix=f"its devices: {_some(self.devices)}; place the program on them, or give another topology",
            )
        return found

    def link(self, source: str, destination: str) -> Link:
        """What leads from one device to another.

        Raises:
            GraphirError: nothing does, or the topology does not have one of them.
        """
        found = self._links.get((source, destination))
        if found is None:
            self.speed(source)
            self.speed(destination)
            raise GraphirError(
                f"topology {self.name!r} has no link from {source} to {destination}",
                fix=f"add {{'source': '{source}', 'destination': '{destination}', 'bytes_per_second': …}} to its links",
            )
        return found


class _TopologyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["graphir.topology"]
    version: Literal[1]
    topology: Topology


def _some(names: Mapping[str, object], most: int = 10) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
