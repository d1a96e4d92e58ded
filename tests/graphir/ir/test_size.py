"""Sizes: arithmetic, text, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphir.errors import GraphirError, ParseError
from graphir.ir.size import Affine, bind, bind_shape, numel, parse_size, rename_dims, size_dims

BATCH = Affine((("batch", 1),))
DIMS = st.dictionaries(st.sampled_from(["batch", "gpu_0/batch", "seq", "_x.y"]), st.integers(-100, 100))
SIZES = st.builds(Affine.of, DIMS, st.integers(-(10**9), 10**9))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7"),
        (-7, "-7"),
        (BATCH, "batch"),
        (Affine((("batch", 2),), 1), "2*batch+1"),
        (Affine((("batch", -1),), -3), "-1*batch-3"),
        (Affine((("a", 1), ("b", -2)), 0), "a-2*b"),
        (Affine((("gpu_0/batch", 3), ("gpu_1/batch", 1)), 5), "3*gpu_0/batch+gpu_1/batch+5"),
    ],
)
def test_sizes_have_a_text(size, text):
    assert str(size) == text
    assert parse_size(text) == size


@given(SIZES)
def test_any_size_comes_back_from_its_text(size):
    assert parse_size(str(size)) == size


@pytest.mark.parametrize("text", ["x+x", "2*x", "x+x+0", "3*x-x"])
def test_like_terms_are_added(text):
    assert parse_size(text) == Affine((("x", 2),))


@pytest.mark.parametrize("text", ["0*x+3", "x-x+3", "1+2"])
def test_a_size_without_dimensions_is_a_number(text):
    assert parse_size(text) == 3


@pytest.mark.parametrize("text", ["a b", "2*", "*a", "a*b", "a**2", "(a)", "1.5", "a+", "+", "2*3*a", "a;1"])
def test_what_is_not_affine_is_refused(text):
    with pytest.raises(ParseError) as caught:
        parse_size(text)
    assert caught.value.what == f"{text!r} is not a size"
    assert "2*batch+1" in caught.value.fix


def test_an_empty_size_is_refused():
    with pytest.raises(ParseError, match="an empty size"):
        parse_size("")


@given(SIZES, st.integers(0, 1000))
def test_binding_is_evaluation(size, value):
    dims = dict.fromkeys(["batch", "gpu_0/batch", "seq", "_x.y"], value)
    terms = () if isinstance(size, int) else size.terms
    constant = size if isinstance(size, int) else size.constant
    assert bind(size, dims) == sum(k * value for _, k in terms) + constant


def test_shapes_bind_and_count():
    shape = (BATCH, 3, Affine((("batch", 2),), 1))
    assert bind_shape(shape, {"batch": 4}) == (4, 3, 9)
    assert numel(shape, {"batch": 4}) == 108
    assert numel((), {}) == 1


def test_a_dimension_without_a_value_is_refused():
    with pytest.raises(GraphirError, match=r"dimension 'batch' has no value\n  fix  known dimensions: \['seq'\]"):
        bind(BATCH, {"seq": 1})


def test_sizes_know_their_dimensions():
    assert size_dims(7) == ()
    assert size_dims(Affine((("a", 1), ("b", 2)))) == ("a", "b")


def test_renamed_dimensions_are_sorted_and_added():
    size = Affine((("a", 1), ("b", 2)), 3)
    assert rename_dims(size, {"a": "z", "b": "y"}.__getitem__) == Affine((("y", 2), ("z", 1)), 3)
    assert rename_dims(size, lambda dim: "x") == Affine((("x", 3),), 3)
    assert rename_dims(5, str.upper) == 5
