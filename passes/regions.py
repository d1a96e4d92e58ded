"""Regions: what of a captured step every replica computes on its share of the batch, and what one device computes on
all of it.

Placed modules make a region for each device that they are on; the rest is the replicated region. What belongs to a
placed module is found as for a shift: its forward moves, and everything else follows (:mod:`.following`). While regions
are told apart, what is replicated stands on gpu:0 and the k-th device's modules on gpu:k.

A value that is read in another region crosses: its rows are split or joined. What the update reads has no rows (the
gradients' norm, a found infinity), and crosses as it is; but the values of an embedding's sparse gradient are the rows
of what the replicas hand back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Final, NamedTuple

from graphir.errors import PassError
from graphir.ir.blob import STATE_ROLES, Blob, dense_nbytes
from graphir.ir.device import Device, gpu
from graphir.ir.guard import Guard
from graphir.ir.net import Net
from graphir.ir.operator import Operator, leaves
from graphir.ir.program import Program
from graphir.ir.size import Polynomial, Size, add, dimension, size_dims, substitute

from .bag_offsets import require_whole_offsets
from .following import follow, follows
from .micro_cuts import Cut, cuts_of
from .replicas import Site, dims_of, replica_sites

__all__ = ["PERMUTES", "REPLICATED", "Crossings", "Regions"]

REPLICATED: Final = gpu(0)
"""The region of what every replica computes."""

PERMUTES: Final = frozenset({"aten.t.default", "aten.transpose.int", "aten.permute.default"})
"""Views of any strides, whose own are those of what they show in another order."""

_FIX_ROWS: Final = (
    "place modules that take and return rows of the batch; where something else, such as lookups, was as many as rows "
    "when captured, name it: capture(…, batch_dims=…)"
)


class Crossings(NamedTuple):
    """The blobs that cross, in the order in which they are first read.

    Attributes:
        split: those of placed regions, of which each replica reads its rows.
        joined: those of the replicated region, of which placed modules read all rows; by region, the first operator
            that does.
        views: views that do not cross themselves, but are made again of a blob that does; and that blob.
    """

    split: dict[str, None]
    joined: dict[str, dict[Device, Operator]]
    views: dict[str, str]


class Regions:
    """The regions of a program.

    Args:
        program: captured.
        homes: the device of each placed module.
        devices: of the replicas, by number.
        shares: of the batch, by replica; empty where all are equal.
        by: the pass that spreads the program.

    Attributes:
        replicas: the sites of the replicated region, in order.
        owners: by placed region, its site.
        init: the captured net; the device of a blob or operator is its region.
        net: the captured step, likewise.
        cuts: how each input that placed modules read is cut into micro-batches, where these have rows of several
            replicas.
    """

    def __init__(
        self, program: Program, homes: Mapping[str, Device], devices: Sequence[int], shares: tuple[int, ...], by: str
    ) -> None:
        self.program, self.shares, self.by = program, shares, by
        self.replicas = replica_sites(program, devices, by)
        batches: list[Size] = [dimension(f"{site.prefix}batch") for site in self.replicas]
        self.whole_batch = reduce(add, batches)
        regions = {device: gpu(k + 1) for k, device in enumerate(dict.fromkeys(homes.values()))}
        self.owners = {region: Site(program, device, self.whole, by) for device, region in regions.items()}
        placed = self._followed({module: regions[device] for module, device in homes.items()})
        self.init, self.net = placed.init, placed.step
        cuts = cuts_of(program)
        self._require_rows_of_batch(cut=bool(cuts))
        spread = len(self.replicas) > 1
        self.cuts: Mapping[str, Cut] = {
            name: cut for name, cut in cuts.items() if spread and self.of(name) != REPLICATED
        }

    def _followed(self, modules: Mapping[str, Device]) -> Program:
        """The captured program with each operator and blob in its region, by the regions of placed modules."""
        step = self.program.step
        moved = {i: modules[op.module] for i, op in enumerate(step.ops) if not follows(op) and op.module in modules}
        homes: dict[str, Device] = {}
        for name in step.external_inputs:
            region = modules.get(name.rpartition(".")[0])
            if step.blobs[name].role in STATE_ROLES and region is not None:
                homes[name] = region
        for i, region in moved.items():
            for name in step.ops[i].inputs:
                storage = step.blobs[step.blobs[name].storage]
                if storage.role == "input" and not storage.device.is_host:
                    homes.setdefault(storage.name, region)
        return follow(self.program, moved, homes, self.by)

    def of(self, name: str) -> Device:
        """The region of a blob; of what is on the host the replicated one, unless it is the optimizer's state of a
        placed parameter."""
        param = self._hosted.get(name)
        return self.at((self.net if param or name in self.net.blobs else self.init).blobs[param or name].device)

    @cached_property
    def _hosted(self) -> dict[str, str]:
        """What the optimizer keeps on the host, such as its count of steps, and the parameter."""
        blobs = self.net.blobs
        return {name: param for name, param in self.program.interface.owners() if blobs[name].device.is_host}

    def at(self, device: Device) -> Device:
        """The region of what :attr:`net` has on a device."""
        return device if device in self.owners else REPLICATED

    def sites(self, region: Device) -> Sequence[Site]:
        """Where a region's operators run."""
        owner = self.owners.get(region)
        return self.replicas if owner is None else (owner,)

    def sites_of(self, name: str) -> Sequence[Site]:
        """Where a blob is; a learning rate, which replicas share, is once."""
        sites = self.sites(self.of(name))
        return sites[:1] if name in sites[0].shared else sites

    # Sizes

    def whole(self, size: Size) -> Size:
        """What a captured size is where it is the whole batch's."""
        return substitute(size, self._whole_dim)

    def _whole_dim(self, dim: str) -> Size:
        if dim == "batch":
            return self.whole_batch
        return dimension(dim if dim in self._named else self.replicas[0].prefix + dim)

    @cached_property
    def _named(self) -> frozenset[str]:
        """Dimensions of inputs of placed modules, but the batch: their value is that of the whole input."""
        placed = [self.net.blobs[name] for name in self.net.external_inputs if self.of(name) != REPLICATED]
        sizes = [size for blob in placed if blob.role == "input" for size in blob.shape or ()]
        return frozenset([dim for size in sizes for dim in size_dims(size)]) - {"batch"}

    def dims(self) -> dict[str, int]:
        """The captured value of each dimension."""
        alone = {site.prefix + dim for site in self.replicas for dim in self._alone}
        dims = dims_of(self.program, self.replicas, self.shares)
        shares = {dim: value for dim, value in dims.items() if dim not in alone}
        return {**shares, **{dim: value for dim, value in self.program.dims.items() if dim in self._named}}

    @cached_property
    def _alone(self) -> frozenset[str]:
        """Dimensions of which nothing in the replicated region depends."""
        blobs = [blob for name, blob in self.net.blobs.items() if self.of(name) == REPLICATED]
        sizes = [size for blob in blobs for size in (*(blob.shape or ()), *(blob.strides or ()), blob.offset)]
        ops = [op for op in self.net.ops if self.at(op.device) == REPLICATED]
        sizes += [
            leaf for op in ops for arg in op.args.values() for leaf in leaves(arg) if isinstance(leaf, Polynomial)
        ]
        return self._named.difference(*map(size_dims, sizes))

    def guards(self) -> Iterator[Guard]:
        """What the shares and the whole batch must satisfy."""
        for guard in self.program.covers.guards:
            if self._alone.isdisjoint(guard.dims):
                for site in self.replicas:
                    yield guard.renamed(site.prefix.__add__)
            size = self.whole(guard.size)
            if isinstance(size, Polynomial):
                yield guard._replace(size=size)

    # What crosses

    def crossings(self) -> Crossings:
        """What crosses between the replicated region and others.

        Raises:
            PassError: something would that cannot.
        """
        found = Crossings({}, {}, {})
        for op in self.net.ops:
            here = self.at(op.device)
            for name in op.inputs:
                there = self.of(name)
                storage = self.net.blobs[self.net.blobs[name].storage]
                if there == here or storage.device.is_host or storage.role == "constant":
                    continue
                if op.phase == "update" and (storage.role in STATE_ROLES or self._rows_of(name) is None):
                    continue
                if storage.role in STATE_ROLES:
                    raise self._shared(storage, op)
                if REPLICATED in (here, there):
                    rows = self._rows_of(name)
                    if rows is None:
                        raise self._no_rows(name, op)
                    if here == REPLICATED:
                        found.split[rows] = None
                    else:
                        found.joined.setdefault(rows, {}).setdefault(here, op)
                    if rows != name:
                        found.views[name] = rows
        return found

    def _rows_of(self, name: str) -> str | None:
        """The blob that crosses so that *name* is there: it or one that it is a view of, with the batch as the first
        dimension; of several the one closest to the storage, so that all its views cross at once."""
        blobs, found = self.net.blobs, None
        nbytes = dense_nbytes(blobs[name], self.program.dims)
        plain = True  # only views that any strides allow lead to *name*
        while True:
            blob = blobs[name]
            by_rows = blob.shape and blob.shape[0] == dimension("batch") and (blob.strides is None or plain)
            if by_rows and (found is None or dense_nbytes(blob, self.program.dims) <= nbytes):
                found = name
            maker = self.net.producer(name)
            if maker is None or not maker.effects.shows:
                return found
            plain = plain and maker.type in PERMUTES
            name = maker.inputs[maker.effects.views[0][1]]

    def _shared(self, blob: Blob, op: Operator) -> PassError:
        owner = blob.name.rpartition(".")[0]
        placed, other = (owner, op.module) if self.of(blob.name) != REPLICATED else (op.module, owner)
        return PassError(
            f"{blob.role} {blob.name!r} of placed module {placed!r} is one of {other!r}, too, not placed with it",
            fix="place both modules on one device, or none",
        )

    def _no_rows(self, name: str, op: Operator) -> PassError:
        shape = self.net.blobs[name].shape
        module = _module_of(self.net, name)
        placed, other = ("placed", "not") if self.of(name) != REPLICATED else ("not placed", "is")
        reason = f"; {self.program.covers.fixed}" if self.program.covers.fixed else ""
        return PassError(
            f"module {module!r} is {placed} and hands {name!r} on to {op.module!r}, which {other}: of shape "
            f"[{', '.join(map(str, shape or ()))}], its first dimension is not the batch{reason}",
            fix=_FIX_ROWS,
        )

    def _require_rows_of_batch(self, *, cut: bool) -> None:
        """Refuse a step without rows to split, or with lookups that would be split like rows."""
        interface, name = self.program.interface, self.program.name
        if interface.loss is not None and self.of(interface.loss) != REPLICATED:
            raise PassError(
                "the loss cannot be placed: each replica has its own",
                fix="place modules of the model; one that compares all rows can return a value for each, as "
                "cross_entropy does by reduction='none', and loss= take their mean",
            )
        if "batch" not in self.program.dims:
            reason = f": {self.program.covers.fixed}" if self.program.covers.fixed else ""
            raise PassError(f"program {name!r} has no batch to split{reason}", fix="let its sizes follow the batch")
        rows = {feed.blob for feed in interface.feeds if feed.blob and feed.batch_dim is not None}
        if len(self.replicas) > 1:
            require_whole_offsets(self.net, self.at, REPLICATED, rows, cut)


def _module_of(net: Net, name: str) -> str:
    """The module whose operator makes a blob; empty where none does."""
    producer = net.producer(name)
    return producer.module if producer is not None else ""
