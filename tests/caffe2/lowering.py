"""Small Caffe2 nets, lowered and run, for the tests of the translations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from graphir.runtime import Session
from torch import Tensor

from graphir import Program, caffe2, passes
from graphir.caffe2.convert import decode
from graphir.caffe2.schema import messages
from graphir.ir.device import KINDS
from graphir.ir.net import Net
from graphir.ir.symbols import to_torch

SHORT = {torch.float32: "f32", torch.float64: "f64", torch.int32: "i32", torch.int64: "i64", torch.bool: "bool"}


def op(type: str, inputs: str, outputs: str, device: str = "cpu:0", **args: Any) -> Any:
    """An ``OperatorDef``; names are separated by blanks, an argument's field follows from its type."""
    message = messages().OperatorDef(type=type, input=inputs.split(), output=outputs.split())
    message.is_gradient_op = type.endswith(("Gradient", "Grad"))
    kind, _, index = device.partition(":")
    message.device_option.device_type, message.device_option.device_id = KINDS.index(kind), int(index)
    for name, value in args.items():
        arg = message.arg.add(name=name)
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        field = "f" if isinstance(items[0], float) else "s" if isinstance(items[0], str) else "i"
        items = [item.encode() if field == "s" else item for item in items]
        if isinstance(value, (list, tuple)):
            getattr(arg, {"f": "floats", "i": "ints", "s": "strings"}[field]).extend(items)
        else:
            setattr(arg, field, items[0])
    return message


def net(ops: Sequence[Any], external: Sequence[str] = (), outputs: Sequence[str] = (), name: str = "net") -> Net:
    """A net of such operators."""
    message = messages().NetDef(name=name, op=ops, external_input=external, external_output=outputs)
    return decode(message, "a test")


def program(
    ops: Sequence[Any], inputs: Mapping[str, Tensor], init: Sequence[Any] = (), outputs: Sequence[str] = ()
) -> Program:
    """A step of these operators on inputs of these shapes, and what init makes."""
    made = dict.fromkeys(name for each in init for name in each.output)
    step = net(ops, [*inputs, *made], outputs, "step")
    shapes = {name: (tuple(tensor.shape), SHORT[tensor.dtype]) for name, tensor in inputs.items()}
    return caffe2.load_program(step, net(init, name="init") if init else None, shapes=shapes)


def run(
    ops: Sequence[Any],
    inputs: Mapping[str, Tensor],
    outputs: str,
    *,
    init: Sequence[Any] = (),
    state: Mapping[str, Tensor] | None = None,
    steps: int = 1,
    executor: Any = "reference",
) -> list[Tensor]:
    """What these blobs hold after so many steps. Inputs that are overwritten are copied first, so that they are none
    that live from step to step."""
    names = outputs.split()
    for name in sorted(inputs.keys() & {name for each in ops for name in each.output}):
        inputs = {**inputs, f"given_{name}": inputs[name]}
        del inputs[name]
        ops = [op("Copy", f"given_{name}", name), *ops]
    lowered = caffe2.lower(program(ops, {**inputs, **(state or {})}, init), state=state, outputs=names)
    with Session(passes.emit(lowered), lowered.state, executor=executor) as session:
        for _ in range(steps):
            found = session.step(**{feed.blob: inputs[feed.blob] for feed in lowered.interface.feeds if feed.blob})
    for name, fetch in zip(names, lowered.interface.fetches, strict=True):
        blob = lowered.step.blobs[fetch.blob or ""]
        assert (blob.shape, to_torch(blob.dtype)) == (found[name].shape, found[name].dtype), f"{name} is not {blob}"
    return [found[name] for name in names]


def fed(lowered: Program, seed: int = 0) -> dict[str, Tensor]:
    """Numbers for what a step is given: labels are 0."""
    blobs, g = lowered.step.blobs, torch.Generator().manual_seed(seed)
    found = {}
    for feed in lowered.interface.feeds:
        blob = blobs[feed.blob or ""]
        shape = tuple([int(n) for n in blob.shape or ()])
        floats = blob.dtype == "f32"
        found[blob.name] = torch.rand(shape, generator=g) if floats else torch.zeros(shape, dtype=to_torch(blob.dtype))
    return found


def close(found: Tensor, wanted: Tensor, rtol: float = 1e-5) -> None:
    """Within *rtol* of the tensor's largest magnitude, and of the same shape and type."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    scale = max(wanted.abs().max().item(), 1e-30) if wanted.numel() else 1.0
    torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=rtol * scale)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
