"""The plans of one kind of call: captured, placed, split, and run as one node of autograd."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.passes import Halves, emit, split_backward
from graphir.runtime import Function
from graphir.runtime.interface.scatter import Scatter
from graphir.runtime.interface.witness import witness_of

from ...analysis.certify import Certificate, certify
from ...capturing.intake.state import read_state
from ...capturing.seeded import seeded
from ...capturing.witness import StepWitness
from ...errors import CaptureError, RunError
from ...ir.blob import bound_layout
from ...ir.plan import Plan
from ...ir.program import Program
from ...ir.size import Dims
from ...ir.structure import read_structure
from ...parallel.again import Earlier, is_plain, requiring_gradients
from ...parallel.errors import ReplicationRuntimeError
from ...parallel.lent_state import LentState
from ..plan_cache import ModuleGuard
from .across import across
from .call import PlacedCall
from .captured import PlacedOutput, each_once, programs_of
from .eager import EagerParts
from .homes import Homes
from .own_code import BACKWARDS, NAMESPACE, Done, Graphs, storages, unhooked

__all__ = ["Failed", "PlacedPlans"]


class Failed(Exception):
    """A forward plan has failed.

    Attributes:
        plans: that have failed.
        error: how.
        step: what its seeds were mixed of.
        done: what modules' own code has done before.
    """

    def __init__(self, plans: PlacedPlans, error: RunError, step: int, done: Sequence[Done]) -> None:
        super().__init__(error.what)
        self.plans, self.error, self.step, self.done = plans, error, step, done


class _Ran(NamedTuple):
    """A forward that has run.

    Attributes:
        call: what was given.
        dims: of the plans.
        step: what seeds were mixed of.
        before: what the model's tensors that the forward overwrites were.
        graphs: what modules' own code has left for the backward.
    """

    call: PlacedCall
    dims: Dims
    step: int
    before: Sequence[Tensor]
    graphs: Graphs


class PlacedPlans:
    """A forward plan, and a backward plan where the call has a backward.

    Args:
        eager: the parts of the model that no capture covers.
        homes: places its programs.
        options: of a capture.
        call: of this kind.
        wanted: the positions of the outputs whose gradients the backward takes, among the leaves of all; None: all that
            need one, or the scalars among these.
        guard: of the model as it is.
        lock: of the model's calls.
        told: called in each backward with the positions of the outputs for which gradients came.

    Attributes:
        wanted: the positions of the outputs whose gradients the backward takes.
        certificate: that the placed program computes what the captured one does.
        plans: that of the forward, and that of the backward if there is one.
        consumed: the saved values that nobody but a call has.
        overwritten: the model's tensors that the forward overwrites, by name: a call keeps what they were.
        changed: what of the model the captured call changes, as :attr:`.Witness.changed` says it.

    Raises:
        GraphirError: the model cannot be captured so, or plans cannot be made of it.
    """

    def __init__(
        self,
        eager: EagerParts,
        homes: Homes,
        options: Mapping[str, Any],
        call: PlacedCall,
        wanted: tuple[int, ...] | None,
        guard: ModuleGuard,
        lock: AbstractContextManager[Any],
        told: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._eager, twin = eager, eager.model
        self._shape = PlacedOutput()
        captured, whole = programs_of(eager, options, call, wanted, self._shape)
        needing = each_once(whole) if whole.interface.differentiable else ()
        differentiable = set(whole.interface.differentiable)
        assert isinstance(captured.witness, StepWitness)  # it was captured here
        self.wanted = captured.interface.differentiable
        self.changed, lent = captured.witness.changed, captured.witness.lend()
        program = homes.placed(captured)
        self.certificate: Certificate = certify(captured, program)
        program = program.with_(state={})
        entries = {entry.name: entry.tensor for entry in read_state(twin, hooked=True).tensors}
        halves = split_backward(program) if needing else None
        forward = program if halves is None else halves.forward
        parts = [forward] if halves is None else [halves.forward, halves.backward]
        self._state = LentState({**lent, **entries}, captured.state, parts, homes.binding)
        self.overwritten = self._state.written.intersection(entries)
        self.plans: tuple[Plan, ...] = (emit(forward),)
        self._forward = Function(self.plans[0], self._state.tensors, homes.binding)
        self._scatter = Scatter(forward, self._forward.places, witness=witness_of(forward, forward))
        self._random = any(op.seed is not None for op in program.step.ops)
        self._own_code = any(op.type.startswith(f"{NAMESPACE}.") for op in program.step.ops)
        shared = _shared_with_own_code(captured) if self._own_code else set()
        self._shared = storages([tensor for name, tensor in {**lent, **entries}.items() if name in shared])
        fetches = forward.interface.fetches
        returned = list(dict.fromkeys([str(fetch.blob) for fetch in fetches if fetch.blob is not None]))
        if not returned:
            raise CaptureError("the model returns no tensor")
        self._returned = returned
        self._leaves = [(f.value, None if f.blob is None else returned.index(f.blob)) for f in fetches]
        graded = {i for position, (_, i) in enumerate(self._leaves) if position in differentiable}
        self._stopped = [k for k, (_, i) in enumerate(self._leaves) if i in graded and k not in differentiable]
        blobs = forward.step.blobs
        external = {blobs[name].storage for name in forward.step.external_inputs}
        self._copied = [blobs[name].storage in external for name in returned]
        self.consumed: tuple[str, ...] = ()
        self._node: _Backward | None = None
        if halves is not None:
            handed = {blobs[name].storage for name in returned}
            made = [name for name in halves.saved if name in forward.step.external_outputs]
            self.consumed = tuple([name for name in made if name not in handed])
            plan = emit(halves.backward)
            self.plans = (*self.plans, plan)
            function = Function(plan, self._state.tensors, homes.binding, consumed=self.consumed)
            of_leaf = [i for _, i in self._leaves]
            kept = {n: t for n, t in {**lent, **entries}.items() if n not in self._state.written}
            kept = {n: t for n, t in kept.items() if not t.is_inference()}
            read = _numbers_read(halves.backward)
            again = list(kept.values())
            if self._own_code:
                again += [tensor for tensor in guard.plain if not tensor.is_inference()]
            self._node = _Backward(
                twin,
                halves,
                function,
                [name for name in halves.saved if name in read and name not in self.consumed],
                [name for name in halves.saved if name not in read or name in self.consumed],
                [i for i, name in enumerate(kept) if name in read],
                {name: entries[name] for name in whole.interface.gradients},
                of_leaf,
                needing,
                [str(feed.blob) for feed in forward.interface.feeds],
                call.graded,
                Earlier(twin, guard, self._state.overwritten, again, "the model"),
                eager if self._own_code else None,
                lock,
                self._random,
                told,
            )

    def returned(self) -> Counter[str]:
        """By device, the bytes that the model returns and the backward does not read: the caller has them meanwhile."""
        forward, backward = self.plans
        blobs, read = forward.step.blobs, set(backward.step.external_inputs)
        storages = {blobs[name].storage for name in self._returned} - read
        found = Counter[str]()
        for name in storages:
            found[str(blobs[name].device)] += blobs[name].nbytes(forward.dims)
        return found

    def __call__(self, call: PlacedCall) -> Any:
        """What the model returns.

        Raises:
            CoverageError: the plans do not cover the call's sizes.
            Failed: an operator failed.
        """
        dims, given = self._scatter.split(call.args, dict(call.kwargs))
        # As bytes: a tensor would be memory that no prediction counts.
        drawn = torch.get_rng_state().numpy().tobytes() if self._random or self._own_code else None
        try:
            step = int(torch.randint(2**62, ())) if self._random else 0
            run = partial(self._run, call, dims, given, step)
            if self._node is None:
                outputs: Sequence[Tensor] = self._outputs(run()[1])
            else:
                outputs = _Node.apply(self, run, *self._node.params.values(), *call.tensors)  # type: ignore[attr-defined]
        except Failed as e:
            if drawn is not None and not e.done:  # the model's own code draws from where this has begun
                torch.set_rng_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))
            raise
        leaves: list[Any] = [value if i is None else outputs[i] for value, i in self._leaves]
        for position in self._stopped:
            leaves[position] = leaves[position].detach()
        return self._shape.whole(leaves)

    def _run(self, call: PlacedCall, dims: Dims, given: Sequence[Tensor], step: int) -> tuple[_Ran, dict[str, Tensor]]:
        """Run the forward plan; what it was given and has returned, by name."""
        self._state.broadcast()
        if self._own_code:
            self._eager.lend(storages(given) | self._shared)
        try:
            with self._state.restored_if_it_fails() as before:
                outputs = self._forward(dims, given, step)
        except RunError as e:
            raise Failed(self, e, step, self._eager.taken().done) from None
        except BaseException:  # Ctrl-C: nobody goes on from what own code has done
            self._eager.taken()
            raise
        graphs = self._eager.taken()
        graphs.done.clear()
        values = {
            **dict(zip(self._scatter.names, given, strict=True)),
            **dict(zip(self._forward.outputs, outputs, strict=True)),
        }
        return _Ran(call, dims, step, before, graphs), values

    def go_on(self, failed: Failed, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the model returns by its own code where a plan has *failed*. Modules whose own code has run there do not
        run again, and random numbers are those of the plan."""
        if not failed.done:
            with across(self._eager.model):
                return self._eager.model(*args, **kwargs)
        drawn = seeded(failed.step) if self._random else contextlib.nullcontext()
        with across(self._eager.model), drawn, self._eager.going_on(failed.done):
            return self._eager.model(*args, **kwargs)

    def _outputs(self, values: Mapping[str, Tensor]) -> list[Tensor]:
        """What the model returns of its tensors; those that are the caller's or the model's own are copied."""
        found = [values[name] for name in self._returned]
        return [t.clone() if copied else _alias(t) for t, copied in zip(found, self._copied, strict=True)]


class _Backward:
    """A backward plan, and what the node gives it and takes from it.

    Args:
        twin: the model as its own class has it.
        halves: the programs.
        function: runs the backward.
        visible: the saved values that others may overwrite.
        hidden: the others: those that nobody has but the call, and those whose numbers the backward does not read.
        checked: which of the model's own tensors, as *earlier* has them, the backward reads.
        params: the parameters that need a gradient, by name.
        of_leaf: of each leaf that the model returns, its number among the tensors that it returns.
        needing: the positions of the leaves that need a gradient.
        feeds: of each leaf that the model is given, the blob.
        graded: the positions of those that need a gradient.
        earlier: the model as it was, to run once more.
        parts: modules of the model that run their own code once more in the plan, too; None without any.
        lock: held meanwhile: no other thread captures the model then.
        random: whether the model draws.
        told: called in each backward with the positions of the leaves for which gradients came.
    """

    def __init__(
        self,
        twin: torch.nn.Module,
        halves: Halves,
        function: Function,
        visible: Sequence[str],
        hidden: Sequence[str],
        checked: Sequence[int],
        params: Mapping[str, Tensor],
        of_leaf: Sequence[int | None],
        needing: Sequence[int],
        feeds: Sequence[str],
        graded: Sequence[int],
        earlier: Earlier,
        parts: EagerParts | None,
        lock: AbstractContextManager[Any],
        random: bool,
        told: Callable[[tuple[int, ...]], None],
    ) -> None:
        self._twin, self._function, self._told = twin, function, told
        self._earlier, self._parts, self._lock, self._random = earlier, parts, lock, random
        self.visible, self._hidden, self._checked = visible, hidden, checked
        backward: Program = halves.backward
        self._blobs = backward.step.blobs
        slots = [str(slot.blob) for slot in backward.interface.feeds]
        self._slots = dict(zip(slots, [of_leaf[i] for i in halves.outputs], strict=True))
        self._expected = sorted({i for i in self._slots.values() if i is not None})
        leaf_of = {number: leaf for leaf, number in reversed(list(enumerate(of_leaf))) if number is not None}
        self._leaf_of = leaf_of
        self.differentiable = {of_leaf[i] for i in needing}
        gradients = backward.interface.gradients
        self.params = params
        keys = read_structure(str(backward.interface.results)).keys
        of_inputs = {key: str(f.blob) for key, f in zip(keys, backward.interface.fetches, strict=True)}
        at = {name: i for i, name in enumerate(function.outputs)}
        results = [*[gradients.get(name, "") for name in params], *[of_inputs.get(feeds[i], "") for i in graded]]
        self._results = [at.get(name) for name in results]
        order = {name: i for i, name in enumerate((*visible, *hidden, *slots))}
        self._order = [order[name] for name in function.inputs]
        self._given = [(i, self._blobs[slot]) for slot, i in self._slots.items() if i is not None]
        self._sized: tuple[Dims, Sequence[tuple[tuple[int, ...], tuple[int, ...]]]] | None = None

    def keep(self, ctx: Any, ran: _Ran, values: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> None:
        """Keep what the backward reads: what others may overwrite by torch, which says so then."""
        # An output that was a view of something that is saved has a version of its own.
        memory = {values[name].untyped_storage()._cdata for name in self.visible}
        aliases = [t.detach() for t in outputs if t.untyped_storage()._cdata in memory]
        ctx.aliases, ctx.written = aliases, [t._version for t in aliases]
        ctx.save_for_backward(*[values[name] for name in self.visible])
        ctx.hidden = [values[name] for name in self._hidden]
        ctx.versions, ctx.given = self._earlier.versions(), ran.call.versions()
        ctx.ran = ran

    def __call__(self, ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of :attr:`params`, in their order, and of the call's tensors."""
        if ctx.ran is None:
            _raise_freed()
        came = [i for i, grad in enumerate(grads) if grad is not None]
        given = [grads[i] for i in self._expected]
        saved = ctx.saved_tensors  # raises where the graph was freed
        self._told(tuple([self._leaf_of[i] for i in came]))
        if came == self._expected and not torch.is_grad_enabled() and all(map(is_plain, given)):
            found = self._planned(ctx, saved, grads)
        else:
            with self._lock:
                found = list(self._once_more(ctx, came, grads))
        if not _keeps_graph():
            ctx.ran, ctx.hidden, ctx.aliases = None, None, ()
        return found

    def _planned(self, ctx: Any, saved: Sequence[Tensor], grads: Sequence[Any]) -> list[Tensor | None]:
        ran: _Ran = ctx.ran
        if ctx.hidden is None:
            _raise_freed()
        now = self._earlier.versions()
        if now != ctx.versions and any(now[i] != ctx.versions[i] for i in self._checked):
            _raise_modified("a parameter or buffer of a placed model that its backward reads")
        if [tensor._version for tensor in ctx.aliases] != ctx.written:
            _raise_modified("an output of a placed model that its backward reads")
        values = [*saved, *ctx.hidden]
        values += [
            _laid_out(grads[i], *layout) for (i, _), layout in zip(self._given, self._layouts(ran.dims), strict=True)
        ]
        inputs: list[Any] = [values[i] for i in self._order]
        del values
        ran.graphs.retained = _keeps_graph()
        if not ran.graphs.retained:
            ctx.hidden = None
        try:
            outputs = self._function(ran.dims, inputs, ran.step)
        except RunError as e:
            if self._parts is not None and e.__cause__ is not None:
                raise e.__cause__ from None  # as the module's own backward raises it
            raise
        made: list[Tensor | None] = [None if i is None else outputs[i] for i in self._results]
        for k, tensor in enumerate(ran.call.tensors, len(self.params)):
            gradient = made[k]
            made[k] = None if gradient is None else gradient.to(tensor.device)
        return made

    def _layouts(self, dims: Dims) -> Sequence[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The shape and strides of each gradient that the plan is given."""
        if self._sized is None or self._sized[0] != dims:
            self._sized = dict(dims), [bound_layout(blob, dims) for _, blob in self._given]
        return self._sized[1]

    def _once_more(self, ctx: Any, came: Sequence[int], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """As :meth:`_again`, where the model is what it was.

        Raises:
            RunError: it is not.
        """
        try:
            return self._again(ctx, came, grads)
        except ReplicationRuntimeError as e:
            own = "; what a module's own code changes in its forward it would change twice" if self._parts else ""
            raise RunError(e.what, where=e.where, fix=e.fix + own) from None

    def _again(self, ctx: Any, came: Sequence[int], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The same by the model's own code, which runs once more, so that gradients have gradients."""
        ran: _Ran = ctx.ran
        create, call, given = torch.is_grad_enabled(), ran.call, [grads[i] for i in came]
        if call.versions() != ctx.given:
            _raise_modified("an argument of a placed model, whose backward runs the model once more")
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        with torch.enable_grad():
            for i in call.graded:  # a gradient of a tensor itself would call the tensor's hooks, as the node's will
                leaves[i] = leaves[i].view_as(leaves[i])
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        wanted = [*self.params.values(), *[leaves[i] for i in call.graded]]
        with requiring_gradients(self.params.values()):
            with torch.enable_grad(), self._earlier.again(ctx.versions, ran.before):
                drawn = seeded(ran.step) if self._random else contextlib.nullcontext()
                own_code = contextlib.nullcontext() if self._parts is None else self._parts.seeded()
                with across(self._twin), drawn, own_code:
                    output = self._twin(*args, **kwargs)
                returned = PlacedOutput().leaves(output)
                outputs = [returned[self._leaf_of[i]] for i in came]
            with unhooked(self.params.values(), outputs):
                return torch.autograd.grad(outputs, wanted, given, create_graph=create, allow_unused=True)


class _Node(torch.autograd.function._SingleLevelFunction):
    """The node: its inputs are the parameters and inputs that need a gradient, its outputs the model's tensors.

    It is no ``torch.autograd.Function``, whose ``apply`` looks at each input for what transforms of ``torch.func`` have
    left: no plan stands for a call in one.
    """

    @staticmethod
    def forward(
        ctx: Any, plans: PlacedPlans, run: Callable[[], tuple[_Ran, dict[str, Tensor]]], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        node, (ran, values) = plans._node, run()
        assert node is not None
        outputs = plans._outputs(values)
        ctx.node = node
        ctx.set_materialize_grads(False)
        if len(node.differentiable) < len(outputs):
            ctx.mark_non_differentiable(*[t for i, t in enumerate(outputs) if i not in node.differentiable])
        node.keep(ctx, ran, values, outputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.node(ctx, grads))


def _shared_with_own_code(program: Program) -> set[str]:
    """The names of the state that a module's own code has, and that something else in the program reads."""
    step = program.step
    readers: dict[str, set[str]] = {}
    for op in step.ops:
        if not op.type.startswith(f"{BACKWARDS}."):
            for name in op.inputs:
                readers.setdefault(step.blobs[name].storage, set()).add(op.type)
    shared = {
        storage
        for storage, types in readers.items()
        if len(types) > 1 and any(type.startswith(f"{NAMESPACE}.") for type in types)
    }
    return {name for name, blob in step.blobs.items() if name in program.state and blob.storage in shared}


def _numbers_read(program: Program) -> set[str]:
    """The blobs whose numbers a backward reads or hands out. Modules' own backwards take the sizes of their operands
    alone, and torch looks after what they have saved."""
    ops = [op for op in program.step.ops if not op.type.startswith(f"{BACKWARDS}.")]
    return {*program.step.external_outputs, *(name for op in ops for name in op.inputs)}


def _alias(tensor: Tensor) -> Tensor:
    """A tensor in the same memory that is no view: autograd takes no write into a view that a node has made."""
    if not tensor._is_view():
        return tensor
    made = tensor.new_empty(0)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def _laid_out(grad: Tensor, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """A gradient with the strides that the plan takes."""
    if grad.stride() == strides:
        return grad
    return grad.new_empty_strided(size, strides).copy_(grad)


def _keeps_graph() -> bool:
    """Whether this backward keeps the graph for another one."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())


def _raise_modified(what: str) -> NoReturn:
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}"
    )


def _raise_freed() -> NoReturn:
    raise RuntimeError(
        "Trying to backward through the graph a second time: saved values of a placed model were freed by the first "
        "backward. Specify retain_graph=True there if you need to backward through it again"
    )
