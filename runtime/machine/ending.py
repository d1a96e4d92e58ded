"""The end of the interpreter, at which a thread that is still in an operator of torch aborts the process."""

from __future__ import annotations

import threading
from typing import Final

__all__ = ["ENDS_IN", "stay"]

ENDS_IN: Final[list[int]] = []
"""The thread that ends the interpreter, once one does. The threads that are left beside it are those that Python does
not wait for."""


def stay() -> None:
    """Never return, but in the thread that ends the interpreter.

    Python before 3.14 ends other threads wherever they take its lock next, by an exception that C++ knows nothing of;
    from then on it lets them wait forever, as this does.
    """
    if ENDS_IN and threading.get_ident() not in ENDS_IN:
        while True:
            threading.Event().wait()
