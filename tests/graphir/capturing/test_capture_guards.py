"""Models whose Python tests sizes: a program covers those for which the tests come out as they did."""

from __future__ import annotations

import builtins
import copy
import math
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import CaptureError, CoverageError, GraphirError, PassError, capture, passes
from graphir.ir.program import Program


class Branching(nn.Module):
    """A step that is another one for long sequences, for one length in six, and for batches of some sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        length = x.shape[1]
        if length > 20:
            y = y.relu()
        if length % 6 == 4:
            y = y * 2
        if y.numel() // 6 >= 120:
            y = y + y.mean()
        return y / max(x.size(0), 4)


def loss(y: Tensor) -> Tensor:
    return y.square().mean()


def captured(batch: int = 5, length: int = 8) -> Program:
    return capture(Branching(), (torch.randn(batch, length, 6),), loss=loss, batch_dims={0: "batch", 1: "length"})


def test_what_python_tests_guards_the_program() -> None:
    program = captured()
    assert program.covers.fixed == ""
    assert [str(guard) for guard in program.covers.guards] == [
        "batch>=4",
        "length<=20",
        "length%6!=4",
        "batch*length<=119",
    ]
    assert all("test_capture_guards.py:" in guard.reason for guard in program.covers.guards[1:])


def test_a_session_refuses_what_would_be_another_step() -> None:
    program = captured()
    with Session(passes.emit(program), program.state) as session:
        session.step(torch.randn(4, 5, 6))
        with pytest.raises(
            CoverageError,
            match=r"length is 22, the program takes length<=20: Python tests sizes in the model, at .*guards.py:\d+",
        ):
            session.step(torch.randn(4, 22, 6))
        with pytest.raises(CoverageError, match=r"batch is 15, length is 8, the program takes batch\*length<=119"):
            session.step(torch.randn(15, 8, 6))
        session.step(torch.randn(7, 8, 6))


def test_compiled_sizes_all_have_the_bits_of_eager() -> None:
    model = Branching()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    dims = {0: "batch", 1: "length"}
    with (
        warnings.catch_warnings(),
        graphir.compile(
            model, (torch.randn(5, 8, 6),), loss=loss, optimizer=optimizer, batch_dims=dims, most_plans=20
        ) as compiled,
    ):
        warnings.simplefilter("ignore", graphir.RecaptureWarning)
        for batch in (1, 5, 30):
            for length in (1, 10, 21):
                x = torch.randn(batch, length, 6)
                found = compiled.step(x)
                theirs.zero_grad()
                expected = loss(eager(x))
                expected.backward()
                theirs.step()
                assert torch.equal(found, expected.detach()), (batch, length)
        assert len(compiled.plans) < 9


def test_guards_are_printed_saved_and_asked_by_emit_and_graphs(tmp_path: Any) -> None:
    program = captured()
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json")
    assert graphir.load(tmp_path / "p.json") == program
    with pytest.raises(PassError, match="takes length<=20, not length 30"):
        passes.emit(program, dims={"length": 30})
    forward = graphir.to_fx(capture(Branching(), (torch.randn(5, 8, 6),), batch_dims={0: "batch", 1: "length"}))
    forward(torch.randn(4, 8, 6))
    with pytest.raises(GraphirError, match="the program takes length%6!=4"):
        forward(torch.randn(4, 10, 6))


def test_replicas_are_guarded_each() -> None:
    program = passes.replicate(captured(), [0, 1])
    assert "gpu_1/batch>=4" in map(str, program.covers.guards)
    with Session(passes.emit(program), program.state) as session:
        session.step(torch.randn(8, 5, 6))
        with pytest.raises(CoverageError, match="batch is 3 in a replica's share, the program takes batch>=4"):
            session.step(torch.randn(7, 5, 6))


class Asking(nn.Module):
    """A custom backward, a hook and a loss that test sizes."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2 if g.size(0) > 9 else g

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.fc.register_forward_hook(lambda module, args, out: out.relu() if out.nelement() > 600 else None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.Scaled.apply(self.fc(x))
        return out


def test_tests_in_backward_hooks_and_losses_are_seen() -> None:
    def tested(y: Tensor) -> Tensor:
        return y.sum() if y.shape != (40, 6) else y.mean()

    program = capture(Asking(), (torch.randn(2, 6),), loss=tested)
    assert [str(guard) for guard in program.covers.guards] == ["batch<=9"]
    program = capture(Asking(), (torch.randn(20, 6),), loss=tested)
    assert [str(guard) for guard in program.covers.guards] == ["batch>=10", "batch<=100", "batch!=40"]


@pytest.mark.parametrize(
    ("ask", "length", "guards"),
    [
        (lambda x: x.shape[0] > 8, 10, ["batch<=8"]),
        (lambda x: x.shape[1] > 3, 3, ["length<=3"]),
        (lambda x: max(x[0].shape[0], 4) > 12, 10, ["length>=4", "length<=12"]),
        (lambda x: x.exp().shape[1] % 8 != 0, 9, ["length%8==1"]),
        (lambda x: x.shape[1] % 8 != 0, 16, ["length>=2", "length%8==0"]),
        (lambda x: x.numel() > 400, 10, ["batch*length<=133"]),
    ],
)
def test_sizes_follow_on_one_side_of_a_test(ask: Any, length: int, guards: list[str]) -> None:
    """Where the usual points are on both sides, the step is recorded at others."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if ask(x) else x.exp()

    program = capture(Model(), (torch.randn(4, length, 3),), batch_dims={0: "batch", 1: "length"})
    assert program.covers.fixed == "" and [str(guard) for guard in program.covers.guards] == guards
    with Session(passes.emit(program), program.state) as session:
        for batch in (1, 2, 8, 9):
            for many in (1, 3, 7, 8, 9, 16, 24, 40):
                x = torch.randn(batch, many, 3)
                if program.covers.broken({"batch": batch, "length": many}) is None:
                    assert torch.equal(session.step(x), Model()(x))
                else:
                    with pytest.raises(CoverageError, match="the program takes"):
                        session.step(x)


def test_one_size_alone_is_fixed() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.relu() if x.shape[0] == 4 else x.exp()

    assert capture(Model(), (torch.randn(4, 3),)).dims == {}


class Odd(nn.Module):
    """A step that asks what no guard can say."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] ^ 3 > 100 else x.exp()


def test_what_no_guard_can_say_is_covered_at_recorded_sizes_alone(tmp_path: Any) -> None:
    program = capture(Odd(), (torch.randn(4, 6),))
    assert program.dims == {"batch": 4} and program.covers.recorded == ({"batch": 4}, {"batch": 11}, {"batch": 1})
    assert str(program.covers).startswith(
        "recorded sizes alone: batch 4; batch 11; batch 1\nPython computes with sizes in"
    )
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json", state=True)
    loaded = graphir.load(tmp_path / "p.json")
    assert isinstance(loaded, Program) and loaded == program
    with Session(passes.emit(loaded), loaded.state) as session:
        for batch in (11, 4, 1):
            x = torch.randn(batch, 6)
            assert torch.equal(session.step(x), Odd()(x))
        with pytest.raises(
            CoverageError, match=r"nobody knows .* at batch 5: .* recorded sizes alone \(batch 4; "
        ) as found:
            session.step(torch.randn(5, 6))
    assert re.search(r"test_capture_guards.py:\d+, and no guard can express the result$", found.value.what)
    assert "list these sizes at the capture, graphir.capture(…, sizes=[…])" in found.value.fix
    with pytest.raises(PassError, match="does not cover batch 5: the program holds for recorded sizes alone"):
        passes.emit(loaded, dims={"batch": 5})
    assert "recorded sizes alone" in graphir.memory(loaded, dims={"batch": 5}).refused
    with pytest.raises(GraphirError, match="a graph cannot ask for which sizes it holds"):
        graphir.to_fx(program)


def test_a_witness_tells_of_sizes_that_no_guard_can_say() -> None:
    program = capture(Odd(), (torch.randn(4, 6),))
    assert graphir.memory(program, dims={"batch": 5}).refused == ""
    with Session(passes.emit(program, dims={"batch": 5}), program.state, witness=program) as session:
        x = torch.randn(5, 6)
        assert torch.equal(session.step(x), Odd()(x))
        with pytest.raises(CoverageError, match=r"at batch 128: the step calls aten.mul.Tensor"):
            session.step(torch.randn(128, 6))


def test_listed_sizes_are_recorded_too() -> None:
    program = capture(Odd(), (torch.randn(4, 6),), sizes=[{"batch": 5}, {"batch": 11}])
    assert program.covers.recorded == ({"batch": 4}, {"batch": 11}, {"batch": 1}, {"batch": 5})
    replicas = passes.replicate(program, [0, 1]).with_(witness=None)
    with Session(passes.emit(replicas), replicas.state) as session:
        x = torch.randn(9, 6)
        assert torch.equal(session.step(x), Odd()(x))
        with pytest.raises(
            CoverageError, match="nobody knows whether the program holds at gpu_0/batch 4, gpu_1/batch 3"
        ):
            session.step(torch.randn(7, 6))
    with pytest.raises(CoverageError, match="the step differs from the program at batch 128"):
        capture(Odd(), (torch.randn(4, 6),), sizes=[{"batch": 128}])


@pytest.mark.parametrize("sizes", [[{"length": 3}], [{"batch": 0}], [{"batch": "8"}], ["batch"]])
def test_listed_sizes_that_cannot_be(sizes: Any) -> None:
    with pytest.raises(CaptureError, match="the program has the dimensions batch"):
        capture(Odd(), (torch.randn(4, 6),), sizes=sizes)


def test_a_test_that_makes_no_difference_is_covered_where_it_was_recorded() -> None:
    """On the other side of a test another one may be asked, which nobody has seen."""

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            size = x.shape[0]
            return x.relu() if size > 8 and size == 12 else x.exp()

    program = capture(Nested(), (torch.randn(4, 6),))
    assert [str(guard) for guard in program.covers.guards] == ["batch<=8"]
    for batch in (12, 13):
        with (
            Session(passes.emit(program), program.state) as session,
            pytest.raises(CoverageError, match=f"batch is {batch}, the program takes batch<=8"),
        ):
            session.step(torch.randn(batch, 6))
    with Session(passes.emit(program), program.state, witness=program) as session:
        x = torch.randn(13, 6)
        assert torch.equal(session.step(x), Nested()(x))
        with pytest.raises(CoverageError, match="batch is 12, the program takes batch<=8"):
            session.step(torch.randn(12, 6))


def test_one_row_is_covered_where_only_a_test_differs_there() -> None:
    class Single(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(x.shape[0] == 1)
            return x.exp()

    asked: list[bool] = []
    program = capture(Single(), (torch.randn(4, 6),))
    assert str(program.covers).splitlines()[1] == "and recorded: batch 1"
    assert [str(guard) for guard in program.covers.guards] == ["batch>=2"]
    with Session(passes.emit(program), program.state) as session:
        x = torch.randn(1, 6)
        assert torch.equal(session.step(x), x.exp())


def pad(x: Tensor, to: int) -> Tensor:
    missing = -x.shape[1] % to
    return nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


ASKED: dict[str, tuple[Any, list[str]]] = {
    "slice": (lambda x: x[:, :16].softmax(1), ["length<=16"]),
    "slice from the end": (lambda x: x[..., -16:, :].mean(), ["length<=16"]),
    "written slice": (lambda x: x.clone().index_fill(0, torch.tensor([0]), 0)[None, :, :20] * 2, ["length<=20"]),
    "slice of a table": (lambda x: x + x.new_ones(30, 3)[: x.shape[1]], ["length<=30"]),
    "range": (lambda x: torch.cat([x[:, i : i + 16].softmax(1) for i in range(0, x.shape[1], 16)], 1), ["length<=16"]),
    "split": (lambda x: torch.cat([part.softmax(1) for part in x.split(16, 1)], 1), ["length<=16"]),
    "split into batches": (lambda x: torch.stack(x.repeat(2, 1, 1).split(x.shape[0])), []),
    "divisible": (lambda x: x if x.flatten(0, 1).shape[0] % x.shape[0] else x.relu(), []),
    "unread split": (lambda x: x.exp() if len(x.split(16, 1)) > 1 else x.relu(), ["length<=16"]),
    "stride": (lambda x: x.exp() if x.stride(0) > 60 else x.relu(), ["length<=20"]),
    "strides": (lambda x: x.exp() if x.mT.stride() > (60, 1, 3) else x.relu(), ["length<=20", "length!=20"]),
    "offset": (lambda x: x.exp() if x[:, -1:].storage_offset() > 59 else x.relu(), ["length<=20"]),
    "bytes": (lambda x: x.exp() if x.nbytes > 960 else x.relu(), ["batch*length<=80"]),
    "function": (lambda x: x.exp() if torch.numel(x) > 240 else x.relu(), ["batch*length<=80"]),
    "each side's": (lambda x: x / max(x.shape[0], x.shape[1], 16), ["batch-length<=-1", "length<=15"]),
    "padding": (lambda x: pad(x, 32).softmax(1), ["length<=32", "length!=32"]),
    "quotient": (lambda x: x * (x.shape[1] // 32), ["length<=31"]),
    "remainder": (lambda x: x * (x.shape[1] % 32), ["length<=31"]),
    "remainder that is only tested": (lambda x: x.exp() if x.shape[1] % 512 else x.relu(), ["length<=511"]),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_python_makes_of_sizes_is_guarded(name: str) -> None:
    ask, guards = ASKED[name]

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return ask(x)

    program = capture(Model(), (torch.randn(4, 10, 3),), batch_dims={0: "batch", 1: "length"})
    assert program.covers.fixed == ""
    assert [str(guard) for guard in program.covers.guards if not str(guard).endswith(">=2")] == guards
    with Session(passes.emit(program), program.state, executor="reference") as session:
        for batch, length in ((4, 10), (4, 16), (33, 17), (4, 31), (4, 32), (33, 40)):
            x = torch.randn(batch, length, 3)
            if program.covers.broken({"batch": batch, "length": length}) is None:
                assert torch.equal(session.step(x), Model()(x))
            else:
                with pytest.raises(CoverageError, match=r"the program takes .*: Python (tests|computes)"):
                    session.step(x)


UNSAID: dict[str, Any] = {
    "rounded": lambda x: x * math.ceil(x.shape[1] / 32),
    "whole part": lambda x: x * int(x.shape[1] ** 0.2),
    "shift": lambda x: x * (x.shape[1] >> 5),
    "quotient that is only tested": lambda x: x.exp() if x.shape[1] // 3 > 9 else x.relu(),
    "split by a plain number": lambda x: torch.stack(x.repeat(2, 1, 1).split(len(x))),
    "among the keys of a table": lambda x: x * cache.get(x.shape[1], 1),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_python_makes_of_sizes_is_covered_at_recorded_sizes_alone(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return UNSAID[name](x)

    program = capture(Model(), (torch.randn(4, 10, 3),), batch_dims={0: "batch", 1: "length"})
    assert program.covers.fixed == "" and program.covers.only
    with Session(passes.emit(program), program.state, executor="reference") as session:
        for batch, length in ((4, 10), (11, 9), (4, 16), (33, 17), (4, 31), (4, 32), (33, 40)):
            x = torch.randn(batch, length, 3)
            if {"batch": batch, "length": length} in program.covers.recorded:
                assert torch.equal(session.step(x), Model()(x))
            else:
                with pytest.raises(CoverageError, match="the program holds for recorded sizes alone"):
                    session.step(x)


cache: dict[int, int] = {10: 1}


@pytest.mark.parametrize("length", [9, 12])
def test_a_remainder_that_the_step_holds_is_no_constant(length: int) -> None:
    """At lengths with one remainder alone, the padding is the same."""
    program = capture(Padded(), (torch.randn(4, length, 3),), batch_dims={0: "batch", 1: "length"})
    with Session(passes.emit(program), program.state) as session:
        for many in range(2, 40):
            x = torch.randn(4, many, 3)
            try:
                assert torch.equal(session.step(x), Padded()(x))
            except CoverageError:
                assert many != length


class Padded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return pad(x, 8).exp()


SHAPED: dict[str, Any] = {
    "pool": lambda x: nn.functional.max_pool1d(x.mT, 3, 16).mean(),
    "convolution": lambda x: nn.functional.conv1d(x.mT, torch.ones(3, 3, 3), stride=32).mean(),
    "windows": lambda x: x.unfold(1, 3, 32).mean(),
    "factors": lambda x: torch.linalg.svd(x)[1].mean(),
    "diagonal": lambda x: x.diagonal(0, 1, 2).mean(),
    "narrowed": lambda x: x.narrow(1, 0, 5).mean(),
    "count": lambda x: x.mean() + torch.arange(0, x.shape[1], 16).float().mean(),
}


@pytest.mark.parametrize("name", SHAPED)
def test_shapes_that_follow_sizes_in_pieces_are_refused_elsewhere(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return SHAPED[name](x)

    program = capture(Model(), (torch.randn(4, 10, 3),), batch_dims={0: "batch", 1: "length"})
    assert program.covers.fixed == ""
    refused = []
    with Session(passes.emit(program), program.state, executor="reference") as session:
        for length in (2, 5, 8, 16, 20, 36, 70):
            x = torch.randn(4, length, 3)
            try:
                found = session.step(x)
            except CoverageError as e:
                refused.append(length)
                assert "does not follow the program's sizes here" in str(e)
            else:
                assert torch.equal(found, Model()(x))
    assert refused and len(refused) < 7


def test_sizes_that_a_model_returns_or_keeps_are_plain_numbers() -> None:
    kept: list[Any] = []

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            kept.append(x.shape[1])
            return x.exp(), x.shape[1]

    program = capture(Returns(), (torch.randn(4, 6),))
    with Session(passes.emit(program), program.state) as session:
        assert type(session.step(torch.randn(3, 6))[1]) is int
    assert kept[0] * 2 == 12 and type(kept[0] * 2) is int


def test_torch_has_its_own_sizes_again() -> None:
    def present() -> dict[str, Any]:
        return {**vars(torch._subclasses.FakeTensor), "functions": (torch.numel, builtins.len, builtins.range)}

    before = present()
    captured()
    with pytest.raises(GraphirError):
        capture(nn.Linear(3, 2), (torch.randn(2, 5),))
    assert present() == before


def test_captures_in_several_threads_wait_for_each_other() -> None:
    def work(width: int) -> list[str]:
        models = [nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)) for _ in range(3)]
        return [str(capture(m, (torch.randn(4, 6),), loss=loss, name="net").step) for m in models]

    with ThreadPoolExecutor(3) as pool:
        texts = list(pool.map(work, (7, 8, 9)))
    assert texts == [work(width) for width in (7, 8, 9)]


def test_other_threads_move_tensors_meanwhile() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            moved = pool.submit(lambda: torch.randn(2).to("meta")).result()
            assert moved.device.type == "meta"
            return x.exp()

    with ThreadPoolExecutor(1) as pool:
        capture(Model(), (torch.randn(4, 6),))


def test_sizes_that_an_earlier_capture_has_left_are_numbers() -> None:
    kept: dict[str, int] = {}

    class Limited(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if kept.setdefault("limit", x.shape[0] * 10) > x.shape[0] else x.tanh()

    model = Limited()
    capture(model, (torch.randn(6, 3),))
    assert [str(guard) for guard in capture(model, (torch.randn(6, 3),)).covers.guards] == ["batch<=59"]


@pytest.mark.parametrize(
    "number",
    [lambda n: n.real, lambda n: n.numerator, lambda n: n.conjugate()],
    ids=["real", "numerator", "conjugate"],
)
def test_a_size_by_another_name_is_a_size(number: Callable[[int], int]) -> None:
    class Limited(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if number(x.shape[0]) <= 20 else x.tanh()

    assert [str(guard) for guard in capture(Limited(), (torch.randn(6, 3),)).covers.guards] == ["batch<=20"]


def test_bits_of_a_size_are_no_guard() -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() if x.shape[0].bit_count() < 5 else x.tanh()

    assert "no guard can express the result" in capture(Counted(), (torch.randn(6, 3),)).covers.only
