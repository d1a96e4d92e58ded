"""Programs from Caffe2's nets: roles, devices and replicas, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from cases import OWN, cases, params

import graphir
from graphir import FileError, GraphirError, Net, Program, caffe2, passes

MODEL = OWN / "models/mlp_2dev_sgd"

STEP = """
    name: "step" external_input: "gpu_0/w" external_input: "gpu_0/mean" external_input: "gpu_0/x"
    op { type: "FC" input: "gpu_0/x" input: "gpu_0/w" output: "gpu_0/y" device_option { device_type: 1 device_id: 0 } }
    op { type: "FCGradient" input: "gpu_0/y" input: "gpu_0/mean" output: "gpu_0/w_grad" is_gradient_op: true
         device_option { device_type: 1 device_id: 0 } }
    op { type: "WeightedSum" input: "gpu_0/w" input: "gpu_0/w_grad" output: "gpu_0/w"
         device_option { device_type: 1 device_id: 0 } }
"""
INIT = """
    name: "init"
    op { type: "XavierFill" output: "gpu_0/w" device_option { device_type: 1 device_id: 0 } }
    op { type: "ConstantFill" input: "gpu_0/w" output: "gpu_0/mean" }
"""


@pytest.fixture
def written(tmp_path):
    """Write a net as text: ``written("step", …)`` is its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.pbtxt"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def program(written) -> Program:
    return caffe2.load_program(written("step", STEP), written("init", INIT), devices=[0])


# What was recorded


@pytest.mark.parametrize("case", params("model", "dlrm", "memonger", "numeric"))
def test_recorded_programs_are_well_formed(case):
    for stem in ("net", "train", "forward", "before"):
        if case.has(stem):
            program = case.program(stem)
            graphir.verify(program, placed=False)
            prefix, devices = case.record.get("device_prefix", "gpu"), case.record.get("devices", ())
            assert program.replicas == (tuple(f"{prefix}_{d}/" for d in devices) or ("",))
            assert [op.phase for op in program.init.ops] == ["init"] * len(program.init.ops)


@pytest.mark.parametrize("case", params("model"))
def test_parameters_are_those_of_the_model(case):
    recorded, program = case.record, case.program()
    assert set(program.params) == set(recorded["params"])
    written = {name for op in program.step.ops for name in op.outputs}
    dense = {name for name, grad in recorded["param_to_grad"].items() if isinstance(grad, str)}
    assert set(case.program(params=()).params) == dense & written


@pytest.mark.parametrize("case", params("model"))
def test_activations_are_those_that_caffe2_lists(case):
    assert passes.find_activations(case.program()) == list(dict.fromkeys(case.record["GetActivationBlobs"]))


@pytest.mark.parametrize("case", params("memonger"))
def test_recorded_shapes_are_kept(case):
    program = case.program(shapes=case.shapes)
    graphir.verify(program, placed=False)
    for name, (shape, dtype) in case.shapes.items():
        for net in (program.init, program.step):
            if name in net.blobs:
                assert (net.blobs[name].shape, net.blobs[name].dtype) == (tuple(shape), dtype)


@pytest.mark.parametrize("case", params("model", "dlrm", "memonger", "numeric"))
def test_programs_are_saved_as_they_were_loaded(case, tmp_path):
    program = case.program()
    if case.has("param_init_net"):
        caffe2.save_net(program.init, tmp_path / "init.pb")
        assert caffe2.load_net(tmp_path / "init.pb") == caffe2.load_net(case.net("param_init_net"))
    caffe2.save_net(program.step, tmp_path / "step.pb")
    assert (tmp_path / "step.pb").stat().st_size > 0
    program.save(tmp_path / "program.json")
    assert graphir.load(tmp_path / "program.json") == program


def test_a_large_model_is_loaded_within_a_second():
    large = [case for case in cases("model") if case.name == "resnet50_4dev"]
    if not large:
        pytest.skip("the larger set of recorded cases is not there")
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        program = large[0].program()
        seconds.append(time.perf_counter() - start)
    assert len(program.step.ops) + len(program.init.ops) > 6000
    assert min(seconds) < 1


# Roles, devices, shapes


def test_roles(program):
    blobs = program.step.blobs
    assert {name: blob.role for name, blob in blobs.items()} == {
        "gpu_0/w": "param",
        "gpu_0/mean": "state",
        "gpu_0/x": "input",
        "gpu_0/y": "activation",
        "gpu_0/w_grad": "gradient",
    }
    assert {name: blob.role for name, blob in program.init.blobs.items()} == {"gpu_0/w": "param", "gpu_0/mean": "state"}
    assert program.replicas == ("gpu_0/",)
    assert program.name == "step"


def test_external_inputs_live_where_init_makes_them(program):
    assert {name: str(program.step.blobs[name].device) for name in program.step.external_inputs} == {
        "gpu_0/w": "gpu:0",
        "gpu_0/mean": "cpu:0",
        "gpu_0/x": "cpu:0",
    }


def test_inputs_live_on_the_nets_device(written):
    step = written("step", "device_option { device_type: 1 device_id: 2 }" + STEP)
    program = caffe2.load_program(step, written("init", INIT))
    assert program.step.blobs["gpu_0/x"].device == "gpu:2"
    assert program.step.blobs["gpu_0/w"].device == "gpu:0"


def test_parameters_may_be_named(written):
    step, init = written("step", STEP), written("init", INIT)
    assert caffe2.load_program(step, init, params=["gpu_0/mean"]).params == ("gpu_0/mean",)


def test_without_init_parameters_are_given(written):
    program = caffe2.load_program(written("step", STEP))
    graphir.verify(program, placed=False)
    assert program.params == ("gpu_0/w",)
    assert program.step.blobs["gpu_0/mean"].role == "input"
    assert program.replicas == ("",)


def test_shapes_are_those_of_both_nets(written):
    shapes = {"gpu_0/w": ([3, 4], "f32"), "gpu_0/x": ((2, 4), "f16")}
    program = caffe2.load_program(written("step", STEP), written("init", INIT), shapes=shapes)
    graphir.verify(program, placed=False)
    assert program.init.blobs["gpu_0/w"] == program.step.blobs["gpu_0/w"]
    assert (program.step.blobs["gpu_0/w"].shape, program.step.blobs["gpu_0/w"].dtype) == ((3, 4), "f32")
    assert (program.step.blobs["gpu_0/y"].shape, program.step.blobs["gpu_0/y"].dtype) == (None, None)


def test_nets_are_taken_as_well_as_paths():
    paths = MODEL / "net.pb", MODEL / "param_init_net.pb"
    nets = tuple(map(caffe2.load_net, paths))
    before = [str(net) for net in nets]
    assert caffe2.load_program(*nets, devices=[0, 1]) == caffe2.load_program(*map(str, paths), devices=[0, 1])
    assert [str(net) for net in nets] == before


# What is refused


def refused(*args: Any, **options: Any) -> GraphirError:
    with pytest.raises(GraphirError) as error:
        caffe2.load_program(*args, **options)
    assert error.value.fix
    assert len(str(error.value).splitlines()) <= 4
    return error.value


@pytest.mark.parametrize(
    ("text", "what", "place"),
    [
        (
            'external_input: "data" op { type: "Relu" input: "dota" output: "y" }',
            "nobody makes the blob 'dota'; did you mean 'data'?",
            ", at op[0]",
        ),
        (
            'op { type: "A" output: "a" } op { type: "B" input: "c" output: "b" } op { type: "C" output: "c" }',
            "blob 'c' is read before it is made",
            ", at op[1]",
        ),
        ('op { type: "A" output: "a" } external_output: "b"', "nobody makes the external output 'b'", ""),
    ],
)
def test_what_nobody_makes_is_refused(written, text, what, place):
    path = written("step", text)
    error = refused(path)
    assert error.what == what
    assert error.where == f"{path}{place}"
    error = refused(MODEL / "net.pb", path)
    assert (error.what, error.where) == (what, f"{path}{place}")


def test_the_operator_that_reads_it_is_shown(written):
    assert refused(written("step", 'op { type: "Sum" input: "a" input: "b" output: "y" }')).at == "y = Sum(a, b)"


def test_a_net_that_was_given_is_named():
    assert refused(Net("n", (), {}, (), ("y",))).where == "net 'n'"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"devices": [0, 7]}, "no blob of net 'model' is named after device 7: none begins with 'gpu_7/'"),
        ({"devices": [0], "device_prefix": "hip"}, "no blob of net 'model' is named after device 0"),
        ({"devices": [0, 0]}, "device 0 is listed twice"),
        ({"devices": ["0"]}, "'0' is not a device"),
        ({"devices": [True]}, "True is not a device"),
        ({"devices": [-1]}, "-1 is not a device"),
        ({"devices": ["cpu:0"]}, "devices has 'cpu:0', but device_prefix is 'gpu'"),
        ({"devices": 2}, "devices is 2, not a list"),
        ({"devices": "01"}, "devices is '01', not a list"),
        ({"device_prefix": 0}, "device_prefix is 0, not a string"),
        ({"params": ["gpu_0/fc1_v"]}, "parameter 'gpu_0/fc1_v' is not an external input of net 'model'; did you mean"),
        ({"params": ["gpu_0/fc1"]}, "parameter 'gpu_0/fc1' is not an external input of net 'model'"),
        ({"params": [1]}, "params has 1, which is not a name"),
        ({"params": "gpu_0/fc1_w"}, "params is 'gpu_0/fc1_w', not a list of names"),
        ({"params": 3}, "params is 3, not a list of names"),
        ({"shapes": {"gpu_0/fc": ([1], "f32")}}, "shapes has 'gpu_0/fc', which is no blob; did you mean 'gpu_0/fc"),
        ({"shapes": {0: ([1], "f32")}}, "shapes has 0, which is no blob"),
        ({"shapes": {"gpu_0/fc1": ([1], "float32")}}, "'float32', of blob 'gpu_0/fc1', is not an element type"),
        ({"shapes": {"gpu_0/fc1": ([1], None)}}, "None, of blob 'gpu_0/fc1', is not an element type"),
        ({"shapes": {"gpu_0/fc1": [1, 2, 3]}}, "[1, 2, 3], of blob 'gpu_0/fc1', is not a shape and an element type"),
        ({"shapes": {"gpu_0/fc1": ([-1], "f32")}}, "([-1], 'f32'), of blob 'gpu_0/fc1', is not a shape"),
        ({"shapes": {"gpu_0/fc1": (["4"], "f32")}}, "(['4'], 'f32'), of blob 'gpu_0/fc1', is not a shape"),
        ({"shapes": [1]}, "shapes is a list, not a mapping"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused(options, what):
    error = refused(MODEL / "net.pb", MODEL / "param_init_net.pb", **options)
    assert what in error.what


def test_devices_that_nothing_is_named_after_come_with_those_that_are():
    error = refused(MODEL / "net.pb", devices=[7])
    assert error.fix == "prefixes there: gpu_0, gpu_1; give devices and device_prefix to match"
    assert error.where == str(MODEL / "net.pb")


def test_a_parameter_that_init_does_not_make_is_fed(written):
    program = caffe2.load_program(written("step", STEP), written("init", INIT), params=["gpu_0/x"])
    assert program.step.blobs["gpu_0/x"].role == "param"
    assert "gpu_0/x" not in program.init.blobs
    graphir.verify(program, placed=False)


def test_a_damaged_init_is_refused(tmp_path):
    (tmp_path / "init.pb").write_bytes(b"\xff" * 10)
    with pytest.raises(FileError, match="not a NetDef") as error:
        caffe2.load_program(MODEL / "net.pb", tmp_path / "init.pb")
    assert error.value.where == str(tmp_path / "init.pb")


@pytest.mark.parametrize(("args", "argument"), [((3,), "step"), ((MODEL / "net.pb", 3), "init")])
def test_other_values_than_paths_and_nets_are_refused(args, argument):
    assert refused(*args).what == f"load_program takes a path or a Net as {argument}, not int"
