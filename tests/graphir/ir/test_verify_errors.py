"""How broken invariants are reported: of which kind the error is, what it names, and whom it blames."""

from __future__ import annotations

import pytest
import tiny
from small import program_of
from tiny import GPU1, edited, reblobbed

from graphir import passes
from graphir.errors import PlacementError, VerifyError
from graphir.ir.net import Net
from graphir.ir.program import Program
from graphir.ir.verify import verify

TINY = tiny.program()
RELU, MASK, TRANSPOSE, COUNT, SGD = 1, 2, 4, 5, 13
DECLARE = (
    "declare what an operator makes on its device (Blob.on), or move it by shift_modules instead; "
    "then run inject_copies before emit"
)


def test_placement_error_names_blob_devices_operator_pass_and_fix() -> None:
    shifted = reblobbed(edited(TINY, RELU, device=GPU1), "r", device=GPU1)
    shifted = shifted.with_(history=("shift_activations{activations=[r], shifts={0: 1}}",))
    with pytest.raises(PlacementError) as e:
        verify(edited(shifted, MASK, inputs=("h",)).with_(step=_without_readers_of_r(shifted.step)))
    assert str(e.value).splitlines() == [
        "blob 'h' is on gpu:0 but read on gpu:1",
        '  at   r : f32[batch,4] @gpu:1 = aten.relu(h) {module=""}',
        "  in   program 'tiny', after shift_activations{activations=[r], shifts={0: 1}}",
        "  fix  run inject_copies before emit",
    ]


def _without_readers_of_r(net: Net) -> Net:
    return net.with_(ops=tuple(o._replace(inputs=tuple("h" if i == "r" else i for i in o.inputs)) for o in net.ops))


def test_placement_can_be_left_for_later() -> None:
    shifted = reblobbed(edited(TINY, RELU, device=GPU1), "r", device=GPU1)
    with pytest.raises(PlacementError):
        verify(shifted)
    verify(shifted, placed=False)


def test_output_on_another_device_is_misplaced() -> None:
    with pytest.raises(PlacementError, match="blob 'r' is on gpu:1 but written on gpu:0") as e:
        verify(reblobbed(TINY, "r", device=GPU1))
    assert str(e.value).endswith(f"  fix  {DECLARE}")


def fix_of(program: Program) -> str:
    with pytest.raises(VerifyError) as e:
        verify(program)
    return str(e.value).rpartition("  fix  ")[2]


def test_the_remedy_for_what_is_misplaced_mends_it() -> None:
    alone = edited(TINY, RELU, device=GPU1)  # moved by hand, its result is where it was
    assert fix_of(alone) == fix_of(passes.inject_copies(alone)) == DECLARE
    declared = alone.with_(step=alone.step.with_(blobs={**alone.step.blobs, "r": alone.step.blobs["r"].on(GPU1)}))
    updated = edited(TINY, COUNT, device=GPU1)  # it overwrites what it reads: copies bring that there and back
    for program in (declared, updated):
        assert fix_of(program) == "run inject_copies before emit"
        verify(passes.inject_copies(program))


def test_no_copy_is_offered_for_a_view_that_is_made_elsewhere() -> None:
    assert "inject_copies" not in fix_of(edited(TINY, TRANSPOSE, device=GPU1))


def test_all_errors_are_collected_and_the_text_is_bounded() -> None:
    ops = tuple(o._replace(seed=3) for o in TINY.step.ops * 2)
    with pytest.raises(VerifyError) as e:
        verify(TINY.with_(step=TINY.step.with_(ops=ops)))
    lines = str(e.value).splitlines()
    total = int(lines[0].removesuffix(" invariants are broken"))
    assert sum(line.startswith("       at ") for line in lines) == 20
    assert lines[-3] == f"  … and {total - 20} more"


def test_where_copies_alone_are_missing_few_are_named() -> None:
    ops = tuple(o if o.effects.views else o._replace(device=GPU1) for o in TINY.step.ops)
    with pytest.raises(PlacementError) as e:
        verify(TINY.with_(step=TINY.step.with_(ops=ops)))
    lines = str(e.value).splitlines()
    assert lines[0] == "30 invariants are broken"
    assert lines[1] == "  1    blob 'x' is on gpu:0 but read on gpu:1"
    assert sum(line.startswith("       at ") for line in lines) == 5
    assert lines[-3:] == [
        "  … and 25 more",
        "  in   program 'tiny'",
        f"  fix  {DECLARE}",
    ]


def test_a_view_is_made_where_its_storage_is_also_before_copies() -> None:
    with pytest.raises(VerifyError, match=r"view 'd\.t' is on gpu:0, where its storage is, but made on gpu:1"):
        verify(edited(TINY, TRANSPOSE, device=GPU1), placed=False)


def test_a_view_may_be_made_on_another_number_of_the_host() -> None:
    verify(
        program_of("""
            input x : f32[2,3] @cpu:0
            x.t : f32[3,2] strides [1,3] in x @cpu:0 = aten.t(x) {device=cpu:1}
            output y : f32[3,2] strides [1,3] @cpu:0 = aten.relu(x.t)
        """)
    )


def test_of_a_pass_with_long_options_the_name_is_told() -> None:
    long = f"shift_activations{{activations=[{', '.join(['r'] * 50)}], shifts={{0: 1}}}}"
    with pytest.raises(VerifyError, match=r"  in   program 'tiny', after shift_activations\{…\}\n"):
        verify(edited(TINY, RELU, seed=3).with_(history=(long,)))


def test_other_errors_beside_placement_make_it_a_verify_error() -> None:
    both = edited(edited(TINY, RELU, device=GPU1), SGD, output_versions=(1, 2))
    with pytest.raises(VerifyError, match="run inject_copies before emit") as e:
        verify(both)
    assert type(e.value) is VerifyError


def test_what_only_looks_like_a_program_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"the program is not a valid program: AttributeError: ") as e:
        verify(TINY.with_(step=TINY.step.with_(ops=("relu",))))
    assert "  in   program 'tiny'\n  fix  " in str(e.value)


def test_the_fix_names_who_can_have_broken_it() -> None:
    broken = edited(TINY, RELU, seed=3)
    with pytest.raises(VerifyError, match=r"fix  no pass made this mistake, but the code that built or edited"):
        verify(broken)
    with pytest.raises(VerifyError, match=r"fix  no pass made this mistake"):
        verify(broken.step)
    with pytest.raises(VerifyError, match=r"fix  verify before and after each pass or edit to see which"):
        verify(broken.with_(history=("replicate",)))
