"""What programs for CUDA say of the device, where that is kept and shown, and what a session on the host says."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import passes
from graphir.capturing.capture import capture
from graphir.errors import TrainingWarning
from graphir.ir.files import load
from graphir.ir.program import Program
from graphir.ir.text import parse

X = torch.ones(2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            tokens = self.fc(self.norm(self.conv(x)).flatten(2).transpose(1, 2))[:, None]
            return F.scaled_dot_product_attention(tokens, tokens, tokens).float().mean()


def program(**options: Any) -> Program:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, (X,), loss=lambda out: out, optimizer=optimizer, **options)


def test_each_caveat_begins_with_what_it_is_about() -> None:
    about = [caveat.partition(":")[0] for caveat in program(clip_grad_norm=1.0).caveats]
    types = ["graphir.attention", "aten.convolution.default", "aten.native_batch_norm.default"]
    assert about == ["recorded on the host for CUDA", *types, "clip_grad_norm"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert program(target="cpu").caveats == ()


def test_passes_texts_and_files_keep_them(tmp_path: Path) -> None:
    made = program()
    assert passes.replicate(made, [0, 1]).caveats == made.caveats
    assert f'caveat "{made.caveats[0]}"' in str(made)
    read = parse(str(made))
    assert isinstance(read, Program) and read == made and read.caveats == made.caveats
    made.save(tmp_path / "p.json")
    loaded = load(tmp_path / "p.json")
    assert loaded == made and isinstance(loaded, Program) and loaded.caveats == made.caveats
    assert made.with_(caveats=()) != made


def test_memory_says_by_how_many_bytes_they_can_matter() -> None:
    made = program()
    report = graphir.memory(made)
    said = dict(zip([caveat.partition(":")[0] for caveat in report.caveats], report.caveats, strict=True))
    # 36 queries of one head and as many keys of 2 bytes, of 2 samples; patches of 27 numbers for each of 36 outputs.
    assert said["graphir.attention"].endswith("the math kernel holds the scores of one operator: 5.1 KiB at most")
    assert said["aten.convolution.default"].endswith("unfolded for a product of matrices: 3.8 KiB at most")
    assert f"  caveat: {said['graphir.attention']}" in str(report)
    assert graphir.memory(made.with_(caveats=())).caveats == ()
    assert report.peak == graphir.memory(made.with_(caveats=())).peak


def test_a_session_on_the_host_says_once_whose_bits_it_has() -> None:
    made = program()
    plan = passes.emit(made)
    with pytest.warns(TrainingWarning, match="was recorded for CUDA and runs on the host") as told:
        session = Session(plan, made.state)
    assert len(told) == 1 and told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.step(X)
        session.step(X)
        Session(plan, made.state, beside=session).step(X)


def test_a_compiled_step_is_for_the_target_that_is_given() -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(TrainingWarning, match="runs on the host"), torch.autocast("cpu", torch.bfloat16):
        step = graphir.compile(model, (torch.ones(2, 4),), loss=Tensor.sum, target="cuda")
    casts = [op for op in step.plan.program.step.ops if op.type == "aten._to_copy.default"]
    sums = [op for op in step.plan.program.step.ops if op.type == "aten.sum.default"]
    assert casts and step.plan.program.step.blobs[sums[0].outputs[0]].dtype == "f32"
