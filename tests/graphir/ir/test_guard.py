"""Guards: what they say, print and read back, and what is no guard."""

from __future__ import annotations

import pytest

from graphir import GraphirError, ParseError
from graphir.ir.guard import parse_guard

HOLDS = {
    "batch>=2": [2, 3, 100],
    "batch<=7": [1, 7],
    "batch==4": [4],
    "batch!=4": [3, 5],
    "batch%8!=0": [1, 7, 9],
    "batch%8==3": [3, 11],
    "2*batch%8==2": [1, 5],
    "batch*batch>=-1": [1],
}
FAILS = {
    "batch>=2": [1],
    "batch<=7": [8],
    "batch==4": [3, 5],
    "batch!=4": [4],
    "batch%8!=0": [8, 64],
    "batch%8==3": [8, 4],
    "2*batch%8==2": [4, 2],
    "batch*batch<=3": [2],
}


@pytest.mark.parametrize("text", HOLDS)
def test_a_guard_holds_where_it_says(text: str) -> None:
    guard = parse_guard(text, "")
    assert str(guard) == text and guard.dims == ("batch",)
    assert all(guard.holds({"batch": size}) for size in HOLDS[text])
    assert not any(guard.holds({"batch": size}) for size in FAILS.get(text, ()))


def test_a_guard_shows_its_size_as_the_text_form_does() -> None:
    assert repr([parse_guard("batch%8!=0", "why")]) == "[Guard(batch%8!=0, reason='why')]"


def test_a_renamed_guard_is_of_the_new_dimensions() -> None:
    guard = parse_guard("batch-length<=3", "why").renamed("gpu_0/".__add__)
    assert str(guard) == "gpu_0/batch-gpu_0/length<=3" and guard.reason == "why"
    assert parse_guard(str(guard), "why") == guard
    with pytest.raises(GraphirError, match="dimension 'gpu_0/batch' has no value"):
        guard.holds({"batch": 2, "length": 1})


@pytest.mark.parametrize(
    "text", ["", "batch", "batch>2", "batch>=", ">=2", "batch%0==1", "batch%-2==1", "batch>=two", "a b>=2", "2>=batch"]
)
def test_what_is_no_guard_is_refused(text: str) -> None:
    with pytest.raises(ParseError):
        parse_guard(text, "")


def test_a_guard_of_no_dimension_is_refused() -> None:
    with pytest.raises(ParseError, match="depends on no dimension"):
        parse_guard("3>=2", "")
