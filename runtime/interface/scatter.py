"""A step's arguments: from what the caller gives to what each replica gets.

The caller's arguments are flattened to leaves, the leaves split over the replicas by the program's shares, and the
dimensions solved from the shares' shapes. All of that depends only on the leaves' geometry, so it is done once for
each; later steps look it up and slice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from graphir.errors import CoverageError, SessionError, counted
from graphir.ir.blob import Blob, bound_layout, overlaps
from graphir.ir.device import Device
from graphir.ir.fitting import point_text
from graphir.ir.guard import Guard
from graphir.ir.names import base_name, micro_batches
from graphir.ir.program import Program, Scalar
from graphir.ir.size import BATCH, Dims, Polynomial, Size, bind, dimension, rename_dims, size_dims
from graphir.ir.symbols import to_symbol, to_torch
from graphir.ir.tensor import PLAIN, not_dense

from ..kernels.communication import allocate, copy
from .arguments import Arguments
from .coverage import check_layouts

__all__ = ["Fit", "Scatter", "Share", "SmallShares"]

_KEPT_FITS: Final = 256
"""For how many geometries of the arguments the fit is kept."""


_SEVERAL_ROWS: Final = (dimension(BATCH), ">=", 2, 0)
"""The guard of a program that takes no share of one row. Of others, a program captured at the shares may take them."""

_HOST: Final = torch.device("cpu")
_SCALARS: Final = bool, int, float, str, type(None)


class SmallShares(CoverageError):
    """A replica's share of the batch is one row, which the program does not take, or there is none for it.

    Attributes:
        fewer: how many replicas to split the batch over instead; 0 where there is no other number.
        dims: the value of each dimension, with the prefix of its replica; empty where they do not follow the rows.
    """

    def __init__(self, what: str, *, where: str, fix: str, fewer: int, dims: Dims) -> None:
        super().__init__(what, where=where, fix=fix)
        self.fewer, self.dims = fewer, dims


class Share(NamedTuple):
    """How one input blob is cut out of a leaf.

    Attributes:
        leaf: position of the leaf.
        dim: along which it is cut; None: the whole leaf.
        start: first row.
        length: rows.
        layout: size, strides and device to which it is copied; None where it has them.
    """

    leaf: int
    dim: int | None
    start: int
    length: int
    layout: tuple[tuple[int, ...], tuple[int, ...], torch.device] | None


class Fit(NamedTuple):
    """What leaves of one geometry give: the dimensions, and a share for each input."""

    dims: Dims
    shares: tuple[Share, ...]


class Scatter:
    """Splits a step's arguments over the replicas of a program.

    Args:
        program: whose steps they are.
        places: the real device of each logical one; the host where one is missing.
        threads: how many threads one kernel may use; None: as many as in this thread.
        checks: each raises where the program is not to be run with dimensions.
        witness: raises a CoverageError where the program does not hold with dimensions; None: nobody can tell of sizes
            that the program does not cover.

    Attributes:
        names: the input blobs, in the order in which :meth:`split` gives their tensors.
        targets: for each of them the leaf that it is cut out of, its replica, and its name.
        placed: the leaves of which some replicas have all rows.
        tensors: the leaves that are tensors.
        constants: those that are not, and their captured values.
        again: pairs of leaves that were one tensor.
        overwritten: the storages that a step writes to.
    """

    def __init__(
        self,
        program: Program,
        places: Mapping[Device, torch.device] | None = None,
        threads: int | None = None,
        checks: Sequence[Callable[[Dims], None]] = (),
        witness: Callable[[Dims], None] | None = None,
    ) -> None:
        self.program, self.places, self.checks, self.witness = program, places or {}, checks, witness
        self.threads = threads or torch.get_num_threads()
        self.arguments = Arguments(program.interface.arguments, program.interface.feeds)
        blobs, external = program.step.blobs, set(program.step.external_inputs)
        feeds = program.interface.feeds
        first: dict[str, int] = {}
        self.again: list[tuple[int, int]] = []
        for i, feed in enumerate(feeds):
            if feed.blob is not None and first.setdefault(feed.blob, i) != i:
                self.again.append((first[feed.blob], i))
        self.targets = [
            (i, replica, prefix + blob)
            for blob, i in first.items()
            for replica, prefix in enumerate(program.replicas)
            if prefix + blob in external
        ]
        self.names = tuple(name for _, _, name in self.targets)
        self.placed = [i for i, feed in enumerate(feeds) if feed.blob in program.interface.placed]
        self.tensors = [i for i, feed in enumerate(feeds) if feed.blob is not None]
        self.constants = [(i, feed.value) for i, feed in enumerate(feeds) if feed.blob is None]
        self.only_tensors = not self.constants and not self.again
        # An as_strided operator counts its offset from the start of the storage.
        self.from_offset_0 = any(op.type.startswith("aten.as_strided") for op in program.step.ops)
        self.overwritten = {
            blobs[op.inputs[source]].storage for op in program.step.ops for _, source in op.effects.writes
        }
        self.fits: dict[Hashable, Fit] = {}

    def split(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: tuple[int, ...] | None = None
    ) -> tuple[Dims, list[Tensor]]:
        """The dimensions, and the tensor of each input.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            sizes: the rows of each replica, of every argument that is cut; by default by the program's shares.

        Raises:
            SessionError: the arguments do not fit the program; the argument is named.
        """
        leaves = self.arguments.leaves(args, kwargs)
        if not self.only_tensors:
            self.check_constants(leaves)
        try:
            tensors = map(leaves.__getitem__, self.tensors)
            key = sizes, *[(t.shape, t.stride(), t.dtype, t.device, t.__class__) for t in tensors]
            if self.from_offset_0:
                key += tuple([leaves[i].storage_offset() for i in self.tensors])
            fit = self.fits.get(key)
        except (AttributeError, RuntimeError, TypeError):  # not a tensor, or one without strides
            fit, key = None, ()
        if fit is None:
            fit = self.fit(leaves, sizes)
            if len(self.fits) >= _KEPT_FITS:
                self.fits.clear()
            self.fits[key] = fit
        return fit.dims, [_cut(leaves[share.leaf], share) for share in fit.shares]

    def check_constants(self, leaves: Sequence[Any]) -> None:
        for i, value in self.constants:
            if not _same(leaves[i], value):
                number = isinstance(leaves[i], (int, float)) and not isinstance(leaves[i], bool)
                tensor = f": pass a number that changes as a tensor, torch.tensor({leaves[i]!r}), or" if number else ":"
                error = CoverageError if isinstance(leaves[i], (Tensor, *_SCALARS)) else SessionError
                raise error(
                    f"{self.arguments.names[i]} was {value!r} when the program was captured, now {leaves[i]!r}",
                    where=f"program {self.program.name!r}",
                    fix=f"arguments that are no tensors are part of the program{tensor} capture it again with this one",
                )
        for i, j in self.again:
            if leaves[i] is not leaves[j]:
                raise CoverageError(
                    f"{self.arguments.names[i]} and {self.arguments.names[j]} were one tensor when the program was "
                    "captured, now they are two",
                    where=f"program {self.program.name!r}",
                    fix="pass the same tensor, or capture the program with two",
                )

    def fit(self, leaves: Sequence[Any], sizes: Sequence[int] | None = None) -> Fit:
        """How these leaves are split; see :meth:`split`."""
        for i in self.tensors:
            self.check_leaf(i, leaves[i])
        self.check_rows(leaves)
        rows: dict[int, list[tuple[int, int]]] = {}
        cut: list[tuple[Share, Blob, tuple[int, ...]]] = []
        for i, replica, name in self.targets:
            dim, shape = self.program.interface.feeds[i].batch_dim, list(leaves[i].shape)
            start = length = 0
            if dim is not None:
                if i not in rows:
                    rows[i] = self.chunks(i, leaves[i], dim) if sizes is None else _rows_of(sizes)
                if i not in self.placed:
                    start, length = rows[i][replica]
                    shape[dim] = length
            whole = dim is None or len(self.program.replicas) == 1 or i in self.placed
            share = Share(i, None if whole else dim, start, length, None)
            cut.append((share, self.program.step.blobs[name], tuple(leaves[i].shape if whole else shape)))
        dims = self.solve([(share.leaf, blob, shape) for share, blob, shape in cut], leaves, self.shares(rows))
        check_layouts(self.program, dims, self.places, self.threads)
        for check in (*self.checks, self.witness or self.require_known):
            check(dims)
        return Fit(dims, tuple(self.laid_out(share, blob, leaves[share.leaf], dims) for share, blob, _ in cut))

    def shares(self, rows: Mapping[int, Sequence[tuple[int, int]]]) -> dict[str, int]:
        """The dimensions that the shares of leaves give which are not cut: a placed module reads them whole.

        Args:
            rows: by leaf, start and length of each replica's rows.
        """
        found = {}
        for i in self.placed:
            name, times = self.rows(i) or ("", 1)
            if i in rows and name:
                for prefix, (_, length) in zip(self.program.sharing, rows[i], strict=True):
                    found[f"{prefix}{name}"] = length // times
        return found

    def check_leaf(self, i: int, leaf: Any) -> None:
        name, where = self.arguments.names[i], f"program {self.program.name!r}"
        if not isinstance(leaf, Tensor):
            error = CoverageError if isinstance(leaf, _SCALARS) else SessionError
            raise error(
                f"{name} is of type {type(leaf).__name__}, not a tensor", where=where, fix="pass a torch.Tensor"
            )
        if leaf.is_meta or isinstance(leaf, FakeTensor):
            what = "on meta" if leaf.is_meta else "a fake tensor"
            raise SessionError(f"{name} is {what}, so it has no data", where=where, fix="pass a tensor with data")
        if kind := not_dense(leaf):
            raise SessionError(f"{name} is a {kind} tensor", where=where, fix="pass a dense (strided) one")
        if type(leaf) not in PLAIN:
            raise SessionError(
                f"{name} is a {type(leaf).__name__}, a subclass of Tensor",
                where=where,
                fix="pass it .as_subclass(torch.Tensor)",
            )
        blob = self.captured(i)
        if blob is None or blob.dtype is None:
            return
        dtype = to_torch(blob.dtype)
        if leaf.dtype != dtype:
            raise SessionError(
                f"{name} has dtype {leaf.dtype}, the program takes {dtype}",
                where=where,
                fix=f"pass it .to({dtype}), or capture the program with {to_symbol(leaf.dtype)}",
            )
        if blob.shape is not None and len(blob.shape) != leaf.dim():
            raise self.misshapen(i, blob.shape, leaf, leaf.shape)

    def check_rows(self, leaves: Sequence[Tensor]) -> None:
        """Leaves whose rows are one dimension have equally many."""
        first: dict[tuple[str, int], int] = {}
        for i in self.tensors:
            dim, rows = self.program.interface.feeds[i].batch_dim, self.rows(i)
            if dim is None or rows is None:
                continue
            j = first.setdefault(rows, i)
            there = self.program.interface.feeds[j].batch_dim or 0
            ours, theirs = leaves[i].shape[dim], leaves[j].shape[there]
            if ours != theirs:
                raise SessionError(
                    f"{self.arguments.names[j]} has {counted(theirs, 'row')}, {self.arguments.names[i]} {ours}",
                    where=f"program {self.program.name!r}",
                    fix="give as many rows of each",
                )

    def rows(self, i: int) -> tuple[str, int] | None:
        """The dimension that a leaf's rows are, and how often; the latter is the number of equal parts that it has."""
        blob, dim = self.captured(i), self.program.interface.feeds[i].batch_dim
        size = blob.shape[dim] if blob is not None and blob.shape is not None and dim is not None else None
        if not isinstance(size, Polynomial):
            return None
        parts = {(tuple(map(base_name, names)), times) for names, times in size.terms}
        if len(parts) > 1:  # of a placed module the dimensions of all replicas, each as often
            return None
        ((names, times),) = parts
        return (names[0], times) if len(names) == 1 and times > 0 else None

    def captured(self, i: int) -> Blob | None:
        """The blob of the first replica that a leaf goes to; None where nothing reads it."""
        name = self.program.interface.feeds[i].blob
        return None if name is None else self.program.step.blobs.get(self.program.blob_of(name))

    @cached_property
    def _micro(self) -> int:
        """The number of micro-batches."""
        return micro_batches(self.program.step.blobs)

    def chunks(self, i: int, leaf: Tensor, dim: int) -> list[tuple[int, int]]:
        """Start and length of the rows of each replica that shares in the batch, see :meth:`Program.divided`;
        micro-batches are equally long."""
        size, (_, parts), micro = leaf.shape[dim], self.rows(i) or ("", 1), self._micro
        if size % micro:
            raise CoverageError(
                f"{self.arguments.names[i]} has {counted(size, 'row')} along dimension {dim}, which {micro} "
                "micro-batches do not divide",
                where=f"program {self.program.name!r}",
                fix=f"give {-(-size // micro) * micro} rows, or another multiple of {micro}",
            )
        lengths = [micro * share for share in self.program.divided(size // micro)]
        if any(length % parts for length in lengths):
            share = "" if len(lengths) == 1 else f", in shares of {', '.join(map(str, lengths))}"
            raise CoverageError(
                f"{self.arguments.names[i]} has {counted(size, 'row')} along dimension {dim}{share}, and the program "
                f"cuts a share into {parts} equal parts",
                where=f"program {self.program.name!r}",
                fix=f"give a multiple of {parts} rows to each replica",
            )
        if 0 in lengths:
            raise self._too_few(i, f"{counted(size, 'row')} along dimension {dim}", lengths)
        return _rows_of(lengths)

    def _too_few(self, i: int, rows: str, lengths: Sequence[int]) -> SessionError:
        """The refusal of a leaf's *rows*, of which the replicas would have these *lengths*."""
        replicas, (dim, parts) = len(self.program.replicas), self.rows(i) or ("", 1)
        shares, unlike = len(lengths) - lengths.count(0), self.program.shares
        what = (
            f"{self.arguments.names[i]} has {rows}, too few for {counted(replicas, 'replica')}: "
            f"{f'shares={list(unlike)}' if unlike else 'torch.chunk'} makes {counted(shares, 'share')} of at most "
            f"{max(lengths)}"
        )
        where, least = f"program {self.program.name!r}", parts * replicas
        if not shares and (replicas == 1 or dim == BATCH):
            return SessionError(what, where=where, fix=f"give at least {counted(parts, 'row')}")
        fix = f"give at least {least} rows, and such that ceil(rows / {least}) leaves some for the last"
        if unlike:
            fix = f"give {parts * sum(unlike)} rows, or a multiple"
        if not shares:
            return SessionError(what, where=where, fix=fix)
        return SmallShares(what, where=where, fix=fix, fewer=shares if dim == BATCH else 0, dims={})

    def solve(
        self, cut: Sequence[tuple[int, Blob, tuple[int, ...]]], leaves: Sequence[Tensor], known: Mapping[str, int]
    ) -> dict[str, int]:
        """The value of each dimension, of those that are *known* the one given; the captured one where no input
        depends on it."""
        found: dict[str, int] = dict(known)
        first: dict[str, int] = {}
        sizes = [
            (size, actual, share) for share in cut for size, actual in zip(share[1].shape or (), share[2], strict=False)
        ]
        # Sizes of one dimension first: they give the values by which those of several are checked.
        for size, actual, (i, blob, shape) in sorted(sizes, key=lambda entry: len(size_dims(entry[0])) > 1):
            # Lookups are whole inputs of one dimension: there may be none, where all bags are empty.
            lookups = len(shape) == 1 and self.program.interface.feeds[i].batch_dim is None
            _meet(size, actual, found, 0 if lookups else 1)
            if bind(size, {**self.program.dims, **found}) != actual:
                met = [(dim, found[dim], first[dim]) for dim in size_dims(size) if dim in first]
                raise self.misshapen(i, blob.shape or (), leaves[i], shape, met)
            for dim in found.keys() - first.keys():
                first[dim] = i
        dims = {**self.program.dims, **found}
        if guard := self.program.covers.broken(dims):
            refusal = self._outside(guard, dims, first)
            if self.witness is None or isinstance(refusal, SmallShares):
                raise refusal
            try:
                self.witness(dims)  # the test may make no difference
            except CoverageError:
                raise refusal from None
        return dims

    def require_known(self, dims: Dims) -> None:
        """Refuse sizes of which only a witness could tell whether the program holds."""
        if unknown := self.program.covers.unknown(dims):
            raise CoverageError(
                f"nobody knows whether the program holds at {point_text(dims)}: {unknown}",
                where=f"program {self.program.name!r}",
                fix="list these sizes at the capture, graphir.capture(…, sizes=[…]), or keep the captured program and "
                "give it to the session: witness=program",
            )

    def _outside(self, guard: Guard, dims: Dims, first: Mapping[str, int]) -> CoverageError:
        """The refusal of sizes for which *guard* does not hold; *first* are the leaves that say each dimension."""
        sizes = ", ".join(
            f"{base_name(dim)} is {dims[dim]}" + (" in a replica's share" if base_name(dim) != dim else "")
            for dim in guard.dims
        )
        leaf = next((first[dim] for dim in guard.dims if dim in first), None)
        place = "" if leaf is None else f"{self.arguments.names[leaf]}: "
        what = f"{place}{sizes}, the program takes {guard.renamed(base_name)}: {guard.reason}"
        where, fix = f"program {self.program.name!r}", "give other sizes, or capture the model at these"
        if guard.renamed(base_name)[:4] == _SEVERAL_ROWS:
            return SmallShares(what, where=where, fix=fix, fewer=len(self.program.sharing) - 1, dims=dims)
        return CoverageError(what, where=where, fix=fix)

    def misshapen(
        self,
        i: int,
        shape: Sequence[Size],
        leaf: Tensor,
        share: Sequence[int],
        met: Sequence[tuple[str, int, int]] = (),
    ) -> SessionError:
        """The refusal of a leaf for the shape of its *share*; *met* are dimensions, their values and their leaves."""
        expected = ", ".join(str(rename_dims(size, base_name)) for size in shape)
        each = f" for each of {len(self.program.replicas)} replicas" if len(self.program.replicas) > 1 else ""
        pairs = enumerate(zip(shape, share, strict=False))
        wrong = [(d, want) for d, (want, have) in pairs if isinstance(want, int) and want != have]
        if len(shape) != leaf.dim():
            fix = f"give a tensor of {counted(len(shape), 'dimension')}"
        elif wrong and self.program.covers.fixed:
            fix = f"its sizes are fixed: {self.program.covers.fixed}"
        elif wrong:
            fix = f"dimension {wrong[0][0]} has to be {wrong[0][1]}"
        elif met:
            known = (f"{base_name(dim)} is {value} by {self.arguments.names[j]}" for dim, value, j in met)
            fix = f"every size must follow from the same dimensions: {', '.join(dict.fromkeys(known))}"
        else:
            fix = "every size must follow from the same dimensions"
        error = CoverageError if wrong or len(shape) != leaf.dim() else SessionError
        return error(
            f"{self.arguments.names[i]} has shape {list(leaf.shape)}, the program takes [{expected}]{each}",
            where=f"program {self.program.name!r}",
            fix=fix,
        )

    def laid_out(self, share: Share, blob: Blob, leaf: Tensor, dims: Dims) -> Share:
        """The share, with the layout to which it has to be copied, if it has to."""
        if blob.shape is None:
            return share
        size, strides = bound_layout(blob, dims)
        offset = leaf.storage_offset() + (0 if share.dim is None else share.start)
        place = self.places.get(blob.device, _HOST)
        if overlaps(size, strides) and leaf.stride() != strides:
            raise CoverageError(
                f"{self.arguments.names[share.leaf]} has strides {list(leaf.stride())}, the program takes "
                f"{list(strides)}: elements that share memory",
                where=f"program {self.program.name!r}",
                fix="expand it as the captured one was, or capture the program with a dense tensor",
            )
        same = leaf.stride() == strides and leaf.device == place and type(leaf) is Tensor
        if same and blob.storage not in self.overwritten and not (self.from_offset_0 and offset):
            return share
        return share._replace(layout=(size, strides, place))


def _rows_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and length of the rows of replicas that have so many."""
    return list(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _meet(size: Size, actual: int, found: dict[str, int], lowest: int) -> None:
    """Add the value of the only dimension of *size* that is not known yet, if one from *lowest* up gives *actual*."""
    unknown = [dim for dim in size_dims(size) if dim not in found]
    if len(unknown) == 1:
        least, next_ = (bind(size, {**found, unknown[0]: value}) for value in (0, 1))
        value, rest = divmod(actual - least, next_ - least) if next_ != least else (0, 1)
        if rest == 0 and value >= lowest:
            found[unknown[0]] = value


def _cut(leaf: Tensor, share: Share) -> Tensor:
    if share.dim is not None:
        leaf = leaf.narrow(share.dim, share.start, share.length)
    if share.layout is None:
        return leaf
    size, strides, place = share.layout
    with torch.no_grad():
        if overlaps(size, strides):
            return copy(leaf, place)
        return allocate(leaf, size, strides, place).copy_(leaf, non_blocking=place.type == "cuda")


def _same(value: object, captured: Scalar) -> bool:
    if type(value) is not type(captured):
        return False
    return value == captured or (value != value and captured != captured)
