"""One run of a step on fake tensors: what was called, and which values its parts became."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.meta import errors_not_logged, fresh_fake_mode
from ...ir.optypes.table import operator_type
from ...ir.program import Scalar
from ...ir.size import Dims
from ..intake.arguments import Arguments
from ..intake.options import LossScaler, Options
from ..intake.state import ModelState
from ..isolate.attributes import AllowedChanges, Attributes, Change, attributes_of, settled
from ..isolate.autocast import Target, autocast_followed, autocast_off
from ..isolate.caches import Caches
from ..isolate.devices import modules_stay, moves
from ..isolate.escapes import escapes, unseen_escapes_refused
from ..isolate.functions import TorchFunctions
from ..isolate.global_state import global_state_kept
from ..isolate.interrupts import Interrupts
from ..isolate.module import attributes_kept, fakes_in_place
from ..isolate.python_random import RandomState, drawn_from
from ..record.draws import RUNS, Draw, Draws
from ..record.extents import plain
from ..record.known import fakes_with_known_values_hidden
from ..record.recorder import Recorder
from ..record.refused import failure
from ..record.scopes import Scopes
from ..record.seeds import rng_state_followed, seeding_refused
from ..record.sequences import sequences
from ..record.source_lines import SourceLines
from ..record.stand_ins import attribute_paths, fake_leaves, fake_state
from ..record.values import Call, Value
from ..record.watch import Watch
from ..words.libraries import remedy
from ..words.places import Broken, Conditions, where
from .backward import backward
from .comparison import same_step
from .gradients import Finished, fake_scaler, finish_gradients, refuse_sparse, scale_loss
from .micro_batches import Sums, micro_batch, prefix_of_micro_batch
from .output_gradients import joint_backward
from .recorded_step import Outcome, Recording

__all__ = ["Step", "record"]

_aten: Final = torch.ops.aten


class Step(NamedTuple):
    """What is to be recorded.

    Attributes:
        model: the module.
        state: its parameters and buffers.
        arguments: of a step; their ``batch`` is that of one micro-batch.
        loss: without it the step is a forward only, or is given the gradients of its outputs.
        joint: it is given the gradients of its outputs, and has a backward.
        positions: of the outputs whose gradients it is given; None: of all that need one.
        output: makes what the step returns of what the model returns; None: that itself.
        allowed: attributes of modules that the step may change.
        attributes: of each module, as the step finds them.
        random: the random states, as the step finds them.
        shared: which arguments share memory with others or with the state; see :func:`.intake.state.overlaps`.
        caches: that the step may read and fill.
        options: of the capture.
        target: the kind of device that it is recorded for.
        trained: the parameters' blobs whose gradients are used; None: all of them.
    """

    model: torch.nn.Module
    state: ModelState
    arguments: Arguments
    loss: Callable[..., Any] | None
    joint: bool
    positions: tuple[int, ...] | None
    output: Callable[[Any], Any] | None
    allowed: AllowedChanges
    attributes: Sequence[Attributes]
    random: RandomState
    shared: Mapping[str, str]
    caches: Caches
    options: Options
    target: Target
    trained: frozenset[str] | None


def record(step: Step, dims: Dims, *, named: bool = True) -> Recording:
    """Run the step on fake tensors, with *dims* as the sizes of its named dimensions.

    Only the first recording of a step has to be *named*: to know modules and source lines. Others are for their
    numbers, which takes a third less time.

    Some models set themselves up in their first step: those of transformers register hooks then. So where a step
    changes private attributes it is run once more. The second run must not change them again, and must record the same
    calls. A step may also store tensors on a module, if a second run that finds them there records the same calls.

    A step that turns out to be under autocast for CUDA is run once more too: it may have asked before what autocast is.

    Raises:
        CaptureError: no program can express the step.
    """
    target = step.target.is_cuda
    try:
        recording = _record(step, dims, named)
    except CaptureError:
        if not step.caches.cleared_if_read() and step.target.is_cuda == target:
            raise
    else:
        if not step.caches.cleared_if_read() and step.target.is_cuda == target:
            return recording
    return _record(step, dims, named)


def _record(step: Step, dims: Dims, named: bool) -> Recording:
    """See :func:`record`; the step may read tensors from a cache."""
    interrupts = Interrupts()
    try:
        with interrupts.held_back(), attributes_kept(step.attributes):
            recording, changes = _run(step, dims, named, interrupts)
            if changes:
                _refuse_made(step)
                set_up = step._replace(attributes=attributes_of(step.model, step.allowed))
                try:
                    again, more = _run(set_up, dims, named, interrupts)
                except CaptureError:  # it read what the first run had left
                    raise changes[0].complaint from None
                if not settled(changes, more) or not same_step(recording, again):
                    raise changes[0].complaint
                again.release()
    except Broken as broken:
        if not named:
            raise
        watch = Watch(broken.condition)
        with interrupts.held_back(), contextlib.suppress(CaptureError), attributes_kept(step.attributes):
            _run(step, dims, named, interrupts, watch)
        place = broken.where or where(watch.scope)
        if watch.line:
            place = f"{place}, at {watch.line}"
        raise CaptureError(broken.what, where=place, fix=remedy(watch.code, broken.fix)) from None
    if step.random.suspected:
        _refuse_draws(step, dims, named, interrupts)
    return recording


def _refuse_draws(step: Step, dims: Dims, named: bool, interrupts: Interrupts) -> None:
    """Raise where it was the step, and not another thread, that drew from Python's or numpy's random numbers.

    Raises:
        CaptureError: names the line.
    """
    once: dict[Any, Draw] = {}
    twice: list[Draw] = []
    for run in range(RUNS):
        draws = Draws()
        with interrupts.held_back(), contextlib.suppress(CaptureError), attributes_kept(step.attributes):
            _run(step, dims, named, interrupts, draws=draws)
        twice += [draw for place, draw in draws.found.items() if place in once]
        once |= draws.found
        if twice or (run and not once):
            break
    if not twice:
        step.random.clear()
        return
    step.random.restore()
    draw = twice[0]
    error = drawn_from(draw.module)
    raise CaptureError(error.what, where=where(draw.scope, draw.line), fix=remedy(draw.code, error.fix))


def _run(
    step: Step,
    dims: Dims,
    named: bool,
    interrupts: Interrupts,
    watch: Watch | None = None,
    draws: Draws | None = None,
) -> tuple[Recording, list[Change]]:
    """One run of the step, and what it changed."""
    fake_mode, scopes, conditions = fresh_fake_mode(), Scopes(step.model), Conditions()
    lines = SourceLines(end=sys._getframe().f_code)
    recorder = Recorder(
        fake_mode, scopes, lines, attribute_paths(step.model), step.caches, interrupts, step.target, named
    )
    conditions["memory"] = recorder.end_forward
    with torch.no_grad():
        fakes, state = fake_state(step.state, recorder, step.shared)
        leaves, inputs = fake_leaves(step.arguments.leaves, dims, step.options.accumulate, recorder, step.shared)
        scale = step.options.loss_scale
        if isinstance(scale, LossScaler):
            scale = fake_scaler(scale, recorder)
    functions = TorchFunctions(
        moves(),
        recorder.exchanges(),
        recorder.factorisations.functions(),
        escapes(scopes.here, recorder.held_by),
        sequences(scopes, recorder.held_by),
    )
    grad = torch.enable_grad() if step.loss is not None or step.joint else contextlib.nullcontext()
    # A run has a watch or draws, never both: CPython nests 20 contexts at most, and the statement below has them.
    searched: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if watch is not None:
        searched = watch.follow(conditions, lines, scopes)
    elif draws is not None:
        searched = draws.follow(lines, scopes, recorder.between_operators)
    with (
        step.caches.watch(recorder.seen),
        grad,
        autocast_followed(step.target, scopes.here),
        global_state_kept(conditions),
        step.random.kept(conditions),
        errors_not_logged(),
        fakes_in_place(step.model, fakes, conditions, step.attributes) as changes,
        rng_state_followed(),
        seeding_refused(scopes),
        modules_stay(scopes.here),
        fakes_with_known_values_hidden(recorder.is_known),
        unseen_escapes_refused(scopes.here),
        functions.told(),
        fake_mode,
        recorder,
        searched,
        _failures(recorder, lines),
    ):
        if step.joint:
            outcome = _forward_backward(step, leaves, recorder, conditions)
        elif step.loss is None:
            outcome = _forward_only(step, leaves, recorder, conditions)
        else:
            outcome = _training(step, leaves, scale, recorder, conditions)
    sparse = recorder.sparse.gradients
    made = [gradient for _, gradient in [*outcome.gradients, *outcome.finished.gradients]]
    kept = [outcome.loss, *outcome.outputs, *made, *(value for pair in sparse.values() for value in pair)]
    recording = Recording(
        **vars(outcome),
        calls=_live(recorder.calls, kept),
        values=recorder.values,
        inputs=inputs,
        state=state,
        constants=recorder.constants,
        sparse_gradients=sparse,
        extents=recorder.extents,
    )
    recorder.release()
    return recording, changes


def _forward_only(step: Step, leaves: Sequence[Any], recorder: Recorder, conditions: Conditions) -> Outcome:
    output, _ = _forward(step, leaves, recorder, conditions)
    recorder.end_forward()
    with recorder.unseen():
        returned, results = _returned(output, recorder)
    return Outcome(returned=returned, results=results, finished=Finished([]))


def _forward_backward(step: Step, leaves: Sequence[Any], recorder: Recorder, conditions: Conditions) -> Outcome:
    output, _ = _forward(step, leaves, recorder, conditions)
    recorder.end_forward()
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
        finished=Finished(of_params),
        given=joint.given,
    )


def _training(
    step: Step,
    leaves: Sequence[Any],
    scale: float | LossScaler | None,
    recorder: Recorder,
    conditions: Conditions,
) -> Outcome:
    """Forward, loss and backward of each micro-batch, and what happens to the gradients before the update."""
    sums = Sums(recorder)
    of_activations: list[tuple[Value, Value]] = []
    for i in range(step.options.accumulate):
        first = len(recorder.calls)
        recorder.start_micro_batch(prefix_of_micro_batch(i, step.options.accumulate))
        parts = micro_batch(step.arguments.leaves, leaves, i, step.options.accumulate, recorder)
        loss, start = _forward_loss(step, parts, scale, recorder, conditions)
        sums.add_loss(loss)
        with autocast_off(), recorder.follow_step():
            found = backward(start, recorder, first_batch=i == 0)
        recorder.end_backward(first, found)
        of_params = [pair for pair in found if pair[0].kind == "param"]
        sums.add_gradients(of_params, first)
        of_activations += found[len(of_params) :]
    refuse_sparse(recorder, step.options)
    of_params = sums.gradients()
    used = [pair for pair in of_params if step.trained is None or pair[0].label in step.trained]
    with autocast_off():
        finished = finish_gradients(used, step.options, scale, recorder)
    return Outcome(loss=sums.loss, gradients=[*of_params, *of_activations], parts=sums.parts, finished=finished)


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


def _forward(
    step: Step, leaves: Sequence[Any], recorder: Recorder, conditions: Conditions
) -> tuple[Any, tuple[Any, ...]]:
    """What the model returns, and the targets."""
    args, kwargs, targets = step.arguments.split(leaves)
    with recorder.follow_step():
        output = step.model(*args, **kwargs)
        if step.output is not None:
            output = step.output(output)
    conditions["settings"]()  # before the loss finds that it needs no gradient
    return output, targets


def _forward_loss(
    step: Step,
    leaves: Sequence[Any],
    scale: float | LossScaler | None,
    recorder: Recorder,
    conditions: Conditions,
) -> tuple[Value, torch.Tensor]:
    """The loss of a micro-batch, and what its backward starts from."""
    assert step.loss is not None
    output, targets = _forward(step, leaves, recorder, conditions)
    with recorder.scopes.inside("loss"), recorder.follow_step():
        total = _scalar(step.loss(output, *targets))
        if step.options.accumulate > 1:
            total = total / step.options.accumulate
        scaled = scale_loss(total, scale)
        if scaled is not total:
            recorder.read(scaled).claim = "loss.scaled"
    recorder.end_forward()
    with recorder.unseen():
        loss = recorder.read(total)
        if loss.kind or loss.is_view:
            loss = recorder.apply(_aten.clone.default, total)
    return loss, scaled


@contextlib.contextmanager
def _failures(recorder: Recorder, lines: SourceLines) -> Iterator[None]:
    """Say in which module and line the step failed; a refusal that the model caught is one too."""
    scopes = recorder.scopes
    try:
        yield
        if recorder.refusal is not None:
            raise recorder.refusal
    except Broken:
        raise
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
                "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known); use_cache=False "
                "leaves out the cache that models of transformers return, output=lambda out: out.logits does as well",
            )
    return [recorder.read(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves], spec


def _scalar(loss: Any) -> torch.Tensor:
    total = loss
    if isinstance(loss, dict):
        if not loss:
            raise CaptureError("the loss is an empty dict", where="the loss function", fix="return a scalar tensor")
        terms = list(loss.values())
        total = terms[0]
        for term in terms[1:]:
            total = total + term
    if not isinstance(total, torch.Tensor) or total.numel() != 1 or total.dim():
        kind = f"tensor of shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise CaptureError(
            f"the loss is a {kind}, not a scalar",
            where="the loss function",
            fix="return a 0-dim tensor, such as loss.mean(), or a dict of them",
        )
    if not total.requires_grad:
        raise CaptureError(
            "the loss does not depend on any parameter",
            where="the loss function",
            fix="use parameters with requires_grad=True, and don't detach what the loss reads",
        )
    return total


def _live(calls: list[Call], kept: list[Value | None]) -> list[Call]:
    """*calls* without views, uninitialised tensors and known values that nothing reads."""
    read = {id(v) for v in kept if v is not None}
    live: list[Call] = []
    for call in reversed(calls):
        free = call.outputs and all(v.is_view or v.known for v in call.outputs)
        idle = free or operator_type(call.type).unwritten
        if not idle or any(id(v) in read for v in call.outputs):
            live.append(call)
            read.update(id(v) for v in call.inputs)
    return live[::-1]
