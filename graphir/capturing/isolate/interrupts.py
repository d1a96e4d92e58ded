"""Ctrl-C while a step is recorded.

Torch calls Python from C++ in places where an exception ends the process (``find_torch_dispatch_rule`` is one). So
Ctrl-C, which may come anywhere, is held back until the recorder is given the next operator, where it may raise.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupts"]


class Interrupts:
    """Ctrl-C during one run of a step: held back, and raised later.

    Attributes:
        held: whether Ctrl-C was pressed, so that :meth:`strike` raises.
    """

    def __init__(self) -> None:
        self.held = False

    def strike(self) -> None:
        """Raise a Ctrl-C that was held back.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        if self.held:
            raise KeyboardInterrupt

    @contextmanager
    def held_back(self, again: bool = False) -> Iterator[None]:
        """While this is active, hold Ctrl-C back; a second one strikes at once. A handler of the program's own stays.

        Args:
            again: whether to hold further ones back, too, during work that can't be repeated after it is cut short.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, and no operator came after it.
        """

        def handle(number: int, frame: FrameType | None) -> None:
            if not again:
                self.strike()
            self.held = True

        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.strike()
