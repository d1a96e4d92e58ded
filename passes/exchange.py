"""The exchange between placed and replicated modules: rows are split and joined.

::

    gpu_0/emb.0 ─┬─ split ─▶ gpu_0/emb.0_split_0 ───────────────────────────────▶ read on gpu:0
                 └─ split ─▶ gpu_0/emb.0_split_1 ─ Copy ─▶ gpu_1/emb.0_split_1 ──▶ read on gpu:1

    gpu_0/emb.0_grad ◀─ join ─┬──────── gpu_0/emb.0_split_0_grad ◀─────────────── made on gpu:0
                              └─ Copy ─ gpu_1/emb.0_split_1_grad ◀─────────────── made on gpu:1

Names are those of DLRM's own nets. Every row crosses once to the device that reads it, and its gradient once back.

In micro-batches, each crosses by itself: what a placed module reads of micro-batch k are the rows of all replicas'
micro-batch k, in replica order. Inputs that it reads are put in that order first::

    x : 0a 0b 0c 1a 1b 1c ─▶ split ─▶ join ─▶ 0a 1a 0b 1b 0c 1c          micro-batches a, b, c of replicas 0 and 1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphir.errors import PassError
from graphir.ir.blob import Blob, is_dense
from graphir.ir.names import base_name, copy_name, fresh
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Effects, Operator, Phase, Symbol
from graphir.ir.size import Size, add, dimension, multiply, product

from .regions import PERMUTES, REPLICATED, Regions
from .replicas import Site
from .shapes import results_of

__all__ = ["Exchange"]


class Exchange:
    """The operators and blobs of a step in regions, so far, what crosses included.

    Args:
        regions: of the step.
        mean: whether gradients that are joined are those of a mean, so that each share counts by its rows.
        by: the pass that puts operators in.

    Attributes:
        ops: at every site.
        blobs: likewise.
        differentials: captured blobs whose rows are weighed where they cross: those of a mean's gradient.
        rows: of each replica's share.
        local: what a site reads in the place of a captured blob of another region, by that blob and the site's device.
        parts: each replica's rows of a replicated blob at a site, likewise.
        scaled: for each share of a gradient that is joined, that of a mean over the whole batch.
    """

    def __init__(self, regions: Regions, *, mean: bool, by: str) -> None:
        self.regions, self.mean, self.by = regions, mean, by
        self.replicas = regions.replicas
        self.rows: list[Size] = [dimension(f"{site.prefix}batch") for site in self.replicas]
        self.crossings = regions.crossings()
        self.differentials = _differentials(regions.net) if mean else frozenset()
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = {}
        self.local: dict[tuple[str, str], str] = {}
        self.parts: dict[tuple[str, str], list[str]] = {}
        self.scaled: dict[str, str] = {}
        gradients = regions.net.gradients.items()
        others = {gradient for activation, gradient in gradients if regions.of(activation) == REPLICATED}
        self.activations = {  # of gradients that come back, and are those of nothing that is replicated
            gradient: activation
            for activation, gradient in gradients
            if gradient in self.crossings.joined and activation in self.crossings.split and gradient not in others
        }
        if len(self.replicas) > 1:
            for gradient, activation in self.activations.items():
                for site in self.replicas:
                    site.rename(gradient, f"{activation}_split_{site.device.index}_grad")

    def declare(self, name: str, site: Site) -> None:
        """Add a captured blob at a site."""
        blob = site.blob(self.regions.net.blobs[name])
        self.blobs.setdefault(blob.name, blob)

    def order(self, name: str) -> None:
        """Put the rows of an input that placed modules read, which is given replica after replica, in the order of
        micro-batches, for all that reads it.

        Raises:
            PassError: elements of the input share memory.
        """
        cut = self.regions.cuts.get(name)
        if cut is None:
            return
        (owner,) = self.regions.sites_of(name)
        given = self.blobs[owner.blob_name(name)]
        if given.strides is not None and 0 in given.strides:
            raise PassError(
                f"elements of {name!r} share memory, and placed modules read its micro-batches",
                fix="capture with its .contiguous()",
            )
        taken = _Taken(self.blobs, self.regions.net.blobs)
        parts = [(k, site, rows) for site, rows in zip(self.replicas, self.rows, strict=True) for k in range(cut.parts)]
        names = [fresh(f"{given.name}_micro_{k}_split_{site.device.index}", taken) for k, site, _ in parts]
        self._split(given, names, [rows for _, _, rows in parts], cut.dim, "forward", "")
        in_order = [name for k in range(cut.parts) for name in names[k :: cut.parts]]
        made = fresh(f"{given.name}_by_micro_batch", taken)
        self._cat(in_order, given._replace(name=made, storage=made, strides=None), cut.dim, "forward", "", "")
        if given.strides is not None:
            made = self._laid_out(made, given)
        owner.rename(name, made.removeprefix(owner.prefix))

    def _laid_out(self, name: str, like: Blob) -> str:
        """What has just been made, in the layout of another blob: the model was captured with that."""
        made, op = fresh(f"{name}.laid_out", self.blobs), self.ops[-1]
        (joined,) = results_of(op, self.blobs, self.regions.dims())
        self.blobs[name] = self.blobs[name]._replace(strides=joined.strides)
        if joined.strides == like.strides:
            return name
        self.blobs[made] = like._replace(name=made, storage=made)
        self.ops.append(
            op._replace(type="aten.copy.default", inputs=(like.name, name), outputs=(made,), args={}, operands=None)
        )
        return made

    def execute(self, op: Operator, site: Site) -> None:
        """Append a captured operator at a site, behind what it needs of other regions."""
        inputs = tuple([self.read(op, name, site) for name in op.inputs])
        for name in op.outputs:
            self.declare(name, site)
        self.ops.append(site.op(op)._replace(inputs=inputs, of=self.beside(op.of, site)))

    def read(self, op: Operator, name: str, site: Site) -> str:
        """What a captured operator reads at a site in the place of a captured blob."""
        here, there = self.regions.at(op.device), self.regions.of(name)
        if here == there:
            return site.blob_name(name)
        rows = self.crossings.views.get(name, name)
        if REPLICATED not in (here, there) or not (rows in self.crossings.split or rows in self.crossings.joined):
            # What another placed module has is read whole; what replicas have alike, where it is on the same device.
            return (site if there == REPLICATED else self.regions.sites(there)[0]).blob_name(name)
        if there == REPLICATED:
            self.join(rows, site, op)
        return self.view(name, site, _phase(op))

    def beside(self, name: str, site: Site) -> str:
        """The blob that a captured one is at a site: of what is placed, a replica has a piece."""
        own = site.blob_name(name) if name else ""
        return own if own in self.blobs else self.local.get((name, site.device), "")

    def view(self, name: str, site: Site, phase: Phase) -> str:
        """A view, made again at a site of what has crossed."""
        found = self.local.get((name, site.device))
        if found is not None:
            return found
        net = self.regions.net
        maker = net.producer(name)
        assert maker is not None
        source = maker.inputs[maker.effects.views[0][1]]
        base = self.blobs[self.view(source, site, phase)]
        made = site.blob(net.blobs[name])._replace(storage=base.storage, device=base.device, role=base.role)
        if maker.type in PERMUTES:
            made = _permuted(base, maker, made)
        else:
            before = site.resized(net.blobs[source].offset)
            made = made._replace(offset=add(base.offset, add(made.offset, multiply(-1, before))))
        made = made._replace(name=fresh(f"{site.prefix}{name}", _Taken(self.blobs, net.blobs, name)))
        self.blobs[made.name] = made
        again = site.op(maker)._replace(inputs=(base.name,), outputs=(made.name,), phase=phase, by=self.by)
        self.ops.append(again)
        self.local[name, site.device] = made.name
        return made.name

    def split(self, name: str) -> None:
        """Split a placed blob that crosses, and bring each piece to its replica."""
        if name not in self.crossings.split:
            return
        (owner,) = self.regions.sites_of(name)
        whole = self.blobs[owner.blob_name(name)]
        if len(self.replicas) == 1:
            self.local[name, owner.device] = whole.name
            return
        assert whole.shape is not None
        producer = self.regions.net.producer(name)
        phase: Phase = producer.phase if producer is not None else "forward"
        pieces = [f"{owner.prefix}{name}_split_{site.device.index}" for site in self.replicas]
        module = producer.module if producer is not None else ""
        self._split(whole, pieces, self.rows, 0, phase, module)
        for site, rows, piece in zip(self.replicas, self.rows, pieces, strict=True):
            there = f"{site.prefix}{base_name(piece)}"
            here = piece if there == piece else self._copy(piece, there, site, phase, "")
            if name in self.differentials:
                here = self._scaled(here, self.regions.whole_batch, rows, site, phase)
            self.local[name, site.device] = here

    def pack(self, name: str) -> None:
        """Make a replicated blob's rows ready to be joined by placed modules: weighted, and without gaps where they
        cross. It is done where the blob is made, so that the copies may be issued long before they are read."""
        if len(self.replicas) == 1:
            return
        for region, reader in self.crossings.joined.get(name, {}).items():
            for site in self.regions.sites(region):
                self.parts[name, site.device] = self._packed(name, site, _phase(reader))

    def _packed(self, name: str, site: Site, phase: Phase) -> list[str]:
        """Each replica's rows of a replicated blob, where that replica is, for a site."""
        weighted = name in self.differentials
        parts = []
        for replica, rows in zip(self.replicas, self.rows, strict=True):
            share = replica.blob_name(name)
            if weighted:
                if share not in self.scaled:  # once, wherever it is brought to
                    self.scaled[share] = self._scaled(share, rows, self.regions.whole_batch, replica, phase)
                parts.append(self.scaled[share])
            else:
                parts.append(share if replica.device == site.device else self._dense(share, replica, phase))
        return parts

    def _of(self, name: str, site: Site, reader: Operator) -> str:
        """The forward blob that the rows of a replicated one, joined at a site, belong to."""
        return self.beside(self.activations.get(name) or reader.of, site)

    def join(self, name: str, site: Site, op: Operator) -> None:
        """Bring all rows of a replicated blob to a placed module's device, for *op* and all that follow."""
        if (name, site.device) in self.local:
            return
        if len(self.replicas) == 1:
            self.local[name, site.device] = site.blob_name(name)
            return
        parts = []
        for replica, part in zip(self.replicas, self.parts[name, site.device], strict=True):
            if replica.device != site.device:
                share = replica.blob_name(name)
                own = name in self.activations
                there = f"{site.prefix}{base_name(share)}" if own else copy_name(share, site.device)
                part = self._copy(part, fresh(there, self.blobs), site, _phase(op), self._of(name, site, op))
                if _phase(op) == "forward":  # as the rows go where the module is shifted to
                    self.ops[-1] = self.ops[-1]._replace(module=op.module)
            parts.append(part)
        captured = self.regions.net.blobs[name]
        taken = _Taken(self.blobs, self.regions.net.blobs, name)
        joined = fresh(site.blob_name(name) if name in self.activations else f"{site.prefix}{name}_joined", taken)
        blob = Blob(joined, site.shape(captured.shape), captured.dtype, site.device, captured.role, joined)
        self._cat(parts, blob, 0, _phase(op), op.module, self._of(name, site, op))
        wanted = site.blob(captured)
        strided = wanted.strides is not None and is_dense(wanted._replace(offset=0))
        self.local[name, site.device] = self._turned(joined, wanted) if strided else joined

    def add_up(self, loss: str) -> str:
        """Make each replica's loss such that their mean over rows is their sum; its name without prefix."""
        made = ""
        for site, rows in zip(self.replicas, self.rows, strict=True):
            own = site.blob_name(loss)
            made = self._scaled(own, self.regions.whole_batch, rows, site, "forward").removeprefix(site.prefix)
            self.blobs[own] = self.blobs[own]._replace(role="temporary")
        return made

    def _scaled(self, name: str, numerator: Size, denominator: Size, site: Site, phase: Phase) -> str:
        """What is of a mean over some rows, a gradient or a loss, as it is of a mean over others."""
        args: dict[str, Arg] = {"numerator": numerator, "denominator": denominator}
        return self._made("graphir.scale", name, "scaled", args, site, phase)

    def _dense(self, name: str, site: Site, phase: Phase) -> str:
        """The blob without gaps: a copy keeps strides, and so takes the memory of what lies between."""
        if is_dense(self.blobs[name]._replace(offset=0)):
            return name
        args: dict[str, Arg] = {"memory_format": Symbol("contiguous_format")}
        return self._made("aten.clone.default", name, "dense", args, site, phase)

    def _split(
        self, whole: Blob, names: Sequence[str], rows: Sequence[Size], dim: int, phase: Phase, module: str
    ) -> None:
        """Append an operator that shows so many rows each of a blob, one behind the other."""
        assert whole.shape is not None
        strides = whole.strides or tuple([product(whole.shape[d + 1 :]) for d in range(len(whole.shape))])
        start = whole.offset
        for name, length in zip(names, rows, strict=True):
            shape = (*whole.shape[:dim], length, *whole.shape[dim + 1 :])
            kept = whole.strides if dim == 0 else strides
            self.blobs[name] = whole._replace(name=name, shape=shape, strides=kept, offset=start)
            start = add(start, multiply(length, strides[dim]))
        args: dict[str, Arg] = {"split_sizes": tuple(rows)}
        self.ops.append(
            Operator(
                "aten.split_with_sizes.default",
                (whole.name,),
                tuple(names),
                {**args, "dim": dim} if dim else args,
                whole.device,
                phase,
                module=module,
                by=self.by,
                results=f"[{'t' * len(names)}]",
                effects=Effects(views=tuple([(i, 0) for i in range(len(names))])),
            )
        )

    def _cat(self, parts: Sequence[str], made: Blob, dim: int, phase: Phase, module: str, of: str) -> None:
        """Append an operator that joins blobs as another one."""
        self.blobs[made.name] = made
        self.ops.append(
            Operator(
                "aten.cat.default",
                tuple(parts),
                (made.name,),
                {"dim": dim} if dim else {},
                made.device,
                phase,
                module,
                self.by,
                operands=f"[{'t' * len(parts)}]",
                of=of,
            )
        )

    def _turned(self, name: str, like: Blob) -> str:
        """What has just been joined, its dimensions in memory in the order of another blob without gaps."""
        op, outermost = self.ops[-1], _outermost_first(like)
        (made,) = results_of(op, self.blobs, self.regions.dims())
        joined = self.blobs[name] = self.blobs[name]._replace(strides=made.strides)
        if made.strides == like.strides:
            return name
        turned = self._permute(joined, outermost, op)
        dense = turned._replace(name=fresh(f"{name}.dense", self.blobs), strides=None)
        self.blobs[dense.name] = dense = dense._replace(storage=dense.name)
        args: dict[str, Arg] = {"memory_format": Symbol("contiguous_format")}
        clone = op._replace(type="aten.clone.default", inputs=(turned.name,), outputs=(dense.name,), args=args)
        self.ops.append(clone._replace(operands=None))
        return self._permute(dense, [outermost.index(d) for d in range(len(outermost))], op).name

    def _permute(self, base: Blob, dims: Sequence[int], op: Operator) -> Blob:
        """Append a view of a blob with its dimensions in another order, beside an operator."""
        name, args = fresh(f"{base.storage}.permute", self.blobs), {"dims": tuple(dims)}
        view = op._replace(type="aten.permute.default", inputs=(base.name,), outputs=(name,), args=args, of="")
        self.ops.append(view._replace(operands=None, effects=Effects(views=((0, 0),))))
        self.blobs[name] = _permuted(base, view, base._replace(name=name))
        return self.blobs[name]

    def _made(self, type: str, name: str, what: str, args: Mapping[str, Arg], site: Site, phase: Phase) -> str:
        """Append an operator that makes a contiguous blob of another one, and runs where that is."""
        made = fresh(f"{name}.{what}", self.blobs)
        blob = self.blobs[name]
        self.blobs[made] = blob._replace(name=made, storage=made, strides=None, offset=0)
        of = blob.storage if phase == "backward" else ""
        self.ops.append(Operator(type, (name,), (made,), args, site.device, phase, by=self.by, of=of))
        return made

    def _copy(self, source: str, name: str, site: Site, phase: Phase, of: str) -> str:
        """Append a copy of a blob to a site."""
        blob = self.blobs[source]
        self.blobs[name] = blob._replace(name=name, storage=name, offset=0, device=site.device, role="temporary")
        self.ops.append(Operator("Copy", (source,), (name,), {}, site.device, phase, by=self.by, of=of))
        return name

    def gradients(self) -> Iterator[tuple[str, str]]:
        """Each activation and its gradient, pieces included."""
        regions = self.regions
        for activation, gradient in regions.net.gradients.items():
            for site in regions.sites_of(activation):
                if regions.of(activation) == regions.of(gradient):
                    yield site.blob_name(activation), site.blob_name(gradient)
                elif (gradient, site.device) in self.local:
                    yield site.blob_name(activation), self.local[gradient, site.device]
            if len(self.replicas) > 1 and gradient in self.crossings.joined and activation in self.crossings.split:
                for site in self.replicas:
                    yield self.local[activation, site.device], site.blob_name(gradient)


def _differentials(net: Net) -> frozenset[str]:
    """Gradients, and what the backward computes of them: summands of a gradient have no activation of their own, so
    their role does not tell them. What a checkpoint repeats is none."""
    found = {name for name, blob in net.blobs.items() if blob.role == "gradient"}
    for op in net.ops:
        if op.phase == "backward" and not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return frozenset([name for name in found if (net.blobs[name].dtype or "").startswith(("f", "bf", "c"))])


def _phase(reader: Operator) -> Phase:
    """The phase in which rows are brought to an operator: those that an update reads, before it."""
    return "backward" if reader.phase == "update" else reader.phase


class _Taken:
    """The names that a captured blob may not have at a site: those of blobs, and of other captured ones there. What no
    captured blob stands for may have none of these."""

    def __init__(self, blobs: Mapping[str, Blob], captured: Mapping[str, Blob], name: str = "") -> None:
        self.blobs, self.captured, self.name = blobs, captured, name

    def __contains__(self, name: object) -> bool:
        base = base_name(str(name))
        return name in self.blobs or (base in self.captured and base != self.name)


def _outermost_first(blob: Blob) -> list[int]:
    """The dimensions of a blob without gaps, from the outermost in memory to the innermost."""
    assert blob.shape is not None and blob.strides is not None
    left = [d for d, size in enumerate(blob.shape) if size != 1]
    found = [d for d, size in enumerate(blob.shape) if size == 1]
    step: Size = 1
    while left:
        inner = next(d for d in left if blob.strides[d] == step)
        left.remove(inner)
        found.append(inner)
        step = multiply(step, blob.shape[inner])
    return found[::-1]


def _permuted(base: Blob, maker: Operator, made: Blob) -> Blob:
    """The geometry of a view that shows *base* with its dimensions in another order."""
    assert base.shape is not None
    ndim = len(base.shape)
    order = list(range(ndim))
    if maker.type == "aten.permute.default":
        order = [int(dim) for dim in maker.args["dims"]]  # type: ignore[union-attr, arg-type]
    elif maker.type == "aten.transpose.int":
        a, b = int(maker.args["dim0"]), int(maker.args["dim1"])  # type: ignore[arg-type]
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    strides = base.strides or tuple([product(base.shape[d + 1 :]) for d in range(ndim)])
    shape, permuted = tuple([base.shape[d] for d in order]), tuple([strides[d] for d in order])
    dense = tuple([product(shape[d + 1 :]) for d in range(ndim)])
    return made._replace(shape=shape, strides=None if permuted == dense else permuted, offset=base.offset)
