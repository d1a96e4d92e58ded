"""The function ``capture``: a step is read, recorded, fitted, built, verified, and given a witness."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ..collector import collector_paused
from ..errors import CaptureError
from ..ir.program import Program
from ..ir.size import Dims
from ..ir.verify import verify
from ..process import fork_waits_for
from .intake.arguments import Arguments, read_arguments
from .intake.evaluation import warn_of_evaluation
from .intake.optimizers import Group, read_optimizer, with_forms_of_cuda
from .intake.options import read_options, read_sizes, refuse_loss, refuse_model, refuse_output
from .intake.snapshots import snapshots
from .intake.state import ModelState, overlaps, read_state
from .isolate.alone import run_here_alone
from .isolate.attributes import AllowedChanges, Attributes
from .isolate.autocast import Target
from .isolate.caches import Caches
from .isolate.compilers import compiled_run_as_written
from .isolate.patches import LOCK
from .program.build import build_program
from .program.caveats import caveats_of
from .sizes.follow import follow_dims
from .step.comparison import Outline, outcome
from .step.micro_batches import per_micro_batch
from .step.recording import Step
from .witness import StepWitness
from .words.places import described

__all__ = ["capture"]

_alone: Final = threading.RLock()
"""Held during a capture: there is one at a time."""


def capture(
    model: torch.nn.Module | torch.export.ExportedProgram,
    inputs: Sequence[Any],
    *,
    kwargs: Mapping[str, Any] | None = None,
    targets: Sequence[Any] = (),
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backward: bool | Sequence[int] = False,
    output: Callable[[Any], Any] | None = None,
    batch_dims: Any = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    accumulate: int = 1,
    loss_scale: float | torch.amp.GradScaler | None = None,
    allow_changes: Iterable[str] = (),
    target: str | None = None,
    sizes: Iterable[Mapping[str, int]] = (),
    name: str | None = None,
) -> Program:
    """Capture a step of *model*: forward, loss, backward and update, as one program.

    The step is run on fake tensors: nothing is computed, and the model, its gradients, hooks and the random state are
    left as they are. Parameters, buffers and optimizer state are copied into ``program.state``. Gradients are those
    of this step alone, as after ``optimizer.zero_grad()``. A capture in another thread is waited for, also by
    ``os.fork``.

    Args:
        model: as it is: in training or evaluation mode; or an exported program, of which ``torch.export.unflatten``
            makes a module.
        inputs: its positional arguments; tensors in tuples, lists and dicts, numbers, strings, None.
        kwargs: its keyword arguments.
        targets: what the loss is given after the model's output.
        loss: called with the output and the targets; returns a scalar tensor, or a dict of them, which is summed.
            Without it the program is a forward only and returns the model's outputs; see *backward*.
        optimizer: SGD, Adam, AdamW, Adagrad, RMSprop or SparseAdam; without it the parameters' gradients are outputs.
            A session given it (``Session(…, optimizer=optimizer)``) reads its numbers before each step. A model in
            evaluation mode with dropout or batch norm is told by a TrainingWarning.
        backward: without a loss, whether the step has a backward. It is given one argument more, after the inputs: a
            tuple of the gradients of those outputs that need one, in their order, each laid out as its output. It
            returns a pair: the model's outputs, and a dict of the gradients of those inputs that require one, by the
            names of their blobs. The parameters' gradients are outputs, as without an optimizer. Positions, such as
            ``[0, 2]``, are those of the outputs that have a gradient, among the leaves of all; True: all that need one.
            Hooks on parameters are for those to call who take the gradients, as autograd does.
        output: called with what the model returns; the step returns what it returns, such as ``lambda out:
            out.logits`` of an output that also holds a cache. Without a loss, which takes the model's output itself.
        batch_dims: which dimension of each tensor is the batch: an int; None for a tensor that is passed whole; or
            a dict that names dimensions, such as ``{0: "batch", 1: "length"}``. One for all, or a tree of them over
            ``(inputs, kwargs, targets)``. By default dimension 0 of every tensor whose dimension 0 is as long as the
            first input's. The dimension ``batch`` is split over replicas, the others are passed whole to each.
        clip_grad_norm: the largest norm of the gradients together, as ``torch.nn.utils.clip_grad_norm_`` clips them
            before the update; those of the optimizer's parameters, without one those of all.
        clip_grad_value: the largest magnitude of each of their elements, as ``clip_grad_value_`` clips them.
        accumulate: into how many micro-batches the batch is cut; each has a forward and a backward of its own, and
            the gradients of ``loss / accumulate`` are added up. The step's loss is the sum of these losses.
        loss_scale: a number by which the loss is multiplied before the backward and the gradients are divided
            afterwards; or a ``torch.amp.GradScaler`` that is enabled, whose scale, growth and skipped steps become part
            of the program.
        allow_changes: attributes that the step may change because they only keep books, such as
            ``("counter", "layers.0.counter")``. Where the step reads one, the program has its value at capture.
        target: the kind of device that the step is recorded for, ``"cpu"`` or ``"cuda"``, wherever that is done. For
            CUDA ``torch.autocast`` has CUDA's casts, for the host's device type too, which tensors have while they are
            recorded; an optimizer that names no form has CUDA's; and ``program.caveats`` says what only the device
            knows. By default CUDA where autocast for CUDA is entered, in the step or around the capture; else the host.
        sizes: further sizes that the program has to cover, such as ``[{"batch": 64}, {"batch": 128}]``; a dimension
            that is left out is as captured. The step is recorded once more at each and compared with the program. A
            program that is loaded from a file runs at them, whatever Python asks of sizes.
        name: of the program; by default the class's name in lower case.

    Returns:
        A program without prefixes, on ``gpu:0``, whose sizes follow the dimension ``batch`` and those that
        *batch_dims* names, or whose ``covers`` says why they don't.

    Raises:
        CoverageError: the step is another one at some of *sizes*.
        CaptureError: the step depends on data in a way that no program can express, or something is not supported.
        VerifyError: the captured program breaks an invariant of the IR, which is a defect of graphir.
    """
    if isinstance(model, torch.export.ExportedProgram):
        model, name = torch.export.unflatten(model), name or "exported"
    refuse_model(model)
    if not isinstance(name, (str, type(None))):
        raise CaptureError(f"name is a {type(name).__name__}, not a string", fix='write name="step"')
    refuse_loss(loss, targets)
    refuse_output(output, loss)
    if optimizer is not None and loss is None:
        raise CaptureError("an optimizer is given, but no loss", fix="pass loss=, or leave the optimizer out")
    positions = _positions(backward)
    joint = backward is not False
    if joint and loss is not None:
        raise CaptureError(
            "backward is given, and a loss, whose backward starts from the loss itself",
            fix="leave backward out; or leave the loss out, and give the gradients of the outputs to the step",
        )
    target_kind = Target(target)
    options = read_options(
        clip_grad_norm,
        clip_grad_value,
        accumulate,
        loss_scale,
        backward=loss is not None,
        optimizer=optimizer is not None,
    )
    allow_changes = allow_changes if isinstance(allow_changes, str) else tuple(allow_changes)
    if optimizer is not None:
        warn_of_evaluation(model)
    with _capturing(model):
        state = read_state(model, hooked=loss is None)
        arguments = read_arguments(model, inputs, kwargs, targets, loss, batch_dims)
        groups = read_optimizer(optimizer, state.by_id) if optimizer is not None else ()
        trained = None if optimizer is None else frozenset([param for group in groups for param in group.params])
        allowed = AllowedChanges(model, allow_changes)
        step = Step(
            model=model,
            state=state,
            arguments=per_micro_batch(arguments, options.accumulate),
            loss=loss,
            joint=joint,
            positions=positions,
            output=output,
            allowed=allowed,
            attributes=Attributes(model, allowed),
            shared=_shared(state, arguments),
            caches=Caches(),
            options=options,
            target=target_kind,
            trained=trained,
        )
        try:
            with step.attributes.restored():
                program, outline, recorded = _program_of(step, name or type(model).__name__.lower(), optimizer, groups)
        finally:
            step.caches.leave()
        step.caches.check()
    witness = StepWitness(step, allow_changes, program, outline, recorded, _capturing)
    listed = read_sizes(sizes, program.dims, program.covers.fixed)
    for point in listed:
        witness(point)
    return program.with_(
        covers=program.covers.with_recorded(listed),
        witness=witness,
        optimizer=None if optimizer is None else weakref.ref(optimizer),
    )


def _positions(backward: object) -> tuple[int, ...] | None:
    """Of the outputs that have a gradient; None where it is not said which."""
    if type(backward) is bool:
        return None
    positions = tuple(backward) if isinstance(backward, list | tuple) else ()
    if positions and all(type(position) is int and position >= 0 for position in positions):
        return tuple(sorted(set(positions)))
    raise CaptureError(
        f"backward={backward!r}: a step has one, or not, or one of some outputs",
        fix="give True, False, or positions of outputs such as [0]",
    )


@contextlib.contextmanager
def _capturing(model: torch.nn.Module) -> Iterator[None]:
    """What recordings of *model* run in: no others beside, and nothing that records or compiles on its own."""
    with_gradients = torch.is_grad_enabled()  # to leave inference mode is to enable them
    fork_waits_for(LOCK, _alone)  # a forked process would be in the capture for ever
    with (
        _alone,
        run_here_alone(model),
        collector_paused(),
        torch.inference_mode(False),
        torch.set_grad_enabled(with_gradients),
        compiled_run_as_written(),
    ):
        yield


def _shared(state: ModelState, arguments: Arguments) -> Mapping[str, str]:
    """Which arguments share memory with others or with the state; a tensor that is given twice is one argument."""
    given = {id(leaf.tensor): (described("input", leaf.name), leaf.tensor) for leaf in reversed(arguments.leaves)}
    named = [(name, tensor) for name, tensor in reversed(given.values()) if tensor is not None]
    return overlaps([*named, *((described(kind, name), tensor) for name, kind, tensor in state.tensors)])


def _program_of(
    step: Step,
    name: str,
    optimizer: torch.optim.Optimizer | None,
    groups: Sequence[Group],
) -> tuple[Program, Outline, list[Dims]]:
    """The program, its recording's outline, and the sizes at which it was recorded."""
    followed = follow_dims(step)
    step.allowed.check()
    program, named = build_program(
        step,
        followed,
        snapshots(step.state.tensors),
        name=name,
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        groups=with_forms_of_cuda(groups) if step.target.is_cuda else groups,
    )
    recording = followed.sizes.recording
    # What is known is a literal, of which each step makes another tensor.
    constants = {named[v.index]: t for v, t in recording.constants if v.kind == "constant" and not v.known}
    outline = Outline(tuple(named), outcome(recording), len(recording.calls), constants)
    points = [*followed.sizes.grid.points, *followed.covers.recorded]
    recorded: list[Dims] = [{**step.arguments.dims, **point} for point in points]
    followed.release()
    if step.target.is_cuda:
        program = program.with_(caveats=caveats_of(program.step, step.model, step.options))
    verify(program)
    return program, outline, recorded
