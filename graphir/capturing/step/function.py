"""A step function: what it does to gradients and to optimizers while it is recorded.

::

    p.grad of an earlier step ──zero_grad()──▶ None ──backward()──▶ the gradient ──clip_grad_norm_──▶ what is read

A backward is recorded as that of a step with a loss is, and leaves the gradients in ``p.grad``. Operators on gradients
belong to the update, and so do operators on state alone, such as an average of the weights. The step of an optimizer is
one update for each parameter that has a gradient. Operators behind an update read the parameters' next versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from ...errors import CaptureError, TrainingWarning, counted, warn
from ...ir.program import Scalar
from ..intake.found import StepFunction
from ..intake.structures import named_leaves
from ..isolate.functions import Handlers
from ..isolate.patches import replaced
from ..record.extents import plain
from ..record.recorder import Recorder
from ..record.values import RecordedCall, Value
from .averaging import averaging
from .backward import backward
from .clipping import Originals, clipping_named
from .gathering import gathered
from .gradients import Finished, update
from .micro_batches import early
from .recorded_step import Outcome, Recording
from .scaling import Scaling
from .unread import others_refused, unread_attributes

__all__ = ["FunctionRun", "warn_of_unread"]

_aten: Final = torch.ops.aten


class FunctionRun:
    """One run of a step function.

    Args:
        function: itself.
        recorder: records it.
        fakes: of its parameters and buffers, by the ``id`` of each.
        on_cuda: says whether it is recorded for CUDA.
    """

    def __init__(
        self,
        function: StepFunction,
        recorder: Recorder,
        fakes: Mapping[int, torch.Tensor],
        on_cuda: Callable[[], bool],
    ) -> None:
        self._function, self._recorder, self._fakes, self._on_cuda = function, recorder, fakes, on_cuda
        self._losses: list[Value] = []
        self._activations: list[tuple[Value, Value]] = []
        self._parts: list[tuple[Value, Value]] = []
        self._sums: dict[int, tuple[Value, Value]] = {}
        self._whole: list[tuple[Value, Value]] = []
        self._begun: int | None = None
        self._last = 0
        self._added_to: list[Value] = []
        self._updated_by_earlier: list[Value] = []
        self._sparse: dict[int, torch.Tensor] = {}
        self._finished: list[tuple[Value, Value]] = []
        self._steps = False
        self._earlier: set[int] = set()
        self._originals = Originals()
        self._scaling: Scaling | None = None
        if function.scaler is not None:
            steps = bool(function.optimizers)
            self._scaling = Scaling(function.scaler, steps, recorder, self._originals, self._refuse_sparse)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns."""
        return self._function.call(*args, **kwargs)

    def standing(self, tensor: Any) -> Any:
        """The fake in the place of a parameter or buffer: a list or a closure may hold the parameter itself."""
        return self._fakes.get(id(tensor), tensor)

    def handlers(self) -> Handlers:
        """What runs in the place of torch's functions."""
        return {
            torch.Tensor.backward: self._backward,
            torch.autograd.backward: self._backward_of,
            torch.autograd.grad: self._grad,
            torch.Tensor.zero_: self._zero,
            torch._foreach_zero_: self._zero_each,
            torch._foreach_lerp_: _lerp_each,
        }

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is active, optimizers have fakes for parameters, and these the gradients of an earlier step."""
        optimizers = list(self._function.optimizers.values())
        here = self._recorder.here
        patched: list[tuple[Any, Mapping[str, Any]]] = [
            (optimizer, unread_attributes(optimizer, self.standing, here) | {"step": self._step_of(optimizer)})
            for optimizer in optimizers
        ]
        if self._scaling is not None:
            patched.append((self._function.scaler, self._scaling.methods()))
        own = [(vars(of), {name: vars(of)[name] for name in names if name in vars(of)}) for of, names in patched]
        params = [fake for fake in self._fakes.values() if fake.requires_grad]
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(others_refused(here))
            stack.enter_context(replaced(AveragedModel, {"update_parameters": averaging(self._on_cuda)}))
            stack.enter_context(clipping_named(self._recorder, self._originals, self._refuse_sparse))
            for of, methods in patched:
                vars(of).update(methods)
            with torch.no_grad():
                for param in params:
                    value = self._recorder.read(param)
                    if value.label in self._function.cleared:
                        continue
                    grad = self._recorder.fake(value.shape, value.strides, value.dtype)
                    earlier = self._recorder.external(grad, f"{value.label}.grad", "state")
                    self._earlier.add(earlier.index)
                    param.grad = grad
            with self._function.around.unchanged():
                yield
        finally:
            stack.close()
            for param in params:
                param.grad = None
            for (of, methods), (table, before) in zip(patched, own, strict=True):
                for name in methods:
                    vars(of).pop(name, None)
                table.update(before)

    # What the step calls.

    def _backward_of(self, function: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if len(given) != 1 or any(args) or any(kwargs.values()):
            raise CaptureError(
                "torch.autograd.backward is called with several tensors, or with options",
                where=self._recorder.here(),
                fix="call loss.backward() of the sum of the tensors",
            )
        self._backward(function, given[0])

    def _backward(
        self,
        function: Any,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: object = None,
        create_graph: bool = False,
        inputs: object = None,
    ) -> None:
        recorder = self._recorder
        if create_graph or inputs is not None:
            raise CaptureError(
                "backward is called with create_graph or inputs",
                where=recorder.here(),
                fix="call torch.autograd.grad, for gradients of gradients with create_graph=True, before the backward",
            )
        recorder.end_forward()
        with recorder.unseen():
            unscaled = loss if self._scaling is None else self._scaling.unscaled(loss)
            value = recorder.read(unscaled)
            if value.kind or value.is_view:
                value = recorder.apply(_aten.clone.default, unscaled)
        value.claim = value.claim or "loss"
        self._losses.append(value)
        found = self._gone_through(
            loss,
            lambda param: param.tensor.grad is None or self._is_of_earlier(param.tensor.grad),
            None if gradient is None else [gradient],
            bool(retain_graph),
        )
        end = len(recorder.calls)
        with recorder.unseen():
            for param, grad in found:
                if param.kind == "param":
                    self._add(param, grad)
                elif isinstance(param.edge, torch.Tensor) and param.edge.is_leaf and param.edge.requires_grad:
                    self._add_to_leaf(param.edge, grad)
            self._keep_sparse()
        recorder.calls[self._last :] = early(recorder.calls[self._last : end], recorder.calls[end:])
        recorder.start_later()

    def _gone_through(
        self,
        starts: torch.Tensor | Sequence[torch.Tensor],
        fresh: Callable[[Value], bool],
        given: Sequence[torch.Tensor] | None,
        retained: bool,
    ) -> list[tuple[Value, Value]]:
        """The gradients that a backward makes, as :func:`backward` returns them; those of activations are noted."""
        recorder = self._recorder
        self._last = len(recorder.calls)
        self._begun = self._last if self._begun is None else self._begun
        seeds = None if given is None else lambda: list(given)
        found = backward(starts, recorder, fresh=fresh, given=seeds, retained=retained)
        recorder.end_backward(0, found)
        self._activations += [pair for pair in found if pair[0].kind != "param"]
        return found

    def _add(self, param: Value, grad: Value) -> None:
        """Add to the gradient of a parameter."""
        recorder, fake = self._recorder, param.tensor
        self._parts.append((param, grad))
        if fake.grad is not None:
            before = recorder.read(fake.grad)
            if before.index in self._earlier:
                self._added_to.append(param)
                self._sums[param.index] = param, grad
                fake.grad = recorder.window(grad)
                return
            if before.phase == "update":
                raise CaptureError(
                    f"the step changes the gradient of {param.label!r} between two backwards",
                    fix="change gradients after the last backward",
                )
            grad = recorder.apply(_aten.add.Tensor, before, grad)
            grad.label = "sum"
            assert grad.call is not None
            grad.call.of = param
            self._parts.append((param, grad))
            self._sums[param.index] = param, grad
            recorder.overwrite(fake.grad, grad)  # whoever holds it sees the sum
            return
        self._sums[param.index] = param, grad
        fake.grad = recorder.window(grad)

    def _add_to_leaf(self, leaf: torch.Tensor, grad: Value) -> None:
        """Add to the gradient of a tensor that the step has made, or was given."""
        if leaf.grad is None:
            leaf.grad = self._recorder.window(grad)
        else:
            summed = self._recorder.apply(_aten.add.Tensor, self._recorder.read(leaf.grad), grad)
            self._recorder.overwrite(leaf.grad, summed)

    def _keep_sparse(self) -> None:
        """Leave the sparse gradients of a backward in ``p.grad``."""
        for index, tensor in self._recorder.sparse.finished.items():
            param = self._recorder.values[index]
            if self._sparse.get(index) is tensor:
                continue
            held = param.tensor.grad
            if held is not None and self._is_of_earlier(held):
                self._added_to.append(param)
            elif held is not None:
                raise CaptureError(
                    f"the step adds to the sparse gradient of {param.label!r} by a second backward",
                    where=self._recorder.here(),
                    fix="add the losses before the backward, or use sparse=False",
                )
            param.tensor.grad = None
            param.tensor.grad = self._sparse[index] = tensor

    def _grad(
        self,
        function: Callable[..., Any],
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """``torch.autograd.grad``: gradients of parameters that no graph goes on from are those of a backward."""
        recorder = self._recorder
        asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        params = [type(each) is FakeTensor and recorder.read(each).kind == "param" for each in asked]
        starts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        if create_graph or any(options.values()) or not all(params):
            return tuple(
                function(
                    outputs,
                    inputs,
                    grad_outputs,
                    retain_graph,
                    create_graph,
                    allow_unused=allow_unused,
                    **options,
                )
            )
        recorder.end_forward()
        given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else grad_outputs
        found = self._gone_through(starts, lambda _: True, given, bool(retain_graph))
        gradients = {param.index: (param, gradient) for param, gradient in found if param.kind == "param"}
        made: list[torch.Tensor | None] = []
        with recorder.unseen():
            for each in asked:
                pair = gradients.get(recorder.read(each).root.index)
                self._whole += [] if pair is None else [pair]
                made.append(None if pair is None else recorder.window(pair[1]))
        recorder.start_later()
        if not allow_unused and any(each is None for each in made):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        return tuple(made)

    def _refuse_sparse(self, what: str) -> None:
        for index in self._recorder.sparse.gradients:
            raise CaptureError(
                f"{what} is called, but {self._recorder.values[index].label!r} has a sparse gradient",
                where=self._recorder.here(),
                fix="use sparse=False, or leave the call out",
            )

    def _zero(self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """Zeros in the place of a gradient, whose numbers nobody asks for any more."""
        index, held = self._index_of(tensor), [(p, p.grad) for p in self._fakes.values() if p.grad is not None]
        of = next((param for param, grad in held if self._index_of(grad) == index >= 0), None)
        if of is None:
            return function(tensor)
        with torch.no_grad():
            zeros = torch.zeros_like(of)
        if index in self._earlier:
            of.grad = zeros
            return zeros
        with self._recorder.unseen():
            self._recorder.overwrite(tensor, self._recorder.read(zeros))  # whoever holds it sees zeros
        return tensor

    def _zero_each(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._zero(torch.Tensor.zero_, tensor)

    def _is_of_earlier(self, tensor: torch.Tensor) -> bool:
        return self._index_of(tensor) in self._earlier

    def _index_of(self, tensor: torch.Tensor) -> int:
        """The index of the value that a tensor shows; -1 of a sparse one."""
        if tensor.layout != torch.strided:
            return -1
        with self._recorder.unseen():
            return self._recorder.read(tensor).index

    def _step_of(self, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
        def step(closure: object = None) -> None:
            if closure is not None:
                raise CaptureError(
                    f"{type(optimizer).__name__}.step is called with a closure",
                    where=self._recorder.here(),
                    fix="compute the loss and its backward before the step; for LBFGS see graphir.place",
                )
            finished, params = [], []
            with self._recorder.unseen():
                for group in optimizer.param_groups:
                    for param in group["params"]:
                        value = self._recorder.read(param).root
                        params.append(value.label)
                        if param.grad is None or param.grad.layout != torch.strided:
                            continue
                        grad = self._recorder.read(param.grad)
                        if grad.index in self._earlier:
                            self._updated_by_earlier.append(value)
                            continue
                        finished.append((value, grad))
            sparse = self._recorder.sparse.gradients
            for index, tensor in self._sparse.items():
                if self._recorder.values[index].tensor.grad is not tensor:
                    sparse.pop(index, None)  # the step has let go of it
            skips = None if self._scaling is None else self._scaling.skips
            update(params, Finished(finished, skips), self._recorder)
            self._recorder.start_later()
            self._whole += [self._sums[value.index] for value, _ in finished if value.index in self._sums]
            self._finished += finished
            self._steps = True

        return step

    # What comes of it.

    def outcome(self, returned: Any) -> Outcome:
        """The parts of the step, which has returned this.

        Raises:
            CaptureError: it returns something else than tensors and numbers, or reads what no program has.
        """
        recorder = self._recorder
        self._check(recorder.calls)
        if self._scaling is not None:
            self._scaling.check_end()
        if self._begun is not None:
            _settle(recorder.calls[self._begun :])
        recorder.calls[self._last :] = _in_order(recorder.calls[self._last :])
        leaves, spec = pytree.tree_flatten(returned)
        with recorder.unseen():
            values = [self._leaf(leaf) for leaf in leaves]
            self._begin_as_it_ends([value for value in values if isinstance(value, Value)])
        for (name, _), value in zip(named_leaves("", returned), values, strict=True):
            if (
                isinstance(value, Value)
                and value.call is not None
                and not (value.claim or value.source or value.is_view or value.kind)
            ):
                value.claim = name.strip(".") or None
        loss = self._losses[0] if len(self._losses) == 1 else None
        alone = isinstance(returned, torch.Tensor) and loss is not None and values[0] is loss
        whole = {gradient.index: (param, gradient) for param, gradient in (*self._whole, *self._sums.values())}
        of_params = list(whole.values())
        return Outcome(
            loss=loss,
            returned=() if alone else values,
            results=None if alone else spec,
            gathered=() if alone else gathered(values, self._losses, of_params),
            steps=self._steps,
            gradients=[*of_params, *self._activations],
            parts=[(param, gradient) for param, gradient in self._parts if gradient.index not in whole],
            finished=Finished(self._finished if self._steps else of_params),
        )

    def _begin_as_it_ends(self, returned: Sequence[Value]) -> None:
        """Note the parameters without a gradient at the end of the step, with which the next step begins.

        A gradient that is left at the end is none to the next step where nothing reads the sum.

        Raises:
            CaptureError: the step adds to a gradient that is left at its end, and that it reads, or may read later.
        """
        inputs = [value for call in self._recorder.calls for value in call.inputs]
        read = {value.index for value in (*returned, *inputs)}
        unread = {gradient.index for _, gradient in self._sums.values()} - read
        groups = [group for optimizer in self._function.optimizers.values() for group in optimizer.param_groups]
        updated = {id(self.standing(param)) for group in groups for param in group["params"]}
        for verb, params in (("adds to", self._added_to), ("updates by", self._updated_by_earlier)):
            for param in params:
                grad, own = param.tensor.grad, self._steps and id(param.tensor) not in updated
                if grad is not None and not (own and self._index_of(grad) in unread):
                    raise CaptureError(
                        f"the step {verb} the gradient of {param.label!r} that an earlier step has left",
                        fix=f"call {'model' if own else 'optimizer'}.zero_grad() before the backward",
                    )
                self._function.cleared.add(param.label)

    @property
    def again(self) -> bool:
        """Whether the step has begun with gradients that it does not leave to the next one."""
        return bool(self._added_to or self._updated_by_earlier)

    def _leaf(self, leaf: Any) -> Value | Scalar:
        if isinstance(leaf, torch.Tensor):
            value = self._recorder.read(leaf)
            if value.index in self._earlier:
                raise CaptureError("the step returns a gradient that an earlier step has left", fix="return it there")
            return value
        if isinstance(leaf, (int, float)):
            return plain(leaf)
        if isinstance(leaf, (str, type(None))):
            return leaf
        raise CaptureError(
            f"the step returns a {type(leaf).__name__} among its results",
            fix="return tensors, numbers, strings and None in tuples, lists, dicts and classes that "
            "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known)",
        )

    def _check(self, calls: Sequence[RecordedCall]) -> None:
        for call in calls:
            for value in call.inputs:
                if value.root.index in self._earlier:
                    raise CaptureError(
                        f"the step reads {value.root.label!r}, which an earlier step has left",
                        fix="read gradients between the backward and the next zero_grad()",
                    )


def _lerp_each(function: Callable[..., Any], tensors: Any, ends: Any, weight: Any) -> None:
    """``_foreach_lerp_`` whose weight is a tensor, out of which torch reads a number."""
    if isinstance(weight, torch.Tensor):
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, weight)
    else:
        function(tensors, ends, weight)


def _settle(calls: Sequence[RecordedCall]) -> None:
    """Let calls on state alone belong to the update, if they are outside of modules, and neither the forward nor a
    backward reads what they make."""
    read: set[int] = set()
    for call in reversed(calls):
        alone = not call.scope and call.seed is None and not any(value.follows_input for value in call.inputs)
        if call.phase == "forward" and alone and not any(value.index in read for value in call.outputs):
            call.phase, call.scope = "update", next((value.scope for value in call.inputs if value.scope), "")
            for value in call.outputs:
                value.phase = "update"
        elif call.phase != "update":
            read.update([value.index for value in call.inputs])


def warn_of_unread(recording: Recording) -> None:
    """Warn of gradients that the step's optimizer does not read, and that the step does not return."""
    read = {param.index for param, _ in recording.finished.gradients}
    read |= {value.index for call in recording.calls if call.phase == "update" for value in call.inputs}
    read |= {value.index for value in recording.outputs}
    of_params = _of_params(recording.gradients)
    left = [param.label for param, gradient in of_params if not read & {param.index, gradient.index}]
    if left:
        more = f" and {counted(len(left) - 1, 'other')}" if len(left) > 1 else ""
        warn(
            f"the step computes the gradient of {left[0]!r}{more}, which its optimizer does not read: give the "
            "optimizer these parameters, or set requires_grad=False",
            TrainingWarning,
        )


def _of_params(gradients: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    return [pair for pair in gradients if pair[0].kind == "param"]


def _in_order(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """The calls of a backward, and those behind, with what belongs to the forward first: what the step computes of its
    results. A write of state stays in its place, and what comes of it."""
    made = {value.index for call in calls for value in call.outputs}
    first: list[RecordedCall] = []
    others: list[RecordedCall] = []
    for call in calls:
        free = call.phase == "forward" and not any(value.version for value in call.outputs)
        if free and not any(value.index in made for value in call.inputs):
            made.difference_update([value.index for value in call.outputs])
            first.append(call)
        else:
            others.append(call)
    return [*first, *others]
