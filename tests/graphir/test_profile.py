"""What operators are measured to take, and predictions with it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import models
import numpy as np
import profiled_models
import pytest
import torch
from allocations import measured_peak, predicted_peak
from graphir.runtime.kernels.invoke import perform
from graphir.runtime.profiling import calls as calls_of_runtime
from profiled_models import Case
from runnable import captured, captured_case, forward_plan, sgd
from small import program_of
from torch import nn
from torch.profiler import ProfilerActivity

import graphir
from graphir import passes, runtime
from graphir.analysis.profile_files import default_path
from graphir.errors import GraphirError, VerifyError
from graphir.ir.operator import bind_arg
from graphir.ir.plan import Plan


def plan_of(case: Case) -> tuple[Plan, dict[str, torch.Tensor]]:
    program = captured_case(case)
    return passes.emit(passes.share_storage(program)), dict(program.state)


def peaks(plan: Plan, state: dict[str, torch.Tensor], *batch: torch.Tensor) -> tuple[int, int, graphir.Memory]:
    """Measured, predicted with a profile, and that prediction."""
    profile = graphir.profile(plan)
    assert not profile.failed
    with runtime.Session(plan, state, executor="serial") as session:
        session.step(*batch)
        measured = measured_peak(lambda: session.step(*batch))
    found = graphir.memory(plan.with_(buffers={}), profile=profile)
    assert found.sources()["unknown"] == 0
    return measured, predicted_peak(plan, profile=profile), found


KINDS = (
    "windows as columns (im2col)",
    "pools, channels last",
    "linear layers in bf16",
    "positions of a mask (cumsum of bool)",
    "grouped convolutions",
    "attention in f64",
)


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_profile_the_peak_is_that_which_is_measured(kind: str) -> None:
    case = profiled_models.MISSED[kind]()
    plan, state = plan_of(case)
    measured, predicted, found = peaks(plan, state, *case.inputs, *case.targets)
    assert predicted == pytest.approx(measured, rel=0.001)
    assert found.sources()["bound"] == 0


@pytest.mark.parametrize("kind", ["sparse SGD", "sparse Adam", "sparse Adagrad"])
def test_what_depends_on_data_is_a_bound_and_is_marked(kind: str) -> None:
    case = profiled_models.MISSED[kind]()
    plan, state = plan_of(case)
    (x,), (y,) = case.inputs, case.targets
    worst = 0
    for batch in (x, torch.zeros_like(x), torch.arange(x.numel()).view_as(x) % 2000):
        measured, predicted, found = peaks(plan, state, batch, y)
        worst = max(worst, measured)
        assert measured <= predicted
    assert worst > 0.45 * predicted, "and no idle one"
    (bound,) = [call for call in found.scratch if call.source == "bound"]
    assert bound.type.startswith("graphir.sparse_") and bound.nbytes
    assert " 1 an upper bound" in str(found)


def test_gradients_with_empty_slots_stay_below_the_bound() -> None:
    """Where replicas look up the same rows their sum has fewer; the rest of its slots is empty."""
    case = profiled_models.MISSED["sparse Adam"]()
    program = passes.replicate(captured_case(case), devices=[0, 1])
    plan = passes.emit(program)
    profile = graphir.profile(plan)
    assert not profile.failed
    batch = [tensor.repeat(2, *[1] * (tensor.dim() - 1)) for tensor in (*case.inputs, *case.targets)]
    with runtime.Session(plan, program.state, executor="reference") as session:
        session.step(*batch)
        assert measured_peak(lambda: session.step(*batch)) <= predicted_peak(plan, profile=profile)


class Looking(nn.Module):
    """A sparse table of rows, beside one of bags."""

    def __init__(self, rows: int, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, 16, sparse=True)
        self.bags = nn.EmbeddingBag(rows, 16, sparse=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum(1) + self.bags(x)


LOOKUPS = 64 * 8


@pytest.mark.parametrize("rows", [LOOKUPS // 4, 8 * LOOKUPS])
@pytest.mark.parametrize(
    "make", [torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD, graphir.optim.RowWiseAdagrad]
)
def test_a_bound_holds_for_tables_that_are_updated_together(make: Any, rows: int) -> None:
    """What one update of a call allocates is gone before the next one."""
    model, y = Looking(rows), torch.randn(64, 16)
    batches = [torch.arange(LOOKUPS) % rows, torch.zeros(LOOKUPS, dtype=torch.int64), torch.randint(rows, (LOOKUPS,))]
    batches = [batch.view(64, 8) for batch in batches]
    optimizer = make(model.parameters(), lr=0.01)
    program = graphir.capture(model, (batches[0],), targets=(y,), loss=nn.functional.mse_loss, optimizer=optimizer)
    plan = passes.emit(program)
    bound = predicted_peak(plan, profile=graphir.profile(plan))
    with runtime.Session(plan, program.state, executor="serial") as session:
        session.step(batches[0], y)
        assert all(measured_peak(lambda b=b: session.step(b, y)) <= bound for b in batches)  # type: ignore[misc]


def bag_program() -> graphir.Program:
    """A sparse table of bags with padding, on three replicas."""
    model, x = nn.Sequential(nn.EmbeddingBag(200, 8, sparse=True, padding_idx=3)), torch.randint(200, (16, 4))
    example = Case(model, (x,), (torch.randn(16, 8),), nn.functional.mse_loss)
    return passes.replicate(captured_case(example), devices=[0, 1, 2])


def sums(args: Any) -> Iterator[Callable[[], object]]:
    """Sums of three sparse gradients, with empty slots and rows in common."""
    for seed in range(30):
        torch.manual_seed(seed)
        indices = torch.randint(200, (3, 1, 64)).sort()[0] * (seed % 2) + torch.arange(3)[:, None, None]
        indices[torch.rand(indices.shape) < 0.02] = -1
        given = [list(torch.randn(3, 64, 8)), list(indices.clamp(max=199))]
        yield partial(perform, "graphir.sparse_sum", given, dict(args), torch.device("cpu"))


def gradients_of_bags(args: Any) -> Iterator[Callable[[], object]]:
    """Gradients of tables where some lookups are padding."""
    for seed in range(20):
        torch.manual_seed(seed)
        x, offsets, table = torch.randint(200, (64,)), torch.arange(0, 64, 4), torch.randn(200, 8)
        x[torch.rand(64) < seed / 40] = 3
        bags, *kept = torch.ops.aten._embedding_bag(table, x, offsets, False, 0, True, None, False, 3)
        given = [torch.randn_like(bags), x, offsets, *kept, None]
        yield partial(perform, "graphir.embedding_bag_backward", given, dict(args), torch.device("cpu"))


@pytest.mark.parametrize(
    ("type", "calls"), [("graphir.sparse_sum", sums), ("graphir.embedding_bag_backward", gradients_of_bags)]
)
def test_a_bound_holds_for_any_rows(type: str, calls: Callable[[Any], Iterator[Callable[[], object]]]) -> None:
    program = bag_program()
    op = next(op for op in program.step.ops if op.type == type)
    subject = calls_of_runtime.Subject(op, program.step.blobs, program.dims)
    taken = calls_of_runtime.measured({type: subject}, 1)[0][type]
    results = sum(program.step.blobs[name].nbytes(program.dims) for name in op.outputs)
    args = {name: bind_arg(arg, program.dims) for name, arg in op.args.items()}
    with torch.inference_mode():
        most = max(measured_peak(call) for call in calls(args))
    assert most <= taken.scratch + taken.kept + results
    assert taken.bound


def mlp() -> graphir.Program:
    example = models.mlp(batch=8, features=32, hidden=64)
    return captured(example, sgd(example.model.parameters()))


ONE_CALL = program_of("input x : f32[4] @gpu:0\n a : f32[4] @gpu:0 = aten.relu(x)\n output a")


def test_each_signature_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, path = mlp(), tmp_path / "p.json"
    asked: list[str] = []
    original = calls_of_runtime.measured

    def counted(subjects: Any, threads: int) -> Any:
        asked.extend(subjects)
        return original(subjects, threads)

    monkeypatch.setattr(sys.modules["graphir.facade.profile"], "measured", counted)
    first = graphir.profile(program, path=path)
    assert len(asked) == len(set(asked)) == len(first.calls) < len(program.step.ops)
    asked.clear()
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    both = graphir.profile(plan, path=path).calls  # replicas make the same calls, and reductions
    assert both.items() > first.calls.items()
    assert {key.partition("(")[0].partition(": ")[2] for key in both.keys() - first.calls.keys()} == {"AllReduce"}
    assert graphir.profile(program, {"batch": 4}, path=path).calls.keys() > first.calls.keys() and asked
    threads = graphir.profile(program, threads=3, path=path).calls.keys() - first.calls.keys()
    assert {key.partition(":")[0] for key in threads} > {"3 threads"}


def test_nothing_is_read_or_written_where_there_is_to_be_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in these tests: ``GRAPHIR_PROFILE`` is empty. What is damaged would be refused if it were read."""
    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as usual:
        usual.delenv("GRAPHIR_PROFILE")
        file = default_path()
    assert file is not None and file.is_relative_to(tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("damaged")
    found = graphir.profile(ONE_CALL)
    assert found.calls and found.machine.torch == torch.__version__
    assert all(call.seconds > 0 for call in found.calls.values())
    graphir.memory(ONE_CALL)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file] and file.read_text() == "damaged"


def test_state_is_neither_read_nor_written() -> None:
    program = mlp()
    before = {name: tensor.clone() for name, tensor in program.state.items()}
    random = torch.get_rng_state()
    graphir.profile(program)
    assert all(torch.equal(tensor, program.state[name]) for name, tensor in before.items())
    assert torch.equal(random, torch.get_rng_state())
    graphir.profile(program.with_(state={}))


def test_what_cannot_be_called_is_said_and_stays_unknown() -> None:
    program = program_of("""
        input x : f32[4,8] @gpu:0
        a : f32[4,8] @gpu:0 = aten.relu(x)
        b : f32[2,8] @gpu:0 = FC(a)
        c : ? @gpu:0 = Strange(b)
        d : f32[4] @gpu:0 = aten.relu(c)
        output d
        proto ""
    """)
    found = graphir.profile(program)
    assert len(found.failed) == 2
    for key, why in found.failed.items():
        assert key.endswith((" FC(f32[4,8])", " Strange(f32[2,8])")) and "unknown operator type" in why
        assert f"not measured: {key}: {why}" in str(found)
    memory = graphir.memory(program, profile=found)
    assert memory.sources() == {"measured": 1, "bound": 0, "computed": 0, "unknown": 3}
    assert [(call.blob, call.source, call.nbytes) for call in memory.scratch] == [
        ("a", "measured", 0), ("b", "unknown", None), ("c", "unknown", None), ("d", "unknown", None),
    ]  # fmt: skip
    assert str(memory).endswith("not counted, their sizes not known: c")


def test_results_that_keep_more_than_they_show_take_it_as_long_as_they_live() -> None:
    """``col2im`` hands back a part of the memory that it took."""
    body = """
        input x : f32[2,36,64] @gpu:0
        y : f32[2,4,8,8] @gpu:0 = aten.col2im(x, output_size=[8, 8], kernel_size=[3, 3], dilation=[1, 1],
            padding=[1, 1], stride=[1, 1])
        output z : f32[2,4,8,8] @gpu:0 = aten.relu(y)
    """.replace(",\n            padding", ", padding")
    plan = forward_plan(body, "x", output="z")
    x = torch.randn(2, 36, 64)
    measured, predicted, found = peaks(plan, {}, x)
    assert measured == predicted
    assert {use.blob: use.nbytes for use in found.uses if use.category != "scratch"}["y"] > 2 * 4 * 8 * 8 * 4


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_the_step_of_a_dense_table_of_bags_takes_what_is_predicted(mode: str) -> None:
    """Its forward's second result keeps more than it shows, and its backward's scratch depends on sizes of bags."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(200, 8, mode=mode, padding_idx=3))
    batch = torch.randint(4, 200, (32, 4))
    case = Case(model, (batch,), (torch.randn(32, 8),), nn.functional.mse_loss)
    plan, state = plan_of(case)
    measured, predicted, _ = peaks(plan, state, *case.inputs, *case.targets)
    assert measured == predicted


def test_a_running_profiler_is_named(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[ProfilerActivity.CPU]), pytest.raises(GraphirError) as e:
        graphir.profile(mlp(), path=tmp_path / "p")
    assert "a profiler of PyTorch's is running" in e.value.what and e.value.fix
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"subject": "plan"}, "profile takes"),
        ({"threads": 0}, "threads=0"),
        ({"dims": {"x": 3}}, "dims has 'x'"),
        ({"path": 7}, "a path was expected"),
    ],
)
def test_what_cannot_be_profiled_is_refused(arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(GraphirError, match=what):
        graphir.profile(**{"subject": mlp(), **arguments})


def test_memory_refuses_what_is_no_profile() -> None:
    with pytest.raises(GraphirError, match="profile is a str, not a Profile"):
        graphir.memory(mlp(), profile="p.json")  # type: ignore[arg-type]


def test_timelines_have_what_was_measured() -> None:
    plan, _ = plan_of(profiled_models.MISSED["attention in f64"]())
    found = graphir.memory(plan, profile=graphir.profile(plan))
    assert np.array_equal(found.timeline("gpu:0", "scratch") > 0, [
        any(call.position == at and call.nbytes for call in found.scratch) for at in range(found.positions)
    ])  # fmt: skip


def test_a_call_that_does_not_fit_into_memory_is_left_out() -> None:
    huge = program_of("input x : f32[900000000000] @gpu:0\n a : f32[900000000000] @gpu:0 = aten.relu(x)\n output a")
    ((_, why),) = graphir.profile(huge).failed.items()
    assert re.fullmatch(r"GraphirError: it may take 14400000000000 bytes, and \d+ are left", why)


def test_what_is_not_well_formed_is_not_called() -> None:
    lying = program_of("input x : f32[4] @gpu:0\n a : f32[5] @gpu:0 = aten.relu(x)\n output a")
    with pytest.raises(VerifyError, match="relu"):
        graphir.profile(lying)


@pytest.mark.parametrize(
    ("at_once", "cores", "expected"),
    [
        pytest.param(1 << 20, 1, "neg exp " * 6, id="in turn"),
        pytest.param(1, 1, "neg " * 6 + "exp " * 6, id="one group each"),
        pytest.param(1 << 20, 2, "neg exp " * 12, id="alone and beside others"),
    ],
)
def test_calls_are_timed_in_turn(
    at_once: int, cores: int, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = forward_plan(
        "input x : f32[8] @gpu:0\na : f32[8] @gpu:0 = aten.neg(x)\nb : f32[8] @gpu:0 = aten.exp(a)", "x", output="b"
    )
    made, called, beside = calls_of_runtime.call_of, list[str](), list[str]()

    def noted(subject: Any, sets: Any) -> Any:
        call, name = made(subject, sets), subject.op.type.split(".")[1]

        def run() -> Any:
            (called if threading.current_thread() is threading.main_thread() else beside).append(name)
            return call()

        return run

    monkeypatch.setattr(calls_of_runtime, "call_of", noted)
    monkeypatch.setattr(calls_of_runtime, "_MOST_AT_ONCE", at_once)
    monkeypatch.setattr(calls_of_runtime, "cores", lambda: cores)
    found = graphir.profile(plan, threads=1, path=tmp_path / "profile.json")
    timed = expected.split()
    assert called[: len(timed)] == timed
    assert beside == (timed[: len(timed) // 2] if cores > 1 else [])
    assert all((call.beside is None) is (cores == 1) for call in found.calls.values())
