"""The recorder: a dispatch mode that writes every operator that runs on fake tensors to a tape.

The recorder sees a step as PyTorch's own dispatcher does, forward and backward alike, and turns it into calls on values
that never change. Writes to activations and through views become functional operators (:mod:`.mutation`). Only
parameters and buffers are overwritten, in successive versions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from ...errors import CaptureError, GraphirError
from ...ir.geometry import geometry_of
from ...ir.opset import is_composite
from ...ir.tensor import PLAIN
from ..isolate.autocast import Target
from ..isolate.caches import Caches
from ..isolate.devices import on_host
from ..isolate.functions import past_functions
from ..isolate.interrupts import Interrupts
from ..isolate.recorded import MODES, is_recorded
from ..words.libraries import Outside
from ..words.places import DENSE, described, where
from .averages import BATCHES, average, batches_read_in
from .checks import Check, check_read_in
from .edges import keep_edges
from .factorisations import Factorisations
from .forms import BoundArguments, Form, form_of
from .known import number_in, tensor_of
from .lists import overwrite_each, overwrites_lists
from .mutation import functional_call, functional_view, laid_out, overwritten_base
from .operands import refuse_overlapping_operands
from .refused import FAKE_ERRORS, REFUSED_AT_TIMES, refuse_operator, refused_by_fake, refused_trace
from .results import in_sequence
from .scopes import Scopes
from .seeds import refuse_generator
from .selections import masks_in, selected
from .sequences import CTC, record_ctc, refuse_packed
from .source_lines import SourceLines
from .sparse import SparseTensors
from .tape import Tape
from .values import Alias, Store, Value

__all__ = ["Recorder"]

_aten: Final = torch.ops.aten
_DEVICE: Final = torch.ops.prim.device.default
_NOTHING_COMPUTED: Final = frozenset({"prim", "profiler"})
"""Namespaces of operators that ask for a device, or tell the profiler where the step is."""
_GEOMETRY: Final = frozenset(
    {_aten.is_same_size.default, _aten._has_same_storage_numel.default, _aten._assert_tensor_metadata.default}
)
"""Questions that fake tensors answer: nothing is computed."""
_SAME: Final = frozenset({_aten.detach.default, _aten.alias.default})
_RRELU: Final = frozenset({_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default})
_BATCH_NORM: Final = _aten.native_batch_norm.default
_SEVERAL: Final[Mapping[Any, Any]] = {
    **dict.fromkeys(_RRELU, _aten.rrelu_with_noise_functional.default),
    _BATCH_NORM: _aten._native_batch_norm_legit_functional.default,
}
"""Functional forms of operators that overwrite several tensors. Their last results are the new values of these."""
_TRACE: Final = torch._C._TorchDispatchModeKey.PROXY
"""The key of the mode by which ``make_fx`` traces."""
_NUMBER: Final = _aten._local_scalar_dense.default
_IS_NAN: Final = _aten.isnan.default
_ANY_TRUE: Final = _aten._is_any_true.default
_LITERAL: Final = frozenset({_aten.lift_fresh.default, _aten.lift.default})
_accepted: Final[dict[object, Form]] = {}
"""The forms of operators that are accepted with any arguments, filled as they are first seen."""


class Recorder(Tape, TorchDispatchMode):
    """The tape that the dispatcher writes to, while this is the innermost mode over a ``FakeTensorMode``.

    Attributes:
        constants: the value and the tensor of each real tensor that the step reads and that is neither parameter,
            buffer nor input.
        sparse: the sparse gradients.
        refusal: the first error that was raised. A model may catch the error, but would go on differently than with
            data.
        failed_line: the source line of the refused operator.
        factorisations: whether torch is asked for vectors beside singular values and eigenvalues.
        arguments: names of the real tensors that the step is given, by ``id``. Fake tensors stand for them.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        fake_mode: FakeTensorMode,
        scopes: Scopes,
        lines: SourceLines,
        path_of: Callable[[torch.Tensor], str],
        caches: Caches,
        interrupts: Interrupts,
        target: Target,
        named: bool = True,
    ) -> None:
        TorchDispatchMode.__init__(self)
        Tape.__init__(self, fake_mode, scopes, lines, named)
        self.constants: list[tuple[Value, torch.Tensor]] = []
        self.sparse = SparseTensors()
        self._fake_mode, self._path_of, self._caches, self._interrupts = fake_mode, path_of, caches, interrupts
        self._target = target
        MODES.add(fake_mode)
        self._fakes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.refusal: CaptureError | None = None
        self.failed_line = ""
        self._batches: Value | None = None
        self.factorisations = Factorisations()
        self._unread: torch.Tensor | None = None
        self.arguments: dict[int, str] = {}

    def stand_in(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Let *fake* stand for *tensor* where the step reads *tensor* itself: a closure or a list may hold it."""
        self._fakes[id(tensor)] = fake, tensor

    def release(self) -> None:
        """See :meth:`.tape.Tape.release`."""
        super().release()
        self._fakes, self.sparse = {}, SparseTensors()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Between the step's own calls: while this is active, only :meth:`emit` records; operators that run do not."""
        seen, self.extents.seen = self.extents.seen, False
        try:
            with _pop_mode_temporarily(), torch._C.DisableTorchFunction(), torch.no_grad():
                yield
        finally:
            self.extents.seen = seen

    # What the dispatcher calls.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would wrap ``__torch_dispatch__`` in a function that takes longer than most of the calls."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if self._interrupts.held:
            self._interrupts.strike()
        seen, self.extents.seen = self.extents.seen, False
        try:
            if torch._C._get_dispatch_mode(_TRACE) is not None:
                raise refused_trace(self._scope())
            with torch._C.DisableTorchFunction():  # no function mode is told of the recorder's own questions
                return self._dispatch(func, args, kwargs or {})
        except CaptureError as e:
            if self.refusal is None:
                self.refusal, self.failed_line = e, self._line(self._origin(())[0], ())
            raise
        finally:
            self.extents.seen = seen

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        kwargs = on_host(kwargs)
        form = _accepted.get(func)
        if form is None:
            self.factorisations.refuse_alone(func, args, self._scope())
            handler = _HANDLERS.get(func) or self._handler_of(func, args)
            if handler is not None and (found := handler(self, func, args, kwargs)) is not NotImplemented:
                return found
            refuse_operator(func, self._scope(), args)
            form = form_of(func)
            if func not in REFUSED_AT_TIMES:
                _accepted[func] = form
        if func.namespace != "aten":
            self._target.refuse_kernel(func, self._scope())
        args = form.without_unread(args)
        if func is _IS_NAN and args[0].is_sparse and torch.is_anomaly_enabled():
            return self.fake((), (), torch.bool)
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
        if form.known.checks or self._makes_something(out):
            self._record(form, bound, inputs, out, (func, args, dict(kwargs)))
        return out

    # Handlers of operators of which the tape has no call of that name. A handler that returns NotImplemented leaves the
    # operator to the general path.

    def _handler_of(self, func: Any, args: Sequence[Any]) -> Callable[..., Any] | None:
        """The handler of an operator's kind; None: the operator is a call like all others."""
        if getattr(func, "namespace", "") in _NOTHING_COMPUTED:
            return Recorder._asked
        if torch.is_inference_mode_enabled() and is_composite(func):
            return Recorder._decomposed
        if (masks := masks_in(func, args)) and all(map(self.is_known, masks)):
            return Recorder._select
        return Recorder._overwritten_each if overwrites_lists(func) else None

    def _asked(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A question that fake tensors answer."""
        return func(*args, **kwargs)

    def _decomposed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Inference mode shows composite operators whole; their parts are recorded."""
        self._target.refuse_inference(self._scope())
        with self:
            return func.decompose(*args, **kwargs)

    def _overwritten_each(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        with self:
            overwrite_each(func, args, dict(kwargs), self._scope())

    def _ctc(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return record_ctc(self, func, pytree.tree_map_only(torch.Tensor, self._constant, args))

    def _any_true(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._unread_check(args[0]) if torch.is_anomaly_enabled() else NotImplemented

    def _number(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The number in a tensor, which Python reads, where the number is known, or asks for no more than a check."""
        if args[0] is self._unread:
            return False
        if self.is_known(args[0]):
            return number_in(self._known(args[0]))
        reader = past_functions(sys._getframe(3))  # behind _dispatch and __torch_dispatch__
        if (check := check_read_in(reader)) is not None:
            return self._checked(check, args[0])
        if batches_read_in(reader, self._scope()):
            self._batches = self.read(args[0])
            return BATCHES
        refuse_packed(reader, self._scope())
        return NotImplemented

    def _unread_check(self, is_nan: torch.Tensor) -> torch.Tensor:
        """A tensor for anomaly detection, which asks after each node whether a gradient has a NaN.

        Anomaly detection is set for the whole process, and other threads may use it. So it stays on while a step is
        recorded. The program has no such check.
        """
        alias = self._memory.find(is_nan)
        if alias is not None and self.calls and alias.value.call is self.calls[-1]:
            self.calls.pop()
        self._unread = self.fake((), (), torch.bool)
        return self._unread

    def _checked(self, check: Check, outcome: torch.Tensor) -> bool:
        """Record that *check* holds, by an operator that raises if the check fails; returns ``check.holds``."""
        holds = outcome if check.holds else self._dispatch(_aten.logical_not.default, (outcome,), {})
        self._dispatch(_aten._assert_async.msg, (holds, check.message), {})
        return check.holds

    def _select(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Record an operator that selects by masks whose values are known."""
        form = form_of(func)
        args = pytree.tree_map_only(torch.Tensor, self._constant, args)
        bound = form.bind(args, {})
        inputs = tuple([self.read(t) for t in bound.tensors])
        out = selected(form.func, args, self._known)
        self._record(form, bound, inputs, out, (form.func, args, {}))
        return out

    def held_by(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real tensor with the numbers of *tensor*; None if they are unknown."""
        return self._known(tensor) if self.is_known(tensor) else None

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with the numbers of a tensor whose value is known."""
        return tensor_of(self.read(tensor), {literal.index: real for literal, real in self.constants})

    def _makes_something(self, out: Any) -> bool:
        if isinstance(out, torch.Tensor):
            return self._memory.find(out) is None
        leaves = [leaf for item in in_sequence(out) for leaf in in_sequence(item)]
        return any(isinstance(leaf, torch.Tensor) and self._memory.find(leaf) is None for leaf in leaves)

    # Tensors from outside of the recording.

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether *tensor* is a fake tensor of this recording, not of the mode in which a model was built."""
        return type(tensor) is FakeTensor and tensor.fake_mode is self._fake_mode

    def _constant(self, real: torch.Tensor, literal: bool = False) -> torch.Tensor:
        """The fake tensor that stands for *real*, which the step reads; a *literal* is made anew in each step."""
        if self._is_ours(real):
            return real
        self._refuse_foreign(real)
        if id(real) not in self._fakes:
            self._fakes[id(real)] = self._declared(real, literal), real
        return self._fakes[id(real)][0]

    def _declared(self, real: torch.Tensor, literal: bool) -> torch.Tensor:
        """A new fake tensor that stands for *real*, declared as a constant of the step."""
        fake = self.fake(real.shape, real.stride(), real.dtype)
        path = self._path_of(real)
        cached = not (path or literal) and self._caches.holds(real)
        if is_recorded(real) and not cached:
            raise CaptureError(
                f"the step reads a tensor of shape {list(real.shape)} that an earlier recording of the step, in this "
                "capture or another, kept outside of the model",
                where=self.here(),
                fix="compute the tensor in each step, or keep it in a buffer or by functools.cache; and delete the "
                "kept tensor",
            )
        value = self.external(fake, path or "constant", "constant")
        value.scope = "" if path else self.scopes.current
        self._alias(fake).store.persistent = not literal
        self.constants.append((value, real))
        return fake

    def _refuse_foreign(self, real: torch.Tensor) -> None:
        """Refuse a tensor from outside of the recording that can't be a constant of the program."""
        if real.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"the step reads a tensor of shape {list(real.shape)} that requires a gradient but is not a parameter "
                "of the modules that run",
                where=self.here(),
                fix="read a parameter through its module, register the tensor as a parameter of the model, or use "
                "tensor.detach()",
            )
        if id(real) in self.arguments:
            raise CaptureError(
                f"the step reads argument {self.arguments[id(real)]!r} also from another place, where the next step "
                "would still find this tensor",
                where=self.here(),
                fix=Outside(
                    "pass the tensor to the code that reads it: by kwargs= to the model, by targets= to the loss"
                ),
            )
        if type(real) not in PLAIN or real.is_quantized:
            kind = real.dtype if real.is_quantized else type(real).__name__
            raise CaptureError(f"a tensor of type {kind} is not supported", where=self.here(), fix="use plain tensors")
        if real.layout != torch.strided:
            raise CaptureError(
                f"the step reads a {str(real.layout).removeprefix('torch.')} tensor of shape {list(real.shape)}",
                where=self.here(),
                fix=DENSE,
            )

    def _twin(self, original: Alias, same: torch.Tensor) -> torch.Tensor:
        """Let *same* be another window on the memory and the value of *original*."""
        self._memory.add_alias(same, self._current(original), original, None)
        return same

    # Writes.

    def _overwrite(
        self,
        form: Form,
        bound: BoundArguments,
        aliases: Sequence[Alias],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        refuse_overlapping_operands(form.type, aliases, bound.written, self.here())
        targets = [aliases[i] for i in bound.written]
        geometries = [alias.geometry for alias in aliases]
        for target in targets:
            if target.store.persistent and target.store.base.value.kind == "constant":
                raise CaptureError(
                    f"{form.type} overwrites {target.store.base.value.label!r}, which is neither parameter nor buffer",
                    where=self.here(),
                    fix="register it with module.register_buffer(name, tensor)",
                )
        if all(target.store.persistent and target.is_base for target in targets):
            inputs = tuple([self._current(alias) for alias in aliases])
            out = self._results.of(form, bound, geometries, args, kwargs)
            self._write_state(form, bound, inputs, targets, out)
            return out
        if self.phase == "forward":
            for target in targets:
                keep_edges(target)
        # Batch norm's functional form copies statistics contiguously; on other strides kernels round differently.
        statistics = form.func is _BATCH_NORM and len(targets) == 2 and all(t.tensor.is_contiguous() for t in targets)
        if statistics or form.func in _RRELU:
            return self._overwrite_several(form, bound, aliases, args, kwargs)
        if len(targets) != 1:
            raise CaptureError(
                f"{form.type} overwrites {len(targets)} tensors at once, not all of them parameters or buffers",
                where=self.here(),
                fix="make them contiguous, register them as buffers, or overwrite them one by one",
            )
        (target,) = targets
        new = functional_call(self, form, target, args, kwargs)
        out = self._results.of(form, bound, geometries, args, kwargs)
        self._store_value(target, new)
        return out

    def _overwrite_several(
        self,
        form: Form,
        bound: BoundArguments,
        aliases: Sequence[Alias],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Record an operator of :data:`_SEVERAL` by its functional form.

        ``instance_norm`` repeats statistics over the batch. Its batch norm overwrites the copies, which are no state.
        """
        targets = [aliases[i] for i in bound.written]
        seen = [self.read(target.tensor) for target in targets]
        made = self.emit(_SEVERAL[form.func], args, kwargs)
        out = self._results.of(form, bound, [alias.geometry for alias in aliases], args, kwargs)
        fresh, overwritten = made[: -len(targets)], made[-len(targets) :]
        for tensor, value in zip(in_sequence(out), fresh, strict=False):
            value.tensor = tensor
            self._memory.add_base(tensor, value, persistent=False)
        for target, old, new in zip(targets, seen, overwritten, strict=True):
            self._store_value(target, laid_out(self, new, target.tensor, old))
        return out

    def _write_state(
        self, form: Form, bound: BoundArguments, inputs: tuple[Value, ...], targets: Sequence[Alias], out: Any
    ) -> None:
        """Record an operator on parameters or buffers as the write that it is; each of them takes a new version."""
        call, source = self._call(form, bound, inputs)
        fresh: dict[int, Value] = {}
        for target in targets:
            self._refuse_shared(target.store)
            fresh[id(target.tensor)] = self._next_version(target, call)
        outs = in_sequence(out) if form.func._schema.returns else ()
        returned = [
            fresh.pop(id(t)) if id(t) in fresh else self._result(t, form, call, bound, source, None, i)
            for i, t in enumerate(outs)
            if t is not None
        ]
        if self._batches is not None and form.func is _BATCH_NORM:
            average(call, self._batches)
            self._batches = None
        missing = any(t is None for t in outs)
        call.results = "".join("_" if t is None else "t" for t in outs) if missing else None
        call.outputs = (*returned, *fresh.values())
        self.calls.append(call)

    def overwrite(self, tensor: torch.Tensor, value: Value) -> None:
        """Let *tensor* show *value* from now on, as if it were written there."""
        self._store_value(self._alias(tensor), value)

    def _store_value(self, target: Alias, new: Value) -> None:
        """Let *target* show *new*, and let every other tensor on its memory show the change."""
        store = target.store
        self._refuse_shared(store)
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

    def _refuse_shared(self, store: Store) -> None:
        """Refuse to overwrite memory that the step also reads under another name."""
        if store.shared:
            value = store.base.value
            raise CaptureError(
                f"the step overwrites {described(value.kind, value.label)}, which shares memory with {store.shared}",
                where=self.here(),
                fix="pass a clone of one of them, so that the other keeps its values",
            )

    def _rebind(self, form: Form, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Record ``squeeze_`` and the like, which change a tensor's geometry: it becomes a view of its former self."""
        tensor = args[0]
        alias = self._alias(tensor)
        self._current(alias)
        if self.phase == "forward":
            keep_edges(alias)
        if form.func is _aten.detach_.default:
            return form.func(*args, **kwargs)
        before = self._memory.set_aside(alias)
        view = functional_view(form)
        out = form.func(*args, **kwargs)
        replay = (view, (before.tensor, *args[1:]), dict(kwargs))
        (alias.value,) = self.emit(*replay)
        alias.value.tensor = tensor
        alias.parent, alias.replay, alias.position, alias.geometry = before, replay, 0, geometry_of(tensor)
        return out


_HANDLERS: Final[Mapping[Any, Callable[..., Any]]] = {
    **dict.fromkeys(_GEOMETRY, Recorder._asked),
    **dict.fromkeys(CTC, Recorder._ctc),
    _ANY_TRUE: Recorder._any_true,
    _NUMBER: Recorder._number,
}
"""Handlers of single operators."""
