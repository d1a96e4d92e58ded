"""Mappings that nobody changes: those of operators, nets, programs, plans and interfaces.

A pass that changes one thing shares everything else with the program that it was given. A mapping that was changed in
place would change every program that has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

__all__ = ["EMPTY", "FrozenDict", "freeze", "frozen", "frozen_all"]

K = TypeVar("K")
V = TypeVar("V")


class FrozenDict(dict[K, V]):
    """A dict that cannot be changed.

    Reading is a dict's own. ``dict(x)``, ``{**x, …}``, ``x | y`` and ``x.copy()`` are plain dicts again.
    """

    __slots__ = ()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            "mappings of operators, nets, programs and plans are read-only; "
            "make a changed value: net.with_(blobs={**net.blobs, …}), op._replace(args={**op.args, …})"
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[FrozenDict[K, V]], tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)


EMPTY: Final[FrozenDict[Any, Any]] = FrozenDict()


def frozen(value: Any) -> Any:
    """A mapping as a read-only one, its values as they are; anything else as it is."""
    if value.__class__ is FrozenDict or not isinstance(value, Mapping):
        return value
    return FrozenDict(value) if value else EMPTY


def frozen_all(value: Any) -> Any:
    """A value that is read-only throughout, with the mappings, lists, sets and tuples in it. Lists become tuples."""
    if isinstance(value, Mapping):
        return FrozenDict({name: frozen_all(part) for name, part in value.items()}) if value else EMPTY
    if isinstance(value, list | tuple):
        parts = [frozen_all(part) for part in value]
        return value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return frozenset(value) if isinstance(value, set) else value


def freeze(value: object, **fields: Callable[[Any], Any]) -> None:
    """Replace fields of a frozen dataclass, each by the result of its function. For use in ``__post_init__``."""
    for name, function in fields.items():
        given = getattr(value, name)
        made = function(given)
        if made is not given:
            object.__setattr__(value, name, made)
