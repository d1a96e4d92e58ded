"""One run of a step on fake tensors: its calls, and the values of its parts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.meta import errors_not_logged, fresh_fake_mode
from ...ir.optypes.table import operator_type
from ...ir.program import Scalar
from ...ir.size import Dims
from ..intake.arguments import Arguments
from ..intake.found import StepFunction
from ..intake.options import Options
from ..intake.state import ModelState
from ..isolate.attributes import AllowedChanges, Attributes, Change
from ..isolate.autocast import Target, autocast_followed, autocast_off, fast_paths
from ..isolate.caches import Caches
from ..isolate.devices import modules_stay, moves
from ..isolate.escapes import escapes, unseen_escapes_refused
from ..isolate.functions import TorchFunctions
from ..isolate.global_state import global_state_kept
from ..isolate.interrupts import Interrupts
from ..isolate.module import fakes_in_place
from ..record.extents import plain
from ..record.known import fakes_with_known_values_hidden
from ..record.recorder import Recorder
from ..record.refused import failure
from ..record.scopes import Scopes
from ..record.seeds import rng_state_followed, seeding_refused
from ..record.sequences import sequences
from ..record.source_lines import SourceLines
from ..record.stand_ins import attribute_paths, fake_leaves, fake_state
from ..record.values import RecordedCall, Value
from ..words.libraries import remedy
from ..words.places import where
from .function import FunctionRun
from .micro_batches import MicroBatches
from .output_gradients import joint_backward
from .recorded_step import Outcome, Recording
from .step_run import standing
from .training import TrainingRun

__all__ = ["Step", "run"]

_aten: Final = torch.ops.aten

_Check: TypeAlias = Callable[[], None]
"""Raises where the step has changed one of torch's settings."""


class Step(NamedTuple):
    """A step that is to be recorded.

    Attributes:
        model: the module.
        function: the step function that uses the module; None: the step is made of the module and the rest here.
        state: its parameters and buffers.
        arguments: of the step; ``batch`` is the size of one micro-batch, or of one of its *parts*.
        loss: the loss function; None: the step is a forward only, or is given the gradients of its outputs.
        joint: whether the step is given the gradients of its outputs, and has a backward.
        positions: of the outputs whose gradients the step is given; None: of all that need one.
        output: a function from the model's output to the step's; None: the step returns the model's output.
        allowed: attributes of modules that the step may change.
        attributes: of the model's modules, as the step finds them.
        shared: which arguments share memory with others or with the state; see :func:`.intake.state.overlaps`.
        caches: that the step may read and fill.
        options: of the capture.
        target: the kind of device that the step is recorded for.
        trained: the blobs of the parameters that the optimizer updates, in its order; None: there is none, and the
            gradients of all parameters are used.
        parts: into how many equal ones the step cuts a batch, so that its sizes follow the size of a part.
        loops: whether the step has a backward for each, so that the parts are micro-batches.
    """

    model: torch.nn.Module
    function: StepFunction | None
    state: ModelState
    arguments: Arguments
    loss: Callable[..., Any] | None
    joint: bool
    positions: tuple[int, ...] | None
    output: Callable[[Any], Any] | None
    allowed: AllowedChanges
    attributes: Attributes
    shared: Mapping[str, str]
    caches: Caches
    options: Options
    target: Target
    trained: tuple[str, ...] | None
    parts: int = 1
    loops: bool = False


def run(step: Step, dims: Dims, named: bool, interrupts: Interrupts) -> tuple[Recording, list[Change]]:
    """Run the step once on fake tensors.

    Args:
        step: what is run.
        dims: the sizes of its named dimensions.
        named: whether the recording knows modules and source lines. Only the first recording of a step needs them.
            Others are taken for their numbers, in a third less time.
        interrupts: a Ctrl-C that was held back is raised where an operator is recorded.

    Returns:
        The recording, and the changes of attributes that may be harmless. Modules stay as the step leaves them.

    Raises:
        CaptureError: no program can express the step.
    """
    fake_mode, scopes = fresh_fake_mode(), Scopes(step.model)
    lines = SourceLines(end=sys._getframe().f_code)
    recorder = Recorder(
        fake_mode, scopes, lines, attribute_paths(step.model), step.caches, interrupts, step.target, named
    )
    with torch.no_grad():
        fakes, state = fake_state(step.state, recorder, step.shared)
        parts = step.options.accumulate * step.parts
        leaves, inputs = fake_leaves(step.arguments.leaves, dims, parts, recorder, step.shared)
    run_of: FunctionRun | TrainingRun | None = None
    if step.function is not None:
        cut = MicroBatches(recorder, step.parts) if step.loops else None
        run_of = FunctionRun(step.function, recorder, fakes, lambda: step.target.is_cuda, cut)
    elif step.loss is not None:
        run_of = TrainingRun(step.model, step.loss, step.options, step.trained, recorder, fakes)
    functions = TorchFunctions(
        moves(),
        recorder.exchanges(),
        recorder.factorisations.functions(),
        escapes(scopes.here, recorder.held_by),
        sequences(scopes, recorder.held_by),
        fast_paths(scopes.here),
        {} if run_of is None else run_of.handlers(),
        standing=standing(fakes),
    )
    grad = torch.enable_grad() if step.loss is not None or step.joint else contextlib.nullcontext()
    with (
        _seen_by(step.caches, recorder),
        grad,
        autocast_followed(step.target, scopes.here),
        global_state_kept() as check_settings,
        errors_not_logged(),
        fakes_in_place(step.model, fakes, step.attributes) as changes,
        contextlib.nullcontext() if run_of is None else run_of.in_place(),
        rng_state_followed(),
        seeding_refused(scopes),
        modules_stay(scopes.here),
        fakes_with_known_values_hidden(recorder.is_known),
        unseen_escapes_refused(scopes.here),
        functions.told(),
        fake_mode,
        recorder,
        _failures(recorder, lines),
    ):
        if run_of is not None:
            outcome = run_of.run(step.arguments, leaves, check_settings)
        elif step.joint:
            outcome = _forward_backward(step, leaves, recorder, check_settings)
        else:
            outcome = _forward_only(step, leaves, recorder, check_settings)
    if run_of is not None:
        if run_of.again:
            recorder.release()
            step.attributes.put_back()
            return run(step, dims, named, interrupts)
        recorder.constants += run_of.first_values()
    sparse = recorder.sparse.gradients
    pairs = [*outcome.gradients, *outcome.finished]
    if step.function is not None:  # torch.autograd.grad is asked for some gradients alone
        pairs = [pair for pair in pairs if pair[0].kind == "param"]
    made = [gradient for _, gradient in pairs]
    kept = [outcome.loss, *outcome.outputs, *made, *(value for pair in sparse.values() for value in pair)]
    calls = _live(recorder.calls, kept, step.function is not None)
    gradients = outcome.gradients
    if step.function is not None:
        live = {value.index for call in calls for value in call.outputs}
        gradients = [pair for pair in gradients if pair[0].kind == "param" or pair[1].index in live]
    recording = Recording(
        **{**vars(outcome), "gradients": gradients},
        calls=calls,
        values=recorder.values,
        inputs=inputs,
        state=state,
        constants=recorder.constants,
        sparse_gradients=sparse,
        extents=recorder.extents,
    )
    recorder.release()
    return recording, changes


@contextlib.contextmanager
def _seen_by(caches: Caches, recorder: Recorder) -> Iterator[None]:
    """At the end, tell *caches* which tensors were recorded.

    The error of a step that fails keeps all of its tensors: then *caches* is told of known ones alone.
    """
    try:
        yield
    except BaseException:
        caches.saw(made for made in recorder.seen() if made.known)
        raise
    caches.saw(recorder.seen())


def _forward_only(step: Step, leaves: Sequence[Any], recorder: Recorder, check_settings: _Check) -> Outcome:
    output = _forward(step, leaves, recorder, check_settings)
    recorder.end_forward()
    with recorder.unseen():
        returned, results = _returned(output, recorder)
    return Outcome(returned=returned, results=results, finished=[])


def _forward_backward(step: Step, leaves: Sequence[Any], recorder: Recorder, check_settings: _Check) -> Outcome:
    needing = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    output = _forward(step, leaves, recorder, check_settings)
    recorder.end_forward()
    for given, leaf, needed in zip(step.arguments.leaves, leaves, needing, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad != needed:
            raise CaptureError(
                f"the step sets requires_grad of input {given.name!r}, whose gradient nobody would get",
                fix="set it before the call",
            )
    with autocast_off(), recorder.follow_step():
        joint = joint_backward(output, step.positions, recorder)
    recorder.end_backward(0, joint.found)
    with recorder.unseen():
        returned, results = _returned(output, recorder)
    of_params = [pair for pair in joint.found if pair[0].kind == "param"]
    return Outcome(
        returned=[*returned, *(gradient for _, gradient in joint.of_inputs)],
        results=results,
        of_inputs=[value for value, _ in joint.of_inputs],
        gradients=joint.found,
        finished=of_params,
        given=joint.given,
    )


def _forward(step: Step, leaves: Sequence[Any], recorder: Recorder, check_settings: _Check) -> Any:
    """What the model returns."""
    args, kwargs, _ = step.arguments.split(leaves)
    with recorder.follow_step():
        output = step.model(*args, **kwargs)
        if step.output is not None:
            output = step.output(output)
    check_settings()
    return output


@contextlib.contextmanager
def _failures(recorder: Recorder, lines: SourceLines) -> Iterator[None]:
    """Say in which module and line the step failed. A refusal that the model caught is raised all the same."""
    scopes = recorder.scopes
    try:
        yield
        if recorder.refusal is not None:
            raise recorder.refusal
    except CaptureError as e:
        place, line = e.where or where(scopes.failed or scopes.current), lines.of_error(e) or recorder.failed_line
        place, fix = f"{place}, at {line}" if line else place, remedy(lines.code_of(line), e.fix)
        raise CaptureError(e.what, at=e.at, where=place, fix=fix) from e.__cause__
    except Exception as e:
        what, fix = failure(e)
        raise CaptureError(what, where=where(scopes.failed or scopes.current, lines.of_error(e)), fix=fix) from e


def _returned(output: Any, recorder: Recorder) -> tuple[list[Value | Scalar], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(output)
    for leaf in leaves:
        if not isinstance(leaf, (torch.Tensor, bool, int, float, str, type(None))):
            raise CaptureError(
                f"the model returns a {type(leaf).__name__} among its outputs",
                fix="return tensors, numbers, strings and None in tuples, lists, dicts and classes that "
                "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known); for models of "
                "transformers use_cache=False or output=lambda out: out.logits leaves out the cache",
            )
    return [recorder.read(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves], spec


def _live(calls: list[RecordedCall], kept: list[Value | None], backward: bool) -> list[RecordedCall]:
    """*calls* without views, uninitialised tensors and known values that nothing reads; if *backward*, without any
    values of backwards that nothing reads, which autograd would not compute."""
    read = {id(v) for v in kept if v is not None}
    live: list[RecordedCall] = []
    for call in reversed(calls):
        unasked = backward and call.phase == "backward" and not any(v.version for v in call.outputs)
        free = call.outputs and (unasked or all(v.is_view or v.known for v in call.outputs))
        idle = free or operator_type(call.type).unwritten
        if not idle or any(id(v) in read for v in call.outputs):
            live.append(call)
            read.update(id(v) for v in call.inputs)
    return live[::-1]
