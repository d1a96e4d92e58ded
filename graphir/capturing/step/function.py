"""A step function: what it does to gradients and to optimizers while it is recorded.

::

    p.grad of an earlier step ──zero_grad()──▶ None ──backward()──▶ the gradient ──clip_grad_norm_──▶ what is read

A backward is recorded as that of a step with a loss is, and leaves the gradients in ``p.grad``. Operators on gradients
belong to the update, and so do operators on state alone, such as an average of the weights. The step of an optimizer is
one update for each parameter that has a gradient. Operators behind an update read the parameters' next versions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from ...ir.program import Scalar
from ..intake.found import StepFunction
from ..intake.structures import named_leaves
from ..isolate.functions import Handlers
from ..isolate.patches import replaced
from ..record.extents import plain
from ..record.recorder import Recorder
from ..record.values import Value
from .averaging import averaging
from .backward import backward
from .between import EarlierGradients
from .clipping import Originals, clipping_named
from .gathering import gathered
from .gradients import Finished, update
from .micro_batches import MicroBatches, early
from .order import in_order, settle
from .recorded_step import Outcome
from .scaling import Scaling
from .unread import others_refused, unread_attributes

__all__ = ["FunctionRun"]

_aten: Final = torch.ops.aten


class FunctionRun:
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
        self._function, self._recorder, self._fakes, self._on_cuda = function, recorder, fakes, on_cuda
        self._micro = micro
        self._losses: list[Value] = []
        self._activations: list[tuple[Value, Value]] = []
        self._parts: list[tuple[Value, Value]] = []
        self._sums: dict[int, tuple[Value, Value]] = {}
        self._whole: list[tuple[Value, Value]] = []
        self._begun: int | None = None
        self._last = 0
        self._sparse: dict[int, torch.Tensor] = {}
        self._finished: list[tuple[Value, Value]] = []
        self._steps = False
        self._earlier = EarlierGradients(function, recorder, fakes)
        self._originals = Originals()
        self._scaling: Scaling | None = None
        if function.scaler is not None:
            self._scaling = Scaling(function.scaler, recorder, self._originals, self._refuse_sparse)

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
            **({} if self._micro is None else self._micro.handlers()),
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
        stack = contextlib.ExitStack()
        try:
            stack.enter_context(others_refused(here))
            stack.enter_context(replaced(AveragedModel, {"update_parameters": averaging(self._on_cuda)}))
            stack.enter_context(clipping_named(self._recorder, self._originals, self._refuse_sparse))
            for of, methods in patched:
                vars(of).update(methods)
            with torch.no_grad():
                self._earlier.begin()
            with self._function.around.unchanged():
                yield
        finally:
            stack.close()
            self._earlier.clear()
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
        asked = {id(self.standing(tensor)) for tensor in given}
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
            lambda param: param.tensor.grad is None and (not asked or id(param.tensor) in asked),
            None if gradient is None else [gradient],
            bool(retain_graph),
        )
        end = len(recorder.calls)
        with recorder.unseen():
            for param, grad in found:
                if asked and not asked & {id(param.tensor), id(param.edge)}:
                    continue
                if param.kind == "param":
                    self._add(param, grad)
                elif isinstance(param.edge, torch.Tensor) and param.edge.is_leaf and param.edge.requires_grad:
                    self._add_to_leaf(param.edge, grad)
            self._keep_sparse()
        recorder.calls[self._last :] = early(recorder.calls[self._last : end], recorder.calls[end:])
        recorder.start_later()
        if self._micro is not None:
            self._micro.next()

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
        """Add to the gradient of a parameter. A gradient that an update has read or changed is whole, so the addition
        belongs to the update."""
        recorder, held = self._recorder, param.tensor.grad
        self._parts.append((param, grad))
        if held is None:
            self._sums[param.index] = param, grad
            param.tensor.grad = recorder.window(grad)
            return
        before = recorder.read(held)
        lasting, whole = self._earlier.has(before), before.phase == "update"
        if lasting or whole:
            self._whole += [pair for pair in [self._sums.get(param.index)] if pair is not None]
            self._sums[param.index] = param, grad
            recorder.start_update()
        if lasting:
            added = self._earlier.add(held, grad)
        else:
            total = recorder.apply(_aten.add.Tensor, before, grad)
            total.label = "sum"
            assert total.call is not None
            added = total.call
            recorder.overwrite(held, total)  # whoever holds it sees the sum
            if not whole:
                self._parts.append((param, total))
                self._sums[param.index] = param, total
        added.of = param

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
            value = None if held is None else self._value_of(held)
            if value is not None and self._earlier.has(value):
                self._earlier.added_sparse.add(value.root.index)
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

    def _value_of(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor shows; None of a sparse one."""
        if tensor.layout != torch.strided:
            return None
        with self._recorder.unseen():
            return self._recorder.read(tensor)

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
                        finished.append((value, self._recorder.read(param.grad)))
                        if value.index not in self._sums:
                            self._earlier.updates_by(param.grad)
            sparse = self._recorder.sparse.gradients
            for index, tensor in self._sparse.items():
                if self._recorder.values[index].tensor.grad is not tensor:
                    sparse.pop(index, None)  # the step has let go of it
            skips = None if self._scaling is None else self._scaling.skips
            earlier, sums = self._earlier, self._sums
            untouched = [(param, grad) for param, grad in finished if earlier.has(grad) and param.index not in sums]
            may_be_none = {param.index: earlier.is_none(grad) for param, grad in untouched}
            update(params, Finished(finished, skips), self._recorder, may_be_none)
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
        if self._scaling is not None:
            self._scaling.check_end()
        leaves, spec = pytree.tree_flatten(returned)
        with recorder.unseen():
            values = [self._leaf(leaf) for leaf in leaves]
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
        whole = {gradient.index: (param, gradient) for param, gradient in (*self._whole, *self._sums.values())}
        of_params = list(whole.values())
        for _, gradient in of_params:
            gradient.prefix = ""
        kept = {param.index for param, _, _ in self._earlier.kept}
        handed = [pair for pair in of_params if pair[0].index not in kept]
        return Outcome(
            loss=loss,
            returned=() if alone else values,
            results=None if alone else spec,
            gathered=() if alone else gathered(values, self._losses, of_params),
            steps=self._steps,
            backwards=len(self._losses),
            gradients=[*of_params, *self._activations],
            parts=[(param, gradient) for param, gradient in self._parts if gradient.index not in whole],
            finished=Finished(self._finished if self._steps else handed),
            kept=self._earlier.kept,
        )

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

    def first_values(self) -> Iterator[tuple[Value, torch.Tensor]]:
        """The first values of the gradients that last from step to step."""
        return self._earlier.first_values()

    @property
    def again(self) -> bool:
        """Whether the step has begun with gradients that it does not leave to the next one."""
        return self._earlier.again

    def _leaf(self, leaf: Any) -> Value | Scalar:
        if isinstance(leaf, torch.Tensor):
            value = self._recorder.read(leaf)
            return self._recorder.apply(_aten.clone.default, leaf) if self._earlier.has(value) else value
        if isinstance(leaf, (int, float)):
            return plain(leaf)
        if isinstance(leaf, (str, type(None))):
            return leaf
        raise CaptureError(
            f"the step returns a {type(leaf).__name__} among its results",
            fix="return tensors, numbers, strings and None in tuples, lists, dicts and classes that "
            "torch.utils._pytree knows (torch.export.register_dataclass makes a dataclass known)",
        )


def _lerp_each(function: Callable[..., Any], tensors: Any, ends: Any, weight: Any) -> None:
    """``_foreach_lerp_`` whose weight is a tensor, out of which torch reads a number."""
    if isinstance(weight, torch.Tensor):
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, weight)
    else:
        function(tensors, ends, weight)
