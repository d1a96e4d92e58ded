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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import torch
from pydantic import AfterValidator, AllowInfNan, BeforeValidator, NonNegativeFloat, PositiveInt

from graphir.analysis.element_types import refuse_element_types
from graphir.analysis.execution import streams_of
from graphir.analysis.memory import check_profile, check_threads
from graphir.analysis.profile_files import profile_of
from graphir.analysis.profiles import Profile
from graphir.analysis.topology import Topology
from graphir.collector import collector_paused
from graphir.errors import GraphirError, PassError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.device import CPU, Device, DeviceName
from graphir.ir.module_patterns import lineage
from graphir.ir.names import base_name, micro_batches
from graphir.ir.program import Program
from graphir.ir.text import nbytes_text, operator_text
from graphir.ir.verify import blamed

from .base import OptionError, Pass, Pipeline, Placed, build, read_option, register, require_program
from .choice.attempts import Attempt, Attempts, Budget
from .choice.by_hand import ByHand, Hand
from .choice.groups import Grouped, Reading, Wanted
from .choice.hosted import on_host
from .choice.least import exceeded, least
from .choice.levels import Levels
from .choice.moves import placed
from .choice.outcome import Outcomes
from .choice.places import Reasons, device_map
from .choice.plans import Emitted, Plans
from .choice.problem import Choice, Problem
from .choice.proven import needed, proven
from .choice.report import Balanced, DeviceUse, LinkBytes
from .copies import InjectCopies
from .emit import instructed
from .limits import AutoLimits, free_limits
from .machines import Machine
from .module_patterns import claims, leaves_out, weighted_modules
from .saved import require_captured
from .standing import Order

__all__ = ["Balance", "balance"]

T = TypeVar("T")

Option: TypeAlias = Literal["shift", "park", "recompute", "share_storage"]

_OPTIONS: Final[tuple[Option, ...]] = ("shift", "park", "recompute", "share_storage")

_USED_UP: Final = 0.9
"""Of a device on which less is free than this share of its memory, a refusal of ``limits="auto"`` says so."""

_WORSE: Final = 1.03
"""How many times as long as another's a step may be, as its groups say, so that a plan is worth a look."""

_MOST_EMITTED: Final = 20_000
"""Operators of a program above which peaks and seconds are not those of an emitted plan: it would take longer than the
search."""

_ATTEMPTS: Final = 4
"""How often the search goes on where a plan holds more than the groups said."""

_TRIES: Final = 6
_TRYING: Final = 0.25
_LARGER: Final = 1.05
"""How often limits that a refusal is to name are tried, and in what part of the seconds all and each of them: there is
a placement within them, and one that begins anew has to find it. Where it finds none within any that are known, limits
so many times as large come next."""

_HOPELESS: Final = 0.02
"""By how much the groups may exceed limits so that plans are worth a look."""

_MORE: Final = 1.005
"""What limits have to be multiplied by at least so that it is said."""

_SAID: Final = 1.01
"""How many times as long as its groups say a plan may take so that it is believed to be among the best."""

_BY_HAND: Final = 0.2
_BEFORE_A_REFUSAL: Final = 0.1
_UNTIL_ONE_FITS: Final = 2.5
"""The part of the budget for plans that a person would try: before the search, and before a refusal. And how many times
as many seconds while none keeps within the limits."""

_LEAST_BY_HAND: Final = 12
_PLAN: Final = 60
_OPERATORS: Final = 10
"""Where a number of placements is the budget: how many plans of a person are judged at least; and as how many operators
a plan counts beside its own, of which so many take as long as a placement of groups."""

_ON_TOP: Final = 0.3
"""The part of the seconds of a search that plans may take on top of these."""

_KINDS: Final = 3
_UNLIKE: Final = 0.1
"""How many of the next best choices are tried where the best ones are not, and what part of the groups is elsewhere."""

_OTHERS: Final = 2
_OTHERS_IN_PARTS: Final = 4
_MANY: Final = 1_500
"""How many of the next best choices are emitted, too: which is the best in the end, plans say. Of programs with so many
operators that this would take as long as a search, the best alone."""


def _pinned(given: Any) -> str | None:
    """Where modules have to be; None of what is left out. Accelerate's maps have ``disk``, too."""
    if given is None:
        return None
    fix = "pin modules to gpus, such as 'cuda:0' or 0, or to 'cpu'"
    if given == "disk":
        raise OptionError("no module is put on 'disk'", fix=fix)
    return str(read_option(Device.parse, given, fix))


class _Refused(Exception):
    """Nothing within the limits was found.

    Attributes:
        missing: what is missing, by device, and what fills the fullest one, as text.
        at: the operator that runs where that one is fullest, as text.
        given: the limits, those of the topology, too.
        nearest: limits within which plans that were found keep.
        proven: what limits have to be multiplied by, at least, for any placement.
        reckoned: the same for any placement of the groups, as these are reckoned.
        interrupted: whether the user has had enough of it.
    """

    def __init__(
        self,
        missing: str,
        at: str,
        given: Mapping[str, int],
        nearest: Sequence[Mapping[str, int]],
        proven: float,
        reckoned: float,
        interrupted: bool,
    ) -> None:
        self.missing, self.at, self.given, self.nearest = missing, at, given, nearest
        self.proven, self.reckoned, self.interrupted = proven, reckoned, interrupted

    def times(self, limits: Mapping[str, int]) -> float:
        """How many times the limits others are."""
        return max([nbytes / self.given[device] for device, nbytes in limits.items()], default=1.0)


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
    options: tuple[Option, ...] = _OPTIONS
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
    ) -> Balanced:
        """The placement, with what led to it.

        Args:
            program: as :func:`balance` takes it.
            profile: likewise.
            threads: likewise.
            remedy: what callers can do where nothing is within the limits, beside giving more; by default, what those
                of :func:`balance` can.
            place: the machine at hand, where no topology was given and the caller knows how devices are bound.
        """
        self.require_order(program)
        require_captured(program, self.name)
        if CPU in self.pin.values():
            there, pin = on_host(program, self.pin, "shift" in self.options)
            found = self.model_copy(update={"pin": pin}).balanced(there, profile, threads, remedy, place)
            return replace(found, pipeline=" | ".join(found.program.history[len(program.history) :]))
        with collector_paused(), blamed(program):
            place = self.topology or place or self.at_hand(program, threads)
            measured = profile_of(place) if profile == "cached" else profile
            within = self if self.limits != "auto" else self.within_what_is_free(program, place)
            try:
                return _Balancing(within, program, place, measured, threads).run()
            except _Refused as refused:
                full = "" if within is self else _full(place, refused.given)
                raise within.refusal(refused, program, place, measured, threads, remedy, full) from None
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

    def within_what_is_free(self, program: Program, place: Topology) -> Balance:
        """The pass with limits in the place of ``auto``."""
        others = self.devices
        if not others and place.host is None:
            others = tuple([device for device in place.devices if not Device.parse(device).is_host])
        return self.model_copy(update={"limits": dict(free_limits(place, [*program.devices, *others]))})

    def refusal(
        self,
        refused: _Refused,
        program: Program,
        place: Topology,
        profile: Profile | None,
        threads: int,
        remedy: str,
        full: str = "",
    ) -> PassError:
        """The error that says what is missing, and limits that work: those within which plans keep are tried, the least
        first, and then larger ones."""
        begun, known = time.perf_counter(), list(refused.nearest)
        limits, works = min(known, key=refused.times), False
        for number in range(_TRIES):
            late = self.evaluations is None and time.perf_counter() - begun > _TRYING * self.seconds
            if refused.interrupted or (number and late):
                break
            shorter = self.model_copy(update={"limits": limits, "seconds": _TRYING * self.seconds})
            try:
                _Balancing(shorter, program, place, profile, threads).require()
            except _Refused as again:
                tried = refused.times(limits)
                known += again.nearest
                more = [one for one in known if refused.times(one) > tried]
                larger = {device: int(_LARGER * nbytes) for device, nbytes in limits.items()}
                limits = min(more, key=refused.times, default=larger)
            except KeyboardInterrupt:  # there is something to say already
                break
            else:
                works = True
                break
        given = ", ".join(f"{device!r}: {nbytes}" for device, nbytes in limits.items())
        said = [f"{refused.times(limits):,.2f} times these"]
        if refused.proven >= _MORE:
            said.append(f"less than {refused.proven:,.2f} times cannot")
        if refused.reckoned >= max(_MORE, refused.proven):
            said.append(f"no placement of these groups is reckoned to keep less than {refused.reckoned:,.2f} times")
        return PassError(
            f"balance: no placement within the limits was found: {refused.missing}{full}",
            at=refused.at,
            fix=f"limits={{{given}}} {'works' if works else 'is the nearest that was found'} "
            f"({'; '.join(said)}{_beyond(place, limits)}); or " + (remedy or self.ways(refused, place)),
        )

    def ways(self, refused: _Refused, place: Topology) -> str:
        """What there is to do beside giving more."""
        spare = any(d not in refused.given and not Device.parse(d).is_host for d in place.devices)
        spare = spare or place.host is not None
        found = ["name more devices in limits"] * spare
        found += ["allow more options"] * (len(self.options) < len(get_args(Option)))
        found += ["pin less"] * bool(self.pin)
        return ", ".join(found or ["take smaller batches"])


def balance(
    program: Program,
    limits: Mapping[DeviceName, int | str] | Literal["auto"],
    *,
    topology: Topology | str | None = None,
    options: Sequence[Option] = _OPTIONS,
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
    or computed again. It goes after :func:`replicate` and before :func:`inject_copies`. Limits are of what a plan
    holds, :func:`graphir.memory`'s peak. What an allocator rounds up and libraries take for themselves (a CUDA context,
    some 500 MB; cuBLAS, 32 MiB a stream) comes on top, so leave room for it.

    Args:
        program: captured, replicated or sharded.
        limits: by device, the most that it may hold, in bytes or as text: ``{"gpu:0": "3.3 GiB"}``. ``auto``: what is
            free, less 5 %, on the program's devices, those in *devices*, by default all cards that are there, and the
            host, whose logical devices share it. Of a *topology* that is not the machine at hand, the memory that it
            has, less 5 %.
        topology: how fast devices and links are: a topology, or the name of one; by default this machine, as
            :meth:`.Topology.here` has it. A device that has no limit may hold as much as the topology says.
        options: what may be done.
        devices: that may be used beside those in *limits*.
        pin: by pattern of modules, the gpu where they have to be, or ``"cpu"``: then the host runs them, and the search
            moves the others. Accelerate's ``device_map`` is one, if it leaves nothing on disk.
        whole: patterns of modules that are not taken apart.
        seconds: how long to search.
        evaluations: how many placements to look at instead: equal numbers and seeds give equal programs, for equal
            figures of the machine; those of a host are measured once a process.
        seed: of the search's random changes.
        profile: what :func:`graphir.profile` measured on that machine; shapes alone by default. ``cached``: what this
            machine's file has, if the topology was measured here.
        threads: how many threads one kernel uses, as the profile has it; None: as many as torch now does.

    Raises:
        PassError: no placement that keeps within the limits is found; it says what is missing where, and limits that
            work. Or *program* is none, a device is unknown or not there, limits are none, a link, the memory of a
            device or the arithmetic of an element type is missing, or a pattern names no module. Nothing has changed
            then.
    """
    require_program(program, Balance.name)
    given = build(
        Balance,
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
    try:
        check_profile(profile)
        check_threads(threads)
    except GraphirError as e:
        raise PassError(f"balance: {e.what}", fix=e.fix) from None
    return given.balanced(program, profile, torch.get_num_threads() if threads is None else threads)


def _beyond(place: Topology, limits: Mapping[str, int]) -> str:
    """Which devices have less memory than limits that a refusal names, as an error says it."""
    held = {device: place.speed(device).memory for device in limits}
    less = [f"{d} has {nbytes_text(n)}" for d, n in held.items() if n is not None and n < limits[d]]
    return f"; {', '.join(less)}" if less else ""


def _full(place: Topology, limits: Mapping[str, int]) -> str:
    """Which of the devices others hold much of, as an error says it."""
    found = []
    for device in limits:
        if Device.parse(device).is_host:
            continue
        free, memory = place.speed(device).free, place.speed(device).memory
        if free is not None and memory is not None and free < _USED_UP * memory:
            found.append(f"of {nbytes_text(memory)} on {device} {nbytes_text(free)} are free")
    listed = "" if place.host is not None else " (nvidia-smi lists what holds the rest)"
    return f"; {', '.join(found)}{listed}" if found else ""


class _Balancing:
    """Some searches, what they need, and what they have found.

    Attributes:
        topology: where the program would run.
        given: the limits that were given.
        read: the program as it was read to be grouped.
        grouped: the program in as many groups as a search can take.
        plans: what choices come to as plans.
    """

    def __init__(
        self, options: Balance, program: Program, topology: Topology, profile: Profile | None, threads: int
    ) -> None:
        assert options.limits != "auto"
        self.options, self.program, self.profile, self.threads = options, program, profile, threads
        self.topology, self.given = topology, options.limits
        self.names = list(dict.fromkeys(map(Device.parse, (*self.given, *options.devices))))
        self.refuse()
        limits = {Device.parse(device): nbytes for device, nbytes in self.given.items()}
        for device in {*self.names, *[d for d in program.devices if not d.is_host]} - limits.keys():
            room = self.topology.speed(device).memory
            if room is not None:
                limits[device] = room
        self.limits = limits
        self.wanted = Wanted(
            limits, tuple(d for d in self.names if not d.is_host), options.options, self.pins(), self.wholes()
        )
        self.parts = micro_batches(program.step.blobs)
        self.searches = Attempts(self.reading, self.parts, Budget(options.seconds, options.evaluations, options.seed))
        self.grouped = self.searches.grouped
        shares = "share_storage" in options.options
        self.plans = Plans(
            program,
            limits,
            self.topology,
            options.topology,
            profile,
            threads,
            flows=self.parts > 1,
            shares=shares,
        )
        self.hands, self.trying = self.by_hand()
        self.emits = len(program.step.ops) <= _MOST_EMITTED

    def refuse(self) -> None:
        """Refuse devices, links and arithmetic that are not there.

        Raises:
            PassError: one is not.
        """
        if not self.given:
            raise PassError(
                "balance: limits names no device", fix="give the most that a device may hold, as {'gpu:0': '3.3 GiB'}"
            )
        there = self.topology.devices
        for option, devices in (("limits", self.given), ("devices", self.options.devices)):
            if missing := next((device for device in devices if device not in there), None):
                raise PassError(
                    f"balance: {option} names {missing}, which topology {self.topology.name!r} does not have",
                    fix=f"{option} can name {', '.join(list(there)[:10])}; or give a topology that has {missing}",
                )
        if CPU not in there:
            raise PassError(
                f"balance: topology {self.topology.name!r} has no device {CPU}",
                fix="add it to the topology's devices, with links to the others, or give another topology",
            )
        used = [device for device in self.program.devices if not device.is_host]
        try:
            for device in used:
                self.topology.speed(device)
            if "shift" in self.options.options:
                for source in dict.fromkeys([*used, *self.names]):
                    for target in self.names:
                        if source != target and not (source.is_host or target.is_host):
                            self.topology.link(source, target)
                            self.topology.link(target, source)
            refuse_element_types(self.program.step, self.topology, [*used, *self.names])
        except GraphirError as e:
            raise PassError(f"balance: {e.what}", fix=e.fix) from None

    def pins(self) -> dict[str, Device]:
        """By module, the device where it has to be; by name of its state, where that is expected, as maps say it of a
        module whose state is on several devices."""
        given = {pattern: Device.parse(to) for pattern, to in self.options.pin.items() if to is not None}
        usable = {*self.names, *self.program.devices}
        for pattern, device in given.items():
            if device not in usable:
                raise PassError(
                    f"balance: {pattern!r} is pinned to {device}, which no limit names",
                    fix="pin modules to gpus, and add the device to limits or devices",
                )
        expected = {name: device for name, device in given.items() if self.is_state(name)}
        claimed = claims(self.program, {text: to for text, to in self.options.pin.items() if text not in expected})
        for module, device in self.places() if "shift" not in self.options.options else ():
            named = claimed.get(module)
            if named is None or device.is_host or device == given[named]:
                continue
            raise PassError(
                f"balance: {named!r} is pinned to {given[named]}, and options do not allow to shift it from {device}",
                fix="add 'shift' to options, or pin it where it is",
            )
        return {**expected, **{module: given[pattern] for module, pattern in claimed.items()}}

    def is_state(self, name: str) -> bool:
        """Whether that is a parameter or a buffer."""
        blob = self.program.step.blobs.get(self.program.replicas[0] + name)
        return blob is not None and blob.role in ("param", "buffer")

    def places(self) -> dict[tuple[str, Device], None]:
        """Modules, and the devices where they run in the forward, or own state."""
        step = self.program.step
        run = [(op.module, op.device) for op in step.ops if op.phase == "forward" and not op.effects.shows]
        state = [name for name in step.external_inputs if step.blobs[name].role in STATE_ROLES]
        return dict.fromkeys([*run, *[(base_name(n).rpartition(".")[0], step.blobs[n].device) for n in state]])

    def wholes(self) -> dict[str, str]:
        """By module, which module of a pattern's it is in."""
        claimed = claims(self.program, self.options.whole)
        return {module: next(top for top in ("", *lineage(module)) if top in claimed) for module in claimed}

    def reading(self) -> Reading:
        """The program as it is read to be grouped."""
        issue = streams_of(self.topology).issue if self.topology.host is None else None
        self.read = Reading(self.program, self.wanted, self.topology, self.profile, self.threads, issue)
        return self.read

    def by_hand(self) -> tuple[ByHand, Iterator[None]]:
        """What tries the plans of a person, and the plans that it has not tried so far."""
        levels = Levels(self.read.units.step, self.topology, self.wanted.whole.values())
        hands = ByHand(self.program, self.plans, levels, self.wanted, self.options.pin, self.topology, self.read.issue)
        return hands, hands.tried()

    def try_by_hand(self, share: float) -> None:
        """Try plans of a person, in a share of the budget, or in more of the seconds while none of them fits."""
        begun, first = time.perf_counter(), self.plans.emitted
        seconds, evaluations = self.options.seconds * share, self.options.evaluations
        plan = (len(self.program.step.ops) + _PLAN) / _OPERATORS
        most = None if evaluations is None else _LEAST_BY_HAND + round(evaluations * share / plan)
        try:
            for _ in self.trying:
                if most is not None:
                    enough = self.plans.emitted - first >= most
                else:
                    spent = time.perf_counter() - begun
                    enough = spent >= seconds * (_UNTIL_ONE_FITS if self.hands.best is None else 1)
                if enough:
                    break
        except KeyboardInterrupt:  # as in a search: the best so far
            if self.hands.best is None:
                raise

    def run(self) -> Balanced:
        """The best placement that is found.

        Raises:
            _Refused: none is within the limits.
        """
        self.begin_by_hand()
        return self.searched()

    def require(self) -> None:
        """Find any placement within the limits, as :meth:`run` would.

        Raises:
            _Refused: none is found.
        """
        self.begin_by_hand()
        if self.hands.best is None:
            self.searched()

    def begin_by_hand(self) -> None:
        """Try the first plans of a person; the searches have less time then."""
        if self.emits:
            begun = time.perf_counter()
            self.try_by_hand(_BY_HAND)
            self.searches.leave(time.perf_counter() - begun)

    def searched(self) -> Balanced:
        """The best of what searches find and of a person's plans.

        Raises:
            _Refused: none is within the limits.
        """
        if self.emits:
            self.leave_to_plans()
        regroups = self.emits and "recompute" in self.options.options
        attempts = self.searches.made(regroups=regroups, starts=self.starts)
        if not self.emits:
            best = min(attempts, key=lambda attempt: attempt.rank)
            choice = best.found.choice
            if best.found.outcome.over:
                raise self.refused(best, choice)
            made = Emitted(choice, placed(self.program, best.grouped, choice), str(InjectCopies()))
            return self.report(best, made, attempts)
        nearest: tuple[Attempt, Emitted] | None = None
        for number in range(_ATTEMPTS):
            tried: list[tuple[Attempt, Emitted]] = []
            try:
                self.try_plans(attempts, tried)
            except KeyboardInterrupt:  # as in a search: the best so far
                if not self.fitting(tried):
                    raise
            fitting = self.fitting(tried)
            hand = self.hands.best
            if fitting:
                of, one = min(fitting, key=lambda pair: (pair[1].seconds, pair[1].program is not self.program))
                if hand is None or one.seconds <= hand.judged.seconds:
                    return self.report(of, self.plans.fastest(one), attempts)
            if hand is not None:
                return self.report_by_hand(hand, attempts)
            near = tried + ([nearest] if nearest else [])
            nearest = min(near, key=lambda pair: sum(self.excess(pair[1].peaks).values()))
            attempts = [a for a in attempts if a.found.outcome.over <= _HOPELESS and not a.found.interrupted]
            if not attempts:
                break
            attempts = [
                self.onward(attempt, [one for of, one in tried if of is attempt], number + 1, len(attempts))
                for attempt in attempts
            ]
        assert nearest is not None
        attempt, one = nearest
        self.try_by_hand(_BEFORE_A_REFUSAL)
        if self.hands.best is not None:
            return self.report_by_hand(self.hands.best, [attempt])
        raise self.refused(attempt, one.choice)

    def starts(self, grouped: Grouped) -> list[Choice]:
        """What a search among some groups begins with beside plain choices."""
        found = (self.hands.best, self.hands.nearest)
        return [self.hands.said(hand, grouped) for hand in found if hand is not None]

    def leave_to_plans(self) -> None:
        """Let the search end early enough for the plans of what it finds, by what that of the program itself takes."""
        begun = time.perf_counter()
        self.plans.of(self.grouped, self.grouped.problem.now())
        plans = (1 + self.others()) * (time.perf_counter() - begun)
        self.searches.leave(max(plans - _ON_TOP * self.options.seconds, 0.0))

    def others(self) -> int:
        """How many of the next best choices are worth a plan."""
        if self.parts > 1:
            return _OTHERS_IN_PARTS
        return _OTHERS if len(self.program.step.ops) <= _MANY else 0

    def try_plans(self, attempts: Sequence[Attempt], found: list[tuple[Attempt, Emitted]]) -> None:
        """Add the candidates as plans. Where some are within the limits, but none takes as short as its groups say,
        some of the next best ones and the plain one, too: these may be of another kind."""
        for attempt, choice in self.candidates(attempts):
            found.append((attempt, self.plans.of(attempt.grouped, choice)))
        best = min(attempts, key=lambda attempt: attempt.rank)
        unlike = self.unlike(best, [one.choice for of, one in found if of is best])
        for choice in (*unlike, *best.found.others[-1:]):
            if self.slow(found) and all(one.choice != choice for _, one in found):
                found.append((best, self.plans.of(best.grouped, choice)))
        fastest = min(self.fitting(found), key=lambda pair: pair[1].seconds, default=None)
        if fastest is not None and fastest[1].choice in best.found.others[-1:]:  # no search was needed for that
            again = self.searches.anew(best)
            found.append((again, self.plans.of(again.grouped, again.found.choice)))

    def fitting(self, found: Sequence[tuple[Attempt, Emitted]]) -> list[tuple[Attempt, Emitted]]:
        """Those whose plans are within the limits."""
        return [(attempt, one) for attempt, one in found if not self.excess(one.peaks)]

    def slow(self, found: Sequence[tuple[Attempt, Emitted]]) -> bool:
        """Whether some plans are within the limits, and all of these take longer than their groups say."""
        fitting = [(one.seconds, attempt.outcomes(one.choice).seconds) for attempt, one in self.fitting(found)]
        return bool(fitting) and all(seconds > _SAID * said for seconds, said in fitting)

    def unlike(self, attempt: Attempt, tried: Sequence[Choice]) -> list[Choice]:
        """Some of the next best choices that have a good part of the groups elsewhere than those that were tried."""
        found = list(tried)
        for choice in attempt.found.others:
            if all(_elsewhere(choice, other) >= _UNLIKE * len(choice.devices) for other in found):
                found.append(choice)
        return found[len(tried) : len(tried) + _KINDS]

    def candidates(self, attempts: Sequence[Attempt]) -> list[tuple[Attempt, Choice]]:
        """The choices that are worth a plan: the best ones of the best attempt, and the best one of each other that is
        about as good."""
        best, *others = sorted(attempts, key=lambda attempt: attempt.rank)
        over, seconds = best.rank
        near = [other for other in others if over or (not other.rank[0] and other.rank[1] <= _WORSE * seconds)]
        found = [(best, choice) for choice in (best.found.choice, *best.found.others[: self.others()])]
        found += [(other, other.found.choice) for other in near]
        now = best.problem.now()
        pinned = any(group.now not in group.devices for group in best.problem.groups)
        return found if pinned or any(choice == now for _, choice in found) else [*found, (best, now)]

    def excess(self, peaks: Mapping[str, int]) -> dict[str, int]:
        """By how many bytes devices exceed their limits, those that do."""
        problem = self.grouped.problem
        limits = zip(problem.devices, problem.limits, strict=True)
        found = {name: peaks.get(name, 0) - limit for name, limit in limits if limit is not None}
        return {name: more for name, more in found.items() if more > 0}

    def onward(self, attempt: Attempt, tried: Sequence[Emitted], number: int, of: int) -> Attempt:
        """The attempt again, with devices that hold more than its groups say."""
        if not tried:
            return attempt
        peaks = tried[0].peaks
        excess = self.excess(peaks)
        more = [
            max(peaks.get(name, 0) - expected, 0) if name in excess else 0
            for name, expected in zip(attempt.problem.devices, attempt.found.outcome.peaks, strict=True)
        ]
        nearest = min(tried, key=lambda one: sum(self.excess(one.peaks).values()))
        return self.searches.onward(attempt, more, nearest.choice, number, of)

    def refused(self, attempt: Attempt, choice: Choice) -> _Refused:
        """What is missing where the nearest placement is, and limits under which there is one."""
        problem = attempt.grouped.problem
        found = least(self.searches, attempt, choice)
        given = {name: n for name, n in zip(problem.devices, problem.limits, strict=True) if n is not None}

        def within(peaks: Mapping[str, int]) -> dict[str, int]:
            """The limits within which these peaks are, too."""
            return {name: max(nbytes, peaks.get(name, 0)) for name, nbytes in given.items()}

        nearest: list[tuple[Mapping[str, int], Program | None]] = []
        ample = []
        for one in dict.fromkeys((found.choice, choice)):
            reckoned = _named(problem, Outcomes(problem)(one).peaks)
            made = self.plans.of(attempt.grouped, one) if self.emits else None
            nearest.append((reckoned, None) if made is None else (made.peaks, made.made))
            ample.append(within({name: max(nbytes, nearest[-1][0].get(name, 0)) for name, nbytes in reckoned.items()}))
        if (hand := self.hands.nearest) is not None:
            nearest.append((hand.judged.peaks, hand.judged.made))
        peaks, program = min(nearest, key=lambda one: self.factor(one[0]))
        excess = self.excess(peaks)
        missing = [f"{name} lacks {nbytes_text(more)} of {nbytes_text(peaks[name])}" for name, more in excess.items()]
        at = ""
        if program is not None and excess:
            device = max(excess, key=lambda name: peaks[name] / max(given[name], 1))
            filled, at = self.filled(program, device, given[device])
            missing.append(filled)
        certain = proven(self.program, self.limits, self.wanted.devices, self.options.options)
        known = [*[within(held) for held, _ in nearest], *ample]
        interrupted = attempt.found.interrupted or found.interrupted
        return _Refused("; ".join(missing), at, given, known, certain, found.proven, interrupted)

    def factor(self, peaks: Mapping[str, int]) -> float:
        """What limits have to be multiplied by so that some peaks are within them."""
        problem = self.grouped.problem
        return exceeded(problem, [peaks.get(name, 0) for name in problem.devices])

    def filled(self, made: Program, device: str, limit: int) -> tuple[str, str]:
        """What fills a device at its peak, and the operator that runs then, as text."""
        found = self.plans.filled(made, device)
        held = " and ".join([f"{nbytes_text(nbytes)} of {category}" for category, nbytes in found.held[:2]])
        text = f"at its peak {device} holds {held}"
        if found.operator is None:
            return text, ""
        alone = needed(found.operator, found.program)
        if alone > limit:
            text += f"; one operator reads and makes {nbytes_text(alone)} there, which no option divides"
        return text, operator_text(found.operator, found.program.step)

    def refuse_pins(self, placed: Program) -> None:
        """Refuse pins of state that goes with what reads or overwrites it, which is elsewhere.

        Raises:
            PassError: there is one.
        """
        pins, step = self.wanted.pins, placed.step
        owners = weighted_modules(placed) if pins else set()  # no pass moves what a container owns by itself
        for name in step.external_inputs if pins else ():
            own, device = base_name(name), step.blobs[name].device
            module = own.rpartition(".")[0]
            pinned = own if own in pins else module
            if step.blobs[name].role not in STATE_ROLES or (pinned == module and module not in owners):
                continue
            if device not in (wanted := pins.get(pinned, device), CPU):
                raise PassError(
                    f"balance: {pinned!r} is pinned to {wanted}, but {name!r} goes with what uses it, on {device}",
                    fix="pin what uses it to the same device, or pin less",
                )

    def report(self, attempt: Attempt, best: Emitted, attempts: Sequence[Attempt]) -> Balanced:
        """The placement before and after."""
        problem, outcomes = attempt.problem, attempt.outcomes
        now, then = outcomes(problem.now()), outcomes(best.choice)
        if best.peaks:
            before = self.plans.of(attempt.grouped, problem.now())
            peaks, seconds = (before.peaks, best.peaks), (before.seconds, best.seconds)
        else:
            peaks = _named(problem, now.peaks), _named(problem, then.peaks)
            seconds = now.seconds, then.seconds
        crossing = {(problem.devices[a], problem.devices[b]): nbytes for (a, b), nbytes in then.crossing.items()}
        after = _Figures(best.program, best.then, peaks[1], seconds[1], _named(problem, then.busy), crossing)
        reasons = Reasons(problem, best.choice, [one.grouped.problem for one in attempts], then.peaks)
        return self.reported(attempt, peaks[0], seconds[0], after, reasons)

    def report_by_hand(self, hand: Hand, attempts: Sequence[Attempt]) -> Balanced:
        """The same of a plan that a person would have tried."""
        attempt, judged = attempts[0], self.plans.in_any_order(hand.program, hand.judged)
        problem = attempt.problem
        before = self.plans.of(attempt.grouped, problem.now())
        found = self.plans.estimate(instructed(judged.made))
        busy = {use.lane.partition(".")[0]: use.busy for use in found.lanes if use.lane.endswith(".compute")}
        crossing = {(link.source, link.destination): link.nbytes for link in found.links}
        after = _Figures(hand.program, judged.then, judged.peaks, judged.seconds, busy, crossing)
        held = [judged.peaks.get(name, 0) for name in problem.devices]
        problems = [one.grouped.problem for one in attempts]
        reasons = Reasons(problem, self.hands.said(hand, attempt.grouped), problems, held, hand.says)
        return self.reported(attempt, before.peaks, before.seconds, after, reasons)

    def reported(
        self, attempt: Attempt, held: Mapping[str, int], seconds: float, after: _Figures, reasons: Reasons
    ) -> Balanced:
        """A report of what was before, with what it held and its seconds, and *after*."""
        self.refuse_pins(after.program)
        problem = attempt.problem
        now = attempt.outcomes(problem.now())
        busy = _named(problem, now.busy)
        limits = dict(zip(problem.devices, problem.limits, strict=True))
        uses = [
            DeviceUse(
                name, limits[name], held.get(name, 0), after.peaks.get(name, 0), busy[name], after.busy.get(name, 0)
            )
            for name in problem.devices
            if name in self.given or held.get(name) or after.peaks.get(name)
        ]
        crossing = {(problem.devices[a], problem.devices[b]): nbytes for (a, b), nbytes in now.crossing.items()}
        pairs = dict.fromkeys([*crossing, *after.crossing])
        links = [LinkBytes(*pair, crossing.get(pair, 0), after.crossing.get(pair, 0)) for pair in pairs]
        text = " | ".join(after.program.history[len(self.program.history) :])
        if text:
            Pipeline(text)  # what is printed can be read back
        return Balanced(
            program=after.program,
            machine=self.topology.about,
            measured=self.topology.measured,
            limits=self.given,
            pipeline=text,
            then=after.then,
            devices=tuple(uses),
            links=tuple(links),
            before=seconds,
            after=after.seconds,
            exact=self.emits,
            evaluated=self.searches.evaluated,
            device_map=device_map(after.program, attempt.grouped),
            reasons=reasons,
        )


class _Figures(NamedTuple):
    """What a report says of a placement.

    Attributes:
        program: placed.
        then: the passes that come next.
        peaks: by device, what it holds.
        seconds: of a step.
        busy: by device, the seconds for which it computes.
        crossing: by source and destination, the bytes that are copied.
    """

    program: Program
    then: str
    peaks: Mapping[str, int]
    seconds: float
    busy: Mapping[str, float]
    crossing: Mapping[tuple[str, str], int]


def _elsewhere(choice: Choice, other: Choice) -> int:
    """How many groups two choices have on different devices."""
    return sum(a != b for a, b in zip(choice.devices, other.devices, strict=True))


def _named(problem: Problem, figures: Sequence[T]) -> dict[str, T]:
    return dict(zip(problem.devices, figures, strict=True))
