"""A step whose convolutions take another backend than the captured one's is refused, and captured anew by compile."""

from __future__ import annotations

import pytest
import torch
from eager import assert_same_bits
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import CoverageError, RecaptureWarning, capture, passes

pytestmark = pytest.mark.usefixtures("one_thread")
"""With several, oneDNN computes all of these convolutions."""


class Volumes(nn.Module):
    """oneDNN keeps the channels last and computes large inputs; torch's own kernel for small ones does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.contiguous(memory_format=torch.channels_last_3d)).sum((2, 3, 4))


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def volumes(rows: int) -> Tensor:
    return torch.randn(rows, 2, 4, 4, 4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
class TestBackends:
    @pytest.mark.parametrize("executor", ["reference", "threads"])
    def test_a_size_at_which_another_one_is_taken_is_refused(self, executor: str) -> None:
        model = Volumes()
        program = capture(model, (volumes(3),), loss=loss)
        with Session(passes.emit(program), program.state, executor=executor) as session:  # type: ignore[arg-type]
            for rows in (3, 5):
                session.step(volumes(rows))
            with pytest.raises(CoverageError, match="takes another backend here") as error:
                session.step(volumes(64))
            assert "at batch 64" in str(error.value) and "capture the model at this size" in str(error.value)
            assert "module 'conv'" in str(error.value)
            session.step(volumes(2))

    def test_threads_count_too(self) -> None:
        program = capture(Volumes(), (volumes(3),), loss=loss)
        with (
            Session(passes.emit(program), program.state, threads=2) as session,
            pytest.raises(CoverageError, match="takes another backend here"),
        ):
            session.step(volumes(3))
        torch.set_num_threads(2)
        program = capture(Volumes(), (volumes(3),), loss=loss)
        with Session(passes.emit(program), program.state) as session:
            session.step(volumes(3))

    def test_compile_captures_it_anew_with_the_bits_of_eager(self) -> None:
        model = Volumes()
        compiled = graphir.compile(model, (volumes(3),), loss=loss)
        x = volumes(64)
        with pytest.warns(RecaptureWarning, match="takes another backend here"):
            found = compiled.step(x)
        assert_same_bits({"loss": found}, {"loss": loss(model(x)).detach()}, "64 rows")
