"""Learning rates: one for each parameter group, as blobs of the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from graphir.errors import SessionError, counted
from graphir.ir.blob import Blob
from graphir.ir.program import ParamGroup, Program
from graphir.ir.size import bind_shape

from .executor import Feedable
from .kernels.optimizers import UPDATES

__all__ = ["Group", "LearningRates"]


class Group(Mapping[str, Any]):
    """One parameter group, as in ``optimizer.param_groups``. Only ``lr`` can be set: the rest is in the program.

    Where an optimizer is followed, these are its options as they are now. ``params`` are names of the program.
    """

    def __init__(self, group: ParamGroup, index: int) -> None:
        self._params, self._index = list(group.params), index
        self._options: dict[str, Any] = dict(group.options)
        self._followed: torch.optim.Optimizer | None = None
        # The followed optimizer's options that the program has too; a scheduler's own entries are not among them.
        self._fixed: list[tuple[str, Any]] = []

    def _now(self) -> Mapping[str, Any]:
        if self._followed is None:
            return self._options
        found: Mapping[str, Any] = self._followed.param_groups[self._index]
        return found

    def __getitem__(self, key: str) -> Any:
        if key == "params":
            return self._params
        value = self._now()[key]
        return float(value) if key == "lr" else value

    def __setitem__(self, key: str, value: float | Tensor) -> None:
        """Set the learning rate.

        Raises:
            SessionError: any other option; a value that is not a number of at least 0; an optimizer is followed.
        """
        if key != "lr":
            raise SessionError(
                f"{key!r} cannot be set: it is part of the program",
                where=f"parameter group {self._index}",
                fix="capture it again with another optimizer",
            )
        if self._followed is not None:
            raise SessionError(
                "the session follows an optimizer, which gives the learning rate",
                where=f"parameter group {self._index}",
                fix="set it in the optimizer's own param_groups",
            )
        rate = _rate(value, self._index)
        if not (math.isfinite(rate) and rate >= 0):
            raise SessionError(
                f"{value!r} is no learning rate",
                where=f"parameter group {self._index}",
                fix="give a finite number of at least 0",
            )
        self._options["lr"] = rate

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._now(), "params"]))

    def __len__(self) -> int:
        return len({*self._now(), "params"})

    def __repr__(self) -> str:
        return repr(dict(self))


class LearningRates:
    """The learning rates of a program, and the optimizer that they follow.

    Args:
        program: whose.
        given: may have learning rates by blob, as :meth:`state` gives them; others are as captured.
        beside: the rates of another program with the same optimizer, with which these share their groups. A program
            without optimizer has no groups, whatever is beside it.

    Attributes:
        groups: one for each parameter group.
        names: the learning-rate blobs that a step takes, in order.
        group_of: the group of each of them.
        as_tensor: for each of them, whether it has to be a tensor, since others than optimizers read it.
        plain: whether none has to.

    Raises:
        SessionError: the program beside has another optimizer, or other options.
    """

    def __init__(self, program: Program, given: Mapping[str, Tensor], beside: LearningRates | None = None) -> None:
        self.program = program
        described = program.interface.param_groups
        if beside is None or not described:
            self.groups = [Group(group, i) for i, group in enumerate(described)]
            for group, own in zip(described, self.groups, strict=True):
                if group.lr in given:
                    own["lr"] = given[group.lr]
        else:
            self._check_beside(beside.program)
            self.groups = beside.groups
        taken = set(program.step.external_inputs)
        used = [(group.lr, i) for i, group in enumerate(described) if group.lr in taken]
        self.names = tuple(name for name, _ in used)
        self.group_of = [i for _, i in used]
        read = _read_as_tensors(program)
        self.as_tensor = [name in read for name in self.names]
        self.plain = not any(self.as_tensor)

    def state(self) -> dict[str, Tensor]:
        """The learning rates by blob."""
        described = self.program.interface.param_groups
        return {
            group.lr: torch.tensor(own["lr"], dtype=torch.float64, device="cpu")
            for group, own in zip(described, self.groups, strict=True)
        }

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the learning rates of *optimizer* before each step from now on.

        Raises:
            SessionError: it is of another class, or its groups or their other options are not those of the program.
        """
        interface = self.program.interface
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise self._refusal(f"a session follows a torch.optim.Optimizer, not a {type(optimizer).__name__}")
        if not interface.param_groups:
            raise self._refusal("the program has no optimizer, so its session cannot follow one", "capture it with one")
        theirs = type(optimizer).__name__
        if theirs != interface.optimizer:
            raise self._refusal(f"the optimizer is {theirs}, the program's {interface.optimizer}")
        self._check_count(optimizer)
        fixed = []
        for i, group in enumerate(interface.param_groups):
            self._check_params(i, group, optimizer.param_groups[i]["params"])
            options = [
                (name, value) for name, value in group.options.items() if name != "lr" and name in optimizer.defaults
            ]
            self._check_options(i, options, optimizer.param_groups[i])
            # The optimizer's own objects: a step sees by their identity that nothing has changed. A list may change
            # unseen, so its items are kept.
            kept = [(name, optimizer.param_groups[i][name]) for name, _ in options]
            fixed.append([(name, tuple(value) if isinstance(value, list) else value) for name, value in kept])
        for own, options in zip(self.groups, fixed, strict=True):
            own._followed, own._fixed = optimizer, options

    def _check_beside(self, other: Program) -> None:
        ours, theirs = self.program.interface, other.interface
        if ours.optimizer != theirs.optimizer or len(ours.param_groups) != len(theirs.param_groups):
            raise self._refusal("the program has another optimizer than the one beside it", "capture both with one")
        for i, (mine, its) in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
            for k, (param, beside) in enumerate(zip_longest(mine.params, its.params)):
                if param != beside:
                    raise self._refusal(
                        f"parameter {k} in group {i} of the optimizer is {param!r} in this program, {beside!r} in "
                        "the one beside it",
                        "capture both with one, or make a session of its own and give it state by load_state_dict()",
                    )
            for name in sorted((mine.options.keys() | its.options.keys()) - {"lr", "initial_lr"}):
                if mine.options.get(name) != its.options.get(name):
                    raise self._refusal(
                        f"group {i} of the optimizer has {name}={mine.options.get(name)!r} in this program, "
                        f"{its.options.get(name)!r} in the one beside it",
                        "keep the options as they were",
                    )

    @property
    def followed(self) -> torch.optim.Optimizer | None:
        """The optimizer that gives the rates, if one does."""
        return self.groups[0]._followed if self.groups else None

    def _check_count(self, optimizer: torch.optim.Optimizer) -> None:
        theirs, ours = len(optimizer.param_groups), len(self.groups)
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

    def _check_options(self, i: int, options: list[tuple[str, Any]], theirs: Mapping[str, Any]) -> None:
        for name, value in options:
            if name not in theirs:
                raise self._refusal(f"group {i} of the optimizer has no {name!r}, the program has {value!r}")
            if not _equal(theirs[name], value):
                cycled = name in ("momentum", "betas")
                raise self._refusal(
                    f"group {i} of the optimizer has {name}={theirs[name]!r}, the program has {value!r}",
                    "only learning rates follow an optimizer; "
                    + ("make a scheduler with cycle_momentum=False, or " if cycled else "")
                    + "capture the program again",
                )

    def _refusal(self, what: str, fix: str = "follow the optimizer that was captured") -> SessionError:
        return SessionError(what, where=f"program {self.program.name!r}", fix=fix)

    def now(self) -> list[Feedable]:
        """The learning rates of the next step: tensors, or floats for those that only optimizers read.

        Raises:
            SessionError: the followed optimizer is not what it was: another option than a learning rate has changed.
        """
        if self.followed is None:
            if self.plain:
                return [self.groups[i]._options["lr"] for i in self.group_of]
            rates = [group._options["lr"] for group in self.groups]
        else:
            theirs = self.followed.param_groups
            if len(theirs) != len(self.groups):
                self._check_count(self.followed)
            for i, (own, group) in enumerate(zip(self.groups, theirs, strict=True)):
                for name, value in own._fixed:
                    if group.get(name, self) is not value:
                        self._check_options(i, own._fixed, group)
            rates = [_rate(group["lr"], i) for i, group in enumerate(theirs)]
            # What torch's schedulers look at: they warn before the first step of an optimizer.
            self.followed._opt_called = True  # type: ignore[attr-defined]
        return [
            torch.tensor(rates[i], dtype=torch.float64, device="cpu") if as_tensor else rates[i]
            for i, as_tensor in zip(self.group_of, self.as_tensor, strict=True)
        ]


def _rate(value: object, group: int) -> float:
    if type(value) is float:
        return value
    if isinstance(value, (int, float, Tensor)) and not isinstance(value, bool):
        try:
            return float(value)
        except (RuntimeError, TypeError, ValueError, OverflowError):  # a tensor of several elements, or without any
            pass
    raise SessionError(
        f"the learning rate {value!r} is not a number", where=f"parameter group {group}", fix="give a float"
    )


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
