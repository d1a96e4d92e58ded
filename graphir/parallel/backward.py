"""The backward of a call: one node of autograd over a backward plan, or over eager replicas where that cannot do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.passes import Halves, emit
from graphir.runtime import Function
from graphir.runtime.machine.places import Binding

from ..capturing.seeded import seeded
from ..errors import CaptureError
from ..facade.plan_cache import ModuleGuard
from ..ir.blob import bound_layout
from ..ir.size import Dims
from ..ir.structure import read_structure
from ..replication import HOOKS
from .again import Earlier, is_plain, requiring_gradients
from .apply import apply_replicas
from .calls import ReplicatedCall
from .containers import Containers
from .lent_state import LentState
from .replicas import replicate

__all__ = ["BackwardPlan", "Differentiated", "Ran"]


class Ran(NamedTuple):
    """A forward that has run.

    Attributes:
        call: what was given.
        dims: of the plans.
        step: what seeds were mixed of.
        shares: the replicas' inputs.
        outputs: of the forward plan.
        parts: of each tensor that the module returns, the replicas'.
        gathered: the same, gathered.
        before: what the module's tensors that the forward overwrites were.
        versions: of the module's tensors that the forward does not overwrite, once what the backward reads is kept.
    """

    call: ReplicatedCall
    dims: Dims
    step: int
    shares: Sequence[Tensor]
    outputs: Sequence[Tensor]
    parts: Sequence[Sequence[Tensor]]
    gathered: list[Tensor]
    before: Sequence[Tensor]
    versions: Sequence[int] = ()


class _Cut(NamedTuple):
    """The share of an output's gradient that a replica is given: rows of it, and its layout."""

    start: int
    length: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


class BackwardPlan:
    """A backward plan, and what the node gives it and takes from it.

    Args:
        module: the replicated module.
        dim: along which inputs are split and outputs gathered.
        binding: as a session takes it.
        halves: the programs, the forward's too.
        state: of both plans.
        entries: the module's parameters, buffers and plain tensors, by their blobs' names.
        given: the blobs that the forward plan returns, and those that it was given.
        targets: of each that it was given, the position among the call's leaves, and the replica.
        call: of the kind that the plan is for.
        containers: in what the module returns.
        guard: of the module that was captured.
        told: called in each backward with the positions of the outputs for which gradients came, and whether replicas
            ran once more for it.

    Attributes:
        params: the parameters that need a gradient; those that no replica has used get zeros, as in torch.
        differentiable: positions, among the tensors that the module returns, of those that need a gradient.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        dim: int,
        binding: Binding,
        halves: Halves,
        state: LentState,
        entries: Mapping[str, Tensor],
        given: tuple[Sequence[str], Sequence[str]],
        targets: Sequence[tuple[int, int]],
        call: ReplicatedCall,
        containers: Containers,
        guard: ModuleGuard,
        told: Callable[[tuple[int, ...], bool], None],
    ) -> None:
        backward, first = halves.backward, halves.backward.replicas[0]
        self._module, self._dim, self._told, self._program = module, dim, told, backward
        self._containers = containers
        self._random = any(op.seed is not None for half in halves[:2] for op in half.step.ops)
        self._targets = targets
        self._function = Function(emit(backward), state.tensors, binding)
        outputs, inputs = ({name: i for i, name in enumerate(names)} for names in given)
        self._made = [outputs[name] for name in halves.saved if name in outputs]
        self._shares = [inputs[name] for name in halves.saved if name not in outputs]
        saved = sorted(halves.saved, key=lambda name: name not in outputs)
        slots = [str(slot.blob) for slot in backward.interface.feeds]
        order = {name: i for i, name in enumerate([*saved, *(p + slot for slot in slots for p in backward.replicas)])}
        self._order = [order[name] for name in self._function.inputs]
        leaves = [i for i, fetch in enumerate(halves.forward.interface.fetches) if fetch.blob is not None]
        if not set(halves.outputs) <= set(leaves):
            raise CaptureError("an output that needs a gradient is none of the tensors that the forward hands back")
        self._leaves, self._expected = leaves, [leaves.index(i) for i in halves.outputs]
        self._slots = slots
        self.differentiable = self._expected
        at = {name: i for i, name in enumerate(self._function.outputs)}
        gradients = backward.interface.gradients
        self.params = [entries[name] for name in gradients]
        with_gradients = set(map(id, self.params))
        self._unused = [p for p in module.parameters() if p.requires_grad and id(p) not in with_gradients]
        self.params += self._unused
        self._place = self.params[0].device if self.params else torch.device("cpu")
        self._of_params = [at[backward.blob_of(gradient)] for gradient in gradients.values()]
        feeds = [feed.blob for feed in halves.forward.interface.feeds]
        of_inputs = dict(
            zip(read_structure(str(backward.interface.results)).keys, backward.interface.fetches, strict=True)
        )
        self._of_inputs = [
            [at[p + str(of_inputs[feeds[i]].blob)] for p in backward.replicas] if feeds[i] in of_inputs else []
            for i in call.at
        ]
        read = {name.removeprefix(first) for name in backward.step.external_inputs}
        kept = {name: t for name, t in entries.items() if first + name not in state.written and not t.is_inference()}
        self._checked = [t for name, t in kept.items() if name in read]
        self._earlier = Earlier(module, guard, state.overwritten, list(kept.values()), "the replicas")
        self._cuts: dict[tuple[int, ...], list[list[_Cut]]] = {}

    def expect_of(self, needing: Sequence[int]) -> None:
        """Say which outputs need a gradient, by their positions among all leaves, where the plan takes some."""
        self.differentiable = [self._leaves.index(i) for i in needing]

    def keep(self, ctx: Any, ran: Ran) -> None:
        """Keep what the backward reads; torch frees it, and says where something of it was overwritten meanwhile."""
        key = tuple(ran.dims.values())
        if key not in self._cuts:
            self._cuts[key] = [
                list(self._cut(slot, ran.parts[i], ran.dims))
                for slot, i in zip(self._slots, self._expected, strict=True)
            ]
        made, shares = [ran.outputs[i] for i in self._made], [ran.shares[i] for i in self._shares]
        ctx.save_for_backward(*made, *shares, *self._checked)
        ctx.ran = ran._replace(outputs=(), parts=(), gathered=[], versions=self._earlier.versions())

    def _cut(self, slot: str, parts: Sequence[Tensor], dims: Dims) -> list[_Cut]:
        """How an output's gradient is cut for replicas that returned these *parts* of it."""
        start, cuts = 0, []
        for prefix, part in zip(self._program.replicas, parts, strict=True):
            size, strides = bound_layout(self._program.step.blobs[prefix + slot], dims)
            length = part.shape[self._dim] if part.dim() else 1
            cuts.append(_Cut(start, length, size, strides))
            start += length
        return cuts

    def __call__(self, ran: Ran, saved: Sequence[Tensor], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of :attr:`params` and of the call's tensors."""
        given = [grads[i] for i in self._expected]
        came = [i for i, grad in enumerate(grads) if grad is not None]
        planned = came == self._expected and not torch.is_grad_enabled() and all(map(is_plain, given))
        self._told(tuple([self._leaves[i] for i in came]), not planned)
        return self._planned(ran, saved, given) if planned else self._eagerly(ran, came, grads)

    def _planned(self, ran: Ran, saved: Sequence[Tensor], grads: Sequence[Any]) -> list[Tensor | None]:
        values = list(saved[: len(self._made) + len(self._shares)])
        for grad, cuts in zip(grads, self._cuts[tuple(ran.dims.values())], strict=True):
            values += [_share(grad, self._dim, cut) for cut in cuts]
        outputs = self._function(ran.dims, [values[i] for i in self._order], ran.step)
        found: list[Tensor | None] = [outputs[i] for i in self._of_params]
        found += map(torch.zeros_like, self._unused)
        for (i, *rest), tensor in zip([at or [-1] for at in self._of_inputs], ran.call.tensors, strict=True):
            if i < 0:
                found.append(None)
                continue
            found.append(torch.cat([outputs[part].to(tensor.device) for part in (i, *rest)], self._dim))
        return found

    def _eagerly(self, ran: Ran, came: Sequence[int], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The same by replicas that run once more, so that their gradients have gradients."""
        create = torch.is_grad_enabled()
        wanted, given = [*self.params, *ran.call.tensors], [grads[i] for i in came]
        with requiring_gradients(wanted):
            with torch.enable_grad(), self._earlier.again(ran.versions, ran.before):
                found = self._outputs_again(ran)
                parts = [[tensors[i] for tensors in found] for i in came]
                outputs = [torch.cat(part, self._dim) if part[0].dim() else torch.stack(part) for part in parts]
            made: Sequence[Tensor | None] = torch.autograd.grad(
                outputs, wanted, given, create_graph=create, allow_unused=True
            )
        return [
            torch.zeros_like(tensor) if gradient is None and i < len(self.params) else gradient
            for i, (tensor, gradient) in enumerate(zip(wanted, made, strict=True))
        ]

    def _outputs_again(self, ran: Ran) -> list[list[Tensor]]:
        """What replicas return that run once more as they ran: by replica, the tensors."""

        def call(replica: int, copied: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            with seeded(ran.step, replica) if self._random else contextlib.nullcontext():
                return copied(*args, **kwargs)

        values = dict(zip(self._targets, ran.shares, strict=True))
        shares = ran.call.shares(self._dim, values)
        places = [self._place] * len(shares)
        copies = replicate(self._module, places)
        for module in chain.from_iterable(copied.modules() for copied in copies):
            for name in HOOKS:
                vars(module)[name].clear()  # there was none in the forward
        calls = [partial(call, *numbered) for numbered in enumerate(copies)]
        returned = apply_replicas(calls, shares, [{}] * len(shares), range(len(shares)), places)
        leaves = map(pytree.tree_leaves, map(self._containers.opened, returned))
        return [[leaf for leaf in found if isinstance(leaf, Tensor)] for found in leaves]


def _share(grad: Tensor, dim: int, cut: _Cut) -> Tensor:
    if not cut.size:
        return grad[cut.start].clone()
    share = grad.narrow(dim, cut.start, cut.length)
    return share if share.stride() == cut.strides else share.new_empty_strided(cut.size, cut.strides).copy_(share)


class Differentiated(torch.autograd.Function):
    """The node: its inputs are the parameters and inputs that need a gradient, its outputs the module's tensors."""

    @staticmethod
    def forward(ctx: Any, plan: BackwardPlan, run: Callable[[], Ran], *tensors: Tensor) -> tuple[Tensor, ...]:
        ran = run()
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for i, t in enumerate(ran.gathered) if i not in plan.differentiable])
        plan.keep(ctx, ran)
        return tuple(ran.gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.plan(ctx.ran, ctx.saved_tensors, grads))
