"""Proofs that two programs compute the same values, bit for bit.

Both are executed on symbolic values (:mod:`.values`): ``init``, then the step twice, so that an update that never
reaches the next step shows. On one kind of device, with equal threads per kernel, the same operators on the same
values and layouts give the same bits, so equal numbers mean equal bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn

from ..errors import EquivalenceError, after_last, counted
from ..ir.names import prefix_of
from ..ir.net import Net
from ..ir.operator import Operator
from ..ir.program import Program
from ..ir.verify import require, verify
from ..plan import Plan, program_of
from .diff import words
from .values import Made, Numbering, Trace, canonical_type

__all__ = ["NONDETERMINISTIC", "Certificate", "certify"]

_STEPS: Final = 2
_WINDOW: Final = 5
"""Operators of a derivation that are printed."""

NONDETERMINISTIC: Final[Mapping[str, str]] = {
    "aten.index_put.default": "adds in no fixed order on CUDA where accumulate is set",
    "aten.index_add.default": "adds in no fixed order on CUDA",
    "aten.scatter_add.default": "adds in no fixed order on CUDA",
    "aten.scatter_reduce.two": "reduces in no fixed order on CUDA",
    "aten.put.default": "adds in no fixed order on CUDA where accumulate is set",
    "aten.cumsum.default": "sums in no fixed order on CUDA",
    "aten.histc.default": "adds in no fixed order on CUDA",
    "aten.bincount.default": "adds in no fixed order on CUDA where there are weights",
    "aten.embedding_dense_backward.default": "adds in no fixed order on CUDA",
    "aten._embedding_bag_dense_backward.default": "adds in no fixed order on CUDA",
    "aten._adaptive_avg_pool2d_backward.default": "adds in no fixed order on CUDA",
    "aten._adaptive_avg_pool3d_backward.default": "adds in no fixed order on CUDA",
    "aten.adaptive_max_pool2d_backward.default": "adds in no fixed order on CUDA",
    "aten.avg_pool3d_backward.default": "adds in no fixed order on CUDA",
    "aten.max_pool2d_with_indices_backward.default": "adds in no fixed order on CUDA",
    "aten.max_pool3d_with_indices_backward.default": "adds in no fixed order on CUDA",
    "aten.reflection_pad1d_backward.default": "adds in no fixed order on CUDA",
    "aten.reflection_pad2d_backward.default": "adds in no fixed order on CUDA",
    "aten.replication_pad1d_backward.default": "adds in no fixed order on CUDA",
    "aten.replication_pad2d_backward.default": "adds in no fixed order on CUDA",
    "aten.upsample_bilinear2d_backward.default": "adds in no fixed order on CUDA",
    "aten.upsample_bicubic2d_backward.default": "adds in no fixed order on CUDA",
    "aten.upsample_linear1d_backward.default": "adds in no fixed order on CUDA",
    "aten.upsample_trilinear3d_backward.default": "adds in no fixed order on CUDA",
    "aten.grid_sampler_2d_backward.default": "adds in no fixed order on CUDA",
    "aten.grid_sampler_3d_backward.default": "adds in no fixed order on CUDA",
    "aten._ctc_loss_backward.default": "adds in no fixed order on CUDA",
    "graphir.attention_backward": "adds in no fixed order on CUDA",
    "aten._scaled_dot_product_efficient_attention_backward.default": "adds in no fixed order on CUDA",
    "aten._scaled_dot_product_flash_attention_backward.default": "adds in no fixed order on CUDA",
    "aten._scaled_dot_product_cudnn_attention_backward.default": "adds in no fixed order on CUDA",
}
"""Types whose bits two runs on the same values need not share, and why (the documentation of
``torch.use_deterministic_algorithms``). In-place forms count as their functional ones."""


@dataclass(frozen=True)
class Certificate:
    """Two programs compute the same values.

    Attributes:
        before: name of the first program.
        after: name of the second one.
        values: the value number of each external output after the last step, and of each parameter, buffer and
            optimizer state. Numbers mean something within one certificate only.
        compared: how many values of each kind were compared.
        caveats: operators whose bits differ from run to run by nature, or that leave memory unwritten which is then
            read, and why.
    """

    before: str
    after: str
    values: Mapping[str, int] = field(repr=False)
    compared: Mapping[str, int]
    caveats: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Always true: where a proof fails there is an error instead."""
        return True

    def __str__(self) -> str:
        counts = ", ".join(counted(count, kind.removesuffix("s")) for kind, count in self.compared.items())
        lines = [f"{self.after!r} computes what {self.before!r} computes, bit for bit: {counts} over {_STEPS} steps"]
        return "\n".join(lines + [f"  but {caveat}" for caveat in self.caveats])


def certify(before: Program | Plan, after: Program | Plan, *, verified: bool = False) -> Certificate:
    """Prove that two programs compute the same values.

    External outputs are compared after each step, parameters, buffers and optimizer states after the last one, by
    name. Where a Caffe2 step names no external outputs, what it leaves unread are its outputs. Meant for passes that
    move things; replication changes values.

    Args:
        before: a program, or a plan, which stands for its program.
        after: the same.
        verified: both are known to be well-formed. Proofs are about well-formed programs only, since the value of a
            view is had from its geometry; so without this they are verified first (not where operands are).

    Raises:
        GraphirError: one of them is neither.
        EquivalenceError: they don't; names the first blob that differs, and shows both derivations.
        VerifyError: one of them is not well-formed.
    """
    for subject in (before, after):
        require(subject, (Program, Plan), "certify")
    a, b = program_of(before), program_of(after)
    if not verified:
        verify(a, placed=False)
        verify(b, placed=False)
    table, outputs = Numbering(), _outputs(a)
    ours, theirs = (table.trace(program, _STEPS, outputs=outputs) for program in (a, b))
    difference = _first_difference(ours, theirs)
    if difference:
        _explain(a, b, difference)
    values = {**ours.final, **ours.outputs[-1]}
    compared = {"outputs": len(ours.outputs[-1]), "states": len(ours.final)}
    return Certificate(a.name, b.name, values, compared, _caveats(a, b, theirs.unwritten))


def _outputs(program: Program) -> tuple[str, ...] | None:
    """The blobs that a step is compared by: None for its external outputs."""
    step = program.step
    return step.unread if step.proto is not None and not step.external_outputs else None


class _Difference(NamedTuple):
    """A compared value that differs: of an output after a step, or of a state after the last one."""

    kind: str
    name: str
    step: int


def _first_difference(ours: Trace, theirs: Trace) -> _Difference | None:
    pairs = [("output", step, a, b) for step, (a, b) in enumerate(zip(ours.outputs, theirs.outputs, strict=True))]
    for kind, step, a, b in [*pairs, ("state", len(pairs) - 1, ours.final, theirs.final)]:
        # A state that only the second program has is a copy that a pass made: it is compared through what reads it.
        for name in {**a, **b} if kind == "output" else a:
            if a.get(name) != b.get(name):
                return _Difference(kind, name, step)
    return None


def _caveats(before: Program, after: Program, unwritten: AbstractSet[str]) -> tuple[str, ...]:
    found: dict[str, int] = {}
    for op in after.step.ops:
        functional = canonical_type(op.type)
        if functional in NONDETERMINISTIC:
            found[functional] = found.get(functional, 0) + 1
    caveats = [f"{type} ({count} operators) {NONDETERMINISTIC[type]}" for type, count in found.items()]
    for type, count in Counter(op.type for op in after.step.ops if not unwritten.isdisjoint(op.outputs)).items():
        why = "leaves memory unwritten, of which a part may be read before it is written"
        caveats.append(f"{type} ({count} operators) {why}")
    kinds = {op.outputs[0]: op.device.kind for op in before.step.ops if op.outputs}
    moved = [op for op in after.step.ops if op.outputs and kinds.get(op.outputs[0], op.device.kind) != op.device.kind]
    if moved:
        what = f"{moved[0].outputs[0]!r} and {len(moved) - 1} other values are"
        caveats.append(f"{what} computed on another kind of device, which may round differently")
    return tuple(caveats)


class _Derivations:
    """Every value that one program made, and the values that it was made from."""

    def __init__(self, program: Program, table: Numbering) -> None:
        self.program = program
        self.made = table.trace(program, _STEPS, record=True).made
        self.sources: list[tuple[int, ...]] = []
        self.by_key: dict[tuple[int, str, int], int] = {}
        last: dict[str, int] = {}
        position = (-2, -1)
        reads: tuple[int, ...] = ()
        for index, made in enumerate(self.made):
            if (made.step, made.position) != position:
                position = (made.step, made.position)
                reads = tuple(last[name] for name in self.op(made).inputs if name in last)
            self.sources.append(reads)
            self.by_key[made.step, made.name, made.version] = last[made.name] = index

    def net(self, step: int) -> Net:
        return self.program.init if step < 0 else self.program.step

    def op(self, made: Made) -> Operator:
        return self.net(made.step).ops[made.position]

    def operator(self, index: int | None) -> Operator | None:
        return None if index is None else self.op(self.made[index])

    def last(self, difference: _Difference) -> int | None:
        """The last value given to the blob by the end of the step."""
        found = [i for i, m in enumerate(self.made) if m.name == difference.name and m.step <= difference.step]
        return found[-1] if found else None

    def ancestors(self, index: int) -> set[int]:
        seen, open_ = {index}, [index]
        while open_:
            fresh = [source for source in self.sources[open_.pop()] if source not in seen]
            seen.update(fresh)
            open_ += fresh
        return seen

    def window(self, index: int | None) -> list[str]:
        """The operator that made a value, after the nearest ones that it follows from."""
        from ..ir.text import operator_text  # text prints nets, and is not needed for a proof that holds

        if index is None:
            return ["(nothing makes it)"]
        near, open_ = {index}, [index]
        shown = {(self.made[index].step, self.made[index].position)}
        while open_ and len(shown) < _WINDOW:
            for source in self.sources[open_.pop(0)]:
                operator = (self.made[source].step, self.made[source].position)
                if source not in near and len(shown) < _WINDOW:
                    near.add(source)
                    open_.append(source)
                    shown.add(operator)
        lines = []
        for step, position in sorted(shown):
            net = self.net(step)
            when = "init  " if step < 0 else f"step {step}"
            lines.append(f"{when}  {operator_text(net.ops[position], net)}")
        return lines


def _explain(before: Program, after: Program, difference: _Difference) -> NoReturn:
    """Raise the error that shows where two programs part."""
    where = f"program {after.name!r}" + after_last(after.history)
    wanted = _outputs(before)
    names: list[Collection[str]] = []
    for program in (before, after):
        outputs = program.step.external_outputs if wanted is None else program.step.blobs
        names.append(outputs if difference.kind == "output" else program.step.external_inputs)
    if not (difference.name in names[0] and difference.name in names[1]):
        which = "second" if difference.name in names[0] else "first"
        raise EquivalenceError(
            f"{difference.kind} {difference.name!r} is missing from the {which} program",
            where=where,
            fix="keep its name"
            if before.replicas == after.replicas
            else "certify programs with the same replicas: replicate averages gradients, which changes values",
        )
    table = Numbering()
    ours, theirs = _Derivations(before, table), _Derivations(after, table)
    index, other = ours.last(difference), theirs.last(difference)
    if index is not None:
        for candidate in sorted(ours.ancestors(index)):
            made = ours.made[candidate]
            match = theirs.by_key.get((made.step, made.name, made.version))
            if match is not None and theirs.made[match].value != made.value:
                index, other = candidate, match
                break
    name = ours.made[index].name if index is not None else difference.name
    result = f"{difference.kind} {difference.name!r} differs after step {difference.step}"
    what = f"blob {name!r} has another value" + (f", so that {result}" if name != difference.name else f": {result}")
    near, far = ours.window(index), theirs.window(other)
    if near == far:
        mine, its = _unshown(before, after, name, ours.operator(index), theirs.operator(other))
        near, far = [*near, mine], [*far, its]
    lines = ["before:", *(f"  {line}" for line in near), "after:", *(f"  {line}" for line in far)]
    raise EquivalenceError(what, at="\n       ".join(lines), where=where, fix="compare the two derivations above")


def _unshown(before: Program, after: Program, name: str, a: Operator | None, b: Operator | None) -> tuple[str, str]:
    """What differs between two derivations whose operators read the same: a declaration, or whose numbers are drawn."""
    blobs, others = before.step.blobs, after.step.blobs
    names = [name, *(a.inputs + a.outputs if a is not None else ())]
    names += [blobs[n].storage for n in names if n in blobs]
    for shared in (n for n in dict.fromkeys(names) if n in blobs and n in others):
        for aspect in ("shape", "dtype", "strides", "offset", "storage", "role"):
            x, y = getattr(blobs[shared], aspect), getattr(others[shared], aspect)
            if x != y:
                where = f"where the {aspect} of {shared!r} is"
                return f"{where} {words(x)}", f"{where} {words(y)}"
    if a is not None and a.seed is not None and b is not None and before.replicas != after.replicas:
        prefix = prefix_of(a.outputs[0])
        x, y = (list(r).index(prefix) if prefix in r else "-" for r in (before.replicas, after.replicas))
        if x != y:
            return f"with the random numbers of replica {x}", f"with the random numbers of replica {y}"
    return "from a storage in one state", "from a storage in another state: one that was written over in between"
