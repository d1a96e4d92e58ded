"""A step function, while it is recorded: other functions run in the place of torch's.

Operators on gradients belong to the update, and so do operators on state alone, such as an average of the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ..intake.arguments import Arguments
from ..intake.found import StepFunction
from ..intake.options import read_loss_scale
from ..intake.structures import named_leaves
from ..isolate.functions import Handlers
from ..isolate.patches import replaced
from ..record.recorder import Recorder
from ..record.values import Value
from .averaging import averaging
from .between import EarlierGradients
from .micro_batches import MicroBatches
from .order import in_order, settle
from .recorded_step import Outcome
from .step_run import StepRun, standing
from .unread import others_refused, unread_attributes

__all__ = ["FunctionRun"]


class FunctionRun(StepRun):
    """One run of a step function.

    Args:
        function: itself.
        recorder: records it.
        fakes: of its parameters and buffers, by the ``id`` of each.
        on_cuda: says whether it is recorded for CUDA.
        micro: the micro-batches, if the step has a backward for each of several equal parts of a batch.
    """

    def __init__(
        self,
        function: StepFunction,
        recorder: Recorder,
        fakes: Mapping[int, torch.Tensor],
        on_cuda: Callable[[], bool],
        micro: MicroBatches | None = None,
    ) -> None:
        scaler = None if function.scaler is None else read_loss_scale(function.scaler, optimizer=True)
        assert not isinstance(scaler, float)
        earlier = EarlierGradients(function.between, function.model, function.optimizers.values(), recorder, fakes)
        super().__init__(recorder, fakes, earlier, scaler)
        self._function, self._on_cuda, self._micro = function, on_cuda, micro

    def run(self, arguments: Arguments, leaves: Sequence[Any], check_settings: Callable[[], None]) -> Outcome:
        """Run the function.

        Raises:
            CaptureError: no program can express the step.
        """
        args, kwargs, _ = arguments.split(leaves)
        with self._recorder.follow_step():
            returned = self._function.call(*args, **kwargs)
        check_settings()
        return self._outcome(returned)

    def handlers(self) -> Handlers:
        """Functions that run in the place of torch's, by the latter."""
        return {
            torch.Tensor.backward: self._backward,
            torch.autograd.backward: self._backward_of,
            torch.autograd.grad: self._grad,
            torch.Tensor.zero_: self._zero,
            torch._foreach_zero_: self._zero_each,
            torch._foreach_lerp_: _lerp_each,
            **({} if self._micro is None else self._micro.handlers()),
        }

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """As of any step; also, optimizers have fakes for parameters."""
        optimizers = list(self._function.optimizers.values())
        here, stands = self._recorder.here, standing(self._fakes)
        patched: list[tuple[Any, Mapping[str, Any]]] = [
            (optimizer, unread_attributes(optimizer, stands, here) | {"step": self._step_of(optimizer)})
            for optimizer in optimizers
        ]
        if self._scaling is not None:
            patched.append((self._function.scaler, self._scaling.methods()))
        own = [(vars(of), {name: vars(of)[name] for name in names if name in vars(of)}) for of, names in patched]
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(others_refused(here))
                stack.enter_context(replaced(AveragedModel, {"update_parameters": averaging(self._on_cuda)}))
                stack.enter_context(super().in_place())
                for of, methods in patched:
                    vars(of).update(methods)
                with self._function.around.unchanged():
                    yield
            finally:
                for (of, methods), (table, before) in zip(patched, own, strict=True):
                    for name in methods:
                        vars(of).pop(name, None)
                    table.update(before)

    # What the step calls.

    def _backward_of(self, function: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        starts, given = ([v] if isinstance(v, torch.Tensor | None) else list(v) for v in (tensors, grad_tensors))
        if len(starts) != 1 or len(given) != 1:
            raise CaptureError(
                "torch.autograd.backward is called with several tensors",
                where=self._recorder.here(),
                fix="call loss.backward() of the sum of the tensors",
            )
        self._backward(function, starts[0], given[0], *args, **kwargs)  # type: ignore[arg-type]  # torch checks it

    def _backward(
        self,
        function: Any,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: object = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Iterable[torch.Tensor] | None = None,
    ) -> None:
        recorder = self._recorder
        given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
        if create_graph or not all(tensor.is_leaf for tensor in given):
            raise CaptureError(
                "backward is called with create_graph, or with inputs that are no leaves",
                where=recorder.here(),
                fix="call torch.autograd.grad, for gradients of gradients with create_graph=True, before the backward",
            )
        unscaled = loss if self._scaling is None else self._scaling.unscaled(loss)
        value = self.end_forward(unscaled)
        value.claim = value.claim or "loss"
        asked = {id(self._fakes.get(id(tensor), tensor)) for tensor in given}
        self.go_back(loss, value, gradient, bool(retain_graph), asked)
        recorder.start_later()
        if self._micro is not None:
            self._micro.next()

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

    def _zero(self, function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
        """Zeros in the place of a gradient, whose numbers nobody asks for any more."""
        value, held = self._value_of(tensor), [(p, p.grad) for p in self._fakes.values() if p.grad is not None]
        of = next((param for param, grad in held if value is not None and self._value_of(grad) is value), None)
        if of is None or value is None:
            return function(tensor)
        with torch.no_grad():
            zeros = torch.zeros_like(of)
        if self._earlier.has(value):
            if self._earlier.lasts(value):
                return function(tensor)
            of.grad = zeros
            self._earlier.set_to_zero(value, zeros)
            return zeros
        with self._recorder.unseen():
            self._recorder.overwrite(tensor, self._recorder.read(zeros))  # whoever holds it sees zeros
        return tensor

    def _zero_each(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._zero(torch.Tensor.zero_, tensor)

    def _step_of(self, optimizer: torch.optim.Optimizer) -> Callable[..., None]:
        def step(closure: object = None) -> None:
            if closure is not None:
                raise CaptureError(
                    f"{type(optimizer).__name__}.step is called with a closure",
                    where=self._recorder.here(),
                    fix="compute the loss and its backward before the step; for LBFGS see graphir.place",
                )
            self.update([param for group in optimizer.param_groups for param in group["params"]])
            self._recorder.start_later()

        return step

    # What comes of it.

    def _outcome(self, returned: Any) -> Outcome:
        """The parts of the step, which has returned this.

        Raises:
            CaptureError: it returns something else than tensors and numbers, or reads what no program has.
        """
        recorder = self._recorder
        if self._scaling is not None:
            self._scaling.check_end()
        leaves, spec = pytree.tree_flatten(returned)
        with recorder.unseen():
            values = [self.leaf(leaf) for leaf in leaves]
        self._end_gradients([value for value in values if isinstance(value, Value)])
        if self._begun is not None or self._earlier.kept:
            settle(recorder.calls[self._begun or 0 :])
        recorder.calls[self._last :] = in_order(recorder.calls[self._last :])
        for (name, _), value in zip(named_leaves("", returned), values, strict=True):
            if (
                isinstance(value, Value)
                and value.call is not None
                and not (value.claim or value.source or value.is_view or value.kind)
            ):
                value.claim = name.strip(".") or None
        loss = self._losses[0] if len(self._losses) == 1 else None
        alone = isinstance(returned, torch.Tensor) and loss is not None and values[0] is loss
        return self.outcome_of(loss, () if alone else values, None if alone else spec)

    def _end_gradients(self, returned: Sequence[Value]) -> None:
        """Find the gradients that last from step to step.

        Raises:
            CaptureError: the step updates by gradients that it does not compute, and nobody leaves.
        """
        self._earlier.end(returned, self._sums, {param.index for param, _ in self._finished}, self._steps)
        if self._earlier.again and self._begun is None and self._finished:
            raise CaptureError(
                f"the step updates {self._finished[0][0].label!r} by a gradient that it does not compute",
                fix="give the step that computes it: capture(…, beside=program), or compile(…, beside=compiled)",
            )


def _lerp_each(function: Callable[..., Any], tensors: Any, ends: Any, weight: Any) -> None:
    """``_foreach_lerp_`` whose weight is a tensor, out of which torch reads a number."""
    if isinstance(weight, torch.Tensor):
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, weight)
    else:
        function(tensors, ends, weight)
