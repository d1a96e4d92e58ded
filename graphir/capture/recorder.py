"""The recorder: a dispatch mode that writes down every operator that runs on fake tensors.

It sees a step as PyTorch's own dispatcher does, forward and backward alike, and turns it into calls on values that
never change: what in-place operators and views of activations do is told by functional operators (:mod:`.mutation`);
parameters and buffers alone are overwritten, in successive versions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import CaptureError, GraphirError
from ..ir.operator import Arg, Phase
from ..ir.opset import CHECKS
from .checks import CHECKED, Check
from .devices import on_host
from .edges import differentiable, keep_edges
from .forms import Bound, Form, form_of
from .known import is_known_result, number_in
from .memory import Memory
from .mutation import functional_call, functional_view, laid_out, overwritten_base
from .randomness import SeedIds, refuse_generator, seedable
from .refusals import FAKE_ERRORS, refuse_operator, refused_by_fake, where
from .results import Results
from .scopes import Scopes
from .source_lines import SourceLines
from .sparse import SparseTensors
from .values import Alias, Call, Replay, Value, geometry_of

__all__ = ["Recorder"]

_aten: Final = torch.ops.aten
_DEVICE: Final = torch.ops.prim.device.default
_GEOMETRY: Final = frozenset(
    {_aten.is_same_size.default, _aten._has_same_storage_numel.default, _aten._assert_tensor_metadata.default}
)
"""Questions about tensors that fake ones answer: nothing is computed."""
_SAME: Final = frozenset({_aten.detach.default, _aten.alias.default})
_RRELU: Final = frozenset({_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default})
_NUMBER: Final = _aten._local_scalar_dense.default
_LITERAL: Final = frozenset({_aten.lift_fresh.default, _aten.lift.default})


class Recorder(TorchDispatchMode):
    """Records calls while it is the innermost mode over a ``FakeTensorMode``.

    Attributes:
        calls: in order.
        values: every value, externals first, at its index.
        constants: real tensors that the step reads and that are neither parameters, buffers nor inputs.
        phase: forward, backward or update.
        sparse: the sparse gradients.
        refusal: the first one. A model may catch it and go on, but it would go on otherwise than with data.
        failed_line: the source line of what it refused.
        arguments: names of the tensors that the step is given, by their ``id``; fake ones stand for them.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        scopes: Scopes,
        lines: SourceLines | None,
        path_of: Callable[[torch.Tensor], str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.values: list[Value] = []
        self.constants: list[tuple[Value, torch.Tensor]] = []
        self.phase: Phase = "forward"
        self.seeds = SeedIds()
        self.sparse = SparseTensors()
        self._fake_mode, self._scopes, self._lines, self._path_of = fake_mode, scopes, lines, path_of
        self._memory = Memory()
        self._results = Results(fake_mode, self._scope)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._owners: dict[int, Value] = {}
        self._forms: dict[object, Form] = {}
        self._prefix, self._first = "", 0
        self.refusal: CaptureError | None = None
        self.failed_line = ""
        self.arguments: dict[int, str] = {}

    # What exists before the step.

    def fake(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        return self._results.empty(tuple(shape), tuple(strides), dtype)

    def external(self, tensor: torch.Tensor, name: str, kind: str) -> Value:
        """Make a fake tensor known as a parameter, buffer, constant or input."""
        value = self._value(tensor, name, "", follows_input=kind == "input")
        value.kind = kind
        self._memory.add_base(tensor, value, persistent=kind in ("param", "buffer", "state"))
        return value

    def stand_in(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Let *fake* be what the step reads where it reads *tensor* itself, as a closure or a list may hold it."""
        self._fakes[id(tensor)] = fake, tensor

    def release(self) -> None:
        """Forget the step, once it is recorded: what refers to itself would have to be found by the collector."""
        self._memory.release()
        self.calls, self.values, self._fakes, self._owners = [], [], {}, {}

    # What the step did.

    def read(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor shows now."""
        return self._current(self._alias(tensor))

    def follow_modules(self) -> contextlib.AbstractContextManager[None]:
        """Know which module runs, and name what it returns."""
        if self._lines is None:
            return contextlib.nullcontext()
        return self._scopes.follow(lambda: len(self.values), self.claim)

    def claim(self, tensor: torch.Tensor, name: str, before: int) -> None:
        """Name what a module returns after it, if an operator made it while the module ran."""
        alias = self._memory.find(tensor)
        if alias is not None and alias.generation == alias.store.generation:
            value = alias.value
            if value.claim is None and not value.kind and value.index >= before:
                value.claim = name

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether what a tensor holds follows from sizes and literals alone."""
        alias = self._memory.find(tensor)
        return alias is not None and alias.generation == alias.store.generation and alias.value.known

    def start_micro_batch(self, prefix: str) -> None:
        """From here on, operators belong to the forward of the micro-batch whose names start with *prefix*."""
        self.phase, self._prefix, self._first = "forward", prefix, len(self.values)
        for value in self.values:
            value.edge = None

    def exchanges_refused(self) -> contextlib.AbstractContextManager[None]:
        """While this is active, a step that exchanges a tensor's memory (``x.data = …``) is refused."""
        return self._memory.exchanges_refused()

    def end_forward(self) -> None:
        """Raise where the forward did to a tensor what no operator tells, in the recording that is named.

        Raises:
            CaptureError: it exchanged a tensor's memory.
        """
        if self._lines is not None:
            self._memory.check_unexchanged()

    def start_backward(self) -> list[tuple[Value, Any]]:
        """From here on, operators belong to the backward of the forward value whose gradient is being computed.

        Returns:
            Each forward value that has a gradient, and where that arrives: its tensor, or an edge of the graph. Of the
            values that operators made, those of the current micro-batch.
        """
        seen = (alias for alias in self._memory if alias.value.index >= self._first or alias.value.root.kind)
        found = list(differentiable(seen, self.values))
        for value, edge in found:
            node = edge.grad_fn if isinstance(edge, torch.Tensor) else edge.node
            if node is not None:
                self._owners.setdefault(node._sequence_nr(), value)
                if type(node).__name__ == "CheckpointFunctionBackward":
                    raise CaptureError(
                        "reentrant checkpointing runs a backward of its own inside the backward",
                        where=where(value.scope, value.call.line if value.call is not None else ""),
                        fix="pass use_reentrant=False to torch.utils.checkpoint.checkpoint",
                    )
        self.phase = "backward"
        return found

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Between the step's own calls: what runs on fake tensors is recorded by :meth:`emit` alone."""
        with _disable_current_modes(), self._fake_mode, torch.no_grad():
            yield

    def start_update(self) -> None:
        """From here on, operators belong to the update."""
        self.phase, self._prefix = "update", ""

    def window(self, value: Value) -> torch.Tensor:
        """A new tensor that shows *value*; what is done to it is done to no other tensor."""
        tensor = self.fake(value.shape, value.strides, value.dtype)
        self._memory.add_base(tensor, value, persistent=False)
        return tensor

    # What the dispatcher calls.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would wrap what the dispatcher calls in a function that takes longer than most of the calls."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        try:
            return self._dispatch(func, args, kwargs or {})
        except CaptureError as e:
            if self.refusal is None:
                self.refusal, self.failed_line = e, self._line(self._origin(())[0], ())
            raise

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        kwargs = on_host(kwargs, self._scope)
        form = self._forms.get(func)
        if form is None:
            if getattr(func, "namespace", "") == "prim" or func in _GEOMETRY:
                return func(*args, **kwargs)
            if func is _NUMBER and self.is_known(args[0]):
                return number_in(self.read(args[0]), {literal.index: real for literal, real in self.constants})
            if func is _NUMBER and (check := CHECKED.get(sys._getframe(2).f_code)) is not None:
                return self._checked(check, args[0])
            refuse_operator(func, self._scope(), args)
            form = form_of(func)
            if func is not _aten.index.Tensor:  # refused with masks alone
                self._forms[func] = form
        if self.sparse.concern(func, args):
            return self.sparse.call(self, func, args, kwargs, self._scope())
        if form.generator is not None:
            refuse_generator(form, args, kwargs, where(self._scope()))
        if func in _LITERAL and not self._is_ours(args[0]):
            literal = self._constant(args[0], literal=True)
            self.read(literal).known = True
            return literal
        try:
            bound = form.bind(args, kwargs)
        except GraphirError as e:
            raise CaptureError(f"{form.type}: {e.what}", where=where(self._scope()), fix=e.fix) from e
        seen = [self._memory.find(t) for t in bound.tensors]
        if None in seen and not all(map(self._is_ours, bound.tensors)):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._constant, (args, dict(kwargs)))
            bound = form.bind(args, kwargs)
            seen = [None] * len(bound.tensors)
        aliases = [alias or self._alias(t) for alias, t in zip(seen, bound.tensors, strict=True)]
        if func in _SAME:
            return self._twin(aliases[0], self._results.of(form, bound, [aliases[0].geometry], args, kwargs))
        try:
            if form.rebinds:
                return self._rebind(form, args, kwargs)
            if bound.written:
                return self._overwrite(form, bound, aliases, args, kwargs)
            inputs = tuple([self._current(alias) for alias in aliases])
            out = self._results.of(form, bound, [alias.geometry for alias in aliases], args, kwargs)
        except FAKE_ERRORS as e:
            raise refused_by_fake(e, form, self._scope()) from e
        if form.func._opname in CHECKS or self._makes_something(out):
            self._record(form, bound, inputs, out, (func, args, dict(kwargs)))
        return out

    def _checked(self, check: Check, outcome: torch.Tensor) -> bool:
        """Record that the *outcome* of a check is the one that it has where it holds."""
        holds = outcome if check.holds else self._dispatch(_aten.logical_not.default, (outcome,), {})
        self._dispatch(_aten._assert_async.msg, (holds, check.message), {})
        return check.holds

    def _makes_something(self, out: Any) -> bool:
        if isinstance(out, torch.Tensor):
            return self._memory.find(out) is None
        leaves = out if isinstance(out, (tuple, list)) else (out,)
        return any(
            self._memory.find(leaf) is None
            for item in leaves
            for leaf in (item if isinstance(item, (tuple, list)) else (item,))
            if isinstance(leaf, torch.Tensor)
        )

    def _call(self, form: Form, bound: Bound, inputs: tuple[Value, ...]) -> tuple[Call, Value | None]:
        """A call still without outputs, and the forward value whose gradient it helps to compute."""
        type, seed = form.type, None
        if form.draws(bound.args):
            type, seed = form_of(seedable(form, where(self._scopes.current))).type, self.seeds.take()
        return self._call_of(type, inputs, bound.operands, bound.args, seed)

    def _call_of(
        self,
        type: str,
        inputs: tuple[Value, ...],
        operands: str | None,
        args: Mapping[str, Arg],
        seed: int | None = None,
    ) -> tuple[Call, Value | None]:
        source, scope = self._origin(inputs)
        return Call(type, inputs, operands, args, scope, self.phase, seed, self._line(source, inputs)), source

    def _record(self, form: Form, bound: Bound, inputs: tuple[Value, ...], out: Any, replay: Replay) -> None:
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

    def _line(self, source: Value | None, inputs: Sequence[Value]) -> str:
        """The source line of what is running; of a backward that torch runs, that of its forward.

        Where capture itself adds losses up, or divides them, it is the line of what it reads. Empty where nobody asks.
        """
        if self._lines is None:
            return ""
        line = self._lines.current()
        if line:
            return line
        read = (source or self._owner(), *inputs)
        made = [v.call.line for v in read if v is not None and v.call is not None]
        return next(filter(None, made), "")

    def _scope(self) -> str:
        """The module that is running."""
        return self._origin(())[1]

    def _origin(self, inputs: Sequence[Value]) -> tuple[Value | None, str]:
        """Whose gradient is being computed, and the module that an operator belongs to.

        Autograd has nodes that made no value that the step saw, as those of a view of overwritten memory, and runs some
        operators outside of nodes, as the one that makes the loss's gradient. They belong to what they read.
        """
        scope = self._scopes.current
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

    def _result(
        self,
        tensor: torch.Tensor,
        form: Form,
        call: Call,
        bound: Bound,
        source: Value | None,
        replay: Replay | None,
        position: int,
    ) -> Value:
        if tensor.layout != torch.strided:
            raise CaptureError(
                f"{form.type} makes a {str(tensor.layout).removeprefix('torch.')} tensor",
                where=where(call.scope),
                fix="use dense tensors (for an embedding, sparse=False)",
            )
        value = self._value(tensor, form.label, call.scope, any(v.follows_input for v in call.inputs))
        value.call, value.source, value.known = call, source, is_known_result(call)
        store = self._memory.store(tensor)
        if store is None:
            self._memory.add_base(tensor, value, persistent=False)
            return value
        parent = next((a for t in bound.tensors if (a := self._alias(t)).store is store), None)
        if parent is None:
            raise CaptureError(f"{form.type} returns a view of a tensor that it was not given", where=where(call.scope))
        self._memory.add_alias(tensor, value, parent, replay, position)
        seen = parent.value
        value.root = seen.root
        value.offset = seen.offset + value.geometry.offset - parent.geometry.offset
        return value

    # Values and the memory behind them.

    def _value(self, tensor: torch.Tensor, label: str, scope: str, follows_input: bool) -> Value:
        value = Value(len(self.values), tensor, label, scope, self.phase)
        value.follows_input, value.prefix = follows_input, self._prefix
        self.values.append(value)
        return value

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether it is a fake tensor of this recording, not of the mode in which a model was built."""
        return type(tensor) is FakeTensor and tensor.fake_mode is self._fake_mode

    def _constant(self, real: torch.Tensor, literal: bool = False) -> torch.Tensor:
        """The fake tensor of a real one that the step reads, or of a *literal* that it makes anew each time."""
        if self._is_ours(real):
            return real
        if real.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"the step reads a tensor of shape {list(real.shape)} that needs a gradient and is no parameter of "
                "the modules that run",
                where=where(self._scopes.current),
                fix="read a parameter through its module, make it one of the model's, or pass tensor.detach()",
            )
        if id(real) in self.arguments:
            raise CaptureError(
                f"the step reads argument {self.arguments[id(real)]!r} from elsewhere too, where another step would "
                "still find this tensor",
                where=where(self._scopes.current),
                fix="pass it where it is read: through kwargs= to the model, through targets= to the loss",
            )
        if id(real) not in self._fakes:
            if type(real) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor):
                raise CaptureError(
                    f"a tensor of type {type(real).__name__} is not supported",
                    where=where(self._scopes.current),
                    fix="use plain tensors",
                )
            fake = self.fake(real.shape, real.stride(), real.dtype)
            self._fakes[id(real)] = fake, real
            path = self._path_of(real)
            value = self.external(fake, path or "constant", "constant")
            value.scope = "" if path else self._scopes.current
            self._alias(fake).store.persistent = not literal
            self.constants.append((value, real))
        return self._fakes[id(real)][0]

    def _alias(self, tensor: torch.Tensor) -> Alias:
        return self._memory.alias(tensor, self._scopes.current)

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
                args = tuple(seen.tensor if a is parent.tensor else a for a in args)
                alias.value = self.emit(func, args, kwargs, {id(seen.tensor): seen})[alias.position]
            alias.generation = alias.store.generation
        return alias.value

    def _twin(self, original: Alias, same: torch.Tensor) -> torch.Tensor:
        """Let *same* be another window on what *original* shows."""
        self._memory.add_alias(same, self._current(original), original, None)
        return same

    # Calls that the step did not make itself.

    def emit(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: Mapping[int, Value]
    ) -> list[Value]:
        """Record a call of *func* on values, given as their tensors; returns what it makes.

        The tensors that it makes are no windows on the step's memory. To be used while the dispatcher calls, or
        :meth:`unseen`; elsewhere the dispatcher would record the call too.
        """
        form = form_of(func)
        bound = form.bind(args, kwargs)
        inputs = tuple([known.get(id(t)) or self.read(t) for t in bound.tensors])
        pairs = list(zip(bound.tensors, inputs, strict=True))
        geometries = [v.geometry if v.tensor is t else geometry_of(t) for t, v in pairs]
        out = self._results.of(form, bound, geometries, args, kwargs)
        call, source = self._call(form, bound, inputs)
        outs = out if isinstance(out, (tuple, list)) else (out,)
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
        """Record a call of one of graphir's own types, which makes values like the fake tensors *made*."""
        call, source = self._call_of(type, inputs, operands, args)
        for tensor in made:
            label = type.removeprefix("graphir.").removesuffix("_backward")
            value = self._value(tensor, label, call.scope, any(v.follows_input for v in inputs))
            value.call, value.source = call, source
            call.outputs += (value,)
        self.calls.append(call)
        return call.outputs

    # Writes.

    def _overwrite(
        self, form: Form, bound: Bound, aliases: Sequence[Alias], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        targets = [aliases[i] for i in bound.written]
        geometries = [alias.geometry for alias in aliases]
        for target in targets:
            if target.store.persistent and target.store.base.value.kind == "constant":
                raise CaptureError(
                    f"{form.type} overwrites {target.store.base.value.label!r}, which is neither parameter nor buffer",
                    where=where(self._scopes.current),
                    fix="register it with module.register_buffer(name, tensor)",
                )
        if all(target.store.persistent and target.is_base for target in targets):
            inputs = tuple([self._current(alias) for alias in aliases])
            out = self._results.of(form, bound, geometries, args, kwargs)
            self._write_state(form, bound, inputs, targets, out)
            return out
        if form.func in _RRELU:
            return self._overwrite_noise(form, bound, aliases, args, kwargs)
        if len(targets) != 1:
            raise CaptureError(
                f"{form.type} overwrites {len(targets)} tensors at once, not all of them parameters or buffers",
                where=where(self._scopes.current),
                fix="overwrite them one by one",
            )
        (target,) = targets
        if self.phase == "forward":
            keep_edges(target)
        new = functional_call(self, form, target, args, kwargs, where(self._scopes.current))
        out = self._results.of(form, bound, geometries, args, kwargs)
        self._store_value(target, new)
        return out

    def _overwrite_noise(
        self, form: Form, bound: Bound, aliases: Sequence[Alias], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """``rrelu``, which overwrites its noise and returns a tensor or overwrites that too, by its functional form."""
        targets = [aliases[i] for i in bound.written]
        if self.phase == "forward":
            for target in targets:
                keep_edges(target)
        seen = [self.read(target.tensor) for target in targets]
        made = self.emit(_aten.rrelu_with_noise_functional.default, args, kwargs, {})
        out = self._results.of(form, bound, [alias.geometry for alias in aliases], args, kwargs)
        here = where(self._scopes.current)
        for target, old, new in zip(reversed(targets), reversed(seen), reversed(made), strict=False):
            self._store_value(target, laid_out(self, new, target.tensor, old, here))
        if len(targets) == 1:
            made[0].tensor = out
            self._memory.add_base(out, made[0], persistent=False)
        return out

    def _write_state(
        self, form: Form, bound: Bound, inputs: tuple[Value, ...], targets: Sequence[Alias], out: Any
    ) -> None:
        """Record an operator that overwrites parameters or buffers as it is; each takes a new version."""
        call, source = self._call(form, bound, inputs)
        fresh: dict[int, Value] = {}
        for target in targets:
            base = target.store.base
            old = self._current(base)
            new = self._value(target.tensor, old.label, old.scope, follows_input=False)
            new.kind, new.root, new.version, new.call = old.kind, old.root, old.version + 1, call
            target.store.generation += 1
            for alias in (base, target):
                alias.value, alias.generation = new, target.store.generation
            fresh[id(target.tensor)] = new
        outs = out if isinstance(out, (tuple, list)) else (out,)
        returned = [
            fresh.pop(id(t)) if id(t) in fresh else self._result(t, form, call, bound, source, None, i)
            for i, t in enumerate(outs)
            if t is not None
        ]
        missing = any(t is None for t in outs)
        call.results = "".join("_" if t is None else "t" for t in outs) if missing else None
        call.outputs = (*returned, *fresh.values())
        self.calls.append(call)

    def _store_value(self, target: Alias, new: Value) -> None:
        """Let *target* show *new*, and everything else that looks at its memory the same change."""
        store = target.store
        base = store.base
        whole = new if target.is_base else overwritten_base(self, target, self._current(base), new)
        if store.persistent:
            form = form_of(_aten.copy_.default)
            args = (base.tensor, whole.tensor)
            bound = form.bind(args, {})
            self._write_state(form, bound, (self._current(base), whole), [base], base.tensor)
        else:
            store.generation += 1
            base.value, base.generation = whole, store.generation
        if target.is_base:
            target.value, target.generation = base.value, store.generation

    def _rebind(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record ``squeeze_`` and the like: the tensor becomes a view of what it was."""
        tensor = args[0]
        alias = self._alias(tensor)
        self._current(alias)
        if self.phase == "forward":
            keep_edges(alias)
        if form.func is _aten.detach_.default:
            return form.func(*args, **kwargs)
        before = _aten.detach.default(tensor)
        old = self._memory.add_alias(before, alias.value, alias.parent or alias, alias.replay, alias.position)
        old.parent = alias.parent
        for other in self._memory:  # what was a view of the tensor is one of what it was
            if other.parent is alias:
                other.parent = old
                if other.replay is not None:
                    func, given, options = other.replay
                    other.replay = func, tuple([before if arg is tensor else arg for arg in given]), options
        alias.value.tensor = before
        if alias.store.base is alias:
            alias.store.base = old
        view = functional_view(form)
        out = form.func(*args, **kwargs)
        replay = (view, (before, *args[1:]), dict(kwargs))
        (alias.value,) = self.emit(*replay, known={id(before): old.value})
        alias.value.tensor = tensor
        alias.parent, alias.replay, alias.position, alias.geometry = old, replay, 0, geometry_of(tensor)
        return out
