"""On a GPU: how long a step takes eager, compiled, captured as a CUDA graph, and ours; and whether bits stay."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import models
import torch
from exactness import different, everything
from runnable import captured
from stepping import dispatch_bound, momentum_sgd
from timing import alternate

import graphir
from graphir import passes, runtime
from graphir.ir.program import Program

__all__ = ["rows"]

_PAIRS, _INNER, _STEPS = 20, 10, 20

Step = Callable[[], object]

_SGD = partial(momentum_sgd, fused=True)


CASES: tuple[tuple[str, Callable[[], models.Example]], ...] = (
    ("dispatch-bound MLP, batch 8", dispatch_bound),
    ("residual net, batch 32", lambda: models.resnet(batch=32, blocks=4, channels=32, image=16, classes=10)),
    ("GPT, batch 8", lambda: models.gpt(batch=8, length=128, width=256, heads=8, layers=6, vocabulary=1024)),
    ("ResNet-50, batch 8", lambda: models.resnet50(batch=8)),
)
EXACT: tuple[tuple[str, Callable[[int], models.Example]], ...] = (
    ("MLP", models.mlp),
    ("residual net", lambda batch: models.resnet(batch, blocks=4, channels=16, image=16, dropout=0.2)),
    ("GPT", lambda batch: models.gpt(batch, length=128, width=128, heads=4, layers=4, dropout=0.1)),
)


def rows() -> Iterator[str]:
    """Bits after 20 steps, then whole training steps, zero_grad to optimizer.step, each beside eager in alternation."""
    if not torch.cuda.is_available():
        yield "not run: no CUDA device"
        return
    yield f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}."
    yield ""
    yield from _exact_rows()
    yield ""
    yield "| model | step | eager, ms | ms | of eager | quartiles |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, make in CASES:
        yield from _timed_rows(name, make())


def _exact_rows() -> Iterator[str]:
    """Tensors that differ in any bit from the unshifted plan's: two replicas, all devices on one GPU."""
    yield "| model | optimizer | tensors | shifted | shifted, again | shifted, as graphs |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for name, make in EXACT:
        for label, optimizer in (("SGD momentum", _SGD), ("AdamW, fused", _adamw)):
            example, whole = make(4), make(8)
            batch = [tensor.cuda() for tensor in (*whole.inputs, *whole.targets)]
            program = _captured(example, optimizer)
            plain = passes.replicate(program, [0, 1])
            chosen = passes.find_activations(plain)
            moved = passes.shift_activations(plain, chosen[len(chosen) // 2 :], {0: 2, 1: 3})
            shifted = passes.emit(passes.share_storage(passes.inject_copies(moved)))
            unshifted = _trained(passes.emit(plain), program, batch, False)
            counts = [_differing(unshifted, shifted, program, batch, graphs) for graphs in (False, False, True)]
            yield f"| {name} | {label} | {len(unshifted)} | {' | '.join(counts)} |"


def _differing(
    unshifted: list[torch.Tensor], plan: graphir.Plan, program: Program, batch: list[torch.Tensor], graphs: bool
) -> str:
    """How many tensors of another plan differ."""
    try:
        return str(different(unshifted, _trained(plan, program, batch, graphs)))
    except Exception as e:
        return _failed(e)


def _failed(error: Exception) -> str:
    """What a step that fails gives in place of figures, so that the others keep theirs."""
    return f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _trained(plan: graphir.Plan, program: Program, batch: list[torch.Tensor], graphs: bool) -> list[torch.Tensor]:
    """The losses, and what both replicas hold in the end."""
    binding = {str(device): "cuda:0" for device in plan.devices if not device.is_host}
    with runtime.Session(plan, program.state, binding=binding, cuda_graph=graphs) as session:
        found = [session.step(*batch) for _ in range(_STEPS)]
        for replica in (0, 1):
            found += everything(session.state_dict(replica), session.optimizer_state_dict(replica))
    return found


def _timed_rows(name: str, example: models.Example) -> Iterator[str]:
    program = _captured(example, _SGD)
    plan = passes.emit(passes.share_storage(program))
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    eager = _eager(example, batch)
    with ExitStack() as sessions:

        def ours(graphs: bool) -> Step:
            session = sessions.enter_context(runtime.Session(plan, program.state, binding="cuda", cuda_graph=graphs))
            return lambda: session.step(*batch)

        makers: dict[str, Callable[[], Step]] = {
            "eager (control)": lambda: _eager(example, batch),
            "graphir": lambda: ours(False),
            "graphir, cuda_graph": lambda: ours(True),
            "CUDA graph of eager": lambda: _graphed(example, batch),
            "torch.compile": lambda: _eager(example, batch, compiled=True),
        }
        for label, make in makers.items():
            try:
                r = alternate(_finished(make()), _finished(eager), pairs=_PAIRS)
            except Exception as e:
                yield f"| {name} | {label} | {_failed(e)} | | | |"
                continue
            yield (
                f"| {name} | {label} | {r.theirs / _INNER * 1e3:.3f} | {r.ours / _INNER * 1e3:.3f} "
                f"| {r.ratio:.2f} | {r.low:.2f} to {r.high:.2f} |"
            )


def _finished(step: Step) -> Callable[[], None]:
    """Some steps, and then the wait for the device."""

    def run() -> None:
        for _ in range(_INNER):
            step()
        torch.cuda.synchronize()

    return run


def _captured(example: models.Example, optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> Program:
    return captured(example, optimizer(example.model))


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def _eager(example: models.Example, batch: list[torch.Tensor], compiled: bool = False) -> Callable[[], torch.Tensor]:
    model = copy.deepcopy(example.model).cuda()
    optimizer, count = _SGD(model), len(example.inputs)
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
