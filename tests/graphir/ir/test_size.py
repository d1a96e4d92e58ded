"""Sizes: arithmetic, text, and what is refused."""

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphir.errors import GraphirError, ParseError
from graphir.ir.size import (
    HIGHEST_DEGREE,
    Polynomial,
    add,
    bind,
    bind_shape,
    dimension,
    multiply,
    numel,
    parse_size,
    rename_dims,
    size_dims,
)

BATCH, LENGTH = dimension("batch"), dimension("length")
NAMES = ["batch", "gpu_0/batch", "seq", "_x.y"]
MONOMIALS = st.lists(st.sampled_from(NAMES), max_size=3).map(sorted).map(tuple)
SIZES = st.dictionaries(MONOMIALS, st.integers(-(10**9), 10**9), max_size=5).map(Polynomial.of)
DIMS = st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 1000)))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (7, "7"),
        (-7, "-7"),
        (BATCH, "batch"),
        (Polynomial.of({("batch",): 2, (): 1}), "2*batch+1"),
        (Polynomial.of({("batch",): -1, (): -3}), "-batch-3"),
        (Polynomial.of({("a",): 1, ("b",): -2}), "a-2*b"),
        (Polynomial.of({("gpu_0/batch",): 3, ("gpu_1/batch",): 1, (): 5}), "3*gpu_0/batch+gpu_1/batch+5"),
        (Polynomial.of({("batch", "length"): 1}), "batch*length"),
        (Polynomial.of({("length", "length"): 2, ("length",): 1, (): 1}), "length+2*length*length+1"),
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
    assert parse_size(text) == Polynomial.of({("x",): 2})


def test_factors_are_sorted():
    assert parse_size("b*a+a*b") == parse_size("2*a*b")


@pytest.mark.parametrize("text", ["0*x+3", "x-x+3", "1+2", "a*b-b*a+3"])
def test_a_size_without_dimensions_is_a_number(text):
    assert parse_size(text) == 3


@pytest.mark.parametrize("text", ["a b", "2*", "*a", "a*", "a*2", "a**2", "(a)", "1.5", "a+", "+", "2*3*a", "a;1"])
def test_what_is_no_polynomial_is_refused(text):
    with pytest.raises(ParseError) as caught:
        parse_size(text)
    assert caught.value.what == f"{text!r} is not a size"
    assert "2*batch+1" in caught.value.fix


def test_an_empty_size_is_refused():
    with pytest.raises(ParseError, match="an empty size"):
        parse_size("")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("*".join(["a"] * (HIGHEST_DEGREE + 1)), "is of degree 9"),
        ("+".join(["a"] * 1025), "a size of more than 1024 terms"),
        ("9" * 5000 + "*a", "99999999999999999999… is not a possible size"),
    ],
)
def test_texts_that_no_size_has_are_refused(text, what):
    with pytest.raises(ParseError) as caught:
        parse_size(text)
    assert what in caught.value.what


@given(SIZES, DIMS)
def test_binding_is_evaluation(size, dims):
    terms = [((), size)] if isinstance(size, int) else size.terms
    assert bind(size, dims) == sum(k * prod(dims[dim] for dim in monomial) for monomial, k in terms)


def test_shapes_bind_and_count():
    shape = (BATCH, 3, Polynomial.of({("batch",): 2, (): 1}))
    assert bind_shape(shape, {"batch": 4}) == (4, 3, 9)
    assert numel(shape, {"batch": 4}) == 108
    assert numel((), {}) == 1


def test_a_dimension_without_a_value_is_refused():
    with pytest.raises(GraphirError, match=r"dimension 'batch' has no value\n  fix  known dimensions: \['seq'\]"):
        bind(BATCH, {"seq": 1})


def test_sizes_know_their_dimensions():
    assert size_dims(7) == ()
    assert size_dims(parse_size("a*a+2*b*a+3")) == ("a", "b")


def test_renamed_dimensions_are_sorted_and_added():
    size = parse_size("a+2*b+3*a*b+3")
    assert rename_dims(size, {"a": "z", "b": "y"}.__getitem__) == parse_size("2*y+3*y*z+z+3")
    assert rename_dims(size, lambda dim: "x") == parse_size("3*x+3*x*x+3")
    assert rename_dims(5, str.upper) == 5


@given(SIZES, SIZES, DIMS)
def test_sums_and_products_are_those_of_the_numbers(a, b, dims):
    assert bind(add(a, b), dims) == bind(a, dims) + bind(b, dims)
    assert bind(multiply(a, b), dims) == bind(a, dims) * bind(b, dims)


def test_equal_sizes_are_equal_however_they_were_made():
    assert multiply(LENGTH, BATCH) == multiply(BATCH, LENGTH) == parse_size("batch*length")
    assert multiply(add(BATCH, 1), add(BATCH, -1)) == parse_size("batch*batch-1")
    assert add(BATCH, parse_size("-1*batch+2")) == 2


def test_a_product_of_too_many_terms_is_refused():
    size = Polynomial.of({(a + b,): 1 for a, b in product("abcdef", repeat=2)})
    with pytest.raises(GraphirError, match="a product of 36 by 36 terms"):
        multiply(size, size)
