"""A kind of call of a module's own code as an operator, and as other ones its backwards."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....ir.registration import register_operator
from ....parallel.again import requiring_gradients
from ...plan_cache.inventory import is_same
from .call import DRAWN_SEEDS, TENSOR, NoOperatorError, OwnCall, others_of, storage_of
from .done import Done
from .hooks import unhooked
from .trial import Meta, Trial, checked, reached, tried

__all__ = ["BACKWARDS", "NAMESPACE", "Graphs", "OwnCode"]

NAMESPACE: Final = "placed"
"""Of such operators."""

BACKWARDS: Final = "placed_backward"
"""The namespace of their backwards: of operands these read the sizes alone."""

_OVERWRITES: Final = "leaf Variable that requires grad is being used in an in-place operation"
"""What torch says where code overwrites an argument, which is a leaf here and none in the model."""

_numbers: Final = itertools.count()
_graphs: Final[dict[int, _Graph]] = {}
"""The graphs of all calls whose backwards are still to come."""


def _recorded() -> AbstractContextManager[Any]:
    """While this is active, autograd records: an operator with a gradient is called below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


class _Graph(NamedTuple):
    """What a call leaves for its backward.

    Attributes:
        outputs: its tensors, with autograd's graph.
        graded: the operands that need a gradient, as the code had them.
        graphs: where it is kept.
    """

    outputs: Sequence[Tensor]
    graded: Sequence[Tensor]
    graphs: ref[Graphs]

    @property
    def is_retained(self) -> bool:
        graphs = self.graphs()
        return graphs is not None and graphs.retained


class Graphs:
    """The graphs that calls of modules' own code have made in one run of a plan; they go with this object.

    Attributes:
        retained: whether a backward leaves them for another one.
        done: the calls themselves, until the plan has ended.
        lent: the memory that is not the plan's own: of the caller's tensors, and of the model's that captured parts of
            it read, too.
    """

    def __init__(self) -> None:
        self.lent: Container[int] = ()
        self._keys: list[int] = []
        self.retained = False
        self.done: list[Done] = []

    def keep(self, outputs: Sequence[Tensor], graded: Sequence[Tensor]) -> int:
        """Keep a graph; returns its key."""
        key = next(_numbers)
        _graphs[key] = _Graph(outputs, graded, ref(self))
        self._keys.append(key)
        return key

    def __del__(self) -> None:
        for key in self._keys:
            _graphs.pop(key, None)


class Owner(Protocol):
    """Where a module with own code belongs."""

    def double(self) -> torch.nn.Module:
        """A copy of the module, for trials."""

    def graphs(self) -> Graphs:
        """Takes the graphs of the plan that is running."""


class OwnCode:
    """A kind of call as an operator, and as others its backwards.

    Args:
        name: of the module's class.
        call: what is called.
        trial: of one such call.
        count: how many operands it has.
        owner: of the module; the operator is there for good, and keeps neither.

    Attributes:
        draws: whether the code draws random numbers.
    """

    def __init__(self, name: str, call: OwnCall, trial: Trial, count: int, owner: Owner) -> None:
        self._call, self._first, self._owner = call, trial, ref(owner)
        self.draws = trial.drew
        self._trials: dict[object, Trial] = {}
        self._backwards: dict[tuple[int, ...], Any] = {}
        self._kind, self._name = name, f"{name}_{next(_numbers)}"
        self._operands = [*(["seed"] if trial.drew else []), *[f"a{i}" for i in range(count)]]
        schema = _schema(NAMESPACE, self._name, self._operands, len(trial.outputs) + bool(trial.gradients))
        self._forward = register_operator(schema, kernel=self._run, fake=self._like_outputs)
        if trial.gradients:
            torch.library.register_autograd(f"{NAMESPACE}::{self._name}", self._derive, setup_context=_keep)

    def admit(self, operands: Sequence[Tensor], trial: Trial) -> None:
        """Note a trial of operands that are to come.

        Raises:
            RuntimeError: what the code returns depends on sizes, and not by its sizes alone.
        """
        if not trial.is_like(self._first):
            raise RuntimeError("what it returns depends on sizes, and not by sizes alone")
        self._trials[tuple(map(Meta.of, operands)), self._first.needing] = trial

    def __call__(self, operands: Sequence[Tensor]) -> Any:
        """What the module returns, in a capture; a trial of the operands was admitted."""
        trial = self._trial(operands)
        seed = [torch.randint(DRAWN_SEEDS, (), device=operands[0].device)] if self.draws else []
        found = self._forward(*seed, *operands)
        tensors = [found] if isinstance(found, Tensor) else found
        needing = trial.needing if trial.gradients else ()
        given = iter([t if i in needing else t.detach() for i, t in enumerate(tensors[: len(trial.outputs)])])
        return pytree.tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in trial.leaves], trial.spec)

    def _trial(self, operands: Sequence[Tensor], came: tuple[int, ...] | None = None) -> Trial:
        """The trial of operands of these sizes, with a backward of the outputs for which gradients *came*."""
        came = self._first.needing if came is None else came
        key = tuple(map(Meta.of, operands)), came
        if key not in self._trials:
            self._trials[key] = tried(self._call, self._of().double(), operands, came)
        return self._trials[key]

    def _of(self) -> Owner:
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the module is gone")
        return owner

    def _like_outputs(self, *given: Tensor) -> Any:
        operands = self._taken(given)
        trial, place = self._trial(operands), operands[0].device
        outputs = [meta.empty(place) for meta in trial.outputs]
        return _one_or_all([*outputs, torch.empty((), dtype=torch.int64, device=place)] if trial.gradients else outputs)

    def _like_gradients(self, came: tuple[int, ...], *given: Tensor) -> Any:
        operands = given[len(came) + 1 :]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands, came).gradients.values()])

    def _backward(self, came: tuple[int, ...], trial: Trial) -> Any:
        """The operator of a backward of some outputs."""
        if came not in self._backwards:
            name = f"{self._name}{''.join([f'_{i}' for i in came])}"
            given = [*[f"g{i}" for i in came], "graph", *self._operands[self.draws :]]
            self._backwards[came] = register_operator(
                _schema(BACKWARDS, name, given, len(trial.gradients)),
                kernel=partial(self._run_back, came),
                fake=partial(self._like_gradients, came),
            )
        return self._backwards[came]

    def _run(self, *given: Tensor) -> Any:
        """The kernel of the forward."""
        operands = self._taken(given)
        call, first, place = self._call, self._first, operands[0].device
        trial, module = self._trial(operands), call.module()
        if module is None:
            raise RuntimeError("the module is gone")
        graphs = self._of().graphs()
        arguments, state = call.leaves(operands, graphs.lent), [*module.parameters(), *module.buffers()]
        known = [*arguments, *state]
        for i in call.graded:
            if i < call.given:  # the graph of another tensor than the outputs would end here
                arguments[i].register_post_accumulate_grad_hook(partial(_raise_elsewhere, self._kind))
        before = list(map(_version, known))
        done = Done(call, known)
        graphs.done.append(done)
        try:
            with _recorded(), torch.set_grad_enabled(call.grads):  # kernels may be others without
                leaves, _ = call(module, arguments, given[0] if self.draws else None, done.returned)
        except NoOperatorError as e:
            done.error = self._unlike(str(e))
            raise done.error from None
        except Exception as e:
            if _OVERWRITES in str(e):  # in the model itself, it may
                graphs.done.remove(done)
            done.error = e
            raise
        written = [i for i, tensor in enumerate(known) if _version(tensor) != before[i]]
        if any(storage_of(known[i]) in graphs.lent for i in written if i >= call.given):
            done.error = self._unlike("it overwrites a parameter or buffer that other parts of the model read")
            raise done.error
        overwritten = {i: arguments[i].detach() for i in written if i < call.given}
        if overwritten:
            done.overwrote(overwritten)
            raise RuntimeError("it overwrites an argument, which it did not when it was tried")
        if not is_same(others_of(leaves), first.leaves):
            raise RuntimeError("it returns other things that are no tensors than when it was tried")
        outputs = checked(known, leaves, set())
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        if call.graded and (needing != first.needing or reached([outputs[i] for i in needing], known) != first.reached):
            raise RuntimeError("gradients of it go to other operands than when it was tried")
        made = [meta.laid_out(t.detach()) for meta, t in zip(trial.outputs, outputs, strict=True)]
        if trial.gradients:
            key = graphs.keep(outputs, [known[i] for i in call.graded])
            made.append(torch.tensor(key, device=place))
        return _one_or_all(made)

    def _run_back(self, came: tuple[int, ...], *given: Tensor) -> Any:
        """The kernel of a backward."""
        graph, operands = _graphs[int(given[len(came)])], given[len(came) + 1 :]
        trial = self._trial(operands, came)
        outputs = [graph.outputs[i] for i in came]
        kept = requiring_gradients([t for t in graph.graded if t.is_leaf])
        with _recorded(), torch.enable_grad(), kept, unhooked(graph.graded, outputs):
            found = torch.autograd.grad(
                outputs, graph.graded, given[: len(came)], retain_graph=graph.is_retained, allow_unused=True
            )
        made = {i: t for i, t in zip(self._call.graded, found, strict=True) if t is not None}
        if made.keys() != trial.gradients.keys():
            raise RuntimeError(
                "the backward of a module's own code has gradients for other tensors than when it was tried"
            )
        return _one_or_all([meta.laid_out(made[i]) for i, meta in trial.gradients.items()])

    def _unlike(self, why: str) -> RuntimeError:
        """The error of a call whose effects are no operator's."""
        return RuntimeError(
            f"the own code of {self._kind!r} in a placed model does what it did not when it was tried: {why}; let the "
            "module return what it changes, or place the modules around it, each by itself"
        )

    def _taken(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        """The operands, without a seed."""
        return given[self.draws :]

    def _derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd calls in a capture."""
        graph, *operands = ctx.saved_tensors
        own = self._taken(operands)
        came = tuple([i for i in self._first.needing if grads[i] is not None])
        made: Mapping[int, Tensor] = {}
        if came and (trial := self._trial(own, came)).gradients:
            found = self._backward(came, trial)(*[grads[i] for i in came], graph, *own)
            made = dict(zip(trial.gradients, [found] if isinstance(found, Tensor) else found, strict=True))
        return (*([None] if self.draws else []), *[made.get(i) for i in range(len(own))])


def _version(tensor: Tensor) -> int:
    """The version of a tensor; 0 where it has none."""
    return 0 if tensor.is_inference() else tensor._version


def _raise_elsewhere(kind: str, _: Tensor) -> NoReturn:
    raise RuntimeError(
        f"the own code of {kind!r} in a placed model has left a tensor with a graph elsewhere than in its outputs, as "
        "it did not when it was tried, and no gradient goes from there to what comes before the module; let the module "
        "return the tensor"
    )


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Sequence[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[-1])
    ctx.save_for_backward(output[-1], *inputs)


def _schema(namespace: str, name: str, taken: Sequence[str], count: int) -> str:
    operands = ", ".join([f"Tensor {operand}" for operand in taken])
    results = ", ".join(["Tensor"] * count)
    return f"{namespace}::{name}({operands}) -> {results if count == 1 else f'({results})'}"


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
