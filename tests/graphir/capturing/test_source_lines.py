"""Source lines: each captured operator knows the line that called it, and nothing else depends on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import passes

HERE = Path(__file__).name


def line(text: str, after: Callable[..., object] | type) -> str:
    """``file.py:7``: the first line with *text* in the code of *after*."""
    lines, first = inspect.getsourcelines(after)
    return f"{HERE}:{first + next(i for i, found in enumerate(lines) if text in found)}"


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.mul(2.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        h = F.relu(h)
        h = Double.apply(h)
        h = checkpoint(torch.sigmoid, h, use_reentrant=False)
        return h.view(-1, 2, 2).sum(2)


def squares(out: Tensor) -> Tensor:
    return out.square().sum()


@pytest.fixture(scope="module")
def program() -> graphir.Program:
    model = Block()
    return graphir.capture(
        model, (torch.ones(3, 4),), loss=squares, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )


def sources(program: graphir.Program, phase: str) -> dict[str, set[str]]:
    """The lines of the operators of a phase, by type."""
    found: dict[str, set[str]] = {}
    for op in program.step.ops:
        if op.phase == phase:
            found.setdefault(op.type.split(".")[1], set()).add(op.source)
    return found


def test_forward_operators_have_the_line_that_called_them(program: graphir.Program) -> None:
    forward = sources(program, "forward")
    assert forward["addmm"] == {line("self.fc(x)", Block.forward)}
    assert forward["relu"] == {line("F.relu(h)", Block.forward)}
    assert forward["mul"] == {line("x * 2", Double)}
    assert forward["view"] == {line("h.view", Block.forward)}
    assert forward["pow"] == {line("out.square", squares)}


def test_backward_operators_have_the_line_of_the_forward_operator(program: graphir.Program) -> None:
    backward = sources(program, "backward")
    assert backward["mm"] == {line("self.fc(x)", Block.forward)}
    assert backward["threshold_backward"] == {line("F.relu(h)", Block.forward)}
    assert backward["sigmoid_backward"] == backward["sigmoid"] == {line("checkpoint(", Block.forward)}


def test_a_backward_that_a_user_wrote_has_its_own_lines(program: graphir.Program) -> None:
    assert line("gradient.mul", Double) in sources(program, "backward")["mul"]


def test_updates_have_none(program: graphir.Program) -> None:
    assert set().union(*sources(program, "update").values()) == {""}


def test_where_only_torch_runs_it_is_the_line_of_its_module() -> None:
    ops = graphir.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(3, 4),)).step.ops
    files = {op.type.split(".")[1]: op.source.rpartition(":")[0] for op in ops}
    assert files["addmm"] == "torch/nn/modules/linear.py" and files["relu"] == "torch/nn/modules/activation.py"


def test_a_loss_of_torchs_own_has_a_line_too() -> None:
    example = models.mlp()
    program = graphir.capture(example.model, example.inputs, targets=example.targets, loss=F.cross_entropy)
    (op,) = [op for op in program.step.ops if op.outputs[0] == "loss"]
    assert op.source.startswith("torch/nn/functional.py:")


def test_no_line_says_where_on_a_machine_its_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x + 1\n"
    found = []
    for file in (tmp_path / "models" / "net.py", tmp_path / "elsewhere" / "net.py", "<stdin>"):
        space: dict[str, type[nn.Module]] = {"__name__": "net"}  # type: ignore[dict-item]
        exec(compile(text, str(file), "exec"), space)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            if file == tmp_path / "elsewhere" / "net.py":
                patch.undo()
            found += [op.source for op in graphir.capture(space["Net"](), (torch.ones(2),)).step.ops]
    assert found == ["models/net.py:4", "net.py:4", "<stdin>:4"]


def test_passes_keep_them_and_their_copies_have_none(program: graphir.Program) -> None:
    before = {(op.type, op.source) for op in program.step.ops}
    placed = passes.replicate(program, devices=[0, 1])
    placed = passes.shift_activations(placed, passes.find_activations(placed)[1:], shifts={0: 2, 1: 3})
    placed = passes.inject_copies(placed)
    plan = passes.emit(passes.share_storage(placed))
    for op in plan.step.ops:
        if op.type in ("Copy", "AllReduce"):
            assert not op.source
        elif not op.by.startswith("share_storage"):
            assert (op.type, op.source) in before
    assert any(op.type == "Copy" for op in plan.step.ops)


def test_files_keep_them(program: graphir.Program, tmp_path: Path) -> None:
    program.save(tmp_path / "net.json")
    loaded = graphir.load(tmp_path / "net.json")
    assert isinstance(loaded, graphir.Program)
    assert [op.source for op in loaded.step.ops] == [op.source for op in program.step.ops]


def test_texts_leave_them_out_and_nets_without_them_are_equal(program: graphir.Program) -> None:
    text = str(program)
    assert HERE not in text
    parsed = graphir.parse(text)
    assert isinstance(parsed, graphir.Program)
    assert {op.source for op in parsed.step.ops} == {""} and parsed.step == program.step
    op = program.step.ops[0]
    assert op == op._replace(source="elsewhere.py:1") and not op != op._replace(source="elsewhere.py:1")  # noqa: SIM202
    assert op != op._replace(by="someone")
    assert not graphir.diff(program, parsed).changed


def test_show_prints_them_as_comments_that_are_read_back(program: graphir.Program) -> None:
    text = graphir.show(program, source=True)
    (shown,) = [found for found in text.splitlines() if "aten.relu(" in found]
    assert shown.endswith(f"  # 48 B, {line('F.relu(h)', Block.forward)}")
    assert graphir.parse(text) == program
    plan = passes.emit(program)
    assert graphir.parse(graphir.show(plan, source=True)) == plan
    odd = program.step.ops[0]._replace(source="a\nb.py:1")
    assert '# "a\\nb.py:1"' in graphir.show(
        program.step.with_(ops=(odd, *program.step.ops[1:])), source=True, figures=False
    )
