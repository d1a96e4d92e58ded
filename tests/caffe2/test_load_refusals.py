"""Files that are no nets of Caffe2 are refused, with the place."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest
from cases import OWN
from hypothesis import given, settings
from hypothesis import strategies as st
from written import net_of, parsed

from graphir import FileError, caffe2
from graphir.caffe2.convert import encode
from graphir.caffe2.files import read_net

NET = OWN / "models/mlp_weightedsum_1dev/net.pb"
TEXT = OWN / "models/mlp_weightedsum_1dev/net.pbtxt"


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


@settings(max_examples=100, deadline=None)
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
