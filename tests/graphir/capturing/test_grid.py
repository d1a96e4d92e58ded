"""The points at which a step is recorded determine every polynomial that its sizes may be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphir.ir.fitting import Grid
from graphir.ir.size import Size, bind, multiply, parse_size

CASES = [("batch",), ("length",), ("batch", "length"), ("batch", "height", "width"), ("batch", "a", "b", "c")]


def at_points(grid: Grid, size: Size) -> list[int]:
    return [bind(size, point) for point in grid.points]


@pytest.mark.parametrize(("dims", "recordings"), list(zip(CASES, [3, 4, 7, 13, 23], strict=True)))
def test_as_many_recordings_as_coefficients_and_a_check(dims: tuple[str, ...], recordings: int) -> None:
    assert len(Grid(dict.fromkeys(dims, 9)).points) == recordings


@pytest.mark.parametrize("dims", CASES)
@settings(deadline=None)
@given(data=st.data())
def test_any_such_polynomial_is_found(dims: tuple[str, ...], data: st.DataObject) -> None:
    grid = Grid({dim: data.draw(st.integers(1, 50)) for dim in dims})
    texts = ["1", *dims, *[f"{d}*{e}" for d in dims for e in dims if (d, e) != ("batch", "batch")]]
    terms = data.draw(st.lists(st.tuples(st.integers(-99, 99), st.sampled_from(texts)), max_size=4))
    size = parse_size("+".join(f"{k}" if text == "1" else f"{k}*{text}" for k, text in terms).replace("+-", "-") or "0")
    assert grid.fit(at_points(grid, size)) == size


@pytest.mark.parametrize("value", range(1, 40))
def test_further_points_differ_in_every_dimension_and_are_never_1(value: int) -> None:
    grid = Grid({"batch": value, "length": value})
    assert grid.points[0] == {"batch": value, "length": value}
    for dim in ("batch", "length"):
        found = {point[dim] for point in grid.points[:-1]}
        assert grid.points[-1][dim] not in found
        assert 1 not in found - {value}


@pytest.mark.parametrize("text", ["batch*batch", "length*length*length", "batch*batch*length"])
def test_higher_powers_are_none(text: str) -> None:
    grid = Grid({"batch": 6, "length": 10})
    assert grid.fit(at_points(grid, parse_size(text))) is None


def test_halves_are_none() -> None:
    grid = Grid({"length": 10})
    assert grid.fit([p["length"] * (p["length"] + 1) // 2 for p in grid.points]) is None
    assert grid.fit([p["length"] // 2 for p in grid.points]) is None


def test_products_of_three_dimensions() -> None:
    grid = Grid({"batch": 2, "height": 8, "width": 9})
    size = multiply(parse_size("batch*height-batch"), parse_size("width+2"))
    assert grid.fit(at_points(grid, size)) == size
