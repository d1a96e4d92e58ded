"""Replicas of a module are copied while no call of another one captures it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import graphir


class Pauses(nn.Module):
    """Has a tensor of its own step on itself while *pause* runs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        if threading.current_thread() is threading.main_thread():
            self.inside.set()
            self.go_on.wait(60)
        return self.last * 2


@pytest.mark.filterwarnings("ignore::graphir.errors.EagerWarning")
def test_eager_replicas_are_copied_once_a_capture_by_another_object_has_ended() -> None:
    model, x = Pauses(), torch.randn(4, 3)
    captured = graphir.DataParallel(model, [0, 1], binding="cpu")
    eager = graphir.DataParallel(model, [0, 1], binding="cpu")
    seen: list[object] = []

    def replicate(module: nn.Module, ids: object) -> list[nn.Module]:
        seen.append(type(vars(module)["last"]))
        return graphir.DataParallel.replicate(eager, module, ids)

    eager.replicate = replicate  # what a user overrides runs eagerly
    thread = threading.Thread(target=eager, args=(x,))
    timer = threading.Timer(0.3, model.go_on.set)

    def start() -> None:
        assert model.inside.wait(60)
        thread.start()
        timer.start()

    starter = threading.Thread(target=start)
    starter.start()
    captured(x)
    for ended in (starter, thread):
        ended.join(60)
        assert not ended.is_alive()
    assert seen == [type(None)]
