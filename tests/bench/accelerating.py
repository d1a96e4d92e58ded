"""How long a step takes on a GPU: eager, compiled, captured as a CUDA graph, and ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import models
import torch
from stepping import DispatchBound
from timing import alternate

import graphir
from graphir import passes, runtime

__all__ = ["rows"]

_PAIRS, _INNER = 20, 10


def _mlp() -> models.Example:
    return models.Example(DispatchBound(), (torch.randn(8, 64),), (torch.randn(8, 64),), torch.nn.functional.mse_loss)


CASES = (
    ("dispatch-bound MLP, batch 8", _mlp),
    ("residual net, batch 32", lambda: models.resnet(batch=32, blocks=4, channels=32, image=16, classes=10)),
)


def rows() -> Iterator[str]:
    """A whole training step, zero_grad to optimizer.step, each beside eager in alternation."""
    if not torch.cuda.is_available():
        yield "not run: no CUDA device"
        return
    yield f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}."
    yield ""
    yield "| model | step | eager, ms | ms | of eager | quartiles |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, make in CASES:
        example = make()
        program = graphir.capture(
            example.model,
            inputs=example.inputs,
            targets=example.targets,
            loss=example.loss,
            optimizer=_sgd(example.model),
        )
        plan = passes.emit(passes.share_storage(program))
        batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
        eager = _eager(example, batch)
        with (
            runtime.Session(plan, program.state, binding="cuda") as streams,
            runtime.Session(plan, program.state, binding="cuda", cuda_graph=True) as graphs,
        ):
            steps = {
                "torch.compile": _eager(example, batch, compiled=True),
                "CUDA graph of eager": _graphed(example, batch),
                "graphir": lambda streams=streams, batch=batch: streams.step(*batch),
                "graphir, cuda_graph": lambda graphs=graphs, batch=batch: graphs.step(*batch),
            }
            for label, step in steps.items():
                r = alternate(_finished(step), _finished(eager), pairs=_PAIRS)
                yield (
                    f"| {name} | {label} | {r.theirs / _INNER * 1e3:.3f} | {r.ours / _INNER * 1e3:.3f} "
                    f"| {r.ratio:.2f} | {r.low:.2f} to {r.high:.2f} |"
                )


def _finished(step: Callable[[], object]) -> Callable[[], None]:
    """Some steps, and then the wait for the device."""

    def run() -> None:
        for _ in range(_INNER):
            step()
        torch.cuda.synchronize()

    return run


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)


def _eager(example: models.Example, batch: list[torch.Tensor], compiled: bool = False) -> Callable[[], torch.Tensor]:
    model = copy.deepcopy(example.model).cuda()
    optimizer, count = _sgd(model), len(example.inputs)
    forward = torch.compile(model) if compiled else model

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = example.loss(forward(*batch[:count]), *batch[count:])
        loss.backward()
        optimizer.step()
        return loss

    return step


def _graphed(example: models.Example, batch: list[torch.Tensor]) -> Callable[[], None]:
    """A whole eager step in one graph, its batch in place already; its learning rate cannot change."""
    step, side = _eager(example, batch), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
