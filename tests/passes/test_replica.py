"""What callbacks edit: operators of one copy, and where copies meet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.errors import PassError
from graphir.ir.operator import Operator
from graphir.ir.program import Program

Edit = Callable[[passes.Replica, Operator], object]


class Net(nn.Module):
    """A linear layer, a relu, and another one; a buffer that counts steps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu, self.fc2 = nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        out: Tensor = self.fc2(self.relu(self.fc1(x)))
        return out


def forward(replicas: int = 2) -> Program:
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    return passes.replicate(graphir.capture(model, (torch.randn(4, 4),)), list(range(replicas)))


def training(replicas: int = 2) -> Program:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, (torch.randn(4, 4),), loss=lambda out: out.sum(), optimizer=optimizer)
    return passes.replicate(program, list(range(replicas)))


def edited(edit: Edit, path: str = "relu", program: Program | None = None, copies: tuple[int, ...] = (0, 1)) -> Program:
    """The program with *edit* called on the first operator of a module, in these copies."""

    def callback(ctx: object, copy_id: int, replica: passes.Replica) -> None:
        if replica.path == path and copy_id in copies:
            edit(replica, replica.ops[0])

    return passes.replication_callback(forward() if program is None else program, callback)


def run(program: Program, x: Tensor) -> Tensor:
    plan = passes.emit(program)
    assert runtime.check(plan) == []
    with runtime.Session(plan, program.state, executor="threads") as session:
        found: Tensor = session.step(x)
        return found


def eager(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    torch.manual_seed(0)
    model = Net().requires_grad_(False)
    found: Tensor = model.fc2(change(model.fc1(x)))
    return found


X = torch.arange(24.0).reshape(6, 4).sin()


def test_an_operator_is_put_in_before_another() -> None:
    def edit(replica: passes.Replica, relu: Operator) -> None:
        new = replica.insert_before(relu, "aten.mul.Tensor", ["fc1"], {"other": 2.0})
        assert new.outputs == (f"{replica.prefix}relu.mul",)
        assert (new.module, new.device, new.phase, new.of) == ("relu", relu.device, "forward", relu.outputs[0])
        assert str(replica.blobs[new.outputs[0]].shape[0]) == f"{replica.prefix}batch"  # type: ignore[index]
        renamed = replica.rename_inputs(relu, {"fc1": new.outputs[0]})
        assert replica.ops == (new, renamed)

    program = edited(edit)
    assert [op.by for op in program.step.ops if op.module == "relu"] == ["replication_callback"] * 4
    assert torch.equal(run(program, X), eager(X, lambda y: torch.relu(y * 2)))
    assert graphir.parse(str(program)) == program


def test_an_operator_is_put_in_after_another() -> None:
    def edit(replica: passes.Replica, relu: Operator) -> None:
        new = replica.replace(relu, relu.type, ["fc1"], names="relu.plain")
        replica.insert_after(new, "aten.add.Tensor", ["relu.plain", f"{replica.prefix}fc1"], names=["relu"])

    assert torch.equal(run(edited(edit), X), eager(X, lambda y: torch.relu(y) + y))


def test_an_operator_is_replaced() -> None:
    program = edited(lambda replica, relu: replica.replace(relu, "aten.tanh.default", ["fc1"]))
    assert torch.equal(run(program, X), eager(X, torch.tanh))


def test_an_edit_is_of_one_copy() -> None:
    program = edited(lambda replica, relu: replica.replace(relu, "aten.tanh.default", ["fc1"]), copies=(1,))
    expected = torch.cat([eager(X[:3], torch.relu), eager(X[3:], torch.tanh)])
    assert torch.equal(run(program, X), expected)


def test_an_operator_is_taken_out() -> None:
    def edit(replica: passes.Replica, relu: Operator) -> None:
        replica.insert_before(relu, "aten.neg.default", ["fc1"], names="relu.away")
        assert len(replica.ops) == 2
        replica.remove(replica.ops[0])
        assert replica.ops == (relu,)

    assert edited(edit).step == forward().step


def test_a_buffer_s_update_is_taken_out() -> None:
    program = edited(lambda replica, op: replica.remove(op), path="")
    assert not [op for op in program.step.ops if op.effects.writes]
    graphir.verify(program)


def test_a_view_is_put_in() -> None:
    """It lies in its operand's storage, at every size."""

    def edit(replica: passes.Replica, relu: Operator) -> None:
        turned = replica.insert_before(relu, "aten.t.default", ["fc1"])
        back = replica.insert_before(relu, "aten.t.default", [turned.outputs[0]])
        blob = replica.blobs[turned.outputs[0]]
        assert (blob.storage, str(blob.shape[1])) == (f"{replica.prefix}fc1", f"{replica.prefix}batch")  # type: ignore[index]
        replica.rename_inputs(relu, {"fc1": back.outputs[0]})

    assert torch.equal(run(edited(edit), X), eager(X, torch.relu))


def test_lists_of_operands_and_unwanted_results() -> None:
    def edit(replica: passes.Replica, relu: Operator) -> None:
        both = replica.insert_before(relu, "aten.cat.default", [["fc1", "fc1"]], {"dim": 1})
        assert [str(size) for size in replica.blobs[both.outputs[0]].shape or ()] == [f"{replica.prefix}batch", "6"]
        best = replica.insert_before(
            relu, "aten.max.dim", [both.outputs[0]], {"dim": 1, "keepdim": True}, names=["best", None]
        )
        assert best.outputs == (f"{replica.prefix}best",) and best.results == "t_"
        less = replica.insert_before(relu, "aten.sub.Tensor", ["fc1", "best"])
        replica.rename_inputs(relu, {"fc1": less.outputs[0]})

    assert torch.equal(run(edited(edit), X), eager(X, lambda y: torch.relu(y - y.amax(1, keepdim=True))))


def test_copies_meet() -> None:
    """The mean over the whole batch, of each replica's rows."""

    def edit(replica: passes.Replica, relu: Operator) -> None:
        mine = replica.insert_before(relu, "aten.mean.dim", ["fc1"], {"dim": (0,)})
        mean = replica.all_reduce(mine, mine.outputs[0], weighted=True)
        less = replica.insert_after(mine, "aten.sub.Tensor", ["fc1", mean])
        replica.rename_inputs(relu, {"fc1": less.outputs[0]})

    program = edited(edit)
    (reduction,) = [op for op in program.step.ops if op.type == "AllReduce"]
    assert reduction.inputs == ("gpu_0/relu.mean", "gpu_1/relu.mean")
    uneven = X[:5]
    assert torch.allclose(run(program, uneven), eager(uneven, lambda y: torch.relu(y - y.mean(0))), atol=1e-6)


def test_meetings_weigh_as_gradients_are_reduced() -> None:
    def edit(replica: passes.Replica, relu: Operator) -> None:
        replica.all_reduce(relu, "relu", weighted=True)
        replica.all_reduce(relu, "fc1")

    program = edited(edit, program=training())
    by = {op.inputs[0]: op for op in program.step.ops if op.by == "replication_callback"}
    assert by["gpu_0/relu"].args["reduction"] == "mean" and by["gpu_0/fc1"].args == {}
    assert [name for name in by if name.startswith("gpu_0/")] == ["gpu_0/relu", "gpu_0/fc1"], (
        "in the order of the calls"
    )


def test_who_needs_a_meeting_waits_for_the_last_copy() -> None:
    """One copy has operators between, on which the others do not wait."""

    def edit(replica: passes.Replica, relu: Operator) -> None:
        name = relu.outputs[0]
        if replica.copy_id == 0:
            total = replica.all_reduce(relu, name)
            user = replica.insert_after(relu, "aten.neg.default", [total])
            replica.insert_after(user, "aten.abs.default", [user.outputs[0]])
        else:
            new = replica.insert_after(relu, "aten.neg.default", [name])
            replica.all_reduce(new, new.outputs[0])

    program = edited(edit)
    types = [op.type for op in program.step.ops if op.module == "relu"]
    assert types == [
        "aten.relu.default",
        "aten.relu.default",
        "aten.neg.default",
        "AllReduce",
        "aten.neg.default",
        "aten.abs.default",
    ]


def test_the_backward_is_edited_too() -> None:
    """Gradients are scaled where they come to a layer: what they are of stays."""

    def callback(ctx: object, copy_id: int, replica: passes.Replica) -> None:
        for op in replica.ops:
            if op.type == "aten.threshold_backward.default":
                half = replica.insert_before(op, "aten.mul.Tensor", [op.inputs[0]], {"other": 0.5})
                replica.rename_inputs(op, {op.inputs[0]: half.outputs[0]})

    before = training()
    after = passes.replication_callback(before, callback)
    assert after.step.gradients == before.step.gradients
    x = X
    updates = []
    for program in (before, after):
        with runtime.Session(passes.emit(program), program.state) as session:
            session.step(x)
            updates.append(session.state_dict()["fc1.weight"] - program.state["fc1.weight"])
    assert torch.allclose(updates[0], 2 * updates[1], atol=1e-6)


REFUSED: dict[str, tuple[Edit, str]] = {
    "another module's operator": (
        lambda replica, relu: replica.remove(relu._replace(module="fc1")),
        r"aten\.relu\.default -> gpu_0/relu is no operator of copy 0 of module 'relu'",
    ),
    "an operator that was replaced": (
        lambda replica, relu: (replica.replace(relu, "aten.tanh.default", ["fc1"]), replica.remove(relu)),
        "is no operator of copy 0 of module 'relu'\n  in   module 'relu', copy 0\n  fix  give one of replica.ops",
    ),
    "no operator": (lambda replica, relu: replica.remove(None), "None is no operator of copy 0"),  # type: ignore[arg-type]
    "another replica's blob": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["gpu_1/fc1"]),
        r"'gpu_1/fc1' is another replica's, and edits are of 'gpu_0/' alone(.|\n)*copies meet by replica.all_red",
    ),
    "another replica's name": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["fc1"], names="gpu_1/mine"),
        "'gpu_1/mine' is another replica's",
    ),
    "no such blob": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["fc11"]),
        "copy 0 of module 'relu' has no blob 'fc11'",
    ),
    "a blob that is made later": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["fc2"]),
        "'gpu_0/fc2' is not made before 'gpu_0/relu'(.|\n)*fix  put the operator in behind the one that makes it",
    ),
    "an unknown type": (
        lambda replica, relu: replica.insert_before(relu, "aten.reluu.default", ["fc1"]),
        "has no operator 'aten.reluu.default'",
    ),
    "an argument that the type does not take": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["fc1"], {"out": 1}),
        "aten.neg.default has no argument 'out'",
    ),
    "operands that the type does not take": (
        lambda replica, relu: replica.insert_before(relu, "aten.mm.default", ["fc1", "fc1"]),
        "aten.mm.default refuses its operands",
    ),
    "a type that returns a list": (
        lambda replica, relu: replica.insert_before(relu, "aten.split.Tensor", ["fc1"], {"split_size": 1}),
        "aten.split.Tensor returns a list of tensors",
    ),
    "sizes that follow data": (
        lambda replica, relu: replica.insert_before(relu, "aten.nonzero.default", ["fc1"]),
        "what aten.nonzero.default returns is not known without computing it",
    ),
    "sizes that are no polynomials": (
        lambda replica, relu: replica.insert_before(relu, "aten.slice.Tensor", ["fc1"], {"dim": 0, "step": 2}),
        "the results of aten.slice.Tensor are no polynomials of the program's dimensions",
    ),
    "random numbers": (
        lambda replica, relu: replica.insert_before(relu, "aten.bernoulli.p", ["fc1"], {"p": 0.5}),
        "aten.bernoulli.p draws random numbers, for which the step has no seed id",
    ),
    "an operator that overwrites": (
        lambda replica, relu: replica.insert_before(relu, "aten.relu_.default", ["fc1"]),
        "aten.relu_.default overwrites",
    ),
    "a name that is taken": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", ["fc1"], names="relu"),
        "'gpu_0/relu' is made already",
    ),
    "a result of another shape": (
        lambda replica, relu: replica.replace(relu, "aten.t.default", ["fc1"]),
        r"aten.t.default gives f32\[3,gpu_0/batch\] for 'gpu_0/relu', which is f32\[gpu_0/batch,3\]",
    ),
    "what is still read": (
        lambda replica, relu: replica.remove(relu),
        "'gpu_0/relu' is read, and nothing makes it any more(.|\n)*module 'relu', copy 0(.|\n)*let an operator",
    ),
    "an input that it does not read": (
        lambda replica, relu: replica.rename_inputs(relu, {"x": "fc1"}),
        "'gpu_0/relu' does not read 'gpu_0/x'(.|\n)*fix  it reads gpu_0/fc1",
    ),
    "an input of another shape": (
        lambda replica, relu: replica.rename_inputs(relu, {"fc1": "x"}),
        r"aten.relu.default would give f32\[gpu_0/batch,4\] for 'gpu_0/relu'",
    ),
    "a text for a list": (
        lambda replica, relu: replica.insert_before(relu, "aten.neg.default", "fc1"),
        r"inputs are a list of names, not 'fc1'(.|\n)*write \['fc1'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_edits_that_cannot_be_are_refused(case: str) -> None:
    """Where they are made, with the module and the copy."""
    edit, message = REFUSED[case]
    with pytest.raises(PassError, match=message) as caught:
        edited(edit)
    assert caught.value.where == "module 'relu', copy 0"
    assert caught.value.what.startswith(f"callback {__name__}.edited.<locals>.callback")


def test_a_result_that_is_handed_back_stays() -> None:
    def edit(replica: passes.Replica, op: Operator) -> None:
        replica.remove(replica.ops[-1])

    with pytest.raises(PassError, match="'gpu_0/fc2' is handed back, and nothing makes it any more"):
        edited(edit, path="fc2")


def test_what_others_run_beside_stays() -> None:
    def edit(replica: passes.Replica, op: Operator) -> None:
        (relu,) = [op for op in replica.ops if op.type == "aten.relu.default"]
        new = replica.replace(relu, relu.type, ["fc1"], names="other")
        assert new.outputs == ("gpu_0/other",)

    with pytest.raises(PassError, match="'gpu_0/relu' is read, and nothing makes it"):
        edited(edit, program=training(), copies=(0,))


def test_a_write_that_is_read_later_stays() -> None:
    class Twice(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x) + self.steps
            self.steps.add_(1)
            return out

    model = Twice().requires_grad_(False)
    program = passes.replicate(graphir.capture(model, (torch.randn(4, 4),)), [0, 1])
    with pytest.raises(PassError, match="'gpu_0/steps' is overwritten later, and nothing makes it any more"):
        edited(lambda replica, op: replica.remove(op), path="", program=program)


def test_copies_that_do_not_come_are_refused() -> None:
    with pytest.raises(
        PassError,
        match=r"copy 1 of module 'relu' does not come to an all_reduce of 'gpu_0/relu', to which copy 0 comes",
    ):
        edited(lambda replica, relu: replica.all_reduce(relu, "relu"), copies=(0,))


def test_copies_that_bring_other_things_are_refused() -> None:
    def edit(replica: passes.Replica, op: Operator) -> None:
        last = replica.ops[-1]
        replica.all_reduce(last, "fc1" if replica.copy_id else "fc1.bias")

    with pytest.raises(
        PassError, match=r"copy 1 of module 'fc1' brings gpu_1/fc1 : f32\[.*\] to an all_reduce, and copy 0"
    ):
        edited(edit, path="fc1")


def test_copies_that_reduce_in_other_ways_are_refused() -> None:
    with pytest.raises(PassError, match="copies of module 'relu' come to an all_reduce weighted and not"):
        edited(
            lambda replica, relu: replica.all_reduce(relu, "relu", weighted=bool(replica.copy_id)), program=training()
        )


def test_copies_that_wait_for_each_other_are_refused() -> None:
    """Copy 1 brings to a meeting what it computes from its result."""

    def edit(replica: passes.Replica, relu: Operator) -> None:
        new = replica.insert_after(relu, "aten.neg.default", ["relu"])
        total = replica.all_reduce(new, new.outputs[0])
        if replica.copy_id:
            replica.rename_inputs(new, {"relu": total})

    with pytest.raises(
        PassError, match="the copies of module 'relu' wait for each other: one comes to an all_reduce after"
    ):
        edited(edit)


def test_what_is_kept_of_a_replica_edits_nothing_later() -> None:
    kept: list[tuple[passes.Replica, Operator]] = []
    edited(lambda replica, relu: kept.append((replica, relu)))
    replica, relu = kept[0]
    with pytest.raises(PassError, match="the program with copy 0 of module 'relu' is made, and is edited no more"):
        replica.insert_before(relu, "aten.neg.default", ["fc1"])
