"""The surroundings of a step function: its cells and globals, and the lists, dicts and objects there.

A recording leaves them as they were, and a step that changes one is refused: a program would not change it.
"""

from __future__ import annotations

import contextlib
import dis
from collections import deque
from collections.abc import Iterator, Sequence
from types import CellType, FunctionType
from typing import Any, Final, NamedTuple

from ...errors import CaptureError
from .containers import PLAIN, fill, is_untouched, items_of

__all__ = ["Around", "globals_of"]


_READ_NAMES: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})


def globals_of(function: FunctionType) -> list[str]:
    """The names of the globals that a function's code may read, and those that the functions in it may."""
    found: dict[str, None] = {}
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        found.update(dict.fromkeys([i.argval for i in dis.get_instructions(code) if i.opname in _READ_NAMES]))
        codes += [constant for constant in code.co_consts if isinstance(constant, type(code))]
    return [name for name in found if name in function.__globals__]


class _Place(NamedTuple):
    """A name of a function: a cell, a table and the key there, or a class and its attribute."""

    name: str
    holder: Any

    def read(self) -> Any:
        if isinstance(self.holder, type):
            return vars(self.holder).get(self.name)
        return self.holder.cell_contents if isinstance(self.holder, CellType) else self.holder.get(self.name)

    def put(self, value: Any) -> None:
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        else:
            self.holder[self.name] = value


class NamesNow:
    """The present values of the names that functions read, as attributes."""


class Around:
    """The cells, globals, containers and objects around a function.

    Attributes:
        names: what the names stand for, when :meth:`look` was called last.
    """

    def __init__(self) -> None:
        self.names = NamesNow()
        self._places: dict[tuple[int, str], _Place] = {}
        self._containers: list[tuple[str, Any]] = []

    def saw(self, name: str, value: Any) -> None:
        """Note a function, a class, a container, or an object."""
        if isinstance(value, FunctionType):
            places = [_Place(name, value.__globals__) for name in globals_of(value)]
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            self._note([*places, *[_Place(name, cell) for name, cell in cells if _is_full(cell)]])
        elif isinstance(value, type):
            self._note([_Place(key, value) for key, held in vars(value).items() if isinstance(held, PLAIN)])
        elif isinstance(value, (list, dict, set, deque)):
            self._containers.append((name, value))
        elif hasattr(value, "__dict__"):
            self._containers.append((name or type(value).__name__, vars(value)))

    def _note(self, places: Sequence[_Place]) -> None:
        self._places |= {(id(place.holder), place.name): place for place in places}

    def look(self) -> None:
        """Read what the names stand for."""
        table = vars(self.names)
        table.clear()
        for (_, name), place in self._places.items():
            while name in table:  # of two Python modules
                name += "'"
            table[name] = place.read()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """At the end, put everything back.

        Raises:
            CaptureError: something was changed.
        """
        with self.put_back() as changed:
            yield
        if changed:
            raise CaptureError(
                f"the step changes {changed[0]!r}, which a program would not do",
                fix="return what is to be kept, and keep it between steps",
            )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[list[str]]:
        """At the end, put everything back; the list has the name of the first thing that was changed."""
        values = [place.read() for place in self._places.values()]
        contents = [items_of(container) for _, container in self._containers]
        changed: list[str] = []
        try:
            yield changed
            changed += list(self._changed(values, contents))[:1]
        finally:
            for place, value in zip(self._places.values(), values, strict=True):
                if place.read() is not value:
                    place.put(value)
            for (_, container), items in zip(self._containers, contents, strict=True):
                fill(container, items)

    def _changed(self, values: Sequence[Any], contents: Sequence[list[Any]]) -> Iterator[str]:
        for place, value in zip(self._places.values(), values, strict=True):
            if place.read() is not value:
                yield place.name
        for (name, container), items in zip(self._containers, contents, strict=True):
            now = items_of(container)
            if not is_untouched(container, items) or len(now) != len(items):
                yield next((f"{name}.{key}" for key in _keys(container, items)), name)


def _keys(container: Any, items: Sequence[Any]) -> Iterator[str]:
    """The keys of a table at which something else is."""
    if isinstance(container, dict):
        before = dict(zip(items[: len(items) // 2], items[len(items) // 2 :], strict=True))
        for key in [*before, *container]:
            if isinstance(key, str) and (key not in before or container.get(key) is not before[key]):
                yield key


def _is_full(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
