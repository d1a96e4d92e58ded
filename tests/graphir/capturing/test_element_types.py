"""Element types that eager PyTorch refuses are refused by the capture or by the first step, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphir.passes import emit
from graphir.runtime import Session
from models import Applied
from torch import Tensor, nn

import graphir
from graphir.capturing.capture import capture
from graphir.errors import CaptureError, GraphirError, RunError
from graphir.ir.verify import verify

MATRIX = torch.rand(4, 4)
VECTOR = torch.rand(4)
BATCHED = torch.rand(4, 4, 4)
IMAGE = torch.rand(2, 4, 4, 4)
ROWS = torch.tensor([0, 2])
LABELS = torch.tensor([0, 1, 2, 3])
HALVES = torch.rand(2, 4)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "addbmm": (torch.addbmm, (MATRIX, BATCHED, BATCHED)),
    "addmm": (torch.addmm, (MATRIX, MATRIX, MATRIX)),
    "baddbmm": (torch.baddbmm, (BATCHED, BATCHED, BATCHED)),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (MATRIX, VECTOR, VECTOR)),
    "batch_norm_eval": (F.batch_norm, (MATRIX, VECTOR, VECTOR)),
    "binary_cross_entropy": (lambda p, t, w: F.binary_cross_entropy(p, t, w), (MATRIX, MATRIX, MATRIX)),
    "bmm": (torch.bmm, (BATCHED, BATCHED)),
    "cat": (lambda a, b: torch.cat([a, b]), (MATRIX, MATRIX)),
    "cdist": (torch.cdist, (MATRIX, MATRIX)),
    "complex": (lambda a, b: torch.complex(a, b).abs(), (MATRIX, MATRIX)),
    "conv2d": (F.conv2d, (IMAGE, torch.rand(3, 4, 2, 2), torch.rand(3))),
    "conv_transpose2d": (F.conv_transpose2d, (IMAGE, torch.rand(4, 3, 2, 2), torch.rand(3))),
    "cross": (torch.linalg.cross, (MATRIX[:, :3], MATRIX[:, :3])),
    "cross_entropy": (F.cross_entropy, (MATRIX, LABELS, VECTOR)),
    "cross_entropy_of_images": (F.cross_entropy, (IMAGE, torch.zeros(2, 4, 4, dtype=torch.int64), VECTOR)),
    "dot": (torch.dot, (VECTOR, VECTOR)),
    "embedding": (F.embedding, (LABELS, MATRIX)),
    "embedding_bag": (
        lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s),
        (ROWS[None], MATRIX, HALVES[:1, :2]),
    ),
    "gather": (lambda x, i: x.gather(1, i), (MATRIX, LABELS[:, None])),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE, torch.rand(2, 3, 3, 2))),
    "grid_sample_3d": (lambda x, g: F.grid_sample(x, g, align_corners=False), (IMAGE[None], torch.rand(1, 3, 3, 3, 3))),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, VECTOR, VECTOR)),
    "heaviside": (torch.heaviside, (MATRIX, VECTOR)),
    "index": (lambda x, i: x[i], (MATRIX, ROWS)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), (MATRIX, ROWS, HALVES)),
    "index_add_in_place": (lambda x, i, s: (x * 1).index_add_(0, i, s), (MATRIX, ROWS, HALVES)),
    "index_copy": (lambda x, i, s: x.index_copy(0, i, s), (MATRIX, ROWS, HALVES)),
    "index_fill": (lambda x, i: x.index_fill(0, i, 1.0), (MATRIX, ROWS)),
    "index_put": (lambda x, i, s: x.index_put((i,), s), (MATRIX, ROWS, HALVES)),
    "index_reduce": (lambda x, i, s: x.index_reduce(0, i, s, "amax"), (MATRIX, ROWS, HALVES)),
    "index_select": (lambda x, i: x.index_select(0, i), (MATRIX, ROWS)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (MATRIX, VECTOR, VECTOR)),
    "lerp": (torch.lerp, (MATRIX, MATRIX, MATRIX)),
    "linear": (F.linear, (MATRIX, MATRIX, VECTOR)),
    "mm": (torch.mm, (MATRIX, MATRIX)),
    "mse_loss": (F.mse_loss, (MATRIX, MATRIX)),
    "multi_margin_loss": (lambda x, t, w: F.multi_margin_loss(x, t, weight=w), (MATRIX, LABELS, VECTOR)),
    "multilabel_margin_loss": (F.multilabel_margin_loss, (MATRIX, LABELS.expand(4, 4).contiguous())),
    "mv": (torch.mv, (MATRIX, VECTOR)),
    "nll_loss": (F.nll_loss, (MATRIX, LABELS, VECTOR)),
    "polar": (lambda a, b: torch.polar(a, b).abs(), (MATRIX, MATRIX)),
    "prelu": (F.prelu, (MATRIX, VECTOR)),
    "put": (lambda x, i, s: x.put(i, s), (MATRIX, ROWS, VECTOR[:2])),
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, (IMAGE, IMAGE, IMAGE)),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), (MATRIX, ROWS[:, None].expand(2, 4), HALVES)),
    "solve": (torch.linalg.solve, (MATRIX, MATRIX)),
    "take": (torch.take, (MATRIX, ROWS)),
}  # fmt: skip


def mixtures(function: Callable[..., Tensor], tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """These tensors, and with each of them of another type, as far as the function takes that type at all."""
    yield tensors
    for i, tensor in enumerate(tensors):
        others = (torch.float64, torch.bfloat16) if tensor.is_floating_point() else (torch.int32, torch.float32)
        for dtype in others:
            if not dtype.is_floating_point or runs(function, *in_precision(tensors, dtype)):
                yield (*tensors[:i], tensor.to(dtype), *tensors[i + 1 :])


def in_precision(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple([t.to(dtype) if t.is_floating_point() else t for t in tensors])


def runs(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    try:
        function(*tensors)
    except (RuntimeError, IndexError):
        return False
    return True


def is_taken(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether a capture takes the tensors and its first step runs."""
    try:
        program = capture(Applied(function), tensors, batch_dims=(None, None, None))
        with Session(emit(program), program.state) as session:
            session.step(*tensors)
    except GraphirError:
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_what_eager_takes_runs_and_nothing_else(case: str) -> None:
    function, tensors = CASES[case]
    for given in mixtures(function, tensors):
        assert is_taken(function, *given) == runs(function, *given), [t.dtype for t in given]


def refusal(model: nn.Module, *inputs: Tensor, **options: Any) -> str:
    """What the capture or the first step raises."""
    with pytest.raises((CaptureError, RunError)) as caught:
        program = capture(model, inputs, **options)
        with Session(emit(program), program.state) as session:
            session.step(*inputs, *options.get("targets", ()))
    return str(caught.value)


def test_the_module_and_the_line_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Applied(lambda x: torch.mm(x, x.double())))
    text = refusal(model, torch.rand(4, 4))
    assert "same dtype" in text and f"{Path(__file__).name}:" in text


def test_a_layer_on_another_precision_is_named() -> None:
    text = refusal(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), MATRIX.double())
    assert "dtype" in text and "module '1'" in text


def test_labels_of_the_wrong_type_are_of_the_loss() -> None:
    text = refusal(nn.Linear(4, 4), MATRIX, targets=(LABELS.int(),), loss=F.cross_entropy)
    assert "nll_loss" in text


def test_a_program_keeps_the_default_element_type_that_it_was_captured_with() -> None:
    def made(x: Tensor) -> Tensor:
        drawn = torch.rand(4) + torch.arange(0.5, 4.0) + torch.full((4,), 0.1) + torch.linspace(0.0, 1.0, 4)
        return x * drawn * (torch.arange(4) + torch.zeros(4, dtype=torch.int64))

    x = torch.rand(2, 4, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        program = capture(Applied(made), (x,))
        with graphir.seeded(0):
            expected = made(x)
    finally:
        torch.set_default_dtype(torch.float32)
    verify(program)
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x), expected)
