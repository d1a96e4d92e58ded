"""Sites: where the operators of a captured program run once it is spread over devices, and how gradients of several
sites are reduced.

A captured operator reads the same at every site but for its names, which get the site's prefix, and its sizes::

    cat : f32[batch,12] @gpu:0   ─▶   gpu_0/cat : f32[gpu_0/batch,12] @gpu:0
                                      gpu_1/cat : f32[gpu_1/batch,12] @gpu:1
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, TypeAlias

from pydantic import BeforeValidator, ValidationInfo

from graphir.errors import PassError, nearest
from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.device import Device, gpu
from graphir.ir.frozen import FrozenDict
from graphir.ir.names import fresh, replica_prefix
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator, map_arg
from graphir.ir.program import Gathered, Program
from graphir.ir.shares import divided, read_shares
from graphir.ir.size import BATCH, Polynomial, Shape, Size, add, dimension, multiply, rename_dims
from graphir.ir.structure import names, read_structure
from graphir.ir.text import operator_text

from .base import OptionError, read_option
from .sparse_reduction import reduce_sparse, sparse_gradients
from .standing import Order

__all__ = [
    "BEFORE_SPREAD",
    "Shares",
    "Site",
    "batches_of",
    "dims_of",
    "distinct",
    "divided_anew",
    "gathered",
    "gradient_reduction",
    "reduced",
    "replica_sites",
    "require_alike",
    "require_one_result",
    "shares_of",
]


def distinct(devices: tuple[int, ...]) -> tuple[int, ...]:
    """The devices, at least one and none twice; a field's validator."""
    if not devices:
        raise OptionError("no devices", fix="give at least one, such as [0]")
    repeated = sorted({d for d in devices if devices.count(d) > 1})
    if repeated:
        raise OptionError(f"device {repeated[0]} is given more than once", fix="give each replica a device of its own")
    return devices


def _fitting(given: Any, info: ValidationInfo) -> tuple[int, ...]:
    """Shares, one for each of the ``devices``, of which another field has the refusal if there are none."""
    devices = info.data.get("devices")
    return () if devices is None else read_option(lambda shares: read_shares(shares, len(devices)), given)


Shares: TypeAlias = Annotated[tuple[int, ...], BeforeValidator(_fitting)]
"""An option behind ``devices``: the shares of a batch, as :attr:`Program.shares` has them."""


BEFORE_SPREAD: Final[Order] = {
    "replicated": "every replica is a copy of the captured program",
    "parked": "each replica parks its own",
    "placed": "each replica is placed by itself",
    "shared": "a value that replicas reduce or split would be overwritten before",
}
"""Behind which programs none comes that makes replicas, and why."""


def require_one_result(program: Program, replicas: int) -> None:
    """Refuse a program whose results *replicas* could not hand back as one.

    Raises:
        PassError: it is such a program.
    """
    if program.interface.one_replica and replicas > 1:
        raise PassError(
            f"the results of {replicas} replicas of program {program.name!r} can't be put together: the "
            f"step could be recorded at one batch only, so nobody knows along which dimension ({program.covers.fixed})",
            fix="replicate it on one device, or let the model take other batches",
        )
    for fetch in program.interface.fetches if replicas > 1 else ():
        if fetch.batch_dim is None and fetch.gather is None:
            raise PassError(
                f"nothing tells what result {fetch.blob!r} of {replicas} replicas of program {program.name!r} is",
                fix="return its rows, a sum over the batch, or a floating-point number, which is averaged; or say what "
                "it is: gather={NAME: 'first'}, 'mean', 'sum', 'min', 'max', 'cat' or 'each'",
            )


def gathered(program: Program, gather: Mapping[str, Gathered]) -> Program:
    """The program whose results of several replicas become one as *gather* says, by the keys that lead to a result.

    Raises:
        PassError: there is no such result, or it is no tensor.
    """
    interface = program.interface
    named = [] if interface.results is None else list(names(read_structure(interface.results)))
    fetches = list(interface.fetches)
    for name, how in gather.items():
        if name not in named:
            raise PassError(
                f"gather names {name!r}, which is no result of program {program.name!r}{nearest(name, named)}",
                fix=f"results: {', '.join(named)}" if named else "the program returns its loss alone: the mean",
            )
        at = named.index(name)
        if fetches[at].blob is None:
            raise PassError(
                f"gather names {name!r}, which is no tensor", fix="leave it out: all replicas have the same"
            )
        fetches[at] = fetches[at]._replace(batch_dim=None, gather=how)
    return program.with_(interface=replace(interface, fetches=tuple(fetches))) if gather else program


class Site:
    """How names, sizes, blobs and operators of the captured program read at one site.

    Args:
        program: as captured.
        device: of the site; it gives the prefix.
        resized: what a captured size is here.
        by: the pass that spreads the program; empty where operators are where they were captured.
    """

    def __init__(self, program: Program, device: Device, resized: Callable[[Size], Size], by: str) -> None:
        self.device, self.resized, self.by = device, resized, by
        self.prefix = replica_prefix(device.index)
        self.shared = frozenset(name for group in program.interface.param_groups for name in group.blobs)
        self._names: dict[str, str] = {}
        self._shapes: dict[Shape, Shape] = {}

    def blob_name(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:  # one string a name: look-ups by the same object are the fastest
            found = self._names[name] = name if name in self.shared else self.prefix + name
        return found

    def rename(self, name: str, here: str) -> None:
        """Let a captured name be another one here, behind the prefix."""
        self._names[name] = self.prefix + here

    def names(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(self.blob_name, names))

    def shape(self, shape: Shape | None) -> Shape | None:
        if shape is None:
            return None
        if shape not in self._shapes:
            self._shapes[shape] = tuple(map(self.resized, shape))
        return self._shapes[shape]

    def blob(self, blob: Blob) -> Blob:
        return blob._replace(
            name=self.blob_name(blob.name),
            shape=self.shape(blob.shape),
            device=self.placed(blob.device),
            storage=self.blob_name(blob.storage),
            strides=self.shape(blob.strides),
            offset=self.resized(blob.offset),
        )

    def placed(self, device: Device) -> Device:
        """Where what is captured on *device* is: on the host it stays there."""
        return self.device if device.kind == "gpu" else device

    def scalar(self, scalar: Any) -> Any:
        return self.resized(scalar) if scalar.__class__ is Polynomial else scalar

    def op(self, op: Operator) -> Operator:
        device = self.placed(op.device)
        args = op.args
        if args:
            args = FrozenDict({key: map_arg(value, self.scalar) for key, value in args.items()})
        of = self.blob_name(op.of) if op.of else ""
        names = op.type, self.names(op.inputs), self.names(op.outputs), args, device
        by = self.by or op.by
        return Operator._make(names + op[5:7] + (by,) + op[8:15] + (of,) + op[16:])  # half of _replace


def replica_sites(program: Program, devices: Sequence[int], by: str) -> list[Site]:
    """A site for each replica, in order; its dimensions have its prefix."""
    sites = []
    for replica, number in enumerate(devices):
        resized = partial(rename_dims, rename=replica_prefix(number).__add__)
        sites.append(Site(program, gpu(number), resized, by if replica or number else ""))
    return sites


def dims_of(program: Program, sites: Sequence[Site], shares: Sequence[int]) -> dict[str, int]:
    """The value of each replica's dimensions: the captured ones, but of the batch, by *shares*, as many rows as all
    replicas together would have with equal ones.

    Raises:
        PassError: there are shares and no batch to divide, or none of its rows are left for a replica.
    """
    dims = {site.prefix + dim: value for site in sites for dim, value in program.dims.items()}
    return {**dims, **_rows_by(program, dims, [site.prefix for site in sites], shares)} if shares else dims


def divided_anew(program: Program, shares: tuple[int, ...]) -> Program:
    """A program with replicas whose batch is divided by other *shares*: as many rows as before, all replicas together.

    No operator depends on shares: sizes follow the rows of each replica.

    Raises:
        PassError: there is no batch to divide, or none of its rows are left for a replica.
    """
    rows = _rows_by(program, program.dims, program.replicas, shares)
    return program.with_(dims={**program.dims, **rows}, shares=shares)


def batches_of(program: Program, dims: Mapping[str, int], prefixes: Sequence[str]) -> list[str]:
    """The batch dimension of each replica.

    Raises:
        PassError: *dims* lacks one, so that all replicas take the same sizes.
    """
    batches = [prefix + BATCH for prefix in prefixes]
    if not dims.keys() >= set(batches):
        raise PassError(
            f"every replica of program {program.name!r} takes the same sizes, so that shares cannot differ: "
            f"{program.covers.fixed or 'no dimension is the batch'}",
            fix="let its sizes follow the batch, or leave shares out",
        )
    return batches


def _rows_by(
    program: Program, dims: Mapping[str, int], prefixes: Sequence[str], shares: Sequence[int]
) -> dict[str, int]:
    """The batch dimension of each replica, and its rows by *shares* of all that *dims* has."""
    batches = batches_of(program, dims, prefixes)
    rows = divided(sum([dims[batch] for batch in batches]), shares)
    if 0 in rows:
        raise PassError(
            f"shares={list(shares)} divides the {sum(rows)} rows of {len(prefixes)} replicas as {rows}, and the last "
            "gets none",
            fix=f"capture the model at a batch of {sum(shares)} rows, or give shares that are less unlike",
        )
    return dict(zip(batches, rows, strict=True))


def shares_of(program: Program, sites: Sequence[Site]) -> tuple[Arg, ...]:
    """Each replica's share of the batch: its batch dimension where sizes follow it, else one each."""
    if BATCH in program.dims:
        return tuple([dimension(site.prefix + BATCH) for site in sites])
    return (1,) * len(sites)


def reduced(
    net: Net, program: Program, sites: Sequence[Site], reduction: str, by: str, alone: Container[str] = ()
) -> Net:
    """The net with every gradient reduced that an update reads or that is an output, before the first update behind it.

    Args:
        net: of all sites.
        program: as captured.
        sites: of the replicas.
        reduction: ``mean`` or ``sum``.
        by: the pass that reduces.
        alone: gradients, by their captured names, that one site has alone.
    """
    sparse = {pair: param for pair, param in sparse_gradients(program.step).items() if pair[0] not in alone}
    parts = {name for pair in sparse for name in pair}
    grads = [grad for grad in _reduced_gradients(program.step) if grad not in parts and grad not in alone]
    if len(sites) == 1 or not (grads or sparse):
        return net
    blobs = dict(net.blobs)
    renamed: dict[str, str] = {}
    reductions: list[Operator] = []
    args: dict[str, Arg] = {}
    if reduction == "mean":
        args = {"reduction": "mean", "shares": shares_of(program, sites)}
    pattern = f"[{'t' * len(sites)}]"
    for grad in grads:
        inputs = tuple(site.blob_name(grad) for site in sites)
        outputs = tuple(fresh(f"{name}_reduced", blobs) for name in inputs)
        for name, output in zip(inputs, outputs, strict=True):
            blobs[output] = blobs[name]._replace(name=output, storage=output, offset=0, role="gradient")
        renamed.update(zip(inputs, outputs, strict=True))
        reductions.append(
            Operator(
                type="AllReduce",
                inputs=inputs,
                outputs=outputs,
                args=args,
                device=sites[0].device,
                phase="reduce",
                by=by,
                operands=pattern,
                results=pattern,
            )
        )
    for (indices, values), param in sparse.items():
        pairs = [(site.blob_name(indices), site.blob_name(values)) for site in sites]
        reductions += reduce_sparse(pairs, [site.blob_name(param) for site in sites], args, blobs, renamed, by)
    _move_views(net, blobs, renamed)
    return net.with_(
        ops=tuple(_before_updates(net.ops, reductions, renamed)),
        blobs=blobs,
        external_outputs=tuple([renamed.get(name, name) for name in net.external_outputs]),
    )


def _move_views(net: Net, blobs: dict[str, Blob], renamed: Mapping[str, str]) -> None:
    """Let views that an update makes of a gradient be views of the reduced one."""
    bases = {name: (reduced, net.blobs[name].offset) for name, reduced in renamed.items()}
    for op in net.ops if bases else ():
        for output, source in op.effects.views if op.phase == "update" else ():
            if (base := bases.get(op.inputs[source])) is not None:
                view, (storage, offset) = blobs[op.outputs[output]], base
                blobs[view.name] = view._replace(storage=storage, offset=add(view.offset, multiply(offset, -1)))
                bases[view.name] = base


def _before_updates(
    ops: Sequence[Operator], reductions: Sequence[Operator], renamed: Mapping[str, str]
) -> Iterator[Operator]:
    """The operators, with the reductions of what was made so far before each operator of an update, and with the rest
    at the end. Only updates read what is reduced."""
    waiting, made = list(reductions), set[str]()
    for op in ops:
        if op.phase == "update":
            left = list[Operator]()
            for each in waiting:
                if made.issuperset(each.inputs):
                    yield each
                    made.update(each.outputs)
                else:
                    left.append(each)
            waiting = left
            yield _reading(op, renamed)
        else:
            yield op
            made.update(op.outputs)
    yield from waiting


def gradient_reduction(program: Program) -> Mapping[str, Arg]:
    """How a program reduces gradients over its replicas: ``reduction`` and ``shares`` as ``AllReduce`` takes them.
    Empty where it adds them up. Where no operator reduces gradients, as :attr:`Program.reduction` says."""
    for op in program.step.ops:
        if op.phase == "reduce" and op.type in ("AllReduce", "graphir.sparse_sum"):
            return {name: op.args[name] for name in ("reduction", "shares") if name in op.args}
    if program.reduction == "sum":
        return {}
    rows = [prefix + BATCH for prefix in program.replicas]
    shares: tuple[Arg, ...] = (1,) * len(rows)
    if all(dim in program.dims for dim in rows):
        shares = tuple(map(dimension, rows))
    return {"reduction": "mean", "shares": shares}


def _reduced_gradients(step: Net) -> list[str]:
    """Gradients of parameters that an update reads or the caller gets, in the order in which they are made. Gradients
    of activations are each replica's own, and so is all else that an update reads."""
    wanted = {name for op in step.ops if op.phase == "update" for name in op.inputs}
    wanted = {*wanted, *step.external_outputs}.difference(step.gradients.values())
    made = [name for op in step.ops if op.phase in ("forward", "backward") for name in op.outputs]
    return [name for name in dict.fromkeys(made) if name in wanted and step.blobs[name].role == "gradient"]


def require_alike(program: Program) -> None:
    """Refuse a program whose replicas would come to differ in parameters or in the optimizer's state: an update of them
    reads what each replica computes of its own rows, or draws.

    Raises:
        PassError: there is one.
    """
    step = program.step
    reduced = {*_reduced_gradients(step), *(name for pair in sparse_gradients(step) for name in pair)}
    own = {str(feed.blob) for feed in program.interface.feeds if feed.batch_dim is not None}
    for op in step.ops:
        update = op.phase == "update"
        read = [name for name in op.inputs if name in own and not (update and name in reduced)]
        if not read and op.seed is None:
            continue
        written = [name for name in op.outputs if step.blobs[name].role in ("param", "state")] if update else ()
        for name in written:
            raise PassError(
                f"replicas of program {program.name!r} would come to differ: each updates {name!r} by "
                + (f"{read[0]!r}, which it computes of its own rows" if read else "what it draws"),
                at=operator_text(op, step),
                fix="update by gradients and state alone; or run it on one device",
            )
        own.update(name for name in op.outputs if step.blobs[name].role not in STATE_ROLES)


def _reading(op: Operator, renamed: Mapping[str, str]) -> Operator:
    """*op* reading the renamed blobs."""
    inputs = tuple([renamed.get(name, name) for name in op.inputs])
    return op if inputs == op.inputs else op._replace(inputs=inputs)
