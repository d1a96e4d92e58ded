"""A kind of call of a module's own code as an operator, and as other ones its backwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....capturing.isolate.attributes import AllowedChanges, Attributes
from ....ir.registration import register_operator
from ...plan_cache import ModuleGuard
from ...plan_cache.inventory import is_same
from .call import DRAWN_SEEDS, TENSOR, OwnCall, others_of
from .trial import Meta, Trial, checked, gradients_of, random_states, reached, same_states, tried
from .writes import storages

__all__ = ["NAMESPACE", "OwnCode"]

NAMESPACE: Final = "placed."
"""What the types of such operators begin with."""

_numbers: Final = itertools.count()


def _recorded() -> AbstractContextManager[Any]:
    """While this is active, autograd records: an operator with a gradient is called below autograd."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


class OwnCode:
    """A kind of call as an operator, and as another one its backward.

    Args:
        name: of the module's class.
        call: what is called.
        trial: of one such call.
        count: how many operands it has.
        guard: gives a guard of the module as it is; the operator is there for good, and does not keep the module.

    Attributes:
        double: in whose place of the module trials are made, while the module is captured.
        draws: whether the code draws random numbers.
    """

    def __init__(
        self, name: str, call: OwnCall, trial: Trial, count: int, guard: WeakMethod[Callable[[], ModuleGuard]]
    ) -> None:
        self._call, self._first, self._guard = call, trial, guard
        self.double: torch.nn.Module | None = None
        self.draws = trial.drew
        self._trials: dict[object, Trial] = {}
        self._backwards: dict[tuple[int, ...], Any] = {}
        self._name = f"placed::{name}_{next(_numbers)}"
        self._operands = [*(["seed"] if trial.drew else []), *[f"a{i}" for i in range(count)]]
        schema = _schema(self._name, self._operands, len(trial.outputs))
        self._forward = register_operator(schema, kernel=self._run, fake=self._like_outputs)
        if trial.gradients:
            torch.library.register_autograd(self._name, self._derive, setup_context=_keep)

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
        given = iter([t if i in needing else t.detach() for i, t in enumerate(tensors)])
        return pytree.tree_unflatten([next(given) if leaf is TENSOR else leaf for leaf in trial.leaves], trial.spec)

    def _trial(self, operands: Sequence[Tensor], came: tuple[int, ...] | None = None) -> Trial:
        """The trial of operands of these sizes, with a backward of the outputs for which gradients *came*."""
        came = self._first.needing if came is None else came
        key = tuple(map(Meta.of, operands)), came
        if key not in self._trials:
            double = self.double
            call = self._call if double is None else self._call._replace(module=lambda: double)
            self._trials[key] = tried(call, operands, came)
        return self._trials[key]

    def _like_outputs(self, *given: Tensor) -> Any:
        operands = self._taken(given)[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands).outputs])

    def _like_gradients(self, came: tuple[int, ...], *given: Tensor) -> Any:
        operands = self._taken(given[len(came) :])[1]
        return _one_or_all([meta.empty(operands[0].device) for meta in self._trial(operands, came).gradients.values()])

    def _backward(self, came: tuple[int, ...], trial: Trial) -> Any:
        """The operator of a backward of some outputs."""
        if came not in self._backwards:
            name = f"{self._name}_backward{''.join([f'_{i}' for i in came])}"
            schema = _schema(name, [*[f"g{i}" for i in came], *self._operands], len(trial.gradients))
            self._backwards[came] = register_operator(
                schema, kernel=partial(self._run_back, came), fake=partial(self._like_gradients, came)
            )
        return self._backwards[came]

    def _run(self, *given: Tensor) -> Any:
        """The kernel of the forward."""
        seed, operands = self._taken(given)
        trial = self._trial(operands)
        with _recorded(), torch.set_grad_enabled(self._call.grads):  # kernels may be others without
            outputs = self._returned(self._call.leaves(operands), operands, seed)
        return _one_or_all([meta.laid_out(t.detach()) for meta, t in zip(trial.outputs, outputs, strict=True)])

    def _run_back(self, came: tuple[int, ...], *given: Tensor) -> Any:
        """The kernel of a backward."""
        seed, operands = self._taken(given[len(came) :])
        trial = self._trial(operands, came)
        with _recorded(), torch.enable_grad():
            inner = self._call.leaves(operands)
            outputs = self._returned(inner, operands, seed)
            found = gradients_of(self._call, inner, [outputs[i] for i in came], given[: len(came)])
        made = {i: t for i, t in zip(self._call.graded, found, strict=True) if t is not None}
        if made.keys() != trial.gradients.keys():
            raise RuntimeError(
                "the backward of a module's own code has gradients for other tensors than when it was tried"
            )
        return _one_or_all([meta.laid_out(made[i]) for i, meta in trial.gradients.items()])

    def _returned(self, inner: Sequence[Tensor], operands: Sequence[Tensor], seed: Tensor | None) -> list[Tensor]:
        """The tensors that the module returns.

        Raises:
            RuntimeError: it does, or returns, something else than in its trial. What it has changed is as before.
        """
        first, place = self._first, operands[0].device
        module, guarded, states = self._call.module(), self._guard(), random_states(place)
        if module is None or guarded is None:
            raise RuntimeError("the module is gone")
        guard = guarded()
        plain, attributes = guard.plain, Attributes(module, AllowedChanges(module, ()))
        with attributes.restored_if_it_fails():
            leaves, _ = self._call(inner, seed, plain)
            if not guard.unchanged():
                raise RuntimeError("it changes an attribute of the module, as it did not when it was tried")
        if not same_states(states, place):
            raise RuntimeError("it draws random numbers, as it did not when it was tried")
        if not is_same(others_of(leaves), first.leaves):
            raise RuntimeError("it returns other things that are no tensors than when it was tried")
        outputs = checked(self._call, inner, operands, leaves, storages(plain))
        needing = tuple([i for i, t in enumerate(outputs) if t.requires_grad])
        if self._call.graded and (
            needing != first.needing or reached([outputs[i] for i in needing], inner) != first.reached
        ):
            raise RuntimeError("gradients of it go to other operands than when it was tried")
        return outputs

    def _taken(self, given: Sequence[Tensor]) -> tuple[Tensor | None, Sequence[Tensor]]:
        return (given[0], given[1:]) if self.draws else (None, given)

    def _derive(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """What autograd calls in a capture."""
        operands = ctx.saved_tensors
        seed, own = self._taken(operands)
        came = tuple([i for i in self._first.needing if grads[i] is not None])
        made: Mapping[int, Tensor] = {}
        if came and (trial := self._trial(own, came)).gradients:
            found = self._backward(came, trial)(*[grads[i] for i in came], *operands)
            made = dict(zip(trial.gradients, [found] if isinstance(found, Tensor) else found, strict=True))
        return (*([] if seed is None else [None]), *[made.get(i) for i in range(len(own))])


def _keep(ctx: Any, inputs: Sequence[Tensor], output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _schema(name: str, taken: Sequence[str], count: int) -> str:
    operands = ", ".join([f"Tensor {operand}" for operand in taken])
    results = ", ".join(["Tensor"] * count)
    return f"{name}({operands}) -> {results if count == 1 else f'({results})'}"


def _one_or_all(tensors: Sequence[Tensor]) -> Any:
    return tensors[0] if len(tensors) == 1 else tuple(tensors)
