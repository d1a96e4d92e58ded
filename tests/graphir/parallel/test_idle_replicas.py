"""Replicas that have no rows: called, as torch calls them, or left out; and texts that replicas return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor, nn
from torch_on_host import on_host
from torch_on_host import wrap as wrap_torchs

import graphir


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor, *, by: float = 1.0) -> Tensor:
        return self.fc(x) * by


def test_a_replica_without_rows_fails_as_torchs_and_names_the_option() -> None:
    x = torch.randn(2, 4)
    with on_host(), pytest.raises(TypeError, match="missing 1 required positional argument"):
        wrap_torchs(Scaled(), (0, 1, 2))(x, by=2.0)
    told = r"in replica 2 (.|\n)*missing 1 required(.|\n)*fix  replica 2 has no rows of this batch: .*idle='skip'"
    with pytest.raises(TypeError, match=told):
        graphir.DataParallel(Scaled(), [0, 1, 2], binding="cpu")(x, by=2.0)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_it_is_left_out(rows: int) -> None:
    module, x = Scaled(), torch.randn(rows, 4)
    model = graphir.DataParallel(module, [0, 1, 2], binding="cpu", idle="skip")
    expected = torch.cat([module(part, by=2.0) for part in x.chunk(3)])
    assert torch.equal(model(x, by=2.0), expected)
    assert torch.equal(graphir.data_parallel(module, x, [0, 1, 2], module_kwargs={"by": 2.0}, idle="skip"), expected)


def test_without_any_rows_the_first_replica_says_what_the_output_is() -> None:
    model = EagerOnly(Scaled(), [0, 1], binding="cpu", idle="skip")
    assert model(torch.empty(0, 4), by=2.0).shape == (0, 3)


def test_arguments_without_tensors_go_to_all() -> None:
    class Counts(nn.Module):
        def forward(self, n: int) -> Tensor:
            return torch.full((1,), n)

    assert graphir.DataParallel(Counts(), [0, 1], binding="cpu", idle="skip")(3).tolist() == [3, 3]


def test_a_type_error_of_a_replica_with_rows_is_its_own() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
            raise TypeError("of the module")

    with pytest.raises(TypeError, match="of the module") as caught:
        graphir.DataParallel(Wrong(), [0, 1, 2], binding="cpu")(torch.randn(2, 4), by=1.0)
    assert "idle=" not in str(caught.value)


def test_idle_is_one_of_two_words() -> None:
    given: Any = "drop"
    with pytest.raises(graphir.ReplicationError, match=r"idle is 'drop'(.|\n)*'call', as torch does, or 'skip'"):
        graphir.DataParallel(nn.Linear(2, 2), [0], binding="cpu", idle=given)


@pytest.mark.parametrize("wrap", [graphir.DataParallel, EagerOnly])
def test_of_a_text_there_is_each_replica_s(wrap: Any) -> None:
    class Told(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"out": x * 2, "words": ["a", ("b", x)], "n": None}

    x = torch.randn(3, 4)
    output = wrap(Told(), [0, 1], binding="cpu")(x)
    assert torch.equal(output["out"], x * 2) and output["n"] is None
    assert output["words"][0] == ["a", "a"] and output["words"][1][0] == ["b", "b"]
    assert torch.equal(output["words"][1][1], x)


def test_texts_may_differ() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x, "rows": f"{len(x)} rows"}

    assert EagerOnly(Named(), [0, 1], binding="cpu")(torch.randn(3, 4))["rows"] == ["2 rows", "1 rows"]
