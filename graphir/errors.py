"""Every error that graphir raises, as one tree under :class:`GraphirError`.

A message says what is wrong on its first line, then where (``at``, ``in``) and what to do (``fix``)::

    PlacementError: blob 'gpu_0/relu' is on gpu:1 but read on gpu:0
      at   gpu_0/fc2 : f32[64,1000] @gpu:0 = aten.addmm(gpu_0/fc2.bias, gpu_0/relu, gpu_0/fc2.weight.t)
      in   program 'mlp', after shift_activations{activations=[relu], shifts={0: 1}}
      fix  run inject_copies before emit
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final, NoReturn

__all__ = [
    "CaptureError",
    "CoverageError",
    "EagerWarning",
    "EquivalenceError",
    "FileError",
    "Gone",
    "GraphirError",
    "ParseError",
    "PassError",
    "PassWarning",
    "PipelineWarning",
    "PlacementError",
    "PlanError",
    "ProfileWarning",
    "RecaptureWarning",
    "ReplicationError",
    "RunError",
    "SessionError",
    "TrainingWarning",
    "VerifyError",
    "after_last",
    "counted",
    "nearest",
    "warn",
]


_LONGEST_PASS: Final = 120
"""Characters of a pass that an error prints; a real shift names a hundred activations."""


class Gone:
    """A method that is gone: who asks for the method is told, by an AttributeError, which function to call.

    Args:
        call: the function, called on the method's object.
    """

    def __init__(self, call: str) -> None:
        self.call = call

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"{owner.__name__}.{name}"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{self.name} is gone: call {self.call}")


class GraphirError(Exception):
    """What is wrong, where, and how to fix it.

    Args:
        what: one line, what is wrong.
        at: the operator or instruction, as text.
        where: the program, module, pass or file.
        fix: what the user can do.
    """

    def __init__(self, what: str, *, at: str = "", where: str = "", fix: str = "") -> None:
        self.what, self.at, self.where, self.fix = what, at, where, fix
        super().__init__(_message(what, ("at", at), ("in", where), ("fix", fix)))


class CaptureError(GraphirError):
    """A model, loss or optimizer that cannot be captured exactly."""


class PassError(GraphirError):
    """A pass was given options that do not fit the program.

    Attributes:
        limits: where no placement keeps within limits, those that the remedy names, by device in bytes; else empty.
    """

    limits: Mapping[str, int] = MappingProxyType({})


class VerifyError(GraphirError):
    """A program or plan breaks invariants of the IR; counts all that it breaks and lists the first."""


class PlacementError(VerifyError):
    """The only broken invariants are operands on the wrong device."""


class ParseError(GraphirError):
    """Text that is not a net, a program, a plan or a pipeline."""


class FileError(GraphirError):
    """A file that cannot be read: missing, damaged, of another kind, or of a newer format."""


class EquivalenceError(GraphirError):
    """Two programs that do not compute the same values."""


class PlanError(GraphirError):
    """A program that cannot become a plan, or a plan that cannot be run."""


class SessionError(GraphirError):
    """A session was used wrongly: inputs that do not fit the plan, state that is missing, use after close."""


class CoverageError(SessionError):
    """Arguments that the program does not cover: another size where sizes are fixed, another value that is no tensor.

    A program captured with these arguments would take them.
    """


class RunError(GraphirError):
    """A step failed: an operator, whose own exception is the cause, or what connects the lanes.

    Args:
        what: one line, what is wrong.
        at: the operator, or what each lane was doing, as text.
        where: module, plan, step and lane.
        live: where memory ran out, what was live there.
        fix: what the user can do.
        usable: whether the session can go on, since no state had been written.
    """

    def __init__(
        self, what: str, *, at: str = "", where: str = "", live: str = "", fix: str = "", usable: bool = False
    ) -> None:
        super().__init__(what, at=at, where=where, fix=fix)
        self.live, self.usable = live, usable
        self.args = (_message(what, ("at", at), ("in", where), ("live", live), ("fix", fix)),)


class ReplicationError(GraphirError):
    """Replicas that cannot be made, run or gathered; also of the type that torch raises there, else a ValueError."""


class EagerWarning(UserWarning):
    """Replicas or a placed model run operator by operator, since no plan can stand for the call; says why."""


class PassWarning(UserWarning):
    """A pass did what it was told, which may not be what was meant: a name can mean two things, or little was gained.

    The text says what was done, and how to write the other.
    """


class PipelineWarning(UserWarning):
    """Micro-batches that have to wait for each other, so that devices cannot work on several at a time."""


class ProfileWarning(UserWarning):
    """A file of measurements cannot be used, so that predictions are made without it."""


class RecaptureWarning(UserWarning):
    """A step was captured anew, since no plan so far covers its arguments."""


class TrainingWarning(UserWarning):
    """A training step goes on without something that training scripts mean: dropout in evaluation mode, an optimizer
    whose numbers have moved and that nobody follows, or the GPU that a program was recorded for."""


def _message(what: str, *labelled: tuple[str, str]) -> str:
    return "\n".join([what, *(f"  {label:<4} {text}" for label, text in labelled if text)])


def after_last(history: Sequence[str]) -> str:
    """``, after shift_activations{activations=[relu], shifts={0: 1}}``: the last pass, without long options, if any."""
    if not history:
        return ""
    last = history[-1] if len(history[-1]) <= _LONGEST_PASS else history[-1].partition("{")[0] + "{…}"
    return f", after {last}"


def counted(number: int, thing: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def nearest(name: object, known: Iterable[object]) -> str:
    """``; did you mean 'a' or 'b'?`` for the known names closest to *name*, or nothing."""
    close = get_close_matches(str(name), list(map(str, known)), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""


def warn(text: str, category: type[Warning]) -> None:
    """Warn, at the line of the caller that led here: the last one outside of graphir, and of torch, whose modules call
    ``forward``."""
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("graphir", "torch"):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, category, stacklevel=depth)
