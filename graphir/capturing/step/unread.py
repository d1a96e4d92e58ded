"""What of an optimizer a step function cannot read while it is recorded: numbers and state that move between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import CaptureError

__all__ = ["UnreadGroup", "UnreadState", "unread"]


def unread(does: str, here: Callable[[], str]) -> CaptureError:
    """The error of a step that *does* something with what moves between steps."""
    return CaptureError(
        f"the step {does}, which moves from step to step",
        where=here(),
        fix="read and set it between steps: a session reads the optimizer's numbers before each step; or pass a number "
        "to the step as a tensor",
    )


class UnreadGroup(dict[str, Any]):
    """A parameter group whose parameters can be read, and nothing else.

    Args:
        group: itself.
        kind: the class of its optimizer.
        here: says which module runs.
    """

    def __init__(self, group: dict[str, Any], kind: str, here: Callable[[], str]) -> None:
        super().__init__(group)
        self._kind, self._here = kind, here

    def _refuse(self, verb: str, key: object) -> CaptureError:
        return unread(f"{verb} {key!r} of a parameter group of {self._kind}", self._here)

    def __getitem__(self, key: str) -> Any:
        if key != "params":
            raise self._refuse("reads", key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[key]

    def __setitem__(self, key: str, value: Any) -> None:
        raise self._refuse("sets", key)

    def __delitem__(self, key: str) -> None:
        raise self._refuse("deletes", key)

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refuse("reads or sets", "all")

    items = values = update = pop = popitem = setdefault = clear = _whole


class UnreadState(dict[Any, Any]):
    """The state of an optimizer, which cannot be read or set.

    Args:
        kind: the class of the optimizer.
        here: says which module runs.
    """

    def __init__(self, kind: str, here: Callable[[], str]) -> None:
        super().__init__()
        self._kind, self._here = kind, here

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise unread(f"reads or sets the state of {self._kind}", self._here)

    __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = _refuse
    get = keys = items = values = update = pop = popitem = setdefault = clear = _refuse
