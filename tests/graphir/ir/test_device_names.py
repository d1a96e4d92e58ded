"""Devices, blob names, and the geometry of blobs."""

import math

import pytest
import torch

from graphir.errors import GraphirError
from graphir.ir.blob import Blob, contiguous_strides, dense_nbytes
from graphir.ir.device import CPU, Device, gpu
from graphir.ir.dtype import ITEMSIZE, TORCH_NAME
from graphir.ir.names import base_name, fresh, prefix_of, replica_prefix
from graphir.ir.size import dimension


def test_a_device_is_its_text():
    assert gpu(1) == "gpu:1"
    assert (gpu(12).kind, gpu(12).index) == ("gpu", 12)
    assert (CPU, CPU.kind, CPU.index) == ("cpu:0", "cpu", 0)


def test_devices_are_interned():
    assert Device.parse("gpu:3") is gpu(3)
    assert Device.parse("cpu") is CPU


@pytest.mark.parametrize("given", [3, "gpu:3", "cuda:3", torch.device("cuda:3"), torch.device("cuda", 3)])
def test_a_gpu_is_named_as_in_torch_and_accelerate(given):
    assert Device.parse(given) is gpu(3)


@pytest.mark.parametrize("given", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_the_host_is_named_as_in_torch(given):
    assert Device.parse(given) is CPU


def test_the_disk_is_refused_by_name():
    with pytest.raises(GraphirError) as caught:
        Device.parse("disk")
    assert str(caught.value) == (
        "'disk' is not a device: a step keeps all that it uses in memory\n"
        "  fix  write 'cpu', the memory of the host, or name a gpu"
    )


def test_devices_are_sorted_by_number_with_the_host_last():
    wanted = [Device.parse(text) for text in ("gpu:0", "hip:0", "gpu:1", "gpu:10", "cpu:0", "cpu:2")]
    assert sorted(set(wanted), key=Device.order) == wanted


@pytest.mark.parametrize(
    "given",
    [
        *("", "gpu", "gpu:", "gpu:01", "gpu:-1", "gpu:1 ", "GPU:1", "gpu:1000000", "gpu:\u0661", "0", "mps"),
        *("cuda", "cuda:", "cuda:01", "cuda:-1"),
        *(-1, 10**6, True, 0.0, math.nan, None, ["gpu:0"], torch.device("cuda"), torch.device("meta")),
    ],
)
def test_what_is_not_a_device_is_refused(given):
    with pytest.raises(GraphirError) as caught:
        Device.parse(given)
    fix = "write 'gpu:0', 'cuda:0' or 0 for a gpu, or 'cpu' for the host"
    assert str(caught.value) == f"{given!r} is not a device\n  fix  {fix}"


@pytest.mark.parametrize(
    ("name", "prefix", "base"),
    [
        ("gpu_0/conv1", "gpu_0/", "conv1"),
        ("gpu_12/a/b", "gpu_12/", "a/b"),
        ("cpu_0/x", "cpu_0/", "x"),
        ("conv1", "", "conv1"),
        ("gpu_x/conv1", "", "gpu_x/conv1"),
        ("gpu_/conv1", "", "gpu_/conv1"),
        ("a/gpu_0/b", "", "a/gpu_0/b"),
        ("gpu_0", "", "gpu_0"),
        ("layers_0/x", "", "layers_0/x"),
    ],
)
def test_a_prefix_says_whose_copy_a_blob_is(name, prefix, base):
    assert (prefix_of(name), base_name(name)) == (prefix, base)


def test_a_replica_has_a_prefix():
    assert prefix_of(replica_prefix(3) + "x") == "gpu_3/"


def test_a_fresh_name_is_taken_by_nobody():
    assert fresh("a", {"b"}) == "a"
    assert fresh("a", {"a", "a_1"}) == "a_2"


@pytest.mark.parametrize("short", ITEMSIZE)
def test_element_types_are_torchs(short):
    assert getattr(torch, TORCH_NAME[short]).itemsize == ITEMSIZE[short]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4), (2, 0, 4), (0,)])
def test_contiguous_strides_are_torchs(shape):
    assert contiguous_strides(shape) == torch.empty(shape, device="meta").stride()


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.empty(3, 4), 48),
        (torch.empty(3, 4).t(), 48),
        (torch.empty(4, 8)[:, :2], 4 * (3 * 8 + 2)),
        (torch.empty(4).expand(1000, 4), 16),
        (torch.empty(0, 4), 0),
        (torch.empty(()), 4),
    ],
)
def test_bytes_count_gaps_but_not_repeats(tensor, nbytes):
    blob = Blob("x", tuple(tensor.shape), "f32", gpu(0), "activation", "x", tensor.stride())
    assert blob.nbytes({}) == nbytes
    assert dense_nbytes(blob, {}) == tensor.numel() * 4


def test_bytes_follow_the_batch():
    blob = Blob("x", (dimension("batch"), 8), "bf16", gpu(0), "activation", "x")
    assert blob.nbytes({"batch": 3}) == 48
    assert blob._replace(shape=None).nbytes({}) == 0
    assert dense_nbytes(blob._replace(dtype=None), {}) == 0


def test_a_view_has_another_storage():
    blob = Blob("x", (2,), "f32", gpu(0), "activation", "x")
    assert not blob.is_view
    assert blob._replace(storage="y").is_view
