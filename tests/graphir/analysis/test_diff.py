"""What a diff lists, and how it reads."""

from __future__ import annotations

import json
from dataclasses import replace

import nets
import pytest
import tiny
from small import program_of
from tiny import GPU0, GPU1, dropped, edited, inserted, reblobbed

from graphir.analysis.diff import diff
from graphir.errors import VerifyError
from graphir.ir.covers import Covers
from graphir.ir.guard import parse_guard

TINY, MOVED = tiny.program(), tiny.moved()


def test_equal_programs() -> None:
    found = diff(TINY, TINY)
    assert found.is_empty
    assert str(found) == "diff 'tiny' -> 'tiny': no difference"


def test_guards_that_one_has_alone() -> None:
    ours = tiny.plan(replace(TINY, covers=Covers((parse_guard("batch>=2", ""), parse_guard("batch%4==0", "here")))))
    theirs = tiny.plan(replace(TINY, covers=Covers((parse_guard("batch%4==0", "there"), parse_guard("batch<=9", "")))))
    found = diff(ours, theirs)
    assert not found.is_empty and found.guards == ("- batch>=2", "+ batch<=9")
    assert "guards changed: 2\n  - batch>=2\n  + batch<=9" in str(found)


def test_moves_copies_blobs_and_peaks() -> None:
    found = diff(TINY, MOVED)
    assert [(m.output, m.before, m.after, m.by) for m in found.moved] == [("r", GPU0, GPU1, "shift_activations")]
    assert [(c.output, c.device, c.nbytes) for c in found.copies] == [("h_gpu_1", GPU1, 96), ("r_gpu_0", GPU0, 96)]
    assert not found.blobs  # r moved with the operator that makes it
    assert {c.output for c in found.changed} == {"r", "mask", "d", "h_grad"}
    assert {p.device: p.after - p.before for p in found.peaks}["gpu:1"] == 192
    assert [p.device for p in found.peaks] == list(MOVED.devices)
    assert found.order == 0 and not found.added and not found.removed


def test_text() -> None:
    text = str(diff(tiny.plan(TINY), tiny.plan(MOVED)))
    assert "operators moved: 1\n  r = aten.relu: gpu:0 -> gpu:1 by shift_activations" in text
    assert "copies added, 192 B: 2\n  h_gpu_1 = Copy @gpu:1, 96 B" in text
    assert "  gpu:1            0 B ->        192 B  +192 B" in text


def test_removed_added_and_changed() -> None:
    sgd = tiny.position(TINY, "w")
    found = diff(dropped(TINY, sgd), edited(edited(TINY, 2, args={"p": 0.1}), 0, type="aten.matmul.default"))
    assert [a.output for a in found.added] == ["w;1"]
    assert [str(c) for c in found.changed] == [
        "h: type aten.mm -> aten.matmul",
        "mask: args p=0.5 -> p=0.1",
    ]
    assert [r.output for r in diff(TINY, dropped(TINY, sgd)).removed] == ["w;1"]


def test_an_argument_of_another_python_type_is_a_change() -> None:
    (change,) = diff(TINY, edited(TINY, 5, args={"other": 1.0})).changed
    assert (change.before, change.after) == ("other=1", "other=1.0")


def test_order() -> None:
    ops = TINY.step.ops
    swapped = TINY.with_(step=TINY.step.with_(ops=(*ops[:4], ops[5], ops[4], *ops[6:])))
    assert diff(TINY, swapped).order == 1


def test_state_of_init_counts() -> None:
    loads = tuple(op._replace(device=GPU1) for op in TINY.init.ops)
    found = diff(TINY, TINY.with_(init=TINY.init.with_(ops=loads)))
    assert [m.output for m in found.moved] == ["w", "count", "m"]


def test_nets_have_no_peaks() -> None:
    found = diff(TINY.step, MOVED.step)
    assert found.peaks == () and len(found.copies) == 2


def test_bytes_that_are_not_known_are_not_told() -> None:
    before = program_of("a : ? @gpu:0 = Source()")
    found = diff(before, program_of("a : ? @gpu:0 = Source()\n b : ? @gpu:1 = Copy(a)"))
    assert found.peaks == () and len(found.copies) == 1
    assert " B" not in str(found)


def test_json_holds_everything() -> None:
    found = json.loads(diff(TINY, MOVED).to_json())
    assert found["copies"][0] == {"output": "h_gpu_1", "type": "Copy", "device": "gpu:1", "by": "", "nbytes": 96}
    assert {p["device"] for p in found["peaks"]} == {"gpu:0", "gpu:1", "cpu:0"}


def test_text_is_bounded() -> None:
    net = nets.synthetic_net(2000)
    other = net.with_(ops=tuple(op._replace(device=GPU1) for op in net.ops))
    lines = str(diff(net, other)).splitlines()
    assert len(lines) < 20 and max(map(len, lines)) <= 100
    assert "operators moved: 1750" in lines and "  … and 1738 more" in lines


@pytest.mark.parametrize("seed", range(5))
def test_diff_of_a_random_program_with_itself_is_empty(seed: int) -> None:
    assert diff(nets.random_program(seed), nets.random_program(seed)).is_empty


def test_how_copies_are_issued_and_gradients_reduced() -> None:
    before = program_of("""
        input x : f32[4] @gpu:0
        a : f32[4] @gpu:1 = Copy(x)
    """)
    copy = before.step.ops[0]._replace(issue="placed", received="fresh")
    after = before.with_(step=before.step.with_(ops=(copy,)), ahead=0, reduction="sum")
    found = diff(before, after)
    assert not found.is_empty and not diff(before, before.with_(ahead=1)).is_empty
    assert [str(change) for change in found.changed] == ["a: issue  -> placed", "a: received  -> fresh"]
    assert "program changed: 2\n  ahead None -> 0\n  reduction mean -> sum" in str(found)
    shared = before.with_(replicas=("a/", "b/"), shares=(3, 1))
    assert "program changed: 1\n  shares () -> (3, 1)" in str(diff(before, shared))


def test_what_a_program_says_of_itself() -> None:
    before = program_of("input x : f32[4] @gpu:0").with_(caveats=("one", "two"))
    after = before.with_(caveats=("two", "three"), covers=Covers(fixed="why"))
    assert diff(before, after).program == ("- caveat: one", "+ fixed: why", "+ caveat: three")


def test_blob_fields() -> None:
    (change,) = diff(TINY, reblobbed(TINY, "d.t", strides=(1, 8))).blobs
    assert str(change) == "d.t: strides [1, 4] -> [1, 8]"


def test_operators_without_outputs_are_matched_by_what_they_read() -> None:
    check = TINY.step.ops[1]._replace(outputs=())
    assert len(diff(TINY, inserted(TINY, 2, check)).added) == 1
    assert diff(inserted(TINY, 2, check), inserted(TINY, 2, check)).is_empty


def test_a_copy_without_a_result_is_refused() -> None:
    """A file made by hand can hold it."""
    program = program_of("""
    input x : f32[2] @gpu:0
    x_gpu_1 : f32[2] @gpu:1 = Copy(x)
    output y : f32[2] @gpu:1 = aten.neg(x_gpu_1)
    output y
    """)
    broken = program.with_(
        step=program.step.with_(ops=(program.step.ops[0]._replace(outputs=()), *program.step.ops[1:]))
    )
    with pytest.raises(VerifyError, match="Copy makes 1 outputs but 0 are named"):
        diff(broken, program)
