"""Choose what to move, park and recompute, so that every device keeps within its limit and a step takes least.

::

    balanced = passes.balance(program, {"gpu:0": "3.3 GiB", "gpu:1": "3.3 GiB"})
    print(balanced)             peaks, busy seconds and bytes over links before and after; the gap to the bound
    balanced.pipeline           shift_modules{modules={layer1: gpu:1}} | park{what=[layer2], to=gpu:1}
    balanced.program            placed, for inject_copies and emit

Plans that a person would try come first (:mod:`.choice.by_hand`): nothing is refused that one of them keeps. Then the
step is seen as a few dozen groups of modules (:mod:`.choice`). A local search over placements of these simulates
each in time and memory; what it finds is emitted, and where the plan holds more than the groups said, the search goes
on with that in mind.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, NonNegativeFloat, PositiveInt

from graphir.analysis.memory import check_profile, check_threads
from graphir.analysis.profile_files import profile_of
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.collector import collector_paused
from graphir.errors import GraphirError, PassError
from graphir.ir.device import CPU, Device, DeviceName
from graphir.ir.program import Program
from graphir.ir.verify import blamed

from .base import OptionError, Pass, Placed, build, read_option, register, require_program
from .choice.asked import OPTIONS, Asked, Option
from .choice.attempts import Budget
from .choice.by_shares import balanced
from .choice.hosted import on_host
from .choice.nearest import nearest_limits
from .choice.refusals import Refused, refusal
from .choice.report import Balanced
from .limits import AutoLimits, free_limits
from .machines import Machine
from .module_patterns import leaves_out
from .saved import require_captured
from .standing import Order

__all__ = ["Balance", "balance", "requested"]


def _pinned(given: Any) -> str | None:
    """Where modules have to be; None of what is left out. Accelerate's maps have ``disk``, too."""
    if given is None:
        return None
    fix = "pin modules to gpus, such as 'cuda:0' or 0, or to 'cpu'"
    if given == "disk":
        raise OptionError("no module is put on 'disk'", fix=fix)
    return str(read_option(Device.parse, given, fix))


@register
class Balance(Pass):
    """See :func:`balance`. In a pipeline it stands for the passes that it chooses, which the history has."""

    name: ClassVar[str] = "balance"
    never_behind: ClassVar[Order] = {
        "copied": "another placement needs other copies",
        "parked": "balance parks what has to be",
        "shared": "an operand that moves would be overwritten in a copy alone",
    }

    limits: AutoLimits
    topology: Machine = None
    options: tuple[Option, ...] = OPTIONS
    devices: tuple[Placed, ...] = ()
    pin: Annotated[dict[str, Annotated[str | None, BeforeValidator(_pinned)]], AfterValidator(leaves_out)] = {}  # noqa: RUF012
    whole: tuple[str, ...] = ()
    seconds: Annotated[NonNegativeFloat, AllowInfNan(False)] = 2.0
    evaluations: PositiveInt | None = None
    seed: int = 0

    def recorded(self, program: Program) -> Program:
        return self.balanced(program).program

    def balanced(
        self,
        program: Program,
        profile: Profile | Literal["cached"] | None = None,
        threads: int = 1,
        remedy: str = "",
        place: Topology | None = None,
        like: str = "",
    ) -> Balanced:
        """The placement, with what led to it.

        Args:
            program: as :func:`balance` takes it.
            profile: likewise.
            threads: likewise.
            remedy: what callers can do where nothing is within the limits, beside giving more; by default, what those
                of :func:`balance` can.
            place: the machine at hand, where no topology was given and the caller knows how devices are bound.
            like: the passes of the only placement that will do, as text; by default any.
        """
        self.require_order(program)
        require_captured(program, self.name)
        if CPU in self.pin.values():
            there, pin = on_host(program, self.pin, "shift" in self.options)
            found = self.model_copy(update={"pin": pin}).balanced(there, profile, threads, remedy, place)
            return replace(found, pipeline=" | ".join(found.program.history[len(program.history) :]))
        with collector_paused(), blamed(program):
            begun = time.perf_counter()
            asked = self.asked(program, profile, threads, place)._replace(known=like, only=bool(like))
            try:
                return balanced(asked)
            except Refused as refused:
                limits, works = nearest_limits(asked, refused, begun)
                of_free = self.limits == "auto"
                raise refusal(asked, refused, limits, works=works, of_free=of_free, remedy=remedy) from None
            except GraphirError as e:  # a reduction lacks a link
                raise e if isinstance(e, PassError) else PassError(f"balance: {e.what}", at=e.at, fix=e.fix) from None

    def at_hand(self, program: Program, threads: int) -> Topology:
        """The machine that this process runs on.

        Raises:
            PassError: it lacks a device.
        """
        limits = () if self.limits == "auto" else self.limits
        try:
            return Topology.here([*program.devices, *limits, *self.devices], threads=threads)
        except GraphirError as e:
            raise PassError(f"balance: {e.what}", where=e.where, fix=e.fix) from None

    def asked(
        self,
        program: Program,
        profile: Profile | Literal["cached"] | None,
        threads: int,
        place: Topology | None = None,
    ) -> Asked:
        """What the options ask of a program on a machine; as :meth:`balanced` takes them."""
        place = self.topology or place or self.at_hand(program, threads)
        budget = Budget(self.seconds, self.evaluations, self.seed)
        return Asked(
            program=program,
            limits=self.free(program, place) if self.limits == "auto" else self.limits,
            topology=place,
            named=self.topology,
            profile=profile_of(place) if profile == "cached" else profile,
            threads=threads,
            options=self.options,
            devices=self.devices,
            pin=self.pin,
            whole=self.whole,
            budget=budget,
            free=self.limits == "auto",
        )

    def free(self, program: Program, place: Topology) -> dict[str, int]:
        """The limits that ``auto`` stands for."""
        others = self.devices
        if not others and place.host is None:
            others = tuple([device for device in place.devices if not Device.parse(device).is_host])
        return dict(free_limits(place, [*program.devices, *others]))


def balance(
    program: Program,
    limits: Mapping[DeviceName, int | str] | Literal["auto"],
    *,
    topology: Topology | str | None = None,
    options: Sequence[Option] = OPTIONS,
    devices: Sequence[DeviceName] = (),
    pin: Mapping[str, DeviceName | None] | None = None,
    whole: Sequence[str] = (),
    seconds: float = 2.0,
    evaluations: int | None = None,
    seed: int = 0,
    profile: Profile | Literal["cached"] | None = None,
    threads: int | None = 1,
) -> Balanced:
    """Find the placement that keeps within limits and whose step is shortest.

    Modules move to devices that are named in *limits* or *devices*; saved activations are parked there or on the host,
    or computed again; optimizer state is parked likewise, between updates. Where *limits* names the host and nothing
    else keeps within them or is as fast, the host runs some modules, with the bits of its kernels. It goes after
    :func:`replicate` and before :func:`inject_copies`. Limits are of what a plan holds, :func:`graphir.memory`'s peak.
    What an allocator rounds up and libraries take for themselves (a CUDA context, some 500 MB; cuBLAS, 32 MiB a stream)
    comes on top, so leave room for it.

    Args:
        program: captured, replicated or sharded.
        limits: by device, the most that it may hold, in bytes or as text: ``{"gpu:0": "3.3 GiB"}``. ``auto``: what is
            free, less 5 %, on the program's devices, those in *devices*, by default all cards that are there, and the
            host, whose logical devices share it. Of a *topology* that is not the machine at hand, the memory that it
            has, less 5 %.
        topology: how fast devices and links are: a topology, or the name of one; by default this machine, as
            :meth:`.Topology.here` has it. A device that has no limit may hold as much as the topology says.
        options: what may be done; by default all that changes no bit. Beside these, ``updates`` runs updates of parked
            state where it is parked: on the host, with the bits of its kernels, as :func:`park` has it. ``shares``
            divides the batch otherwise among replicas, by how fast they are and what their devices hold: means stay
            those of the whole batch, with other bits.
        devices: that may be used beside those in *limits*.
        pin: by pattern of modules, the gpu where they have to be, or ``"cpu"``: then the host runs them, and the search
            moves the others. Accelerate's ``device_map`` is one, if it leaves nothing on disk.
        whole: patterns of modules that are not taken apart.
        seconds: how long to search.
        evaluations: how many placements beside plain ones to look at instead, at most: with all options, without the
            last of ``shift``, ``park``, ``recompute``, ``state``, ``updates``, ``share_storage``, without the last two,
            and so on. Equal numbers and seeds give equal programs; a larger number, or one more option behind the
            others, gives no longer step. That holds for equal figures of the machine; those of a host are measured once
            a process.
        seed: of the search's random changes.
        profile: what :func:`graphir.profile` measured on that machine; shapes alone by default. ``cached``: what this
            machine's file has, if the topology was measured here.
        threads: how many threads one kernel uses, as the profile has it; None: as many as torch now does.

    Raises:
        PassError: no placement that keeps within the limits is found; it says what is missing where, and limits that
            work. Or *program* is none, a device is unknown or not there, limits are none, a link, the memory of a
            device or the arithmetic of an element type is missing, a pattern names no module, or options have
            ``shares`` and the program has one replica or fixed sizes. Nothing has changed then.
    """
    given, count = requested(
        Balance.name,
        program,
        profile,
        threads,
        limits=limits,
        topology=topology,
        options=options,
        devices=devices,
        pin=pin or {},
        whole=whole,
        seconds=seconds,
        evaluations=evaluations,
        seed=seed,
    )
    return given.balanced(program, profile, count)


def requested(
    by: str, program: Program, profile: Profile | Literal["cached"] | None, threads: int | None, **options: object
) -> tuple[Balance, int]:
    """The pass with its options, and the threads that one kernel uses.

    Args:
        by: the function that a user has called, for messages.
        program: as :func:`balance` takes it; so are all others.

    Raises:
        PassError: one of them is none.
    """
    require_program(program, by)
    given = build(Balance, **options)
    try:
        check_profile(profile)
        check_threads(threads)
    except GraphirError as e:
        raise PassError(f"{by}: {e.what}", fix=e.fix) from None
    return given, torch.get_num_threads() if threads is None else threads
