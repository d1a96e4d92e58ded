"""Memory of Caffe2's nets, and plans for it, against what Caffe2's memonger recorded."""

from __future__ import annotations

from math import prod

import cases
import pytest

import graphir
from graphir import Program, passes
from graphir.caffe2 import load_net, save_net
from graphir.ir.dtype import ITEMSIZE

CASES = cases.params("memonger")
RESULTS = [
    pytest.param(case, algorithm, id=f"{case.name}-{algorithm}")
    for case in cases.cases("memonger")
    for algorithm in case.record["results"]
]
GPU = "gpu:0"


def shapes_of(case, renamed):
    """The recorded shapes, where a name that several blobs were merged into has the largest one's."""
    # A mutex has no element type; the recorded totals count it as four bytes.
    recorded = cases.read_json(case.folder / "shapes")
    shapes = {name: (shape, "i32") for name, shape in recorded["shapes"].items() if recorded["types"][name] == 0}
    shapes |= case.shapes

    def nbytes(name):
        shape, dtype = shapes[name]
        return prod(shape) * ITEMSIZE[dtype]

    merged = {}
    for name, target in renamed.items():
        merged.setdefault(target, []).append(name)
    return shapes | {target: shapes[max(names, key=nbytes)] for target, names in merged.items()}


def program_of(case, stem="before", renamed=()):
    shapes = shapes_of(case, dict(renamed))
    there = {name for net in (stem, "param_init_net") for name in load_net(case.net(net)).blobs}
    return case.program(stem, shapes={name: shape for name, shape in shapes.items() if name in there})


def bytes_of(program: Program) -> int:
    return sum(graphir.memory(program, frees="operators").total.values())


def high_water(program: Program, frees: graphir.analysis.memory.Frees = "operators") -> int:
    return graphir.memory(program, frees=frees).high_water[GPU]


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_high_water_before(case):
    program = program_of(case)
    assert bytes_of(program) == case.record["before"]["bytes"]
    assert high_water(program) == case.record["estimate_before"]["highwater_bytes"]
    assert graphir.memory(program).unknown == ()


@pytest.mark.parametrize(("case", "algorithm"), RESULTS)
def test_bytes_and_high_water_of_what_memonger_made(case, algorithm):
    recorded = case.record["results"][algorithm]
    program = program_of(case, recorded["file"], recorded["renamed"])
    assert bytes_of(program) == recorded["after"]["bytes"]
    assert high_water(program) == recorded["estimate_after"]["highwater_bytes"]
    # It keeps no value that nobody reads, so that the losses have to be named.
    before = program_of(case)
    outputs = tuple(name for name in before.step.unread if name in program.step.unread)
    named = [p.with_(step=p.step.with_(external_outputs=outputs)) for p in (before, program)]
    assert outputs and graphir.certify(*named).holds, "memonger is right in these cases"


@pytest.mark.parametrize("case", CASES)
def test_sharing_needs_no_more_bytes_than_the_best_of_memonger(case):
    program = program_of(case)
    after = passes.share_storage(program)
    assert graphir.certify(program, after).holds
    best = min(recorded["after"]["bytes"] for recorded in case.record["results"].values())
    assert bytes_of(after) < best, "in place, and all that is dead"


@pytest.mark.parametrize("case", CASES)
def test_freeing_at_the_last_use_needs_no_more_than_the_recorded_high_water(case):
    recorded = case.record["results"]["release_blobs_when_used"]["estimate_after"]
    assert high_water(program_of(case), "last use") <= recorded["highwater_bytes"]


@pytest.mark.parametrize("case", CASES)
def test_only_blobs_are_renamed(case):
    before = program_of(case)
    after = passes.share_storage(before)
    assert after.init == before.init
    assert after.step.external_inputs == before.step.external_inputs
    assert after.step.external_outputs == before.step.external_outputs
    fixed = {*before.step.external_inputs, *before.init.blobs}
    for a, b in zip(before.step.ops, after.step.ops, strict=True):
        assert (a.type, a.args, a.device, a.phase, a.seed, a.proto) == (
            b.type,
            b.args,
            b.device,
            b.phase,
            b.seed,
            b.proto,
        )
        assert [n for n in a.inputs if n in fixed] == [n for n in b.inputs if n in fixed]
        assert [n for n in a.outputs if n in fixed] == [n for n in b.outputs if n in fixed]
    assert after.step.blobs.keys() < before.step.blobs.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_saved_and_read_back(case, tmp_path):
    after = passes.share_storage(program_of(case))
    save_net(after.step, tmp_path / "after.pb")
    read = load_net(tmp_path / "after.pb")
    assert list(read.blobs) == list(after.step.blobs)
    for ours, theirs in zip(after.step.ops, read.ops, strict=True):
        assert (ours.inputs, ours.outputs, ours.effects) == (theirs.inputs, theirs.outputs, theirs.effects)
        assert list(ours.reads) == list(theirs.reads) and list(ours.makes) == list(theirs.makes)


@pytest.mark.parametrize("case", CASES)
def test_sharing_again_needs_no_more(case):
    once = passes.share_storage(program_of(case))
    twice = passes.share_storage(once)
    assert graphir.certify(once, twice).holds
    assert bytes_of(twice) <= bytes_of(once)


@pytest.mark.parametrize("case", cases.params("model", "dlrm", "numeric"))
def test_sharing_without_shapes_changes_no_value(case):
    program = case.program()
    assert graphir.memory(program).unknown
    after = passes.share_storage(program)
    assert graphir.certify(program, after).holds
    assert len(after.step.blobs) <= len(program.step.blobs)
