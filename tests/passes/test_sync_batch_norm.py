"""passes.sync_batch_norm: statistics over all replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from normed import Normed, batch, captured, replicated
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.errors import PassError, ReplicationError
from graphir.ir.operator import Operator
from graphir.ir.program import Program

pytestmark = pytest.mark.usefixtures("one_thread")

FORWARD = "graphir.synchronised_batch_norm"
BACKWARD = "graphir.synchronised_batch_norm_backward"
NATIVE = "aten.native_batch_norm_backward.default"


@cache
def standard() -> Program:
    """The small model on two replicas."""
    return replicated(2)


def kinds(program: Program) -> list[str]:
    return [op.type for op in program.step.ops if "norm" in op.type]


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name].double(), value.double(), rtol=1e-6, atol=1e-9, msg=name)


def trained(program: Program, model: nn.Module, sizes: list[int], **options: Any) -> None:
    """Train a session and, on whole batches, the model; compare losses and states after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with runtime.Session(passes.emit(program), program.state, **options) as session:
        for seed, size in enumerate(sizes):
            x, y = batch(size, seed)
            loss = session.step(x, y)
            optimizer.zero_grad()
            expected = F.cross_entropy(model(x), y)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
            states = [session.state_dict(replica=r) for r in range(len(program.replicas))]
            close(states[0], dict(model.state_dict()))
            for state in states[1:]:
                assert all(torch.equal(value, state[name]) for name, value in states[0].items())


def test_text_of_a_batch_norm_on_two_replicas(golden: Callable[[str, str], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    program = graphir.capture(
        model,
        (torch.randn(4, 3),),
        targets=(torch.randint(2, (4,)),),
        loss=F.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    golden("batch_norm.synchronised", str(passes.sync_batch_norm(passes.replicate(program, [0, 1])).step))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_training_is_that_of_one_device_on_the_whole_batch(replicas: int, last: bool) -> None:
    """Even and uneven shares, and shares of one row."""
    torch.manual_seed(0)
    model = Normed(last=last).double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(replicated(replicas, model))
    trained(program, whole, [6, 5, 7, replicas, 8], executor="threads")


def test_gradients_are_those_of_the_whole_batch() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    program = passes.sync_batch_norm(passes.replicate(captured(model), [0, 1, 2]))
    x, y = batch(7)
    with runtime.Session(passes.emit(program), program.state) as session:
        session.step(x, y)
        ours = session.gradients()
    F.cross_entropy(model(x), y).backward()
    close(ours, {name: param.grad for name, param in model.named_parameters() if param.grad is not None})


def test_gradients_that_are_summed_are_those_of_the_sum_of_losses() -> None:
    """``reduction="sum"``: each replica's loss counts as it is."""
    torch.manual_seed(0)
    model = Normed().double()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    program = graphir.capture(
        model, (batch(6)[0],), targets=(batch(6)[1],), loss=summed_cross_entropy, optimizer=optimizer
    )
    program = passes.sync_batch_norm(passes.replicate(program, [0, 1], reduction="sum"))
    assert not [op for op in program.step.ops if op.type == BACKWARD and op.args]
    x, y = batch(7, 1)
    with runtime.Session(passes.emit(program), program.state) as session:
        session.step(x, y)
        state = session.state_dict()
    reference = torch.optim.SGD(whole.parameters(), lr=0.01)
    summed_cross_entropy(whole(x), y).backward()
    reference.step()
    close(state, dict(whole.state_dict()))


def summed_cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="sum")


def test_micro_batches_are_synchronised_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(126, 5), nn.BatchNorm1d(5)).double()
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = captured(model, optimizer, accumulate=2)
    program = passes.sync_batch_norm(passes.replicate(program, [0, 1]))
    assert kinds(program).count(FORWARD) == 4
    x, y = batch(12)
    with runtime.Session(passes.emit(program), program.state) as session:
        session.step(x, y)
        state = session.state_dict()
    first, second = [torch.cat(parts) for parts in ((x[:3], x[6:9]), (x[3:6], x[9:]))]
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for rows, classes in ((first, torch.cat((y[:3], y[6:9]))), (second, torch.cat((y[3:6], y[9:])))):
        (F.cross_entropy(whole(rows), classes) / 2).backward()
    reference.step()
    close(state, dict(whole.state_dict()))


BEFORE: dict[str, Callable[[Program], Program]] = {
    "parked": lambda program: passes.park(program, ["stem.1.save_mean", "rows.save_mean"], "gpu:3"),
    "recomputed": lambda program: passes.recompute(program, "stem"),
    "moved, with copies": lambda program: passes.inject_copies(passes.shift_modules(program, {"stem.1": {0: 2, 1: 3}})),
    "shared": passes.share_storage,
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_backward_finds_its_forward_behind_other_passes(before: str) -> None:
    """Behind copies, and behind a forward that is repeated, a backward reads the saved mean under another name."""
    torch.manual_seed(0)
    model = Normed().double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(BEFORE[before](replicated(2, model)))
    backwards = [op for op in program.step.ops if op.type == NATIVE]
    assert backwards and not any(op.args["output_mask"][0] for op in backwards)  # type: ignore[index]
    trained(passes.inject_copies(program), whole, [6, 5], executor="reference")


def test_a_backward_without_a_forward_is_refused() -> None:
    program = standard()
    step = program.step

    def strange(op: Operator) -> Operator:
        inputs = tuple([name.replace("rows.save_mean", "rows.save_invstd") for name in op.inputs])
        return op._replace(inputs=inputs) if op.type == NATIVE else op

    changed = program.with_(step=step.with_(ops=tuple(map(strange, step.ops))))
    with pytest.raises(PassError, match="finds no forward of this backward") as refusal:
        passes.sync_batch_norm(changed)
    assert refusal.value.fix == "run sync_batch_norm directly after replicate or shard"


def test_norms_that_replicas_call_unequally_often_are_refused() -> None:
    """One replica's is in evaluation, so that it would not come to the sums of the others."""
    program = passes.replicate(graphir.capture(Normed(), (torch.randn(6, 3, 7, 6),)), [0, 1])
    step = program.step

    def in_evaluation(op: Operator) -> Operator:
        return op._replace(args={**op.args, "training": False}) if op.outputs[0] == "gpu_1/rows" else op

    changed = program.with_(step=step.with_(ops=tuple(map(in_evaluation, step.ops))))
    with pytest.raises(ReplicationError, match="module 'rows' is called 1 time by replica 0, 0 times by replica 1"):
        passes.sync_batch_norm(changed)


def test_a_first_layer_keeps_its_backward() -> None:
    """Without a gradient of its input, the weight's and the bias's follow from what the forward saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(126, 5)).double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(replicated(2, model))
    assert BACKWARD not in kinds(program)
    trained(program, whole, [6, 5])


def test_frozen_weights_take_no_gradient() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    model.stem[1].requires_grad_(False)
    whole = copy.deepcopy(model)
    trained(passes.sync_batch_norm(replicated(2, model)), whole, [6, 5])


def test_a_checkpoint_is_synchronised_when_it_is_computed_again() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Normed):
        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
            return found

    torch.manual_seed(0)
    model = Checkpointed().double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(replicated(2, model))
    assert "aten.native_batch_norm.default" not in kinds(program)
    trained(program, whole, [6, 5])


@pytest.mark.parametrize("executor", ["reference", "serial", "threads", "adversarial"])
def test_every_executor_gives_the_same_bits(executor: Any) -> None:
    program = passes.sync_batch_norm(standard())
    found = []
    for each in ("reference", executor):
        with runtime.Session(passes.emit(program), program.state, executor=each) as session:
            losses = [session.step(*batch(size, size)) for size in (6, 5)]
            found.append([*losses, *session.state_dict().values(), *session.state_dict(replica=1).values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("chosen", [["stem"], ["rows", "plain"], ["fc"], None], ids=str)
def test_moving_changes_no_bit(chosen: list[str] | None) -> None:
    """What replicas exchange is exchanged between the devices on which the batch norms are then."""
    program = passes.sync_batch_norm(standard())
    activations = passes.find_activations(program)
    if chosen is not None:
        moved = passes.shift_modules(program, {name: {0: 2, 1: 3} for name in chosen})
    else:
        moved = passes.shift_activations(program, activations[len(activations) // 2 :], shifts={0: 2, 1: 3})
    moved = passes.share_storage(passes.inject_copies(moved))
    assert graphir.certify(program, moved).holds
    plan = passes.emit(moved)
    assert runtime.check(plan) == []
    states = []
    for each in (passes.emit(program), plan):
        with runtime.Session(each, program.state) as session:
            losses = [session.step(*batch(size, size)) for size in (6, 5)]
            states.append([*losses, *session.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_batch_norm_moves_with_all_that_belongs_to_it() -> None:
    """One replica's alone: its collectives have participants on both devices then."""
    program = passes.shift_modules(passes.sync_batch_norm(standard()), {"stem.1": {0: 2}})
    graphir.verify(passes.inject_copies(program))
    devices = {op.device for op in program.step.ops if op.module == "stem.1" and op.outputs[0].startswith("gpu_0/")}
    assert devices == {"gpu:2"}
    reduced = [op for op in program.step.ops if op.type == "AllReduce" and op.module == "stem.1"]
    assert {program.step.blobs[name].device for op in reduced for name in op.outputs} == {"gpu:1", "gpu:2"}


def test_activations_and_gradients_are_as_before() -> None:
    before = standard()
    after = passes.sync_batch_norm(before)
    assert passes.find_activations(after) == passes.find_activations(before)
    assert after.step.gradients == before.step.gradients


def test_a_forward_in_training_is_synchronised_too() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    whole = copy.deepcopy(model)
    program = passes.replicate(graphir.capture(model, (batch(6)[0],)), [0, 1])
    before = passes.find_activations(program)
    program = passes.sync_batch_norm(program)
    assert passes.find_activations(program) == before
    x, _ = batch(5, 3)
    with runtime.Session(passes.emit(program), program.state) as session:
        torch.testing.assert_close(session.step(x), whole(x).detach(), rtol=1e-6, atol=1e-9)
        close(session.state_dict(), dict(whole.state_dict()))


def test_files_and_text_hold_it(tmp_path: Path) -> None:
    program = passes.sync_batch_norm(standard())
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "step.json", state=True)
    assert graphir.load(tmp_path / "step.json") == program
    plan = passes.emit(program)
    plan.save(tmp_path / "plan.json")
    assert graphir.load(tmp_path / "plan.json") == plan
    assert graphir.memory(plan).peak.keys() == {"gpu:0", "gpu:1", "cpu:0"}


def test_a_loaded_program_is_synchronised(tmp_path: Path) -> None:
    program = standard()
    program.save(tmp_path / "step.json")
    loaded = graphir.load(tmp_path / "step.json")
    assert isinstance(loaded, Program)
    ours, theirs = passes.sync_batch_norm(loaded), passes.sync_batch_norm(program)
    assert ours.step == theirs.step
    assert ours.covers.guards == program.covers.guards, "whether the model is the same at one row, nobody can ask"


def test_the_history_runs_again() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    program = captured(model)
    once = passes.sync_batch_norm(passes.replicate(program, [0, 1]), ["stem", "rows"])
    assert once.history[-1] == "sync_batch_norm{modules=[stem, rows]}"
    assert passes.Pipeline(" | ".join(once.history))(program) == once


def test_only_named_modules_are_synchronised() -> None:
    program = passes.sync_batch_norm(standard(), "stem")
    assert {op.module for op in program.step.ops if op.type == FORWARD} == {"stem.1"}
    assert {op.module for op in program.step.ops if op.type == "aten.native_batch_norm.default"} == {"rows", "plain"}


def test_a_second_time_changes_nothing() -> None:
    once = passes.sync_batch_norm(standard())
    assert passes.sync_batch_norm(once).step == once.step


def test_one_replica_has_the_whole_batch() -> None:
    program = replicated(1)
    assert passes.sync_batch_norm(program).step == program.step


def test_evaluation_stays_as_it_is() -> None:
    """But a batch norm without running statistics, which normalises by the batch then, too."""
    program = passes.sync_batch_norm(replicated(2, Normed().double().eval()))
    assert {op.module for op in program.step.ops if op.type == FORWARD} == {"plain"}
    assert kinds(program).count("aten.native_batch_norm.default") == 4


@pytest.mark.parametrize("functional", [False, True])
def test_instance_norms_stay_as_they_are(functional: bool) -> None:
    class Instances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.Identity() if functional else nn.InstanceNorm2d(3, affine=True)
            self.fc = nn.Linear(126, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = F.instance_norm(x) if functional else self.norm(x)
            out: Tensor = self.fc(x.flatten(1))
            return out

    program = replicated(2, Instances().double())
    assert passes.sync_batch_norm(program).step == program.step


def test_a_model_may_call_batch_norm_itself() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(126, 5)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.fc(x.flatten(1)), None, None, training=True)

    torch.manual_seed(0)
    model = Functional().double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(replicated(2, model))
    assert FORWARD in kinds(program)
    trained(program, whole, [6, 5, 2])


def test_replicas_need_two_rows_together() -> None:
    """Torch refuses to normalise one value a channel. Replicas have the others', too."""
    before = replicated(3)
    after = passes.sync_batch_norm(before)
    assert [str(guard) for guard in before.covers.guards] == ["gpu_0/batch>=2", "gpu_1/batch>=2", "gpu_2/batch>=2"]
    assert [str(guard) for guard in after.covers.guards] == ["gpu_0/batch+gpu_1/batch+gpu_2/batch>=2"]
    some = passes.sync_batch_norm(before, "stem")
    assert some.covers.guards == before.covers.guards, "the others still need two rows each"
    with (
        runtime.Session(passes.emit(some), some.state) as session,
        pytest.raises(graphir.CoverageError, match=r"batch>=2: .*Expected more than 1 value per channel"),
    ):
        session.step(*batch(1))


def test_a_model_that_differs_at_one_row_keeps_its_guards() -> None:
    class Branching(Normed):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if len(x) != 1 else out * 2

    before = replicated(2, Branching().double())
    assert passes.sync_batch_norm(before).covers.guards == before.covers.guards


def test_single_precision_is_close() -> None:
    torch.manual_seed(0)
    model = Normed()
    whole = copy.deepcopy(model)
    program = captured(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.float32)
    program = passes.sync_batch_norm(passes.replicate(program, [0, 1]))
    x, y = batch(7, 1, torch.float32)
    with runtime.Session(passes.emit(program), program.state) as session:
        loss = session.step(x, y)
    torch.testing.assert_close(loss, F.cross_entropy(whole(x), y).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("stm", "no module of program 'normed' is named by 'stm'"),
        (["stem", "norm"], "is named by 'norm'"),
        (["**", "!stm"], "no module of program 'normed' is named by 'stm'"),
        (3, "modules: expected a list, not 3"),
    ],
)
def test_bad_modules_are_refused(modules: Any, message: str) -> None:
    with pytest.raises(PassError, match=message):
        passes.sync_batch_norm(standard(), modules)


def test_a_program_without_replicas_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"program 'normed' is not replicated: .*\n  fix  run replicate before sync_batch_norm"
    ):
        passes.sync_batch_norm(captured(Normed().double()))


def test_other_operators_are_refused() -> None:
    program = standard()
    ops = [
        op._replace(type="aten.cudnn_batch_norm.default") if op.outputs[0] == "gpu_1/rows" else op
        for op in program.step.ops
    ]
    odd = program.with_(step=program.step.with_(ops=tuple(ops)))
    with pytest.raises(
        PassError, match=r"sync_batch_norm does not convert aten\.cudnn_batch_norm\.default(.|\n)*'rows'"
    ):
        passes.sync_batch_norm(odd)


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_replicas_without_rows_are_left_out(executor: Any) -> None:
    """The others' statistics are the batch's. A replica without rows takes the update, and its buffers stay."""
    torch.manual_seed(0)
    model = Normed().double()
    whole = copy.deepcopy(model)
    program = passes.sync_batch_norm(replicated(3, model))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    with runtime.Session(passes.emit(program), program.state, executor=executor) as session:
        for seed, size in enumerate((6, 2, 4, 5)):  # shares 2, 2, 2; 1, 1; 2, 2; 2, 2, 1
            x, y = batch(size, seed)
            loss = session.step(x, y)
            optimizer.zero_grad()
            expected = F.cross_entropy(whole(x), y)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        states = [session.state_dict(replica=r) for r in range(3)]
    close(states[0], dict(whole.state_dict()))
    differing = [name for name, value in states[0].items() if not torch.equal(value, states[2][name])]
    assert differing and all("running" in name or "num_batches" in name for name in differing)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_one_row_in_all_is_refused() -> None:
    """As torch refuses it, for a batch norm over rows."""
    program = passes.sync_batch_norm(standard())
    with (
        runtime.Session(passes.emit(program), program.state) as session,
        pytest.raises(
            graphir.CoverageError,
            match="Expected more than 1 value per channel when training: all replicas have one row",
        ),
    ):
        session.step(*batch(1))


def test_modules_that_say_so_need_no_pass() -> None:
    class Whole(nn.BatchNorm1d):
        statistics_over_replicas = True

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(126, 5), Whole(5), nn.BatchNorm1d(5)).double()
    program = replicated(2, model)
    assert program.history == ("replicate{devices=[0, 1]}", 'sync_batch_norm{modules=["2"]}')
    assert {op.module for op in program.step.ops if op.type == FORWARD} == {"2"}
    trained(passes.sync_batch_norm(program), copy.deepcopy(model), [6, 5])


def test_a_sharded_program_is_synchronised_where_it_is_replicated() -> None:
    """A placed module has the whole batch already."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(126, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.BatchNorm1d(5)
    ).double()
    whole = copy.deepcopy(model)
    program = passes.shard(captured(model, torch.optim.SGD(model.parameters(), lr=0.1)), {"2": "gpu:1"}, [0, 1])
    program = passes.sync_batch_norm(program)
    assert {op.module for op in program.step.ops if op.type == FORWARD} == {"4"}
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    with runtime.Session(passes.emit(program), program.state) as session:
        for seed, size in enumerate((6, 5)):
            x, y = batch(size, seed)
            session.step(x, y)
            reference.zero_grad()
            F.cross_entropy(whole(x), y).backward()
            reference.step()
        close(session.state_dict(), dict(whole.state_dict()))


def test_norms_that_say_so_are_synchronised_where_a_sharded_program_is_replicated() -> None:
    class Whole(nn.BatchNorm1d):
        statistics_over_replicas = True

    model = nn.Sequential(nn.Flatten(), nn.Linear(126, 6), Whole(6), nn.Linear(6, 5), Whole(5), nn.BatchNorm1d(5))
    program = passes.shard(captured(model.double(), torch.optim.SGD(model.parameters(), lr=0.1)), {"2": 1}, [0, 1])
    assert program.history[1:] == ('sync_batch_norm{modules=["2", "4"]}',)
    assert {op.module for op in program.step.ops if op.type == FORWARD} == {"4"}


class Alone(nn.Module):
    """A model without modules that calls batch_norm itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True) * x


def test_a_model_without_modules_is_synchronised() -> None:
    x = torch.randn(7, 3, dtype=torch.float64)
    program = passes.replicate(graphir.capture(Alone().train(), (x[:4],)), [0, 1])
    plan = passes.emit(passes.inject_copies(passes.sync_batch_norm(program)))
    with graphir.runtime.Session(plan, program.state, binding="cpu") as session:
        torch.testing.assert_close(session.step(x), Alone()(x), rtol=1e-9, atol=1e-9)


def test_without_parameters_sums_are_weighted_as_the_replicas_were_made() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    captured = graphir.capture(nn.BatchNorm1d(3, affine=False), (x,), backward=True)
    for reduction, weighted in (("mean", 2), ("sum", 0)):
        program = passes.sync_batch_norm(passes.replicate(captured, [0, 1], reduction=reduction))
        reductions = [op for op in program.step.ops if op.type == "AllReduce" and op.phase == "backward"]
        assert (len(reductions), sum("reduction" in op.args for op in reductions)) == (2, weighted)


def test_a_norm_that_asks_and_does_not_run_asks_nothing() -> None:
    class Norm(nn.BatchNorm1d):
        statistics_over_replicas = True

    model = nn.Sequential(nn.Linear(3, 3))
    model.unused = Norm(3, affine=False, track_running_stats=False)
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    program = graphir.capture(model, (torch.randn(4, 3),))
    assert len(passes.replicate(program, [0, 1]).replicas) == 2
