"""Recordings in a row, until they show what the step is.

One recording shows what a step does once. Where that is not enough, the step is recorded again, on the module as it was
left::

    a recording shows that                           so the next one has to
    ----------------------------------------------   ------------------------------------------------------
    the step reads a tensor from a functools cache   show how it is made: the cache is without it
    the step enters autocast for CUDA                show what a step does that asked before what autocast is
    a random state of the process has moved          leave it: another thread drew; else the step is refused
    modules set themselves up, or keep tensors       be of the same step, and change nothing more
    the step is the first at the captured sizes      be of the same step: it hangs on nothing that no program sees
    the step is another one at other sizes           be of the same step, three times in a row
"""

from __future__ import annotations

from ...errors import CaptureError
from ...ir.size import Dims
from ..isolate.attributes import Change, settled
from ..isolate.interrupts import Interrupts
from ..isolate.python_random import RandomStates, drawn_from
from ..record.values import RecordedCall
from ..words.places import where
from .comparison import differing_part, same_step
from .recorded_step import Recording
from .recording import Step, run

__all__ = ["run_until_alike"]


def run_until_alike(
    step: Step, dims: Dims, *, named: bool = True, times: int = 1, like: Recording | None = None
) -> Recording:
    """Record the step until the recordings are of one step.

    Args:
        step: what is recorded.
        dims: the sizes of its named dimensions.
        named: see :func:`.recording.run`; only the first recording is named.
        times: the least number of recordings that are taken.
        like: an earlier recording at these sizes, of the same step.

    Returns:
        *like*, or the first recording.

    Raises:
        CaptureError: no program can express the step; or the step differs when it is run again.
    """
    interrupts = Interrupts()
    at_rest, last = True, list[Change]()
    with interrupts.held_back(), step.attributes.restored_if_it_fails():
        while like is None or times > 0 or not at_rest:
            try:
                again, changes = _undisturbed(step, dims, named and like is None, interrupts)
            except CaptureError:
                if at_rest:
                    raise
                raise last[0].complaint from None  # the step has read what the previous recording left
            rests = settled(last, changes)
            if like is None:
                like = again
            elif not at_rest and not (rests and same_step(like, again)):
                raise last[0].complaint
            elif not same_step(like, again):
                raise _another(like, again)
            else:
                again.release()
            at_rest, last, times = rests, changes, times - 1
    return like


def _undisturbed(step: Step, dims: Dims, named: bool, interrupts: Interrupts) -> tuple[Recording, list[Change]]:
    """A recording, and the changes of attributes that may be harmless, which stay for the next recording to find.

    Raises:
        CaptureError: no program can express the step; or the step draws from the random states of the process.
    """
    asked = moved = False
    with RandomStates().restored_if_it_fails():
        while True:
            states, target = RandomStates(), step.target.is_cuda
            found: tuple[Recording, list[Change]] | None = None
            try:
                found = run(step, dims, named, interrupts)
            except CaptureError:
                asked = not asked and _knows_more(step, target)
                if not asked:
                    raise
            else:
                asked = not asked and _knows_more(step, target)
            drew = states.moved()
            if drew and moved:
                raise drawn_from(drew)
            moved = bool(drew)
            if found is not None and not asked and not moved:
                break
            step.attributes.put_back()
            if found is not None:
                found[0].release()
    recording, changes = found
    if changes:
        _refuse_made(step)
        step.attributes.keep()
    else:
        step.attributes.put_back()
    return recording, changes


def _knows_more(step: Step, target: bool) -> bool:
    """Whether another recording would compute what this one read from a cache, or know that the step is for CUDA."""
    return step.caches.set_aside() or step.target.is_cuda != target


def _refuse_made(step: Step) -> None:
    """Refuse modules with parameters or buffers that the step has made: no optimizer knows them."""
    for path, module in step.model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(id(tensor) not in step.state.by_id for tensor in tensors):
            raise CaptureError(
                f"the step makes the module {path!r}",
                where=where(path.rpartition(".")[0]),
                fix="run one step before the capture, and make the optimizer after that",
            )


def _another(first: Recording, again: Recording) -> CaptureError:
    """The error for a step that differs when it is run again."""
    call, how = _difference(first, again)
    return CaptureError(
        f"the step differs when it is run again{how}",
        where=where(call.scope, call.line) if call is not None else where(""),
        fix="keep a value that changes in a buffer, or pass it to the step as a tensor: a program sees no globals, "
        "closures, classes, iterators or clocks; if only the first steps differ, as with functions that "
        "TorchScript compiled, run three steps before the capture",
    )


def _difference(first: Recording, again: Recording) -> tuple[RecordedCall | None, str]:
    """The first call that differs, and how."""
    for mine, its in zip(first.calls, again.calls, strict=False):
        if mine.type != its.type:
            return mine, f": {mine.type} the first time, {its.type} the second"
        for name, value in mine.args.items():
            if repr(value) != repr(its.args.get(name)):
                return mine, f": argument {name} of {mine.type} was {value}, then {its.args.get(name)}"
    part = differing_part(first, again)
    return None, f", in {part}" if part else ""
