"""Shifts of Caffe2's nets, against what Caffe2 did."""

import cases
import pytest

import graphir
from graphir import caffe2, passes
from graphir.errors import PassError
from graphir.ir.device import KINDS


def call_of(case):
    call = case.record["call"]
    return call["activations"], dict(map(tuple, call["shifts"]))


@pytest.mark.parametrize("case", cases.params("model"))
def test_activations_are_caffe2s(case):
    recorded = case.record
    assert passes.find_activations(case.program()) == list(dict.fromkeys(recorded["GetActivationBlobs"]))


@pytest.mark.parametrize("case", cases.params("shift"))
def test_operators_go_where_caffe2_puts_them(case):
    program = case.program()
    activations, shifts = call_of(case)
    expected = case.record["expected"]
    if case.refused:
        with pytest.raises(PassError, match="both a source and a target"):
            passes.shift_activations(program, activations, shifts, strict=False)
        return
    known = set(passes.find_activations(program))
    shifted = passes.shift_activations(program, activations, shifts, strict=not known or set(activations) <= known)
    graphir.verify(shifted, placed=False)
    for name, net in (("param_init_net", shifted.init), ("net", shifted.step)):
        if "op_devices_after_shift" in expected.get(name, {}):
            wanted = [f"{KINDS[kind]}:{index}" for kind, index in expected[name]["op_devices_after_shift"]]
            assert [op.device for op in net.ops] == wanted


@pytest.mark.parametrize("case", cases.params("shift", where=lambda case: not case.refused))
def test_shifts_one_after_the_other_are_one_shift(case):
    program = case.program()
    activations, shifts = call_of(case)
    together = passes.shift_activations(program, activations, shifts, strict=False)
    one_by_one = program
    for source, target in shifts.items():
        one_by_one = passes.shift_activations(one_by_one, activations, {source: target}, strict=False)
    for a, b in ((together.init, one_by_one.init), (together.step, one_by_one.step)):
        assert [op.device for op in a.ops] == [op.device for op in b.ops]
        assert a.blobs == b.blobs


def mlp():
    return next(case for case in cases.cases("model") if case.name == "mlp_weightedsum_1dev").program()


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(PassError, match=r"'fc9' is not an activation of program .*; did you mean 'fc"):
        passes.shift_activations(mlp(), ["fc9"], {0: 1})


def test_nothing_changes_in_the_program_that_is_shifted():
    program = mlp()
    before = str(program)
    passes.shift_activations(program, passes.find_activations(program), {0: 1})
    assert str(program) == before


def test_state_goes_with_what_fills_it():
    program = mlp()
    shifted = passes.shift_activations(program, passes.find_activations(program), {0: 1})
    weight = "gpu_0/fc1_w"
    assert shifted.init.producer(weight).device == shifted.step.blobs[weight].device == "gpu:1"
    assert shifted.init.blobs[weight].device == "gpu:1"


PLAIN = """net plain {
  x : ? @gpu:0 = GaussianFill() {seed=0}
  y : ? @gpu:0 = Relu(x)
  z : ? @gpu:0 = Tanh(y)
  z_grad : ? @gpu:0 = ConstantFill(z) {phase=backward}
  y_grad : ? @gpu:0 = TanhGradient(z, z_grad) {phase=backward}
  x_grad : ? @gpu:0 = ReluGradient(y, y_grad) {phase=backward}
  x_grad_grad : ? @gpu:0 = Relu(x_grad) {phase=backward}
  w : ? @gpu:0 = Relu(x_grad_grad) {phase=backward}
  grad x -> x_grad
  grad y -> y_grad
  grad z -> z_grad
  grad x_grad -> x_grad_grad
  proto ""
}"""


def test_gradients_are_no_activations():
    assert passes.find_activations(caffe2.load_program(graphir.parse(PLAIN))) == ["x", "y", "z"]


def test_names_without_a_prefix_are_shifted_too():
    program = caffe2.load_program(graphir.parse(PLAIN))
    shifted = passes.shift_activations(program, ["y"], {0: 1})
    assert {op.outputs[0]: op.device for op in shifted.step.ops}["y"] == "gpu:1"
    placed = passes.inject_copies(shifted)
    graphir.verify(placed)
    graphir.certify(program, placed)
