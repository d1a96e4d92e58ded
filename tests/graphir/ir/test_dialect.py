"""A net's dialect: what Caffe2's names and operators mean where torch's mean something else."""

from __future__ import annotations

import ast
import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from small import two_layers
from sources import FOLDERS, Source, sources

import graphir
from graphir import caffe2
from graphir.errors import GraphirError
from graphir.ir.dialect import TORCH, dialect_called
from graphir.ir.files.disk import save
from graphir.ir.net import Net

BODY = """
  input m : f32[2] @gpu:1
  input step : f32[1] @cpu:0
  y : f32[2] @gpu:1 = Adam(m, m, m, m, m, step)
"""


def net(body: str, *, imported: bool) -> Net:
    found = graphir.parse("net small {\n" + body + ('  proto "name: \\"small\\""\n' if imported else "") + "}")
    assert isinstance(found, Net)
    return found


def test_a_captured_net_speaks_torchs_dialect_and_an_imported_one_caffe2s(tmp_path: Path) -> None:
    imported = net(BODY, imported=True)
    caffe2.save_net(imported, tmp_path / "net.pb")
    assert two_layers().step.dialect is TORCH
    assert caffe2.load_net(tmp_path / "net.pb").dialect is imported.dialect is dialect_called("caffe2")
    assert (TORCH.name, imported.dialect.name) == ("torch", "caffe2")


@pytest.mark.parametrize("kept", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("imported", [False, True])
def test_copies_of_a_net_have_its_dialect(kept: Callable[[Net], Net], imported: bool) -> None:
    before = net(BODY, imported=imported)
    assert kept(before) == before
    assert kept(before).dialect is before.dialect


@pytest.mark.parametrize("imported", [False, True])
def test_text_and_files_keep_the_dialect(imported: bool, tmp_path: Path) -> None:
    before = net(BODY, imported=imported)
    save(before, tmp_path / "net.json")
    for after in (graphir.parse(str(before)), graphir.load(tmp_path / "net.json")):
        assert after == before
        assert after.dialect is before.dialect


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(GraphirError, match="unknown dialect 'cafe2'; did you mean 'caffe2'") as caught:
        dialect_called("cafe2")
    assert caught.value.fix == "dialects: torch, caffe2"


def test_a_type_without_its_rules_has_all_operands_where_it_runs() -> None:
    dialect = net(BODY, imported=True).dialect
    placeholders = dialect.without(["Adam", "NCCLReduce"])
    assert {"Adam", "NCCLReduce", "Iter"} <= dialect.elsewhere
    assert dialect.elsewhere - placeholders.elsewhere == {"Adam", "NCCLReduce"}


def test_what_a_step_without_outputs_leaves_in_a_workspace_are_its_results() -> None:
    assert net(BODY, imported=True).results == ("y",)
    assert net(BODY, imported=False).results == ()
    assert net(BODY + "  output m\n", imported=True).results == ("m",)


READERS = {
    "graphir/analysis/values.py",  # tells operators apart by all that they say
    "graphir/caffe2/convert.py",
    "graphir/caffe2/dialect.py",
    "graphir/ir/files/decode.py",
    "graphir/ir/files/encode.py",
    "graphir/ir/text/parse_net.py",
    "graphir/ir/text/printer.py",
}


def reads_proto(source: Source) -> bool:
    if ".proto" not in source.text:
        return False
    return any(isinstance(node, ast.Attribute) and node.attr == "proto" for node in ast.walk(source.tree))


def test_only_the_dialect_and_what_reads_and_writes_nets_look_at_their_text() -> None:
    assert {str(source) for folder in FOLDERS for source in sources(folder) if reads_proto(source)} == READERS
