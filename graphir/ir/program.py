"""Programs: a net that fills the state, a net that is one step, and how a caller's arguments become blobs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

from pydantic import BeforeValidator

from ..errors import Gone
from .covers import Covers
from .device import Device
from .frozen import FrozenDict, freeze, frozen, frozen_all
from .module_patterns import lineage
from .net import Net, replaced
from .parts import Parts
from .shares import divided
from .size import BATCH, Dims, Polynomial

if TYPE_CHECKING:
    import torch

__all__ = [
    "GRADIENT",
    "IS_NONE",
    "REDUCTIONS",
    "Gathered",
    "Interface",
    "Note",
    "ParamGroup",
    "Program",
    "Reduction",
    "Scalar",
    "Slot",
]


def _number(given: object) -> object:
    """A scalar as read from a file, where ``{"float": "inf"}`` stands for a float that JSON cannot write."""
    if isinstance(given, dict) and len(given) == 1 and given.get("float") in ("inf", "-inf", "nan"):
        return math.nan if given["float"] == "nan" else float(given["float"])
    return given


Reduction: TypeAlias = Literal["mean", "sum"]
REDUCTIONS: Final[tuple[str, ...]] = get_args(Reduction)

GRADIENT: Final = "grad"
IS_NONE: Final = "grad_is_none"
"""The names of a gradient that lasts from step to step, and of a number that is 1 where there is none, among the state
of a parameter."""

Note: TypeAlias = "int | float | bool | str | tuple[Note, ...] | Mapping[str, Note] | None"
"""A value as JSON has it; a list is a tuple."""

Scalar: TypeAlias = int | Annotated[float, BeforeValidator(_number)] | bool | str | None


Gathered: TypeAlias = Literal["first", "mean", "sum", "min", "max", "cat", "each"]
"""How the results of replicas become one."""


class Slot(NamedTuple):
    """One leaf of a step's arguments, or of its results.

    Attributes:
        blob: the tensor's blob, without prefix; None where the leaf is not a tensor.
        batch_dim: the dimension along which an argument is split over the replicas, and a result gathered from them;
            None: an argument is passed whole to each, and *gather* says what becomes of a result.
        value: the leaf itself where it is not a tensor. An argument must equal this leaf; a result returns it.
        gather: what a result of several replicas is: that of the first; the mean by their shares of the batch; the
            sum, the least or the largest of each number; all along the first dimension, numbers as a vector; a list
            with each replica's; None: nothing in the step tells.
    """

    blob: str | None
    batch_dim: int | None = None
    value: Scalar = None
    gather: Gathered | None = "first"


class ParamGroup(NamedTuple):
    """One parameter group of a captured optimizer.

    Attributes:
        lr: the blob that holds its learning rate (``f64[] @cpu:0``, no prefix).
        params: the parameters' blobs, without prefix, in the optimizer's order.
        options: the group's other entries, as in ``optimizer.param_groups``, and ``lr`` as it was when captured.
        numbers: the blobs, like the blob of ``lr``, of the other numbers that a scheduler may move: ``momentum``,
            ``weight_decay``, ``beta1`` and ``beta2``, see :mod:`.moved`. A number that is not here stays as captured.
        optimizer: the position of its optimizer among those of the interface.
    """

    lr: str
    params: tuple[str, ...]
    options: Mapping[str, Scalar | tuple[Scalar, ...]]
    numbers: Mapping[str, str] = {}
    optimizer: int = 0

    @property
    def blobs(self) -> tuple[str, ...]:
        """The blobs that hold its numbers."""
        return (self.lr, *self.numbers.values())


@dataclass(frozen=True)
class Interface:
    """How the caller's world maps to blobs. All blob names are without prefix.

    Attributes:
        arguments: ``torch.utils._pytree``'s JSON text of the structure ``(args, kwargs)`` of a step's arguments,
            targets appended to args.
        feeds: the leaves of that structure, in order.
        loss: the blob of the scalar loss; None for a program without one.
        fetches: the leaves of the step's result, in order; none of a step that returns its loss alone.
        results: the JSON text of the structure of that result; None for a step that returns its loss alone.
        module_state: each name of ``module.state_dict()`` and its blob; tied names share one.
        optimizers: the name of each captured optimizer's class.
        optimizer_state: for each parameter, its optimizer state's blobs by the optimizer's own names
            (``{"fc1.weight": {"momentum_buffer": "fc1.weight.momentum_buffer"}}``); and as ``grad`` its gradient, where
            that lasts from step to step: other steps add to it, or update by it. ``grad_is_none`` is 1 where a step has
            left none.
        param_groups: see :class:`ParamGroup`; those of the first optimizer first.
        one_replica: the step could be recorded at one batch only, so that the dimensions along which the results of
            several replicas would be gathered are unknown.
        gradients: each parameter whose gradient a training step without optimizer hands back, and the gradient's blob.
        placed: for each blob here that not every replica has, the prefixes of the replicas that have it. A placed input
            is passed whole, and a placed output is handed back as it is.
        parts: names of module state, optimizer state, parameters or gradients here whose value several blobs hold, and
            those blobs. Callers give and get the whole value under its name.
        differentiable: for a step whose backward starts from given gradients, the leaves of the model's outputs that
            have a gradient, by position. The last positional argument is the tuple of these gradients, and the result
            is a pair: the outputs, and a dict of the gradients of inputs.
    """

    arguments: str = ""
    feeds: tuple[Slot, ...] = ()
    loss: str | None = None
    fetches: tuple[Slot, ...] = ()
    results: str | None = None
    module_state: Mapping[str, str] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()
    optimizer_state: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    param_groups: tuple[ParamGroup, ...] = ()
    one_replica: bool = False
    gradients: Mapping[str, str] = field(default_factory=dict)
    placed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: Mapping[str, Parts] = field(default_factory=dict)
    differentiable: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        mappings = ("module_state", "optimizer_state", "gradients", "placed", "parts", "param_groups")
        freeze(self, **dict.fromkeys(mappings, frozen_all))

    def blobs_of(self, name: str) -> tuple[str, ...]:
        """The blobs, without prefix, that hold the value of a name: the blob of that name, or its parts."""
        found = self.parts.get(name)
        return (name,) if found is None else found.blobs

    def owners(self) -> Iterator[tuple[str, str]]:
        """Each blob of the optimizer's state, and the blob of the parameter that it belongs to."""
        for param, own in self.optimizer_state.items():
            for name in own.values():
                yield from zip(self.blobs_of(name), self.blobs_of(param), strict=False)  # verify compares their numbers


class Witness(Protocol):
    """Records the step of a captured module once more, with other sizes of its dimensions.

    The dimensions are those of one replica, without prefix.
    """

    def __call__(self, dims: Dims, /) -> None:
        """Raise a CoverageError if the step at *dims* is not the program's."""

    def recorded(self, dims: Dims, /) -> Program:
        """The step at *dims*, as a program of these sizes; raises a CoverageError if it can't be recorded."""


@dataclass(frozen=True, repr=False)
class Program:
    """A pair of nets and the state that they start from. Values are immutable: passes return new ones.

    Attributes:
        name: of the program.
        init: fills every blob that lives from step to step; a captured program's init loads each from ``state``.
        step: one training or inference step.
        dims: the captured value of each dimension that sizes follow. A captured program has ``batch``; a replicated
            one has ``gpu_0/batch``, ``gpu_1/batch``, ….
        covers: for which sizes this is the step that eager PyTorch takes, see :class:`.covers.Covers`.
        replicas: the prefix of each replica, by position; ``("",)`` as captured.
        interface: how arguments and results map to blobs.
        history: the text of each pass that was run, in order. It is for people and decides nothing.
        ahead: how far before its first reader each copy is issued, as a number of operators of its destination, unless
            ``emit`` is given another number; None: the default of ``emit``.
        reduction: how the gradients of replicas are put together: ``mean``, where each replica counts by its share of
            the batch, or ``sum``. Operators that reduce gradients hold the reduction themselves; a pass that adds
            reductions goes by this field if there are none yet.
        caveats: what the capture of a program for CUDA could not know of the device, such as the kernels that it
            chooses, a text each; empty for a program that was recorded for the host.
        shares: of the batch, by replica: whole numbers without a common divisor, whose ratio is that of the rows. Empty
            where all are equal.
        notes: values that somebody keeps with the program, by name, as JSON has them. Notes decide nothing. Files keep
            notes, texts leave them out. Not part of equality.
        state: the module's and the optimizer's own (unprefixed) names, and ``step``, to tensors; empty where the
            model was captured on the meta device. Not part of equality.
        module: the captured module. Not saved, pickled or copied, not part of equality.
        witness: records the step of the captured module once more, see :class:`Witness`; None where there is no
            witness. Not saved, pickled or copied, not part of equality.
        optimizers: the captured optimizers, weakly. Not saved, pickled or copied, not part of
            equality.
        module_copies: for each replica a shallow copy of the captured module, as replication callbacks left it; empty
            where there were none. Not saved, pickled or copied, not part of equality.
    """

    name: str
    init: Net
    step: Net
    dims: Mapping[str, int] = field(default_factory=dict)
    covers: Covers = field(default_factory=Covers)
    replicas: tuple[str, ...] = ("",)
    interface: Interface = field(default_factory=Interface)
    history: tuple[str, ...] = ()
    ahead: int | None = None
    reduction: Reduction = "mean"
    caveats: tuple[str, ...] = ()
    shares: tuple[int, ...] = ()
    notes: Mapping[str, Note] = field(default_factory=dict, compare=False)
    state: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    module: torch.nn.Module | None = field(default=None, compare=False)
    witness: Witness | None = field(default=None, compare=False)
    module_copies: tuple[torch.nn.Module, ...] = field(default=(), compare=False)
    optimizers: tuple[weakref.ref[torch.optim.Optimizer], ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        freeze(self, dims=frozen, notes=frozen_all)

    def with_(self, **changes: Any) -> Program:  # dataclasses.replace has this signature
        """This program with some attributes replaced."""
        return replaced(self, changes)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device of the program: gpus by number, then the cpu."""
        found = {*self.init.devices, *self.step.devices}
        return tuple(sorted(found, key=Device.order))

    def blob_of(self, name: str, replica: int = 0) -> str:
        """The blob that a name of the interface stands for in a replica, or in the first replica that has the blob if
        this replica does not."""
        prefix = self.replicas[replica]
        having = self.interface.placed.get(name)
        return (prefix if having is None or prefix in having else having[0]) + name

    def blobs_of(self, name: str, replica: int = 0) -> tuple[str, ...]:
        """The blobs that hold the value of a name of the interface in a replica: one, or its parts in their order."""
        return tuple([self.blob_of(blob, replica) for blob in self.interface.blobs_of(name)])

    @cached_property
    def sharing(self) -> tuple[str, ...]:
        """The prefixes of the replicas that a batch is split over.

        These are the leading replicas that have a batch dimension. A step with fewer rows than replicas (see
        :func:`graphir.analysis.short_batch.short_batch`) has replicas without one. All replicas if sizes are fixed.
        """
        return tuple(takewhile(lambda prefix: prefix + BATCH in self.dims, self.replicas)) or self.replicas

    @cached_property
    def parts(self) -> int:
        """How many times the dimension ``batch`` the rows of a share are: the number of micro-batches, or of the equal
        parts into which the step cuts a batch."""
        found = 1
        for feed in self.interface.feeds:
            blob = None if feed.blob is None else self.step.blobs.get(self.blob_of(feed.blob))
            if blob is not None and blob.shape is not None and feed.batch_dim is not None:
                size = blob.shape[feed.batch_dim]
                found = max(found, size.terms[0][1] if isinstance(size, Polynomial) else 1)
        return found

    def divided(self, rows: int) -> list[int]:
        """The rows of each replica in :attr:`sharing`, by :attr:`shares`; see :func:`.shares.divided`.

        Replicas that are not in ``sharing`` get no rows. If the shares of all replicas would give them some, the
        replicas in ``sharing`` divide all rows by their own shares.
        """
        shares, count = self.shares or (1,) * len(self.replicas), len(self.sharing)
        found = divided(rows, shares)[:count]
        return found if sum(found) == rows else divided(rows, shares[:count])

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters' blobs, prefixes included."""
        return tuple(name for name, blob in self.step.blobs.items() if blob.role == "param")

    @cached_property
    def module_paths(self) -> Mapping[str, None]:
        """The paths of the modules that run in the step or own some of its state, and of modules that contain them."""
        named = {op.module for op in self.step.ops}
        named.update(name.rpartition(".")[0] for name in self.interface.module_state)
        return FrozenDict(dict.fromkeys(path for module in sorted(named) for path in lineage(module)))

    def __hash__(self) -> int:
        return hash((self.name, self.init, self.step))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "module": None, "witness": None, "module_copies": (), "optimizers": ()}

    def __repr__(self) -> str:
        on = ", ".join(self.devices)
        return f"<program {self.name!r}: {len(self.init.ops)} + {len(self.step.ops)} operators on {on or 'no device'}>"

    def __str__(self) -> str:
        from .text import canonical_text

        return canonical_text(self)

    to_fx = Gone("graphir.to_fx(program)")
    to_exported = Gone("graphir.to_exported(program)")

    def save(self, path: str | Path, state: bool = False) -> None:
        """Write the program as JSON; with *state*, its tensors beside it as ``<path>.safetensors``.

        The files are written whole or not at all.
        """
        from .files import save

        save(self, path, state)
