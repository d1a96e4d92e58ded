"""Blobs: bytes of a geometry, and whether its elements share memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphir.ir.blob import Blob, contiguous_strides, dense_nbytes, overlaps
from graphir.ir.device import gpu
from graphir.ir.size import Size, dimension, parse_size

BATCH = dimension("batch")


def blob(shape: tuple[Size, ...], strides: tuple[Size, ...] | None = None) -> Blob:
    return Blob("b", shape, "f32", gpu(0), "temporary", "b", strides)


@pytest.mark.parametrize(
    ("shape", "strides", "span", "dense"),
    [
        ((3, 4), None, 48, 48),
        ((BATCH, 4), None, 80, 80),
        ((4, 3), (1, 4), 48, 48),
        ((3, 2), (4, 1), 40, 24),
        ((3, 4), (0, 1), 16, 48),
        ((0, 4), (4, 1), 0, 0),
        ((), None, 4, 4),
    ],
)
def test_gaps_count_as_bytes_and_repeats_do_not(
    shape: tuple[Size, ...], strides: tuple[int, ...] | None, span: int, dense: int
) -> None:
    assert blob(shape, strides).nbytes({"batch": 5}) == span
    assert dense_nbytes(blob(shape, strides), {"batch": 5}) == dense


def test_a_blob_shows_its_sizes_as_the_text_form_does() -> None:
    assert repr(blob((parse_size("2*batch+1"), 4), (1, BATCH))) == (
        "Blob(name='b', shape=[2*batch+1, 4], dtype='f32', device='gpu:0', role='temporary', storage='b', "
        "strides=[1, batch], offset=0)"
    )


def test_moving_changes_the_device_only() -> None:
    before = blob((3, 4))
    assert before.on(gpu(1)) == before._replace(device=gpu(1))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3))
def test_overlaps_never_misses_a_shared_address(dims: list[tuple[int, int]]) -> None:
    shape, strides = tuple(size for size, _ in dims), tuple(stride for _, stride in dims)
    indices = itertools.product(*map(range, shape))
    addresses = [sum(i * stride for i, stride in zip(index, strides, strict=True)) for index in indices]
    if len(set(addresses)) < len(addresses):
        assert overlaps(shape, strides)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.randoms())
def test_permuted_dense_geometries_do_not_overlap(sizes: list[int], rng) -> None:
    order = list(range(len(sizes)))
    rng.shuffle(order)
    strides = contiguous_strides(tuple(sizes))
    assert not overlaps([sizes[i] for i in order], [strides[i] for i in order])


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (4, 0, 3)])
def test_what_has_no_elements_does_not_overlap(shape: tuple[int, ...]) -> None:
    assert not overlaps(shape, (0,) * len(shape))
