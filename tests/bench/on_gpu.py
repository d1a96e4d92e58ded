"""Sections of ``bench gpu``, each in a process of its own: ``python on_gpu.py SECTION SECONDS`` prints JSON lists.

The first list has the columns. What fails says so in its row, and the others keep theirs.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import models
import torch
import torch.nn.functional as F
from exactness import different, everything
from runnable import captured
from stepping import dispatch_bound
from torch import Tensor, nn
from zoo_rows import library

import graphir
from graphir import passes, runtime

Rows = Iterator[Sequence[object]]
Step = Callable[[], object]

_ROOT: Final = Path(__file__).resolve().parents[2]
_BLOCKS, _BLOCK_SECONDS = 5, 0.1
"""How often some steps are timed, and how long they take together at least."""

_MS: Final = 1e3


# Tests


def tests(seconds: float) -> Rows:
    """The tests marked ``cuda``, and how far all others come: both by pytest, if there is one."""
    yield "what", "outcome"
    until = time.monotonic() + seconds - 3  # for the ends of what runs then
    first = ["-n", "8", "-m", "cuda", "tests/runtime", "tests/graphir/capture"]
    yield "`pytest -m cuda`", _pytest(first, 0.65 * seconds)
    yield "`pytest -n auto`, all others", _pytest(["-n", "auto"], until - time.monotonic())


def _pytest(arguments: Sequence[str], seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)  # its workers too, which would slow down what is timed next
        said, _ = process.communicate()
        signal.signal(signal.SIGTERM, before)
        dots = "".join(re.findall(r"^([.sFExX]+)(?: +\[|$)", said, re.M))
        counts = {kind: dots.count(mark) for kind, mark in (("passed", "."), ("failed", "F"), ("errors", "E"))}
        return f"in {seconds:.0f} s: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return said.strip().splitlines()[-1] if said.strip() else f"status {process.returncode}"


# The machine


def machine(_: float) -> Rows:
    """What ``Topology.here()`` measures."""
    yield "device or link", "figures"
    start = time.perf_counter()
    here = graphir.Topology.here()
    taken = time.perf_counter() - start
    for name, speed in here.devices.items():
        rates = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in speed.flops_per_second.items())
        calls = f"{speed.seconds_per_call * 1e6:.2f} µs a call"
        yield name, f"{rates}; {speed.bytes_per_second / 1e9:.4g} GB/s; {calls}; {(speed.memory or 0) / 2**30:.1f} GiB"
    for link in here.links:
        yield (
            f"{link.source} to {link.destination}",
            f"{link.bytes_per_second / 1e9:.3g} GB/s, {link.latency * 1e6:.1f} µs",
        )
    yield "measured in", f"{taken:.1f} s"


# Steps


class Case(NamedTuple):
    """A model on the host, its batch, and its loss."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor]


def _next(logits: Any, target: Tensor) -> Tensor:
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _text(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _mlp() -> Case:
    return Case(*dispatch_bound())


def _resnet50() -> Case:
    return Case(*models.resnet50(batch=32))


def _gpt2() -> Case:
    t = library("transformers")
    x, y = _text(50257, 8, 512)
    torch.manual_seed(0)
    return Case(t.GPT2LMHeadModel(t.GPT2Config(use_cache=False, attn_pdrop=0.0)), (x,), (y,), _next)


def _bert() -> Case:
    t = library("transformers")
    x, y = _text(30522, 16, 256)
    torch.manual_seed(0)
    return Case(t.BertForMaskedLM(t.BertConfig()), (x,), (y,), _next)


def _llama() -> Case:
    t = library("transformers")
    x, y = _text(32000, 4, 512)
    torch.manual_seed(0)
    config = t.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, use_cache=False
    )
    return Case(t.LlamaForCausalLM(config), (x,), (y,), _next)


CASES: Final[dict[str, Callable[[], Case]]] = {
    "ResNet-50, batch 32": _resnet50,
    "GPT-2, 8 of 512": _gpt2,
    "MLP of 8 narrow layers, batch 8": _mlp,
    "BERT with dropout, 16 of 256": _bert,
    "LLaMA-like, 4 of 512": _llama,
}


class Way(NamedTuple):
    """How a step is made: in which arithmetic, with which form of AdamW."""

    bf16: bool
    fused: bool

    def __str__(self) -> str:
        return f"{'bf16 autocast' if self.bf16 else 'f32'}, {'fused' if self.fused else 'default'}"

    def optimizer(self, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.fused or None, capturable=capturable)

    def around(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.bf16 else nullcontext()


WAYS: Final = (Way(False, True), Way(True, True), Way(False, False), Way(True, False))


class _Autocast(nn.Module):
    """A model whose forward is under autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.model(*inputs)


def _under(case: Case, way: Way) -> Case:
    return case._replace(model=_Autocast(case.model)) if way.bf16 else case


def _eager(
    case: Case,
    way: Way,
    *,
    compiled: str = "",
    capturable: bool = False,
    prepare: Callable[[nn.Module], object] = id,
) -> Step:
    model = copy.deepcopy(case.model).cuda()
    prepare(model)
    optimizer = way.optimizer(model, capturable)
    inputs, targets = ([tensor.cuda() for tensor in given] for given in (case.inputs, case.targets))
    forward = torch.compile(model, mode=compiled) if compiled else model
    update = torch.compile(optimizer.step, mode=compiled) if compiled else optimizer.step

    def step() -> Tensor:
        optimizer.zero_grad()
        with way.around():
            loss = case.loss(forward(*inputs), *targets)
        loss.backward()
        update()
        return loss

    return step


def _graphed(case: Case, way: Way) -> Step:
    """A whole eager step in one graph, its batch in place; its learning rate cannot change."""
    step, side = _eager(case, way, capturable=True), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class Taken(NamedTuple):
    """Medians of seconds a step: until it returned, and until the device was done."""

    issued: float
    done: float

    def __str__(self) -> str:
        return f"{self.done * _MS:.3f} | {self.issued * _MS:.3f}"


def _taken(step: Step) -> Taken:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    count = max(int(_BLOCK_SECONDS / (time.perf_counter() - start)), 1)
    issued, done = [], []
    for _ in range(_BLOCKS):
        start = time.perf_counter()
        for _ in range(count):
            step()
        issued.append((time.perf_counter() - start) / count)
        torch.cuda.synchronize()
        done.append((time.perf_counter() - start) / count)
    return Taken(statistics.median(issued), statistics.median(done))


def _kernels(step: Step) -> float:
    """Seconds of a step's kernels and copies, added up."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in found.key_averages()) / 1e6


def _failed(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:160]


def steps(_: float) -> Rows:
    """Ours beside eager, and a CUDA graph of eager."""
    yield "model", "arithmetic, AdamW", "step", "ms", "ms to issue", "ms of kernels", "of eager"
    for way in WAYS:
        for name, make in CASES.items():
            yield from _compared(name, make(), way)


def _compared(name: str, case: Case, way: Way) -> Rows:
    with ExitStack() as sessions:

        @functools.cache
        def program() -> graphir.Program:
            taken = _under(case, way)
            return captured(models.Example(*taken), way.optimizer(taken.model))

        def ours(graphs: bool) -> Step:
            plan = passes.emit(passes.share_storage(program()))
            session = runtime.Session(plan, program().state, binding="cuda", cuda_graph=graphs)
            sessions.enter_context(session)
            batch = [tensor.cuda() for tensor in (*case.inputs, *case.targets)]
            return lambda: session.step(*batch)

        makers: dict[str, Callable[[], Step]] = {
            "eager": lambda: _eager(case, way),
            "ours, by streams": lambda: ours(False),
            "ours, as graphs": lambda: ours(True),
            "CUDA graph of eager": lambda: _graphed(case, way),
            "eager again": lambda: _eager(case, way),
        }
        eager = 0.0
        for label, make in makers.items():
            try:
                step = make()
                taken = _taken(step)
                eager = eager or taken.done
                yield (
                    name,
                    way,
                    label,
                    f"{taken.done * _MS:.3f}",
                    f"{taken.issued * _MS:.3f}",
                    f"{_kernels(step) * _MS:.3f}",
                    f"{taken.done / eager:.2f}",
                )
            except Exception as e:
                yield name, way, label, _failed(e)
            _emptied()


def _emptied() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def compiled(_: float) -> Rows:
    """Forward and backward compiled, and the update, by ``reduce-overhead``."""
    yield "model", "arithmetic, AdamW", "step", "ms", "ms to issue", "of eager"
    for way in WAYS[:2]:
        for name, make in CASES.items():
            case = make()
            try:
                eager = _taken(_eager(case, way))
                step = _eager(case, way, compiled="reduce-overhead")
                taken = _taken(step)
                ratio = f"{taken.done / eager.done:.2f}"
                label = "`torch.compile`, reduce-overhead"
                yield name, way, label, f"{taken.done * _MS:.3f}", f"{taken.issued * _MS:.3f}", ratio
            except Exception as e:
                yield name, way, "`torch.compile`, reduce-overhead", _failed(e)
            torch._dynamo.reset()
            _emptied()


# Memory


SHARES: Final = (0.9, 0.7, 0.5)


class Held(NamedTuple):
    """Seconds of a step, and bytes at its peak, as they were asked for."""

    seconds: float
    nbytes: int


def _held(make: Callable[[], Step]) -> Held:
    """Measure a step that is made here, and is gone afterwards."""
    _emptied()
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # none before the first allocation
    step = make()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    seconds = _taken(step).done
    return Held(seconds, torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)


def memory(_: float) -> Rows:
    """GPT-2 and ResNet-50 in f32, whole steps of AdamW: what keeps within shares of eager's need, at the least cost."""
    yield "model", "most, of eager's peak", "way", "GiB", "of eager's peak", "ms", "of eager's ms", "bits"
    way = Way(False, True)
    cases = {"GPT-2, 8 of 512": (_gpt2, _gpt2_blocks), "ResNet-50, batch 32": (_resnet50, _resnet_blocks)}
    for name, (make, blocks) in cases.items():
        case = make()
        eager = _held(lambda case=case: _eager(case, way))
        yield name, "", "eager", *_shown(eager, eager), ""
        for share in SHARES:
            most = share * eager.nbytes
            for label, rows in (("ours", _ours), ("checkpoint", _checkpointed), ("save_on_cpu", _saved_on_cpu)):
                try:
                    found, bits = rows(case, way, most, blocks)
                    yield name, share, label, *_shown(found, eager), bits
                except Exception as e:
                    yield name, share, label, _failed(e)


def _shown(found: Held, eager: Held) -> Sequence[str]:
    share, ratio = found.nbytes / eager.nbytes, found.seconds / eager.seconds
    return f"{found.nbytes / 2**30:.2f}", f"{share:.2f}", f"{found.seconds * _MS:.1f}", f"{ratio:.2f}"


def _ours(case: Case, way: Way, most: float, _: object) -> tuple[Held, str]:
    """What ``balance`` chooses, with bits beside the step that keeps all."""
    program = captured(models.Example(*case), way.optimizer(case.model))
    found = passes.balance(program, {"gpu:0": int(most)}, options=("park", "recompute"))
    placed = passes.emit(passes.share_storage(passes.inject_copies(found.program)))
    batch = [tensor.cuda() for tensor in (*case.inputs, *case.targets)]

    def trained(plan: graphir.Plan) -> list[Tensor]:
        with runtime.Session(plan, program.state, binding=_bound(plan)) as session:
            losses = [session.step(*batch) for _ in range(3)]
            return [*losses, *(t.cpu() for t in session.state_dict().values())]

    unlike = different(trained(passes.emit(program)), trained(placed))
    with ExitStack() as sessions:

        def make() -> Step:
            session = sessions.enter_context(runtime.Session(placed, program.state, binding=_bound(placed)))
            return lambda: session.step(*batch)

        return _held(make), f"{unlike} tensors differ" if unlike else "equal"


def _bound(plan: graphir.Plan) -> dict[str, str]:
    return {str(device): "cuda:0" for device in plan.devices if not device.is_host}


def _gpt2_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.transformer.h)  # type: ignore[union-attr]


def _resnet_blocks(model: nn.Module) -> list[nn.Module]:
    return [block for n in range(1, 5) for block in getattr(model, f"layer{n}")]


Blocks = Callable[[nn.Module], list[nn.Module]]


def _fewest(case: Case, way: Way, most: float, blocks: Blocks, change: Callable[[nn.Module], None]) -> tuple[Held, str]:
    """The fewest blocks that have to be changed to keep within *most*."""

    def held(count: int) -> Held:
        def prepare(model: nn.Module) -> None:
            for block in blocks(model)[:count]:
                change(block)

        return _held(lambda: _eager(case, way, prepare=prepare))

    low, high, found = 1, len(blocks(case.model)), None
    while low <= high:
        middle = (low + high) // 2
        at = held(middle)
        if at.nbytes <= most:
            found, high = at, middle - 1
        else:
            low = middle + 1
    if found is None:
        raise torch.OutOfMemoryError("not with all blocks")
    return found, ""


def _checkpointed(case: Case, way: Way, most: float, blocks: Blocks) -> tuple[Held, str]:
    from torch.utils.checkpoint import checkpoint

    def change(block: nn.Module) -> None:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]

    return _fewest(case, way, most, blocks, change)


def _saved_on_cpu(case: Case, way: Way, most: float, blocks: Blocks) -> tuple[Held, str]:
    def change(block: nn.Module) -> None:
        forward = block.forward

        def saving(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return forward(*args, **kwargs)

        block.forward = saving  # type: ignore[method-assign]

    return _fewest(case, way, most, blocks, change)


# Logical devices


def logical(_: float) -> Rows:
    """Two replicas, whole and with half of their activations on devices of their own, all on one GPU."""
    yield (
        "model",
        "logical devices",
        "tensors that differ from unshifted",
        "ms",
        "ms to issue",
        "ms of kernels",
        "predicted, MiB",
        "asked for, MiB",
        "allocated, MiB",
        "reserved, MiB",
    )
    way = Way(False, True)
    made = {
        "residual net": lambda b: models.resnet(b, blocks=4, channels=32, image=16, dropout=0.2),
        "GPT": lambda b: models.gpt(b, length=128, width=256, heads=8, layers=4, dropout=0.1),
    }
    for name, make in made.items():
        share, whole = make(8), make(16)
        program = captured(share, way.optimizer(share.model))
        plain = passes.replicate(program, [0, 1])
        acts = passes.find_activations(plain)
        moved = passes.inject_copies(passes.shift_activations(plain, acts[len(acts) // 2 :], {0: 2, 1: 3}))
        batch = [tensor.cuda() for tensor in (*whole.inputs, *whole.targets)]
        first: list[Tensor] = []
        for count, placed in ((2, plain), (4, moved)):
            _emptied()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()
            plan = passes.emit(passes.share_storage(placed))
            with runtime.Session(plan, program.state, binding=_bound(plan)) as session:
                found = [session.step(*batch).clone() for _ in range(10)]
                for replica in (0, 1):
                    found += everything(session.state_dict(replica), session.optimizer_state_dict(replica))
                first = first or found
                unlike = different(first, found)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                taken = _taken(partial(session.step, *batch))
                after = torch.cuda.memory_stats()
                peaks = [
                    after[f"{kind}_bytes.all.peak"] - before[f"{kind}_bytes.all.current"]
                    for kind in ("requested", "allocated", "reserved")
                ]
                kernels = _kernels(partial(session.step, *batch))
            held = sum(n for d, n in graphir.memory(plan, threads=1, profile=None).peak.items() if d != "cpu:0")
            yield (
                name,
                count,
                unlike,
                f"{taken.done * _MS:.3f}",
                f"{taken.issued * _MS:.3f}",
                f"{kernels * _MS:.3f}",
                *[f"{nbytes / 2**20:.1f}" for nbytes in (held, *peaks)],
            )


# Several GPUs


def several(_: float) -> Rows:
    """Peer copies, and replicas on each GPU."""
    yield "what", "figure"
    count = torch.cuda.device_count()
    if count < 2:
        yield "not run", f"{count} GPU"
        return
    for a in range(count):
        for b in range(count):
            if a != b:
                yield f"copy from {a} to {b}, 256 MiB", f"{_peer(a, b) / 1e9:.1f} GB/s"
    example = models.gpt(8, length=128, width=512, heads=8, layers=8)
    program = captured(example, Way(False, True).optimizer(example.model))
    for replicas in sorted({1, 2, count}):
        plan = passes.emit(passes.replicate(program, range(replicas)))
        batch = [torch.cat([tensor] * replicas).cuda() for tensor in (*example.inputs, *example.targets)]
        with runtime.Session(plan, program.state, binding="cuda") as session:
            taken = _taken(lambda session=session, batch=batch: session.step(*batch))
        yield f"GPT, {replicas} replicas, {8 * replicas} rows", f"{taken.done * _MS:.2f} ms"


def _peer(a: int, b: int) -> float:
    x = torch.empty(1 << 28, dtype=torch.uint8, device=f"cuda:{a}")
    y = torch.empty_like(x, device=f"cuda:{b}")
    y.copy_(x)
    torch.cuda.synchronize(b)
    start = time.perf_counter()
    for _ in range(5):
        y.copy_(x)
    torch.cuda.synchronize(a)
    torch.cuda.synchronize(b)
    return 5 * x.nbytes / (time.perf_counter() - start)


if __name__ == "__main__":
    measure = {f.__name__: f for f in (tests, machine, steps, memory, logical, several, compiled)}[sys.argv[1]]
    for row in measure(float(sys.argv[2])):
        print(json.dumps([str(cell) for cell in row]), flush=True)
