"""Values that follow from where memory is, or from what no blob holds: programs that differ in these alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from small import program_of

import graphir
from graphir.caffe2 import load_program
from graphir.errors import EquivalenceError, VerifyError
from graphir.ir import admitted
from graphir.ir.program import Program

SQUARE = """
    input x : f32[3,4] @gpu:0
    m : f32[3,4] @gpu:0 = aten.mul.Tensor(x, other=1.0)
    u : f32[3,3] strides [4,1] in m @gpu:0 = aten.slice.Tensor(m, dim=1, start=0, end=3)
"""
TRANSPOSED = SQUARE + "    t : f32[3,3] strides [1,4] in m @gpu:0 = aten.t(u)\n"


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text may name types here that strangers' may not."""
    types = {"lift", "unsafe_split_with_sizes", "batch_norm_update_stats"}
    types = {*(f"aten.{name}.default" for name in types), "prims.empty_strided.default"}
    monkeypatch.setattr(admitted, "_allowed", types)


def refused(before: Program, after: Program, match: str = ".") -> None:
    graphir.verify(before, placed=False)
    graphir.verify(after, placed=False)
    assert graphir.certify(before, before).holds
    with pytest.raises(EquivalenceError, match=match):
        graphir.certify(before, after)


def test_an_operand_that_is_overwritten_while_it_is_read() -> None:
    """``u`` and its transpose lie in one memory: what is read of it may be new already."""
    within = program_of(TRANSPOSED + "u;1 = aten.add_.Tensor(u, t)\no : f32[3,3] @gpu:0 = aten.neg(u;1)\noutput o")
    copied = "c : f32[3,3] strides [4,1] @gpu:0 = Copy(u)\nc;1 = aten.add_.Tensor(c, t)\n"
    beside = program_of(TRANSPOSED + copied + "o : f32[3,3] @gpu:0 = aten.neg(c;1)\noutput o")
    functional = "c : f32[3,3] @gpu:0 = aten.add.Tensor(u, t)\no : f32[3,3] @gpu:0 = aten.neg(c)\noutput o"
    refused(within, beside, "'o'")
    refused(within, program_of(TRANSPOSED + functional), "'o'")


def test_a_result_in_place_of_a_copy_begins_where_the_copy_does() -> None:
    """A copy keeps its source's address modulo 64, here 4 bytes after a multiple, and a fresh result has one."""
    head = """
        input x : f32[64] @gpu:0
        v : f32[32] offset 1 in x @gpu:0 = aten.slice.Tensor(x, dim=0, start=1, end=33)
        c : f32[32] @gpu:0 = Copy(v)
    """
    tail = "o : f32[] @gpu:0 = aten.sum({})\noutput o"
    functional = head + "d : f32[32] @gpu:0 = aten.mul.Scalar(c, other=2.0)\n" + tail.format("d")
    in_place = head + "c;1 = aten.mul_.Scalar(c, other=2.0)\n" + tail.format("c;1")
    refused(program_of(functional), program_of(in_place), "'o'")
    later = [text.replace("offset 1", "offset 16").replace("start=1, end=33", "start=16, end=48") for text in (
        functional, in_place
    )]  # fmt: skip
    assert graphir.certify(*map(program_of, later)).holds


def test_batch_norm_update_stats_overwrites_what_its_schema_does_not_say() -> None:
    head = "buffer m : f32[3] @gpu:0\nbuffer v : f32[3] @gpu:0\ninput x : f32[4,3] @gpu:0\n"
    update = "a : f32[3] @gpu:0, b : f32[3] @gpu:0, m;1, v;1 = aten.batch_norm_update_stats(x, m, v, momentum=0.5)"
    read = "o : f32[3] @gpu:0 = aten.mul.Tensor({}, other=1.0)"
    before = program_of(f"{head}{read.format('m')}\n{update}\noutput o")
    after = program_of(f"{head}{update}\n{read.format('m;1')}\noutput o")
    refused(before, after, "'o'")


@pytest.mark.parametrize(
    ("type", "call"), [("aten.lift", "(x)"), ("aten.unsafe_split_with_sizes", "(x, split_sizes=[4])")]
)
def test_an_alias_that_a_schema_does_not_declare(type: str, call: str) -> None:
    results = ' {results="[t]"}' if "split" in type else ""
    text = "input x : f32[4] @gpu:0\nl : f32[4] {}@gpu:0 = "
    call = f"{type}{call}{results}\noutput l"
    graphir.verify(program_of(text.format("in x ") + call))
    with pytest.raises(VerifyError, match=r"its storage is 'l'|its schema gives \(\(\), \(\(0, 0\)"):
        graphir.verify(program_of(text.format("") + call))


def test_unwritten_memory_of_prims_is_a_caveat() -> None:
    made = (
        'e : f32[8] @gpu:0 = prims.empty_strided(shape=[8], strides=[1], dtype=f32, device="cpu", requires_grad=false)'
    )
    program = program_of(f"{made}\noutput o : f32[] @gpu:0 = aten.sum(e)")
    assert any("leaves memory unwritten" in caveat for caveat in graphir.certify(program, program).caveats)


QUEUED = (
    'external_input: "q" op {{ input: "q" output: "a" type: "{0}" }} {1} '
    'op {{ input: "a" input: "{2}" output: "y" type: "Add" }}'
)


@pytest.mark.parametrize("type", ["DequeueBlobs", "CountUp", "TensorProtosDBInput"])
def test_two_takings_from_a_queue_are_two(tmp_path: Path, type: str) -> None:
    second = f'op {{ input: "q" output: "b" type: "{type}" }}'
    programs = []
    for number, text in enumerate((QUEUED.format(type, second, "b"), QUEUED.format(type, "", "a"))):
        path = tmp_path / f"{number}.pbtxt"
        path.write_text(f'name: "n" {text}')
        programs.append(load_program(path))
    refused(*programs)


def test_what_is_put_into_a_queue_keeps_its_order(tmp_path: Path) -> None:
    put = 'op {{ input: "q" input: "{0}" output: "{0}" type: "EnqueueBlobs" }}'
    made = 'external_input: "q" external_input: "a" external_input: "b" '
    programs = []
    for order in ("ab", "ba", "a"):
        path = tmp_path / f"{order}.pbtxt"
        path.write_text(f'name: "n" {made}' + " ".join(map(put.format, order)))
        programs.append(load_program(path))
    refused(programs[0], programs[1])
    with pytest.raises(EquivalenceError):
        graphir.certify(programs[0], programs[2])
