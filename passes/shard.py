"""Modules placed on one device each, where they see the whole batch, and the rest replicated.

This is the hybrid in which DLRM trains: its embedding tables are spread over the devices, its MLPs are replicated, and
between them every table's output is split along the batch and shuffled::

    i, o ─▶ gpu_0/emb.0 ─▶ split ─┬──────────▶ gpu_0/emb.0_split_0 ─▶ gpu_0/cat ─▶ …
                                  └─ Copy ───▶ gpu_1/emb.0_split_1 ─▶ gpu_1/cat ─▶ …

Which operators are a placed module's is found in :mod:`.regions`, what crosses is exchanged in :mod:`.exchange`.
Gradients of replicated modules are reduced over the replicas; placed modules are updated where they are, and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, ClassVar, TypeAlias

import torch
from pydantic import AfterValidator, BeforeValidator

from graphir.analysis.hazards import touches
from graphir.errors import PassError
from graphir.ir.device import CPU, Device, DeviceName, gpu
from graphir.ir.names import micro_batch_of
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Interface, Program, Reduction

from .base import Gpu, OptionError, Pass, as_gpu, build, read_option, register
from .callbacks import defines_callback, with_callbacks
from .exchange import Exchange
from .module_patterns import claims, leaves_out
from .regions import REPLICATED, Regions
from .replicas import BEFORE_SPREAD, Shares, distinct, reduced, require_alike, require_one_result
from .shard_homes import STRATEGIES, homes_of
from .shift_modules import Move
from .standing import Order
from .sync_batch_norm import synchronised_as_asked
from .table_blocks import KINDS, Kind, tables_of
from .table_split import split_tables

__all__ = ["Shard", "shard"]


Target: TypeAlias = str | tuple[Kind, tuple[int, ...]]
"""Where a module goes: to a device, as a strategy says, or in blocks to several gpus."""


def _target(given: object) -> Target | None:
    if given is None:  # of what is left out
        return None
    fix = (
        f"give a gpu, 'cpu', {' or '.join(map(repr, STRATEGIES))}, or a kind and gpus: "
        f"{' or '.join(repr((kind, [0, 1])) for kind in KINDS)}"
    )
    if isinstance(given, str | int | torch.device):
        return str(given) if given in STRATEGIES else str(read_option(Device.parse, given, fix))
    match given:
        case ["rows" | "columns" as kind, [*devices]]:
            return kind, distinct(tuple(map(as_gpu, devices)))
    raise OptionError(f"{given!r} says nowhere to go", fix=fix)


@register
class Shard(Pass):
    """See :func:`shard`."""

    name: ClassVar[str] = "shard"
    never_behind: ClassVar[Order] = BEFORE_SPREAD

    placement: Annotated[dict[str, Annotated[Target | None, BeforeValidator(_target)]], AfterValidator(leaves_out)]
    devices: Annotated[tuple[Gpu, ...], AfterValidator(distinct)]
    reduction: Reduction = "mean"
    shares: Shares = ()

    def rewrite(self, program: Program) -> Program:
        if program.step.dialect.workspace:
            raise PassError(
                f"the operators of {program.name!r} do not say which module they came from", fix="capture the model"
            )
        require_one_result(program, len(self.devices))
        if len(self.devices) > 1:
            require_alike(program)
        devices = [gpu(device) for device in self.devices]
        claimed = claims(program, self.placement)  # of the modules that there are, before there are blocks
        whole = {pattern: target for pattern, target in self.placement.items() if isinstance(target, str)}
        splits = {pattern: target for pattern, target in self.placement.items() if isinstance(target, tuple)}
        tables = tables_of(program, {m: by for m, by in claimed.items() if by in splits}, splits, devices)
        several = [table for table in tables if len(table.blocks) > 1]
        program = split_tables(program, several, self.name)
        blocks = {block.path: str(block.device) for table in several for block in table.blocks}
        blocks.update({table.module: str(table.blocks[0].device) for table in tables if table not in several})
        claimed = {m: by for m, by in claimed.items() if by in whole} | {path: path for path in blocks}
        homes = homes_of(program, claimed, {**whole, **blocks}, devices)
        spread = _spread(Regions(program, homes, self.devices, self.shares, self.name), self.reduction)
        hosted = {module: pattern for module, pattern in claimed.items() if whole.get(pattern) == CPU}
        if hosted:
            spread = Move(spread, hosted, dict.fromkeys(hosted.values(), CPU)).run()
        return with_callbacks(spread, None, self.name, own=True) if defines_callback(program.module) else spread

    def recorded(self, program: Program) -> Program:
        """Shard, and synchronise the batch norms that say so; the history has both."""
        return synchronised_as_asked(super().recorded(program), program)


def shard(
    program: Program,
    placement: Mapping[str, DeviceName | tuple[str, Sequence[DeviceName]] | None],
    devices: Sequence[DeviceName],
    *,
    reduction: Reduction = "mean",
    shares: Sequence[int] | None = None,
) -> Program:
    """Place modules on one device each, where they see the whole batch, and replicate the rest over the devices.

    What a placed module hands on is split along the batch by *shares*, and piece r is copied to replica r as
    ``gpu_<d>/<blob>_split_<d>``; gradients come back and are joined in replica order. Inputs that placed modules read
    go whole to their device. Losses, and gradients but for the order of additions, are those of the whole batch.

    In micro-batches (``accumulate``), replica r's micro-batch k is chunk k of its share, as for :func:`replicate`, and
    that of placed modules all replicas' micro-batch k, in replica order. Inputs that these read are put in this order
    on their device, as ``gpu_<d>/<input>_by_micro_batch``.

    What goes to the host belongs to the first replica, whose prefix it has, and runs on the host.

    Modules that ask for callbacks get them, and batch norms that ask for statistics over replicas are synchronised, as
    :func:`replicate` does both.

    Args:
        program: captured at the size of one replica's share.
        placement: by pattern (``"emb_l.0"``, ``"emb_l.*"``), the gpu to which the modules go, or ``"cpu"``; or
            ``"round_robin"``: to one gpu after the other; or ``"balanced"``: the largest first, each to the gpu with
            the fewest bytes of placed modules so far; or ``("rows", [0, 1])``, ``("columns", [0, 1])``: the table of an
            ``nn.Embedding`` or ``nn.EmbeddingBag`` in blocks, one on each of these gpus. ``"!emb_l.2": None`` leaves
            modules out.
        devices: numbers of gpus, or gpus as they are printed: replica r lives on ``gpu:<devices[r]>``.
        reduction: ``mean``: the loss is a mean over rows, so that each replica counts by its share; ``sum``: gradients
            are added up.
        shares: the ratio of the replicas' rows, as :func:`replicate` takes them; equal by default.

    Raises:
        PassError: a pattern names no module, or none that others leave to it, or two that are equally close say
            different things of one; a device is none of *devices*; a placed module hands on what has no batch as its
            first dimension, or shares a parameter with one that is not placed; what is to be split is no table, or
            cannot be; offsets of bags would be cut, into shares or micro-batches, and not their lookups; the program is
            replicated or placed already; or shares are refused as by :func:`replicate`. Nothing has changed then.
    """
    return build(Shard, placement=placement, devices=devices, reduction=reduction, shares=shares)(program)


def _spread(regions: Regions, reduction: Reduction) -> Program:
    """The program with every region at its sites."""
    program, net = regions.program, regions.net
    exchange = Exchange(regions, mean=reduction == "mean", by=regions.by)
    for name in net.external_inputs:
        for site in regions.sites_of(name):
            exchange.declare(name, site)
    external, loss, added = tuple(exchange.blobs), program.interface.loss, dict[str, str]()
    for name in net.external_inputs:
        exchange.order(name)
        exchange.split(name)
        exchange.pack(name)
    for op in _in_order(regions):
        for site in regions.sites(regions.at(op.device)):
            exchange.execute(op, site)
        for name in op.outputs:
            exchange.split(name)
            exchange.pack(name)
            if name == loss and reduction == "sum" and len(regions.replicas) > 1:
                added[name] = exchange.add_up(name)
    outputs = tuple(
        [site.blob_name(added.get(name, name)) for name in net.external_outputs for site in regions.sites_of(name)]
    )
    gradients = dict(exchange.gradients())
    spread = Net(net.name, tuple(exchange.ops), exchange.blobs, external, outputs, gradients)
    crossings = exchange.crossings
    alone = {
        name
        for name in net.blobs
        if regions.of(name) != REPLICATED or crossings.views.get(name, name) in crossings.joined
    }
    step = reduced(spread, program, regions.replicas, reduction, regions.by, alone)
    handed = dict(zip(outputs, step.external_outputs, strict=True))
    return program.with_(
        init=_init(regions),
        step=step,
        interface=replace(_interface(regions, handed), loss=added.get(str(loss), loss)),
        dims=regions.dims(),
        covers=program.covers.with_guards(dict.fromkeys(regions.guards())),
        replicas=tuple(site.prefix for site in regions.replicas),
        reduction=reduction,
        shares=regions.shares,
    )


def _in_order(regions: Regions) -> Iterator[Operator]:
    """The operators, but of each micro-batch before an update those first that placed modules execute without
    replicated values, and those last of the backward that the replicas do not wait for: what crosses is under way while
    the replicas compute."""
    net = regions.net
    may = {i: op.phase for i, op in enumerate(net.ops) if regions.at(op.device) != REPLICATED}
    forward, backward = ({i for i, phase in may.items() if phase == which} for which in ("forward", "backward"))
    for ends, others in groupby(enumerate(net.ops), lambda pair: pair[1].phase in ("reduce", "update")):
        for order in [[i for i, _ in others]] if ends else _micro_batches(others):
            early = dict.fromkeys(_free(net, order, forward))
            late = dict.fromkeys(_free(net, order[::-1], backward))
            yield from (net.ops[i] for i in early)
            yield from (net.ops[i] for i in order if not (i in early or i in late))
            yield from (net.ops[i] for i in reversed(late))


def _micro_batches(ops: Iterable[tuple[int, Operator]]) -> list[list[int]]:
    """The positions of each micro-batch's operators, which stand one behind the other."""
    found, latest = [list[int]()], 0
    for i, op in ops:
        own = micro_batch_of(op.outputs[0]) if op.outputs else None
        if own is not None and own > latest:
            latest = own
            found.append([])
        found[-1].append(i)
    return found


def _free(net: Net, order: Iterable[int], may: Container[int]) -> Iterator[int]:
    """The operators, of those that *may*, that depend on no earlier one in *order* that is not free: no blob and no
    storage that either of them writes is touched by the other."""
    read, written = set[str](), set[str]()
    for i in order:
        reads, writes = touches(net.ops[i], net.blobs)
        if i in may and written.isdisjoint(reads) and written.isdisjoint(writes) and read.isdisjoint(writes):
            yield i
        else:
            read |= reads
            written |= writes


def _init(regions: Regions) -> Net:
    init = regions.init
    sites = {name: regions.sites(regions.of(name)) for name in init.blobs}
    blobs = [site.blob(blob) for name, blob in init.blobs.items() for site in sites[name]]
    ops = [site.op(op) for op in init.ops for site in sites[op.outputs[0]]]
    return init.with_(ops=tuple(ops), blobs={blob.name: blob for blob in blobs})


def _interface(regions: Regions, handed: Mapping[str, str]) -> Interface:
    """The interface, with what is placed, and with the gradients that are *handed* back after their reduction."""
    interface, first = regions.program.interface, regions.replicas[0].prefix
    named = [slot.blob for slot in (*interface.feeds, *interface.fetches) if slot.blob is not None]
    named += [*interface.module_state.values(), *interface.gradients.values()]
    named += [name for own in interface.optimizer_state.values() for name in own.values()]
    named += [name for group in interface.param_groups for name in group.params]
    placed = {
        name: tuple(site.prefix for site in regions.sites_of(name))
        for name in dict.fromkeys(blob for name in named for blob in interface.blobs_of(name))
        if name in regions.net.blobs and regions.of(name) != REPLICATED
    }
    gradients = {
        param: grad if grad in placed or grad in interface.parts else handed[first + grad].removeprefix(first)
        for param, grad in interface.gradients.items()
    }
    return replace(interface, gradients=gradients, placed=placed)
