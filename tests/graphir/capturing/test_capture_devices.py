"""Devices that a model names: a recording is on the host, and the program runs where it is placed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from host_only import HOST_ONLY, host_only
from models import Example
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.capturing.intake.snapshots import snapshot, snapshots
from graphir.capturing.intake.state import StateTensor
from graphir.errors import CaptureError
from graphir.ir.program import Program


class Named(nn.Module):
    """A linear layer before a function of the module and its output."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.use = nn.Linear(6, 6), use
        self.register_buffer("scale", torch.arange(6.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.fc(x))


def example(use: Callable[[Any, Tensor], Tensor]) -> Example:
    torch.manual_seed(0)
    return Example(Named(use), (torch.randn(4, 6),), (torch.randn(4, 6),), F.mse_loss)


def captured(given: Example) -> Program:
    return capture(given.model, given.inputs, targets=given.targets, loss=given.loss)


def in_context(device: str, x: Tensor) -> Tensor:
    with torch.device(device):
        return x + torch.ones(6)


NAMED: dict[str, Callable[[str], Callable[[Any, Tensor], Tensor]]] = {
    "to": lambda d: lambda m, x: x.to(d) * 2,
    "to by keyword": lambda d: lambda m, x: x.to(device=d, non_blocking=True) * 2,
    "to device": lambda d: lambda m, x: x.to(torch.device(d)) * 2,
    "to device and type": lambda d: lambda m, x: x.to(d, torch.float64).float() * 2,
    "buffer to": lambda d: lambda m, x: x * m.scale.to(d),
    "zeros": lambda d: lambda m, x: x + torch.zeros(6, device=d),
    "full": lambda d: lambda m, x: x + torch.full((6,), 2.0, device=d),
    "arange": lambda d: lambda m, x: x + torch.arange(6, device=d),
    "tensor": lambda d: lambda m, x: x + torch.tensor([1.0] * 6, device=d),
    "new_zeros": lambda d: lambda m, x: x + x.new_zeros(6, device=d),
    "ones_like": lambda d: lambda m, x: x + torch.ones_like(x, device=d),
    "rand": lambda d: lambda m, x: x + torch.rand(6, device=d),
    "context": lambda d: lambda m, x: in_context(d, x),
}
"""What a model does with the name of a device."""


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("name", NAMED)
def test_a_named_device_means_where_the_program_is_placed(name: str, device: str) -> None:
    program = captured(example(NAMED[name](device)))
    assert not [op for op in program.step.ops if "device" in op.args]
    matches_eager(program, example(NAMED[name]("cpu")), steps=1)


def test_the_meta_device_is_no_other() -> None:
    matches_eager(captured(example(NAMED["zeros"]("meta"))), example(NAMED["zeros"]("cpu")), steps=1)


def test_cuda_and_pinned_memory_leave_a_tensor_where_it_is() -> None:
    program = captured(example(lambda m, x: x.cuda() + torch.zeros(6, pin_memory=True).pin_memory().cuda(0)))
    matches_eager(program, example(lambda m, x: x + torch.zeros(6)), steps=1)


def test_a_module_that_is_moved_or_converted_to_what_it_is_stays() -> None:
    program = captured(example(lambda m, x: m.fc.to(x.dtype).cuda().to("cuda", torch.float32)(x) + m.float().scale))
    matches_eager(program, example(lambda m, x: m.fc(x) + m.scale), steps=1)


def test_a_module_that_is_converted_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the step converts 'weight' of a Linear") as caught:
        captured(example(lambda m, x: m.fc.double()(x.double()).float()))
    assert "test_capture_devices.py:" in caught.value.where and "before the capture" in caught.value.fix
    assert torch.nn.Linear(2, 2).double().weight.dtype == torch.float64


def test_devices_of_tensors_need_no_care() -> None:
    def use(m: Any, x: Tensor) -> Tensor:
        return x + torch.arange(6, device=x.device) + torch.zeros(6, device=m.fc.weight.device).to(m.scale)

    given = example(use)
    matches_eager(captured(given), given, batches=(7,), steps=1)


def test_a_branch_on_the_device_is_taken_as_on_the_host() -> None:
    program = captured(example(lambda m, x: x * 2 if x.is_cuda or x.device.type == "cuda" else x * 3))
    matches_eager(program, example(lambda m, x: x * 3), steps=1)


def test_tensors_keep_their_methods() -> None:
    with pytest.raises(CaptureError):
        captured(example(lambda m, x: x.to("cuda").nonzero()))
    assert (
        "to" not in vars(torch.Tensor) and "cuda" not in vars(torch.Tensor) and "pin_memory" not in vars(torch.Tensor)
    )


def test_a_model_on_meta_has_no_state() -> None:
    given = example(lambda m, x: x)
    program = capture(given.model.to("meta"), given.inputs, targets=given.targets, loss=given.loss)
    assert program.state == {} and "fc.weight" in program.step.external_inputs


@pytest.mark.cuda
def test_a_model_on_a_gpu_has_its_state_in_the_hosts_memory() -> None:
    given = example(lambda m, x: x * 2)
    program = capture(given.model.cuda(), given.inputs, targets=given.targets, loss=given.loss)
    assert {tensor.device.type for tensor in program.state.values()} == {"cpu"}
    matches_eager(program, example(lambda m, x: x * 2))


def test_a_snapshot_keeps_strides_and_takes_memory_of_its_own() -> None:
    for tensor in (torch.arange(24.0).view(4, 6).t(), torch.arange(24.0).view(4, 6)[:, 1:3], torch.zeros(0, 3)):
        copied = snapshot(tensor)
        assert torch.equal(copied, tensor) and copied.stride() == tensor.stride() and copied.storage_offset() == 0
        assert not copied.numel() or copied.data_ptr() != tensor.data_ptr()


def test_state_is_copied_by_the_names_of_its_blobs() -> None:
    tensors = {
        "row": torch.arange(9),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "bare": torch.empty(2, device="meta"),
    }
    copies = snapshots(StateTensor(name, "buffer", tensor) for name, tensor in tensors.items())
    assert list(copies) == ["row", "turned"]
    assert all(torch.equal(copy, tensors[name]) for name, copy in copies.items())


@pytest.mark.parametrize("make", [models.resnet, models.gpt, models.mlp])
def test_no_operator_runs_on_the_cpu_alone(make: Callable[[], Example]) -> None:
    assert not HOST_ONLY & {op.type for op in captured(make()).step.ops}


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a build of torch for CUDA")
def test_the_list_of_the_cpus_own_operators_is_complete() -> None:
    assert host_only() <= HOST_ONLY
