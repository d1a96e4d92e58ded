"""torch.nn's modules of unusual kinds: recurrent ones, and those that are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from models import Example
from runnable import sgd
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError


class Last(nn.Module):
    """Classifies sequences by the last output of a recurrent module."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.out = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0][:, -1])


def example(recurrent: nn.Module, width: int = 5) -> Example:
    torch.manual_seed(0)
    return Example(Last(recurrent, width), (torch.randn(6, 2, 4),), (torch.randint(3, (6,)),), F.cross_entropy)


def trains_like_eager(given: Example) -> None:
    optimizer = sgd(given.model.parameters())
    program = capture(given.model, given.inputs, targets=given.targets, loss=given.loss, optimizer=optimizer)
    assert program.covers.fixed == ""
    matches_eager(program, given, sgd, batches=(5,))


@pytest.mark.parametrize(
    ("make", "width"),
    [
        (lambda: nn.RNN(4, 5, batch_first=True), 5),
        (lambda: nn.GRU(4, 5, batch_first=True, num_layers=2, bidirectional=True), 10),
    ],
    ids=["RNN", "GRU"],
)
def test_recurrent_modules_have_the_bits_of_eager(make: Callable[[], nn.Module], width: int) -> None:
    trains_like_eager(example(make(), width))


class WithoutFusedKernel(nn.LSTM):
    def forward(self, x: Tensor) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            return super().forward(x)


@pytest.mark.filterwarnings("ignore:TF32")
def test_lstm_that_switches_the_fused_kernel_off_has_the_bits_of_eager() -> None:
    before = torch.backends.mkldnn.enabled
    trains_like_eager(example(WithoutFusedKernel(4, 5, batch_first=True, num_layers=2)))
    assert torch.backends.mkldnn.enabled is before


@pytest.mark.filterwarnings("ignore:TF32")
def test_lstm_has_the_bits_of_eager_without_the_fused_kernel() -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        trains_like_eager(example(nn.LSTM(4, 5, batch_first=True)))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_instance_norm_tracks_its_statistics(memory_format: torch.memory_format) -> None:
    given = models.Example(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
            nn.Flatten(),
            nn.Linear(36, 3),
        ).to(memory_format=memory_format),
        (torch.randn(6, 3, 5, 5).to(memory_format=memory_format),),
        (torch.randint(3, (6,)),),
        F.cross_entropy,
    )
    trains_like_eager(given)


IMAGE = (6, 4, 3, 3)


class Counting(nn.BatchNorm2d):
    """What may make anything of the number of batches."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1.0 / float(self.num_batches_tracked) if self.training else 0.0
        return F.batch_norm(x, self.running_mean, self.running_var, None, None, self.training, min(factor, 0.1))


REFUSED: dict[str, tuple[nn.Module, tuple[int, ...], str]] = {
    "average": (
        Counting(4, momentum=None),
        IMAGE,
        "the forward of Counting with momentum=None reads the number of batches as a Python number",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    module, shape, text = REFUSED[case]
    with pytest.raises(CaptureError, match=re.escape(text)) as error:
        capture(nn.Sequential(nn.Identity(), module), (torch.ones(shape),))
    assert error.value.where.startswith("module '1', at test_capture_module_kinds.py:") and error.value.fix


@pytest.mark.parametrize("case", REFUSED)
def test_captured_in_evaluation_mode(case: str) -> None:
    module, shape, _ = REFUSED[case]
    capture(nn.Sequential(module).eval(), (torch.ones(shape),))
    module.train()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_the_fused_kernel_of_lstm_is_refused() -> None:
    given = example(nn.LSTM(4, 5, batch_first=True))
    with pytest.raises(CaptureError, match="the fused CPU kernel of LSTM is not supported") as error:
        capture(given.model, given.inputs)
    assert (
        error.value.where.startswith("module 'recurrent', at test_capture_module_kinds.py:")
        and "mkldnn" in error.value.fix
    )


def test_lazy_modules_are_run_once_first() -> None:
    model, x = nn.LazyLinear(2), torch.randn(4, 3)
    with pytest.raises(CaptureError, match="param 'weight' has no shape yet") as error:
        capture(model, (x,))
    assert "run the model once" in error.value.fix
    model(x)
    assert capture(model, (x,)).step.blobs["weight"].shape == (2, 3)


def test_a_compiled_module_is_captured_as_the_module_itself() -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    made = models.mlp()
    plain = capture(made.model, made.inputs, targets=made.targets, loss=made.loss)
    made.model.compile(backend=backend)
    assert str(capture(made.model, made.inputs, targets=made.targets, loss=made.loss)) == str(plain)
    assert not compiled
    made.model(*made.inputs)
    assert compiled
