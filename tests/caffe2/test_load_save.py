"""Files of Caffe2's nets: what was recorded is written back as it was, whole or not at all."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import OWN, SHARED, cases, folders, nets, read_json

import graphir
from graphir import FileError, Net, caffe2
from graphir.caffe2.convert import encode
from graphir.caffe2.files import read_net
from graphir.caffe2.schema import messages
from graphir.ir.files import save as save_json

NET = OWN / "models/mlp_weightedsum_1dev/net.pb"
TEXT = OWN / "models/mlp_weightedsum_1dev/net.pbtxt"


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


# The schema


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
