"""Which micro-batch a device works on."""

import pytest
import torch
from small import program_of

import graphir
from graphir import passes
from graphir.errors import GraphirError

TWO_MICRO_BATCHES = """
    input x : f32[2] @gpu:0
    micro_0/a : f32[2] @gpu:0 = aten.neg(x)
    micro_0/a_gpu_1 : f32[2] @gpu:1 = Copy(micro_0/a)
    micro_0/b : f32[2] @gpu:1 = aten.neg(micro_0/a_gpu_1) {phase=backward}
    micro_1/a : f32[2] @gpu:0 = aten.neg(x)
    micro_1/a_gpu_1 : f32[2] @gpu:1 = Copy(micro_1/a)
    micro_1/b : f32[2] @gpu:1 = aten.neg(micro_1/a_gpu_1) {phase=backward}
    output micro_0/b
    output micro_1/b
"""


def test_a_row_shows_what_a_device_does_when():
    found = graphir.overlap(passes.emit(program_of(TWO_MICRO_BATCHES)), [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert found.seconds == 3.0
    assert found.grid == {"gpu:0": "0" * 24 + "1" * 24 + "-" * 24, "gpu:1": "-" * 24 + "a" * 24 + "b" * 24}
    assert found.busy == {"gpu:0": 2.0, "gpu:1": 2.0}
    assert found.bubble == {device: pytest.approx(1 / 3) for device in ("gpu:0", "gpu:1")}
    first, *rows = str(found).splitlines()
    assert first.startswith("overlap of 'small'")
    assert rows[1] == "  gpu:1  " + "-" * 24 + "a" * 24 + "b" * 24 + "  33% idle"


def test_without_operators_nothing_is_idle():
    model = torch.nn.Identity()
    plan = passes.emit(graphir.capture(model, inputs=(torch.ones(2),)))
    assert all(share == 0.0 for share in graphir.overlap(plan).bubble.values())


def test_only_plans_have_an_overlap():
    with pytest.raises(GraphirError, match="overlap takes a Plan, not str"):
        graphir.overlap("plan")  # type: ignore[arg-type]
