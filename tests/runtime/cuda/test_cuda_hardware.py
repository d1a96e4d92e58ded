"""The CUDA executor on real devices."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys

import models
import pytest
import torch
from eager import assert_same_bits
from graphir.runtime import Session
from graphir.runtime.cuda.executor import Cuda
from runnable import captured, forward_plan, sgd, spread

from graphir import RunError, passes
from graphir.ir.plan import Plan
from graphir.ir.program import Program

pytestmark = pytest.mark.cuda

ONE = {f"gpu:{i}": "cuda:0" for i in range(4)}
TWO = {f"gpu:{i}": f"cuda:{i % 2}" for i in range(4)}
EXAMPLES = {
    "mlp": models.mlp,
    "resnet": lambda: models.resnet(batch=4, blocks=2, dropout=0.3),
    "gpt": lambda: models.gpt(layers=1, dropout=0.1),
}
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def doubled(example: models.Example) -> list[torch.Tensor]:
    return [torch.cat([tensor] * 2).cuda() for tensor in (*example.inputs, *example.targets)]


def both(example: models.Example, fused: bool = False) -> tuple[Program, Plan, Plan]:
    """A program, and the plans of its replicas unshifted and shifted."""
    program = captured(example, torch.optim.AdamW(example.model.parameters(), lr=1e-3, fused=fused))
    return program, passes.emit(passes.replicate(program, [0, 1])), passes.emit(spread(program))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("binding", [ONE, pytest.param(TWO, marks=needs_two)], ids=["one", "two"])
def test_twenty_steps_shifted_and_unshifted(name: str, fused: bool, binding: dict[str, str]) -> None:
    example = EXAMPLES[name]()
    program, plain, shifted = both(example, fused)
    batch = doubled(example)
    here = {device: place for device, place in binding.items() if device in ("gpu:0", "gpu:1")}
    with (
        Session(plain, program.state, binding=here) as one,
        Session(shifted, program.state, binding=binding) as other,
        Session(plain, program.state, binding=here, executor="reference") as reference,
    ):
        assert one.executor == other.executor == "cuda"
        for _ in range(20):
            loss = one.step(*batch)
            assert loss.is_cuda and torch.equal(loss, other.step(*batch)) and torch.equal(loss, reference.step(*batch))
        for replica in (0, 1):
            assert_same_bits(one.state_dict(replica), other.state_dict(replica), "shifted")
            assert_same_bits(one.state_dict(replica), reference.state_dict(replica), "reference")


@pytest.mark.parametrize("name", ["mlp", "resnet"])
def test_one_device_trains_as_eager(name: str) -> None:
    """In f64, where its other kernels for normalisation and convolution are near; in f32 some products are TF32."""
    example = models.mlp() if name == "mlp" else models.resnet(batch=4, blocks=2)
    example = example._replace(model=example.model.double(), inputs=tuple([x.double() for x in example.inputs]))
    program = captured(example, sgd(example.model.parameters(), foreach=False))
    model = copy.deepcopy(example.model).cuda()
    optimizer = sgd(model.parameters(), foreach=False)
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        for _ in range(5):
            optimizer.zero_grad()
            loss = example.loss(model(*batch[:-1]), batch[-1])
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(session.step(*batch), loss.detach())
        state = session.state_dict()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(state[key], tensor)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_replayed_graph_has_the_bits_of_the_step(name: str) -> None:
    example = EXAMPLES[name]()
    program, _, shifted = both(example)
    batch = doubled(example)
    with (
        Session(shifted, program.state, binding=ONE) as stepped,
        Session(shifted, program.state, binding=ONE, cuda_graph=True) as replayed,
    ):
        for step in range(6):
            for session in (stepped, replayed):
                session.param_groups[0]["lr"] = 1e-3 / (step + 1)
            assert torch.equal(stepped.step(*batch), replayed.step(*batch))
        assert_same_bits(stepped.state_dict(), replayed.state_dict(), "replayed")


def test_a_step_does_not_wait_for_the_device() -> None:
    example = models.resnet(batch=4, blocks=2)
    program = captured(example, torch.optim.AdamW(example.model.parameters(), fused=True))
    plan = passes.emit(spread(program))
    batch = doubled(example)
    with Session(plan, program.state, binding=ONE) as session:
        session.step(*batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            session.step(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_ledger_beside_the_allocator() -> None:
    """The allocator rounds up, and kernels take memory of their own; the plan's bytes are a part of its."""
    example = models.resnet(batch=8, blocks=2)
    program = captured(example, sgd(example.model.parameters()))
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    gc.collect()  # what other tests have left would go in between
    torch.cuda.reset_peak_memory_stats(0)
    torch.cuda.reset_accumulated_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        for _ in range(3):
            session.step(*batch)
        executor = session._executor
        assert isinstance(executor, Cuda)
        (held,) = [held for held in executor.ledger().values() if held.place.type == "cuda"]
    peak = held.allocator["allocated_bytes.all.peak"] - before
    assert held.state < held.predicted <= peak + sum(tensor.nbytes for tensor in batch)
    assert held.allocator["num_ooms"] == 0


def parked() -> Plan:
    """What comes to the host, is used there, and goes back."""
    body = """
        input x : f32[64] @gpu:0
        a : f32[64] @gpu:0 = aten.exp(x)
        a_cpu : f32[64] @cpu = Copy(a)
        h : f32[64] @cpu = aten.neg(a_cpu)
        h_gpu_0 : f32[64] @gpu:0 = Copy(h)
        b : f32[64] @gpu:0 = aten.relu(h_gpu_0)
        """
    return forward_plan(body, "x", output="b")


def test_auto_is_cuda() -> None:
    with Session(parked(), {}) as session:
        assert session.executor == "cuda" and session.step(torch.ones(64)).is_cuda
    with Session(parked(), {}, executor="serial") as session:
        assert session.step(torch.ones(64)).device.type == "cpu"


@pytest.mark.parametrize("graphs", [False, True])
def test_callers_on_changing_streams(graphs: bool) -> None:
    """Steps, and reads of state between them, come from streams that know nothing of each other."""
    example = models.resnet(batch=4, blocks=4, channels=32, image=32)
    program, _, shifted = both(example)
    batch = doubled(example)
    with (
        Session(shifted, program.state, binding=ONE, cuda_graph=graphs) as session,
        Session(shifted, program.state, binding=ONE) as steady,
    ):
        for _ in range(6):
            torch.cuda.synchronize()  # the batch is there for any stream
            with torch.cuda.stream(torch.cuda.Stream()):
                loss = session.step(*batch)
            with torch.cuda.stream(torch.cuda.Stream()):
                state = session.state_dict()
            wanted = steady.step(*batch)
            torch.cuda.synchronize()
            assert torch.equal(loss, wanted)
            assert_same_bits(state, steady.state_dict(), "read on another stream")


def test_graphs_of_several_sizes_keep_their_buffers() -> None:
    example = models.gpt(layers=1, batch=16)
    program, _, shifted = both(example)
    batch = doubled(example)
    with (
        Session(shifted, program.state, binding=ONE, cuda_graph=True) as replayed,
        Session(shifted, program.state, binding=ONE) as stepped,
    ):
        for rows in (4, 4, 32, 32, 4, 6, 6, 32, 4):
            given = [tensor[:rows] for tensor in batch]
            assert torch.equal(replayed.step(*given), stepped.step(*given))
        assert_same_bits(replayed.state_dict(), stepped.state_dict(), "replayed")


def test_graphs_of_the_user_go_on_beside_ours() -> None:
    example = models.resnet(batch=4, blocks=1, dropout=0.3)
    program, _, shifted = both(example)
    x = torch.ones(1000, device="cuda")
    with Session(shifted, program.state, binding=ONE, cuda_graph=True) as session:
        for _ in range(3):
            session.step(*doubled(example))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.nn.functional.dropout(x)
        graph.replay()
        first = y.clone()
        session.step(*doubled(example))
        graph.replay()
        assert not torch.equal(first, y)


class Lookups(torch.nn.Module):
    """Its backward adds into the same rows from many threads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(7, 33))
        self.rows = torch.nn.Embedding(7, 33)
        self.attention = torch.nn.MultiheadAttention(33, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.table[x] + self.rows(x) + self.table.index_select(0, x.flatten()).view(*x.shape, 33)
        found = found + torch.gather(self.table, 0, x.flatten()[:, None].expand(-1, 33)).view_as(found)
        return self.attention(found, found, found, need_weights=False)[0]


def test_two_runs_have_the_same_bits() -> None:
    torch.manual_seed(0)
    model, x = Lookups(), torch.randint(7, (64, 128))
    example = models.Example(model, (x,), (torch.randn(64, 128, 33),), torch.nn.functional.mse_loss)
    program = captured(example, sgd(model.parameters()))
    plan = passes.emit(program)
    batch = [tensor.cuda() for tensor in (*example.inputs, *example.targets)]
    found = []
    for _ in range(3):
        with Session(plan, program.state, binding="cuda") as session:
            losses = [session.step(*batch) for _ in range(5)]
            found.append([*losses, *session.state_dict().values()])
    assert all(torch.equal(a, b) for run in found[1:] for a, b in zip(found[0], run, strict=True))


def test_a_watch_for_nan_reads_what_has_come_to_the_host() -> None:
    with Session(parked(), {}, binding="cuda", check_finite=True) as session:
        for _ in range(20):
            session.step(torch.randn(64))


def test_memory_that_runs_out() -> None:
    example = models.resnet(batch=4, blocks=2, channels=64, image=64)
    program = captured(example, sgd(example.model.parameters()))
    with Session(passes.emit(program), program.state, binding="cuda") as session:
        session.step(*example.inputs, *example.targets)
        (x,), (y,) = example.inputs, example.targets
        whole = torch.cuda.get_device_properties(0).total_memory
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(0) + (256 << 20)) / whole)
        try:
            with pytest.raises(
                RunError, match=r"ran out of memory: OutOfMemoryError(.|\n)*activations .*(.|\n)*smaller"
            ):
                session.step(x.repeat(256, 1, 1, 1), y.repeat(256))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_device_that_does_not_get_there() -> None:
    x = torch.ones(64, device="cuda")  # from the host, it might be waited for until the device has slept
    with Session(parked(), {}, binding="cuda", deadline=0.2) as session:
        session.step(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000_000)  # some two seconds
        with pytest.raises(RunError, match=r"TimeoutError(.|\n)*unusable"):
            session.step(x)
        torch.cuda.synchronize()


LOST = """
import torch, graphir
from graphir import passes, runtime
model = torch.nn.Embedding(4, 8)
loss = lambda found: found.sum()
program = graphir.capture(model, inputs=(torch.tensor([1, 2]),), targets=(), loss=loss)
good, bad = torch.tensor([1, 2]).cuda(), torch.tensor([1, 9999999]).cuda()
with runtime.Session(passes.emit(program), program.state, binding="cuda") as session:
    try:
        for _ in range(3):
            session.step(bad).item()
    except Exception as error:
        print(type(error).__name__, session.usable)
    try:
        session.step(good)
    except graphir.GraphirError as error:
        print(session.usable, "new process" in str(error) or "unusable" in str(error))
"""


def test_a_kernel_that_fails_is_told_late_and_ends_the_session() -> None:
    """In a process of its own, whose device is lost."""
    found = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=300)
    assert found.stdout.splitlines()[-1] == "False True", found.stdout + found.stderr
    assert found.returncode == 0, found.stderr


def test_a_report_has_the_allocators_figures() -> None:
    example = models.resnet(batch=4, blocks=2)
    program, _, shifted = both(example)
    batch = doubled(example)
    torch.cuda.reset_accumulated_memory_stats(0)  # of tests whose memory runs out
    with Session(shifted, program.state, binding=ONE) as session:
        with session.measured():
            for _ in range(3):
                session.step(*batch)
        report = session.report()
    (use,) = report.allocators
    assert use.devices == tuple(shifted.devices)[:4] and use.shortages == 0
    assert 0 < use.received < use.allocated <= use.allocated_peak <= use.reserved_peak
    assert "cuda:0" in str(report)
    assert all(time.busy >= 0 for time in report.lanes) and report.seconds > 0


@needs_two
def test_nccl_reduces_among_two_gpus() -> None:
    example = models.mlp()
    program, plain, _ = both(example)
    batch, here = doubled(example), {"gpu:0": "cuda:0", "gpu:1": "cuda:1"}
    with (
        Session(plain, program.state, binding=here, collectives="native") as native,
        Session(plain, program.state, binding=here) as ordered,
    ):
        assert native.caveats and not ordered.caveats
        for _ in range(3):
            torch.testing.assert_close(native.step(*batch), ordered.step(*batch))
