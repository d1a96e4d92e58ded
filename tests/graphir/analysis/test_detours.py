"""What crosses between devices for nothing: what is warned of, what is not, and that the mends mend."""

from __future__ import annotations

from collections.abc import Mapping

import models
import pytest
import torch
import torch.nn.functional as F
from runnable import captured, sgd
from small import program_of
from torch import nn

import graphir
from graphir import passes
from graphir.analysis.traffic import Detour, traffic
from graphir.ir.program import Program

ALONE = """
    param w : f32[4,4] @gpu:0
    input x : f32[4,4] @gpu:0
    a : f32[4,4] @gpu:0 = aten.mm(x, w)
    a_gpu_1 : f32[4,4] @gpu:1 = Copy(a)
    b : f32[4,4] @gpu:1 = aten.relu(a_gpu_1) {module=act}
    b_gpu_0 : f32[4,4] @gpu:0 = Copy(b)
    output c : f32[4,4] @gpu:0 = aten.mm(b_gpu_0, w)
    output c
"""
BOUNCE = """
    param w : f32[4,4] @gpu:0
    param v : f32[4,4] @gpu:1
    input x : f32[4,4] @gpu:0
    a : f32[4,4] @gpu:0 = aten.mm(x, w)
    a_gpu_1 : f32[4,4] @gpu:1 = Copy(a)
    b : f32[4,4] @gpu:1 = aten.relu(a_gpu_1) {module=act}
    d : f32[4,4] @gpu:1 = aten.mm(b, v) {module=fc}
    b_gpu_0 : f32[4,4] @gpu:0 = Copy(b)
    d_gpu_0 : f32[4,4] @gpu:0 = Copy(d)
    output c : f32[4,4] @gpu:0 = aten.mm(b_gpu_0, d_gpu_0)
    output c
"""
STATE = """
    param w : f32[4,4] @gpu:0
    input x : f32[4,4] @gpu:0
    a : f32[4,4] @gpu:0 = aten.mm(x, w) {module=first}
    a_gpu_1 : f32[4,4] @gpu:1 = Copy(a)
    w_gpu_1 : f32[4,4] @gpu:1 = Copy(w)
    output b : f32[4,4] @gpu:1 = aten.mm(a_gpu_1, w_gpu_1) {module=last}
    output b
"""


def warnings_of(body: str, **changes: object) -> tuple[Detour, ...]:
    return traffic(program_of(body, **changes)).warnings


def test_an_operator_alone_elsewhere() -> None:
    (found,) = warnings_of(ALONE)
    assert (found.kind, found.nbytes, found.blobs) == ("alone elsewhere", 128, ("a", "b"))
    assert found.what == "b: on gpu:1 every operand of relu comes from gpu:0, and every result goes back"
    assert found.mend == "passes.shift_modules(program, {'act': 'gpu:0'})"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aten.relu(a_gpu_1)", "aten.mul.Tensor(a_gpu_1, y)"),  # it has an input of its own there
        ("output c\n", "output c\n output b\n"),  # what it makes is handed back there
        ("aten.mm(b_gpu_0, w)", "aten.mm(a, w)"),  # nothing goes back to be computed with
    ],
)
def test_an_operator_that_is_not_alone(old: str, new: str) -> None:
    body = ALONE.replace(old, new).replace("input x", "input y : f32[4,4] @gpu:1\n input x")
    body = body.replace("b_gpu_0 : f32[4,4] @gpu:0 = Copy(b)\n", "") if "b_gpu_0, w" in old else body
    assert "alone elsewhere" not in [found.kind for found in warnings_of(body)]


def test_an_operator_between_three_devices_is_not_alone() -> None:
    body = ALONE.replace("b_gpu_0 : f32[4,4] @gpu:0", "b_gpu_0 : f32[4,4] @gpu:2")
    body = body.replace("c : f32[4,4] @gpu:0 = aten.mm(b_gpu_0, w)", "c : f32[4,4] @gpu:2 = aten.neg(b_gpu_0)")
    assert not warnings_of(body)


def test_an_operand_that_others_share_is_not_saved() -> None:
    more = "v : f32[4] @gpu:1\n input x"
    body = ALONE.replace("input x", f"param {more}").replace(
        "    b_gpu_0 :", "    output e : f32[4,4] @gpu:1 = aten.mul.Tensor(a_gpu_1, v)\n    b_gpu_0 :"
    )
    (found,) = warnings_of(body + "    output e\n")
    assert (found.kind, found.nbytes, found.blobs) == ("alone elsewhere", 64, ("b",))


def test_many_operators_are_not_alone() -> None:
    chain = "\n".join(f"r{i} : f32[4,4] @gpu:1 = aten.neg({f'r{i - 1}' if i else 'b'})" for i in range(12))
    body = ALONE.replace("    b_gpu_0 :", f"{chain}\n    b_gpu_0 :").replace("Copy(b)", "Copy(r11)")
    assert not warnings_of(body)


def test_a_value_that_bounces() -> None:
    (found,) = warnings_of(BOUNCE)
    assert (found.kind, found.nbytes, found.blobs) == ("bounce", 64, ("b",))
    assert found.what == "b: what relu made of a copy from gpu:0 on gpu:1 goes back"
    assert found.mend == "passes.shift_modules(program, {'act': 'gpu:0'})"


def test_a_copy_that_is_copied_back() -> None:
    (found,) = warnings_of("""
    input x : f32[4] @gpu:0
    param w : f32[4] @gpu:1
    x_gpu_1 : f32[4] @gpu:1 = Copy(x)
    output y : f32[4] @gpu:1 = aten.mul.Tensor(x_gpu_1, w)
    x_again : f32[4] @gpu:0 = Copy(x_gpu_1)
    output z : f32[4] @gpu:0 = aten.neg(x_again)
    output y
    output z
    """)
    assert (found.kind, found.nbytes, found.blobs) == ("bounce", 16, ("x_gpu_1",))


def test_a_residual_sum_that_goes_back_does_not_bounce() -> None:
    """What is added to the copy was computed there: one tensor has to cross back, whichever."""
    assert not warnings_of(
        BOUNCE.replace("b : f32[4,4] @gpu:1 = aten.relu(a_gpu_1)", "b : f32[4,4] @gpu:1 = aten.mm(a_gpu_1, v)")
        .replace("d : f32[4,4] @gpu:1 = aten.mm(b, v)", "d : f32[4,4] @gpu:1 = aten.add.Tensor(b, a_gpu_1)")
        .replace("    b_gpu_0 : f32[4,4] @gpu:0 = Copy(b)\n", "")
        .replace("aten.mm(b_gpu_0, d_gpu_0)", "aten.mm(d_gpu_0, w)")
    )


def test_what_is_elementwise_with_state_of_its_own_stays() -> None:
    assert not warnings_of(BOUNCE.replace("aten.relu(a_gpu_1)", "aten.mul.Tensor(a_gpu_1, v)"))


def test_state_that_is_copied_in_each_step() -> None:
    (found,) = warnings_of(STATE)
    assert (found.kind, found.nbytes, found.blobs) == ("state copied", 64, ("w",))
    assert found.what == "w: read on gpu:0 by first and on gpu:1 by last, copied in each step"
    assert found.mend == "passes.shift_modules(program, {'last': 'gpu:0'})"
    assert not warnings_of(STATE.replace("Copy(w)", "Copy(x)"))


def test_a_buffer_is_state_and_an_input_is_none() -> None:
    assert [found.kind for found in warnings_of(STATE.replace("param w", "buffer w"))] == ["state copied"]
    assert not warnings_of(STATE.replace("param w", "input w"))


def test_sizes_that_are_not_known() -> None:
    """Fewer copies are better, then; nobody knows how many bytes."""
    body = """
    input w : ? @gpu:0
    input v : ? @gpu:1
    input x : ? @gpu:0
    a : ? @gpu:0 = FC(x, w)
    a_gpu_1 : ? @gpu:1 = Copy(a)
    b : ? @gpu:1 = Relu(a_gpu_1)
    d : ? @gpu:1 = FC(b, v)
    b_gpu_0 : ? @gpu:0 = Copy(b)
    output c : ? @gpu:0 = FC(b_gpu_0, w)
    output d2 : ? @gpu:1 = Relu(d)
    """
    (found,) = warnings_of(body)
    assert (found.kind, found.nbytes) == ("bounce", None)


# Mends


def mended(program: Program, detour: Detour) -> Program:
    """The program before its copies, with what the warning says typed."""
    found = eval(detour.mend, {"passes": passes, "program": program})
    assert isinstance(found, Program)
    return found


def kinds(program: Program) -> Mapping[str, int | None]:
    return {found.kind: found.nbytes for found in traffic(passes.inject_copies(program)).warnings}


class Chain(nn.Module):
    """Layers, and functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 16)
        self.fc3, self.fc4 = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc4(self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x))))))


def test_a_mend_of_operators_alone_elsewhere() -> None:
    program = passes.replicate(graphir.capture(Chain(), (torch.randn(4, 8),)), devices=[0, 1])
    moved = passes.shift_activations(program, ["gelu", "gelu_1"], shifts={0: 2, 1: 3})
    (found,) = traffic(passes.inject_copies(moved)).warnings
    assert (found.kind, found.nbytes) == ("alone elsewhere", 2 * 2 * 2 * 4 * 16 * 4)
    assert found.mend == "passes.shift_activations(program, ['gelu', 'gelu_1'], shifts={2: 0, 3: 1})"
    again = mended(moved, found)
    assert not traffic(passes.inject_copies(again)).copies
    graphir.certify(program, again)


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_a_mend_of_modules_alone_elsewhere(devices: list[int]) -> None:
    """The backward of a module goes with it: one warning, one mend."""
    example = models.gpt(layers=3)
    program = passes.replicate(captured(example, sgd(example.model.parameters())), devices)
    moved = passes.shift_modules(program, {"layers.*.mlp.1": {d: d + 2 for d in devices}})
    before = traffic(passes.inject_copies(moved))
    (found,) = before.warnings
    assert (found.kind, found.nbytes) == ("alone elsewhere", before.nbytes)
    assert found.mend.startswith("passes.shift_modules(program, {'layers.0.mlp.1': ")
    again = mended(moved, found)
    assert not traffic(passes.inject_copies(again)).copies
    graphir.certify(program, again)


def test_a_mend_of_a_shared_weight() -> None:
    example = models.gpt(layers=2)
    moved = passes.shift_modules(captured(example, sgd(example.model.parameters())), {"layers.1": 1, "head": 1})
    before = traffic(passes.inject_copies(moved))
    (found,) = [warning for warning in before.warnings if warning.kind == "state copied"]
    assert found.what == "token.weight: read on gpu:0 by token and on gpu:1 by head, copied in each step"
    assert found.nbytes == before.kinds["parameter"]
    after = traffic(passes.inject_copies(mended(moved, found)))
    assert "parameter" not in after.kinds and "state copied" not in [warning.kind for warning in after.warnings]


def test_a_contiguous_cut_has_no_warnings() -> None:
    program = captured(models.resnet(blocks=4), None)
    assert not traffic(passes.inject_copies(passes.shift_modules(program, {"blocks[2:]": 1, "fc": 1}))).warnings


def test_a_warning_is_the_same_for_every_replica() -> None:
    program = captured(models.gpt(layers=1), None)
    single = passes.shift_activations(program, ["head"], shifts={0: 1})
    double = passes.shift_activations(passes.replicate(program, [0, 1]), ["head"], shifts={0: 2, 1: 3})
    one, two = (traffic(passes.inject_copies(p)).warnings for p in (single, double))
    assert [found.kind for found in one] == [found.kind for found in two]
    assert [2 * (found.nbytes or 0) for found in one] == [found.nbytes for found in two]


class Shared(nn.Module):
    """One layer called four times, each result normalized by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norms = nn.Linear(16, 16), nn.ModuleList(nn.LayerNorm(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm in self.norms:
            x = norm(self.layer(x))
        return x


def test_no_call_is_offered_that_would_send_more() -> None:
    program = graphir.capture(Shared(), (torch.randn(64, 16),), loss=lambda out: out.sum())
    moved = passes.shift_activations(program, passes.find_activations(program)[4:], {0: 1})
    before = traffic(passes.inject_copies(moved))
    (found,) = [warning for warning in before.warnings if warning.kind == "state copied"]
    assert found.mend.startswith("no move of these alone")
    assert traffic(passes.inject_copies(passes.shift_modules(moved, {"layer": 0}))).nbytes > before.nbytes


def test_no_call_is_offered_that_moves_another_replica_away() -> None:
    """Both replicas' heads are on one device, which one call moves to one other: that of the first, or the second."""
    example = models.gpt(layers=1)
    program = passes.replicate(captured(example, sgd(example.model.parameters())), [0, 1])
    moved = passes.shift_modules(program, {"head": 1})
    (found,) = [w for w in traffic(passes.inject_copies(moved)).warnings if w.kind == "state copied"]
    assert found.mend.startswith("no move of these alone")
