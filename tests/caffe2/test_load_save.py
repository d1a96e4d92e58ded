"""Files of Caffe2's nets: what is read is written back as it was, and what is no net is refused."""

from __future__ import annotations

import gzip
import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import OWN, SHARED, cases, folders, nets, read_json
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import graphir
from graphir import FileError, GraphirError, Net, caffe2
from graphir.caffe2.convert import decode, encode
from graphir.caffe2.files import read_net
from graphir.caffe2.schema import messages
from graphir.ir.device import Device, gpu
from graphir.ir.files import save_net as save_json
from graphir.ir.operator import Operator

NET = OWN / "models/mlp_weightedsum_1dev/net.pb"
TEXT = OWN / "models/mlp_weightedsum_1dev/net.pbtxt"


def parsed(text: str) -> Any:
    from google.protobuf import text_format

    return text_format.Parse(text, messages().NetDef())


def net_of(text: str) -> Net:
    return decode(parsed(text), "x.pb")


def content(path: Path) -> bytes:
    raw = path.read_bytes()
    return gzip.decompress(raw) if path.suffix == ".gz" else raw


# What was recorded


@pytest.mark.parametrize("folder", folders())
def test_nets_are_saved_as_they_were(folder, tmp_path):
    for path in nets(folder):
        copy = tmp_path / path.name
        caffe2.save_net(caffe2.load_net(path), copy)
        assert content(copy) == content(path)
        assert read_net(copy) == read_net(path)


@pytest.mark.parametrize("folder", folders())
def test_nets_go_through_graphirs_own_text_and_files(folder, tmp_path):
    for path in nets(folder):
        net = caffe2.load_net(path)
        again = graphir.parse(str(net))
        assert again == net
        save_json(net, tmp_path / "net.json")
        loaded = graphir.load(tmp_path / "net.json")
        assert loaded == net
        assert encode(again) == encode(loaded) == read_net(path)


@pytest.mark.parametrize("folder", folders())
def test_nets_have_what_their_descriptions_say(folder):
    """The descriptions were written by Caffe2's own Python, not by this schema."""
    if folder.is_relative_to(OWN):
        if not SHARED.is_dir():
            pytest.skip(f"descriptions are in the larger set: {SHARED}")
        folder = SHARED / folder.relative_to(OWN)
    for path in nets(folder):
        described, net = read_json(path.with_name(path.name.split(".")[0])), caffe2.load_net(path)
        assert net.name == described["name"]
        assert list(net.external_inputs) == described["external_input"]
        assert list(net.external_outputs) == described["external_output"]
        assert len(net.ops) == len(described["op"])
        for op, wanted in zip(net.ops, described["op"], strict=True):
            assert (op.type, list(op.inputs), list(op.outputs)) == (wanted["type"], wanted["input"], wanted["output"])
            option = wanted["device_option"] or {"device_type": 0, "device_id": 0}
            assert op.device == f"{CAFFE2_KINDS[option['device_type']]}:{option['device_id']}"
            assert op.args == {arg["name"]: described_value(arg) for arg in wanted["arg"]}


CAFFE2_KINDS = {0: "cpu", 1: "gpu", 5: "ideep", 6: "hip"}


def described_value(arg: dict[str, Any]) -> Any:
    values = [value for kind, value in arg.items() if kind != "name"]
    value = values[0] if values else ()
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the larger set of recorded cases is not there: {SHARED}")
def test_the_cases_in_the_repository_are_those_that_were_recorded():
    own = [path for path in OWN.rglob("*") if path.is_file() and path.name != "DATA.md"]
    assert len(own) > 40
    assert [path for path in own if path.read_bytes() != (SHARED / path.relative_to(OWN)).read_bytes()] == []


def test_no_case_is_listed_twice():
    names = [case.name for case in cases("inject")]
    assert len(set(names)) == len(names)
    assert "edge_stale_copy" in names


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


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
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


# Writing


def test_compressed_files_have_no_time_stamp(tmp_path, monkeypatch):
    net = caffe2.load_net(NET)
    caffe2.save_net(net, tmp_path / "a.pb.gz")
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    caffe2.save_net(net, tmp_path / "b.pb.gz")
    assert (tmp_path / "a.pb.gz").read_bytes() == (tmp_path / "b.pb.gz").read_bytes()
    assert content(tmp_path / "a.pb.gz") == NET.read_bytes()


@pytest.mark.parametrize("suffix", [".pb", ".pbtxt.gz"])
def test_a_failed_save_leaves_the_file_that_was_there(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"net{suffix}"
    path.write_bytes(b"before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        caffe2.save_net(caffe2.load_net(NET), path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_net_that_would_be_an_empty_file_is_not_saved(tmp_path):
    with pytest.raises(FileError, match="an empty file is not read"):
        caffe2.save_net(Net("", (), {}), tmp_path / "x.pb")
    assert list(tmp_path.iterdir()) == []


# What is no net


def nested(depth: int) -> str:
    text = 'name: "inner"'
    for _ in range(depth):
        text = f'op {{ type: "A" arg {{ name: "n" n {{ {text} }} }} }}'
    return text


def refused(path: Path) -> FileError:
    with pytest.raises(FileError) as error:
        caffe2.load_net(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) <= 4
    return error.value


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("x.pb", b"", "the file is empty"),
        ("x.pbtxt", b"# nothing\n", "the file is empty"),
        ("x.pb", b"\x00" * 40, "the file is not a NetDef, or it was cut short or damaged"),
        ("x.pb", NET.read_bytes()[:-5], "the file is not a NetDef, or it was cut short or damaged"),
        ("x.pb", TEXT.read_bytes(), "the file is not a NetDef"),
        ("x.pb", b"\xf8\x06\x01", "the file has fields or values that a NetDef does not have"),
        ("x.pb", b"\x0a\x01n\x12\x03\x0a\x01x", "an operator has no type"),
        ("x.pb", b"\x0a\x02\xff\xff", "the name b'\\xff\\xff' is not text in UTF-8"),
        ("x.pbtxt", b'name: "n"\nop {\n  typ: "A"\n}\n', 'Message type "caffe2.OperatorDef" has no field named "typ"'),
        ("x.pbtxt", b'name: "n"\nop {\n  type: "A"\n', "the file is not a NetDef"),
        ("x.pbtxt", b'name: "n"\nop {\n  name: "A"\n}\n', "an operator has no type"),
        ("x.pbtxt", b'name: "n"\nname: "\xff"\n', "the file is not text in UTF-8"),
        ("x.pbtxt", NET.read_bytes(), "the file is not"),
        ("x.pb.gz", NET.read_bytes(), "the file is not compressed, or damaged"),
        ("x.pb.gz", gzip.compress(NET.read_bytes())[:-20], "the file is not compressed, or damaged"),
        ("x.pb.gz", gzip.compress(NET.read_bytes())[:40] + b"x" * 40, "the file is not compressed, or damaged"),
        ("x.pbtxt", b'op { type: "a.b" }', "the operator type 'a.b' has a dot"),
        ("x.pbtxt", b'op { type: "A" device_option { device_type: 77 } }', "there is no device type 77"),
        ("x.pbtxt", b'op { type: "A" device_option { device_type: -1 } }', "there is no device type -1"),
        ("x.pbtxt", b'op { type: "A" device_option { device_type: 1 device_id: -1 } }', "'gpu:-1' is not a device"),
        ("x.pbtxt", b'device_option { device_type: 77 }', "there is no device type 77"),
        ("x.pbtxt", b'op { type: "A" arg { name: "t" t { segment { begin: 1 } } } }', "a required field is missing"),
        ("x.pbtxt", nested(40).encode(), "nested too deep"),
        ("x.pbtxt", nested(3000).encode(), "nested too deep"),
        ("x.pb", parsed(nested(40)).SerializeToString(), "the file is not a NetDef"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_is_no_net_is_refused(tmp_path, name, raw, message):
    path = tmp_path / name
    path.write_bytes(raw)
    error = refused(path)
    assert message in error.what
    assert error.fix


def test_nets_are_nested_as_deep_as_protobuf_reads(tmp_path):
    caffe2.save_net(net_of(nested(32)), tmp_path / "x.pb")
    assert read_net(tmp_path / "x.pb") == parsed(nested(32))


@pytest.mark.parametrize(
    ("text", "line", "at"),
    [
        ('name: "n"\nop {\n  typ: "A"\n}\n', 3, 'typ: "A"'),
        ('name: "n"\nnum_workers: "A"\n', 2, 'num_workers: "A"'),
        ('name: "n"\nop {\n  type: "A"\n', 3, 'type: "A"'),
    ],
)
def test_an_error_in_text_says_its_line(tmp_path, text, line, at):
    path = tmp_path / "x.pbtxt"
    path.write_text(text)
    error = refused(path)
    assert error.where == f"{path}, at line {line}"
    assert error.at == at


def test_an_unknown_field_inside_an_operator_is_placed(tmp_path):
    path = tmp_path / "x.pb"
    path.write_bytes(b"\x12\x03\x22\x01A" + b"\x12\x06\x22\x01A\xf8\x06\x01")
    assert refused(path).where == f"{path}, at op[1]"


@pytest.mark.parametrize("name", ["net", "net.txt", "net.gz", "net.pb.zip", "net.pb.txt"])
def test_names_that_do_not_say_the_form_are_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(NET.read_bytes())
    assert f"the name '{name}' does not say how the net is written" in refused(path).what
    with pytest.raises(FileError, match="does not say how the net is written"):
        caffe2.save_net(caffe2.load_net(NET), path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "x.pb").what
    (tmp_path / "folder.pb").mkdir()
    assert "Is a directory" in refused(tmp_path / "folder.pb").what
    with pytest.raises(FileError, match="a path was expected, not int"):
        caffe2.load_net(3)
    with pytest.raises(FileError, match="cannot be written"):
        caffe2.save_net(caffe2.load_net(NET), tmp_path / "no" / "x.pb")


@pytest.mark.parametrize("field", ["input", "output", "name", "engine", "control_input"])
def test_names_that_are_not_utf_8_are_refused(tmp_path, field):
    message = parsed(f'name: "n" op {{ type: "A" {field}: "%%" }}')
    path = tmp_path / "x.pb"
    path.write_bytes(message.SerializeToString().replace(b"%%", b"\xc3\x28"))
    error = refused(path)
    assert "UTF-8" in f"{error.what} {error.fix}" or "cut short or damaged" in error.what


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'op { type: "A" output: "a" control_input: "b" } op { type: "B" output: "b" control_input: "a" }',
            "control inputs form a cycle: op[0] waits for op[1] waits for op[0]",
        ),
        (
            """op { type: "A" output: "a" control_input: "c" } op { type: "B" input: "a" output: "b" }
            op { type: "C" input: "b" output: "c" }""",
            "control inputs form a cycle: op[0] waits for op[2] waits for op[1] waits for op[0]",
        ),
        ('op { type: "A" output: "a" control_input: "a" }', "control inputs form a cycle: op[0] waits for op[0]"),
        (
            'op { type: "A" output: "a" control_input: "b" } op { type: "B" output: "b" }',
            "control input 'b' is made only by a later operator, op[1]",
        ),
    ],
)
def test_a_cycle_of_control_inputs_is_refused(tmp_path, text, message):
    path = tmp_path / "x.pbtxt"
    path.write_text(text)
    error = refused(path)
    assert error.what == message
    assert error.where == f"{path}, at op[0]"
    assert error.at == "a = A()"


def test_control_inputs_made_before_or_outside_are_kept():
    text = """external_input: "x" op { type: "A" output: "a" control_input: "x" control_input: "elsewhere" }
    op { type: "B" output: "b" control_input: "a" }"""
    assert encode(net_of(text)) == parsed(text)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, len(NET.read_bytes()) - 1), st.sampled_from([".pb", ".pbtxt", ".pb.gz"]))
def test_damage_is_refused_or_harmless(tmp_path_factory, noise, position, suffix):
    """Whatever the bytes are, there is a net that is saved as it was read, or one error."""
    raw = NET.read_bytes()
    path = tmp_path_factory.mktemp("damaged") / f"x{suffix}"
    for damaged in (noise, raw[:position] + noise + raw[position + len(noise) :], raw[:position]):
        path.write_bytes(gzip.compress(damaged) if suffix == ".pb.gz" else damaged)
        try:
            net = caffe2.load_net(path)
        except FileError:
            continue
        assert encode(net).SerializeToString(deterministic=True) == read_net(path).SerializeToString(deterministic=True)


# The schema


def test_protobuf_is_imported_by_the_first_file_only():
    code = (
        "import sys, graphir; assert callable(graphir.caffe2.load_net);"
        " assert not any(name.startswith('google.protobuf') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=OWN.parents[2])


def test_a_caffe2_in_the_process_keeps_its_own_messages():
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "other = descriptor_pb2.FileDescriptorProto(name='caffe2/proto/caffe2.proto', package='caffe2')\n"
        "other.message_type.add(name='NetDef')\n"
        "descriptor_pool.Default().AddSerializedFile(other.SerializeToString())\n"
        "from graphir.caffe2.schema import messages\n"
        "assert messages().NetDef.DESCRIPTOR.fields_by_name['op'].number == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=OWN.parents[2])


@pytest.mark.parametrize(
    ("message", "field", "number", "default"),
    [
        ("NetDef", "partition_info", 9, None),
        ("OperatorDef", "is_gradient_op", 9, False),
        ("OperatorDef", "op_version", 12, None),
        ("Argument", "qtensors", 12, None),
        ("Argument", "n", 8, None),
        ("Argument", "t", 10, None),
        ("DeviceOption", "extra_info", 6, None),
        ("TensorProto", "data_type", 2, 1),
        ("TensorProto", "storage_type", 12, 1),
        ("TensorProto", "segment", 11, None),
        ("QTensorProto", "data_type", 8, 2),
        ("ExternalDataProto", "record_size", 5, None),
    ],
)
def test_fields_have_caffe2s_numbers_and_defaults(message, field, number, default):
    file = messages().NetDef.DESCRIPTOR.file
    found = file.message_types_by_name[message].fields_by_name[field]
    assert found.number == number
    if default is not None:
        assert found.default_value == default


def test_packed_fields_are_written_packed():
    message = messages().NetDef()
    message.op.add(type="A").arg.add(name="t").t.float_data.extend([1.0, 2.0])
    assert b"\x1a\x08" + struct.pack("<2f", 1.0, 2.0) in message.SerializeToString()
