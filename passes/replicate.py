"""One copy of the step per device, gradients reduced over the copies.

::

    x, y ──▶ gpu_0/… ──▶ gpu_0/w_grad ─┐             ┌─▶ gpu_0/w_grad_reduced ──▶ update gpu_0/w
                                       ├─ AllReduce ─┤
    x, y ──▶ gpu_1/… ──▶ gpu_1/w_grad ─┘             └─▶ gpu_1/w_grad_reduced ──▶ update gpu_1/w

Every replica has its own parameters, optimizer state and buffers, starts from the same values, and applies the same
reduced gradient; so parameters and optimizer state stay bitwise equal, while buffers (batch norm's statistics) follow
each replica's share of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from graphir.errors import PassError
from graphir.ir.device import DeviceName
from graphir.ir.names import replica_prefix
from graphir.ir.net import Net
from graphir.ir.program import Gathered, Interface, Program, Slot

from .base import Gpu, Pass, build, register
from .callbacks import Callback, OnReplica, defines_callback, with_callbacks
from .replicas import (
    BEFORE_SPREAD,
    Shares,
    Site,
    dims_of,
    distinct,
    divided_anew,
    gathered,
    reduced,
    replica_sites,
    require_alike,
    require_one_result,
)
from .standing import Order
from .sync_batch_norm import synchronised_as_asked

__all__ = ["Replicate", "replicate"]


@register
class Replicate(Pass):
    """See :func:`replicate`."""

    name: ClassVar[str] = "replicate"
    never_behind: ClassVar[Order] = BEFORE_SPREAD

    devices: Annotated[tuple[Gpu, ...], AfterValidator(distinct)]
    reduction: Literal["mean", "sum"] = "mean"
    shares: Shares = ()
    gather: dict[str, Gathered] = {}  # noqa: RUF012
    on_replica: OnReplica = None

    def require_order(self, program: Program) -> None:
        """Refuse a program behind which replicate may not come: any with replicas, unless these get other shares."""
        if not self._divides(program):
            super().require_order(program)

    def rewrite(self, program: Program) -> Program:
        if self._divides(program):
            return self._divided(program)
        replicated = self._copied(program)
        if self.on_replica is None and not defines_callback(program.module):
            return replicated
        function = None if self.on_replica is None else self.on_replica.required(self.name)
        return with_callbacks(replicated, function, self.name, own=True)

    def recorded(self, program: Program) -> Program:
        """Replicate, and synchronise the batch norms that say so; the history has both."""
        replicated = super().recorded(program)
        return replicated if self._divides(program) else synchronised_as_asked(replicated, program)

    def _divides(self, program: Program) -> bool:
        """Whether the program has its replicas already, on these devices, and they get other shares."""
        return bool(self.shares) and program.replicas == tuple(map(replica_prefix, self.devices))

    def _divided(self, program: Program) -> Program:
        others, fix = "", ""
        if self.on_replica is not None:
            others, fix = f"on_replica={self.on_replica}", "leave on_replica out"
        elif self.reduction != program.reduction:
            others, fix = f"reduction={self.reduction}", f"give reduction={program.reduction!r}"
        elif self.gather:
            others, fix = f"gather={self.gather}", "leave gather out"
        if others:
            raise PassError(
                f"program {program.name!r} has replicas on these devices, which get other shares alone, not {others}",
                fix=f"{fix}, or replicate the captured program anew",
            )
        return divided_anew(program, self.shares)

    def _copied(self, program: Program) -> Program:
        program = gathered(program, self.gather)
        require_one_result(program, len(self.devices))
        if len(self.devices) > 1:
            require_alike(program)
        covers = program.covers
        sites = replica_sites(program, self.devices, self.name)
        copied = _interleave(program.step, sites)
        step = reduced(copied, program, sites, self.reduction, self.name)
        return program.with_(
            init=_interleave(program.init, sites),
            step=step,
            interface=_with_gradients_of(program.interface, sites[0].prefix, copied, step),
            dims=dims_of(program, sites, self.shares),
            covers=covers.with_guards(guard.renamed(site.prefix.__add__) for site in sites for guard in covers.guards),
            replicas=tuple(site.prefix for site in sites),
            reduction=self.reduction,
            shares=self.shares,
        )


def replicate(
    program: Program,
    devices: Sequence[DeviceName],
    *,
    reduction: Literal["mean", "sum"] = "mean",
    shares: Sequence[int] | None = None,
    gather: Mapping[str, Gathered] | None = None,
    on_replica: Callback | None = None,
) -> Program:
    """One replica of a captured program per device, gradients averaged (or summed) in replica order.

    *devices* are numbers of gpus, or gpus as they are printed (``"gpu:1"``). Replica r lives on ``gpu:<devices[r]>``
    and its blobs have the prefix ``gpu_<devices[r]>/``; learning rates are shared. With ``reduction="mean"`` each
    replica counts by its share of the batch. The reference is eager PyTorch run share by share with the gradients added
    in replica order and divided by their number.

    *shares* are a positive whole number for each device: with ``devices=[0, 1], shares=[3, 1]`` the first replica gets
    three quarters of the rows of each batch. Replica r gets ``ceil(rows * shares[r] / sum(shares))`` rows, the replicas
    before it first, as long as there are rows; with equal shares, the default, that is torch.chunk's rule. The sizes
    at which the program is predicted have, over all replicas, as many rows as with equal shares.

    *gather* says what results of a step function are over the replicas, by the keys that lead to a result: ``{"norm":
    "first", "pair.0": "max"}``. ``first`` is the first replica's, ``mean`` the mean by shares, ``sum``, ``min`` and
    ``max`` are of each number, ``cat`` puts tensors together along their first dimension and numbers into a vector,
    ``each`` is a list. By default, the step tells; see :doc:`capture`.

    A program that is replicated or sharded over these *devices* already, in this order, gets these *shares*, and stays
    as it is otherwise, wherever its operators were placed: other shares need no other operators.

    ``on_replica(ctx, copy_id, replica)`` is called for every copy of every module, as
    :func:`~graphir.passes.replication_callback` does. A module that defines ``__data_parallel_replicate__(ctx,
    copy_id)`` is called without asking, on its copy, before it. A batch norm whose class has
    ``statistics_over_replicas = True`` is synchronised as by :func:`~graphir.passes.sync_batch_norm`.

    Raises:
        PassError: devices are missing, no gpus, or repeated; the program is placed already, or replicated over other
            devices, or without other *shares*; the results of several replicas can't be put together; shares are not
            one positive whole number for each device, or differ where sizes are fixed, or leave a replica no row of the
            captured batches; there is a callback and the program was loaded, so that it has no module, or the callback
            raises. Nothing has changed then.
    """
    made = build(
        Replicate, devices=devices, reduction=reduction, shares=shares, gather=gather or {}, on_replica=on_replica
    )
    return made(program)


def _interleave(net: Net, sites: Sequence[Site]) -> Net:
    """Every operator once per site: all of the first, all of the second, …"""

    def every(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(site.blob_name(name) for name in names for site in sites))

    blobs = [site.blob(blob) for blob in net.blobs.values() for site in sites]
    return Net(
        name=net.name,
        ops=tuple([site.op(op) for op in net.ops for site in sites]),
        blobs={blob.name: blob for blob in blobs},
        external_inputs=every(net.external_inputs),
        external_outputs=every(net.external_outputs),
        gradients={
            site.blob_name(name): site.blob_name(grad) for name, grad in net.gradients.items() for site in sites
        },
    )


def _with_gradients_of(interface: Interface, prefix: str, copied: Net, reduced: Net) -> Interface:
    """The interface whose gradients, also those among the results, are the reduced ones, alike on all replicas."""
    pairs = zip(copied.external_outputs, reduced.external_outputs, strict=True)
    handed = {name.removeprefix(prefix): now.removeprefix(prefix) for name, now in pairs if name.startswith(prefix)}
    gradients = {param: handed[grad] for param, grad in interface.gradients.items()}
    fetches = [
        fetch if fetch.blob is None or handed[fetch.blob] == fetch.blob else Slot(handed[fetch.blob])
        for fetch in interface.fetches
    ]
    return replace(interface, gradients=gradients, fetches=tuple(fetches))
