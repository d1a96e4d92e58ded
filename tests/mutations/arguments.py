"""Mutations of operators' arguments: numbers, switches, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from graphir.errors import GraphirError
from graphir.ir.operator import Symbol
from graphir.ir.program import Program
from graphir.ir.size import Polynomial, bind
from mutations.edits import declared, exchanged, named, replaced, shuffled

__all__ = ["ARGUMENTS"]

Found = Iterator[tuple[str, Program]]
Change = Callable[[Any, Program, Random], list[Any]]


def _each(program: Program, draw: Random, change: Change) -> Found:
    """Every argument that *change* has something for, in a drawn order; lists are changed in one of their items."""
    found: list[tuple[int, str, Any]] = []
    for position, op in enumerate(program.step.ops):
        for name, arg in op.args.items():
            if isinstance(arg, tuple) and not isinstance(arg, Polynomial):
                for k, item in enumerate(arg):
                    found += [(position, name, (*arg[:k], new, *arg[k + 1 :])) for new in change(item, program, draw)]
            else:
                found += [(position, name, new) for new in change(arg, program, draw)]
    for position, name, new in shuffled(found, draw):
        op = program.step.ops[position]
        yield f"{name}={new!r} in {named(op)}", _with(program, position, {**op.args, name: new})


def _with(program: Program, position: int, args: Mapping[str, Any]) -> Program:
    """With other arguments; what a view is declared to be follows them."""
    op = program.step.ops[position]._replace(args=args)
    if op.effects.views:
        try:
            return replaced(program, position, op, *declared(program, op))
        except GraphirError:
            pass
    return exchanged(program, position, args=args)


def ulp(program: Program, draw: Random) -> Found:
    """A float is the next one up or down."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if not isinstance(arg, float) or not math.isfinite(arg):
            return []
        return [math.nextafter(arg, math.inf), math.nextafter(arg, -math.inf)]

    yield from _each(program, draw, change)


def other_float(program: Program, draw: Random) -> Found:
    """A float is negated, doubled, or a zero of the other sign."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if not isinstance(arg, float):
            return []
        return [-arg, arg * 2, math.inf] if arg else [-arg, 0.5]

    yield from _each(program, draw, change)


def other_integer(program: Program, draw: Random) -> Found:
    """A whole number is one more or less, or negated."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if type(arg) is not int:
            return []
        return [arg + 1, arg - 1, -arg] if arg else [1, -1]

    yield from _each(program, draw, change)


def switch(program: Program, draw: Random) -> Found:
    """A switch is turned."""
    yield from _each(program, draw, lambda arg, program, draw: [not arg] if isinstance(arg, bool) else [])


_CONSTANTS = (
    ("f32", "f64", "f16", "bf16"),
    ("i64", "i32", "i16", "bool"),
    ("contiguous_format", "preserve_format", "channels_last"),
)


def symbol(program: Program, draw: Random) -> Found:
    """An element type, layout or memory format is another; a text, such as an optimizer's form, too."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if isinstance(arg, Symbol):
            family = next((f for f in _CONSTANTS if arg in f), ())
            return [Symbol(other) for other in family if other != arg]
        if isinstance(arg, str):
            return [{"for_loop": "fused", "fused": "for_loop", "mean": "sum", "sum": "mean"}.get(arg, arg + "x")]
        return []

    yield from _each(program, draw, change)


def other_kind(program: Program, draw: Random) -> Found:
    """A number is of another type: 1, 1.0 and True; 0 and -0.0."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if isinstance(arg, bool):
            return [int(arg), float(arg)]
        if type(arg) is int:
            return [float(arg), *([-0.0, False] if arg == 0 else []), *([True] if arg == 1 else [])]
        return [int(arg)] if isinstance(arg, float) and math.isfinite(arg) and arg == int(arg) else []

    yield from _each(program, draw, change)


def captured_size(program: Program, draw: Random) -> Found:
    """A size that follows the batch is the number that it is at the captured one, or another size that agrees there;
    a number that is the captured batch follows it."""

    def change(arg: Any, program: Program, draw: Random) -> list[Any]:
        if isinstance(arg, bool) or not isinstance(arg, (int, float, Polynomial)):
            return []
        found: list[Any] = []
        if isinstance(arg, Polynomial):
            number = bind(arg, program.dims)
            found.append(number)
            for name, value in program.dims.items():
                doubled = Polynomial.of({(name,): 2, (): number - 2 * value})
                found += [doubled] if doubled != arg else []
                squared = Polynomial.of({(name, name): 1, (): number - value * value})
                found += [squared] if squared != arg else []
        elif math.isfinite(arg) and arg == int(arg):
            for name, value in program.dims.items():
                found.append(Polynomial.of({(name,): 1, (): int(arg) - value}))
                if arg < 0:
                    found.append(Polynomial.of({(name,): -1, (): int(arg) + value}))
        return found

    yield from _each(program, draw, change)


def default(program: Program, draw: Random) -> Found:
    """An argument is left out, so that it is the type's default."""
    for position in shuffled(range(len(program.step.ops)), draw):
        op = program.step.ops[position]
        for name in op.args:
            args = {other: arg for other, arg in op.args.items() if other != name}
            yield f"no {name} in {named(op)}", _with(program, position, args)


ARGUMENTS: Mapping[str, Callable[[Program, Random], Found]] = {
    "float: one ulp": ulp,
    "float: sign, size, zero": other_float,
    "integer: by one": other_integer,
    "switch turned": switch,
    "element type, format, form": symbol,
    "number of another type": other_kind,
    "size that agrees when captured": captured_size,
    "argument left out": default,
}
