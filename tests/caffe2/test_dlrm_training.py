"""Every recorded train net of DLRM trains: as eager PyTorch does, and the same bits wherever its operators are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from cases import Case
from dlrm import POOLED, dlrm_batch, dlrm_program
from graphir.runtime import Session
from torch import Tensor

import graphir
from graphir import Program, caffe2, passes
from graphir.ir.device import Device
from graphir.ir.names import base_name
from graphir.ir.net import Net

STEPS = 6

WITHOUT = {"adagrad_2dev", "default_2dev_inference"}
"""Recorded cases without a train net: the script raised a KeyError, or built an inference net only."""

train = cases.params("dlrm", where=lambda case: case.has("train"))


def test_seven_of_nine_recorded_cases_train() -> None:
    if not cases.SHARED.is_dir():
        pytest.skip("the larger set of recorded cases is not there")
    found = {case.name: case.has("train") for case in cases.cases("dlrm")}
    assert {name for name, trains in found.items() if not trains} == WITHOUT
    assert sum(found.values()) == 7


def training(
    program: Program, state: Mapping[str, Tensor], executor: Any = "reference"
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of the losses of each step on one batch, and what is kept after the last."""
    lowered = caffe2.lower(passes.inject_copies(program), state=state)
    with Session(passes.emit(lowered), lowered.state, binding="cpu", executor=executor) as session:
        batch = dlrm_batch(lowered)
        losses = [sum(session.step(**batch).values()) for _ in range(STEPS)]
        return torch.stack([torch.as_tensor(loss).reshape(()) for loss in losses]), session.state_dict()


# -- eager PyTorch


class Eager:
    """The model of a case in float64, whose parameters have the names of the net's blobs."""

    def __init__(self, case: Case, net: Net, state: Mapping[str, Tensor]) -> None:
        self.given, self.net = case.record["inputs"], net
        self.prefixes = [f"gpu_{i}/" for i in range(self.given["ndevices"])] if self.given["ndevices"] > 1 else [""]
        self.tables = [f"{name[:-1]}w" for name in case.record["expected"]["emb_outputs"]]
        floats = {name: value.double().clone() for name, value in state.items() if value.is_floating_point()}
        self.params = {name: value.requires_grad_() for name, value in floats.items() if "momentum" not in name}
        self.squares = {name: torch.zeros_like(value) for name, value in self.params.items()}
        (self.scale,) = {float(op.args["scale"]) for op in net.ops if op.type == "Scale"}  # type: ignore[arg-type]
        (self.lr,) = {float(op.args["base_lr"]) for op in net.ops if op.type == "LearningRate"}  # type: ignore[arg-type]

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        total = self.loss(batch)
        grads = dict(zip(self.params, torch.autograd.grad(total, list(self.params.values())), strict=True))
        for name, param in self.params.items():
            summed = self.given["sync_dense_params"] and name not in self.tables
            alike = [n for n in grads if base_name(n) == base_name(name)] if summed else [name]
            self.update(name, param, torch.stack([grads[n] for n in alike]).sum(0))
        return total.detach()

    def update(self, name: str, param: Tensor, grad: Tensor) -> None:
        with torch.no_grad():
            if self.given["optimizer"] == "adagrad":
                self.squares[name] += grad**2
                grad = grad / (self.squares[name].sqrt() + 1e-10)
            param += self.lr * grad

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum of the replicas' losses."""
        looked_up = []
        for table in self.tables:
            index = batch[f"{table[:-1]}i"].long().view(-1, POOLED)
            looked_up.append(F.embedding_bag(index, self.params[table], mode="sum"))
        total = torch.zeros((), dtype=torch.float64)
        for r, prefix in enumerate(self.prefixes):
            rows = len(batch[f"{prefix}target"])
            mine = [values[r * rows : (r + 1) * rows] for values in looked_up]
            x = self.layers(f"{prefix}bot", batch[f"{prefix}dense_in"].double()).relu()
            p = self.layers(f"{prefix}top", self.interact(x, mine)).sigmoid()
            total = total + self.scale * self.compare(p, batch[f"{prefix}target"]).mean()
        return total

    def layers(self, name: str, x: Tensor) -> Tensor:
        """Linear layers with ReLU between."""
        count = sum(key.startswith(f"{name}:::fc") and key.endswith("_w") for key in self.params)
        for k in range(1, count + 1):
            x = F.linear(x if k == 1 else x.relu(), self.params[f"{name}:::fc{k}_w"], self.params[f"{name}:::fc{k}_b"])
        return x

    def interact(self, x: Tensor, looked_up: list[Tensor]) -> Tensor:
        if self.given["arch_interaction_op"] == "cat":
            return torch.cat([x, *looked_up], 1)
        together = torch.stack([x, *looked_up], 1)
        rows, columns = torch.tril_indices(together.shape[1], together.shape[1], -1)
        return torch.cat([x, (together @ together.mT)[:, rows, columns]], 1)

    def compare(self, p: Tensor, target: Tensor) -> Tensor:
        if self.given["loss_function"] == "bce":
            return F.binary_cross_entropy(p, target.double(), reduction="none")
        return 0.5 * ((p - target.double()) ** 2).sum(1)


@pytest.mark.parametrize("case", train)
def test_it_trains_as_eager_pytorch_does(case: Case) -> None:
    imported, state = dlrm_program(case, "train")
    losses, kept = training(imported, state)
    eager = Eager(case, imported.step, state)
    batch = dlrm_batch(caffe2.lower(imported, state=state))
    expected = torch.stack([eager.step(batch) for _ in range(STEPS)])
    assert losses.isfinite().all() and (losses[1:] < losses[:-1]).all()
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=0)
    for name, param in eager.params.items():
        torch.testing.assert_close(kept[name].double(), param.detach(), rtol=1e-5, atol=1e-6, msg=name)
    moved = [name for name in eager.params if not torch.equal(kept[name], state[name])]
    assert set(eager.tables) <= set(moved) and len(moved) > len(eager.params) // 2


# -- placements


def on_one_device(program: Program) -> Program:
    """All operators and blobs on one device."""
    device = Device.parse("gpu:0")

    def moved(net: Net) -> Net:
        blobs = {name: blob._replace(device=device) for name, blob in net.blobs.items()}
        return net.with_(ops=tuple([op._replace(device=device) for op in net.ops]), blobs=blobs)

    return program.with_(init=moved(program.init), step=moved(program.step))


def shifted(program: Program) -> Program:
    """The later half of the activations on devices of their own."""
    chosen = passes.find_activations(program)
    shifts = {0: 2, 1: 3} if len(program.replicas) > 1 else {0: 2}
    return passes.shift_activations(program, chosen[len(chosen) // 2 :], shifts=shifts)


@pytest.mark.parametrize("case", train)
@pytest.mark.parametrize("place", [shifted, on_one_device])
def test_placements_train_the_same_bits(case: Case, place: Any) -> None:
    imported, state = dlrm_program(case, "train")
    placed = place(imported)
    assert placed.step != imported.step or case.record["inputs"]["ndevices"] == 1
    if place is shifted:
        graphir.certify(imported, passes.inject_copies(placed))
    (losses, kept), (others, found) = training(imported, state), training(placed, state)
    assert torch.equal(losses, others)
    assert [name for name in state if not torch.equal(kept[name], found[name])] == []


@pytest.mark.parametrize("case", train)
def test_devices_on_threads_train_the_same_bits(case: Case) -> None:
    imported, state = dlrm_program(case, "train")
    (losses, kept), (others, found) = training(imported, state), training(imported, state, "threads")
    assert torch.equal(losses, others) and all(torch.equal(kept[name], found[name]) for name in kept)


@pytest.mark.parametrize("case", cases.params("dlrm"))
def test_every_forward_net_runs(case: Case) -> None:
    imported, state = dlrm_program(case, "forward")
    lowered = caffe2.lower(passes.inject_copies(imported), state=state)
    with Session(passes.emit(lowered), lowered.state) as session:
        results = session.step(**dlrm_batch(lowered))
    assert results and all(((value > 0) & (value < 1)).all() for value in results.values())
