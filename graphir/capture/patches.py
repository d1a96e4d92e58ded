"""Functions of torch and of Python that are others while a step is recorded."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["in_this_thread", "replaced"]


@contextlib.contextmanager
def replaced(owner: Any, attributes: Mapping[str, object]) -> Iterator[None]:
    """While this is active, the class or module *owner* has these attributes; afterwards it is as it was."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in attributes:
            if name in own:
                setattr(owner, name, own[name])
            else:  # it comes from a base class
                delattr(owner, name)


def in_this_thread(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is *here* in the thread that asks for it, and *elsewhere* in all others."""
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (here if threading.get_ident() == thread else elsewhere)(*args, **kwargs)

    return either
