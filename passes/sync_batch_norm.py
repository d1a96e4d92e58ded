"""Batch norms whose statistics are those of the whole batch, over all replicas.

Each training batch norm of a chosen module becomes, in every replica::

    forward    gpu_0/conv ─▶ batch_norm_moments ─▶ AllReduce ─▶ synchronised_batch_norm ─▶ gpu_0/bn
    backward   gpu_0/bn_grad ─▶ native_batch_norm_backward: gradients of weight and bias ─▶ AllReduce
               ─▶ synchronised_batch_norm_backward ─▶ gpu_0/conv_grad

The forward keeps its results, running statistics included, which are so the same on all replicas. The gradients of
weight and bias are each replica's own, as captured, and reduced with all others. What they are reduced to here, before
the optimizer's reduction, are the two sums over the batch that the gradient of the input needs.

Each replica's gradients are those of its own loss, which counts by its share s_r of the batch. So what the
others' rows contribute is weighted: with the weighted mean of the sums, times sum(s) / s_r, the gradient of an input
row, times s_r / sum(s), is that of one device which has the whole batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator
from torch import nn

from graphir.analysis.values import Numbering, Run
from graphir.capturing.record.single_values import REFUSAL, single_values_allowed
from graphir.errors import GraphirError, PassError, ReplicationError, counted
from graphir.ir.blob import STATE_ROLES
from graphir.ir.guard import Guard
from graphir.ir.names import base_name, prefix_of
from graphir.ir.operator import Arg, Operator
from graphir.ir.opset import signature
from graphir.ir.optypes.table import operator_type
from graphir.ir.program import Program
from graphir.ir.size import BATCH, Polynomial, Size, add
from graphir.ir.text import operator_text

from .base import Pass, build, register
from .callbacks import visit
from .module_patterns import claims
from .replica import Replica
from .standing import Order

__all__ = ["SyncBatchNorm", "sync_batch_norm", "synchronised_as_asked"]

_FORWARD: Final = "aten.native_batch_norm.default"
_CUMULATIVE: Final = "graphir.cumulative_batch_norm"
_PARAMETERS: Final = ("weight", "bias", "running_mean", "running_var", "batches")
_SYNCHRONISED: Final = "graphir.synchronised_batch_norm"
_BACKWARD: Final = "aten.native_batch_norm_backward.default"
_ALL: Final = "**"


@register
class SyncBatchNorm(Pass):
    """See :func:`sync_batch_norm`."""

    name: ClassVar[str] = "sync_batch_norm"
    only_behind: ClassVar[Order] = {"replicated": "statistics are put together over replicas"}

    modules: Annotated[
        tuple[str, ...], BeforeValidator(lambda given: (given,) if isinstance(given, str) else given)
    ] = (_ALL,)

    def rewrite(self, program: Program) -> Program:
        named = [pattern for pattern in self.modules if pattern != _ALL or program.module_paths]
        paths = dict.fromkeys(claims(program, named))
        if _ALL in self.modules:
            paths[""] = None  # a model that calls batch_norm itself
        if len(program.replicas) == 1:
            return program
        synchronised = visit(program, list(paths), _Synchronised(program), self.name)
        return synchronised.with_(covers=synchronised.covers.with_guards(_guards(synchronised)))


def sync_batch_norm(program: Program, modules: str | Sequence[str] = _ALL) -> Program:
    """Let training batch norms of a replicated program normalise by the statistics of the whole batch.

    Forward and backward then compute what one device with the whole batch would, up to rounding, and running statistics
    are equal on all replicas. Each replica counts by the rows that it has, one is enough. Batch norms in evaluation and
    instance norms stay as they are, and so do statistics that are synchronised already.

    Args:
        program: replicated, or sharded.
        modules: patterns over module paths, as :func:`shift_modules` takes them; all by default.

    Raises:
        PassError: the program is not replicated, a pattern names no module, or a batch norm is by another operator than
            torch's own. Nothing has changed then.
    """
    return build(SyncBatchNorm, modules=modules)(program)


def synchronised_as_asked(spread: Program, captured: Program) -> Program:
    """A program over several replicas, in which the batch norms that ask for it are synchronised; the history says so.

    They have the attribute ``statistics_over_replicas``, and it is true. Those that do not run and have no state are
    left out.
    """
    found = [] if captured.module is None else captured.module.named_modules()
    asking = [path for path, module in found if getattr(module, "statistics_over_replicas", False) is True]
    known = captured.module_paths
    modules = [path or _ALL for path in asking if not path or path in known]
    return build(SyncBatchNorm, modules=modules).recorded(spread) if modules else spread


class _Synchronised:
    """The callback.

    Attributes:
        moments: of each converted forward, by the mean that it saves, the moments over all replicas.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.moments: dict[str, str] = {}

    @cached_property
    def saved(self) -> Mapping[int, str]:
        """The mean that the forward of a backward in training saves; by the id of the backward.

        Other passes may have put copies, views and repeated forwards between the two. The mean that a backward reads
        has the value of the one that its forward saved, whatever its name.
        """
        found: dict[int, str] = {}
        means: dict[int, str] = {}
        step, run = self.program.step, Run(Numbering(), self.program)
        run.declare(step)
        run.begin(step.external_inputs, 0)
        for op in step.ops:
            if op.type == _BACKWARD and op.args["train"] and (mean := means.get(run.read(_by_name(op)["save_mean"]))):
                found[id(op)] = mean
            run.execute(op, 0)
            if operator_type(op.type).batch_norm and op.args.get("training", True):
                means[run.read(op.outputs[1])] = op.outputs[1]
        return found

    def __call__(self, ctx: object, copy_id: int, replica: Replica) -> None:
        for op in replica.ops:
            if op.type == _BACKWARD:
                self.backward(op, replica)
            elif _is_apart(op):
                self.forward(op, replica)

    def forward(self, op: Operator, replica: Replica) -> None:
        if not self.is_over_batch(op) or not self.is_everywhere(op):
            return
        if op.type not in (_FORWARD, _CUMULATIVE):
            raise PassError(
                f"sync_batch_norm does not convert {op.type}",
                at=operator_text(op, self.program.step),
                where=f"module {op.module!r}",
                fix="normalise by torch.nn.functional.batch_norm, or leave the module out",
            )
        given = _by_name(op)
        own = {"participant": replica.copy_id, "participants": replica.copies}
        moments = replica.insert_before(op, "graphir.batch_norm_moments", [given["input"]], own)
        total = replica.all_reduce(moments, moments.outputs[0])
        inputs = [given["input"], total, *[given.get(n) for n in _PARAMETERS]]
        args = {"momentum": op.args.get("momentum", 0.0), "eps": op.args["eps"]}
        new = replica.replace(op, _SYNCHRONISED, inputs, args)
        self.moments[new.outputs[1]] = total

    def backward(self, op: Operator, replica: Replica) -> None:
        mask = op.args.get("output_mask")
        if not op.args["train"] or not isinstance(mask, tuple) or not mask[0]:
            return  # without a gradient of the input, the two others follow from what the forward saved
        if id(op) not in self.saved:
            raise PassError(
                "sync_batch_norm finds no forward of this backward: no batch norm saves the mean that it reads",
                at=operator_text(op, self.program.step),
                where=f"module {op.module!r}",
                fix="run sync_batch_norm directly after replicate or shard",
            )
        moments = self.moments.get(self.saved[id(op)])
        if moments is None:
            return  # the forward is none of those that were to be converted
        given = _by_name(op)
        made = list(_results(op, mask))
        new = [
            replica.fresh(f"{replica.prefix}{replica.path or 'model'}.{what}")
            for what in ("backward_products", "backward_sum")
        ]
        names = [None, *[name or own for name, own in zip(made[1:], new, strict=True)]]
        inputs = [given.get(param.name) for param in signature(_BACKWARD).tensors]
        args: dict[str, Arg] = {**op.args, "output_mask": (False, True, True)}
        sums = replica.replace(op, _BACKWARD, inputs, args, names=names)
        totals = [replica.all_reduce(sums, name, weighted=True) for name in sums.outputs]
        operands = [given["grad_out"], given["input"], moments, given.get("weight")]
        operands += [given["save_mean"], given["save_invstd"], *totals]
        factor = _share(replica.reduction, replica.copy_id)
        replica.insert_after(sums, "graphir.synchronised_batch_norm_backward", operands, factor, names=made[:1])

    @cached_property
    def calls(self) -> Counter[tuple[str, str]]:
        """How often each module normalises in training, by its path and the prefix of the replica."""
        norms = (op for op in self.program.step.ops if operator_type(op.type).batch_norm)
        return Counter((op.module, prefix_of(op.outputs[0])) for op in norms if op.args.get("training", True))

    def is_everywhere(self, op: Operator) -> bool:
        """Whether all replicas have this batch norm: a placed module, whose state is in one replica, has the whole
        batch already.

        Raises:
            ReplicationError: all replicas have the module, and do not call it equally often.
        """
        replicas = self.program.replicas
        calls = [self.calls[op.module, prefix] for prefix in replicas]
        if len(set(calls)) == 1:
            return True
        state = {base_name(name) for name in op.inputs if self.program.step.blobs[name].role in STATE_ROLES}
        if not all(prefix + name in self.program.step.blobs for prefix in replicas for name in state):
            return False
        if not state and not all(calls):
            return False
        counts = ", ".join(f"{counted(number, 'time')} by replica {i}" for i, number in enumerate(calls))
        raise ReplicationError(
            f"the batch norm of module {op.module!r} is called {counts}: statistics would wait for each other",
            at=operator_text(op, self.program.step),
            fix="let each replica call it equally often, or leave the module out of modules=",
        )

    def is_over_batch(self, op: Operator) -> bool:
        """Whether statistics are over the batch: not those of each sample, whose channels an instance norm takes for
        the channels of one."""
        module = _module(self.program, op.module)
        if isinstance(module, nn.modules.instancenorm._InstanceNorm):
            return False
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return True
        shape = self.program.step.blobs[op.inputs[0]].shape or ()
        return len(shape) > 1 and isinstance(shape[1], int) and shape[0] != 1


def _is_apart(op: Operator) -> bool:
    """Whether an operator is a batch norm in training whose statistics are not those of all replicas."""
    return operator_type(op.type).batch_norm and op.type != _SYNCHRONISED and bool(op.args.get("training", True))


def _guards(program: Program) -> tuple[Guard, ...]:
    """The guards of a program whose batch norms are over all replicas: together these have to have two rows, where each
    had to, if torch refused a single one and nothing else is another there."""
    single = [guard for guard in program.covers.guards if _is_of_single_rows(guard)]
    norms = filter(_is_apart, program.step.ops)
    callback = _Synchronised(program)
    if not single or any(map(callback.is_over_batch, norms)) or not _takes_single_rows(program):
        return program.covers.guards
    rows = [guard.size for guard in single]
    together = Guard(reduce(_sum, rows), ">=", 2, 0, f"{REFUSAL}: all replicas have one row together")
    return (*[guard for guard in program.covers.guards if guard not in single], together)


def _is_of_single_rows(guard: Guard) -> bool:
    """Whether a guard asks for two rows because torch refuses to normalise one."""
    return (guard.relation, guard.number, guard.modulus) == (">=", 2, 0) and REFUSAL in guard.reason


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    total = add(a, b)
    assert isinstance(total, Polynomial)
    return total


def _takes_single_rows(program: Program) -> bool:
    """Whether the captured step is the program's at one row, but for what torch refuses there: it is recorded there."""
    if program.witness is None:
        return False
    try:
        with single_values_allowed():
            program.witness({BATCH: 1})
    except GraphirError:
        return False
    return True


def _module(program: Program, path: str) -> nn.Module | None:
    """The module at a path of the captured model, where the program knows it."""
    found: Any = program.module
    for name in path.split(".") if path else []:
        found = getattr(found, "_modules", {}).get(name)
    return found if isinstance(found, nn.Module) else None


def _by_name(op: Operator) -> dict[str, str]:
    """An operator's inputs by the parameters that they are given for."""
    return dict(zip(signature(op.type).names(op.operands, len(op.inputs)), op.inputs, strict=True))


def _results(op: Operator, mask: tuple[Arg, ...]) -> Iterator[str | None]:
    """The gradients that an operator makes, None for each that it does not."""
    made = iter(op.outputs)
    marks = op.results or "t" * len(mask)
    for mark in marks:
        yield next(made) if mark == "t" else None


def _share(reduction: Mapping[str, Arg], copy: int) -> dict[str, Arg]:
    """By what a weighted mean of sums becomes, in one copy, the sum of all in the scale of its own gradients."""
    shares: Any = reduction.get("shares", ())
    if reduction.get("reduction") != "mean" or not shares:
        return {}
    total: Size = reduce(add, shares)
    return {"numerator": total, "denominator": shares[copy]}
