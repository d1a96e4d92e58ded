"""The images that ship with the package."""

from pathlib import Path

import numpy
import pytest
import torch

import graphir.demo
from graphir.demo.digits import load_digits

FOLDER = Path(graphir.demo.__file__).parent


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    return load_digits()


def test_images_are_single_channel_floats_between_zero_and_one(digits):
    images, _ = digits
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)


def test_every_label_occurs_as_often_as_in_the_source(digits):
    _, labels = digits
    assert labels.dtype == torch.int64
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_first_image_is_the_source_s_first_line(digits):
    images, labels = digits
    assert labels[0] == 0
    assert images[0, 0, 0].mul(16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_a_caller_may_overwrite_the_images():
    load_digits()[0].zero_()
    assert load_digits()[0].any()


def test_the_file_is_small_and_needs_no_pickle():
    path = FOLDER / "digits.npz"
    assert path.stat().st_size < 60_000
    with numpy.load(path, allow_pickle=False) as arrays:
        assert {name: str(arrays[name].dtype) for name in arrays} == {"images": "uint8", "labels": "uint8"}


def test_source_and_licence_are_named_beside_the_file():
    text = (FOLDER / "DIGITS.md").read_text(encoding="utf-8")
    for words in ("E. Alpaydin", "C. Kaynak", "10.24432/C50P49", "CC BY 4.0", "creativecommons.org/licenses/by/4.0"):
        assert words in text
