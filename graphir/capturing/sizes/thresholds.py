"""Operators for which PyTorch chooses an algorithm by a size, which the recordings may not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..step.recorded_step import Recording

__all__ = ["threshold_in"]


def threshold_in(recordings: Sequence[Recording]) -> str:
    """Why the step would differ from some size on, though these recordings are alike; empty if it would not."""
    rows = [list(_rows_of_distances(recording)) for recording in recordings]
    if all(found == rows[0] for found in rows):
        return ""
    return (
        "torch.cdist uses another algorithm from 26 rows on (pass compute_mode='use_mm_for_euclid_dist' or "
        "'donot_use_mm_for_euclid_dist')"
    )


def _rows_of_distances(recording: Recording) -> Iterator[tuple[int, int]]:
    """The numbers of rows of each ``cdist`` that has too few rows for PyTorch to take a matrix product."""
    for call in recording.calls:
        if call.type == "aten._cdist_forward.default" and call.args["p"] == 2 and not call.args.get("compute_mode"):
            first, second = call.inputs
            yield first.shape[-2], second.shape[-2]
