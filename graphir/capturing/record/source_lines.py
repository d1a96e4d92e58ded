"""Source lines: where in a user's code an operator was called, read from Python's stack while the operator runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import torch

__all__ = ["SourceLines"]

_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_NN: Final = f"{Path(torch.nn.__file__).parent}{os.sep}"
_MODULES: Final = f"{Path(torch.nn.modules.__file__).parent}{os.sep}"
_CALLS: Final = f"{os.sep}module.py"
_CAPTURE: Final = f"{Path(__file__).parents[1]}{os.sep}"
_STANDARD: Final = f"{Path(os.__file__).parent}{os.sep}"

_USERS, _MODULE, _FUNCTION, _PASSED, _END = range(5)
"""Whose code a frame runs, in this order: a user or a library; a module of torch; another function of ``torch.nn``;
torch, Python or capture, which are skipped; the function that runs the step, at which the walk ends."""


class SourceLines:
    """Finds the line that called the running operator: the innermost line outside of torch.

    If there is none, the line is the innermost one of a module of torch, and else the innermost one of ``torch.nn``.
    Each piece of code is judged once, so the cost is a walk over a handful of frames.

    Args:
        end: code of the function that runs the step.
    """

    def __init__(self, end: CodeType) -> None:
        self._kinds: dict[CodeType, int] = {end: _END}
        self._texts: dict[tuple[CodeType, int], str] = {}
        self._codes: dict[str, CodeType] = {}

    def current(self) -> str:
        """The line of the running operator, ``models/net.py:42``; empty without one, as in most of a backward."""
        return self.of_frame(sys._getframe(1))

    def of_frame(self, frame: FrameType | None) -> str:
        """The line that called *frame*, or its own."""
        kinds = self._kinds
        module: FrameType | None = None
        function: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(frame)
            if kind == _USERS:
                return self._text(code, frame.f_lasti, frame.f_lineno)
            if kind == _MODULE and module is None:
                module = frame
            elif kind == _FUNCTION and function is None:
                function = frame
            elif kind == _END:
                break
            frame = frame.f_back
        found = module or function
        return "" if found is None else self._text(found.f_code, found.f_lasti, found.f_lineno)

    def of_error(self, error: BaseException) -> str:
        """The line that raised *error*, of the frames that the error has left so far.

        For an error that graphir raises, it is the line that called graphir.
        """
        places: dict[int, str] = {}
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            kind = self._kinds.get(code, _kind(trace.tb_frame))
            own = trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "graphir"
            if kind in (_USERS, _MODULE, _FUNCTION) and not own:
                places[kind] = self._text(code, trace.tb_lasti, trace.tb_lineno)
            trace = trace.tb_next
        return places[min(places)] if places else ""

    def code_of(self, line: str) -> CodeType | None:
        """The code that contains a line found here; None for an empty line."""
        return self._codes.get(line)

    @cached_property
    def _folders(self) -> tuple[str, ...]:
        return (*sys.path, str(Path.cwd()))

    def _text(self, code: CodeType, instruction: int, line: int) -> str:
        key = code, instruction
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = f"{_shown(code.co_filename, self._folders)}:{line}"
            self._codes[text] = code
        return text


def _kind(frame: FrameType) -> int:
    path = frame.f_code.co_filename
    if "__name__" not in frame.f_globals:  # torch generated the code, in no module, to call or to trace a function
        return _PASSED
    if path.startswith(_MODULES) and not path.endswith(_CALLS):
        return _MODULE
    if path.startswith(_NN) and not path.startswith(_MODULES):
        return _FUNCTION
    standard = path.startswith(_STANDARD) and "-packages" not in path
    return _PASSED if standard or path.startswith((_TORCH, _CAPTURE, "<frozen")) else _USERS


@lru_cache(1024)
def _shown(path: str, search: Sequence[str]) -> str:
    """*path* relative to the folder that it is imported from, so that it is the same on every machine."""
    if path.startswith("<"):
        return path
    file = Path(path).absolute()
    folders = [Path(folder).absolute() for folder in search]
    folder = max((f for f in folders if f in file.parents), key=lambda f: len(f.parts), default=file.parent)
    return file.relative_to(folder).as_posix()
