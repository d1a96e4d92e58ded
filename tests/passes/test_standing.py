"""What a program is, and the order of passes that follows: refusals before anything is built, and what works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import orders
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError, PlacementError

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = "clipping and GradScaler"


def made(name: str, *steps: str, strip: bool = False) -> Program:
    """A subject's program behind some passes."""
    program: Any = orders.captured(name)
    for step in steps:
        program = orders.run_pass(name, step, orders.stripped(program) if strip else program)
    assert isinstance(program, Program)
    return orders.stripped(program) if strip else program


REFUSED = [
    (["replicate"], "replicate", "is replicated already", "replicate or shard the captured program once"),
    (["shard"], "replicate", "is replicated already", "replicate or shard the captured program once"),
    (["shift_modules"], "shard", "is placed already", "run shard before shift_modules, shift_activations or balance"),
    (["park"], "replicate", "has something parked already", "run replicate before park or balance"),
    (["park state"], "shard", "has something parked already", "run shard before park or balance"),
    (["share_storage"], "replicate", "has operators that overwrite", "run replicate before share_storage"),
    (["share_storage"], "shift_modules", "has operators that overwrite", "run shift_modules before share_storage"),
    (["share_storage"], "shift_activations", "has operators that", "run shift_activations before share_storage"),
    (["share_storage"], "recompute", "has operators that overwrite", "run recompute before share_storage"),
    (["share_storage"], "park", "has operators that overwrite", "run park before share_storage"),
    (["share_storage"], "balance", "has operators that overwrite", "run balance before share_storage"),
    (["park"], "balance", "has something parked already", "run balance before park"),
    (["replicate", "park state"], "balance", "has something parked already", "run balance before park"),
    (
        ["shift_modules", "inject_copies"],
        "balance",
        "has the copies of a placement",
        "run balance before inject_copies",
    ),
    ([], "sync_batch_norm", "is not replicated", "run replicate before sync_batch_norm"),
    ([], "replication_callback", "is not replicated", "run replicate before replication_callback"),
    ([], "pipeline", "has one micro-batch", "capture it with accumulate=4"),
    (["park"], "recompute", "is parked already", "leave one of the two out"),
    (["recompute"], "park", "is computed again already", "leave one of the two out"),
]


@pytest.mark.parametrize("strip", [False, True], ids=["", "stripped"])
@pytest.mark.parametrize(("steps", "late", "what", "fix"), REFUSED, ids=str)
def test_a_pass_is_refused_with_the_right_order(steps: list[str], late: str, what: str, fix: str, strip: bool) -> None:
    """Whoever made the program, and whatever its history says."""
    program = made(PLAIN, *steps, strip=strip)
    with pytest.raises(PassError) as refused:
        orders.run_pass(PLAIN, late, program)
    assert what in refused.value.what and "\n" not in refused.value.what
    assert refused.value.fix.startswith(fix)


def test_micro_batches_need_a_cut_and_its_copies() -> None:
    name = "micro-batches"
    with pytest.raises(PassError, match="all layers of a replica on one device"):
        passes.pipeline(made(name, "replicate"))
    with pytest.raises(PassError, match=r"no copies between its devices.*\n  fix  run inject_copies before pipeline"):
        passes.pipeline(made(name, "shift_modules", strip=True))
    assert passes.pipeline(made(name, "shift_modules", "inject_copies", strip=True))


class Never(passes.Pass):
    name: ClassVar[str] = "never"
    never_behind = {"replicated": "nothing is built"}  # noqa: RUF012

    def rewrite(self, program: Program) -> Program:
        raise AssertionError


def test_the_order_is_asked_before_anything_is_built() -> None:
    for run in (Never(), passes.Pipeline([Never()]), Never().recorded):
        with pytest.raises(PassError, match="never: program 'sequential' is replicated already: nothing is built"):
            run(made(PLAIN, "replicate"))


def test_a_pass_that_asks_for_what_no_program_can_be_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"typo: a program cannot be 'sahred'; did you mean 'shared' .*\n  fix  programs can be"
    ):

        class Typo(passes.Pass):
            name: ClassVar[str] = "typo"
            never_behind = {"sahred": "…"}  # type: ignore[dict-item]  # noqa: RUF012


def test_a_captured_program_that_overwrites_its_input_is_not_shared() -> None:
    """A model's own in-place operators are no ``share_storage``."""

    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            y[0] = 1.0
            return torch.empty_like(y).bernoulli_(0.5).mul_(y.relu_()).add_(1)

    program = graphir.capture(InPlace(), (torch.randn(4, 3),))
    assert passes.shift_activations(program, [], {0: 1}) and passes.replicate(program, [0, 1])


def test_emit_says_once_that_copies_are_missing() -> None:
    with pytest.raises(PlacementError) as refused:
        passes.emit(made(PLAIN, "shift_modules"))
    assert refused.value.what.startswith("19 operands are on other devices than their operators; the first: blob '0'")
    assert refused.value.fix == "run inject_copies before emit"


def test_halves_are_split_before_storages_are_shared() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    joint = graphir.capture(model, (torch.randn(4, 3),), backward=True)
    with pytest.raises(PassError, match=r"\n  fix  run split_backward before share_storage"):
        passes.split_backward(passes.share_storage(joint))


SHIFTS: dict[str, Callable[[Program], Program]] = {
    "modules": lambda program: passes.shift_modules(program, {"1": 2}),
    "activations": lambda program: passes.shift_activations(program, ["1.1"], {0: 2}),
}


@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS)
def test_parked_state_comes_to_where_its_parameter_moves(shift: Callable[[Program], Program]) -> None:
    parked = made(PLAIN, "park state")
    program = passes.inject_copies(shift(parked))
    blobs = program.step.blobs
    moved = {name for name, blob in blobs.items() if blob.role == "param" and blob.device == graphir.Device.parse(2)}
    updates = [op for op in program.step.ops if op.phase == "update" and op.type == "graphir.sgd"]
    assert moved and {op.device for op in updates if moved & {*op.inputs}} == {graphir.Device.parse(2)}
    assert not [op for op in program.step.ops if op.by == "inject_copies" and "momentum" in op.outputs[0]]
    assert graphir.certify(parked, program)
    passes.emit(program)


def test_replicas_are_made_before_modules_go_to_the_host() -> None:
    on_host = passes.inject_copies(passes.shift_modules(made(PLAIN), {"1": "cpu"}))
    for late in ("replicate", "shard"):
        with pytest.raises(PassError, match=f"is placed already: .*\n  fix  run {late} before shift_modules"):
            orders.run_pass(PLAIN, late, on_host)


# Copies that a shift makes needless


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t, self.top = nn.EmbeddingBag(20, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.t(i))
        return out


@pytest.fixture
def bags() -> Program:
    torch.manual_seed(0)
    model = Bags().double()
    return graphir.capture(
        model,
        (torch.randint(20, (4, 3)),),
        targets=(torch.randn(4, 1).double(),),
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


def copies(program: Program) -> list[tuple[str, str]]:
    """The devices of each copy's source and result."""
    blobs = program.step.blobs
    found = [op for op in program.step.ops if op.type == "Copy"]
    return [(str(blobs[op.inputs[0]].device), str(blobs[op.outputs[0]].device)) for op in found]


def test_rows_that_no_longer_cross_are_not_copied(bags: Program) -> None:
    sharded = passes.shard(bags, {"t": 0}, devices=[0, 1])
    assert copies(passes.inject_copies(sharded)) == [("gpu:0", "gpu:1"), ("gpu:1", "gpu:0")]
    together = passes.inject_copies(passes.shift_modules(sharded, {"**": 2}))
    assert copies(together) == []
    assert graphir.certify(sharded, together)
    passes.emit(together)


def test_rows_go_to_their_readers_and_not_by_where_these_were(bags: Program) -> None:
    sharded = passes.shard(bags, {"t": 0}, devices=[0, 1])
    moved = passes.inject_copies(passes.shift_modules(sharded, {"top": {1: 3}}))
    assert copies(moved) == [("gpu:0", "gpu:3"), ("gpu:3", "gpu:0")]
    assert graphir.certify(sharded, moved)


def test_what_is_parked_goes_on_being_copied(bags: Program) -> None:
    parked = passes.park(made(PLAIN), "1", "gpu:1")
    before = copies(parked)
    assert before and copies(passes.inject_copies(parked)) == before


def test_a_second_cut_leaves_no_copy_of_the_first() -> None:
    once = passes.inject_copies(passes.shift_modules(made(PLAIN), {"1": 1}))
    back = passes.inject_copies(passes.shift_modules(once, {"1": 0}))
    assert copies(once) and copies(back) == []


# Synchronised norms


def test_a_block_with_a_synchronised_norm_is_computed_again_in_the_documented_order() -> None:
    program = made("synchronised batch norm", "replicate")
    again = passes.recompute(program, "1")
    types = [op.type for op in again.step.ops if op.by == "recompute"]
    assert types.count("graphir.synchronised_batch_norm") == 2 and "AllReduce" not in types
    assert graphir.certify(program, again)
    ours, theirs = (_trained(p) for p in (again, program))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_what_devices_meet_for_is_kept_where_nothing_else_reads_it_later() -> None:
    """The norm of the first layer: no gradient of its input reads the moments."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    program = graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
    program = passes.sync_batch_norm(passes.replicate(program, [0, 1]))
    assert graphir.certify(program, passes.recompute(program, "[0]"))


def _trained(program: Program) -> dict[str, torch.Tensor]:
    name = "synchronised batch norm"
    with runtime.Session(passes.emit(program), orders.captured(name).state, binding="cpu") as session:
        for seed in range(2):
            session.step(*orders.SUBJECTS[name].batch(8, seed))
        return session.state_dict()


@pytest.fixture
def prefixed() -> Program:
    """A model whose module is called as the blobs of a replica are."""
    torch.manual_seed(0)
    model = nn.Module()
    model.add_module("gpu_1/x", nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model.forward = lambda x: model.get_submodule("gpu_1/x")(x)  # type: ignore[assignment]
    x = torch.randn(4, 4)
    return graphir.capture(model, (x,), targets=(x,), loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters()))


def test_a_norm_of_a_module_that_is_called_like_a_replica_is_synchronised(prefixed: Program) -> None:
    program = passes.sync_batch_norm(passes.replicate(prefixed, [0, 1]))
    assert [op.type for op in program.step.ops].count("graphir.synchronised_batch_norm_backward") == 2
    passes.emit(program)


def test_state_of_a_module_that_is_called_like_a_replica_moves_with_it(prefixed: Program) -> None:
    moved = passes.inject_copies(passes.shift_modules(prefixed, {"gpu_1/x": 1}))
    assert {str(blob.device) for blob in moved.step.blobs.values() if blob.role in ("param", "buffer")} == {"gpu:1"}
