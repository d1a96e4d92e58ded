"""Copies of parameters and buffers for a program, filled by threads while the step is recorded.

Memory that nothing has touched yet is slow to fill: for many models that takes as long as a recording, which needs
Python and no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from ...ir.tensor import GRAIN_SIZE
from .state import StateTensor, has_data, reach_of

__all__ = ["snapshot", "snapshots"]

_FEW_BYTES: Final = 2**20
"""They are copied before a thread would have started."""
_SERIAL: Final = GRAIN_SIZE - 1
"""Elements that torch copies in the calling thread. It divides more among threads, one of which would have to wait for
the core that the recording is on."""
_PIECES: Final = 512
"""As many such pieces are worth a thread."""


def snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory, of its own and with the same strides."""
    copied, span = _blank(tensor)
    span.copy_(_span(tensor))
    return copied


@contextlib.contextmanager
def snapshots(state: Iterable[StateTensor]) -> Iterator[Callable[[], dict[str, torch.Tensor]]]:
    """Start to copy the tensors of *state* that have data.

    Yields:
        Waits for the copies; returns them by the names of their blobs.
    """
    copies: dict[str, torch.Tensor] = {}
    targets, sources = [], []
    for name, _, tensor in state:
        if tensor.device.type != "cpu":
            if has_data(tensor):  # at once, in the order of its device's stream
                copies[name] = snapshot(tensor)
        elif has_data(tensor):
            copies[name], span = _blank(tensor)
            targets.append(span)
            sources.append(_span(tensor))
    if sum(span.nbytes for span in targets) < _FEW_BYTES:
        if targets:
            torch._foreach_copy_(targets, sources)
        yield lambda: copies
        return
    targets, sources = ([piece for span in spans for piece in span.split(_SERIAL)] for spans in (targets, sources))
    count = max(min(torch.get_num_threads() - 1, len(targets) // _PIECES), 1)  # the recording has a core of its own
    with ThreadPoolExecutor(count) as threads:
        # One call each: a loop in Python would wait for the recording before each tensor.
        filled = [threads.submit(torch._foreach_copy_, targets[i::count], sources[i::count]) for i in range(count)]

        def wait() -> dict[str, torch.Tensor]:
            for part in filled:
                part.result()
            return copies

        yield wait


def _blank(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An uninitialised tensor like *tensor*, and all of its memory as one row."""
    span = torch.empty(reach_of(tensor), dtype=tensor.dtype, device="cpu")
    return span.as_strided(tensor.shape, tensor.stride()), span


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the tensor's first element to its last, gaps included, as one row."""
    return tensor.detach().as_strided((reach_of(tensor),), (1,))
