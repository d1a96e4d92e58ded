"""The text of one thread's function: its lines, the instruction of each, and the parameters that are bound to it."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Sequence
from types import CodeType, FunctionType
from typing import Final, NamedTuple

from torch import Tensor

from graphir.ir.size import Dims

__all__ = ["ThreadCode", "Writer"]

_FILE: Final = "<graphir thread>"


class ThreadCode(NamedTuple):
    """The function of one thread.

    Attributes:
        source: its Python text.
        code: compiled.
        instructions: for each line of the source, the position of the instruction in the plan; -1 for none.
        inputs: which of the setting's inputs it takes, after the number of steps done and the methods of a probe.
        outputs: which of the step's external outputs it returns.
        constants: what its remaining parameters are bound to; those that depend on dimensions are None.
        sized: position in ``constants`` and what computes each of those.
        meanings: what each of ``constants`` is, in words for a reader; empty where its value says it.
    """

    source: str
    code: CodeType
    instructions: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[object, ...]
    sized: tuple[tuple[int, Callable[[Dims], object]], ...]
    meanings: tuple[str, ...]

    def bind(self, dims: Dims) -> Callable[..., tuple[Tensor, ...]]:
        """The function for these sizes."""
        constants = list(self.constants)
        for position, value in self.sized:
            constants[position] = value(dims)
        # Under a mode of torch, C++ called from this code imports modules by its builtins.
        return FunctionType(self.code, {"__builtins__": builtins}, "run", tuple(constants))


class Writer:
    """The lines and bound parameters of one thread's function.

    Attributes:
        lines: below its head.
        instructions: for the head and each of them, the position of the instruction; -1 for none.
        bound: what its parameters are bound to; those that depend on dimensions to None.
        names: the parameter of each key.
        sized: what computes the values of those that depend on dimensions.
        meanings: as in :class:`ThreadCode`.
        inputs: the variables of those inputs that it takes.
        outputs: the variables of those external outputs that it returns, by number.
    """

    def __init__(self, kept: Sequence[Tensor], observed: bool = False, consumed: Collection[str] = ()) -> None:
        self.kept, self.observed, self.consumed = kept, observed, frozenset(consumed)
        self.lines: list[str] = []
        self.instructions: list[int] = [-1]
        self.bound: dict[str, object] = {}
        self.names: dict[object, str] = {}
        self.sized: dict[str, Callable[[Dims], object]] = {}
        self.meanings: dict[str, str] = {}
        self.inputs: dict[str, None] = {}
        self.outputs: dict[int, str] = {}

    def line(self, position: int, statements: Sequence[str]) -> None:
        if statements:
            self.lines.append("; ".join(statements))
            self.instructions.append(position)

    def returns(self, output: int, variable: str) -> None:
        self.outputs[output] = self.use(variable)

    def use(self, variable: str) -> str:
        """A variable, made a parameter of the function where it is state or an input; of an input that the step drops,
        what is in its list."""
        if variable[0] == "i":
            self.inputs[variable] = None
            return f"{variable}[0]" if variable in self.consumed else variable
        if variable[0] == "s" and variable not in self.bound:
            self.bound[variable] = self.kept[int(variable[1:])]
        return variable

    def bind(self, value: object, kind: str = "k", key: object = None, meaning: str = "") -> str:
        """The parameter that holds *value*; values with equal keys (by default the same object) share it."""
        key = (kind, id(value) if key is None else key)
        if key not in self.names:
            self.names[key] = f"{kind}{len(self.names)}"
            self.bound[self.names[key]] = value
            self.meanings[self.names[key]] = meaning
        return self.names[key]

    def bind_sized(self, value: Callable[[Dims], object], key: object, meaning: str) -> str:
        name = self.bind(None, key=key, meaning=f"{meaning} at the sizes of the step")
        self.sized[name] = value
        return name

    def finish(self) -> ThreadCode:
        inputs = sorted(self.inputs, key=lambda name: int(name[1:]))
        probe = ["begin", "end"] if self.observed else []
        head = ", ".join(["n", *probe, *inputs, *self.bound])
        returned = "".join([f"{variable}, " for variable in self.outputs.values()])
        source = "\n ".join([f"def run({head}):", *self.lines, f"return ({returned})"]) + "\n"
        order = {name: i for i, name in enumerate(self.bound)}
        module = compile(source, _FILE, "exec", dont_inherit=True)
        return ThreadCode(
            source,
            next(const for const in module.co_consts if isinstance(const, CodeType)),
            (-1, *self.instructions, -1),
            tuple([int(name[1:]) for name in inputs]),
            tuple(self.outputs),
            tuple(self.bound.values()),
            tuple([(order[name], value) for name, value in self.sized.items()]),
            tuple([self.meanings.get(name, "") for name in self.bound]),
        )
