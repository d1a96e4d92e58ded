"""Arguments that share memory: a recording has them apart, so overwriting one of them is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphir import passes
from graphir.capturing.capture import capture
from graphir.capturing.intake.state import overlaps
from graphir.errors import CaptureError


class Pair(nn.Module):
    """A function of two arguments and a buffer, and a linear layer."""

    def __init__(self, body: Callable[[Pair, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(4, 3))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(self.body(self, a, b))


def written(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a + b


def written_in_part(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    b[:, 1] = 0
    return a + b


def read(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    return a * b


def buffer_written(m: Pair, a: Tensor, b: Tensor) -> Tensor:
    m.mean.add_(b)
    return a * m.mean


def wide() -> Tensor:
    return torch.arange(16.0).reshape(4, 4)


@pytest.mark.parametrize(
    ("body", "which", "other"),
    [(written, "argument 'a'", "argument 'b'"), (written_in_part, "argument 'b'", "argument 'a'")],
)
def test_an_argument_that_shares_memory_with_another_is_not_overwritten(
    body: Callable[[Pair, Tensor, Tensor], Tensor], which: str, other: str
) -> None:
    x = wide()
    before = x.clone()
    with pytest.raises(CaptureError) as caught:
        capture(Pair(body), (x[:, :3], x[:, 1:]))
    assert f"the step overwrites {which}, which shares memory with {other}" in str(caught.value)
    assert "test_capture_overlaps.py:" in str(caught.value) and "clone" in str(caught.value)
    assert torch.equal(x, before)


@pytest.mark.parametrize("given", [Tensor.detach, lambda mean: mean], ids=["a view", "the buffer itself"])
def test_nor_is_one_that_shares_memory_with_the_state(given: Callable[[Tensor], Tensor]) -> None:
    for body, text in (
        (written, "argument 'a', which shares memory with buffer 'mean'"),
        (buffer_written, "buffer 'mean', which shares memory with argument 'a'"),
    ):
        model = Pair(body)
        with pytest.raises(CaptureError, match=text):
            capture(model, (given(model.mean), torch.ones(4, 3)), batch_dims=None)


@pytest.mark.parametrize("body", [written, written_in_part, read, buffer_written])
def test_clones_and_what_is_only_read_are_captured(body: Callable[[Pair, Tensor, Tensor], Tensor]) -> None:
    x = wide()
    shared = body in (read, buffer_written)
    given = (x[:, :3], x[:, 1:]) if shared else (x[:, :3].clone(), x[:, 1:].clone())
    torch.manual_seed(0)
    model = Pair(body)
    program = capture(model, given)
    with Session(passes.emit(program), program.state) as session:
        mine = session.step(*given)
    assert torch.equal(mine, model(*given))


def test_one_tensor_given_twice_is_overwritten_under_both_names() -> None:
    model, x = Pair(written), torch.ones(4, 3)
    program = capture(model, (x, x))
    with Session(passes.emit(program), program.state) as session:
        assert torch.equal(session.step(x, x), model(x, x))


def test_overlaps_are_found_between_first_and_last_elements() -> None:
    x = torch.zeros(100)
    tensors = {
        "whole": x[:50],
        "inside": x[10:12],
        "later": x[49:60:10],
        "apart": x[60:],
        "other": torch.zeros(100),
        "empty": x[5:5],
        "meta": torch.zeros(3, device="meta"),
    }
    assert overlaps(tensors.items()) == {"whole": "inside", "inside": "whole", "later": "whole"}


def test_tensors_of_one_array_overlap_and_so_do_fakes() -> None:
    array = torch.zeros(8).numpy()
    assert overlaps([("a", torch.from_numpy(array)), ("b", torch.from_numpy(array[4:]))]) == {"a": "b", "b": "a"}
    with FakeTensorMode():
        x = torch.zeros(8)
        assert overlaps([("a", x[:5]), ("b", x[4:]), ("c", torch.zeros(8))]) == {"a": "b", "b": "a"}
