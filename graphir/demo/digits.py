"""The demo's images: 1,797 handwritten digits that ship with the package.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998,
doi 10.24432/C50P49, CC BY 4.0. ``DIGITS.md`` beside this file says what was changed.
"""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy
import torch

__all__ = ["load_digits"]

_BRIGHTEST = 16
"""A stored pixel counts the dark points of a 4 x 4 cell."""


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The images and their labels, in the order of the published test set, whose writers follow one another.

    Returns:
        images: ``float32[1797, 1, 8, 8]``, 0 (paper) to 1 (ink).
        labels: ``int64[1797]``, 0 to 9.
    """
    with (
        as_file(files(__package__) / "digits.npz") as path,
        numpy.load(path, allow_pickle=False) as arrays,
    ):
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return images.to(torch.float32).div_(_BRIGHTEST).unsqueeze(1), labels.to(torch.int64)
