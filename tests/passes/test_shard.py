"""passes.shard: what is placed, what crosses, under which names, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graphir
from graphir import Program, passes, runtime
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss
from graphir.errors import PassError
from graphir.ir.blob import dense_nbytes
from graphir.ir.names import prefix_of

CONFIG = Config()


@cache
def captured(config: Config = CONFIG, optimizer: Any = torch.optim.SGD, rows: int = 4, **options: Any) -> Program:
    torch.manual_seed(0)
    model = Dlrm(config)
    batch = clicks(config, rows, 0)
    held = optimizer(model.parameters(), lr=0.1) if optimizer else None
    options = {"batch_dims": batch_dims(config), **options}
    return graphir.capture(model, batch.inputs, targets=(batch.target,), loss=loss, optimizer=held, **options)


def sharded(placement: Mapping[str, Any], devices: Any = (0, 1), config: Config = CONFIG, **options: Any) -> Program:
    return passes.inject_copies(passes.shard(captured(config, **options), placement, devices))


def test_names_are_those_of_dlrm() -> None:
    program = sharded({"emb_l.*": "round_robin"})
    blobs = program.step.blobs
    assert (blobs["gpu_0/emb_l.0_split_1"].storage, blobs["gpu_0/emb_l.0_split_1"].device) == ("gpu_0/emb_l.0", "gpu:0")
    assert (blobs["gpu_1/emb_l.0_split_1"].storage, blobs["gpu_1/emb_l.0_split_1"].device) == (
        "gpu_1/emb_l.0_split_1",
        "gpu:1",
    )
    assert str(blobs["gpu_0/emb_l.0"].shape) == str((blobs["gpu_0/emb_l.0"].shape or ())[:2])
    assert [str(size) for size in blobs["gpu_0/emb_l.0"].shape or ()] == ["gpu_0/batch+gpu_1/batch", "4"]
    assert program.step.gradients["gpu_0/emb_l.0"] == "gpu_0/emb_l.0_grad"
    assert program.step.gradients["gpu_1/emb_l.0_split_1"] == "gpu_1/emb_l.0_split_1_grad"
    assert blobs["gpu_0/emb_l.0_split_1_grad"].device == "gpu:0"


def test_shares_divide_the_batch_of_all_replicas() -> None:
    given, placement = captured(), {"emb_l.*": "round_robin"}
    program = passes.shard(given, placement, [0, 1], shares=[6, 2])
    assert (program.dims["gpu_0/batch"], program.dims["gpu_1/batch"], program.shares) == (6, 2, (3, 1))
    assert program.history[0].endswith("devices=[0, 1], shares=[3, 1]}")
    assert passes.shard(given, placement, [0, 1], shares=[4, 4]) == passes.shard(given, placement, [0, 1])
    again = passes.replicate(passes.shard(given, placement, [0, 1]), devices=[0, 1], shares=[6, 2])
    assert again.with_(history=program.history) == program
    with pytest.raises(PassError, match="shard: shares: 3 shares for 2 devices"):
        passes.shard(given, placement, [0, 1], shares=[3, 1, 1])


def test_placed_modules_are_once() -> None:
    program = sharded({"emb_l.0": 1, "emb_l.1": "gpu:0", "emb_l.2": 1})
    for i, prefix in enumerate(("gpu_1/", "gpu_0/", "gpu_1/")):
        assert {prefix_of(name) for name in program.step.blobs if f"/emb_l.{i}.weight" in name} == {prefix}
        assert program.interface.placed[f"emb_l.{i}.weight"] == (prefix,)
        assert program.interface.placed[f"indices.{i}"] == (prefix,)
    reduced = {name for op in program.step.ops if op.type == "AllReduce" for name in op.inputs}
    assert reduced and not [name for name in reduced if "emb_l" in name]


@pytest.mark.parametrize(
    ("placement", "homes"),
    [
        ({"emb_l.*": "round_robin"}, [0, 1, 2, 0, 1]),
        ({"emb_l.*": "balanced"}, [1, 0, 2, 2, 1]),
        ({"emb_l.1": 2, "emb_l[0:1]": 0, "emb_l[2:5]": "balanced"}, [0, 2, 1, 1, 0]),
        ({"emb_l": 1}, [1] * 5),
    ],
)
def test_where_modules_go(placement: Mapping[str, Any], homes: list[int]) -> None:
    """Balanced, the tables of 50, 40, 30, 20 and 10 rows."""
    program = sharded(placement, (0, 1, 2), Config(tables=(40, 50, 30, 20, 10)))
    assert [program.step.blobs[program.blob_of(f"emb_l.{i}.weight")].device.index for i in range(5)] == homes


def test_every_element_crosses_once_and_its_gradient_once() -> None:
    devices, rows, width = (0, 1, 2), 4, CONFIG.bottom[-1]
    program = sharded({"emb_l.*": "round_robin"}, devices)
    copies = [op for op in program.step.ops if op.type == "Copy"]
    piece = rows * width * 4
    assert len(copies) == 2 * len(CONFIG.tables) * (len(devices) - 1)
    assert {dense_nbytes(program.step.blobs[op.inputs[0]], program.dims) for op in copies} == {piece}
    assert graphir.traffic(program).nbytes == len(copies) * piece
    assert all(program.step.blobs[op.outputs[0]].strides is None for op in copies), "no gaps cross, nor are allocated"


def test_tables_come_before_the_bottom_mlp() -> None:
    ops = sharded({"emb_l.*": "round_robin"}).step.ops
    first = next(i for i, op in enumerate(ops) if op.module.startswith("bot_l"))
    assert [op.type for op in ops[:first] if op.type == "Copy"] == ["Copy"] * len(CONFIG.tables)


def test_pieces_of_all_tables_are_waited_for_together() -> None:
    """The number of waits does not grow with the number of tables."""
    waits = []
    for tables in (4, 12):
        config = Config(bottom=(4, 8, 8, 4), tables=(50,) * tables)
        plan = passes.emit(sharded({"emb_l.*": "round_robin"}, config=config))
        waits.append(sum(i.kind == "wait" for i in plan.instructions))
    assert waits[0] == waits[1]


def test_placed_modules_go_back_behind_the_replicas() -> None:
    """Their gradients' pieces are ready to be copied before the bottom MLP's backward begins."""
    ops = sharded({"emb_l.*": "round_robin"}).step.ops
    backward = [i for i, op in enumerate(ops) if op.phase == "backward"]
    bottom = [i for i in backward if ops[i].module.startswith("bot_l")]
    tables = [i for i in backward if ops[i].module.startswith("emb_l")]
    ready = [i for i in backward if ops[i].type == "graphir.scale"]
    assert len(ready) == len(CONFIG.tables) * 2
    assert max(ready) < min(bottom) < max(bottom) < min(tables)


class Counting(nn.Module):
    """A table that overwrites its buffers between reads of them, once more in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)
        self.register_buffer("count", torch.ones(()))
        self.count: torch.Tensor

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        before = self.table(i) * self.count.clone()
        self.count.add_(1)
        return before + self.table(i) * self.count.clone()


class Between(nn.Module):
    """Replicated layers before and behind a placed module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.counting, self.layer = Counting(), nn.Linear(4, 4)

    def forward(self, i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        first = self.layer(x + self.counting(i))
        return self.layer(first * self.counting(i)).sum(1)


def test_operators_that_overwrite_state_keep_their_order() -> None:
    torch.manual_seed(0)
    model = Between()
    i, x, y = torch.randint(20, (6,)), torch.randn(6, 4), torch.randn(6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    program = graphir.capture(model, (i[:3], x[:3]), targets=(y[:3],), loss=nn.functional.mse_loss, optimizer=optimizer)
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"counting": 1}, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        for _ in range(4):
            ours = session.step(i, x, y)
            theirs = nn.functional.mse_loss(model(i, x), y)
            optimizer.zero_grad()
            theirs.backward()
            optimizer.step()
            assert torch.allclose(ours, theirs.detach(), rtol=1e-5)
        assert session.state_dict()["counting.count"] == model.counting.count == 9


class Attention(nn.Module):
    """A table whose rows the replicas look at through views."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.score = nn.Embedding(30, 4), nn.Linear(8, 1)

    def forward(self, history: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        seen, new = self.items(history), self.items(item)
        beside = new[:, None].expand_as(seen)
        weights = self.score(torch.cat([seen, beside], -1)).softmax(1)
        return (weights * seen.transpose(0, 1).transpose(0, 1)).sum(1).sum(1)


def test_views_of_pieces_are_made_again_of_what_has_crossed() -> None:
    torch.manual_seed(0)
    model = Attention()
    history, item, target = torch.randint(30, (5, 3)), torch.randint(30, (5,)), torch.randn(5)
    program = graphir.capture(model, (history, item), targets=(target,), loss=nn.functional.mse_loss)
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"items": 1}, [0, 1])))
    nn.functional.mse_loss(model(history, item), target).backward()
    with runtime.Session(plan, program.state, binding="cpu") as session:
        session.step(history, item, target)
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert torch.allclose(session.gradients()[name], param.grad, rtol=1e-4, atol=1e-6), name


def test_joined_rows_have_a_name_of_their_own() -> None:
    """Not that of a module of the model."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a_joined, self.placed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.a(x)
            return self.placed(hidden) + self.a_joined(hidden)  # type: ignore[no-any-return]

    program = passes.shard(graphir.capture(Two(), (torch.randn(4, 4),)), {"placed": 0}, [0, 1])
    assert {"gpu_0/a_joined", "gpu_0/a_joined_1"} <= program.step.blobs.keys()


def test_one_device() -> None:
    program = sharded({"emb_l.*": "balanced"}, [3])
    assert program.replicas == ("gpu_3/",)
    assert not [op for op in program.step.ops if op.type in ("Copy", "AllReduce", "aten.split_with_sizes.default")]


def test_the_text_and_files_keep_what_is_placed(tmp_path: Path) -> None:
    program = sharded({"emb_l.*": "round_robin"})
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json")
    assert graphir.load(tmp_path / "p.json") == program
    assert (
        passes.Pipeline(program.history[0])(captured()).step
        == passes.shard(captured(), {"emb_l.*": "round_robin"}, [0, 1]).step
    )


def test_state_has_every_name_once_and_goes_anywhere() -> None:
    """From two devices to three, to none, and on."""
    program, batch = captured(optimizer=torch.optim.Adagrad), clicks(CONFIG, 8, 1)
    plans = [
        passes.emit(passes.inject_copies(passes.shard(program, {"emb_l.*": "round_robin"}, [0, 1]))),
        passes.emit(passes.inject_copies(passes.shard(program, {"emb_l.*": "balanced"}, [0, 1, 2]))),
        passes.emit(program),
    ]
    state: Any = program.state
    for plan in (*plans, *plans):
        with runtime.Session(plan, state, binding="cpu") as session:
            names = session.state_dict().keys()
            assert list(names) == list(program.interface.module_state)
            assert all(list(session.state_dict(r)) == list(names) for r in range(len(plan.program.replicas)))
            assert program.state.keys() <= session.state().keys()
            model = Dlrm(CONFIG)
            model.load_state_dict(session.state_dict())
            optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
            optimizer.load_state_dict(session.optimizer_state_dict())
            ours = session.step(*batch.inputs, batch.target)
            theirs = loss(model(*batch.inputs), batch.target)
            assert torch.allclose(ours, theirs.detach(), rtol=1e-5)
            theirs.backward()
            optimizer.step()
            for name, value in model.state_dict().items():
                assert torch.allclose(session.state_dict()[name], value, rtol=1e-4, atol=1e-6), name
            session.load_state_dict(model.state_dict())
            state = session.state()


def test_gradients_are_handed_back_without_an_optimizer() -> None:
    program = sharded({"emb_l.*": "round_robin"}, optimizer=None)
    batch = clicks(CONFIG, 7, 1)
    torch.manual_seed(0)
    model = Dlrm(CONFIG)
    loss(model(*batch.inputs), batch.target).backward()
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        session.step(*batch.inputs, batch.target)
        for replica in (0, 1):
            found = session.gradients(replica)
            assert found.keys() == dict(model.named_parameters()).keys()
            for name, param in model.named_parameters():
                assert param.grad is not None
                assert torch.allclose(found[name], param.grad, rtol=1e-4, atol=1e-7), name


def test_an_added_up_loss_and_its_gradients_are_those_of_a_sum() -> None:
    def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy(out, target, reduction="sum")

    torch.manual_seed(0)
    model, batch = Dlrm(CONFIG), clicks(CONFIG, 7, 1)
    first = clicks(CONFIG, 4, 0)
    program = graphir.capture(model, first.inputs, targets=(first.target,), loss=summed, batch_dims=batch_dims(CONFIG))
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"emb_l.*": 1, "top_l": 0}, [0, 1], reduction="sum")))
    whole = summed(model(*batch.inputs), batch.target)
    whole.backward()
    with runtime.Session(plan, program.state, binding="cpu") as session:
        assert torch.allclose(session.step(*batch.inputs, batch.target), whole.detach(), rtol=1e-5)
        for name, param in model.named_parameters():
            assert param.grad is not None
            assert torch.allclose(session.gradients()[name], param.grad, rtol=1e-4, atol=1e-6), name


def test_inference_gathers_the_outputs_of_all_shares() -> None:
    torch.manual_seed(0)
    model, batch = Dlrm(CONFIG), clicks(CONFIG, 9, 1)
    first = clicks(CONFIG, 4, 0)
    program = graphir.capture(model, first.inputs, batch_dims=(batch_dims(CONFIG)[0], {}, ()))
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"emb_l.*": "round_robin"}, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session, torch.no_grad():
        assert torch.allclose(session.step(*batch.inputs), model(*batch.inputs), rtol=1e-5)


def test_a_model_of_placed_inputs_alone() -> None:
    """Nothing replicated reads an input: the shares follow from what is placed."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.top = nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 2)

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.top(self.table(indices))  # type: ignore[no-any-return]

    model, x = Bags(), torch.randint(9, (4, 3))
    program = graphir.capture(model, (x,))
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"table": 1}, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session, torch.no_grad():
        x = torch.randint(9, (7, 3))
        assert torch.allclose(session.step(x), model(x), rtol=1e-5)


def test_tables_move_on_and_storage_is_shared() -> None:
    """To devices of their own, with no more bytes than the exchange has to send."""
    program = passes.shard(captured(), {"emb_l.*": "round_robin"}, [0, 1])
    moved = passes.shift_modules(program, {"emb_l.0": 2, "emb_l.1": 3})
    placed = passes.share_storage(passes.inject_copies(moved))
    assert graphir.certify(program, placed).holds
    sent = [op for op in placed.step.ops if op.type == "Copy"]
    piece = 4 * CONFIG.bottom[-1] * 4
    assert sum(dense_nbytes(placed.step.blobs[op.inputs[0]], placed.dims) for op in sent) <= (4 + 4 + 2) * piece
    batch = clicks(CONFIG, 8, 1)
    with (
        runtime.Session(passes.emit(passes.inject_copies(program)), program.state, binding="cpu") as a,
        runtime.Session(passes.emit(placed), program.state, binding="cpu") as b,
    ):
        assert torch.equal(a.step(*batch.inputs, batch.target), b.step(*batch.inputs, batch.target))


def test_what_a_module_reads_goes_where_it_is_moved_to() -> None:
    """Straight from the replicas: nothing stops where the module was."""
    program = passes.shard(captured(), {"top_l": 1, "emb_l.*": 0}, [0, 1])
    moved = passes.inject_copies(passes.shift_modules(program, {"top_l": 2}))
    assert graphir.certify(program, moved).holds
    blobs = moved.step.blobs
    made = {name for op in moved.step.ops if op.type == "Copy" for name in op.outputs}
    again = [op.inputs[0] for op in moved.step.ops if op.type == "Copy" and blobs[op.inputs[0]].storage in made]
    assert not again


def test_tables_of_100_gb_are_planned_without_memory() -> None:
    config = Config(tables=(200_000_000,) * 4, bottom=(64, 32))
    with torch.device("meta"):
        model = Dlrm(config)
    batch = clicks(CONFIG._replace(tables=(9,) * 4), 4, 0)
    program = graphir.capture(
        model, batch.inputs, targets=(batch.target,), loss=loss, batch_dims=batch_dims(config),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )  # fmt: skip
    memory = graphir.memory(passes.inject_copies(passes.shard(program, {"emb_l.*": "balanced"}, [0, 1])))
    assert {device.index: peak // 10**9 for device, peak in memory.peak.items() if device.kind == "gpu"} == {
        0: 102,
        1: 102,
    }


# Refusals


class Tied(nn.Module):
    """An embedding whose weight is that of a linear layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))  # type: ignore[no-any-return]


def test_a_tied_parameter_is_refused() -> None:
    program = graphir.capture(Tied(), (torch.randint(7, (4,)),), loss=lambda out: out.sum())
    with pytest.raises(PassError, match=r"param 'embed\.weight' of placed module 'embed' is one of 'head', too"):
        passes.shard(program, {"embed": 0}, [0, 1])


def test_outputs_without_the_batch_are_refused() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.top = Mean(), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.top(x) + self.mean(x).sum()  # type: ignore[no-any-return]

    program = graphir.capture(Net(), (torch.randn(4, 3),), loss=lambda out: out.sum())
    with pytest.raises(
        PassError, match=r"module 'mean' is placed and hands 'mean' on to '', which not: of shape \[3\]"
    ):
        passes.shard(program, {"mean": 0}, [0, 1])


def test_lookups_that_count_as_rows_are_refused_unless_placed() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.other = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.other(x) + self.bag(indices, offsets)  # type: ignore[no-any-return]

    batch = torch.randn(8, 3), torch.randint(9, (8,)), torch.arange(8)
    program = graphir.capture(Bags(), batch, loss=lambda out: out.sum())
    with pytest.raises(PassError, match=r"module 'bag' is not placed, and its offsets 'offsets' .* 'indices' too") as e:
        passes.shard(program, {"other": 0}, [0, 1])
    assert "batch_dims" in e.value.fix
    passes.shard(program, {"bag": 0}, [0, 1])


class Counted(nn.Module):
    """A table whose offsets are counted from lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode="sum")

    def forward(self, indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.bag(indices, lengths.cumsum(0) - lengths)  # type: ignore[no-any-return]


class BesideCounted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counted, self.other = Counted(), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.other(x) + self.counted(indices, lengths)  # type: ignore[no-any-return]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ({"other": 0}, "module 'counted.bag' is not placed, and its offsets 'lengths' would be split along the batch"),
        (
            {"counted.bag": 0},
            "module 'counted' is not placed, and computes 'counted.sub' for the offsets of 'counted.bag', which is",
        ),
        (
            {"counted.bag": ("rows", [0, 1])},
            "module 'counted' is not placed, and computes 'counted.sub' for the offsets of 'counted.bag.rows_0'",
        ),
    ],
)
def test_offsets_are_not_counted_by_replicas(placement: Any, message: str, grad: bool) -> None:
    lengths = torch.tensor([3, 0, 2, 1])
    batch = torch.randn(4, 3), torch.randint(9, (6,)), lengths
    model, dims = BesideCounted(), (({0: "batch"}, {0: "lookups"}, {0: "batch"}), {}, ())
    with torch.set_grad_enabled(grad):
        program = graphir.capture(model, batch, batch_dims=dims)
        with pytest.raises(PassError, match=message):
            passes.shard(program, placement, [0, 1])
        plan = passes.emit(passes.inject_copies(passes.shard(program, {"counted": 1}, [0, 1])))
        with runtime.Session(plan, program.state, binding="cpu") as session:
            assert torch.allclose(session.step(*batch), model(*batch))


class Doubling(Counted):
    """One whose offsets are on 2**60 ways computed of the lengths."""

    def forward(self, indices: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        nothing = lengths * 0
        for _ in range(60):
            nothing = nothing + nothing
        return super().forward(indices, lengths + nothing)


def test_every_operator_on_the_way_to_offsets_is_looked_at_once() -> None:
    lengths = torch.tensor([3, 0, 2, 1])
    model, dims = BesideCounted(), (({0: "batch"}, {0: "lookups"}, {0: "batch"}), {}, ())
    model.counted = Doubling()
    program = graphir.capture(model, (torch.randn(4, 3), torch.randint(9, (6,)), lengths), batch_dims=dims)
    assert passes.shard(program, {"counted": 1}, [0, 1]).interface.placed["counted.bag.weight"] == ("gpu_1/",)


@pytest.mark.parametrize("lookups", [1, 3])
def test_bags_of_one_size_may_be_replicated(lookups: int) -> None:
    """Their offsets are made for each share."""

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.other = nn.EmbeddingBag(9, 4, mode="sum"), nn.Linear(3, 4)

        def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return self.other(x) + self.bag(indices)  # type: ignore[no-any-return]

    model = Bags()
    batch = torch.randn(8, 3), torch.randint(9, (8, lookups))
    program = graphir.capture(model, batch)
    plan = passes.emit(passes.inject_copies(passes.shard(program, {"other": 0}, [0, 1])))
    with runtime.Session(plan, program.state, binding="cpu") as session:
        assert torch.allclose(session.step(*batch), model(*batch))


def test_tables_on_the_host_have_the_bits_of_tables_on_a_gpu() -> None:
    program = sharded({"emb_l": "cpu", "emb_l.0": 1})
    peer = sharded({"emb_l": 0, "emb_l.0": 1})
    hosted = {name for name, blob in program.step.blobs.items() if blob.device == "cpu:0" and blob.role == "param"}
    assert hosted == {f"gpu_0/emb_l.{i}.weight" for i in range(1, len(CONFIG.tables))}
    assert program.interface.placed == peer.interface.placed
    assert graphir.certify(peer, program).holds
    found = []
    for made in (peer, program):
        with runtime.Session(passes.emit(made), made.state, binding="cpu") as session:
            losses = [session.step(*clicks(CONFIG, rows, rows)) for rows in (8, 7, 1)]
            found.append([*losses, *session.state_dict().values()])
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))


def test_what_is_on_the_host_takes_no_room_where_tables_are_balanced() -> None:
    program = sharded({"emb_l.*": "balanced", "emb_l.0": "cpu"})
    assert [program.interface.placed[f"emb_l.{i}.weight"] for i in range(3)] == [("gpu_0/",), ("gpu_0/",), ("gpu_1/",)]


@pytest.mark.parametrize(
    ("placement", "devices", "message"),
    [
        ({"emb_x.0": 0}, [0, 1], "no module of program 'dlrm' is named by 'emb_x.0'; did you mean 'emb_l.0'"),
        (
            {"emb_l.0": 2},
            [0, 1],
            "'emb_l.0' cannot be placed on gpu:2: no replica is there\n  fix  devices: gpu:0, gpu:1, cpu:0",
        ),
        ({"emb_l.0": "evenly"}, [0, 1], "placement.emb_l.0: 'evenly' is not a device"),
        ({"emb*": 0, "em*": 1}, [0, 1], "module 'emb_l' is named by two patterns that are equally close"),
        ({"emb_l.0": 0}, [], "devices: no devices\n  fix  give at least one"),
        ({"emb_l.0": 0}, [0, 0], "devices: device 0 is given more than once"),
        ({"loss": 0}, [0, 1], "the loss cannot be placed"),
        ({"emb_l.0.weight": 0}, [0, 1], "'emb_l.0.weight' is a parameter of module 'emb_l.0'"),
        (["emb_l.0"], [0, 1], "placement: expected a dict"),
    ],
)
def test_what_cannot_be_placed_is_refused(placement: Any, devices: Any, message: str) -> None:
    program = captured()
    before = str(program)
    with pytest.raises(PassError, match=message.replace("[", r"\[")):
        passes.shard(program, placement, devices)
    assert str(program) == before


def test_programs_that_are_spread_already_are_refused() -> None:
    program = captured()
    with pytest.raises(PassError, match="is replicated already"):
        passes.shard(passes.replicate(program, [0, 1]), {"emb_l.0": 0}, [0, 1])
    with pytest.raises(PassError, match=r"is placed already: .*\n  fix  run shard before shift_modules"):
        passes.shard(passes.shift_modules(program, {"top_l": 1}), {"emb_l.0": 0}, [0, 1])


def test_a_session_refuses_shares_that_do_not_fit() -> None:
    program = sharded({"emb_l.*": "round_robin"})
    batch, other = clicks(CONFIG, 8, 1), clicks(CONFIG, 7, 2)
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        with pytest.raises(graphir.SessionError, match=r"has 8 rows, argument 2\[0\] \('offsets\.0'\) 7"):
            session.step(batch.dense, batch.indices, other.offsets, batch.target)
        none = [batch.dense[:0], [indices[:0] for indices in batch.indices], [table[:0] for table in batch.offsets]]
        with pytest.raises(graphir.SessionError, match="has 0 rows along dimension 0, too few for 2 replicas"):
            session.step(*none, batch.target[:0])
