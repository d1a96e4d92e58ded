"""The numbers of an optimizer's parameter groups that move from step to step, as blobs of the step.

::

    optimizer.param_groups ── followed ──▶ groups ── now() ──▶ lr, momentum, … of the next step
    session.param_groups[0]["lr"] = 0.1 ─────▲  ends that
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from operator import is_
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from graphir.errors import CoverageError, SessionError, TrainingWarning, counted, warn
from graphir.ir.blob import Blob
from graphir.ir.moved import OPTION_OF, moved
from graphir.ir.program import ParamGroup, Program
from graphir.ir.size import bind_shape

from .executor import Feedable
from .kernels.optimizers import UPDATES

__all__ = ["Group", "ParamGroups"]

_OF_SCHEDULERS: Final = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Entries of a group that torch's schedulers keep for themselves."""

_OPTIONS: Final = tuple(dict.fromkeys(option for option, _ in OPTION_OF.values()))
"""Options that have a number that may move."""


class Group(Mapping[str, Any]):
    """One parameter group, as in ``optimizer.param_groups``. Numbers that the step is given can be set, as ``lr``; the
    rest is in the program.

    Where an optimizer is followed, these are its options as they are now. ``params`` are names of the program.
    """

    def __init__(self, group: ParamGroup, index: int, source: _Source) -> None:
        self._params, self._index, self._source = list(group.params), index, source
        self._options: dict[str, Any] = dict(group.options)
        self._given = frozenset({"lr", *group.numbers})

    def _now(self) -> Mapping[str, Any]:
        followed = self._source.followed
        return groups_of(followed)[self._index] if followed else self._options

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return self._params
        value = self._now()[key]
        return float(value) if key == "lr" else value

    def __setitem__(self, key: str, value: Any) -> None:
        """Set a number. No optimizer is followed any more: every other number stays as its optimizer has it now.

        Raises:
            SessionError: an option that the step is not given; a value that is not a number of at least 0, or for
                ``betas`` not two.
        """
        names = [name for name, (option, _) in OPTION_OF.items() if option == key and name in self._given]
        if not names:
            raise SessionError(
                f"{key!r} cannot be set: it is part of the program",
                where=f"parameter group {self._index}",
                fix=f"capture it again with a {key} that is not 0, which may be 0 afterwards"
                if key in ("momentum", "weight_decay") and not self._now().get(key)
                else "capture it again with another optimizer",
            )
        if len(names) == 1:
            checked: Any = _checked(names[0], value, self._index)
        elif isinstance(value, (tuple, list)) and len(value) == len(names):
            checked = tuple([_checked(name, item, self._index) for name, item in zip(names, value, strict=True)])
        else:
            raise _no_pair(value, key, self._index)
        self._source.leave()
        self._options[key] = checked
        self._source.changes += 1

    def _restore(self, name: str, value: float) -> None:
        """Set the number of this name to what a state has."""
        option, place = OPTION_OF[name]
        if place is None:
            self._options[option] = value
        else:
            pair = list(self._options[option])
            pair[place] = value
            self._options[option] = tuple(pair)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._now(), "params"]))

    def __len__(self) -> int:
        return len({*self._now(), "params"})

    def __repr__(self) -> str:
        return repr(dict(self))


class _Source:
    """Where the groups of sessions beside each other have their numbers from.

    Attributes:
        program: the first program that has an optimizer, if any has.
        groups: one for each parameter group.
        followed: the optimizers that are followed; none: the numbers are those of the groups themselves.
        params: the parameters of each of their groups when they were followed.
        changes: counts what was set, followed and left.
        captured: the optimizers that the program was captured with, or that were followed, where nobody has been told
            yet that they are not followed.
        known: their numbers at capture, or when a number was set last.
    """

    def __init__(self, program: Program) -> None:
        self.followed: tuple[torch.optim.Optimizer, ...] = ()
        self.params: list[list[Tensor]] = []
        self.changes = 0
        self.take(program)

    def take(self, program: Program) -> None:
        """Have the groups of a program, where none beside it has had any."""
        self.program, described = program, program.interface.param_groups
        self.groups = [Group(group, i, self) for i, group in enumerate(described)]
        self.captured: tuple[weakref.ref[torch.optim.Optimizer], ...] = program.optimizers if described else ()
        self.known = [_numbers(group.options) for group in described]

    def leave(self) -> None:
        """Follow no optimizer any more; numbers stay as they are now."""
        if self.followed:
            for group, theirs in zip(self.groups, groups_of(self.followed), strict=False):
                group._options = {name: value for name, value in theirs.items() if name != "params"}
            self.captured, self.followed = tuple(map(weakref.ref, self.followed)), ()
        if optimizers := self._alive():
            self.known = [_numbers(group) for group in groups_of(optimizers)]

    def _alive(self) -> list[torch.optim.Optimizer]:
        """The captured optimizers, if all are there."""
        found = [reference() for reference in self.captured]
        return [] if None in found else [optimizer for optimizer in found if optimizer is not None]

    def look(self) -> None:
        """Warn where the numbers of a captured optimizer have moved, and nobody follows it."""
        optimizers = self._alive()
        if not optimizers:
            self.captured = ()
            return
        for group, theirs, before in zip(self.groups, groups_of(optimizers), self.known, strict=False):
            for name, known in before.items():
                value = theirs.get(name, known)
                if value is known:
                    continue
                if _equal(value, known):
                    before[name] = value  # found to be the same sooner the next time
                elif not _equal(value, group._options.get(name)):
                    self.captured = ()
                    several = len(optimizers) > 1
                    them = "optimizers" if several else "optimizer"
                    arguments = "*optimizers" if several else "optimizer"
                    warn(
                        f"{name} of parameter group {group._index} of the captured {them} is {value!r} now, and no "
                        f"session follows {'them' if several else 'that optimizer'}: the step goes on with "
                        f"{group._options.get(name)!r}; make the session with optimizer={them}, or call "
                        f"session.follow({arguments})",
                        TrainingWarning,
                    )
                    return


def groups_of(optimizers: Sequence[torch.optim.Optimizer]) -> Sequence[Mapping[str, Any]]:
    """The groups of all optimizers, in order."""
    if len(optimizers) == 1:
        return optimizers[0].param_groups
    return [group for optimizer in optimizers for group in optimizer.param_groups]


class _Number(NamedTuple):
    """A number that a step is given.

    Attributes:
        blob: its blob.
        name: of the number, such as ``beta1``.
        group: the index of its group.
        option: of the group that has it.
        place: in the option, where that is a pair.
        as_tensor: it has to be a tensor, since others than optimizers read it.
    """

    blob: str
    name: str
    group: int
    option: str
    place: int | None
    as_tensor: bool


class ParamGroups:
    """The numbers of a program that its steps are given, and the optimizer that they follow.

    Args:
        program: whose.
        given: may have numbers by blob, as :meth:`state` gives them; others are as captured.
        beside: those of another program with the same optimizer, with which these share their groups. A program
            without optimizer has no groups, whatever is beside it.

    Attributes:
        groups: one for each parameter group.
        names: the blobs that a step takes, in order.

    Raises:
        SessionError: the program beside has another optimizer, other options, or other optimizer state.
    """

    def __init__(self, program: Program, given: Mapping[str, Tensor], beside: ParamGroups | None = None) -> None:
        self.program = program
        described = program.interface.param_groups
        self._source: _Source = _Source(program) if beside is None else beside._source
        shared = bool(described and self._source.groups) and beside is not None
        if shared:
            self._check_beside(self._source.program)
        elif described and beside is not None:
            self._source.take(program)
        self.groups = self._source.groups if described else []
        # For each group the options that are part of the program, and the followed optimizer's own objects for them.
        self._fixed = [[item for item in group.options.items() if _is_fixed(item[0], group)] for group in described]
        self._checked: tuple[int, Any] | None = None
        taken, read = set(program.step.external_inputs), _read_as_tensors(program)
        every = [_Number(b, n, i, *OPTION_OF[n], b in read) for i, g in enumerate(described) for n, b in _blobs(g)]
        self._numbers = [number for number in every if number.blob in taken]
        self.names = tuple([number.blob for number in self._numbers])
        if shared:
            self._check_options([group._now() for group in self.groups])
            return
        for number in every:
            if number.blob in given:
                value = _checked(number.name, given[number.blob], number.group)
                self.groups[number.group]._restore(number.name, value)

    def state(self) -> dict[str, Tensor]:
        """The numbers by blob."""
        found: dict[str, Tensor] = {}
        for i, (described, group) in enumerate(zip(self.program.interface.param_groups, self.groups, strict=True)):
            now = {"lr": group["lr"], **moved(group)}
            for name, blob in _blobs(described):
                found[blob] = torch.tensor(_number(name, now.get(name), i), dtype=torch.float64, device="cpu")
        return found

    def follow(self, optimizers: Sequence[torch.optim.Optimizer], given: Mapping[str, Tensor] | None = None) -> None:
        """Read the numbers of optimizers before each step from now on.

        Args:
            optimizers: the captured ones, in any order, or ones like these in the order of the program's.
            given: a state of which the caller may expect that its numbers hold; a TrainingWarning tells where an
                optimizer has others.

        Raises:
            SessionError: one is of another class, or its groups or their other options are not those of the program.
        """
        interface = self.program.interface
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise self._refusal(f"a session follows a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if not interface.param_groups:
            raise self._refusal("the program has no optimizer, so its session cannot follow one", "capture it with one")
        if len(optimizers) != len(interface.optimizers):
            classes = ", ".join(interface.optimizers)
            raise self._refusal(
                f"the program has {counted(len(interface.optimizers), 'optimizer')}, {classes}, and "
                f"{len(optimizers)} would be followed",
                "follow all that were captured, in the order in which the step finds them",
            )
        captured = [reference() for reference in self.program.optimizers]
        if all(optimizer in captured for optimizer in optimizers):
            optimizers = sorted(optimizers, key=captured.index)
        for optimizer, ours in zip(optimizers, interface.optimizers, strict=True):
            theirs = type(optimizer).__name__
            if theirs != ours:
                raise self._refusal(f"the optimizer is {theirs}, the program's {ours}")
        for number, optimizer in enumerate(optimizers):
            self._check_count(number, optimizer)
        groups = groups_of(optimizers)
        for i, group in enumerate(interface.param_groups):
            self._check_params(i, group, groups[i]["params"])
        self._check_options(groups, self._compared(optimizers))
        expected = {name: value for name, value in self.state().items() if name in given} if given else {}
        source = self._source
        source.followed, source.captured = tuple(optimizers), ()
        source.params = [list(group["params"]) for group in groups]
        source.changes += 1
        now = self.state() if expected else {}
        for name, value in expected.items():
            if now[name] != value:
                warn(
                    f"{name} is {value.item()!r} in the state, and {now[name].item()!r} in the optimizer, which is "
                    "followed; load the optimizer's and its scheduler's state_dict(), too",
                    TrainingWarning,
                )
                break

    @property
    def followed(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers that give the numbers."""
        return self._source.followed

    def position(self, of: int | torch.optim.Optimizer) -> int:
        """The position of an optimizer among those of the program; of itself, if it is followed or was captured.

        Raises:
            SessionError: it is none of them.
        """
        source = self._source
        held = source.followed or [reference() for reference in (source.captured or self.program.optimizers)]
        places = range(max(len(self.program.interface.optimizers), 1))
        found = next((i for i in places if of == i or (i < len(held) and held[i] is of)), None)
        if found is None:
            named = "such optimizer" if isinstance(of, torch.optim.Optimizer) else f"optimizer {of!r}"
            raise self._refusal(
                f"the program has no {named}", f"give one that is followed, or its position, 0 to {len(places) - 1}"
            )
        return found

    def of_optimizer(self, position: int) -> list[Group]:
        """The groups of one optimizer."""
        described = self.program.interface.param_groups
        return [group for group, of in zip(self.groups, described, strict=True) if of.optimizer == position]

    def now(self) -> list[Feedable]:
        """The numbers of the next step: tensors, or floats for those that only optimizers read.

        Raises:
            CoverageError: another option of a followed optimizer than these numbers has changed.
            SessionError: a number is none, or a followed optimizer has other parameters or groups than when it was
                followed.
        """
        source = self._source
        followed = source.followed
        if not followed:
            if source.captured:
                source.look()
            groups: Sequence[Mapping[str, Any]] = [group._options for group in self.groups]
            if self._checked != (source.changes, None):
                self._check_options(groups)
                self._checked = source.changes, None
        else:
            groups = groups_of(followed)
            self._check_same_params(groups)
            self._check_followed(groups, followed)
        found: list[Feedable] = []
        for _, name, i, option, place, as_tensor in self._numbers:
            value = _value(groups[i], i, option, place)
            if followed and isinstance(value, Tensor):
                # PyTorch computes with a tensor in the tensor's precision.
                raise SessionError(
                    f"{option} of the optimizer has a tensor",
                    where=f"parameter group {i}",
                    fix="set it to a number: tensor.item()",
                )
            number = value if type(value) is float else _number(name, value, i)
            found.append(torch.tensor(number, dtype=torch.float64, device="cpu") if as_tensor else number)
        for optimizer in followed:
            # What torch's schedulers look at: they warn before the first step of an optimizer.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return found

    def _check_same_params(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse groups that have other parameters than when their optimizer was followed: numbers of one group would
        go to parameters of another."""
        pairs = zip_longest(self._source.params, [group["params"] for group in groups], fillvalue=())
        if any(len(before) != len(now) or not all(map(is_, before, now)) for before, now in pairs):
            raise self._refusal(
                "the parameter groups of the optimizer have other parameters than when it was followed",
                "capture or compile the model again with this optimizer",
            )

    def _check_followed(self, groups: Sequence[Mapping[str, Any]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check the options that are part of the program. Those that are the same objects as before are as before; a
        list may change unseen, so it is compared each time."""
        if self._checked is None or self._checked[0] != self._source.changes:
            kept: list[list[tuple[str, Any]]] = []
        else:
            kept = self._checked[1]
        for i, group in enumerate(groups):
            if not kept or any(group.get(name, self) is not value for name, value in kept[i]):
                known = self._compared(optimizers)
                self._check_options(groups, known)
                pairs = zip(self._fixed, known, strict=True)
                names = [[name for name, _ in fixed if name in defaults] for fixed, defaults in pairs]
                same = [[(name, group[name]) for name in named] for named, group in zip(names, groups, strict=True)]
                unseen = [[(n, None if isinstance(v, list) else v) for n, v in of_group] for of_group in same]
                self._checked = self._source.changes, unseen
                return

    def _compared(self, optimizers: Sequence[torch.optim.Optimizer]) -> list[Mapping[str, Any]]:
        """For each group the options that can be compared: those that its optimizer has defaults for."""
        return [optimizers[group.optimizer].defaults for group in self.program.interface.param_groups]

    def _check_beside(self, other: Program) -> None:
        ours, theirs = self.program.interface, other.interface
        if ours.optimizers != theirs.optimizers or len(ours.param_groups) != len(theirs.param_groups):
            raise self._refusal("the program has another optimizer than the one beside it", _ALIKE)
        for i, (mine, its) in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
            for k, (param, beside) in enumerate(zip_longest(mine.params, its.params)):
                if param != beside:
                    raise self._refusal(
                        f"parameter {k} in group {i} of the optimizer is {param!r} in this program, {beside!r} in "
                        "the one beside it",
                        f"{_ALIKE}, or make a session of its own and give it state by load_state_dict()",
                    )
            first = theirs.param_groups[i].options
            for name in _KEEPING:
                before, now = first.get(name, 0), mine.options.get(name, 0)
                if bool(now) != bool(before) and (now or name != "momentum"):
                    raise self._refusal(
                        f"{name} of group {i} of the optimizer is {now!r} in this program and {before!r} in the first "
                        f"one: the optimizer would {'make' if now else 'drop'} state between steps",
                        f"set {name} before the first program is captured{_SCHEDULERS_FIRST * (name == 'momentum')}",
                    )

    def _check_count(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        theirs, ours = len(optimizer.param_groups), len(self.of_optimizer(number))
        if theirs != ours:
            raise self._refusal(f"the optimizer has {counted(theirs, 'parameter group')}, the program {ours}")

    def _check_params(self, i: int, group: ParamGroup, theirs: list[Tensor]) -> None:
        if len(theirs) != len(group.params):
            raise self._refusal(
                f"group {i} of the optimizer and of the program differ in their number of parameters: {len(theirs)} "
                f"and {len(group.params)}"
            )
        blobs = self.program.step.blobs
        for name, param in zip(group.params, theirs, strict=True):
            blob: Blob | None = blobs.get(self.program.blob_of(name))
            if blob is None or blob.shape is None:
                continue
            shape = bind_shape(blob.shape, self.program.dims)
            if tuple(param.shape) != shape:
                raise self._refusal(
                    f"group {i} of the optimizer has a parameter of shape {list(param.shape)} in the place of "
                    f"{name!r}, which has {list(shape)}"
                )

    def _check_options(
        self, groups: Sequence[Mapping[str, Any]], known: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Refuse groups whose options are not those of the program.

        Args:
            groups: a mapping for each.
            known: for each the options that can be compared; None: all that are there.
        """
        for i, (fixed, theirs) in enumerate(zip(self._fixed, groups, strict=True)):
            for name, value in fixed:
                if name not in (theirs if known is None else known[i]):
                    continue
                if name not in theirs:
                    raise self._refusal(f"group {i} of the optimizer has no {name!r}, the program has {value!r}")
                if not _equal(theirs[name], value):
                    raise CoverageError(
                        f"group {i} of the optimizer has {name}={theirs[name]!r}, the program has {value!r}",
                        where=f"program {self.program.name!r}",
                        fix=_remedy(name, theirs[name], value),
                    )

    def _refusal(self, what: str, fix: str = "follow the optimizer that was captured") -> SessionError:
        return SessionError(what, where=f"program {self.program.name!r}", fix=fix)


_ALIKE: Final = "capture both with the same optimizers; step functions with the same stateful=, which names all of both"
_KEEPING: Final = ("momentum", "dampening", "amsgrad", "centered")
"""Options that have the optimizer keep more state. The buffers of momentum stay where the momentum is 0 later."""

_SCHEDULERS_FIRST: Final = ": a scheduler that moves it is made before that, too"


def _remedy(name: str, now: Any, value: Any) -> str:
    if name in ("momentum", "weight_decay") and not value:
        return (
            f"capture the program again now that {name} is not 0: from then on it is read before each step, and may be "
            "0, too" + _SCHEDULERS_FIRST * (name == "momentum")
        )
    return f"capture the program again, or set {name} back: it is part of the program"


def _blobs(group: ParamGroup) -> Iterator[tuple[str, str]]:
    """Each number of a group that the step is given, and its blob."""
    yield "lr", group.lr
    yield from group.numbers.items()


def _is_fixed(option: str, group: ParamGroup) -> bool:
    """Whether an option is part of the program: not those whose numbers a step is given."""
    numbers = [name for name, (of, _) in OPTION_OF.items() if of == option]
    given = [name for name, _ in _blobs(group)]
    return option not in _OF_SCHEDULERS and not (numbers and set(numbers) <= set(given))


def _numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a group's options that have numbers that may move."""
    found = {name: options[name] for name in _OPTIONS if name in options}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _value(group: Mapping[str, Any], index: int, option: str, place: int | None) -> Any:
    """What a group has for a number; None where it has nothing."""
    value = group.get(option)
    if place is None:
        return value
    if not (isinstance(value, (list, tuple)) and len(value) == 2):
        raise _no_pair(value, option, index)
    return value[place]


def _no_pair(value: object, option: str, group: int) -> SessionError:
    return SessionError(f"{value!r} are no {option}", where=f"parameter group {group}", fix="give 2 numbers")


def _number(name: str, value: object, group: int) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool):
        try:
            return float(value)
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a tensor of several elements, or without any
            pass
    raise SessionError(
        f"the {_called(name)} {value!r} is not a number", where=f"parameter group {group}", fix="give a float"
    )


def _checked(name: str, value: object, group: int) -> float:
    number = _number(name, value, group)
    if not (math.isfinite(number) and number >= 0):
        raise SessionError(
            f"{value!r} is no {_called(name)}",
            where=f"parameter group {group}",
            fix="give a finite number of at least 0",
        )
    return number


def _called(name: str) -> str:
    return "learning rate" if name == "lr" else name


def _equal(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, Tensor) or isinstance(ours, Tensor):
        return False
    return bool((tuple(theirs) if isinstance(theirs, list) else theirs) == ours)


def _read_as_tensors(program: Program) -> set[str]:
    """The blobs that an operator other than an optimizer reads, or that a step hands back."""
    found = set(program.step.external_outputs)
    for op in program.step.ops:
        if op.type not in UPDATES:
            found.update(op.inputs)
    return found
