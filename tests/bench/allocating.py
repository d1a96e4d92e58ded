"""How the predicted peak of a step's memory compares with what the profiler sees allocated on the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import models
import torch
import torch.nn.functional as F
from allocations import measured_peak, predicted_peak
from limits import limited
from zoo_rows import library
from zoo_written import UNet, dice

import graphir
from graphir import passes, runtime

__all__ = ["rows"]

BATCHES = (2, 8)
ALLOWED = 0.5


def _resnet18(batch: int) -> models.Example:
    return models.Example(
        library("torchvision").models.resnet18(),
        (torch.randn(batch, 3, 64, 64),),
        (torch.randint(1000, (batch,)),),
        F.cross_entropy,
    )


def _resnet50(batch: int) -> models.Example:
    return models.resnet50(batch=batch, image=96)


def _unet(batch: int) -> models.Example:
    return models.Example(UNet(16), (torch.randn(batch, 3, 64, 64),), (torch.randint(2, (batch, 64, 64)),), dice)


def _gpt(batch: int) -> models.Example:
    return models.gpt(batch=batch, length=128, width=256, heads=8, layers=4, vocabulary=1024)


def _cases() -> Iterator[tuple[str, Callable[[int], models.Example]]]:
    if importlib.util.find_spec("torchvision"):
        yield "ResNet-18, torchvision", _resnet18
    yield "ResNet-50", _resnet50
    yield "U-Net", _unet
    yield "GPT, 4 layers", _gpt


def rows() -> Iterator[str]:
    """The table of the most bytes that a step allocates, state and inputs apart.

    With two devices, each with a replica, one thread executes all lanes in the plan's order: the events of PyTorch's
    profiler are those of the thread that starts it.
    """
    yield "| model | batch | devices | measured | predicted | off by, % | without scratch, % | at most, % |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, make in _cases():
        for batch in BATCHES:
            torch.manual_seed(0)
            example = make(batch)
            optimizer = torch.optim.SGD(example.model.parameters(), lr=0.01, momentum=0.9)
            captured = graphir.capture(
                example.model, inputs=example.inputs, targets=example.targets, loss=example.loss, optimizer=optimizer
            )
            for devices in ([0], [0, 1]):
                program = passes.replicate(captured, devices=devices)
                plan = passes.emit(passes.share_storage(program))
                executor = "threads" if len(devices) == 1 else "reference"
                whole = [tensor.repeat(len(devices), *[1] * (tensor.dim() - 1)) for tensor in _batch(example)]
                with runtime.Session(plan, program.state, binding="cpu", executor=executor) as session:
                    session.step(*whole)
                    measured = measured_peak(lambda session=session, whole=whole: session.step(*whole))
                predicted, bare = predicted_peak(plan), predicted_peak(plan, scratch=False)
                off = limited(_off(predicted, measured), at_least=-ALLOWED, at_most=ALLOWED)
                yield (
                    f"| {name} | {batch} | {len(devices)} | {measured:,} | {predicted:,} | {off} "
                    f"| {_off(bare, measured)} | {ALLOWED} |"
                )


def _batch(example: models.Example) -> list[torch.Tensor]:
    return [*example.inputs, *example.targets]


def _off(predicted: int, measured: int) -> str:
    return f"{100 * (predicted / measured - 1):+.3f}"
