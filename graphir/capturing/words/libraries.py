"""Remedies for refused lines of installed libraries: no remedy tells a user to edit a library."""

from __future__ import annotations

import os
from pathlib import Path
from types import CodeType
from typing import Final

import torch

__all__ = ["LAYER_DROP", "Outside", "library_of", "remedy"]

_INSTALLED: Final = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"
_EAGERLY: Final = (
    "or train with graphir.DataParallel and the loss outside of the model: a model that can't be captured runs eagerly "
    "there"
)
_AROUND: Final = (
    "compute the loss outside of the model (pass loss=, and no labels), choose a configuration of the model that does "
    f"not run this line, {_EAGERLY}"
)
LAYER_DROP: Final = (
    "LayerDrop skips layers by numbers that Python reads: make the model with layerdrop=0.0 in its configuration "
    "(encoder_layerdrop=0.0, decoder_layerdrop=0.0), set the attribute layerdrop of the modules that have it to 0.0, "
    f"{_EAGERLY}"
)


class Outside(str):
    """A remedy that does not change the refused line: an argument, a configuration, or a call before the capture."""

    __slots__ = ()


def library_of(code: CodeType | None) -> str:
    """The installed package that contains *code*, such as ``transformers``; empty for a user's own code."""
    if code is None:
        return ""
    path = code.co_filename
    if path.startswith(_TORCH):
        return "torch"
    for folder in _INSTALLED:
        _, found, inside = path.rpartition(folder)
        if found:
            return inside.partition(os.sep)[0].removesuffix(".py")
    return ""


def remedy(code: CodeType | None, fix: str) -> str:
    """What a user can do about a line of *code*.

    Args:
        code: the code that contains the refused line; None where the line is unknown.
        fix: the remedy for code of the user's own.
    """
    library = library_of(code)
    if not library or isinstance(fix, Outside):
        return fix
    assert code is not None
    if any("layerdrop" in name.lower() for name in (*code.co_names, *code.co_varnames)):
        return LAYER_DROP
    return f"this line belongs to {library}: {_AROUND}"
