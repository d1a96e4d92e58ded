"""passes.park with update_there: updates that run where their state is parked."""

from __future__ import annotations

import warnings

import models
import parking
import pytest
import torch
from fake_cuda import watched
from runnable import batch_of, captured
from small import program_of

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError

pytestmark = pytest.mark.usefixtures("one_thread")

STATE = ["**.exp_avg", "**.exp_avg_sq"]
PARAMS = ["**.weight", "**.bias"]
LAYER = 128 * 128 * 4
"""Bytes of a layer's weight: the fewest that cross alone."""


def layers() -> models.Example:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(6)]), torch.randn(4, 128)
    return models.Example(model, (x,), (torch.randn(4, 128),), torch.nn.functional.mse_loss)


def with_adam(**options: object) -> Program:
    example = layers()
    return captured(example, torch.optim.AdamW(example.model.parameters()), **options)


def peak(program: Program) -> int:
    return graphir.memory(passes.emit(program), profile=None).peak["gpu:0"]


STEP = """
    param w : f32[128,128] @gpu:0
    param b : f32[128] @gpu:0
    state w.m : f32[128,128] @gpu:0
    state b.m : f32[128] @gpu:0
    input x : f32[128,128] @gpu:0
    input lr : f64[] @cpu:0
    y : f32[128,128] @gpu:0 = aten.addmm(b, x, w)
    output loss : f32[] @gpu:0 = aten.sum(y)
    w_grad : f32[128,128] @gpu:0 = aten.mm(x, y) {phase=backward, of=y}
    b_grad : f32[128] @gpu:0 = aten.sum.dim_IntList(y, dim=[0]) {phase=backward, of=y}
    b;1, b.m;1 = graphir.sgd(b, b_grad, b.m, lr, momentum=0.9) {phase=update}
    w;1, w.m;1 = graphir.sgd(w, w_grad, w.m, lr, momentum=0.9) {phase=update}
"""


def lines(program: Program) -> list[str]:
    """The operators behind the forward, as text without attributes."""
    texts = [line.strip() for line in str(program.step).splitlines()]
    return [text.partition(" {")[0] for text in texts if "phase=backward" in text or "phase=update" in text]


def test_gradients_leave_as_they_are_made_and_what_is_small_crosses_last() -> None:
    program = program_of(STEP)
    parked = passes.park(program, "**.m", "cpu", update_there=True)
    assert lines(passes.inject_copies(parked)) == [
        "w_grad : f32[128,128] @gpu:0 = aten.mm(x, y)",
        "w_grad_cpu : f32[128,128] @cpu:0 = Copy(w_grad)",
        "w_cpu : f32[128,128] @cpu:0 = Copy(w)",
        "b_grad : f32[128] @gpu:0 = aten.sum.dim_IntList(y, dim=[0])",
        "w_cpu;1, w.m;1 = graphir.sgd(w_cpu, w_grad_cpu, w.m, lr, momentum=0.9)",
        "w;1 = Copy(w_cpu;1)",
        "b_cpu : f32[128] @cpu:0 = Copy(b)",
        "b_grad_cpu : f32[128] @cpu:0 = Copy(b_grad)",
        "b_cpu;1, b.m;1 = graphir.sgd(b_cpu, b_grad_cpu, b.m, lr, momentum=0.9)",
        "b;1 = Copy(b_cpu;1)",
    ]
    assert parked.history == ('park{what=["**.m"], to=cpu:0, update_there=true}',)
    assert passes.Pipeline(parked.history[0])(program) == parked


def test_readers_at_home_read_a_parameter_at_home() -> None:
    body = STEP.replace(
        "    b_grad :", "    x_grad : f32[128,128] @gpu:0 = aten.mm(y, w) {phase=backward, of=y}\n    b_grad :"
    )
    made = lines(passes.park(program_of(body), "**.m", "cpu", update_there=True))
    assert made[2:4] == ["w_cpu : f32[128,128] @cpu:0 = Copy(w)", "x_grad : f32[128,128] @gpu:0 = aten.mm(y, w)"]


def test_of_a_part_no_more_than_the_part_crosses() -> None:
    part = "w_grad : f32[128,128] in all @gpu:0 = aten.slice.Tensor(all, start=0, end=128) {phase=backward}"
    body = STEP.replace("w_grad : f32[128,128]", "all : f32[256,128]").replace("mm(x, y)", "cat([x, y])")
    body = body.replace("    b_grad :", f"    {part}\n    b_grad :")
    program = program_of(body)
    made = passes.inject_copies(passes.park(program, "**.m", "cpu", update_there=True))
    there = [op.inputs[0] for op in made.step.ops if op.type == "Copy" and op.device == "cpu:0"]
    assert sorted(there) == ["b", "b_grad", "w", "w_grad"]
    assert graphir.certify(program, made).holds


def test_parameters_that_are_parked_do_not_cross_to_their_update() -> None:
    parked = passes.park(program_of(STEP), ["**.m", "w"], "cpu", update_there=True)
    made = lines(passes.inject_copies(parked))
    assert made[1] == "w_grad_cpu : f32[128,128] @cpu:0 = Copy(w_grad)"
    assert made[3] == "w;1, w.m;1 = graphir.sgd(w, w_grad_cpu, w.m, lr, momentum=0.9)"
    assert len(made) == 8
    assert graphir.certify(program_of(STEP), parked).holds


@pytest.mark.parametrize("to", ["gpu:1", "cpu"])
def test_neither_state_nor_all_gradients_are_on_the_device(to: str) -> None:
    program = with_adam()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all of the state is saved
        made = passes.inject_copies(passes.park(program, STATE, to, update_there=True))
    assert peak(program) - peak(made) > (2 + 0.6) * 6 * LAYER  # the state, and most of the gradients
    assert peak(passes.inject_copies(passes.park(program, [*STATE, *PARAMS], to, update_there=True))) < 5 * LAYER
    found = graphir.certify(program, made)
    assert found.caveats == (
        ("graphir.adamw (12 operators): on the host instead of a gpu, so bits are those of the host's kernels",)
        if to == "cpu"
        else ()
    )
    batches = [(batch_of(layers()), {})] * 2
    parking.assert_runs_the_same(program, made, batches, ["serial", "threads", "adversarial"])
    plan = passes.emit(made)
    with runtime.Session(plan, made.state, binding="cpu", executor="threads") as session:
        with session.measured():
            session.step(*batch_of(layers()))
        devices = {device.device: device for device in session.report().devices}
    assert devices["gpu:0"].peak == devices["gpu:0"].predicted_peak == peak(made)


@pytest.mark.parametrize(
    "options",
    [{"clip_grad_norm": 1.0}, {"loss_scale": torch.amp.GradScaler("cpu"), "clip_grad_norm": 1.0}, {"accumulate": 2}],
    ids=["clipped", "scaled", "accumulated"],
)
def test_what_comes_between_gradients_and_updates(options: dict[str, object]) -> None:
    program = with_adam(**options)
    made = parking.placed(program, passes.park(program, [*STATE, "[0:3].weight"], "cpu", update_there=True))
    assert peak(made) < peak(program) - 2 * 6 * LAYER
    parking.assert_runs_the_same(program, made, [(batch_of(layers()), {})] * 2, ["threads", "adversarial"])


def test_each_replica_updates_where_its_own_state_is() -> None:
    program = passes.replicate(with_adam(), devices=[0, 1])
    made = passes.park(program, STATE, {0: 2, 1: "cpu"}, update_there=True)
    updates = {op.outputs[0].partition("/")[0]: op.device for op in made.step.ops if op.phase == "update"}
    assert updates == {"gpu_0": "gpu:2", "gpu_1": "cpu:0"}
    batch = tuple(torch.cat([given, given]) for given in batch_of(layers()))
    made = parking.placed(program, made)
    parking.assert_runs_the_same(program, made, [(batch, {})] * 2, ["threads", "adversarial"])


def test_sparse_gradients_cross_by_their_rows() -> None:
    torch.manual_seed(0)
    model, i = torch.nn.Sequential(torch.nn.Embedding(512, 64, sparse=True), torch.nn.Linear(64, 4)), torch.arange(8)
    example = models.Example(model, (i,), (torch.zeros(8, 4),), torch.nn.functional.mse_loss)
    program = captured(example, torch.optim.SGD(model.parameters(), lr=0.1))
    made = parking.placed(program, passes.park(program, "[0].weight", "cpu", update_there=True))
    parking.assert_runs_the_same(program, made, [(batch_of(example), {})] * 2, ["threads"])


def test_state_of_the_same_updates_goes_along() -> None:
    program = with_adam()
    one = passes.park(program, STATE[0], "cpu", update_there=True)
    assert one.step == passes.park(program, STATE, "cpu", update_there=True).step


def test_updates_that_depend_on_each_other_keep_their_order() -> None:
    total = "w_sum : f32[128] @gpu:0 = aten.sum.dim_IntList(w.m, dim=[0]) {phase=update}"
    program = program_of(STEP.replace("b_grad, b.m", "w_sum, b.m").replace("b;1, b.m;1", f"{total}\n    b;1, b.m;1"))
    parked = passes.park(program, "**.m", "gpu:1", update_there=True)
    assert graphir.certify(program, passes.inject_copies(parked)).holds
    assert [op.outputs[0] for op in parked.step.ops if op.phase == "update"][:2] == ["w_sum", "b"]


def test_versions_that_a_phase_has_made_before_the_update() -> None:
    twice = "s;1 = aten.add_.Tensor(s, x)\n    s;2 = aten.add_.Tensor(s;1, x)\n    y : "
    body = STEP.replace("input x", "buffer s : f32[128,128] @gpu:0\n    input x").replace("y : ", twice)
    body += "\n    s;3 = aten.add_.Tensor(s;2, w_grad) {phase=update}\n"
    program = program_of(body)
    parked = passes.inject_copies(passes.park(program, "s", "cpu", update_there=True))
    assert graphir.certify(program, parked).holds
    assert lines(parked)[-1].startswith("s;2 = aten.add_.Tensor(s;1, w_grad_cpu)")


def test_traffic_says_why_and_warns_of_nothing() -> None:
    found = graphir.traffic(passes.inject_copies(passes.park(with_adam(), STATE, "cpu", update_there=True)))
    assert {str(reason) for copied in found.copies for reason in copied.reasons} == {"park cpu:0"}
    assert all(copied.reasons for copied in found.copies) and not found.warnings


def test_what_is_read_again_after_the_update_comes_in_again() -> None:
    """As the discriminator of a GAN is, where one step updates it and then the generator."""
    body = STEP.replace("output loss", "loss") + "    output z : f32[128,128] @gpu:0 = aten.mm(x, w;1)\n"
    program = program_of(body)
    parked = passes.inject_copies(passes.park(program, ["**.m", "w"], "cpu", update_there=True))
    assert graphir.certify(program, parked).holds
    assert [str(op.inputs[0]) for op in parked.step.ops if op.type == "Copy" and op.of == "w"] == ["w", "w"]
    assert {name for op in parked.step.ops if op.phase == "update" for name in op.inputs} >= {"w", "w_grad_cpu"}


@pytest.mark.parametrize("rows", [8192, 256])
def test_an_update_on_the_host_takes_no_longer_than_it_must(rows: int) -> None:
    """With many rows the backward hides it; with few rows the host does nothing else, and waits for no copy back."""
    with torch.device("meta"):
        model, x = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]), torch.empty(rows, 2048)
    example = models.Example(model, (x,), (x,), torch.nn.functional.mse_loss)
    program = captured(example, torch.optim.AdamW(model.parameters()))

    def seconds(what: list[str], **options: bool) -> float:
        made = passes.park(program, what, "cpu", **options) if what else program
        return graphir.estimate(passes.emit(passes.inject_copies(made)), topology="h200x8").seconds

    there = seconds(STATE, update_there=True)
    if rows > 1000:
        assert there < 1.1 * seconds([]) < seconds(STATE)
    else:
        assert there < 1.05 * seconds([*STATE, *PARAMS], update_there=True)


def test_updates_on_the_host_beside_gpus() -> None:
    program = with_adam()
    plan = passes.emit(passes.inject_copies(passes.park(program, [*STATE, "[0:3].weight"], "cpu", update_there=True)))
    session, machine = watched(plan, program.state, {"gpu:0": "cuda:0"})
    with session, runtime.Session(plan, program.state, binding="cpu", executor="reference") as reference:
        for _ in range(2):
            assert torch.equal(session.step(*batch_of(layers())), reference.step(*batch_of(layers())))
        mine, its = session.state(), reference.state()
        assert all(torch.equal(mine[name], its[name]) for name in its)
    assert not machine.races


def test_without_an_update_of_what_is_parked_it_is_refused() -> None:
    with pytest.raises(PassError) as refused:
        passes.park(with_adam(), "3", "cpu", update_there=True)
    assert str(refused.value) == (
        "park: update_there moves updates of parked state, and no update uses what is parked\n"
        "  fix  name the optimizer's state, such as '**.exp_avg', or leave update_there out"
    )
