"""Modules of a placed model that no capture covers: their own code runs inside of the plans, as one operator each.

::

    x ──▶ placed.FlashAttention_0 ──▶ y              forward: the module's own forward
    dx, dw ◀── placed.FlashAttention_0_backward ◀── dy, x, w       backward: once more, with its gradient

The operator is the module's code and nothing else: what is in the module stays on one device. As in a checkpoint, the
backward runs the code once more, so that nothing but operands is saved between the two.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ...capturing.capture import capture
from ...capturing.words.places import module_of
from ...errors import CaptureError, EagerWarning, counted, warn
from ...ir.program import Program
from ...ir.registration import register_operator

__all__ = ["EagerParts"]

_MOST: Final = 0.5
"""The part of a model's parameters that may be in such modules: a model of more is rather not placed."""

_SEEDS: Final = 2**62

_numbers: Final = itertools.count()


class EagerParts:
    """The modules of one model that no capture covers.

    Attributes:
        model: in which they are, as its own class has it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._parts: dict[str, _Part] = {}

    def captured(self, inputs: Sequence[Any], **options: Any) -> Program:
        """The program of a call, as :func:`graphir.capture` takes the arguments, with modules that a capture refuses as
        operators of their own.

        Raises:
            CaptureError: it refuses what is in no module inside of the model, or in most of the model; or a module's
                own code cannot be an operator.

        Warns:
            EagerWarning: says which modules run their own code, and why.
        """
        refused: dict[str, CaptureError] = {}
        modules = dict(self.model.named_modules())
        self._parts = {path: part for path, part in self._parts.items() if part.is_of(modules.get(path))}
        while True:
            try:
                with contextlib.ExitStack() as stack:
                    for part in self._parts.values():
                        stack.enter_context(part.in_place())
                    program = capture(self.model, inputs, **options)
                break
            except CaptureError as e:
                found = self._uncovered(e)
                if not found:
                    failed = [part.failed for part in self._parts.values() if part.failed is not None]
                    for path in refused:
                        del self._parts[path]
                    raise (failed[0] if failed else e) from None
                refused.update(dict.fromkeys(found, e))
                self._parts |= {path: _Part(module, e) for path, module in found.items()}
        for error in dict.fromkeys(refused.values()):
            first, *others = [path for path, known in refused.items() if known is error]
            more = f" and {counted(len(others), 'module')} like it" if others else ""
            name = type(self.model).__name__
            warn(
                f"{first!r} of {name}{more} runs its own code inside of the plans, and once more in the backward: "
                f"{error.what}",
                EagerWarning,
            )
        return program

    def _uncovered(self, error: CaptureError) -> dict[str, torch.nn.Module]:
        """The module where a capture ended, and all of its class; none where these are too much of the model."""
        modules = dict(self.model.named_modules())
        path = module_of(error)
        if not path or path not in modules or path in self._parts:
            return {}
        kind = type(modules[path])
        found = {p: m for p, m in modules.items() if p and type(m) is kind and p not in self._parts}
        inside = [*found.values(), *[modules[p] for p in self._parts]]
        own = {id(param): param.numel() for module in inside for param in module.parameters()}
        return found if sum(own.values()) <= _MOST * sum([p.numel() for p in self.model.parameters()]) else {}


class _Part:
    """A module whose own code is an operator.

    Args:
        module: itself.
        error: what a capture says of its code.

    Attributes:
        failed: why that code cannot be an operator, where that was found.
    """

    def __init__(self, module: torch.nn.Module, error: CaptureError) -> None:
        self._module, self._error = weakref.ref(module), error
        self._operators: dict[Hashable, _Operator] = {}
        self._double: torch.nn.Module | None = None
        self.failed: CaptureError | None = None

    def is_of(self, module: torch.nn.Module | None) -> bool:
        """Whether the module is this one."""
        return module is not None and self._module() is module

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While this is active, the module's ``forward`` is the operator.

        Raises:
            CaptureError: the module cannot be copied.
        """
        module = self._module()
        if module is None:
            yield
            return
        try:  # what is being captured no other thread may run, and trials are made in another one
            own = {id(t): t for t in (*module.parameters(), *module.buffers())}
            self._double, self.failed = copy.deepcopy(module, own), None
        except Exception as e:
            raise self._refused(e) from e
        table = vars(module)
        before = table.get("forward")
        table["forward"] = partial(self._forward, module, before)
        try:
            yield
        finally:
            self._double = None
            del table["forward"]
            if before is not None:
                table["forward"] = before

    def _forward(
        self, module: torch.nn.Module, forward: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        others = tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        buffers = dict(module.named_buffers())
        state = {**dict(module.named_parameters()), **buffers}
        operands = [*[leaf for leaf in leaves if isinstance(leaf, Tensor)], *state.values()]
        kind = operands[0].device.type if operands else "cpu"
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        graded = tuple([i for i, t in enumerate(operands) if torch.is_grad_enabled() and t.requires_grad])
        call = _Call(weakref.ref(module), forward, spec, others, tuple(state), len(buffers), graded, kind, cast)
        traits = tuple([(t.dtype, t.dim()) for t in operands])
        modes = tuple([inner.training for inner in module.modules()])
        key = (spec, repr(others), call.state, graded, kind, cast, traits, modes)
        double = self._double
        try:
            trial = _tried_apart(call._replace(module=lambda: double), operands)
            operator = self._operators.get(key) or _Operator(type(module).__name__, call, trial, len(operands))
            self._operators[key] = operator
        except Exception as e:
            raise self._refused(e) from e
        return operator(operands, trial)

    def _refused(self, error: Exception) -> CaptureError:
        what = f"{self._error.what}; and the module's own code cannot be an operator: {error}"
        self.failed = CaptureError(what, where=self._error.where, fix=self._error.fix)
        return self.failed


_TENSOR: Final = object()
"""Stands for a tensor among the leaves of arguments and outputs."""


class _Call(NamedTuple):
    """A kind of call of a module's own code.

    Attributes:
        module: itself.
        forward: what was set on the module in the place of its class's; None where nothing was.
        spec: how its arguments are put together.
        others: the leaves of these, with :data:`_TENSOR` for each tensor.
        state: the names of its parameters, and of its buffers.
        buffers: how many these are; the code has copies of them.
        graded: the positions of the operands that need a gradient; operands are the tensors among the arguments, and
            the state.
        kind: of the device.
        cast: the element type of autocast; None without.
    """

    module: Callable[[], torch.nn.Module | None]
    forward: Callable[..., Any] | None
    spec: Any
    others: tuple[Any, ...]
    state: tuple[str, ...]
    buffers: int
    graded: tuple[int, ...]
    kind: str
    cast: torch.dtype | None

    def __call__(self, operands: Sequence[Tensor], seed: Tensor | None) -> tuple[list[Any], Any]:
        """What the module returns, as leaves, and how these are put together."""
        module = self.module()
        if module is None:
            raise RuntimeError("the module is gone")
        tensors = iter(operands)
        leaves = [next(tensors) if other is _TENSOR else other for other in self.others]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        state = {f"module.{name}": tensor for name, tensor in zip(self.state, tensors, strict=True)}
        cast = torch.autocast(self.kind, self.cast or torch.bfloat16, self.cast is not None, cache_enabled=False)
        cards = [operands[0].device] if self.kind == "cuda" else []
        with cast, torch.random.fork_rng(cards, enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(int(seed))
            return pytree.tree_flatten(functional_call(_Alone(module, self.forward), state, args, kwargs))

    def leaves(self, operands: Sequence[Tensor]) -> list[Tensor]:
        """The operands without their history."""
        own = len(operands) - self.buffers
        plain = [t.detach() if i < own else t.detach().clone() for i, t in enumerate(operands)]
        return [t.requires_grad_(i in self.graded) for i, t in enumerate(plain)]


class _Alone(torch.nn.Module):
    """A module's own ``forward``, without its hooks, which are called around the operator."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module = module
        self._own = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = type(self.module).forward.__get__(self.module) if self._own is None else self._own
        return own(*args, **kwargs)


class _Meta(NamedTuple):
    """A tensor without its numbers."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Meta:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def empty(self, place: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=place)

    def drawn(self, place: torch.device) -> Tensor:
        """Numbers as they may be: whole ones are zero, as they may be positions."""
        made = self.empty(place).zero_()
        if made.is_floating_point():
            made.copy_(torch.randn(self.shape, generator=torch.Generator().manual_seed(0)))
        return made

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A tensor that lies as this one does.

        Raises:
            RuntimeError: it has another shape or element type.
        """
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise RuntimeError(f"a result is {tensor.dtype} of shape {list(tensor.shape)}, not {list(self.shape)}")
        return tensor if tensor.stride() == self.strides else self.empty(tensor.device).copy_(tensor)


class _Trial(NamedTuple):
    """What a call returns of some numbers.

    Attributes:
        outputs: its tensors.
        needing: the positions of those among them that need a gradient.
        gradients: by the position of an operand, its gradient.
        drew: whether the call drew random numbers.
        leaves: the leaves of the output, with :data:`_TENSOR` for each tensor.
        spec: how these are put together.
    """

    outputs: tuple[_Meta, ...]
    needing: tuple[int, ...]
    gradients: Mapping[int, _Meta]
    drew: bool
    leaves: tuple[Any, ...]
    spec: Any

    @property
    def traits(self) -> object:
        """What does not depend on sizes."""
        dtypes = [meta.dtype for meta in self.outputs]
        return dtypes, self.needing, list(self.gradients), self.drew, repr(self.leaves), self.spec


def _tried_apart(call: _Call, operands: Sequence[Tensor]) -> _Trial:
    """Try a call in another thread, where nothing is recorded and torch's functions are its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_tried, call, operands).result()


def _tried(call: _Call, operands: Sequence[Tensor]) -> _Trial:
    """Try a call with numbers that are drawn.

    Raises:
        RuntimeError: an operator cannot do what it does.
        Exception: likewise, of the module.
    """
    places = dict.fromkeys([t.device for t in operands])
    if len(places) != 1:
        raise RuntimeError("it has operands on several devices" if places else "it has no operands")
    with torch.set_grad_enabled(bool(call.graded)):
        drawn = call.leaves([_Meta.of(t).drawn(t.device) for t in operands])
        # A leaf cannot be overwritten; that this can, and was, its version says.
        inner = [torch.ops.aten.alias(t) if t.requires_grad else t for t in drawn]
        before = [t._version for t in inner]
        with torch.random.fork_rng([p for p in places if p.type == "cuda"]):
            states = _random_states(places)
            leaves, spec = call(inner, None)
            drew = any(not torch.equal(a, b) for a, b in zip(states, _random_states(places), strict=True))
        if [t._version for t in inner] != before:
            raise RuntimeError("it overwrites an argument or a buffer")
        outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not outputs:
            raise RuntimeError("it returns no tensor")
        if any(t.layout != torch.strided for t in outputs):
            raise RuntimeError("it returns a tensor that has no strides")
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        given = [torch.zeros_like(outputs[i]) for i in needing]
        found = _gradients(call, drawn, [outputs[i] for i in needing], given) if needing else []
    if any(t is not None and t.layout != torch.strided for t in found):
        raise RuntimeError("a gradient of it has no strides")
    gradients = {i: _Meta.of(t) for i, t in zip(call.graded, found, strict=False) if t is not None}
    plain = tuple([_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    metas = tuple([_Meta.of(t) for t in _apart(outputs, inner)])
    return _Trial(metas, needing if gradients else (), gradients, drew, plain, spec)


def _random_states(places: Sequence[torch.device] | Mapping[torch.device, Any]) -> list[Tensor]:
    return [torch.get_rng_state(), *[torch.cuda.get_rng_state(place) for place in places if place.type == "cuda"]]


def _gradients(
    call: _Call, operands: Sequence[Tensor], outputs: Sequence[Tensor], given: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    graded = [operands[i] for i in call.graded]
    return torch.autograd.grad(outputs, graded, given, allow_unused=True)


def _apart(outputs: Sequence[Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Outputs without history, each in memory of its own."""
    known = {t.untyped_storage()._cdata for t in operands}
    found = []
    for output in outputs:
        storage = output.untyped_storage()._cdata
        found.append(output.detach().clone() if storage in known else output.detach())
        known.add(storage)
    return found


class _Operator:
    """A kind of call as an operator, and as another one its backward.

    Args:
        name: of the module's class.
        call: what is called.
        trial: of one such call.
        count: how many operands it has.
    """

    def __init__(self, name: str, call: _Call, trial: _Trial, count: int) -> None:
        self._call, self._first = call, trial
        self._trials: dict[tuple[_Meta, ...], _Trial] = {}
        name = f"placed::{name}_{next(_numbers)}"
        taken = [*(["seed"] if trial.drew else []), *[f"a{i}" for i in range(count)]]
        schema = _schema(name, taken, len(trial.outputs))
        self._forward = register_operator(schema, kernel=self._run, fake=self._like_outputs)
        if trial.needing:
            gradients = [f"g{i}" for i in trial.needing]
            schema = _schema(f"{name}_backward", [*gradients, *taken], len(trial.gradients))
            self._backward = register_operator(schema, kernel=self._run_back, fake=self._like_gradients)
            torch.library.register_autograd(name, self._derive, setup_context=_keep)

    def __call__(self, operands: Sequence[Tensor], trial: _Trial) -> Any:
        """What the module returns, in a capture.

        Raises:
            CaptureError: what it returns depends on sizes in other ways than its sizes.
        """
        if trial.traits != self._first.traits:
            raise CaptureError("what a module returns depends on sizes", fix="give batches of one size")
        self._trials[tuple(map(_Meta.of, operands))] = trial
        seed = [torch.randint(_SEEDS, (), device=operands[0].device)] if trial.drew else []
        found = self._forward(*seed, *operands)
        tensors = [found] if isinstance(found, Tensor) else found
        given = iter([t if i in trial.needing else t.detach() for i, t in enumerate(tensors)])
        return pytree.tree_unflatten([next(given) if leaf is _TENSOR else leaf for leaf in trial.leaves], trial.spec)

    def _trial(self, operands: Sequence[Tensor]) -> _Trial:
        key = tuple(map(_Meta.of, operands))
        if key not in self._trials:
            self._trials[key] = _tried_apart(self._call, operands)
        return self._trials[key]

    def _like_outputs(self, *given: Tensor) -> Any:
        operands = self._taken(given)[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).outputs])

    def _like_gradients(self, *given: Tensor) -> Any:
        operands = self._taken(given[len(self._first.needing) :])[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).gradients.values()])

    def _run(self, *given: Tensor) -> Any:
        """The kernel of the forward."""
        seed, operands = self._taken(given)
        trial = self._trial(operands)
        with torch.set_grad_enabled(bool(self._call.graded)):  # kernels may be others without
            inner = self._call.leaves(operands)
            leaves = self._returned(inner, seed)
        outputs = _apart(leaves, inner)
        return _one_or_all([meta.laid_out(t) for meta, t in zip(trial.outputs, outputs, strict=True)])

    def _run_back(self, *given: Tensor) -> Any:
        """The kernel of the backward."""
        count = len(self._first.needing)
        seed, operands = self._taken(given[count:])
        trial = self._trial(operands)
        with torch.enable_grad():
            inner = self._call.leaves(operands)
            outputs = self._returned(inner, seed)
            found = _gradients(self._call, inner, [outputs[i] for i in self._first.needing], given[:count])
        by_position = dict(zip(self._call.graded, found, strict=True))
        return _one_or_all(
            [
                meta.empty(operands[i].device).zero_() if (t := by_position[i]) is None else meta.laid_out(t)
                for i, meta in trial.gradients.items()
            ]
        )

    def _returned(self, operands: Sequence[Tensor], seed: Tensor | None) -> list[Tensor]:
        """The tensors that the module returns.

        Raises:
            RuntimeError: it overwrites what it is given, or returns something else than in its trial.
        """
        before = [t._version for t in operands]
        leaves, _ = self._call(operands, seed)
        if [t._version for t in operands] != before:
            raise RuntimeError("it overwrites an argument or a buffer")
        plain = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if repr(plain) != repr(list(self._first.leaves)):
            raise RuntimeError("it returns other things than before that are no tensors")
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _taken(self, given: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        return (given[0], given[1:]) if self._first.drew else (None, given)

    def _derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd calls in a capture."""
        operands = ctx.saved_tensors
        seed, own = self._taken(operands)
        trial = self._trial(own)
        wanted = [
            own[0].new_zeros(meta.shape, dtype=meta.dtype) if grads[i] is None else grads[i]
            for i, meta in enumerate(trial.outputs)
            if i in trial.needing
        ]
        found = self._backward(*wanted, *operands)
        made = dict(zip(trial.gradients, [found] if isinstance(found, Tensor) else found, strict=True))
        return (*([] if seed is None else [None]), *[made.get(i) for i in range(len(own))])


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _schema(name: str, taken: Sequence[str], count: int) -> str:
    operands = ", ".join([f"Tensor {operand}" for operand in taken])
    results = ", ".join(["Tensor"] * count)
    return f"{name}({operands}) -> {results if count == 1 else f'({results})'}"


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
