"""What one host thread issues, as the analysis counts it and as the executor ``cuda`` issues it on pretended cards."""

from collections.abc import Callable, Sequence
from functools import partial

import micro
import models
import nets
import normed
import pytest
import torch
from fake_cuda import issued_in, watched
from graphir.runtime.cuda.graphs import CudaGraphs
from graphir.runtime.kernels.optimizers import UPDATES
from runnable import batch_of, captured, sgd, spread
from small import program_of
from torch import Tensor, nn

import graphir
from graphir import Program, passes
from graphir.analysis.execution import STREAMS
from graphir.analysis.issuing import Calls, issuing
from graphir.analysis.topology import Speed, Topology
from graphir.errors import GraphirError
from graphir.ir.device import CPU, gpu
from graphir.ir.optypes.own import OWN

pytestmark = pytest.mark.usefixtures("one_thread")

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Placed = tuple[Program, Program, Sequence[Tensor]]
"""A captured program, the same one placed, and what a step of that is given."""


def of(optimizer: Callable[..., torch.optim.Optimizer], **options: object) -> Optimizer:
    return lambda model: optimizer(model.parameters(), **options)


MOMENTUM, ADAMW = of(sgd), of(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)
FUSED = of(torch.optim.AdamW, lr=1e-3, fused=True)


def replicated(make: Callable[[], models.Example], optimizer: Optimizer, replicas: int) -> Placed:
    torch.manual_seed(0)
    example = make()
    program = captured(example, optimizer(example.model))
    placed = program if replicas == 1 else passes.inject_copies(passes.replicate(program, range(replicas)))
    return program, placed, [torch.cat([tensor] * replicas) for tensor in batch_of(example)]


def shifted() -> Placed:
    program, _, batch = replicated(models.mlp, MOMENTUM, 1)
    return program, spread(program, share=False), [torch.cat([tensor] * 2) for tensor in batch]


def flowing(schedule: str) -> Placed:
    """Four micro-batches on two devices."""
    example = micro.mlp()
    program = micro.captured(example, 4)
    placed = passes.inject_copies(passes.shift_modules(program, {"[3:6]": 1}))
    return program, passes.pipeline(placed, schedule) if schedule else placed, batch_of(example)


def parked(to: object) -> Placed:
    program, _, batch = replicated(models.mlp, MOMENTUM, 1)
    return program, passes.inject_copies(passes.park(program, passes.find_activations(program)[1], to)), batch


def synchronised() -> Placed:
    program = normed.replicated(2)
    placed = passes.inject_copies(passes.sync_batch_norm(program))
    return program, placed, [torch.cat([tensor] * 2) for tensor in normed.batch(6)]


RESNET, GPT = partial(models.resnet, blocks=2), partial(models.gpt, layers=1)
PLACED: dict[str, Callable[[], Placed]] = {
    **{f"resnet on {n}": partial(replicated, RESNET, MOMENTUM, n) for n in (1, 4)},
    "resnet on 2, fused": partial(replicated, RESNET, FUSED, 2),
    **{f"gpt on {n}": partial(replicated, GPT, ADAMW, n) for n in (1, 2)},
    **{f"gpt on {n}, fused": partial(replicated, GPT, FUSED, n) for n in (1, 4)},
    "mlp on 8": partial(replicated, models.mlp, MOMENTUM, 8),
    "two replicas on four": shifted,
    "micro-batches": partial(flowing, ""),
    "1f1b": partial(flowing, "1f1b"),
    "zero bubble": partial(flowing, "zero_bubble"),
    "parked on the host": partial(parked, "cpu"),
    "parked on a peer": partial(parked, 1),
    "synchronised": synchronised,
}


def issued(captured: Program, placed: Program, batch: Sequence[Tensor], *, share: bool = True) -> tuple[Calls, Calls]:
    """What is counted, and what the executor calls."""
    plan = passes.emit(passes.share_storage(placed) if share else placed)
    binding = {str(device): f"cuda:{device.index}" for device in plan.devices if not device.is_host}
    called = issued_in(*watched(plan, captured.state, binding), batch)
    counted = issuing(plan, plan.dims).total
    of_kind = [called[kind] for kind in ("kernel", "copy", "record", "wait", "use")]
    return counted, Calls(*of_kind, counted.views)


@pytest.mark.parametrize("make", PLACED.values(), ids=PLACED)
def test_what_is_counted_is_what_the_executor_issues(make: Callable[[], Placed]) -> None:
    counted, called = issued(*make())
    # A copy within a card that one of graphir's kernels makes counts as one of its kernels.
    inside = counted.kernels - called.kernels
    assert counted == called._replace(kernels=called.kernels + inside, copies=called.copies - inside)
    assert inside == 0 or make is synchronised


@pytest.mark.parametrize("seed", [0, 4, 7])
def test_what_runs_on_the_host_is_not_issued(seed: int) -> None:
    """A random step spread over four cards and the host."""
    program = nets.random_program(seed, ops=30, devices=5, spread=0.6)
    net = program.step
    moved = net.with_(
        blobs={name: blob._replace(device=CPU) if blob.device == gpu(4) else blob for name, blob in net.blobs.items()},
        ops=tuple([op._replace(device=CPU) if op.device == gpu(4) else op for op in net.ops]),
    )
    plan = passes.emit(passes.inject_copies(program.with_(step=moved)))
    binding = {str(device): f"cuda:{device.index}" for device in plan.devices if not device.is_host}
    batch = nets.example_inputs(program, seed=0, batch=4)
    called = issued_in(*watched(plan, program.state, binding), batch)
    counted = issuing(plan, plan.dims).total
    assert (counted.kernels, counted.copies) == (called["kernel"], called["copy"])
    # A buffer that is taken again, since an operand begins elsewhere in memory, is let into its lane.
    for kind, count, taken in (
        ("record", counted.records, 1),
        ("wait", counted.waits, 1),
        ("use", counted.switches, 2),
    ):
        assert 0 <= called[kind] - count <= taken * called["empty"], kind


OPTIMIZERS = {
    "plain": of(torch.optim.SGD, lr=0.1),
    "nesterov": of(sgd, nesterov=True, weight_decay=0.1),
    "dampened": of(sgd, dampening=0.5),
    "dampened, fused": of(sgd, dampening=0.5, fused=True),
    "fused": of(sgd, fused=True),
    "amsgrad": of(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
    "maximizing": of(torch.optim.Adam, maximize=True),
    "adagrad": of(torch.optim.Adagrad, weight_decay=0.1),
    "adagrad, fused": of(torch.optim.Adagrad, fused=True),
    "rmsprop": of(torch.optim.RMSprop),
    "rmsprop, centered": of(torch.optim.RMSprop, centered=True, momentum=0.5, weight_decay=0.1),
    "by lists": of(torch.optim.AdamW, foreach=True),
    "adagrad by lists": of(torch.optim.Adagrad, foreach=True, weight_decay=0.1),
    "momentum by lists": of(sgd, foreach=True, nesterov=True, maximize=True),
    "by rows": of(graphir.optim.RowWiseAdagrad, lr=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_launches_what_is_counted(optimizer: Optimizer) -> None:
    counted, called = issued(*replicated(models.mlp, optimizer, 1))
    assert counted == called


def test_updates_with_rates_of_their_own_are_calls_of_their_own() -> None:
    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], fused=True)

    counted, called = issued(*replicated(models.mlp, two_groups, 1))
    assert counted == called
    assert counted.kernels == issued(*replicated(models.mlp, FUSED, 1))[0].kernels + 2


def test_the_updates_that_are_made_in_one_call_are_those_of_the_runtime() -> None:
    assert {type for type, known in OWN.items() if known.joined} == UPDATES.keys()


def test_around_a_graph_the_host_issues_what_is_counted() -> None:
    program, placed, batch = replicated(GPT, FUSED, 1)
    plan = passes.emit(passes.share_storage(placed))
    called = issued_in(*watched(plan, program.state, {"gpu:0": "cuda:0"}, CudaGraphs), batch, before=3)
    counted = issuing(plan, plan.dims, graph=True).total
    of_kind = [called[kind] for kind in ("kernel", "copy", "record", "wait", "use")]
    assert counted == Calls(*of_kind, replays=called["replay"]) and counted.replays == 1


def plan_of_gpt(replicas: int = 1) -> graphir.Plan:
    return passes.emit(replicated(GPT, FUSED, replicas)[1])


def test_an_estimate_says_what_issuing_takes_and_who_waits_for_it() -> None:
    plan = plan_of_gpt(2)
    found = graphir.estimate(plan, "h200x8", profile=None)
    assert found.issue is not None and STREAMS.issue is not None
    seconds, *calls = found.issue
    assert tuple(calls) == issuing(plan, plan.dims).total and found.issue.replays == 0
    assert seconds == pytest.approx(STREAMS.issue.of(Calls(*calls)))
    assert found.seconds >= seconds
    assert all(0 < use.unissued <= use.idle for use in found.lanes)
    text = " ".join(str(found).split())
    assert f"issued by one host thread in {seconds * 1e6:.1f} µs: {calls[0]} kernels, {calls[1]} copies, " in text
    assert "share not issued" in text and '"kernels": ' in found.to_json()


def test_what_the_issuing_thread_executes_itself_delays_what_comes_after() -> None:
    """On the host an operator takes a second, during which nothing is issued."""
    body = """
    input x : f32[2] @gpu:0
    input y : f32[2] @cpu:0
    a : f32[2] @cpu:0 = aten.neg(y)
    b : f32[2] @gpu:0 = aten.exp(x)
    output a
    output b
    """
    speed = Speed(flops_per_second={"f32": 1e12}, bytes_per_second=1e12)
    slow = speed.model_copy(update={"seconds_per_call": 1.0})
    found = graphir.estimate(
        passes.emit(program_of(body)), Topology(name="two", devices={"gpu:0": speed, "cpu:0": slow})
    )
    (use,) = [use for use in found.lanes if use.lane == "gpu:0.compute"]
    assert found.seconds > 1.0 and use.unissued > 1.0


def test_of_a_graph_the_host_issues_a_replay_and_the_updates() -> None:
    plan = plan_of_gpt()
    found, plain = [graphir.estimate(plan, "h200x8", profile=None, cuda_graph=graph) for graph in (True, False)]
    assert found.issue is not None and plain.issue is not None
    assert (found.issue.kernels, found.issue.copies, found.issue.views, found.issue.replays) == (2, 2, 0, 1)
    assert found.seconds < plain.seconds and "2 kernels, 2 copies, " in str(found)


@pytest.mark.parametrize(
    ("replicas", "topology", "where"), [(2, "h200x8", "gpu:0, gpu:1"), (1, "cpu", "the host")], ids=["cards", "host"]
)
def test_a_graph_is_of_one_card(replicas: int, topology: str, where: str) -> None:
    with pytest.raises(GraphirError, match=f"cuda_graph=True: a graph is of one GPU, the plan is on {where}"):
        graphir.estimate(plan_of_gpt(replicas), topology, cuda_graph=True)


def test_on_the_host_nobody_issues() -> None:
    found = graphir.estimate(plan_of_gpt(2), "cpu", profile=None)
    assert found.issue is None and "issued" not in str(found)
