"""What Caffe2's nets copy between devices."""

import cases
import pytest

import graphir
from graphir import caffe2, passes
from graphir.analysis.traffic import Traffic
from graphir.ir.placement import same_memory


def crossing(net):
    """The copies between two memories, by what they make."""
    return [
        (op.outputs[0], net.blobs[op.inputs[0]].device, net.blobs[op.outputs[0]].device)
        for op in net.ops
        if op.type in net.dialect.copies
        and not same_memory(net.blobs[op.inputs[0]].device, net.blobs[op.outputs[0]].device)
    ]


@pytest.mark.parametrize("case", cases.params("shift", where=lambda case: not case.refused))
def test_each_copy_of_a_shifted_net_is_there_because_of_the_shift(case):
    call = case.record["call"]
    shifts = dict(map(tuple, call["shifts"]))
    program = passes.shift_activations(case.program(), call["activations"], shifts, strict=False)
    placed = passes.inject_copies(program)
    before = {made for made, *_ in crossing(passes.inject_copies(case.program()).step)}
    found = graphir.traffic(placed)
    assert [(c.copy.partition(";")[0], c.source, c.destination) for c in found.copies] == crossing(placed.step)
    for copied in found.copies:
        assert copied.nbytes is None  # these nets have no shapes
        assert copied.reasons or copied.copy.partition(";")[0] in before
        assert all(reason.by == "shift_activations" for reason in copied.reasons)
        assert all(reason.where.endswith((copied.source, copied.destination)) for reason in copied.reasons)
    assert max(map(len, str(found).splitlines())) <= 80
    assert Traffic.model_validate_json(found.to_json()) == found


def test_copies_to_and_from_the_host_are_listed():
    case = next(case for case in cases.cases("dlrm") if case.name == "default_2dev")
    net = passes.inject_copies(case.program()).step
    found = graphir.traffic(net)
    assert {c.destination for c in found.copies if c.source == "cpu:0"} == {"gpu:0", "gpu:1"}
    assert found.unknown == len(found.copies) == len(crossing(net)) > 0
    assert "unknown" in str(found) and " 0 B" not in str(found)


def test_a_net_that_is_translated_has_bytes():
    case = next(case for case in cases.cases("model") if case.name == "mlp_2dev_sgd")
    program = case.program()
    last = passes.find_activations(program)[-1:]
    placed = passes.inject_copies(passes.shift_activations(program, last, {0: 2, 1: 3}))
    found = graphir.traffic(caffe2.lower(placed))
    assert found.copies and not found.unknown and found.nbytes > 0
    assert [c.blob for c in found.copies] == [c.blob for c in graphir.traffic(placed).copies]
