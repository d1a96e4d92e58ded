"""torch's own ``DataParallel`` on a machine without GPUs: its code runs as it is, on what stands in for GPUs.

Replaced are its four primitives of communication, by the same on the host, and the questions that it asks about
devices. What it does with structures, modules, gradients and errors is torch's.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_PACKAGE = "torch.nn.parallel"


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs: that is what torch's primitives give back."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def broadcast_coalesced(tensors: Any, devices: Any, buffer_size: int = 0) -> list[list[Tensor]]:
    first = [real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return [first, *([tensor.clone() for tensor in first] for _ in devices[1:])]


def reduce_add_coalesced(inputs: Any, destination: Any = None, buffer_size: int = 0) -> list[Tensor]:
    """They are real here: torch takes complex ones for pairs."""
    sums = list(inputs[0])
    for others in inputs[1:]:
        sums = [total + other for total, other in zip(sums, others, strict=True)]
    return sums


def scatter(tensor: Tensor, devices: Any, chunk_sizes: Any = None, dim: int = 0, streams: Any = None) -> Any:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    return tuple(real(chunk.clone()) for chunk in chunks)


def gather(tensors: Any, dim: int = 0, destination: Any = None) -> Tensor:
    return real(torch.cat(tensors, dim))


def all_but_devices(values: Any) -> bool:
    """``all``, except that it finds no tensor on the host."""
    return "device" in values.gi_code.co_names or builtins.all(values)


def wrap(module: nn.Module, device_ids: Any = (0, 1), **options: Any) -> nn.DataParallel[Any]:
    """torch's DataParallel with what stands in for GPUs."""
    made = nn.DataParallel(module, device_ids, **options)
    made.src_device_obj = torch.device("cpu")
    return made


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """While this is active, torch's data parallelism works, without a GPU."""
    communication = SimpleNamespace(
        broadcast_coalesced=broadcast_coalesced,
        reduce_add_coalesced=reduce_add_coalesced,
        scatter=scatter,
        gather=gather,
    )
    accelerator = SimpleNamespace(
        current_stream=lambda device: contextlib.nullcontext(),
        is_available=lambda: True,
        current_accelerator=lambda: SimpleNamespace(type="cpu"),
        device_index=lambda device: contextlib.nullcontext(),
    )
    threads = torch.get_num_threads()

    def set_grad_enabled(mode: bool) -> object:
        torch.set_num_threads(threads)  # MKL would take more in a new thread than in this one
        return torch.set_grad_enabled(mode)

    seen = SimpleNamespace(**{**vars(torch), "accelerator": accelerator, "set_grad_enabled": set_grad_enabled})
    functions, replicas, apply, whole = (
        importlib.import_module(f"{_PACKAGE}.{name}")
        for name in ("_functions", "replicate", "parallel_apply", "data_parallel")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "comm", communication)
        patch.setattr(functions, "all", all_but_devices, raising=False)
        patch.setattr(replicas, "comm", communication)
        patch.setattr(apply, "torch", seen)
        patch.setattr(apply, "_get_device_index", lambda device, optional: device)
        patch.setattr(whole, "_get_available_device_type", lambda: "cpu")
        yield
