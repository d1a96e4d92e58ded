"""A training script runs with ``torch.nn.DataParallel`` replaced by ours, and nothing else changed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from zoo.zoo_rows import library

import graphir

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    library("timm")
    import training_script

    monkeypatch.setattr(torch.nn, "DataParallel", graphir.DataParallel)
    return training_script


def test_it_learns_with_two_replicas(script: Any) -> None:
    seen: dict[tuple[str, bool], set[int]] = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__ == "ResNet":
            key = threading.current_thread().name, module.training
            seen.setdefault(key, set()).add(len(args[0]))

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        accuracy, model = script.main()
    finally:
        handle.remove()
    assert accuracy > 0.75
    assert type(model) is graphir.DataParallel
    assert seen == {(f"graphir replica {r}", training): {32} for r in (0, 1) for training in (True, False)}


def test_two_runs_give_equal_bits(script: Any) -> None:
    first, second = (script.main(epochs=1, samples=128, held=64)[1].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
