"""Machines by name, from what their makers publish.

All figures are peaks of dense arithmetic, without sparsity; bytes are per second and direction.

- ``h200x8``: HGX H200, eight SXM GPUs with 141 GB of HBM3e each at 4.8 TB/s. FP64 34, FP32 67, FP16 and BF16 989, FP8
  1,979 TFLOP/s (NVIDIA H200 Tensor Core GPU Datasheet, halved where it counts sparsity). NVLink of the fourth
  generation through NVSwitch, 900 GB/s a GPU in both directions: 450 in each, to any other. PCIe 5.0 with 16 lanes to
  the host, 64 GB/s.
- ``a100x8``: HGX A100, eight SXM GPUs with 80 GB of HBM2e each at 2,039 GB/s. FP64 9.7, FP32 19.5, FP16 and BF16 312
  TFLOP/s (NVIDIA A100 Tensor Core GPU Datasheet). NVLink of the third generation, 600 GB/s in both directions: 300 in
  each. PCIe 4.0 with 16 lanes, 32 GB/s.
- ``cpu``: eight logical devices, each on a core of a server of eight cores. A core with AVX2 or AVX-512 units of 256
  bits does 32 operations of FP32 a cycle, at 3.1 GHz some 100 GFLOP/s (AMD, Software Optimization Guide for the Zen4
  Microarchitecture), and 20 GB/s of its memory.

PyTorch multiplies FP32 matrices without TF32 unless it is told to, so the figure of FP32 is that of the plain units. A
kernel on a GPU takes 2 µs however small it is, and a copy between GPUs 10 µs; to or from the host the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import permutations
from typing import Final

from .topology import Host, Link, Speed, Topology

__all__ = ["MACHINES"]

_GPUS: Final = tuple([f"gpu:{index}" for index in range(8)])
_HOST: Final = "cpu:0"
_LAUNCH: Final = 2e-6
_COPY: Final = 10e-6
_SOURCE: Final = "by its makers' figures"

_SERVER: Final = Speed(
    flops_per_second={"f32": 2e12, "f64": 1e12}, bytes_per_second=300e9, memory=1 << 40, seconds_per_call=2e-6
)
"""The host of eight GPUs: two processors of 48 to 64 cores. Nothing but a few scalars is computed there."""


def _server_of_gpus(name: str, gpu: Speed, peer: float, host: float) -> Topology:
    """Eight GPUs that reach each other at *peer* bytes a second, and the host at *host*."""
    links = [Link(source=a, destination=b, bytes_per_second=peer, latency=_COPY) for a, b in permutations(_GPUS, 2)]
    for device in _GPUS:
        links.append(Link(source=device, destination=_HOST, bytes_per_second=host, latency=_COPY))
        links.append(Link(source=_HOST, destination=device, bytes_per_second=host, latency=_COPY))
    devices = {**dict.fromkeys(_GPUS, gpu), _HOST: _SERVER}
    return Topology(name=name, devices=devices, links=tuple(links), source=_SOURCE)


@cache
def _h200x8() -> Topology:
    flops = {"f64": 34e12, "f32": 67e12, "f16": 989e12, "bf16": 989e12, "f8e4m3": 1979e12, "f8e5m2": 1979e12}
    gpu = Speed(flops_per_second=flops, bytes_per_second=4.8e12, memory=141_000_000_000, seconds_per_call=_LAUNCH)
    return _server_of_gpus("h200x8", gpu, 450e9, 64e9)


@cache
def _a100x8() -> Topology:
    flops = {"f64": 9.7e12, "f32": 19.5e12, "f16": 312e12, "bf16": 312e12}
    gpu = Speed(flops_per_second=flops, bytes_per_second=2.039e12, memory=80_000_000_000, seconds_per_call=_LAUNCH)
    return _server_of_gpus("a100x8", gpu, 300e9, 32e9)


@cache
def _cpu() -> Topology:
    core = Speed(
        flops_per_second={"f32": 100e9, "f64": 50e9, "bf16": 200e9},
        bytes_per_second=20e9,
        memory=16_000_000_000,
        seconds_per_call=2e-6,
        seconds_per_view=1e-6,
    )
    devices = (*_GPUS, _HOST)
    links = [Link(source=a, destination=b, bytes_per_second=10e9, latency=2e-6) for a, b in permutations(devices, 2)]
    return Topology(
        name="cpu", devices=dict.fromkeys(devices, core), links=tuple(links), host=Host(cores=8), source=_SOURCE
    )


MACHINES: Final[Mapping[str, Callable[[], Topology]]] = {"h200x8": _h200x8, "a100x8": _a100x8, "cpu": _cpu}
"""What makes each of them."""
