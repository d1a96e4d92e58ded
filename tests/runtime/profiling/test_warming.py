"""Which caches operands are brought to, and that they stay what they are."""

import torch
from graphir.runtime.machine.caches import Caches
from graphir.runtime.profiling import warming


def test_what_is_further_off_is_pushed_out_of_the_core_s_own_cache(monkeypatch):
    touched = []
    monkeypatch.setattr(warming, "caches", lambda: Caches(own=100, shared=1000))
    monkeypatch.setattr(warming, "_touch", lambda tensor: touched.append(tensor.numel()))
    warming.bring([(100, torch.empty(1)), (101, torch.empty(2)), (1001, torch.empty(3)), (1000, torch.empty(4))])
    sweep = warming._sweep(100).numel()
    assert touched == [2, 4, sweep, 1]
    touched.clear()
    warming.bring([(5, torch.empty(6))])
    assert touched == [6], "nothing is swept where nothing is further off"


def test_touching_changes_no_bit():
    storage = torch.tensor([float("nan"), -0.0, 1.5, float("inf")])
    for tensor in (storage, storage[1:].view(3, 1), torch.tensor([True, False]), torch.tensor(3 + 4j), torch.empty(0)):
        before = tensor.clone()
        warming._touch(tensor)
        assert torch.equal(tensor.view(-1).view(torch.uint8), before.view(-1).view(torch.uint8))
