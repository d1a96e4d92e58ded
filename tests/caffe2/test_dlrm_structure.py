"""A sharded DLRM has the structure of DLRM's own nets, forward and backward."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import cases
import pytest
import torch

import graphir
from graphir import Program, caffe2, passes
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss
from graphir.ir.net import Net
from graphir.ir.operator import Operator

FORWARD: Final = {
    "aten.split_with_sizes.default": "Split",
    "Copy": "Copy",
    "aten.cat.default": "Concat",
    "aten.stack.default": "Concat",
    "aten.bmm.default": "BatchMatMul",
    "aten.index.Tensor": "BatchGather",
}
"""Torch's operators of the exchange and the interaction, and Caffe2's, which flatten before they gather."""

BACKWARD: Final = {
    "Copy": "CopyOnDeviceLike",
    "aten.cat.default": "Concat",
    "aten.bmm.default": "BatchMatMul",
    "aten.index_put.default": "BatchGatherGradient",
    "aten.add.Tensor": "Sum",
}
"""Those of the backward. Caffe2's ``Split`` is left out: torch's gradients of what is joined are views."""

_EXCHANGED: Final = re.compile(r"(?:sls|emb_l\.)(\d+)(?:_z)?(?:_split_(\d+))?(?:_grad)?$")


def exchanged(op: Operator) -> str:
    """Which table's lookups an operator makes, and which replica's share of them."""
    found = _EXCHANGED.search(op.outputs[0])
    return ".".join(part for part in found.groups() if part) if found else ""


def structure(net: Net, ops: Iterable[Operator], types: dict[str, str]) -> dict[int, list[str]]:
    """By device of what they make, the operators of the exchange and the interaction in order, by Caffe2's names, with
    the table and the share that they exchange. ``CopyOnDeviceLike`` copies to where its second operand is."""
    found: dict[int, list[str]] = defaultdict(list)
    wanted = {**types, **{type: type for type in types.values()}}
    for op in ops:
        if op.type in wanted:
            there = op.inputs[1] if op.type == "CopyOnDeviceLike" else op.outputs[0]
            found[net.blobs[there].device.index].append(f"{wanted[op.type]} {exchanged(op)}".strip())
    return found


def in_phase(net: Net, *phases: str) -> list[Operator]:
    return [op for op in net.ops if op.phase in phases]


def ours(case: cases.Case, train: bool) -> Program:
    """The same model of torch's, its tables on the devices where the recorded net has them."""
    given, devices = case.record["inputs"], case.record["inputs"]["ndevices"]
    bottom = given["arch_mlp_bot"]
    config = Config(
        bottom[0], tuple(bottom[1:]), tuple(given["arch_embedding_size"]), tuple(given["arch_mlp_top"][1:]),
        given["arch_interaction_op"], sparse=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model, batch = Dlrm(config), clicks(config, 4, 0)
    options: dict[str, object] = {"batch_dims": (batch_dims(config)[0], {}, ())}
    if train:
        held = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"targets": (batch.target,), "loss": loss, "optimizer": held, "batch_dims": batch_dims(config)}
    program = graphir.capture(model, batch.inputs, **options)
    if devices <= 1:
        return program
    placement = {
        f"emb_l.{i}": int(name.partition("/")[0].removeprefix("gpu_"))
        for i, name in enumerate(case.record["expected"]["emb_outputs"])
    }
    sharded = passes.shard(program, placement, list(range(devices)))
    assert passes.inject_copies(sharded).step == sharded.step, "the exchange is all that crosses"
    return sharded


def same(mine: dict[int, list[str]], theirs: dict[int, list[str]], case: cases.Case) -> None:
    assert mine == theirs
    assert set(theirs) == set(range(max(case.record["inputs"]["ndevices"], 1)))


@pytest.mark.parametrize("case", cases.params("dlrm"))
def test_the_forward_is_that_of_dlrm(case: cases.Case) -> None:
    program = ours(case, train=False)
    for stem in filter(case.has, ("forward", "train")):
        theirs = case.program(stem).step
        expected = structure(theirs, in_phase(theirs, "forward"), FORWARD)
        same(structure(program.step, in_phase(program.step, "forward"), FORWARD), expected, case)


@pytest.mark.parametrize("case", cases.params("dlrm", where=lambda case: case.has("train")))
def test_the_backward_is_that_of_dlrm(case: cases.Case) -> None:
    program, theirs = ours(case, train=True), case.program("train").step
    expected = structure(theirs, in_phase(theirs, "backward", "reduce"), BACKWARD)
    same(structure(program.step, in_phase(program.step, "backward"), BACKWARD), expected, case)


def reduces(case: cases.Case) -> bool:
    return case.has("train") and case.record["inputs"]["sync_dense_params"]


@pytest.mark.parametrize("case", cases.params("dlrm", where=reduces))
def test_the_reductions_are_those_of_dlrm(case: cases.Case) -> None:
    mine, theirs = ours(case, train=True).step, case.program("train").step
    assert count(mine, "AllReduce") == count(theirs, "NCCLAllreduce")


def count(net: Net, type: str) -> int:
    return sum(op.type == type for op in net.ops)


def test_a_copy_to_another_device_is_another_structure() -> None:
    """The comparison sees a share that goes astray, and two tables exchanged in another order."""
    case = next(case for case in cases.cases("dlrm") if case.name == "default_2dev")
    net = caffe2.load_net(case.net("forward"))
    program = case.program("forward").step
    kept = structure(program, net.ops, FORWARD)
    copies = [i for i, op in enumerate(net.ops) if op.type == "Copy"]
    swapped = list(net.ops)
    swapped[copies[0]], swapped[copies[2]] = swapped[copies[2]], swapped[copies[0]]
    assert structure(program, swapped, FORWARD) != kept
    without = [op for i, op in enumerate(net.ops) if i != copies[1]]
    assert structure(program, without, FORWARD) != kept
