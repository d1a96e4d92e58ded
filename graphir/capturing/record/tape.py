"""The tape: a step as calls on values that never change, and the memory through which the step sees the values.

A tensor of the step shows one value after another, as it is overwritten. The tape knows the value that each tensor
shows now, and makes a view again after a write to its memory. Each call has a module, a source line and a phase.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import CaptureError
from ...ir.geometry import Geometry, geometry_of
from ...ir.operator import Arg, Phase
from ...ir.symbols import to_symbol
from ..isolate.caches import Seen
from ..isolate.functions import Handlers
from ..words.places import DENSE, USE_REENTRANT, where
from .belonging import Belonging
from .edges import differentiable
from .extents import Extents
from .forms import BoundArguments, Form, form_of
from .known import is_known_result
from .memory import RecordedMemory
from .results import Results, in_sequence
from .scopes import Scopes
from .seeds import SeedIds, seedable
from .source_lines import SourceLines
from .told_sizes import ToldSizes
from .values import UPDATE, Alias, RecordedCall, Replay, Value

__all__ = ["Tape"]


class Tape:
    """The calls of a step, in order, on values that never change.

    Attributes:
        calls: in order.
        values: every value, externals first, at its index.
        phase: forward, backward or update.
        seeds: hands out the seed ids of random operators.
        extents: the sizes that the step asks for, and its tests of them.
        scopes: knows which module runs.

    Args:
        named: whether names, modules and source lines are followed.
    """

    def __init__(self, fake_mode: FakeTensorMode, scopes: Scopes, lines: SourceLines, named: bool) -> None:
        self.calls: list[RecordedCall] = []
        self.values: list[Value] = []
        self.phase: Phase = "forward"
        self.seeds = SeedIds(draws=False)
        self.scopes, self._lines, self._named = scopes, lines, named
        self._memory = RecordedMemory()
        self._results = Results(fake_mode, self._scope)
        self.extents = Extents(self._place)
        self._told_sizes = ToldSizes(self.extents, self._memory.find)
        self._owners: dict[int, Value] = {}
        self._belonging = Belonging()
        self._prefix, self._first, self._later = "", 0, False
        self._differentiated: set[int] = set()

    # What exists before the step.

    def fake(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        return self._results.empty(Geometry(tuple(shape), tuple(strides), 0, dtype))

    def external(self, tensor: torch.Tensor, name: str, kind: str, shared: str = "") -> Value:
        """Add a fake tensor as a parameter, buffer, constant or input; for *shared* see :class:`.Store`."""
        value = self._value(tensor, name, "", follows_input=kind == "input")
        value.kind = kind
        self._memory.add_base(tensor, value, kind in ("param", "buffer", "state"), shared)
        return value

    def release(self) -> None:
        """Forget the step. Its objects refer to each other, so only the garbage collector would free them."""
        self._memory.release()
        self.calls, self.values, self._owners, self._belonging = [], [], {}, Belonging()

    def here(self) -> str:
        """The module whose code runs, in the words of errors."""
        return where(self.scopes.current)

    # How far the step is.

    @contextlib.contextmanager
    def follow_step(self) -> Iterator[None]:
        """While this is active, note tests of sizes; in a named recording, follow modules and name their outputs."""
        with contextlib.ExitStack() as stack:
            if self._named:
                stack.enter_context(self.scopes.follow(lambda: len(self.values), self.claim))
            stack.enter_context(self._told_sizes.told())
            yield

    def start_micro_batch(self, prefix: str) -> None:
        """From here on, operators belong to the forward of the micro-batch whose names start with *prefix*."""
        self.phase, self._prefix, self._first = "forward", prefix, len(self.values)
        for value in self.values:
            value.edge = None

    def name_micro_batch(self, prefix: str) -> None:
        """From here on, names of values start with *prefix*; empty behind the last micro-batch."""
        self._prefix = prefix

    def exchanges(self) -> Handlers:
        """The handler of ``x.data = …``, which refuses a step that gives a tensor other memory."""
        return self._memory.exchanges()

    def end_forward(self) -> None:
        """In a named recording, check that the forward has changed tensors by operators alone.

        Raises:
            CaptureError: the forward gave a tensor other memory (``x.data = …``).
        """
        if self._named:
            self._memory.check_unexchanged()

    def start_backward(self) -> list[tuple[Value, Any]]:
        """From here on, operators belong to the backward of the forward value whose gradient is being computed.

        Returns:
            Each forward value that has a gradient, and where the gradient arrives: a tensor, or an edge of the graph.
            Values that operators made for earlier micro-batches are left out, and those whose gradient is known.
        """
        seen = (alias for alias in self._memory if alias.value.index >= self._first or alias.value.root.kind)
        pairs = differentiable(seen, self.values)
        found = [(value, edge) for value, edge in pairs if value.index not in self._differentiated]
        functions: dict[int, Value] = {}
        for value, edge in found:
            node = edge.grad_fn if isinstance(edge, torch.Tensor) else edge.node
            if node is not None:
                self._owners.setdefault(node._sequence_nr(), value)
                if isinstance(node, torch.autograd.function.BackwardCFunction):
                    functions[node._sequence_nr()] = value  # the last result, made after all calls
                if type(node).__name__ == "CheckpointFunctionBackward":
                    raise CaptureError(
                        "reentrant checkpointing runs a backward of its own inside the backward",
                        where=where(value.scope, value.call.line if value.call is not None else ""),
                        fix=USE_REENTRANT,
                    )
        self._belonging.unite(functions)
        self.phase, self._later = "backward", False
        return found

    def end_backward(self, first: int, gradients: Sequence[tuple[Value, Value]]) -> None:
        """Find the values that the calls of the backward belong to.

        Args:
            first: position of the micro-batch's first call.
            gradients: values and their gradients.
        """
        forward = [call for call in self.calls[first:] if call.phase == "forward"]
        self._differentiated.update([value.index for value, _ in gradients if not value.kind])
        self._belonging.end_backward(forward, gradients)

    def update(self, param: Value, gradient: Sequence[Value], found_inf: Value | None) -> None:
        """Record the update of a parameter; see :data:`.values.UPDATE`."""
        alias = self._alias(param.tensor)
        read = (self._current(alias), *gradient, *(() if found_inf is None else (found_inf,)))
        self.phase = "update"
        line = self._lines.current() if self._named else ""
        call = RecordedCall(UPDATE, read, None, {}, param.scope, "update", line=line)
        call.outputs = (self._next_version(alias, call),)
        self.calls.append(call)
        torch.autograd.graph.increment_version(param.tensor)  # a graph that has kept its value is refused, as in torch

    def _next_version(self, target: Alias, call: RecordedCall) -> Value:
        """The value that a call writes over parameters, buffers or other state, which *target* sees whole."""
        base = target.store.base
        old = self._current(base)
        new = self._value(target.tensor, old.label, old.scope, follows_input=False)
        new.kind, new.root, new.version, new.call = old.kind, old.root, old.version + 1, call
        target.store.generation += 1
        for alias in (base, target):
            alias.value, alias.generation = new, target.store.generation
        return new

    def start_update(self) -> None:
        """From here on, operators belong to the update."""
        self.phase, self._prefix = "update", ""

    def start_later(self) -> None:
        """From here on, operators on gradients belong to the update, and all others to the forward, maybe of another
        backward."""
        self.phase, self._later = "update", True
        for value in self.values:
            if value.kind == "param" or value.index in self._differentiated:
                value.edge = None

    # What tensors show.

    def seen(self) -> Iterator[Seen]:
        """The tensors seen so far, in the order in which they were seen."""
        for alias in self._memory:
            value, call = alias.value, alias.value.call
            made = ("", "") if call is None else (call.type, call.line)
            yield Seen(alias.tensor, *made, value.known)

    def read(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor shows now."""
        return self._current(self._alias(tensor))

    def window(self, value: Value) -> torch.Tensor:
        """A new tensor that shows *value*, with memory of its own: a write to it changes no other tensor."""
        tensor = self.fake(value.shape, value.strides, value.dtype)
        self._memory.add_base(tensor, value, persistent=False)
        return tensor

    def claim(self, tensor: torch.Tensor, name: str, before: int) -> None:
        """Name the output of a module after the module, if an operator made it while the module ran."""
        alias = self._memory.find(tensor)
        if alias is not None and alias.generation == alias.store.generation:
            value = alias.value
            if value.claim is None and not value.kind and value.index >= before:
                value.claim = name

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the numbers in a tensor follow from sizes and literals alone."""
        alias = self._memory.find(tensor)
        return alias is not None and alias.generation == alias.store.generation and alias.value.known

    def _value(self, tensor: torch.Tensor, label: str, scope: str, follows_input: bool) -> Value:
        value = Value(len(self.values), tensor, label, scope, self.phase)
        value.follows_input, value.prefix = follows_input, self._prefix
        self.values.append(value)
        return value

    def _alias(self, tensor: torch.Tensor) -> Alias:
        return self._memory.alias(tensor, self.scopes.current)

    def _current(self, alias: Alias) -> Value:
        if alias.generation != alias.store.generation:
            parent = alias.parent
            if parent is None:
                raise AssertionError("the base of a store is always current")
            seen = self._current(parent)
            if alias.replay is None:
                alias.value = seen
            else:
                func, args, kwargs = alias.replay
                args = tuple(seen if a is parent.tensor else a for a in args)
                alias.value = self.emit(func, args, kwargs)[alias.position]
            alias.generation = alias.store.generation
        return alias.value

    # Calls that capture adds.

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Value:
        """Record a call as :meth:`emit` does; returns the one value that it makes."""
        (made,) = self.emit(func, args, kwargs)
        return made

    def emit(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Value]:
        """Record a call of *func*; returns the values that it makes.

        The resulting tensors are no windows on the step's memory. To be used while the recorder's
        ``__torch_dispatch__`` runs, or in :meth:`.recorder.Recorder.unseen`: elsewhere the call is recorded twice.

        Args:
            func: the operator.
            args: its arguments; values take the place of tensors, and a tensor of the step stands for the value that it
                shows now.
            kwargs: its keyword arguments, none of them a tensor.
        """
        form = form_of(func)
        known = {id(arg.tensor): arg for arg in args if isinstance(arg, Value)}
        tensors = tuple([arg.tensor if isinstance(arg, Value) else arg for arg in args])
        bound = form.bind(tensors, kwargs)
        inputs = tuple([known.get(id(t)) or self.read(t) for t in bound.tensors])
        pairs = list(zip(bound.tensors, inputs, strict=True))
        geometries = [v.geometry if v.tensor is t else geometry_of(t) for t, v in pairs]
        out = self._results.of(form, bound, geometries, tensors, kwargs)
        call, source = self._call(form, bound, inputs)
        outs = in_sequence(out)
        for tensor in outs:
            value = self._value(tensor, form.label, call.scope, any(v.follows_input for v in inputs))
            value.call, value.source, value.known = call, source, is_known_result(call)
            storage = tensor.untyped_storage()._cdata
            for (t, v), geometry in zip(pairs, geometries, strict=True):
                if t.untyped_storage()._cdata == storage:
                    value.root = v.root
                    value.offset = v.offset + value.geometry.offset - geometry.offset
            call.outputs += (value,)
        call.results = "[" + "t" * len(outs) + "]" if form.returns_list else None
        self.calls.append(call)
        return list(call.outputs)

    def emit_own(
        self,
        type: str,
        inputs: tuple[Value, ...],
        operands: str | None,
        args: Mapping[str, Arg],
        made: Sequence[torch.Tensor],
    ) -> tuple[Value, ...]:
        """Record a call of one of graphir's own types; returns values with the geometry of the tensors *made*."""
        call, source = self._call_of(type, inputs, operands, args)
        for tensor in made:
            label = type.removeprefix("graphir.").removesuffix("_backward")
            value = self._value(tensor, label, call.scope, any(v.follows_input for v in inputs))
            value.call, value.source = call, source
            call.outputs += (value,)
        self.calls.append(call)
        return call.outputs

    # Calls, and where they come from.

    def _record(self, form: Form, bound: BoundArguments, inputs: tuple[Value, ...], out: Any, replay: Replay) -> None:
        if form.default_dtype and (out.is_floating_point() or out.is_complex()):
            bound.args.setdefault("dtype", to_symbol(out.dtype))  # the default may differ where the program runs
        call, source = self._call(form, bound, inputs)
        self.calls.append(call)
        if isinstance(out, torch.Tensor):
            call.outputs = (self._result(out, form, call, bound, source, replay, 0),)
            return
        pattern: list[str] = []
        made: list[Value] = []

        def add(item: Any) -> None:
            if isinstance(item, torch.Tensor):
                made.append(self._result(item, form, call, bound, source, replay, len(made)))
            pattern.append("t" if isinstance(item, torch.Tensor) else "_")

        results = out if isinstance(out, (tuple, list)) and not form.returns_list else (out,)
        for item in results if form.func._schema.returns else ():
            if isinstance(item, (tuple, list)):
                pattern.append("[")
                for inner in item:
                    add(inner)
                pattern.append("]")
            else:
                add(item)
        text = "".join(pattern)
        call.outputs = tuple(made)
        call.results = None if text == "t" * len(made) else text

    def _result(
        self,
        tensor: torch.Tensor,
        form: Form,
        call: RecordedCall,
        bound: BoundArguments,
        source: Value | None,
        replay: Replay | None,
        position: int,
    ) -> Value:
        if tensor.layout != torch.strided:
            raise CaptureError(
                f"{form.type} makes a {str(tensor.layout).removeprefix('torch.')} tensor",
                where=where(call.scope),
                fix=DENSE,
            )
        value = self._value(tensor, form.label, call.scope, any(v.follows_input for v in call.inputs))
        value.call, value.source, value.known = call, source, is_known_result(call)
        store = self._memory.store(tensor)
        if store is None:
            self._memory.add_base(tensor, value, persistent=False)
            return value
        parent = next((a for t in bound.tensors if (a := self._alias(t)).store is store), None)
        if parent is None:
            raise CaptureError(
                f"{form.type} returns a view of a tensor that is not among its arguments", where=where(call.scope)
            )
        self._memory.add_alias(tensor, value, parent, replay, position)
        seen = parent.value
        value.root = seen.root
        value.offset = seen.offset + value.geometry.offset - parent.geometry.offset
        return value

    def _call(self, form: Form, bound: BoundArguments, inputs: tuple[Value, ...]) -> tuple[RecordedCall, Value | None]:
        """A new call, still without outputs, and the forward value whose gradient the call helps to compute."""
        type, seed = form.type, None
        if form.draws(bound.args):
            type, seed = form_of(seedable(form, self.here())).type, self.seeds.take()
        return self._call_of(type, inputs, bound.operands, bound.args, seed)

    def _call_of(
        self,
        type: str,
        inputs: tuple[Value, ...],
        operands: str | None,
        args: Mapping[str, Arg],
        seed: int | None = None,
    ) -> tuple[RecordedCall, Value | None]:
        if self._later:
            of_gradients = any(v.phase != "forward" and not v.kind for v in inputs)
            self.phase = "update" if of_gradients else "forward"
        source, scope = self._origin(inputs)
        call = RecordedCall(type, inputs, operands, args, scope, self.phase, seed, self._line(source, inputs))
        if self._named and self.phase == "forward":
            self._belonging.in_forward(call)
        elif self._named and self.phase == "backward":
            self._belonging.in_backward(call, self._owner() or source)
        return call, source

    def _line(self, source: Value | None, inputs: Sequence[Value]) -> str:
        """The source line that is running; in a backward that torch runs, the line of the forward.

        For a call that capture itself adds, such as a sum of losses, it is the line that made an operand. It is empty
        in a recording without names.
        """
        if not self._named:
            return ""
        line = self._lines.current()
        if line:
            return line
        read = (source or self._owner(), *inputs)
        made = [v.call.line for v in read if v is not None and v.call is not None]
        return next(filter(None, made), "")

    def _place(self) -> str:
        """The module and the source line that run."""
        return where(self._scope(), self._lines.current())

    def _scope(self) -> str:
        """The module that is running."""
        return self._origin(())[1]

    def _origin(self, inputs: Sequence[Value]) -> tuple[Value | None, str]:
        """The forward value whose gradient is computed, and the module that an operator belongs to.

        Some nodes of autograd have no value that the step saw, such as a view of overwritten memory. Some operators run
        outside of nodes, such as the one that makes the loss's gradient. These operators belong to the owner and the
        module of their operands.
        """
        scope = self.scopes.current
        if self.phase == "forward" or scope:
            return None, scope
        owner = self._owner()
        if owner is not None and torch.is_grad_enabled():  # a checkpoint runs its forward again
            return None, owner.scope
        if self.phase == "backward" and owner is None:
            made = [v for v in inputs if v.call is not None]
            owner = next((v.source for v in made if v.source is not None), None)
            owner = owner or next((v for v in made if v.phase == "forward"), None)
        if owner is not None:
            return owner, owner.scope
        return None, next((v.scope for v in inputs if v.scope), "")

    def _owner(self) -> Value | None:
        """The forward value whose gradient autograd's running node computes."""
        node = torch._C._current_autograd_node()
        return self._owners.get(node._sequence_nr()) if node is not None else None
