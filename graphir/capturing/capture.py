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
from .intake.found import StepFunction, read_function
from .intake.optimizers import Group, read_optimizers, with_forms_of_cuda
from .intake.options import (
    IN_A_FUNCTION,
    read_options,
    read_sizes,
    refuse_beside_function,
    refuse_loss,
    refuse_model,
    refuse_output,
)
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
from .record.values import UPDATE
from .sizes.follow import follow_dims
from .step.between import warn_of_gradients
from .step.comparison import Outline, outcome
from .step.micro_batches import per_micro_batch
from .step.recording import Step
from .witness import StepWitness
from .words.places import described

__all__ = ["capture"]

_alone: Final = threading.RLock()
"""Held during a capture: there is one at a time."""


def capture(
    step: torch.nn.Module | torch.export.ExportedProgram | Callable[..., Any],
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    stateful: Any = (),
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
    beside: Program | None = None,
    name: str | None = None,
) -> Program:
    """Capture a step: forward, loss, backward and update, as one program.

    The step is run on fake tensors: nothing is computed, and the model, its gradients, hooks and the random state are
    left as they are. Parameters, buffers and optimizer state are copied into ``program.state``. Gradients are those
    of this step alone, as after ``optimizer.zero_grad()``. Captures take turns: a second thread that captures waits,
    and so does ``os.fork``.

    Args:
        step: a module, in the training or evaluation mode that it is in; or an exported program, which
            ``torch.export.unflatten`` turns into a module. Or a function that is the whole step, with backwards and one
            step of an optimizer, whose results come back; it does itself what the arguments from *targets* to
            *loss_scale* say of a module, which are left out then.
        inputs: positional arguments; tensors in tuples, lists and dicts, numbers, strings, None.
        kwargs: keyword arguments.
        stateful: of a function the modules, the optimizer and the gradient scaler that it uses, or these by name; by
            default they are found in its cells, globals, defaults and ``self``.
        targets: arguments of the loss, after the model's output.
        loss: called with the output and the targets; returns a scalar tensor, or a dict of them, which is summed; or a
            pair of these and of results. The step returns the loss, or, where there is more, a pair: the loss, and the
            results, with the parts of a dict and ``grad_norm``, the norm by which *clip_grad_norm* clips.
            Without a loss the program is a forward only and returns the model's outputs; see *backward*.
        optimizer: one of ``torch.optim``'s, LBFGS excepted; without it the parameters' gradients are outputs.
            A session that is given the optimizer (``Session(…, optimizer=optimizer)``) reads the optimizer's numbers
            before each step. A TrainingWarning names a model in evaluation mode that has dropout or batch norm.
        backward: without a loss, whether the step has a backward. The step then takes one more argument, after the
            inputs: a tuple of the gradients of the outputs that need one, in the order of the outputs, each laid out as
            its output. The step returns a pair: the model's outputs, and a dict of the gradients of the inputs that
            require one, by the names of the inputs' blobs. The parameters' gradients are outputs, as without an
            optimizer. True: all outputs that need a gradient are given one. Positions among the leaves of all outputs,
            such as ``[0, 2]``: these outputs are given one. The step runs no hooks on parameters: whoever takes the
            gradients calls them, as autograd does.
        output: a function of the model's output, whose result the step returns, such as ``lambda out: out.logits``
            where the output also holds a cache. Only without a loss: a loss takes the model's output itself.
        batch_dims: which dimension of each tensor is the batch: an int; None for a tensor that is passed whole; or
            a dict that names dimensions, such as ``{0: "batch", 1: "length"}``. One for all tensors, or a tree over
            ``(inputs, kwargs, targets)``. By default dimension 0 of every tensor whose dimension 0 is as long as the
            first input's. The dimension ``batch`` is split over replicas, the others are passed whole to each.
        clip_grad_norm: the largest norm of the gradients together, as ``torch.nn.utils.clip_grad_norm_`` clips them
            before the update. The gradients are those of the optimizer's parameters; without an optimizer, of all.
        clip_grad_value: the largest magnitude of an element of these gradients, as ``clip_grad_value_`` clips it.
        accumulate: the number of micro-batches that the batch is cut into; each has a forward and a backward of its
            own, and the gradients of ``loss / accumulate`` are added up. The step's loss is the sum of these losses.
        loss_scale: a number by which the loss is multiplied before the backward and the gradients are divided
            afterwards; or a ``torch.amp.GradScaler`` that is enabled, whose scale, growth and skipped steps become part
            of the program.
        allow_changes: attributes that the step may change because they only keep books, such as
            ``("counter", "layers.0.counter")``. Where the step reads one, the program has its value at capture.
        target: the kind of device that the step is recorded for, ``"cpu"`` or ``"cuda"``, whatever machine records it.
            For CUDA, ``torch.autocast`` has CUDA's casts, also where it is entered for the host's device type, which
            recorded tensors have; an optimizer that names no form has CUDA's form; and ``program.caveats`` lists the
            facts that only the device knows. By default CUDA where autocast for CUDA is entered, in the step or around
            the capture; else the host.
        sizes: further sizes that the program has to cover, such as ``[{"batch": 64}, {"batch": 128}]``; a dimension
            that is left out has its captured size. The step is recorded once more at each and compared with the
            program. A program that is loaded from a file runs at these sizes, whatever Python asks about sizes.
        beside: of a function, the program of another step of the same modules: this step begins with the gradients that
            the other one leaves, and leaves such gradients, the state ``<parameter>.grad``.
        name: of the program; by default the class's name in lower case.

    Returns:
        A program without prefixes, on ``gpu:0``. Its sizes follow the dimension ``batch`` and the dimensions that
        *batch_dims* names, or ``program.covers`` says why they don't.

    Raises:
        CoverageError: the step differs from the program at some of *sizes*.
        CaptureError: the step depends on data in a way that no program can express, or something is not supported.
        VerifyError: the captured program breaks an invariant of the IR, which is a defect of graphir.
    """
    model: torch.nn.Module
    function: StepFunction | None = None
    if isinstance(step, torch.export.ExportedProgram):
        model, name = torch.export.unflatten(step), name or "exported"
    elif isinstance(step, (torch.nn.Module, type)) or not callable(step):
        model = step  # type: ignore[assignment]  # what is no module is refused
    else:
        given = locals()
        refuse_beside_function({option: given[option] for option in IN_A_FUNCTION})
        function = read_function(step, stateful, beside)
        model = function.model
    refuse_model(model)
    if not isinstance(name, (str, type(None))):
        raise CaptureError(f"name is a {type(name).__name__}, not a string", fix='write name="step"')
    refuse_loss(loss, targets)
    refuse_output(output, loss)
    optimizers: tuple[torch.optim.Optimizer, ...] = (optimizer,) if optimizer is not None else ()
    if function is not None:
        optimizers = tuple(function.optimizers.values())
    elif beside is not None:
        raise CaptureError("beside is for a step that is a function", fix="leave beside out")
    if optimizer is not None and loss is None:
        raise CaptureError("an optimizer is given, but no loss", fix="pass loss=, or leave the optimizer out")
    positions = _positions(backward)
    joint = backward is not False
    if joint and loss is not None:
        raise CaptureError(
            "backward and loss are both given, but the backward of a step with a loss starts from the loss",
            fix="leave backward out; or leave loss out, and give the gradients of the outputs to the step",
        )
    target_kind = Target(target)
    options = read_options(
        clip_grad_norm,
        clip_grad_value,
        accumulate,
        loss_scale,
        backward=loss is not None,
        optimizer=bool(optimizers),
    )
    allow_changes = allow_changes if isinstance(allow_changes, str) else tuple(allow_changes)
    if optimizers:
        warn_of_evaluation(model)
    with _capturing(model):
        state = read_state(model, hooked=loss is None and function is None)
        called = model.forward if function is None else function.call
        arguments = read_arguments(called, inputs, kwargs, targets, loss, batch_dims)
        groups = read_optimizers(optimizers, state.by_id)
        trained = None if not optimizers else tuple([param for group in groups for param in group.params])
        allowed = AllowedChanges(model, allow_changes)
        to_record = Step(
            model=model,
            function=function,
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
            with to_record.attributes.restored():
                named = name or (type(model).__name__.lower() if function is None else function.name)
                to_record, program, outline, recorded = _program_of(to_record, named, optimizers, groups)
        finally:
            to_record.caches.leave()
        to_record.caches.check()
    witness = StepWitness(to_record, allow_changes, program, outline, recorded, _capturing)
    listed = read_sizes(sizes, program.dims, program.covers.fixed)
    for point in listed:
        witness(point)
    return program.with_(
        covers=program.covers.with_recorded(listed),
        witness=witness,
        optimizers=tuple([weakref.ref(each) for each in optimizers]),
    )


def _positions(backward: object) -> tuple[int, ...] | None:
    """The positions of the outputs that are given a gradient; None where the caller names none."""
    if type(backward) is bool:
        return None
    positions = tuple(backward) if isinstance(backward, list | tuple) else ()
    if positions and all(type(position) is int and position >= 0 for position in positions):
        return tuple(sorted(set(positions)))
    raise CaptureError(
        f"backward={backward!r} is neither a bool nor positions of outputs",
        fix="give True, False, or positions of outputs such as [0]",
    )


@contextlib.contextmanager
def _capturing(model: torch.nn.Module) -> Iterator[None]:
    """While this is active, only this thread captures and runs *model*; the garbage collector, inference mode and
    ``torch.compile`` are off."""
    with_gradients = torch.is_grad_enabled()  # leaving inference mode enables gradients
    fork_waits_for(LOCK, _alone)  # a process that is forked during a capture would never leave it
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
    """Arguments and state that share memory: by the name of each, the name of another. A tensor given twice is one."""
    given = {id(leaf.tensor): (described("input", leaf.name), leaf.tensor) for leaf in reversed(arguments.leaves)}
    named = [(name, tensor) for name, tensor in reversed(given.values()) if tensor is not None]
    return overlaps([*named, *((described(kind, name), tensor) for name, kind, tensor in state.tensors)])


def _program_of(
    step: Step,
    name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    groups: Sequence[Group],
) -> tuple[Step, Program, Outline, list[Dims]]:
    """The recorded step, its program, the recording's outline, and the sizes at which it was recorded."""
    followed = follow_dims(step)
    step = followed.step
    step.allowed.check()
    recording = followed.sizes.recording
    steps = recording.steps or bool(recording.kept)  # a step beside will update by what lasts
    if step.function is not None and steps:
        warn_of_gradients(recording, step.function.between.wanted)
    program, named = build_program(
        step,
        followed,
        snapshots(step.state.tensors),
        name=name,
        optimizers=tuple([type(each).__name__ for each in optimizers]) if steps else (),
        groups=() if not steps else with_forms_of_cuda(groups) if step.target.is_cuda else groups,
    )
    # A known constant is a literal: each step makes a new tensor of it.
    constants = {named[v.index]: t for v, t in recording.constants if v.kind == "constant" and not v.known}
    calls = enumerate(recording.calls)
    updates = {i: [value.index for value in call.inputs] for i, call in calls if call.type == UPDATE}
    outline = Outline(tuple(named), outcome(recording), updates, constants)
    points = [*followed.sizes.grid.points, *followed.covers.recorded]
    recorded: list[Dims] = [{**step.arguments.dims, **point} for point in points]
    followed.release()
    if step.target.is_cuda:
        program = program.with_(caveats=caveats_of(program.step, step.model, step.options))
    verify(program)
    return step, program, outline, recorded
