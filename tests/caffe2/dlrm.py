"""What the recorded nets of DLRM are fed, and hold before their first step."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case
from lowering import fed
from torch import Tensor

from graphir import Program, caffe2
from graphir.ir.net import Net

BATCH, POOLED = 8, 2


def dlrm_inputs(case: Case, net: Net) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Shapes of what is fed each step, and values of what is kept: tables, layers, and which pairs interact.

    Replicas begin alike, as the public script lets them.
    """
    record, g = case.record, torch.Generator().manual_seed(0)
    recorded = {blob["blob"]: blob["shape"] for blob in record["expected"]["fed_blobs"]}
    replicas = max(record["inputs"]["ndevices"], 1)
    rows = BATCH // replicas if replicas > 1 else BATCH
    features = record["inputs"]["arch_mlp_bot"][0]
    interacting = [len(op.inputs) for op in net.ops if op.type == "Concat" and op.args.get("add_axis")]
    shapes: dict[str, Any] = {}
    state: dict[str, Tensor] = {}
    drawn: dict[str, Tensor] = {}
    for name in net.external_inputs:
        base = name.rpartition("/")[2]
        if "tril" in base:
            pairs = [i * interacting[0] + j for i in range(interacting[0]) for j in range(i)]
            state[name] = torch.tensor(pairs, dtype=torch.int32)
        elif base.endswith(("_i", "_l")):
            shapes[name] = ([BATCH * (POOLED if base.endswith("_i") else 1)], "i32")
        elif base == "dense_in":
            shapes[name] = ([rows, features], "f32")
        elif base == "target":
            shapes[name] = ([rows, 1], "i32" if record["inputs"]["loss_function"] == "bce" else "f32")
        elif name in recorded:
            shape = recorded[name]
            state[name] = drawn.setdefault(base, _begun(base, shape, g)).clone()
    return shapes, state


def _begun(name: str, shape: list[int], g: torch.Generator) -> Tensor:
    """Weights by how many inputs there are, and biases that keep most of a layer alive."""
    if "momentum" in name:
        return torch.zeros(shape)
    values = torch.randn(shape, generator=g)
    if "sls" in name:
        return values * 0.5
    return values.abs() * 0.2 if len(shape) == 1 else values / shape[1] ** 0.5


def dlrm_batch(lowered: Program, seed: int = 0) -> dict[str, Tensor]:
    """A batch: of each table, :data:`POOLED` rows for each row of the batch, some of them several times."""
    found, g = fed(lowered, seed), torch.Generator().manual_seed(seed)
    for name, tensor in found.items():
        if name.endswith("_l"):
            tensor.fill_(POOLED)
        elif name.endswith("_i"):
            rows = int((lowered.step.blobs[f"{name[:-2]}_w"].shape or (0,))[0])
            tensor.copy_(torch.randint(rows, tensor.shape, generator=g))
        elif name.endswith("target") and tensor.dtype == torch.int32:
            tensor.copy_(torch.randint(2, tensor.shape, generator=g))
    return found


def dlrm_program(case: Case, step: str) -> tuple[Program, dict[str, Tensor]]:
    """A net of a case with the shapes of what it is fed, and the state before its first step."""
    shapes, state = dlrm_inputs(case, caffe2.load_net(case.net(step)))
    devices = case.record["inputs"]["ndevices"]
    return case.program(step, devices=range(devices) if devices > 1 else (), shapes=shapes), state
