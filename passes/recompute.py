"""Compute activations again in the backward instead of keeping them, as a checkpoint does.

The operators that made an activation are repeated directly before its first reader in the backward, with their seed
ids, so that they draw the same random numbers; and so are those that made what they read, back to what is kept anyway::

    conv1  = aten.convolution(x, …)                 conv1      = aten.convolution(x, …)
    relu   = aten.relu(conv1)                       relu       = aten.relu(conv1)         freed in the forward
    …                                     ──▶       …
                                                    relu_again = aten.relu(conv1)         in the backward, of relu
    fc_grad = aten.mm(g.t, relu)                    fc_grad    = aten.mm(g.t, relu_again)

Kept are state, inputs, and what the backward reads and nobody has named. Of a module, what other modules read is kept
too: each module that a pattern matches is recomputed from what it was given, as by ``torch.utils.checkpoint``.

Nothing is repeated that changes state. A batch norm in training computes its results without the running statistics
that it updates, so it is repeated without these, by the same kernel. Nor is anything repeated for which devices meet:
the moments of a synchronised batch norm are kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

from graphir.errors import PassError
from graphir.ir.module_patterns import lineage
from graphir.ir.net import Net
from graphir.ir.operator import Operator, positions
from graphir.ir.opset import geometry_operands, signature
from graphir.ir.optypes.table import operator_type
from graphir.ir.plan import issued_as
from graphir.ir.program import Program
from graphir.ir.text import operator_text

from .base import Pass, build, register
from .saved import Use, choose, nothing_saved, require_captured, saved_in, unsaved, uses_of, warn_of_modules
from .standing import Order
from .substitutes import Substitutes, with_operands

__all__ = ["Recompute", "recompute", "repeated_alone"]

_STATISTICS = ("running_mean", "running_var")


@register
class Recompute(Pass):
    """See :func:`recompute`."""

    name: ClassVar[str] = "recompute"
    never_behind: ClassVar[Order] = {"shared": "what an operator reads has to be there when the backward repeats it"}

    what: tuple[str, ...]

    def rewrite(self, program: Program) -> Program:
        require_captured(program, self.name)
        uses = uses_of(program.step)
        storages = _chosen(program, self.what, uses)
        if not storages:
            return program
        return program.with_(step=_Recomputing(program, uses, storages, self.name).run())


def recompute(program: Program, what: str | Sequence[str]) -> Program:
    """Compute saved activations again in the backward, so that they need not be kept until then.

    It goes after the shifts and before :func:`inject_copies`: what is repeated runs where it ran. No value changes:
    certify holds, and random numbers are drawn again bit for bit.

    Args:
        program: captured, replicated or sharded.
        what: names of activations, which stand for those of every replica, of other blobs, or patterns of modules as
            for :func:`shift_modules`: each module that matches is recomputed from its inputs.

    Raises:
        PassError: a name is unknown, or of what cannot be recomputed; the message says why. Nothing has changed then.
    """
    chosen = build(Recompute, what=(what,) if isinstance(what, str) else what)
    made = chosen(program)
    warn_of_modules(program, chosen.what, Recompute.name)
    return made


def repeated_alone(program: Program) -> list[int]:
    """The positions of the forward's operators that can be repeated as they are, or without the statistics that they
    update. What they read has to be there as it was."""
    found = list[int]()
    for i, op in enumerate(program.step.ops):
        if op.phase == "forward":
            try:
                _repeatable(op, program.step)
            except PassError:
                continue
            found.append(i)
    return found


def _chosen(program: Program, what: Sequence[str], uses: Mapping[str, Use]) -> dict[str, None]:
    """The storages that are computed again."""
    chosen = choose(program, what, "recompute")
    for name in chosen.blobs:
        why = unsaved(program, name, uses, "recompute")
        if why is not None:
            raise PassError(f"recompute: {name!r} {why[0]}", fix=why[1])
    saved = saved_in(program, chosen.modules, uses)
    ops = program.step.ops
    gathered = [storage for storage in saved if issued_as(ops[uses[storage].made]) == "collective"]
    for storage in {*_leaving(program.step, chosen.modules, saved), *gathered}:
        del saved[storage]
    for pattern in dict.fromkeys(chosen.modules.values()):
        if pattern not in saved.values():
            raise nothing_saved(
                program,
                chosen.modules,
                pattern,
                "recompute",
                "but what other modules read",
                "name a larger module, or the activations themselves",
            )
    return dict.fromkeys([*chosen.blobs, *saved])


def _leaving(net: Net, modules: Mapping[str, str], saved: Mapping[str, str]) -> set[str]:
    """The saved storages that operators of the forward read outside of the matched module that makes them."""
    roots: dict[str, str] = {}

    def root(module: str) -> str:
        """The outermost module of a pattern's that *module* is in; empty where it is in none, or in the model."""
        if module not in roots:
            roots[module] = next((path for path in ("", *lineage(module)) if path in modules), "")
        return roots[module]

    home: dict[str, str] = {}
    found: set[str] = set()
    for op in net.ops:
        if op.phase == "forward":
            for name in op.inputs:
                storage = net.blobs[name].storage
                if storage in home and root(op.module) != home[storage] and not op.effects.shows:
                    found.add(storage)
            for name in op.outputs:
                if name in saved:
                    home[name] = root(op.module)
    return found


class _Recomputing(Substitutes):
    """The sweep that repeats operators.

    Attributes:
        storages: what is computed again.
        uses: where storages are touched.
        written: of each storage, the positions of the operators that overwrite it.
        position: of the operator that the sweep is at.
    """

    def __init__(self, program: Program, uses: Mapping[str, Use], storages: Mapping[str, None], by: str) -> None:
        super().__init__(program.step, by, "_again", program.init.blobs)
        self.program, self.uses, self.storages = program, uses, storages
        self.position = 0
        self.written: dict[str, list[int]] = {}
        for i, op in enumerate(self.net.ops):
            for output, _ in op.effects.writes:
                self.written.setdefault(self.net.blobs[op.outputs[output]].storage, []).append(i)

    def run(self) -> Net:
        """The net with what is repeated."""
        blobs = self.net.blobs
        for position, op in enumerate(self.net.ops):
            self.position = position
            for name in op.inputs:
                storage = blobs[name].storage
                if storage in self.storages and position >= self.uses[storage].late and storage not in self.held:
                    self.repeat(storage)
            self.append(op)
        return self.result

    def repeat(self, storage: str) -> None:
        """Repeat what made a storage, from what is kept."""
        needed, left = dict[int, Operator](), [storage]
        while left:
            made = self.uses[left.pop()].made
            if made not in needed:
                needed[made] = _repeatable(self.net.ops[made], self.net)
                left += self.missing(needed[made])
        for made in sorted(needed):
            self.again(needed[made])

    def missing(self, op: Operator) -> list[str]:
        """The storages that an operator reads and that are not kept."""
        found = dict.fromkeys([self.net.blobs[name].storage for name in op.inputs])
        return [storage for storage in found if storage not in self.held and not self.is_kept(storage, op)]

    def is_kept(self, storage: str, reader: Operator) -> bool:
        """Whether a storage is still what it was when *reader* ran, without being computed again."""
        use = self.uses[storage]
        kept = use.made < 0 or (use.late >= 0 and storage not in self.storages)
        kept = kept or issued_as(self.net.ops[use.made]) == "collective"
        written = self.written.get(storage, ())
        if written:
            since = bisect_right(written, self.uses[self.net.blobs[reader.outputs[0]].storage].made)
            if since < bisect_right(written, self.position) or not kept:
                by = self.net.ops[written[min(since, len(written) - 1)]]
                raise _error(
                    reader,
                    self.net,
                    f"{storage!r}, which it reads, is overwritten in between by {by.type}",
                    "leave it out",
                )
        return kept

    def again(self, op: Operator) -> None:
        """Repeat an operator."""
        reads = [self.read(*read, op.device, "backward") for read in op.reads]
        makes = []
        for name in op.outputs:
            blob = self.net.blobs[name]
            made = self.declare(blob, f"{name}_again", blob.device, "activation")
            self.put(name, made)
            makes.append((made, 0))
        self.ops.append(with_operands(op, reads, makes)._replace(phase="backward", by=self.by, of=op.outputs[0]))


def _repeatable(op: Operator, net: Net) -> Operator:
    """An operator as it can be repeated: it changes nothing.

    Raises:
        PassError: it cannot be.
    """
    kind = operator_type(op.type)
    if issued_as(op) == "collective":
        raise _error(op, net, "it runs on several devices", "name what is computed from its result")
    if kind.nondeterministic:
        raise _error(op, net, f"it {kind.nondeterministic}", "keep its result")
    if kind.unwritten and not _overwritten(op.outputs[0], net):
        raise _error(op, net, "it leaves memory unwritten, of which something is read", "keep its result")
    if not op.effects.writes:
        return op
    pure = _without_statistics(op)
    if pure is None:
        overwritten = op.outputs[op.effects.writes[0][0]]
        raise _error(op, net, f"it overwrites {overwritten!r}", "keep its result, or recompute before share_storage")
    return pure


def _overwritten(name: str, net: Net) -> bool:
    """Whether whoever reads a blob, or a view of it, overwrites all of what it reads, so that no value comes of what
    the blob holds."""
    for op in net.consumers(name):
        views = [op.outputs[output] for output, source in op.effects.views if op.inputs[source] == name]
        if views:
            if not all(_overwritten(view, net) for view in views):
                return False
            continue
        ignored = geometry_operands(op.type, op.args, op.operands, len(op.inputs))
        if any(read == name and i not in ignored for i, read in enumerate(op.inputs)):
            return False
    return name not in net.external_outputs


def _error(op: Operator, net: Net, why: str, fix: str) -> PassError:
    return PassError(
        f"recompute: {op.type} cannot be repeated in the backward: {why}", at=operator_text(op, net), fix=fix
    )


def _without_statistics(op: Operator) -> Operator | None:
    """A batch norm in training that updates no statistics, and computes the same; None for any other operator."""
    sig = signature(op.type)
    optional = {p.name for p in sig.tensors if p.type.startswith("Optional")}
    if not (operator_type(op.type).batch_norm and op.args.get("training", True)):
        return None
    pattern, kept, left = "", list[int](), list[int]()
    for param, group in sig.filled(op.operands, len(op.inputs)):
        dropped = param.name in _STATISTICS
        if dropped and param.name not in optional:
            return None
        (left if dropped else kept).extend(positions(group))
        pattern += "_" if dropped or group is None else "t"
    if {source for _, source in op.effects.writes} - set(left):
        return None
    reads, updated = list(op.reads), {output for output, _ in op.effects.writes}
    makes = [made for i, made in enumerate(op.makes) if i not in updated]
    pure = with_operands(op, [reads[i] for i in kept], makes)
    return pure._replace(operands=pattern, effects=op.effects._replace(writes=()))
