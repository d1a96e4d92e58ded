"""Learning rates: one for each parameter group, as blobs of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from graphir.errors import SessionError
from graphir.ir.program import ParamGroup, Program

from .executor import Feedable
from .optimizers import KERNELS

__all__ = ["Group", "Rates"]


class Group(Mapping[str, Any]):
    """One parameter group, as in ``optimizer.param_groups``. Only ``lr`` can be set: the rest is in the program."""

    def __init__(self, group: ParamGroup) -> None:
        self._options: dict[str, Any] = {**group.options, "params": list(group.params)}
        self._lr = float(self._options["lr"])

    def __getitem__(self, key: str) -> Any:
        return self._lr if key == "lr" else self._options[key]

    def __setitem__(self, key: str, value: float | Tensor) -> None:
        """Set the learning rate.

        Raises:
            SessionError: any other option.
        """
        if key != "lr":
            raise SessionError(
                f"{key!r} cannot be set: it is part of the program", fix="capture it again with another optimizer"
            )
        self._lr = float(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return repr({**self._options, "lr": self._lr})


class Rates:
    """The learning rates of a program, and the optimizer that they follow.

    Attributes:
        groups: one for each parameter group.
        names: the learning-rate blobs that a step takes, in order.
    """

    def __init__(self, program: Program) -> None:
        self.groups = [Group(group) for group in program.interface.param_groups]
        self.followed: torch.optim.Optimizer | None = None
        taken = set(program.step.external_inputs)
        used = [(group.lr, i) for i, group in enumerate(program.interface.param_groups) if group.lr in taken]
        self.names = tuple(name for name, _ in used)
        self.group_of = [i for _, i in used]
        self.as_tensor = [name in _read_as_tensors(program) for name in self.names]
        self.plain = not any(self.as_tensor)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the learning rates of *optimizer* before each step from now on.

        Raises:
            SessionError: its groups or their other options are not those of the program.
        """
        if len(optimizer.param_groups) != len(self.groups):
            raise SessionError(
                f"the optimizer has {len(optimizer.param_groups)} parameter groups, the program {len(self.groups)}",
                fix="follow the optimizer that was captured",
            )
        for i, (group, theirs) in enumerate(zip(self.groups, optimizer.param_groups, strict=True)):
            for name, value in group.items():
                if name not in ("lr", "initial_lr", "params") and name in theirs and theirs[name] != value:
                    raise SessionError(
                        f"group {i} of the optimizer has {name}={theirs[name]!r}, the program has {value!r}",
                        fix="only learning rates follow an optimizer; capture the program again",
                    )
        self.followed = optimizer

    def now(self) -> list[Feedable]:
        """The learning rates of the next step: tensors, or floats for those that only optimizers read."""
        if self.followed is not None:
            for group, theirs in zip(self.groups, self.followed.param_groups, strict=True):
                group["lr"] = theirs["lr"]
        if self.plain:
            return [self.groups[i]._lr for i in self.group_of]
        return [
            torch.tensor(self.groups[i]._lr, dtype=torch.float64) if as_tensor else self.groups[i]._lr
            for i, as_tensor in zip(self.group_of, self.as_tensor, strict=True)
        ]


def _read_as_tensors(program: Program) -> set[str]:
    """The blobs that some operator reads that is not an optimizer, or that a step hands back."""
    found = set(program.step.external_outputs)
    for op in program.step.ops:
        if op.type not in KERNELS:
            found.update(op.inputs)
    return found
