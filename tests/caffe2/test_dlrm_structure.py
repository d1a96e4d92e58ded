"""A sharded DLRM has the structure of DLRM's own nets."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import cases
import pytest
import torch

import graphir
from graphir import caffe2, passes
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks

STANDS_FOR = {
    "aten.split_with_sizes.default": "Split",
    "Copy": "Copy",
    "aten.cat.default": "Concat",
    "aten.stack.default": "Concat",
    "aten.bmm.default": "BatchMatMul",
    "aten.index.Tensor": "BatchGather",
}
"""Torch's operators of the exchange and the interaction, and Caffe2's, which flatten before they gather."""


def in_two(case: cases.Case) -> bool:
    return case.record["inputs"]["ndevices"] > 1


def structure(ops: Any) -> dict[int, list[str]]:
    """By device, the operators of the exchange and the interaction in order, as (device, type) pairs give them."""
    found: dict[int, list[str]] = defaultdict(list)
    for device, type in ops:
        if type in STANDS_FOR.values():
            found[device].append(type)
    return found


@pytest.mark.parametrize("case", cases.params("dlrm", where=in_two))
def test_the_forward_is_that_of_dlrm(case: cases.Case) -> None:
    given, devices = case.record["inputs"], case.record["inputs"]["ndevices"]
    bottom = given["arch_mlp_bot"]
    config = Config(
        bottom[0], tuple(bottom[1:]), tuple(given["arch_embedding_size"]), tuple(given["arch_mlp_top"][1:]),
        given["arch_interaction_op"],
    )  # fmt: skip
    placement = {
        f"emb_l.{i}": int(name.partition("/")[0].removeprefix("gpu_"))
        for i, name in enumerate(case.record["expected"]["emb_outputs"])
    }
    torch.manual_seed(0)
    batch = clicks(config, 4, 0)
    program = graphir.capture(Dlrm(config), batch.inputs, batch_dims=(batch_dims(config)[0], {}, ()))
    ours = passes.shard(program, placement, list(range(devices)))
    assert passes.inject_copies(ours).step == ours.step, "the exchange is all that crosses"
    theirs = [(op.device.index, op.type) for op in caffe2.load_net(case.net("forward")).ops]
    found = [(op.device.index, STANDS_FOR[op.type]) for op in ours.step.ops if op.type in STANDS_FOR]
    assert structure(found) == structure(theirs)
