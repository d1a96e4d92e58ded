"""Any net of Caffe2 is kept by files, whatever its fields say, and what passes change takes its place in them."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from written import net_of, parsed

import graphir
from graphir import GraphirError, caffe2
from graphir.caffe2.convert import decode, encode
from graphir.caffe2.files import read_net
from graphir.caffe2.schema import messages
from graphir.ir.device import Device, gpu
from graphir.ir.files import save as save_json
from graphir.ir.operator import Operator

# Any net

NAMES = st.one_of(st.sampled_from(["a", "b", "gpu_0/w", "gpu_0/w_grad"]), st.text(max_size=4))
TYPES = st.sampled_from(["FC", "Sum", "Copy", "GaussianFill", "Dropout", "NCCLAllreduce", "op", "Ä b"])
SCALARS = {
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "bool": st.booleans(),
    "string": NAMES,
    "bytes": st.one_of(st.binary(max_size=4), NAMES.map(str.encode)),
}


def fill(draw: Any, message: Any, depth: int) -> Any:
    """Set some fields of a message of any kind."""
    for field in message.DESCRIPTOR.fields:
        place = message.DESCRIPTOR.name, field.name
        if place == ("OperatorDef", "control_input"):  # may form cycles
            continue
        required = field.name in ("type",) and place[0] == "OperatorDef"
        required |= place[0] in ("Segment", "QTensorProto", "MapFieldEntry", "BackendOptions", "PartitionInfo")
        if not required and not draw(st.booleans()):
            continue
        values = value_of(draw, field, place, depth)
        if isinstance(getattr(message, field.name), str | bytes | int | float):
            setattr(message, field.name, values(0))
        elif hasattr(getattr(message, field.name), "extend"):
            for _ in range(draw(st.integers(1, 3))) if depth < 3 or field.message_type is None else ():
                if field.message_type:
                    values(getattr(message, field.name).add())
                else:
                    getattr(message, field.name).append(values(0))
        elif depth < 3:
            getattr(message, field.name).SetInParent()
            values(getattr(message, field.name))
    return message


def value_of(draw: Any, field: Any, place: tuple[str, str], depth: int) -> Any:
    if field.message_type:
        return lambda message: fill(draw, message, depth + 1)
    kinds = {v: k.removeprefix("TYPE_").lower() for k, v in vars(type(field)).items() if k.startswith("TYPE_")}
    values = {
        ("DeviceOption", "device_type"): st.integers(0, 9),
        ("DeviceOption", "device_id"): st.integers(0, 999_999),
        ("OperatorDef", "type"): TYPES,
    }.get(place)
    if values is None and field.enum_type:
        values = st.sampled_from([value.number for value in field.enum_type.values])
    drawn = SCALARS[kinds[field.type]] if values is None else values
    return lambda _: draw(drawn)


@st.composite
def net_defs(draw: Any) -> Any:
    return fill(draw, messages().NetDef(name="net"), 0)


NAN = struct.unpack("<f", b"\x01\x00\xc0\x7f")[0]


@settings(max_examples=75, deadline=None, suppress_health_check=list(HealthCheck))
@given(net_defs())
@example(parsed('op { type: "A" arg { name: "x" } arg { name: "x" } arg { } arg { name: "" } }'))
@example(parsed('op { type: "A" arg { name: "x" i: 1 } arg { name: "n" n { name: "inner" } } arg { name: "y" f: 2 } }'))
@example(
    parsed('op { type: "A" arg { name: "x" i: 0 f: -0.0 s: "" } arg { name: "z" f: -0.0 } arg { name: "s" s: "" } }')
)
@example(parsed('op { type: "A" arg { name: "x" s: "\\377" } arg { name: "y" strings: "a" strings: "\\377" } }'))
@example(parsed('op { type: "A" device_option { } } op { type: "A" device_option { device_type: 1 } }'))
@example(parsed('op { type: "A" output: "a" output: "a" } op { type: "B" input: "a" output: "a" output: "a" }'))
@example(parsed('name: "" device_option { device_id: 3 } external_input: "a" external_input: "a" external_output: "b"'))
@example(parsed('op { type: "A" input: "a\\n;1" input: "" output: "\\"q\\" # no comment" }'))
def test_any_net_is_kept(message):
    net = decode(message, "x.pb")
    wanted = message.SerializeToString(deterministic=True)
    assert encode(net) == message
    assert encode(net).SerializeToString(deterministic=True) == wanted
    again = graphir.parse(str(net))
    assert again == net
    assert encode(again).SerializeToString(deterministic=True) == wanted


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(net_defs(), st.sampled_from([".pb", ".pbtxt", ".pb.gz", ".pbtxt.gz"]))
def test_any_net_is_kept_in_files(tmp_path_factory, message, suffix):
    folder = tmp_path_factory.mktemp("nets")
    net = decode(message, "x.pb")
    caffe2.save_net(net, folder / f"net{suffix}")
    assert read_net(folder / f"net{suffix}") == message
    assert caffe2.load_net(folder / f"net{suffix}") == net
    save_json(net, folder / "net.json")
    assert graphir.load(folder / "net.json") == net


def test_a_nan_is_kept_with_its_bits():
    message = messages().NetDef(name="net")
    message.op.add(type="A").arg.add(name="x", f=NAN)
    assert encode(decode(message, "x.pb")).SerializeToString() == message.SerializeToString()


def test_arguments_are_plain_values():
    net = net_of(
        """op { type: "A" arg { name: "i" i: -3 } arg { name: "f" f: 0.5 } arg { name: "s" s: "x" } arg { name: "none" }
        arg { name: "ints" ints: 1 ints: 2 } arg { name: "floats" floats: 1 } arg { name: "strings" strings: "a" }
        arg { name: "net" n { name: "inner" } } }"""
    )
    assert net.ops[0].args == {
        "i": -3, "f": 0.5, "s": "x", "none": (), "ints": (1, 2), "floats": (1.0,), "strings": ("a",)
    }  # fmt: skip
    assert 'name: "inner"' in net.ops[0].proto


def test_the_text_has_what_the_fields_do_not_say():
    net = net_of(
        'op { input: "a" output: "b" type: "A" arg { name: "i" i: 1 } device_option { device_type: 1 device_id: 2 } }'
    )
    assert (net.proto, net.ops[0].proto, net.ops[0].device) == ("", "", "gpu:2")
    net = net_of('type: "dag" op { type: "A" name: "" engine: "CUDNN" device_option { device_type: 1 } }')
    assert net.proto == 'type: "dag"'
    assert net.ops[0].proto == 'name: "" device_option { device_type: 1 } engine: "CUDNN"'


@pytest.mark.parametrize(
    ("option", "device"),
    [
        ("", "cpu:0"),
        ("device_option { }", "cpu:0"),
        ("device_option { device_id: 4 }", "cpu:4"),
        ("device_option { device_type: 1 device_id: 3 }", "gpu:3"),
        ("device_option { device_type: 5 }", "ideep:0"),
        ("device_option { device_type: 6 device_id: 3 }", "hip:3"),
    ],
)
def test_devices(option, device):
    assert net_of(f'op {{ type: "A" {option} }}').ops[0].device == device


def test_versions_and_effects():
    net = net_of(
        """external_input: "w" op { type: "A" input: "w" output: "x" } op { type: "Relu" input: "x" output: "x" }
        op { type: "B" output: "x" } op { type: "Adam" input: "g" input: "w" input: "x" output: "w" output: "m" }"""
    )
    relu, again, adam = net.ops[1:]
    assert (list(relu.reads), list(relu.makes), relu.effects.writes) == ([("x", 0)], [("x", 1)], ((0, 0),))
    assert (list(again.makes), again.effects.writes) == ([("x", 2)], ())
    assert list(adam.reads) == [("g", 0), ("w", 0), ("x", 2)]
    assert (list(adam.makes), adam.effects.writes) == ([("w", 1), ("m", 0)], ((0, 1),))
    assert list(net.blobs) == ["w", "x", "g", "m"]
    assert net.blobs["g"].role == "input"
    assert "g" not in net.external_inputs


def test_an_input_that_nobody_makes_is_for_verify_to_name():
    net = net_of('name: "n" op { type: "Relu" input: "ghost" output: "y" }')
    with pytest.raises(graphir.VerifyError, match="blob 'ghost' is never made"):
        graphir.verify(net)


def test_random_operators_are_numbered():
    net = net_of(
        """op { type: "XavierFill" output: "w" } op { type: "FC" input: "w" output: "y" }
        op { type: "Dropout" input: "y" output: "z" arg { name: "is_test" i: 1 } }
        op { type: "Dropout" input: "y" output: "d" }"""
    )
    assert [op.seed for op in net.ops] == [0, None, None, 1]
    assert [op.effects.random for op in net.ops] == [True, False, False, True]


def test_phases():
    net = net_of(
        """op { type: "FC" output: "gpu_0/y" } op { type: "ConstantFill" input: "gpu_0/y" output: "gpu_0/y_grad" }
        op { type: "FCGradient" input: "gpu_0/y_grad" output: "gpu_0/g" is_gradient_op: true }
        op { type: "Sum" input: "gpu_0/g" output: "gpu_0/s" } op { type: "Copy" input: "gpu_0/s" output: "gpu_1/s" }
        op { type: "NCCLAllreduce" input: "gpu_0/s" output: "gpu_0/s" } op { type: "Iter" input: "i" output: "i" }
        op { type: "WeightedSum" input: "gpu_0/w" input: "gpu_0/s" output: "gpu_0/w" }"""
    )
    assert [op.phase for op in net.ops] == [
        "forward", "backward", "backward", "backward", "reduce", "reduce", "update", "update"
    ]  # fmt: skip
    assert net.gradients == {"gpu_0/y": "gpu_0/y_grad"}


# What passes change


def changed(text: str, **changes: Any) -> Any:
    """The net's first operator, written after fields of it were replaced."""
    net = net_of(text)
    return encode(net.with_(ops=(net.ops[0]._replace(**changes), *net.ops[1:]))).op[0]


def operator(text: str) -> Any:
    return parsed(f"op {{ {text} }}").op[0]


def test_a_moved_operator_keeps_the_rest_of_its_device():
    option = 'device_option { device_type: 1 %s random_seed: 7 node_name: "n" extra_info: "e" }'
    moved = changed(f'op {{ type: "A" name: "x" {option % ""} }}', device=gpu(3), by="shift")
    assert moved == operator(f'type: "A" name: "x" {option % "device_id: 3"}')
    assert changed(f'op {{ type: "A" {option % ""} }}', device=gpu(0)) == operator(f'type: "A" {option % ""}')


def test_an_operator_moved_to_the_host_says_so_where_it_would_run_elsewhere_else():
    gpu_0, host = "device_option { device_type: 1 device_id: 0 }", "device_option { device_type: 0 device_id: 0 }"
    on_host = {"device": Device.parse("cpu"), "by": "shift"}
    assert changed(f'op {{ type: "A" {gpu_0} }}', **on_host) == operator('type: "A"')
    assert changed(f'{gpu_0} op {{ type: "A" {gpu_0} }}', **on_host) == operator(f'type: "A" {host}')
    assert changed(f'{gpu_0} op {{ type: "A" }}') == operator('type: "A"')


def test_an_operator_without_a_device_runs_on_that_of_its_net():
    """As Caffe2 runs it. One that names the net's device says so again, and one without a device says none."""
    text = 'device_option { device_type: 1 device_id: 2 } op { type: "A" } op { type: "B" device_option { %s } }'
    for option, device in (("device_type: 1 device_id: 2", "gpu:2"), ("device_type: 0 device_id: 0", "cpu:0")):
        net = net_of(text % option)
        assert [op.device for op in net.ops] == ["gpu:2", device]
        assert encode(net) == parsed(text % option)


def test_changed_arguments_take_their_places():
    text = 'op { type: "A" arg { name: "a" i: 1 } arg { name: "n" n { } } arg { name: "b" i: 2 } }'
    found = changed(text, args={"b": 3, "c": (1.5,)})
    assert found == operator('type: "A" arg { name: "n" n { } } arg { name: "b" i: 3 } arg { name: "c" floats: 1.5 }')
    assert changed(text, args={"n": "x"}) == operator('type: "A" arg { name: "n" s: "x" }')


def test_new_copies_are_written_as_caffe2_would():
    net = net_of('name: "n" external_input: "x" op { type: "Relu" input: "x" output: "y" name: "" }')
    copies = (
        Operator("CopyCPUToGPU", ("x",), ("x_gpu_1",), {}, gpu(1), by="inject_copies"),
        Operator("Copy", ("x_gpu_1",), ("x_gpu_2",), {}, gpu(2), by="inject_copies"),
        Operator("CopyGPUToCPU", ("x_gpu_2",), ("x_cpu",), {}, gpu(2), by="inject_copies"),
    )
    written = encode(net.with_(ops=(*copies, *net.ops)))
    assert [(op.type, op.device_option.device_type, op.device_option.device_id) for op in written.op[:3]] == [
        ("CopyCPUToGPU", 1, 1),
        ("Copy", 1, 2),
        ("CopyGPUToCPU", 1, 2),
    ]
    assert written.op[3] == encode(net).op[0]


def test_new_external_inputs_replace_a_list_with_repetitions():
    net = net_of('external_input: "a" external_input: "b" external_input: "a"')
    assert list(encode(net).external_input) == ["a", "b", "a"]
    assert list(encode(net.with_(external_inputs=("a", "b", "c"))).external_input) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "aten.relu.default"}, "operators of type 'aten.relu.default' are not Caffe2's"),
        ({"type": "AllReduce"}, "operators of type 'AllReduce' are not Caffe2's"),
        ({"operands": "t_"}, "operators of type 'Relu' are not Caffe2's"),
        ({"args": {"x": None}}, "argument x=None is not Caffe2's"),
        ({"args": {"x": (1, 2.0)}}, r"argument x=\(1, 2.0\) is not Caffe2's"),
        ({"args": {"x": ((1,),)}}, r"argument x=\(\(1,\),\) is not Caffe2's"),
        ({"args": {"x": 2**63}}, "argument x=9223372036854775808 does not fit"),
        ({"args": {"x": 1e39}}, r"argument x=1e\+39 does not fit"),
        ({"args": {"x": (float("inf"), -1e39)}}, r"argument x=\(inf, -1e\+39\) does not fit"),
        ({"args": {"x": "\ud800"}}, "argument x='.ud800' does not fit"),
        ({"outputs": ("\ud800",)}, "output .* is not text in UTF-8"),
        ({"proto": "nonsense"}, "the text of a NetDef cannot be read"),
    ],
)
def test_what_is_not_caffe2s_is_not_saved(tmp_path, changes, message):
    net = net_of('name: "n" external_input: "x" op { type: "Relu" input: "x" output: "y" }')
    path = tmp_path / "net.pb"
    caffe2.save_net(net, path)
    before = path.read_bytes()
    with pytest.raises(GraphirError, match=message) as error:
        caffe2.save_net(net.with_(ops=(net.ops[0], net.ops[0]._replace(**changes))), path)
    assert "in   net 'n', op[1]" in str(error.value)
    assert error.value.at
    assert error.value.fix
    assert path.read_bytes() == before


def test_only_nets_are_saved(tmp_path):
    with pytest.raises(GraphirError, match="save_net takes a Net, not str"):
        caffe2.save_net("net.pb", tmp_path / "x.pb")
