"""passes.shard of a step in micro-batches: in which order placed modules read rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import Program, passes, runtime
from graphir.demo.dlrm import Config, Dlrm, batch_dims, clicks, loss
from graphir.errors import EquivalenceError, PassError
from graphir.ir.names import micro_batch_of
from graphir.ir.size import parse_size

PARTS = 3


class Table(nn.Module):
    """A table below a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.table(x))  # type: ignore[no-any-return]


def mean_of_squares(out: Tensor) -> Tensor:
    return out.square().mean()


def captured(model: nn.Module | None = None, *inputs: Tensor, **options: Any) -> Program:
    torch.manual_seed(0)
    model = model or Table()
    given = inputs or (torch.randint(9, (2 * PARTS,)),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss": mean_of_squares, "optimizer": optimizer, "accumulate": PARTS, **options}
    return graphir.capture(model, given, **options)


def sharded(placement: dict[str, Any] | None = None, devices: Any = (0, 1)) -> Program:
    return passes.inject_copies(passes.shard(captured(), placement or {"table": 1}, devices))


def test_the_order_of_rows_is_in_the_text() -> None:
    """Of each replica's share the micro-batches, then of each micro-batch the rows of all replicas."""
    lines = str(sharded().step).splitlines()
    shown = [line.strip() for line in lines if "by_micro_batch" in line]
    pieces = "gpu_1/x_micro_{}_split_{}".format
    assert shown[0] == (
        "input gpu_1/x_by_micro_batch : i64[3*gpu_0/batch+3*gpu_1/batch] @gpu:1 = aten.cat(["
        + ", ".join(pieces(k, r) for k in range(PARTS) for r in (0, 1))
        + ']) {module="", by=shard}'
    )
    assert shown[2].startswith("gpu_1/micro_1/x : i64[gpu_0/batch+gpu_1/batch] offset gpu_0/batch+gpu_1/batch in ")
    (split,) = [line for line in lines if line.lstrip().startswith(f"[{pieces(0, 0)}")]
    assert "split_sizes=[gpu_0/batch, gpu_0/batch, gpu_0/batch, gpu_1/batch, gpu_1/batch, gpu_1/batch]" in split


def test_one_replica_reads_what_it_is_given() -> None:
    program = sharded({"table": 2}, [2])
    assert not [name for name in program.step.blobs if "by_micro_batch" in name]
    assert [op.type for op in program.step.ops] == [op.type for op in captured().step.ops]


def test_inputs_that_replicas_alone_read_stay() -> None:
    class Two(Table):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    program = captured(Two(), torch.randint(9, (6,)), torch.randn(6, 1))
    blobs = passes.shard(program, {"table": 1}, [0, 1]).step.blobs
    assert [name for name in blobs if "by_micro_batch" in name] == ["gpu_1/x_by_micro_batch"]
    assert blobs["gpu_0/micro_2/scale"].storage == "gpu_0/scale"


def test_placed_modules_come_first_in_their_own_micro_batch() -> None:
    """Not before the first one, where what they hand on of all would be held together."""
    named = [(k, op) for op in sharded().step.ops if (k := micro_batch_of(op.outputs[0])) is not None]
    assert [k for k, _ in named] == sorted(k for k, _ in named)
    for micro in range(PARTS):
        own = [op for k, op in named if k == micro]
        tables, others = ([i for i, op in enumerate(own) if op.module == module] for module in ("table", "top"))
        forward, backward = ([i for i in tables if own[i].phase == phase] for phase in ("forward", "backward"))
        assert max(forward) < min(others) < max(others) < min(backward)


def test_tables_take_the_order_of_rows_along() -> None:
    """No input crosses where a table is moved on."""
    program = passes.shard(captured(), {"table": 1}, [0, 1])
    moved = passes.inject_copies(passes.shift_modules(program, {"table": 2}))
    assert graphir.certify(program, moved).holds
    assert {moved.step.blobs[name].device for name in moved.step.blobs if name.startswith("gpu_1/x")} == {"gpu:2"}
    assert not [op for op in moved.step.ops if op.type == "Copy" and "/x" in op.inputs[0]]


def reordered(program: Program, type: str, a: int, b: int) -> Program:
    """The program whose first operator of a type reads, or makes, two operands in each other's place."""
    ops = list(program.step.ops)
    i = next(i for i, op in enumerate(ops) if op.type == type)
    names = list(ops[i].inputs)
    names[a], names[b] = names[b], names[a]
    ops[i] = ops[i]._replace(inputs=tuple(names))
    return program.with_(step=program.step.with_(ops=tuple(ops)))


@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (1, 2), (2, 3), (0, 5), (4, 5)])
def test_another_order_of_rows_is_another_step(a: int, b: int) -> None:
    """Whoever exchanges two pieces is caught, and rightly so: rows meet others' targets."""
    step = captured(targets=(torch.randn(6, 2),), loss=nn.functional.mse_loss)
    program = passes.inject_copies(passes.shard(step, {"table": 1}, [0, 1]))
    other = reordered(program, "aten.cat.default", a, b)
    with pytest.raises(EquivalenceError):
        graphir.certify(program, other)
    batch, found = (torch.arange(12) % 9, torch.randn(12, 2)), []
    for each in (program, other):
        with runtime.Session(passes.emit(each), step.state, binding="cpu") as session:
            session.step(*batch)
            found.append(session.state_dict()["top.weight"])
    assert not torch.allclose(*found)


# Layouts of inputs


class Images(nn.Module):
    """A placed part that reads sequences, whose rows are second, and images."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.filters = nn.Linear(4, 4), nn.Conv2d(3, 4, 3)

    def forward(self, sequences: Tensor, images: Tensor) -> Tensor:
        return self.cells(sequences.transpose(0, 1)).sum(1) + self.filters(images).mean((2, 3)) + sequences[0]


class OfImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.top = Images(), nn.Linear(4, 1)

    def forward(self, sequences: Tensor, images: Tensor) -> Tensor:
        return self.top(self.inner(sequences, images))  # type: ignore[no-any-return]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda images: images,
    "channels last": lambda images: images.contiguous(memory_format=torch.channels_last),
    "rows innermost": lambda images: images.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "gaps": lambda images: torch.stack([images, images], 2)[:, :, 0],
}


@pytest.mark.parametrize("devices", [[0], [0, 1], [0, 1, 2]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_keep_the_layout_in_which_they_were_captured(layout: str, devices: list[int]) -> None:
    def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        sequences = torch.randn(5, rows, 4, generator=generator, dtype=torch.float64)
        images = torch.randn(rows, 3, 6, 6, generator=generator, dtype=torch.float64)
        return sequences, LAYOUTS[layout](images)

    model = OfImages().double()
    program = captured(model, *batch(6, 0), batch_dims=(({1: "batch"}, {0: "batch"}), {}, ()))
    given = program.step.blobs["images"].strides
    placed = passes.shard(program, {"inner": devices[-1]}, devices)
    assert graphir.parse(str(placed)) == placed
    read = placed.step.blobs[f"gpu_{devices[-1]}/micro_1/images"]
    whole = placed.step.blobs[read.storage].strides
    assert (whole is None) == (given is None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with runtime.Session(passes.emit(passes.inject_copies(placed)), program.state, binding="cpu") as session:
        for step, rows in enumerate((6 * len(devices), 24, 12)):
            given_rows = batch(rows, step + 1)
            ours, theirs = session.step(*given_rows), mean_of_squares(model(*given_rows))
            optimizer.zero_grad()
            theirs.backward()
            optimizer.step()
            assert torch.allclose(ours, theirs.detach(), rtol=1e-10)
        for name, value in model.state_dict().items():
            assert torch.allclose(session.state_dict()[name], value, rtol=1e-9), name


class Doubling(nn.Module):
    """A placed part that writes to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        x[:, 0].add_(1.0)
        return self.inner(x) + x  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [[0], [0, 1], [0, 1, 2]])
def test_inputs_that_are_overwritten(devices: list[int]) -> None:
    model = nn.Sequential(Doubling(), nn.Linear(4, 1)).double()
    program = captured(model, torch.randn(6, 4, dtype=torch.float64))
    placed = passes.inject_copies(passes.shard(program, {"[0]": devices[-1]}, devices))
    with runtime.Session(passes.emit(placed), program.state, binding="cpu", executor="adversarial") as session:
        x = torch.randn(12, 4, dtype=torch.float64)
        assert torch.allclose(session.step(x.clone()), mean_of_squares(model(x.clone())), rtol=1e-10)


# Refusals


def test_rows_that_share_memory_are_refused() -> None:
    def given(seed: int) -> Tensor:
        return torch.randn(6, 1, generator=torch.Generator().manual_seed(seed)).expand(6, 4)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bottom, self.top = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.bottom(x))  # type: ignore[no-any-return]

    program = captured(Two(), given(0))
    with pytest.raises(PassError, match="elements of 'x' share memory, and placed modules read its micro-batches"):
        passes.shard(program, {"bottom": 0}, [0, 1])
    passes.shard(program, {"top": 0}, [0, 1])
    passes.shard(program, {"bottom": 0}, [0])


@cache
def bags_in_parts() -> Program:
    config = Config()
    torch.manual_seed(0)
    model, batch = Dlrm(config), clicks(config, 6, 0)
    return graphir.capture(
        model, batch.inputs, targets=(batch.target,), loss=loss, batch_dims=batch_dims(config), accumulate=PARTS
    )


@pytest.mark.parametrize("target", [1, ("rows", [0, 1]), ("columns", [0, 1])])
def test_bags_whose_offsets_are_cut_are_refused(target: Any) -> None:
    """Their lookups are not cut with them."""
    program = bags_in_parts()
    path = "emb_l.0" if target == 1 else f"emb_l.0.{target[0]}_0"
    with pytest.raises(PassError) as e:
        passes.shard(program, {"emb_l.0": target, "emb_l[1:3]": 0}, [0, 1])
    assert str(e.value) == (
        f"module {path!r} is placed, and its offsets 'offsets.0' are cut into micro-batches, each of which has rows of "
        "several replicas\n"
        "  fix  give each row as many lookups, without offsets: indices of shape [rows, lookups]; or capture without "
        "accumulate"
    )
    with pytest.raises(
        PassError, match=r"module 'emb_l\.0' is not placed, and its offsets 'offsets\.0' would be split"
    ):
        passes.shard(program, {"top_l": 0}, [0, 1])


@pytest.mark.parametrize("rebased", [False, True])
def test_offsets_of_lookups_that_are_cut_are_refused(rebased: bool) -> None:
    """They count from the first row of the batch; in a micro-batch the rows of the replicas are not neighbours."""

    class Rebased(nn.EmbeddingBag):
        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(indices.reshape(-1), offsets - offsets[0] if rebased else offsets)

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.top = Rebased(9, 4, mode="sum"), nn.Linear(4, 1)

        def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
            return self.top(self.bag(indices, offsets))  # type: ignore[no-any-return]

    program = captured(Bags(), torch.randint(9, (6, 2)), torch.arange(0, 12, 2))
    with pytest.raises(PassError, match="module 'bag' is placed, and its offsets 'offsets' are cut into micro-batches"):
        passes.shard(program, {"bag": 0}, [0, 1])
    passes.shard(program, {"bag": 0}, [0])


def test_rows_that_are_no_batches_are_refused() -> None:
    program = captured()
    x = program.step.blobs["x"]._replace(shape=(parse_size("3*batch+1"),))
    step = program.step.with_(blobs={**program.step.blobs, "x": x})
    with pytest.raises(PassError, match=r"program 'table' takes 3\*batch\+1 rows of 'x': no whole number of batches"):
        passes.shard(program.with_(step=step), {"table": 0}, [0, 1])


def test_a_session_refuses_rows_that_micro_batches_do_not_divide() -> None:
    program = sharded()
    with runtime.Session(passes.emit(program), captured().state, binding="cpu") as session:
        for rows in (1, 2, 4, 11):
            with pytest.raises(
                graphir.SessionError, match=f"has {rows} rows? along dimension 0, which 3 micro-batches"
            ):
                session.step(torch.zeros(rows, dtype=torch.int64))
        assert session.step(torch.arange(3)).isfinite(), "of fewer rows than replicas have micro-batches"
