"""Which variables of the generated code hold the values of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from graphir.analysis.views import Uncalled, uncalled_views
from graphir.errors import PlanError

from ..executor import Setting

__all__ = ["Values"]


class Values:
    """Which variable holds each value, and which thread it belongs to.

    Attributes:
        variables: by (name, version); a value written in place keeps its operand's variable.
        owners: the thread that makes a variable; None: every thread has it (state, inputs).
        slots: the position in ``x`` of each variable that another thread reads.
        of_storage: the variables to drop with a storage.
        kept: the tensors of the variables ``s0, s1, …``: state, and views of it.
        shared: the values that one thread makes and another one reads.
        uncalled: the views that need no call; where each instruction is observed, all are made.
        consumed: by storage, the variable of the list in which an input is that the step drops.
    """

    def __init__(self, setting: Setting, thread: Mapping[str, int], observed: bool = False) -> None:
        self.net = setting.plan.step
        self.variables: dict[tuple[str, int], str] = {}
        self.owners: dict[str, int | None] = {}
        self.of_storage: dict[str, list[str]] = {}
        self.last_version: dict[str, int] = {}
        self.kept: list[Tensor] = []
        for name, tensor in setting.state.items():
            self.keep(name, 0, tensor)
        self.consumed: dict[str, str] = {}
        for i, name in enumerate(setting.inputs):
            self.define(name, 0, f"i{i}", None)
            if name in setting.consumed:
                self.consumed[self.net.blob(name).storage] = f"i{i}"
        self.shared = self._shared(setting, thread)
        self.uncalled = Uncalled({}, (), ()) if observed else uncalled_views(setting.plan, thread, self.shared)
        self.slots: dict[str, int] = {}
        self.count = 0

    def _shared(self, setting: Setting, thread: Mapping[str, int]) -> frozenset[tuple[str, int]]:
        """The (name, version)s that a thread other than the maker's reads, by this name or one that shares it."""
        maker: dict[tuple[str, int], int] = {}
        same: dict[tuple[str, int], tuple[str, int]] = {}
        shared: set[tuple[str, int]] = set()
        for instruction in setting.plan.instructions:
            if instruction.op < 0:
                continue
            op, here = self.net.ops[instruction.op], thread[instruction.lane]
            reads, makes = [same.get(read, read) for read in op.reads], tuple(op.makes)
            shared.update(read for read in reads if maker.get(read, here) != here)
            for output, source in op.effects.writes:
                same[makes[output]] = reads[source]
            for made in instruction.makes(makes):
                maker.setdefault(same.get(made, made), here)
        return frozenset(shared)

    def define(self, name: str, version: int, variable: str, owner: int | None) -> None:
        """Note that *variable* holds a value; *owner* is the thread that made the variable."""
        self.variables[name, version] = variable
        self.last_version[name] = version
        if variable not in self.owners:
            self.owners[variable] = owner
            self.of_storage.setdefault(self.net.blob(name).storage, []).append(variable)

    def keep(self, name: str, version: int, tensor: Tensor) -> None:
        """Define a value that is the same tensor in every step."""
        self.define(name, version, f"s{len(self.kept)}", None)
        self.kept.append(tensor)

    def kept_tensor(self, name: str, version: int) -> Tensor | None:
        """The tensor of such a value."""
        variable = self.variable(name, version)
        return self.kept[int(variable[1:])] if variable[0] == "s" else None

    def fresh(self) -> str:
        """A variable that is not in use."""
        self.count += 1
        return f"v{self.count - 1}"

    def variable(self, name: str, version: int) -> str:
        """The variable of a value.

        Raises:
            PlanError: it was not made yet.
        """
        try:
            return self.variables[name, version]
        except KeyError:
            raise PlanError(
                f"version {version} of {name!r} is read before it is made",
                where=f"net {self.net.name!r}",
                fix="emit the plan again",
            ) from None

    def last(self, name: str) -> tuple[int, str]:
        """The thread that returns the last value of an external output, and its variable."""
        variable = self.variable(name, self.last_version.get(name, 0))
        return self.owners[variable] or 0, variable

    def dropped(self, storage: str, thread: int) -> list[str]:
        """The thread's variables of a storage, which are now forgotten."""
        mine = [v for v in self.of_storage.get(storage, ()) if self.owners[v] == thread]
        self.of_storage[storage] = [v for v in self.of_storage.get(storage, ()) if v not in mine]
        return mine
