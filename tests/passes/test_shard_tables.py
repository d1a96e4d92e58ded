"""passes.shard with rows and columns: what is in parts, what crosses, how state is handed over, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tables import OPTIMIZERS, Bags, Sequences, Weighted, batch_of, captured
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss
from graphir.errors import PassError, SessionError, VerifyError
from graphir.ir.blob import dense_nbytes
from graphir.ir.parts import Parts

KINDS = ("rows", "columns")


@cache
def of_bags() -> Program:
    torch.manual_seed(0)
    return program_of(Bags())


def program_of(model: nn.Module | None = None, optimizer: str | None = "adagrad", **options: Any) -> Program:
    if model is None and optimizer == "adagrad" and not options:
        return of_bags()
    torch.manual_seed(0)
    model = Bags() if model is None else model
    return captured(model, OPTIMIZERS[optimizer](model.parameters()) if optimizer else None, **options)


def split(kind: str, devices: Any = (0, 1), over: Any = None, program: Program | None = None) -> Program:
    program = program_of() if program is None else program
    return passes.inject_copies(passes.shard(program, {"table": (kind, over or devices)}, devices))


def session_of(program: Program, state: Any = None, **options: Any) -> runtime.Session:
    return runtime.Session(passes.emit(program), program.state if state is None else state, binding="cpu", **options)


# What is in parts


def test_rows_are_in_blocks_of_equal_size_but_the_last() -> None:
    program = split("rows", (0, 1, 2))
    shapes = {f"gpu_{k}/table.rows_{k}.weight": (rows, 8) for k, rows in enumerate((8, 8, 7))}
    assert {name: program.step.blobs[name].shape for name in shapes} == shapes
    assert {name: program.step.blobs[name].device.index for name in shapes} == dict(zip(shapes, range(3), strict=True))
    assert program.interface.parts["table.weight"] == Parts(0, tuple(f"table.rows_{k}.weight" for k in range(3)))
    assert program.interface.parts["table.weight.step"].dim is None
    loads = {op.outputs[0]: dict(op.args) for op in program.init.ops if "table" in op.outputs[0]}
    assert loads["gpu_0/table.rows_0.weight"] == {"key": "table.weight", "dim": 0}
    assert loads["gpu_2/table.rows_2.weight"] == {"key": "table.weight", "dim": 0, "first": 16}
    assert loads["gpu_2/table.rows_2.weight.step"] == {"key": "table.weight.step"}


def test_columns_are_in_blocks_of_equal_size_but_the_last() -> None:
    program = split("columns", (3, 1), (1, 3))
    blobs = program.step.blobs
    assert blobs["gpu_1/table.columns_0.weight"].shape == blobs["gpu_3/table.columns_1.weight"].shape == (23, 4)
    assert blobs["gpu_3/table.columns_1.weight.sum"].device == "gpu:3"
    assert program.interface.parts["table.weight.sum"].dim == 1


def test_several_tables_each_in_its_own_way() -> None:
    config = Config(tables=(7, 11, 5))
    torch.manual_seed(0)
    model, batch = Dlrm(config), clicks(config, 4, 0)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"targets": (batch.target,), "loss": loss, "optimizer": held, "batch_dims": batch_dims(config)}
    program = graphir.capture(model, batch.inputs, **options)
    placement = {"emb_l.0": ("rows", [1, 0]), "emb_l.1": ("columns", ["gpu:0", "gpu:1"]), "emb_l.2": "balanced"}
    found = passes.inject_copies(passes.shard(program, placement, [0, 1]))
    modules = {each.module: each.device.index for each in graphir.placed(found).modules}
    assert modules == {"emb_l.0.rows_0": 1, "emb_l.0.rows_1": 0, "emb_l.1.columns_0": 0, "emb_l.1.columns_1": 1,
                       "emb_l.2": 0}  # fmt: skip
    again = passes.Pipeline(found.history[0])(program)
    assert again.history == found.history[:1]
    assert "emb_l.0: [rows, [1, 0]]" in found.history[0]
    batch = clicks(config, 9, 1)
    with session_of(found) as session:
        ours = session.step(*batch.inputs, batch.target)
        whole = loss(model(*batch.inputs), batch.target)
        whole.backward()
        held.step()
        assert torch.allclose(ours, whole.detach(), rtol=1e-5)
        for name, value in model.state_dict().items():
            assert torch.allclose(session.state_dict()[name], value, rtol=1e-4, atol=1e-6), name


def test_a_pattern_splits_every_table_that_it_names() -> None:
    config = Config()
    model, batch = Dlrm(config), clicks(config, 4, 0)
    program = graphir.capture(model, batch.inputs, batch_dims=(batch_dims(config)[0], {}, ()))
    found = passes.shard(program, {"emb_l.*": ("columns", [0, 1])}, [0, 1])
    assert [each.module for each in graphir.placed(found).modules] == [
        f"emb_l.{table}.columns_{block}" for table in range(3) for block in range(2)
    ]


def test_one_block_is_the_table() -> None:
    program = program_of()
    found = passes.shard(program, {"table": ("rows", [1])}, [0, 1])
    assert found.step == passes.shard(program, {"table": 1}, [0, 1]).step
    assert not found.interface.parts


# What crosses


@pytest.mark.parametrize(("kind", "width"), [("rows", 8), ("columns", 4)])
def test_each_replica_gets_its_rows_of_each_block_once_and_sends_their_gradients_once(kind: str, width: int) -> None:
    program = split(kind)
    blobs = program.step.blobs
    moved = [op for op in program.step.ops if op.type == "Copy" and op.by == "shard"]
    assert {dense_nbytes(blobs[op.inputs[0]], program.dims) for op in moved} == {4 * width * 4}
    assert len(moved) == 4
    assert all(blobs[op.outputs[0]].strides is None for op in moved), "no gaps cross, nor are allocated"
    assert sum(each.sent for each in graphir.placed(program).modules) == 4 * 4 * width * 4
    scaled = [op.inputs[0] for op in program.step.ops if op.type == "graphir.scale"]
    assert len(scaled) == len(set(scaled)), "a share of the gradient is scaled once, for all blocks"


def test_a_block_looks_up_its_own_rows_alone() -> None:
    program = split("rows", (0, 1, 2))
    kinds = [op.type for op in program.step.ops if op.module.startswith("table.rows_")]
    assert kinds.count("graphir.block_embedding_bag") == 3
    assert not [kind for kind in kinds if kind.startswith("aten._embedding_bag")]
    sizes = [blob.shape for name, blob in program.step.blobs.items() if "table" in name and blob.role == "gradient"]
    assert (23, 8) not in sizes, "nothing has the size of the table"


def test_columns_are_those_of_the_table_to_the_bit() -> None:
    """Losses and state after steps are those of the table on one device."""
    for model in (Bags(mode="max"), Bags(mode="sum"), Sequences(), Sequences(sparse=True)):
        program = program_of(model)
        plans = [
            split("columns", (0, 1), program=program),
            passes.inject_copies(passes.shard(program, {"table": 0}, [0, 1])),
        ]
        ours, theirs = map(session_of, plans)
        with ours, theirs:
            for step in range(4):
                batch = batch_of(model, 9, step + 1)
                assert torch.equal(*(s.step(*batch.inputs, batch.target) for s in (ours, theirs)))
            states = ours.state(), theirs.state()
            assert states[0].keys() == states[1].keys()
            assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_executor_gives_the_same_bits(kind: str) -> None:
    program = split(kind, (0, 1, 2), program=program_of(Weighted(), "adam"))
    batch = batch_of(Weighted(), 10, 1)
    found = []
    for executor in ("reference", "serial", "threads", "adversarial"):
        with session_of(program, executor=executor) as session:
            losses = [session.step(*batch.inputs, batch.target) for _ in range(3)]
            found.append([*losses, *session.state_dict().values()])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


# State


def test_state_goes_from_any_split_to_any_other() -> None:
    torch.manual_seed(0)
    model = Bags(mode="mean")
    program = program_of(model)
    subjects = [
        split("rows", (0, 1), program=program),
        split("columns", (0, 1, 2), program=program),
        program,
        split("rows", (0, 1, 2, 3), program=program),
        passes.inject_copies(passes.shard(program, {"table": 1}, [0, 1])),
        split("columns", (0, 1), program=program),
    ]
    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    state: Any = program.state
    for step, subject in enumerate(subjects):
        with session_of(subject, state) as session:
            assert list(session.state_dict()) == list(program.interface.module_state)
            assert program.state.keys() <= session.state().keys()
            assert {name for name in session.state() if "rows_" in name or "columns_" in name} == set()
            batch = batch_of(model, 12, step + 1)
            ours = session.step(*batch.inputs, batch.target)
            optimizer.zero_grad()
            whole = nn.functional.mse_loss(model(*batch.inputs), batch.target)
            whole.backward()
            optimizer.step()
            assert torch.allclose(ours, whole.detach(), rtol=1e-5)
            for replica in range(len(subject.replicas)):
                for name, value in model.state_dict().items():
                    assert torch.allclose(session.state_dict(replica)[name], value, rtol=1e-4, atol=1e-6), name
            again = OPTIMIZERS["adagrad"](model.parameters())
            again.load_state_dict(session.optimizer_state_dict(len(subject.replicas) - 1))
            kept = again.state[model.table.weight]
            assert kept["sum"].shape == (23, 8) and float(kept["step"]) == step + 1
            session.load_state_dict(model.state_dict())
            assert torch.equal(session.state_dict()["table.weight"], model.table.weight)
            state = session.state()


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_texts_keep_parts(kind: str, tmp_path: Path) -> None:
    program = split(kind)
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json", state=True)
    loaded = graphir.load(tmp_path / "p.json")
    assert loaded == program and loaded.interface.parts == program.interface.parts
    assert torch.equal(loaded.state["table.weight"], program.state["table.weight"])
    plan = passes.emit(program)
    plan.save(tmp_path / "plan.json")
    assert graphir.load(tmp_path / "plan.json") == plan
    assert graphir.parse(str(plan)) == plan


def test_the_text_says_which_blobs_a_name_lives_in() -> None:
    text = str(split("rows"))
    assert "    parts table.weight dim 0 : table.rows_0.weight, table.rows_1.weight\n" in text
    assert "    parts table.weight.step : table.rows_0.weight.step, table.rows_1.weight.step\n" in text
    assert 'gpu_1/table.rows_1.weight : f32[11,8] @gpu:1 = graphir.load(key="table.weight", dim=0, first=12)' in text


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_shape_is_refused_by_the_whole_one(kind: str) -> None:
    program = split(kind)
    state = {**program.state, "table.weight": torch.zeros(12, 8)}
    with pytest.raises(
        SessionError, match=r"'table.weight' in the state has shape \[12, 8\], the program takes \[23, 8\]"
    ):
        session_of(program, state)
    with session_of(program) as session:
        before = session.state_dict()
        wrong = {**before, "table.weight": torch.zeros(23, 4)}
        with pytest.raises(SessionError, match=r"has shape \[23, 4\], the program takes \[23, 8\]"):
            session.load_state_dict(wrong)
        assert all(torch.equal(session.state_dict()[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_handed_back_whole(kind: str) -> None:
    model = Bags()
    program = split(kind, (0, 1, 2), (2, 0, 1), program_of(model, None))
    batch = batch_of(model, 8, 1)
    nn.functional.mse_loss(model(*batch.inputs), batch.target).backward()
    with session_of(program) as session:
        session.step(*batch.inputs, batch.target)
        for replica in range(3):
            found = session.gradients(replica)
            assert found.keys() == dict(model.named_parameters()).keys()
            for name, param in model.named_parameters():
                assert param.grad is not None
                assert torch.allclose(found[name], param.grad, rtol=1e-4, atol=1e-7), name


@pytest.mark.parametrize("kind", KINDS)
def test_inference(kind: str) -> None:
    torch.manual_seed(0)
    model = Bags(mode="mean").eval()
    first, batch = batch_of(model, 4, 0), batch_of(model, 9, 1)
    dims = ({0: "batch"}, {0: "lookups"}, {0: "batch"}), {}, ()
    program = graphir.capture(model, first.inputs, batch_dims=dims)
    with session_of(split(kind, program=program)) as session, torch.no_grad():
        assert torch.allclose(session.step(*batch.inputs), model(*batch.inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_beside_training_reads_its_blocks(kind: str) -> None:
    torch.manual_seed(0)
    model = Bags()
    training = split(kind, program=program_of(model))
    forward = graphir.capture(
        model, batch_of(model, 4, 0).inputs, batch_dims=(({0: "batch"}, {0: "n"}, {0: "batch"}), {}, ())
    )
    evaluation, batch = split(kind, program=forward), batch_of(model, 8, 1)
    with session_of(training) as session:
        with session_of(evaluation, beside=session) as beside:
            session.step(*batch.inputs, batch.target)
            model.load_state_dict(beside.state_dict())
            with torch.no_grad():
                assert torch.allclose(beside.step(*batch.inputs), model(*batch.inputs), rtol=1e-5, atol=1e-6)
            assert beside.state()["table.weight.sum"].shape == (23, 8)
        other = split("columns" if kind == "rows" else "rows", program=forward)
        with pytest.raises(SessionError, match=r"'table.weight' lives in other parts than in the session beside"):
            session_of(other, beside=session)


def test_an_overflow_in_one_block_makes_every_device_skip() -> None:
    model = Bags(6, 4, mode="sum")
    program = split("rows", (0, 1, 2), program=program_of(model, "sgd", loss_scale=torch.amp.GradScaler("cpu")))
    batch = batch_of(model, 6, 1)
    dense, (indices, offsets) = batch.dense, batch.lookups
    state = {**program.state, "table.weight": torch.full((6, 4), 1e38)}
    with session_of(program, state) as session:
        before = session.state_dict()
        session.step(dense, indices.clamp(max=1), offsets, batch.target * 1e38)
        assert all(torch.equal(session.state_dict(r)[name], before[name]) for r in range(3) for name in before)
        assert session.loss_scaler_state_dict()["scale"] == 2.0**15


@pytest.mark.parametrize("model", [Bags, Sequences])
def test_an_index_beyond_the_table_is_refused(model: Callable[[], nn.Module]) -> None:
    program = split("rows", program=program_of(model()))
    batch = batch_of(model(), 8, 1)
    for index in (23, -1):
        batch.lookups[0].view(-1)[0] = index
        refusal = pytest.raises(graphir.RunError, match=f"the index {index} is out of bounds for 23")
        with session_of(program) as session, refusal:
            session.step(*batch.inputs, batch.target)


# Planning, and what composes


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_100_gb_is_planned_without_memory(kind: str) -> None:
    with torch.device("meta"):
        model = Bags(400_000_000, 64)
    torch.manual_seed(0)
    batch = batch_of(Bags(), 4, 0)
    options: Mapping[str, Any] = {"targets": (batch.target,), "loss": nn.functional.mse_loss}
    dims = ({0: "batch"}, {0: "lookups"}, {0: "batch"}), {}, ({0: "batch"},)
    held = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, batch.inputs, optimizer=held, batch_dims=dims, **options)
    found = split(kind, (0, 1, 2, 3), program=program)
    held_bytes = graphir.placed(found)
    assert {device.index: nbytes for device, nbytes in held_bytes.held.items()} == dict.fromkeys(
        range(4), 25_600_000_000
    )
    assert held_bytes.imbalance == 1.0
    assert {
        device.index: peak // 10**9 for device, peak in graphir.memory(found).peak.items() if device.kind == "gpu"
    } == (
        dict.fromkeys(range(4), 51)  # a block and its gradient
    )
    assert "copies added" in str(graphir.diff(program, found))
    assert graphir.traffic(found).nbytes < 10**5


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_moves_on_and_storage_is_shared(kind: str) -> None:
    program = passes.shard(program_of(), {"table": (kind, [0, 1])}, [0, 1])
    moved = passes.share_storage(passes.inject_copies(passes.shift_modules(program, {f"table.{kind}_1": 2})))
    assert moved.step.blobs[f"gpu_1/table.{kind}_1.weight.sum"].device == "gpu:2"
    assert graphir.certify(program, moved).holds
    model = Bags()
    batch = batch_of(model, 8, 1)
    with session_of(passes.inject_copies(program)) as a, session_of(moved) as b:
        assert torch.equal(a.step(*batch.inputs, batch.target), b.step(*batch.inputs, batch.target))
        assert torch.equal(a.state_dict()["table.weight"], b.state_dict()["table.weight"])


def test_programs_whose_parts_are_other_places_are_not_certified() -> None:
    """Both are sound; in one the blocks have changed places."""
    program = split("rows", program=program_of(Bags(24)))
    parts = {name: found._replace(blobs=found.blobs[::-1]) for name, found in program.interface.parts.items()}
    ops = [
        op._replace(args={"key": op.args["key"], "dim": 0, **({} if op.args.get("first") else {"first": 12})})
        if "dim" in op.args
        else op
        for op in program.init.ops
    ]
    other = program.with_(init=program.init.with_(ops=tuple(ops)), interface=replace(program.interface, parts=parts))
    graphir.verify(other)
    with pytest.raises(graphir.EquivalenceError, match="parts of the interface"):
        graphir.certify(program, other)


# What verify says of parts


def _parts(program: Program, **changed: Parts) -> Program:
    parts = {**program.interface.parts, **{name.replace("_", "."): found for name, found in changed.items()}}
    return program.with_(interface=replace(program.interface, parts=parts))


ROWS = ("table.rows_0.weight", "table.rows_1.weight")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Parts(0, ROWS[::-1]), "part 'gpu_1/table.rows_1.weight' is not loaded from its place in 'table.weight'"),
        (Parts(1, ROWS), "do not make up 'table.weight' along dimension 1"),
        (Parts(7, ROWS), "do not make up 'table.weight' along dimension 7"),
        (Parts(0, ()), "the parts of 'table.weight' are not blobs of its own"),
        (Parts(0, (ROWS[0], ROWS[0])), "the parts of 'table.weight' are not blobs of its own"),
        (Parts(0, ROWS[:1]), "'gpu_1/table.rows_1.weight' is loaded from a place in 'table.weight', and is no part"),
        (Parts(0, (*ROWS, "nowhere")), "'gpu_0/nowhere' of the interface is not an external input of step"),
        (Parts(0, ("top.weight", "bottom.weight")), "a part of 'table.weight' is in more than one replica"),
    ],
)
def test_parts_that_do_not_fit_break_an_invariant(found: Parts, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        graphir.verify(_parts(split("rows"), table_weight=found))
    assert message in str(caught.value)


def test_whatever_a_file_says_of_parts_is_refused() -> None:
    program = split("rows")
    interface = program.interface
    right = interface.parts["table.weight"]
    for blobs in ((), ROWS, ROWS[:1], ROWS[::-1], ("", "x"), ("top.weight",), ("table.rows_0.weight.step",) * 2):
        for dim in (None, 0, 1, 2, -1, -5, 2**70):
            parts = Parts(dim, blobs)
            if parts != right:
                wrong = replace(interface, parts={**interface.parts, "table.weight": parts})
                with pytest.raises(VerifyError):
                    graphir.verify(program.with_(interface=wrong))


def test_a_name_that_is_a_blob_does_not_live_in_parts() -> None:
    with pytest.raises(VerifyError, match=r"'top.weight' cannot live in parts: it is a blob"):
        graphir.verify(_parts(split("rows"), top_weight=Parts(0, ROWS)))
    with pytest.raises(VerifyError, match=r"'what' cannot live in parts: it is no name"):
        graphir.verify(_parts(split("rows"), what=Parts(0, ROWS)))


def test_state_in_fewer_parts_than_its_parameter_breaks_an_invariant() -> None:
    program = _parts(split("rows"))
    parts = {**program.interface.parts, "table.weight.step": Parts(None, ("table.rows_0.weight.step",))}
    with pytest.raises(VerifyError, match=r"'table.weight.step' does not live in as many parts as 'table.weight'"):
        graphir.verify(program.with_(interface=replace(program.interface, parts=parts)))


def test_a_state_that_is_no_whole_value_breaks_an_invariant() -> None:
    program = split("rows")
    with pytest.raises(VerifyError, match=r"program.state\['table.weight'\] is float32\[12, 8\], unlike blob"):
        graphir.verify(program.with_(state={**program.state, "table.weight": torch.zeros(12, 8)}))


# Refusals


class Tied(nn.Module):
    """An embedding whose weight is that of a linear layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x))  # type: ignore[no-any-return]


class Penalised(Bags):
    """A table whose norm is part of the model."""

    def forward(self, dense: torch.Tensor, *lookups: torch.Tensor) -> torch.Tensor:
        return super().forward(dense, *lookups) + self.table.weight.square().sum()


def refused(program: Program, placement: Any, devices: Any = (0, 1)) -> str:
    """What the refusal says, and that nothing has changed."""
    before = str(program)
    with pytest.raises(PassError) as caught:
        passes.shard(program, placement, devices)
    assert str(program) == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (("rows", []), "placement.table: no devices\n  fix  give at least one"),
        (("rows", [0, 0]), "placement.table: device 0 is given more than once"),
        (("rows", [0, "cpu"]), "placement.table: cpu:0 is not a gpu"),
        (("rows", ["x"]), "placement.table: 'x' is not a device"),
        (("diagonals", [0, 1]), "placement.table: ('diagonals', [0, 1]) says nowhere to go\n  fix  give a gpu, "),
        (("rows", 0), "placement.table: ('rows', 0) says nowhere to go"),
        (("rows",), "or a kind and gpus: ('rows', [0, 1]) or ('columns', [0, 1])"),
        ("rows", "placement.table: 'rows' is not a device"),
        (("rows", [0, 2]), "'table' cannot be placed on gpu:2: no replica is there\n  fix  devices: gpu:0, gpu:1"),
    ],
)
def test_targets_that_are_none_are_refused(target: Any, message: str) -> None:
    assert message in refused(program_of(), {"table": target})


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (Bags(1), ("rows", [0, 1]), "table 'table' has 1 rows: 1 blocks by torch.chunk's rule, not 2"),
        (Bags(columns=1), ("columns", [0, 1]), "table 'table' has 1 columns: 1 blocks by torch.chunk's rule, not 2"),
        (Bags(mode="max"), ("rows", [0, 1]), "cannot be split by rows: its bags take the maximum"),
        (Sequences(scale_grad_by_freq=True), ("rows", [0, 1]), "cannot be split by rows: it has scale_grad_by_freq"),
        (Bags(scale_grad_by_freq=True), ("rows", [0, 1]), "cannot be split by rows: it has scale_grad_by_freq"),
        (Bags(max_norm=1.0), ("rows", [0, 1]), "cannot be split: it has max_norm, by which lookups change its rows"),
        (Sequences(max_norm=1.0), ("columns", [0, 1]), "cannot be split: it has max_norm"),
        (Penalised(), ("rows", [0, 1]), "cannot be split: its parameter 'table.weight' is "),
    ],
)
def test_tables_that_cannot_be_split_are_refused(model: nn.Module, target: Any, message: str) -> None:
    found = refused(program_of(model), {"table": target})
    assert message in found and "place" in found


def test_five_rows_make_no_four_blocks() -> None:
    devices = [0, 1, 2, 3]
    found = refused(program_of(Bags(5)), {"table": ("rows", devices)}, devices)
    assert "table 'table' has 5 rows: 3 blocks by torch.chunk's rule, not 4" in found
    assert "give at most 3 devices, or place it whole" in found


def test_state_that_cannot_be_split_is_refused() -> None:
    found = refused(program_of(optimizer="row-wise adagrad"), {"table": ("columns", [0, 1])})
    assert (
        "table 'table' cannot be split by columns: its optimizer state 'table.weight.row_sum', of shape [23]" in found
    )
    assert "split it by rows, or place it whole" in found


@pytest.mark.parametrize("module", ["top", "bottom"])
def test_what_is_no_table_is_refused(module: str) -> None:
    found = refused(program_of(), {module: ("rows", [0, 1])})
    assert f"module {module!r} is no embedding table: it has '{module}.weight', '{module}.bias'" in found


def test_what_holds_tables_is_none() -> None:
    program = dlrm()
    assert "module 'emb_l' is no embedding table" in refused(program, {"emb_l": ("rows", [0, 1])})
    assert "no module of program 'dlrm' is named by 'emb_x'" in refused(program, {"emb_x": ("rows", [0, 1])})


@cache
def dlrm() -> Program:
    """A DLRM with three tables, forward alone."""
    config = Config()
    return graphir.capture(Dlrm(config), clicks(config, 4, 0).inputs, batch_dims=(batch_dims(config)[0], {}, ()))


@pytest.mark.parametrize(
    "placement",
    [
        {"emb_l.1": ("rows", [0, 1]), "emb_l.*": "round_robin"},
        {"emb_l.*": ("rows", [0, 1]), "emb_l[0]": 0, "emb_l[2:]": 1},
        {"emb_l[:]": "round_robin", "emb_l.1": ("rows", ["cuda:0", torch.device("cuda:1")])},
    ],
)
def test_of_all_tables_one_is_split(placement: Any) -> None:
    """The split table has no turn among the other ones: the first of these is on gpu:0, the second on gpu:1."""
    step = passes.shard(dlrm(), placement, [0, 1]).step
    homes = {name: blob.device for name, blob in step.blobs.items() if blob.role == "param" and "emb_l" in name}
    assert homes == {
        "gpu_0/emb_l.0.weight": "gpu:0",
        "gpu_0/emb_l.1.rows_0.weight": "gpu:0",
        "gpu_1/emb_l.1.rows_1.weight": "gpu:1",
        "gpu_1/emb_l.2.weight": "gpu:1",
    }


def test_modules_that_are_left_out_are_replicated() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList([nn.Embedding(5, 2) for _ in range(3)])

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.cat([table(words) for table in self.tables], 1)

    program = graphir.capture(Words(), (torch.randint(5, (4,)),), loss=lambda out: out.mean())
    left = passes.shard(program, {"tables.*": "round_robin", "!tables.1": None}, [0, 1])
    assert left.step == passes.shard(program, {"tables.0": 0, "tables.2": 1}, [0, 1]).step
    assert passes.Pipeline(left.history[-1])(program) == left


def test_a_part_of_a_placed_module_goes_elsewhere() -> None:
    inside = passes.shard(dlrm(), {"emb_l": 0, "emb_l.1": 1}, [0, 1])
    assert inside.step == passes.shard(dlrm(), {"emb_l.0": 0, "emb_l.2": 0, "emb_l.1": 1}, [0, 1]).step


def test_a_tied_table_is_refused() -> None:
    program = graphir.capture(Tied(), (torch.randint(7, (4,)),), loss=lambda out: out.mean())
    found = refused(program, {"table": ("columns", [0, 1])})
    assert "table 'table' cannot be split: its parameter 'table.weight' is one of 'head', too" in found
