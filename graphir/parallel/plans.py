"""The plans of one kind of call: captured, split, and run forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.passes import emit, replicate, split_backward
from graphir.runtime import Function
from graphir.runtime.interface.scatter import Scatter
from graphir.runtime.interface.witness import witness_of
from graphir.runtime.machine.places import Binding, places_of

from ..capturing.capture import capture
from ..capturing.intake.state import read_state
from ..capturing.witness import StepWitness
from ..errors import CaptureError
from ..facade.plan_cache import ModuleGuard
from ..ir.device import gpu
from ..ir.names import base_name
from ..ir.program import Program
from ..ir.size import BATCH, size_dims
from ..ir.structure import read_structure, unflatten
from .backward import BackwardPlan, Differentiated, Ran
from .calls import ReplicatedCall
from .containers import Containers
from .gather import gather
from .lent_state import LentState

__all__ = ["Plans", "Replicas"]


class Replicas(NamedTuple):
    """What replicates a module.

    Attributes:
        module: the module.
        devices: the number of a logical device for each replica.
        dim: along which inputs are split and outputs gathered.
        binding: the real device of each logical one.
        output: the real device of the outputs.
        shares: of the batch, by replica.
        allow_changes: attributes that calls may change, as capture takes them.
    """

    module: torch.nn.Module
    devices: tuple[int, ...]
    dim: int
    binding: Binding
    output: torch.device
    shares: tuple[int, ...]
    allow_changes: tuple[str, ...] = ()


class Plans:
    """A forward plan, and a backward plan where the call has a backward.

    Args:
        replicas: what is replicated.
        call: of this kind.
        positions: of the outputs whose gradients the backward takes, among the leaves of all; None: all that need one.
        needing: of the outputs that need a gradient, where *positions* are some of these.
        guard: of the module as it is.
        told: as of :class:`.backward.BackwardPlan`.

    Attributes:
        changed: what of the module the captured call changes, as :attr:`.Witness.changed` says it.
        positions: those of the outputs whose gradients the backward takes; empty where there is none.

    Raises:
        GraphirError: the module cannot be captured so, or plans cannot be made of it.
    """

    def __init__(
        self,
        replicas: Replicas,
        call: ReplicatedCall,
        positions: tuple[int, ...] | None,
        needing: tuple[int, ...] | None,
        guard: ModuleGuard,
        told: Callable[[tuple[int, ...], bool], None],
    ) -> None:
        self.replicas = replicas
        self._containers = Containers()
        captured = _captured(replicas, call, positions, self._containers)
        assert isinstance(captured.witness, StepWitness)  # it was captured here
        self.changed = captured.witness.changed
        self.positions = captured.interface.differentiable
        # Without the copies of the parameters: the plans run on the module's own.
        program = replicate(captured, replicas.devices, reduction="sum").with_(state={})
        on_host = all(place.type == "cpu" for place in places_of(replicas.binding, program.devices).values())
        sums: Literal["first", "spread"] = "spread" if on_host else "first"  # in one memory it is all the same
        halves = split_backward(program, sums) if self.positions else None
        forward = program if halves is None else halves.forward
        entries = dict(captured.witness.lend())
        entries |= {entry.name: entry.tensor for entry in read_state(replicas.module, hooked=True).tensors}
        parts = [forward] if halves is None else [halves.forward, halves.backward]
        self._state = LentState(entries, captured.state, parts, replicas.binding)
        self._forward = Function(emit(forward), self._state.tensors, replicas.binding)
        self._scatter = Scatter(forward, self._forward.places, witness=witness_of(forward, forward))
        self._random = any(op.seed is not None for op in program.step.ops)
        self._fetches = _fetches(forward, self._forward.outputs, replicas.dim)
        self._structure = read_structure(str(forward.interface.results))
        self._backward = None
        if halves is not None:
            self._backward = BackwardPlan(
                replicas.module,
                replicas.dim,
                replicas.binding,
                halves,
                self._state,
                entries,
                (self._forward.outputs, self._scatter.names),
                [(leaf, replica) for leaf, replica, _ in self._scatter.targets],
                call,
                self._containers,
                guard,
                told,
            )
            if needing is not None:
                self._backward.expect_of(needing)

    def __call__(self, call: ReplicatedCall) -> Any:
        """The module's output, gathered.

        Raises:
            CoverageError: the plans do not cover the call's sizes.
            RunError: an operator failed.
        """
        dims, shares = self._scatter.split(call.args, call.kwargs, call.sizes)
        if self._backward is not None:
            # The backward reads them, and the caller may have overwritten its own by then.
            shares = [share.detach().clone() for share in shares]
        step = int(torch.randint(2**62, ())) if self._random else 0

        def run() -> Ran:
            self._state.broadcast()
            with self._state.restored_if_it_fails() as before:
                outputs = self._forward(dims, shares, step)
            parts = [[outputs[i] for i in at] for _, at in self._fetches if at]
            return Ran(call, dims, step, shares, outputs, parts, self._gathered(parts), before)

        if self._backward is None:
            gathered: Sequence[Tensor] = run().gathered
        else:
            params = self._backward.params
            gathered = Differentiated.apply(self._backward, run, *params, *call.tensors)  # type: ignore[no-untyped-call]
        made = iter(gathered)
        leaves = [next(made) if at else value for value, at in self._fetches]
        return self._containers.closed(unflatten(self._structure, iter(leaves)))

    def _gathered(self, parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Each output of the replicas as one tensor."""
        with torch.no_grad():
            return [gather(part, self.replicas.output, self.replicas.dim) for part in parts]


def _captured(
    replicas: Replicas, call: ReplicatedCall, positions: tuple[int, ...] | None, containers: Containers
) -> Program:
    """The program of the first replica's share; it returns the parts of *containers*."""
    args, kwargs = pytree.tree_map_only(Tensor, _leaf, call.shares(replicas.dim)[0])
    needing = torch.is_grad_enabled() and (
        bool(call.tensors) or any(p.requires_grad for p in replicas.module.parameters())
    )
    backward: bool | tuple[int, ...] = needing if positions is None else positions
    places = places_of(replicas.binding, [gpu(device) for device in replicas.devices])
    made = partial(
        capture,
        replicas.module,
        args,
        kwargs=kwargs,
        batch_dims=replicas.dim,
        output=containers.opened,
        allow_changes=replicas.allow_changes,
        target="cuda" if all(place.type == "cuda" for place in places.values()) else "cpu",
    )
    with _casts_not_kept():
        try:
            return made(backward=backward)
        except CaptureError as e:
            if backward is not True or not e.what.startswith("no output of the model needs a gradient"):
                raise
        return made()


@contextlib.contextmanager
def _casts_not_kept() -> Iterator[None]:
    """While this is active, autocast casts a weight each time that it is read, as in a replica.

    Autocast keeps the casts of leaves of autograd. A replica's parameters are copies, which are no leaves. Where a
    parameter is read twice, a replica adds its gradient in single precision, and not in the precision of the casts.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _leaf(share: Tensor) -> Tensor:
    """A share without history; where it has gaps, without these."""
    dense = torch.empty_like(share).copy_(share.detach())
    return dense.requires_grad_(share.requires_grad)


def _fetches(program: Program, outputs: Sequence[str], dim: int) -> list[tuple[Any, list[int]]]:
    """Of each leaf that the module returns, its value, or the positions of the replicas' tensors among *outputs*.

    Raises:
        CaptureError: a leaf is neither a tensor nor None, or cannot be gathered along *dim*; or there are no tensors.
    """
    at = {name: i for i, name in enumerate(outputs)}
    fetches = program.interface.fetches
    if not any(fetch.blob is not None for fetch in fetches):
        raise CaptureError("the module returns no tensor")
    for fetch in fetches:
        if fetch.blob is None and not isinstance(fetch.value, (str, type(None))):
            raise CaptureError(f"the module returns {fetch.value!r}, which cannot be gathered")
        shape = None if fetch.blob is None else program.step.blobs[program.blob_of(fetch.blob)].shape
        if shape is None:
            continue
        if dim and len(shape) <= dim:
            raise CaptureError(f"the module returns a tensor without dimension {dim}, along which to gather it")
        if any(base_name(name) == BATCH for k, size in enumerate(shape) if k != dim for name in size_dims(size)):
            raise CaptureError(f"the module returns a tensor that has rows of the batch not only along dimension {dim}")
    return [
        (_of_each(f.value, program.replicas), [] if f.blob is None else [at[p + f.blob] for p in program.replicas])
        for f in fetches
    ]


def _of_each(value: Any, replicas: Sequence[str]) -> Any:
    """What :func:`gather` makes of a value that each replica returns and that is no tensor."""
    return [value for _ in replicas] if isinstance(value, str) else value
