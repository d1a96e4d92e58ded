"""Files: they hold everything, and are refused where they are not what they say."""

import json
import math
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import nets
import pytest
import tiny
import torch
from safetensors.torch import save_file

import graphir
from graphir import passes, runtime
from graphir.errors import FileError, GraphirError
from graphir.ir.blob import Blob
from graphir.ir.covers import Covers
from graphir.ir.device import gpu
from graphir.ir.files import disk as files
from graphir.ir.files import load, save
from graphir.ir.files.records import BlobRecord, OperatorRecord
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator, Symbol
from graphir.ir.plan import Instruction
from graphir.ir.program import Interface, ParamGroup, Program, Slot
from graphir.ir.size import Polynomial, dimension

ROWS = {"ops": OperatorRecord, "blobs": BlobRecord, "instructions": Instruction, "feeds": Slot}


FILES = Path(__file__).parents[2] / "golden" / "files"


def changed(path, *keys, to):
    """Change one place of a JSON file. A row whose field is named is written as an object, which says the same."""
    document = json.loads(path.read_text())
    place, kind = document, None
    for key, below in pairwise(keys):
        kind = ROWS.get(key, kind)
        if isinstance(place[key], list) and isinstance(below, str):
            place[key] = dict(zip(kind._fields, place[key], strict=False))
        place = place[key]
    place[keys[-1]] = to
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def net_file(tmp_path):
    path = tmp_path / "net.json"
    save(nets.random_program(1).step, path)
    return path


@pytest.fixture
def program_file(tmp_path):
    path = tmp_path / "program.json"
    save(nets.random_program(1), path, state=True)
    return path


# What comes back


@pytest.mark.parametrize("seed", range(12))
def test_programs_come_back(seed, tmp_path):
    program = nets.random_program(seed, spread=0.2 * (seed % 2))
    program.save(tmp_path / "p.json")
    assert load(tmp_path / "p.json") == program
    assert not load(tmp_path / "p.json").state


@pytest.mark.parametrize("seed", range(12))
def test_plans_come_back(seed, tmp_path):
    plan = nets.random_plan(seed)
    plan.save(tmp_path / "p.json")
    assert load(tmp_path / "p.json") == plan


def test_a_plan_without_value_numbers_is_read(tmp_path):
    plan = nets.random_plan(3)
    plan.save(tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    del document["values"]
    (tmp_path / "p.json").write_text(json.dumps(document))
    assert load(tmp_path / "p.json") == plan.with_(values={})


@pytest.mark.parametrize("seed", range(12))
def test_nets_come_back(seed, tmp_path):
    net = nets.random_program(seed).init
    save(net, str(tmp_path / "n.json"))
    assert load(str(tmp_path / "n.json")) == net


def everything():
    """A program that has something of each kind."""
    name = 'odd "name"\n#;слой'
    args = {"a": 1, "b": 1.0, "c": True, "d": "f32", "e": None, "f": (1, (2.5, ())), "g": Symbol("f32"), "i": -(2**70)}
    args |= {"h": Polynomial.of({("batch",): 2, (): -1}), "j": -math.inf, "k": -0.0, name: "nan"}
    effects = Effects(((0, 0),), ((1, 0),), True)
    patterns = {"operands": "t_", "results": "[t]_", "input_versions": (2,), "output_versions": (3, 0)}
    op = Operator("FC", (name,), (name, "y"), args, gpu(3), "reduce", name, "me", 2**63, effects=effects, **patterns)
    blob = Blob(name, (dimension("batch"), 3), "bf16", gpu(2), "state", "y", (3, 1), dimension("batch"))
    net = Net(
        name, (op,), {name: blob, "y": Blob("y", None, None, gpu(2), "output", "y")}, (name,), ("y",), {name: "y"}
    )
    interface = Interface(
        "[1]", (Slot(name, 1, 2.5), Slot(None, None, math.inf)), "y", (Slot("y"), Slot(None, None, 3)), "[]",
        {name: "y"}, ("SGD", "Adam"), {name: {"m": "y"}},
        (ParamGroup("lr", (name,), {"betas": (0.9, math.inf), "fused": None}), ParamGroup("lr", (), {}, {}, 1)),
        True, {name: "y"},
    )  # fmt: skip
    return Program(name, net, net, {"batch": 2}, Covers(fixed="why"), ("gpu_0/", "gpu_1/"), interface, ("a", "b"))


def test_every_field_comes_back(tmp_path):
    program = everything()
    op = program.step.ops[0]._replace(type="Copy", issue="placed", received="fresh")
    program = program.with_(step=program.step.with_(ops=(op,)), ahead=3, reduction="sum", shares=(3, 1))
    save(program, tmp_path / "p.json")
    again = load(tmp_path / "p.json")
    assert again == program
    assert again != program.with_(ahead=2) and again != program.with_(reduction="mean")
    assert again != program.with_(shares=(1, 3))
    assert repr(again.step.ops[0].args) == repr(program.step.ops[0].args)


@pytest.mark.parametrize("name", ["parked", "summed"])
def test_files_of_version_3_are_read(name):
    """What the names of passes said in them, fields say now: the program's plan is the one that stands beside it."""
    program, plan = load(FILES / f"{name}.v3.json"), load(FILES / f"{name}.plan.v3.json")
    if name == "summed":
        assert program.reduction == "sum" and program.ahead is None
        program = passes.inject_copies(passes.sync_batch_norm(program))
    else:
        copies = [op for op in program.step.ops if op.by == "park" and op.type == "Copy"]
        assert {(op.issue, op.received) for op in copies} == {("placed", "fresh")} and program.ahead == 0
        assert not any(op.issue or op.received for op in program.step.ops if op not in copies)
    made = passes.emit(program)
    assert plan == (made.with_(values={}) if name == "summed" else made)
    assert runtime.check(plan) == []


@pytest.mark.parametrize("kept", ["SGD", ""])
def test_files_of_version_4_have_one_optimizer_or_none(kept, tmp_path):
    save(everything(), tmp_path / "p.json")
    document = json.loads((tmp_path / "p.json").read_text())
    interface = document["program"]["interface"]
    del interface["optimizers"]
    interface["param_groups"] = [group[:4] for group in interface["param_groups"]] if kept else []
    document |= {"version": 4}
    interface["optimizer"] = kept
    (tmp_path / "p.json").write_text(json.dumps(document))
    found = load(tmp_path / "p.json").interface
    assert found.optimizers == ((kept,) if kept else ())
    assert [group.optimizer for group in found.param_groups] == ([0, 0] if kept else [])


def test_a_net_of_version_3_is_read(tmp_path):
    document = json.loads((FILES / "parked.v3.json").read_text())
    net = {"format": "graphir.net", "version": 3, "net": document["program"]["step"]}
    (tmp_path / "net.json").write_text(json.dumps(net))
    assert load(tmp_path / "net.json") == load(FILES / "parked.v3.json").step


@pytest.mark.parametrize("history", [["park{"], ["pipeline {"], ["x{a=" + "1" * 5000 + "}"], ["a | b"]])
def test_a_history_of_version_3_may_say_anything(history, tmp_path):
    path = shutil.copy(FILES / "summed.v3.json", tmp_path / "p.json")
    program = load(changed(path, "program", "history", to=history))
    assert program.history == tuple(history) and program.reduction == "mean"


# Notes

NOTES = {
    "balance": {"bound": 0.5, "groups": (1, 2, {"where": None}), "exact": True, "слой": ""},
    "certificate": "0692b534758240df",
}


def test_notes_come_back_and_decide_nothing(tmp_path):
    program = nets.random_program(1).with_(notes=NOTES)
    program.save(tmp_path / "p.json")
    again = load(tmp_path / "p.json")
    assert again.notes == NOTES and again == program == program.with_(notes={})
    again.save(tmp_path / "q.json")
    assert (tmp_path / "q.json").read_bytes() == (tmp_path / "p.json").read_bytes()
    plan = nets.random_plan(1)
    plan.with_(program=plan.program.with_(notes=NOTES)).save(tmp_path / "plan.json")
    assert load(tmp_path / "plan.json").program.notes == NOTES
    assert str(program) == str(program.with_(notes={}))


@pytest.mark.parametrize("note", [math.inf, math.nan, {1: 2}, (b"x",), {"a": (object(),)}, 1j])
def test_notes_that_json_does_not_have_are_refused(note, tmp_path):
    with pytest.raises(GraphirError, match=r"a note of program 'random1' holds .*, which JSON cannot hold") as caught:
        nets.random_program(1).with_(notes={"mine": note}).save(tmp_path / "p.json")
    assert caught.value.fix == (
        "notes hold numbers, texts, booleans, None, lists, and mappings from texts to such values"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nan", [math.nan, float("nan"), -math.inf + math.inf], ids=["math", "made", "computed"])
def test_values_that_are_not_numbers_come_back(nan, tmp_path):
    op = Operator("FC", (), (), {"a": nan, "b": (1.0, (nan, 2)), "c": 3}, gpu(0))
    net = Net("n", (op,), {})
    save(net, tmp_path / "n.json")
    for again in (load(tmp_path / "n.json"), graphir.parse(str(net))):
        assert math.isnan(again.ops[0].args["a"])
        assert again == net
        assert not again.ops[0] != op  # noqa: SIM202  # an operator of its own
    for other in ({"a": 1.0}, {"b": (nan, (nan, 2))}, {"c": nan}, {"d": nan}):
        assert net.with_(ops=(op._replace(args={**op.args, **other}),)) != net
    assert net.with_(ops=(op._replace(type="Relu"),)) != net


def test_equal_effects_are_stored_once(net_file):
    net = json.loads(net_file.read_text())["net"]
    assert len(net["effects"]) < 6
    indices = [op[OperatorRecord._fields.index("effects")] for op in net["ops"] if len(op) > 9]
    assert len(indices) > 6 and {index for index in indices if index is not None} == set(range(len(net["effects"])))


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_saved_is_loaded(seed, tmp_path):
    plan = nets.random_plan(seed)
    for x in (plan, plan.program, plan.step):
        graphir.save(x, tmp_path / "x.json")
        assert graphir.load(tmp_path / "x.json") == x


def test_the_operator_that_another_belongs_to_is_stored_by_position(tmp_path):
    op = Operator("FC", ("x",), ("y",), {}, gpu(0), of="x")
    blobs = {name: Blob(name, None, None, gpu(0), "input", name) for name in ("w", "x", "y")}
    net = Net("n", (op, op._replace(of="nowhere"), op._replace(of="")), blobs)
    graphir.save(net, tmp_path / "n.json")
    rows = json.loads((tmp_path / "n.json").read_text())["net"]["ops"]
    assert [row[OperatorRecord._fields.index("of") :] for row in rows] == [[1], ["nowhere"], []]
    assert [op.of for op in load(tmp_path / "n.json").ops] == ["x", "nowhere", ""]


# State


def test_state_comes_back_bit_for_bit(program_file):
    state = nets.random_program(1).state
    again = load(program_file).state
    assert list(again) == list(state)
    assert all(torch.equal(again[n], t) and again[n].dtype == t.dtype for n, t in state.items())


def test_state_is_read_when_asked_for(program_file):
    state = load(program_file).state
    assert state["fc1.weight"] is state["fc1.weight"]
    assert len(state._read) == 1


def test_strides_come_back(tmp_path):
    blob = Blob("w", (2, 3, 4, 5), "f32", gpu(0), "param", "w", (60, 1, 15, 3))
    init = Net("i", (Operator("graphir.load", (), ("w",), {"key": "weight"}, gpu(0), "init"),), {"w": blob})
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    program = Program("p", init, Net("s", (), {"w": blob}, ("w",)), state={"weight": tensor})
    save(program, tmp_path / "p.json", state=True)
    again = load(tmp_path / "p.json").state["weight"]
    assert again.stride() == tensor.stride()
    assert torch.equal(again, tensor)


def test_tensors_that_share_memory_are_saved(tmp_path):
    base = torch.randn(4, 4)
    net = Net("n", (), {})
    state = {"a": base, "b": base, "c": base[1], "d": base.t(), "e": base[:1].expand(3, 4)}
    save(Program("p", net, net, state=state), tmp_path / "p.json", state=True)
    again = load(tmp_path / "p.json").state
    assert all(torch.equal(again[n], t) for n, t in state.items())


def test_a_program_without_state_cannot_save_it(tmp_path):
    with pytest.raises(GraphirError, match="program 'random1' has no state to save"):
        save(nets.random_program(1).with_(state={}), tmp_path / "p.json", state=True)
    assert not list(tmp_path.iterdir())


def test_tensors_without_bytes_cannot_be_saved(tmp_path):
    net = Net("n", (), {})
    with pytest.raises(FileError, match="the state cannot be written"):
        save(Program("p", net, net, state={"a": torch.empty(2, device="meta")}), tmp_path / "p.json", state=True)
    assert not list(tmp_path.iterdir())


def test_a_program_is_saved_with_its_state(tmp_path):
    program = nets.random_program(1)
    graphir.save(program, tmp_path / "p.json", state=True)
    assert list(graphir.load(tmp_path / "p.json").state) == list(program.state)


@pytest.mark.parametrize("kind", ["net", "plan"])
def test_what_has_no_state_is_not_saved_with_it(kind, tmp_path):
    x = nets.random_plan(1) if kind == "plan" else nets.random_program(1).step
    with pytest.raises(GraphirError, match=f"a {kind} has no state to save\n.*its program with state=True"):
        graphir.save(x, tmp_path / "x.json", state=True)
    assert not list(tmp_path.iterdir())


def test_something_else_is_not_saved(tmp_path):
    with pytest.raises(GraphirError, match="save takes a Net, Program or Plan, not dict"):
        graphir.save({}, tmp_path / "x.json")


def test_a_missing_state_file_is_refused(program_file):
    program_file.with_name("program.json.safetensors").unlink()
    with pytest.raises(FileError, match="the file of the program's tensors is missing"):
        load(program_file)


def test_a_damaged_state_file_is_refused(program_file):
    program_file.with_name("program.json.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(FileError, match="the program's tensors cannot be read"):
        load(program_file)


def test_a_flipped_byte_is_refused_when_its_tensor_is_read(program_file):
    path = program_file.with_name("program.json.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    state = load(program_file).state
    with pytest.raises(FileError, match=r"tensor '.*' is damaged: its bytes do not match the checksum") as caught:
        dict(state)
    assert caught.value.where == str(path)
    assert caught.value.fix == "save the program again with state=True; its two files belong together"


def test_a_file_without_checksums_is_read(program_file):
    document = json.loads(program_file.read_text())
    for record in document["program"]["state"].values():
        del record[2]
    program_file.write_text(json.dumps(document))
    assert len(dict(load(program_file).state)) == len(nets.random_program(1).state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_every_type_has_a_checksum(tmp_path, dtype, shape):
    net = Net("n", (), {})
    tensor = torch.ones(shape).to(dtype)
    save(Program("p", net, net, state={"a": tensor}), tmp_path / "p.json", state=True)
    assert torch.equal(load(tmp_path / "p.json").state["a"], tensor)


@pytest.mark.parametrize("shape", [(0,), (1,), (1, 1)])
def test_tensors_whose_strides_say_nothing_are_saved(tmp_path, shape):
    net = Net("n", (), {})
    save(Program("p", net, net, state={"a": torch.zeros(()).expand(shape)}), tmp_path / "p.json", state=True)
    assert torch.equal(load(tmp_path / "p.json").state["a"], torch.zeros(shape))


def test_a_state_file_of_another_program_is_refused(program_file):
    save_file({"other": torch.zeros(1)}, program_file.with_name("program.json.safetensors"))
    with pytest.raises(FileError, match="is in one of the program's files and not in the other"):
        load(program_file)


def test_a_state_file_with_other_shapes_is_refused(program_file):
    state = {n: t.clone() for n, t in nets.random_program(1).state.items()} | {"fc1.weight": torch.zeros(7)}
    save_file(state, program_file.with_name("program.json.safetensors"))
    with pytest.raises(FileError, match=r"tensor 'fc1.weight' is of shape \[7\], but its program says \["):
        load(program_file)


def test_a_state_file_with_other_types_is_refused(program_file):
    state = {n: t.to(torch.float16) for n, t in nets.random_program(1).state.items()}
    save_file(state, program_file.with_name("program.json.safetensors"))
    with pytest.raises(FileError, match=r"is of type torch\.float16, but its program says f32"):
        load(program_file).state["fc1.weight"]


# Whole or not at all


@pytest.mark.parametrize("state", [False, True])
def test_a_failed_write_leaves_the_old_file(program_file, monkeypatch, state):
    before = {path.name: path.read_bytes() for path in program_file.parent.iterdir()}

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        save(nets.random_program(2), program_file, state=state)
    assert {path.name: path.read_bytes() for path in program_file.parent.iterdir()} == before


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileError, match="the file cannot be written: No such file or directory"):
        save(nets.random_program(1).step, tmp_path / "nowhere" / "n.json")


def test_files_have_the_usual_permissions(program_file):
    usual = program_file.with_name("usual")
    usual.touch()
    modes = {path.stat().st_mode for path in program_file.parent.iterdir()}
    assert modes == {usual.stat().st_mode}


def test_names_that_are_not_unicode_cannot_be_saved(tmp_path):
    with pytest.raises(FileError, match="the value cannot be written as JSON"):
        save(Net("\ud800", (), {}), tmp_path / "n.json")
    assert not list(tmp_path.iterdir())


# Refusals


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileError) as caught:
        load(tmp_path / "none.json")
    assert str(caught.value) == (
        f"the file cannot be read: No such file or directory\n  in   {tmp_path / 'none.json'}\n  fix  check the path"
    )


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(FileError, match="the file cannot be read: Is a directory"):
        load(tmp_path)


def test_a_newer_version_is_refused(net_file):
    with pytest.raises(FileError) as caught:
        load(changed(net_file, "version", to=7))
    assert caught.value.what == "the file has version 7 of its format, this graphir reads versions 3 to 5"
    assert caught.value.where == str(net_file)
    assert "install a graphir that reads this version" in caught.value.fix


@pytest.mark.parametrize("version", [1, 2])
def test_a_version_before_the_oldest_is_refused(version, net_file):
    with pytest.raises(FileError) as caught:
        load(changed(net_file, "version", to=version))
    assert str(caught.value) == (
        f"the file has version {version} of its format, written by a development version\n"
        f"  in   {net_file}\n"
        "  fix  load and save it with commit 75f5c08"
    )


def test_a_newer_version_is_refused_before_its_content_is_read(net_file):
    changed(net_file, "net", to={"everything": "new"})
    with pytest.raises(FileError, match="version 7"):
        load(changed(net_file, "version", to=7))


def test_an_unknown_format_is_refused(net_file):
    with pytest.raises(FileError, match=r"files of format 'graphir\.nest' cannot be read; did you mean 'graphir\.net'"):
        load(changed(net_file, "format", to="graphir.nest"))


@pytest.mark.parametrize(
    "text", ["", "hello", "{", "[]", "3", '{"format": "graphir.net"}', '{"version": 1}', "\xff\x00"]
)
def test_files_of_others_are_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(FileError, match="the file is damaged") as caught:
        load(path)
    assert caught.value.where.startswith(str(path))


def test_the_text_form_is_told_from_a_damaged_file(tmp_path):
    plan, path = nets.random_plan(3), tmp_path / "x.txt"
    for x in (plan, plan.program, plan.init, plan.step):
        path.write_text(str(x))
        with pytest.raises(FileError, match="the file holds graphir's text, not its JSON") as caught:
            load(path)
        assert "graphir.parse" in caught.value.fix


def test_a_file_cut_short_is_refused(net_file):
    text = net_file.read_bytes()
    for length in range(1, len(text), len(text) // 50):
        net_file.write_bytes(text[:length])
        with pytest.raises(FileError, match="the file is damaged"):
            load(net_file)


@pytest.mark.parametrize(
    ("keys", "value", "what", "place"),
    [
        (("net", "ops", 3, "device"), "gpu:x", "'gpu:x' is not a device", "net.ops[3]"),
        (("net", "ops", 3, "device"), 3, "Input should be a valid string", "net.ops[3].device"),
        (("net", "ops", 3, "phase"), "middle", "Input should be 'init', 'forward'", "net.ops[3].phase"),
        (("net", "ops", 3, "surprise"), 1, "Extra inputs are not permitted", "net.ops[3].surprise"),
        (("net", "ops", 3, "effects"), 99, "effects 99 are not in the table", "net.ops[3]"),
        (("net", "ops", 3, "effects"), -1, "effects -1 are not in the table", "net.ops[3]"),
        (("net", "ops", 3, "output_versions"), [-1], "greater than or equal to 0", "net.ops[3].output_versions[0]"),
        (("net", "ops", 3, "input_versions"), [0] * 9, "9 versions of ", "net.ops[3]"),
        (("net", "ops", 3, "output_versions"), [], "0 versions of ", "net.ops[3]"),
        (("net", "ops", 3, "operands"), "t)", "String should match pattern", "net.ops[3].operands"),
        (("net", "ops", 3, "seed"), True, "Input should be a valid integer", "net.ops[3].seed"),
        (("net", "ops", 3, "issue"), "soon", "Input should be '', 'placed' or 'due'", "net.ops[3].issue"),
        (("net", "ops", 3, "received"), 1, "Input should be '' or 'fresh'", "net.ops[3].received"),
        (("net", "ops", 3, "seed"), 1.0, "Input should be a valid integer", "net.ops[3].seed"),
        (("net", "ops", 3, "args"), {"a": {"size": "2*"}}, "'2*' is not a size", "net.ops[3]"),
        (("net", "ops", 3, "args"), {"a": [{"symbol": "f31"}]}, "{'symbol': 'f31'} is not an argument", "net.ops[3]"),
        (("net", "ops", 3, "args"), {"a": {"float": "1"}}, "{'float': '1'} is not an argument", "net.ops[3]"),
        (("net", "ops", 3, "args"), {"a": {"x": 1, "y": 2}}, "{'x': 1, 'y': 2} is not an argument", "net.ops[3]"),
        (("net", "ops", 3, "of"), 99, "of blob 99, which is not in the table", "net.ops[3]"),
        (("net", "ops", 3, "of"), -1, "of blob -1, which is not in the table", "net.ops[3]"),
        (("net", "blobs", 2, "shape"), ["2*"], "'2*' is not a size", "net.blobs[2]"),
        (("net", "blobs", 2, "shape"), [1.5], "Input should be a valid integer", "net.blobs[2].shape[0].int"),
        (("net", "blobs", 2, "shape"), [-1], "-1 is not a possible size", "net.blobs[2]"),
        (("net", "blobs", 2, "shape"), [2**48 + 1], f"{2**48 + 1} is not a possible size", "net.blobs[2]"),
        (("net", "blobs", 2, "shape"), [f"{2**49}*batch"], f"{2**49}*batch is not a possible size", "net.blobs[2]"),
        (
            ("net", "blobs", 2, "shape"),
            ["9" * 5000 + "*b"],
            "99999999999999999999… is not a possible size",
            "net.blobs[2]",
        ),
        (("net", "blobs", 2, "shape"), [2**30, 2**30], f"a shape has {2**60} elements or more", "net.blobs[2]"),
        (("net", "blobs", 2, "strides"), [1, 2, 3, 4, 5], "5 strides", "net.blobs[2]"),
        (("net", "blobs", 2, "strides"), [-1], "-1 is not a possible size", "net.blobs[2]"),
        (("net", "blobs", 2, "offset"), 2**60, f"{2**60} is not a possible size", "net.blobs[2]"),
        (("net", "ops", 3, "args"), {"a": {"size": "9" * 5000 + "*b"}}, "9… is not a possible size", "net.ops[3]"),
        (("net", "blobs", 2, "dtype"), "f31", "'f31' is not an element type; did you mean 'f32'", "net.blobs[2]"),
        (("net", "blobs", 2, "name"), "x", "blob 'x' is declared twice", "net.blobs[2]"),
        (("net", "blobs", 2, "role"), "thing", "Input should be 'param', 'buffer'", "net.blobs[2].role"),
        (("net", "effects", 0), {"views": [[-1, 0]]}, "greater than or equal to 0", "net.effects[0].views[0][0]"),
        (("net", "blobs", 2, "shape"), ["a" * 5000], "aaaaaaaaaaaaaaaaaaaa… is not a possible size", "net.blobs[2]"),
        (("net", "external_inputs"), ["x", "w", "x"], "external input 'x' is listed twice", "net.external_inputs"),
        (("net", "blobs"), {}, "Input should be a valid", "net.blobs"),
        (("net",), None, "Input should be", "net"),
    ],
)
def test_damaged_nets_are_refused(net_file, keys, value, what, place):
    with pytest.raises(FileError) as caught:
        load(changed(net_file, *keys, to=value))
    assert what in caught.value.what
    assert caught.value.where == f"{net_file}, at {place}"


@pytest.mark.parametrize(
    ("keys", "value", "what", "place"),
    [
        (("instructions", 0, "op"), 9999, "run of operator 9999", "instructions[0]"),
        (("instructions", 0, "op"), -1, "run of operator -1", "instructions[0]"),
        (
            ("instructions", 0, "event"),
            {"blob": "x", "version": -1},
            "greater than or equal to 0",
            "instructions[0].event.version",
        ),
        (("instructions", 0, "lane"), "gpu:0.side", "String should match pattern", "instructions[0].lane"),
        (("instructions", 0, "kind"), "jump", "Input should be 'run', 'copy'", "instructions[0].kind"),
        (("instructions", 0, "event"), ["x", 0, "gpu:0.compute"], "run with the wrong fields", "instructions[0]"),
        (("dims", "batch"), 0, "dimension 'batch' cannot be 0", "dims.batch"),
        (("program", "dims", "batch"), -3, "dimension 'batch' cannot be -3", "program.dims.batch"),
        (("program", "dims", "batch"), 2**60, f"dimension 'batch' cannot be {2**60}", "program.dims.batch"),
        (("values",), {"x": "0123"}, "String should match pattern", "values.x"),
        (
            ("program", "guards"),
            [{"guard": "batch>=2", "reason": "a\n  fix  b"}],
            "String should match pattern",
            "program.guards[0].reason",
        ),
        (("program", "fixed"), "a\nb", "String should match pattern", "program.fixed"),
        (
            ("program", "interface", "fetches"),
            [[None, None, [1]]],
            "Input should be a valid integer",
            "program.interface.fetches[0][2].int",
        ),
        (
            ("program", "interface", "feeds", 0, "value"),
            [1],
            "Input should be a valid integer",
            "program.interface.feeds[0].value.int",
        ),
        (("program", "interface", "surprise"), 1, "Unexpected keyword argument", "program.interface.surprise"),
        (("instructions", 0, 1), "gpu:0.side", "String should match pattern", "instructions[0][1]"),
        (
            ("instructions", 0),
            ["free", "gpu:0.compute", -1, 0, None, "x", 1],
            "NamedTuple should have at most 6 items",
            "instructions[0]",
        ),
    ],
)
def test_damaged_plans_are_refused(tmp_path, keys, value, what, place):
    path = tmp_path / "plan.json"
    save(nets.random_plan(4), path)
    with pytest.raises(FileError) as caught:
        load(changed(path, *keys, to=value))
    assert what in caught.value.what
    assert caught.value.where == f"{path}, at {place}"


def test_deep_nesting_is_refused(net_file):
    net_file.write_text('{"format": "graphir.net", "version": 4, "net": ' + "[" * 10**6)
    with pytest.raises(FileError, match="recursion limit exceeded"):
        load(net_file)


def test_large_files_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), files.MOST_BYTES + 1)
    with pytest.raises(FileError, match="the file has 1073741825 bytes; more than 1073741824 are not read"):
        load(path)


@pytest.mark.parametrize("device", ["/dev/zero", os.devnull])
def test_devices_are_refused_before_they_are_read(device):
    with pytest.raises(FileError, match="the path names a device") as caught:
        load(device)
    assert caught.value.where == device


def test_a_terminal_is_read():
    ours, theirs = os.openpty()
    try:
        os.write(ours, b"{}\n" + b"\x04" * 3)
        with pytest.raises(FileError, match="the file is damaged"):
            load(os.ttyname(theirs))
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_pipe_is_read(tmp_path):
    plan = nets.random_plan(3)
    plan.save(tmp_path / "plan.json")
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        pool.submit((tmp_path / "pipe").write_bytes, (tmp_path / "plan.json").read_bytes())
        assert load(tmp_path / "pipe") == plan


def test_what_would_be_too_large_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(FileError, match="more than 100 are not read"):
        save(nets.random_program(1).step, tmp_path / "n.json")
    assert not list(tmp_path.iterdir())


def test_a_pipe_or_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(FileError, match="the path names a device or a pipe"):
            tiny.program().save(path)
    assert pipe.is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_link_leads_to_the_file_that_was_written(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    for _ in range(2):
        tiny.program().save(link)
        assert link.is_symlink()
        assert load(tmp_path / "file") == load(link)
