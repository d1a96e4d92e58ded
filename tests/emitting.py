"""Appends operators to a program in the making, with the shapes, strides and sizes that torch's kernels give.

Every operator is run on meta tensors at three batch sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graphir.ir.blob import Blob, Role
from graphir.ir.device import Device, gpu
from graphir.ir.meta import rule_of
from graphir.ir.names import fresh
from graphir.ir.operator import Arg, Operator, Phase, Symbol
from graphir.ir.opset import effects_of, signature
from graphir.ir.optypes.own import OWN
from graphir.ir.size import Polynomial, Size, bind
from graphir.ir.symbols import to_symbol, to_torch

BATCHES = (6, 10, 15)
"""The batch sizes at which each operator is run on meta; the first is the captured one."""

Operand = str | None | Sequence[str | None]


class Unfit(Exception):
    """This operator does not fit these operands, or its sizes are not affine."""


class Emitter:
    """Blobs and operators so far, each of which has tensors on meta at every batch size.

    Args:
        rng: chooses devices, and draws what blobs hold.
        devices: how many gpus there are.
        spread: the probability that an operator that computes sits on another one than gpu:0.
    """

    def __init__(self, rng: random.Random, devices: int, spread: float) -> None:
        self.rng, self.devices, self.spread = rng, devices, spread
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = {}
        self.external: list[str] = []
        self.meta: dict[str, tuple[torch.Tensor, ...]] = {}
        self.state: dict[str, torch.Tensor] = {"step": torch.tensor(0)}
        self.versions: dict[str, int] = {}
        self.bound: dict[str, float] = {}
        self.depends: set[str] = set()
        self.seeds = 0
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))

    # -- declarations

    def declare(self, name: str, role: Role, device: Device, meta: Sequence[torch.Tensor]) -> None:
        self.meta[name] = tuple(meta)
        self.blobs[name] = self.describe(name, role, device, name, meta)
        self.external.append(name)

    def describe(self, name: str, role: Role, device: Device, storage: str, meta: Sequence[torch.Tensor]) -> Blob:
        dense = all(t.is_contiguous() for t in meta)
        return Blob(
            name,
            tuple(affine(sizes) for sizes in zip(*(t.shape for t in meta), strict=True)),
            str(to_symbol(meta[0].dtype)),
            device,
            role,
            storage,
            None if dense else tuple(affine(strides) for strides in zip(*(t.stride() for t in meta), strict=True)),
            affine([int(t.storage_offset()) for t in meta]),
        )

    def hold(self, name: str, role: Role, value: torch.Tensor, device: Device | None = None) -> str:
        """Declare state with this value."""
        self.state[name] = value
        self.declare(name, role, device or gpu(0), [value.to("meta")] * len(BATCHES))
        self.bound[name] = 1.0
        return name

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).mul_(0.4)

    # -- operators

    def emit(
        self,
        type: str,
        operands: Sequence[Operand],
        args: Mapping[str, Arg] | None = None,
        name: str | Sequence[str] = "",
        *,
        phase: Phase = "forward",
        module: str = "",
        bound: float = 1.0,
        roles: Role | None = None,
    ) -> tuple[str, ...]:
        """Append an operator and return its outputs, overwritten operands not among them."""
        args = dict(args or {})
        inputs = tuple(n for o in operands for n in (o if isinstance(o, (list, tuple)) else [o]) if n is not None)
        pattern = _pattern(operands)
        returned = self.run(type, operands, args)
        flat = _flat(returned[0])
        results = _result_pattern(returned[0])
        effects = effects_of(type, args, pattern, len(inputs), results)
        overwritten = [inputs[source] for output, source in effects.writes if output >= len(flat)]
        wanted = [name] * len(flat) if isinstance(name, str) else list(name)
        viewed = dict(effects.views)

        device = self.choose(inputs, bool(viewed), phase)
        random_args = {"seed": self.seeds} if effects.random else {}
        self.seeds += effects.random
        outputs: list[str] = []
        for position, wish in enumerate(wanted):
            output = fresh(wish or type.split(".")[1], self.blobs)
            metas = [_flat(r)[position] for r in returned]
            source = self.blobs[inputs[viewed[position]]] if position in viewed else None
            role = source.role if source else roles or self.role(phase, inputs)
            storage, at = (source.storage, source.device) if source else (output, device)
            self.blobs[output] = self.describe(output, role, at, storage, metas)
            self.meta[output] = tuple(metas)
            self.bound[output] = bound
            if any(i in self.depends for i in inputs) or effects.random:
                self.depends.add(output)
            outputs.append(output)
        read = tuple(self.versions.get(i, 0) for i in inputs)
        made = [0] * len(outputs)
        for blob in overwritten:
            self.versions[blob] = self.versions.get(blob, 0) + 1
            made.append(self.versions[blob])
        self.ops.append(
            Operator(
                type,
                inputs,
                (*outputs, *overwritten),
                args,
                device,
                phase,
                module,
                operands=pattern,
                results=results,
                effects=effects,
                input_versions=read if any(read) else None,
                output_versions=tuple(made) if any(made) else None,
                **random_args,
            )
        )
        return tuple(outputs)

    def run(self, type: str, operands: Sequence[Operand], args: Mapping[str, Arg]) -> list[tuple[Any, ...]]:
        """What the type returns on meta, at each batch size."""
        if type in OWN:
            return [()] * len(BATCHES)
        found = []
        for k, batch in enumerate(BATCHES):
            given = {n: _bound(a, {"batch": batch}) for n, a in args.items()}
            queue = [
                [None if n is None else self.meta[n][k] for n in o]
                if isinstance(o, (list, tuple))
                else (None if o is None else self.meta[o][k])
                for o in operands
            ]
            if any(p.name == "device" for p in signature(type).params):
                given["device"] = "meta"
            for param in signature(type).tensors:
                if param.name not in given and queue:
                    given[param.name] = queue.pop(0)
            positional = [given.pop(p.name, p.default) for p in signature(type).params if not p.keyword]
            try:
                result = rule_of(type)(*positional, **given)
            except (RuntimeError, TypeError) as e:
                raise Unfit(str(e)) from e
            found.append(result if isinstance(result, tuple) else (result,))
        for metas in zip(*map(_flat, found), strict=True):
            for sizes in zip(*((*t.shape, *t.stride(), t.storage_offset()) for t in metas), strict=True):
                affine([int(s) for s in sizes])
        return found

    def choose(self, inputs: Sequence[str], view: bool, phase: Phase) -> Device:
        if view:
            return self.blobs[inputs[0]].device
        if self.devices > 1 and self.rng.random() < self.spread:
            return gpu(self.rng.randrange(1, self.devices))
        return gpu(0)

    def role(self, phase: Phase, inputs: Sequence[str]) -> Role:
        if phase == "forward" and any(i in self.depends for i in inputs):
            return "activation"
        return "temporary"


def affine(values: Sequence[int]) -> Size:
    """The size that takes these values at :data:`BATCHES`."""
    first, second, third = values
    k, rest = divmod(second - first, BATCHES[1] - BATCHES[0])
    size = Polynomial.of({("batch",): k, (): first - k * BATCHES[0]})
    if rest or bind(size, {"batch": BATCHES[2]}) != third:
        raise Unfit(f"{values} is not affine")
    return size


def _bound(arg: Arg, dims: Mapping[str, int]) -> Any:
    if isinstance(arg, Polynomial):
        return bind(arg, dims)
    if isinstance(arg, Symbol):
        return to_torch(arg)
    if isinstance(arg, tuple):
        return [_bound(a, dims) for a in arg]
    return arg


def _pattern(operands: Iterable[Operand]) -> str | None:
    text = "".join(
        "[" + "".join("_" if n is None else "t" for n in o) + "]"
        if isinstance(o, (list, tuple))
        else "_t"[o is not None]
        for o in operands
    )
    return text if set(text) - {"t"} else None


def _result_pattern(returned: Sequence[Any]) -> str | None:
    text = "".join("[" + "t" * len(r) + "]" if isinstance(r, (list, tuple)) else "_t"[r is not None] for r in returned)
    return text if set(text) - {"t"} else None


def _flat(returned: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that a call returned."""
    every = [t for r in returned for t in (r if isinstance(r, (list, tuple)) else [r])]
    return [t for t in every if t is not None]
