"""Kernels of CTC: torch's bits, labels that are no classes, what they allocate, and what profiles call them with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from allocations import measured_peak
from graphir.runtime.kernels.ctc import CTC
from single_calls import blob
from torch import Tensor

from graphir.analysis.formulas.scratch import SCRATCH
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
from graphir.ir.optypes.sized import SizedOperator

LOSS, BACKWARD = "graphir.ctc_loss", "graphir.ctc_loss_backward"
FRAMES, LABELS = torch.tensor([12, 9, 11]), torch.tensor([4, 2, 3])


def operands(joined: bool, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    log_probs = torch.randn(12, 3, 6, dtype=dtype).log_softmax(-1)
    targets = torch.randint(1, 6, (3, 4)).masked_fill(torch.arange(4) >= LABELS[:, None], -1)
    return [log_probs, targets[targets > 0] if joined else targets, FRAMES, LABELS]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_losses_and_gradients_are_torchs(joined: bool, dtype: torch.dtype) -> None:
    log_probs, *rest = operands(joined, dtype)
    log_probs.requires_grad_()
    losses = F.ctc_loss(log_probs, *rest, reduction="none")
    grad = torch.randn_like(losses)
    losses.backward(grad)
    given = [log_probs.detach(), *rest]
    assert torch.equal(CTC[LOSS](*given), losses)
    assert log_probs.grad is not None and torch.equal(CTC[BACKWARD](grad, *given), log_probs.grad)


def test_only_elements_are_read() -> None:
    given = operands(joined=False)
    gapped = [torch.stack([t, torch.full_like(t, 99)], dim=-1)[..., 0] for t in given]
    assert torch.equal(CTC[LOSS](*gapped), CTC[LOSS](*given))
    grad = torch.ones(3)
    assert torch.equal(CTC[BACKWARD](grad, *gapped), CTC[BACKWARD](grad, *given))


@pytest.mark.parametrize("type", [LOSS, BACKWARD])
@pytest.mark.parametrize("label", [6, -1])
@pytest.mark.parametrize("joined", [False, True])
def test_labels_are_classes(type: str, label: int, joined: bool) -> None:
    given = operands(joined)
    given[1].view(-1)[0] = label
    with pytest.raises(IndexError, match=f"the label {label} is out of bounds for 6"):
        CTC[type](*[torch.ones(3)] * (type == BACKWARD), *given)


@pytest.mark.parametrize("type", [LOSS, BACKWARD])
@pytest.mark.parametrize("joined", [False, True])
def test_scratch_is_bounded_by_shapes(type: str, joined: bool) -> None:
    given = [*[torch.ones(3)] * (type == BACKWARD), *operands(joined)]
    names = tuple(f"x{k}" for k in range(len(given)))
    blobs = {name: blob(name, tensor) for name, tensor in zip(names, given, strict=True)}
    bound = SCRATCH[type](SizedOperator(Operator(type, names, (), {}, gpu(0)), blobs, {}, 1))
    measured = measured_peak(lambda: CTC[type](*given)) - CTC[type](*given).nbytes
    assert bound is not None and measured <= bound
    if not joined:  # a sequence has as many labels as a row of targets
        assert measured == bound


@pytest.mark.parametrize("joined", [False, True])
def test_profiles_call_them_on_sequences_as_long_as_there_can_be(joined: bool) -> None:
    from graphir.runtime.profiling.operands import variants

    given = operands(joined)
    names = ("log_probs", "targets", "frames", "labels")
    blobs: dict[str, Any] = {name: blob(name, tensor) for name, tensor in zip(names, given, strict=True)}
    op = Operator(LOSS, names, ("losses",), {}, gpu(0))
    (made,) = variants(op, {**blobs, "losses": blob("losses", torch.ones(3))}, {})
    assert made[2].tolist() == [12] * 3 and made[3].tolist() == ([3, 3, 3] if joined else [4] * 3)
    assert CTC[LOSS](*made).isfinite().all()


@pytest.mark.cuda
def test_cuda_has_torchs_own_losses() -> None:
    log_probs, targets, frames, labels = operands(joined=False)
    with torch.backends.cudnn.flags(enabled=False):
        expected = F.ctc_loss(log_probs.cuda(), targets.cuda(), frames, labels, reduction="none")
    given = [t.cuda() for t in (log_probs, targets, frames, labels)]
    assert torch.equal(CTC[LOSS](*given), expected)
    close = CTC[BACKWARD](torch.ones(3, device="cuda"), *given).cpu() - CTC[BACKWARD](
        torch.ones(3), log_probs, targets, frames, labels
    )
    assert close.abs().max() < 1e-5
