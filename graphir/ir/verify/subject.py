"""Whether a function was given one of graphir's values at all."""

from __future__ import annotations

from ...errors import GraphirError

__all__ = ["require"]


def require(subject: object, kinds: tuple[type, ...], function: str) -> None:
    """Refuse what is of none of *kinds*, in the words of the function that was called.

    Raises:
        GraphirError: it is of none of them.
    """
    if not isinstance(subject, kinds):
        *others, last = (kind.__name__ for kind in kinds)
        wanted = f"{', '.join(others)} or {last}" if others else last
        raise GraphirError(
            f"{function} takes a {wanted}, not {type(subject).__name__}",
            fix="capture one, or graphir.load its file, or graphir.parse its text",
        )
