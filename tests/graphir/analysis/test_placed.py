"""graphir.placed: the table of placed modules."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch

import graphir
from graphir import passes
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss
from graphir.errors import GraphirError, VerifyError

CONFIG = Config(tables=(40, 10, 30))


@cache
def program() -> graphir.Program:
    torch.manual_seed(0)
    model, batch = Dlrm(CONFIG), clicks(CONFIG, 4, 0)
    optimizer = torch.optim.Adagrad(model.parameters())
    return graphir.capture(
        model, batch.inputs, targets=(batch.target,), loss=loss, optimizer=optimizer, batch_dims=batch_dims(CONFIG)
    )


def test_bytes_of_tables_and_of_their_exchange() -> None:
    sharded = passes.inject_copies(passes.shard(program(), {"emb_l.*": "balanced"}, [0, 1]))
    found = graphir.placed(sharded)
    rows, width = (40, 10, 30), CONFIG.bottom[-1]
    assert [(each.module, str(each.device)) for each in found.modules] == [
        ("emb_l.0", "gpu:0"), ("emb_l.1", "gpu:1"), ("emb_l.2", "gpu:1"),
    ]  # fmt: skip
    assert [each.parameters for each in found.modules] == [count * width * 4 for count in rows]
    assert [each.state for each in found.modules] == [count * width * 4 + 4 for count in rows], "sums, and a step"
    assert sum(each.sent for each in found.modules) == graphir.traffic(sharded).nbytes
    assert found.imbalance == pytest.approx(1, abs=0.01)
    assert json.loads(found.to_json())["held"] == {str(device): nbytes for device, nbytes in found.held.items()}
    assert all(len(line) <= 80 for line in str(found).splitlines())
    plan = passes.emit(sharded, {"batch": 40})
    assert [each.sent for each in graphir.placed(plan).modules] == [10 * each.sent for each in found.modules]


def test_without_placed_modules() -> None:
    assert not graphir.placed(program()).modules
    assert graphir.placed(passes.replicate(program(), [0, 1])).imbalance == 1
    with pytest.raises(GraphirError, match="placed takes a Program or Plan, not int"):
        graphir.placed(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "prefixes", "what"),
    [
        ("emb_l.0.weight", (), "'emb_l.0.weight' cannot be placed on no replica"),
        ("emb_l.0.weight", ("gpu_7/",), "'emb_l.0.weight' cannot be placed on 'gpu_7/'"),
        ("emb_l.0.weight", ("gpu_1/",), "parameter 'gpu_1/emb_l.0.weight' of the interface is not an external input"),
        ("nothing", ("gpu_0/",), "'nothing' cannot be placed on 'gpu_0/'"),
    ],
)
def test_what_is_placed_is_verified(name: str, prefixes: tuple[str, ...], what: str) -> None:
    sharded = passes.shard(program(), {"emb_l.*": "balanced"}, [0, 1])
    interface = replace(sharded.interface, placed={**sharded.interface.placed, name: prefixes})
    with pytest.raises(VerifyError, match=what):
        graphir.verify(sharded.with_(interface=interface))
