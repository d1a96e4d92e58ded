"""The adversarial executor gives the reference's bits on sound plans, and finds what is wrong with the others."""

from itertools import product

import models
import nets
import pytest
import torch
from graphir.runtime import Session, check
from graphir.runtime.executors.adversarial import Adversarial
from graphir.runtime.executors.reference import Interpretation
from interleaving import happens_before
from runnable import captured, forward_plan, setting_of, sgd, spread

from graphir import passes
from graphir.errors import PlanError, SessionError
from graphir.ir.operator import PURE
from graphir.ir.plan import Event, Instruction

HERE, THERE, COPIES = "gpu:0.compute", "gpu:1.compute", "gpu:1.copy_in"
X = torch.tensor([1.0, -2.0])


def executor_of(plan, seed=0, **state):
    names = [feed.blob for feed in plan.program.interface.feeds]
    return Adversarial(setting_of(plan, *names, **state), seed=seed)


def run(plan, steps=3, **state):
    executor = executor_of(plan, **state)
    return [executor.run({}, (X,), step) for step in range(steps)]


def two_lanes():
    return forward_plan(
        """
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.relu(x)
        b : f32[2] @gpu:1 = Copy(a)
        c : f32[2] @gpu:1 = aten.neg(b)
        """,
        "x",
        output="c",
    )


def without(plan, kind, lane):
    kept = [i for i in plan.instructions if (i.kind, i.lane) != (kind, lane)]
    assert len(kept) == len(plan.instructions) - 1
    return plan.with_(instructions=tuple(kept))


def assert_agree(plan, state, batches, seed=0):
    with (
        Session(plan, state, executor="reference", threads=1) as a,
        Session(plan, state, executor="adversarial", threads=1, seed=seed) as b,
    ):
        for batch in batches:
            assert torch.equal(a.step(*batch).nan_to_num(), b.step(*batch).nan_to_num())
        for replica in range(len(plan.program.replicas)):
            ours, theirs = a.state(replica), b.state(replica)
            assert all(torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()) for name in ours)


@pytest.mark.parametrize("place", [lambda p: p, spread], ids=["one", "spread"])
@pytest.mark.parametrize("seed", range(4))
def test_random_programs_give_the_references_bits(seed, place):
    program = nets.random_program(seed)
    plan = passes.emit(place(program))
    batches = [nets.example_inputs(program, seed=step, batch=(12, 7)[step % 2]) for step in range(len(plan.lanes))]
    assert_agree(plan, program.state, batches, seed)


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_models_give_the_references_bits(name):
    example = {"resnet": lambda: models.resnet(dropout=0.3), "gpt": models.gpt}[name]()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    batch = [torch.cat([t] * 2) for t in (*example.inputs, *example.targets)]
    assert_agree(plan, program.state, [batch] * 3)


def test_a_sound_plan_runs():
    assert [output.tolist() for (output,) in run(two_lanes())] == [[-1, 0]] * 3


def test_a_missing_wait_is_found():
    message = r"version 0 of 'a' is read before it is made\n  at .*: copy b : f32\[2\] @gpu:1 <- a\n"
    with pytest.raises(PlanError, match=message):
        run(without(two_lanes(), "wait", COPIES))


def test_a_free_that_waits_for_nobody_is_found():
    message = (
        r"'a' is read after its storage 'a' was freed\n"
        r"  at   \d gpu:1.copy_in: copy b .*, after \d+ gpu:0.compute: free a\n  in .* step \d"
    )
    with pytest.raises(PlanError, match=message):
        run(without(two_lanes(), "wait", HERE))


def test_a_free_that_may_come_first_is_found():
    plan = two_lanes()
    free = Instruction("free", THERE, storage="a")
    kept = [i for i in plan.instructions if i != free._replace(lane=HERE) and (i.kind, i.lane) != ("wait", HERE)]
    with pytest.raises(PlanError, match=r"storage 'a' is freed before it is made\n  at   \d+ gpu:1.compute: free a\n"):
        run(plan.with_(instructions=(kept[0], free, *kept[1:])))


def test_a_write_that_waits_for_no_reader_is_found():
    plan = forward_plan(
        """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        b : f32[2] @gpu:1 = Copy(s)
        s;1 = aten.add_.Tensor(s, x) {writes=[0:0]}
        """,
        "x",
        output="b",
        state={"s": X},
    )
    message = (
        r"version 0 of 's' is read after its storage 's' was overwritten\n  at .*copy b.*, after .*run buffer s;1 "
    )
    with pytest.raises(PlanError, match=message):
        run(without(plan, "wait", HERE), s=X.clone())


def test_a_wait_that_nothing_satisfies_is_a_deadlock():
    plan = two_lanes()
    wait = Instruction("wait", HERE, event=Event("b", 0, COPIES))
    message = r"a deadlock.*\n  at   gpu:0.compute: wait b by gpu:1.copy_in; gpu:1.copy_in: wait a by gpu:0.compute; gp"
    with pytest.raises(PlanError, match=message):
        run(plan.with_(instructions=(wait, *plan.instructions)))


def unknown_views(plan, name):
    """The plan with a view that it takes for a tensor of its own."""
    step = plan.step
    ops = [op._replace(effects=PURE) for op in step.ops]
    blobs = {**step.blobs, name: step.blobs[name]._replace(storage=name)}
    return plan.with_(program=plan.program.with_(step=step.with_(ops=tuple(ops), blobs=blobs)))


def test_freed_memory_that_an_unknown_view_sees_is_nan(monkeypatch):
    plan = forward_plan(
        """
        input x : f32[2] @gpu:0
        a : f32[2] @gpu:0 = aten.relu(x)
        v : f32[2] in a @gpu:0 = aten.view(a, size=[2]) {views=[0:0]}
        b : f32[2] @gpu:0 = aten.neg(v)
        """,
        "x",
        output="b",
    )
    plan = unknown_views(plan, "v")
    free = Instruction("free", HERE, storage="a")
    by_op = {i.op: i for i in plan.instructions if i.op >= 0}
    early = plan.with_(instructions=(by_op[0], by_op[1], free, by_op[2]))
    with pytest.raises(PlanError, match=r"aten.view.default returns 'v' in the memory of what it reads"):
        run(early, 1)
    monkeypatch.setattr(Interpretation, "check_fresh", lambda *_: None)
    (output,) = run(early, 1)[0]
    assert output.isnan().all()


def one_buffer(change="aten.neg(x_gpu_1)"):
    """``y`` is copied to where ``x`` was, as soon as that is no longer needed."""
    chain = [f"b{i} : f32[2] @gpu:1 = aten.neg(b{i - 1})" for i in range(1, 9)]
    body = ["input x : f32[2] @gpu:0", "input y : f32[2] @gpu:0", "x_gpu_1 : f32[2] @gpu:1 = Copy(x)"]
    body += [f"b0 : f32[2] @gpu:1 = {change}", *chain, "y_gpu_1 : f32[2] @gpu:1 = Copy(y)"]
    body += ["c : f32[2] @gpu:1 = aten.add.Tensor(y_gpu_1, b8)"]
    plan = forward_plan("\n".join(body), "x", "y", output="c")
    assert plan.buffers == {"x_gpu_1": 0, "y_gpu_1": 0}
    return plan


def test_copies_take_turns_in_a_receive_buffer_from_step_to_step():
    plan = one_buffer()
    executor = executor_of(plan)
    outputs = [executor.run({}, (X, 3 * X), step)[0].tolist() for step in range(5)]
    assert outputs == [[2, -4]] * 5
    assert [*executor.buffers] == [("gpu:1", 0)]


def test_a_buffer_that_is_filled_again_without_a_wait_is_found_by_check_and_by_running():
    plan = without(one_buffer(), "wait", COPIES)
    (finding,) = check(plan)
    assert (finding.kind, finding.storage) == ("buffer reuse", "x_gpu_1")
    message = (
        r"'x_gpu_1' is read after the receive buffer of its storage 'x_gpu_1' was filled again\n"
        r"  at   \d+ gpu:1.compute: run b0 .*, after \d+ gpu:1.copy_in: copy y_gpu_1 .* <- y\n"
    )
    with pytest.raises(PlanError, match=message):
        executor = executor_of(plan)
        for step in range(3):
            executor.run({}, (X, 3 * X), step)


def test_copies_of_two_lanes_into_one_buffer_are_found_in_either_order():
    plan = forward_plan(
        """
        input x : f32[2] @gpu:0
        input y : f32[2] @gpu:1
        x_cpu : f32[2] @cpu = Copy(x)
        a : f32[2] @cpu = aten.neg(x_cpu)
        y_cpu : f32[2] @cpu = Copy(y)
        c : f32[2] @cpu = aten.add.Tensor(a, y_cpu)
        """,
        "x",
        "y",
        output="c",
    ).with_(buffers={"x_cpu": 0, "y_cpu": 0})
    assert {finding.kind for finding in check(plan)} == {"buffer reuse"}
    found = set()
    for seed in range(20):
        try:
            executor_of(plan, seed).run({}, (X, X), 0)
        except PlanError as e:
            found.add(e.what)
    assert found == {
        "the receive buffer of 'x_cpu' is filled when it already holds 'y_cpu', which comes later",
        "'x_cpu' is read after the receive buffer of its storage 'x_cpu' was filled again",
    }


def test_a_buffers_next_content_is_seen_by_an_unknown_view(monkeypatch):
    monkeypatch.setattr(Interpretation, "check_fresh", lambda *_: None)
    plan = forward_plan(
        """
        input x : f32[2] @gpu:0
        input y : f32[2] @gpu:0
        x_gpu_1 : f32[2] @gpu:1 = Copy(x)
        v : f32[2] in x_gpu_1 @gpu:1 = aten.view(x_gpu_1, size=[2]) {views=[0:0]}
        y_gpu_1 : f32[2] @gpu:1 = Copy(y)
        c : f32[2] @gpu:1 = aten.add.Tensor(v, y_gpu_1)
        """,
        "x",
        "y",
        output="c",
    ).with_(buffers={"x_gpu_1": 0, "y_gpu_1": 0})
    executor = executor_of(unknown_views(plan, "v"))
    by_op = {i.op: position for position, i in enumerate(plan.instructions) if i.op >= 0}
    interpretation = executor.interpretation({}, (X, 3 * X), 0)
    for op in range(4):
        interpretation.execute(by_op[op])
    assert interpretation.outputs()[0].tolist() == [6, -12]


def test_arguments_of_a_step_are_not_overwritten():
    x = torch.tensor([1.0, -2.0])
    plan = two_lanes()
    executor_of(plan).run({}, (x,), 0)
    assert any(i.kind == "free" and i.storage == "x" for i in plan.instructions)
    assert x.tolist() == [1, -2]


def interleavings(plan, seed, steps):
    executor = executor_of(plan, seed)
    return [list(executor.order(step)) for step in range(steps)]


def test_equal_seeds_give_equal_interleavings():
    plan = passes.emit(spread(nets.random_program(1)))
    assert interleavings(plan, 1, 4) == interleavings(plan, 1, 4)
    assert len({str(found) for seed in (1, 2) for found in interleavings(plan, seed, 8)}) == 16


@pytest.mark.parametrize("seed", range(3))
def test_unordered_instructions_come_in_both_orders_and_others_in_theirs(seed):
    plan = passes.emit(spread(nets.random_program(seed, ops=16)))
    before = happens_before(plan)
    found = interleavings(plan, seed, len(plan.lanes))
    places = [{position: place for place, position in enumerate(order)} for order in found]
    assert all(sorted(place) == list(range(len(plan.instructions))) for place in places)
    for a, b in product(range(len(plan.instructions)), repeat=2):
        firsts = {place[a] < place[b] for place in places}
        assert firsts == ({True} if a in before[b] else {False} if a == b or b in before[a] else {True, False})


@pytest.mark.parametrize("executor, seed", [("threads", 1), ("auto", 0), ("adversarial", 1.5)])
def test_a_seed_is_a_number_for_the_adversarial_executor(executor, seed):
    with pytest.raises(SessionError, match=r"seed=.*: a whole number, for the adversarial executor only\n"):
        Session(two_lanes(), {}, executor=executor, seed=seed)
