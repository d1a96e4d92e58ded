"""Whatever a file says, it is read, or refused with one of graphir's errors, in bounded time and memory."""

from __future__ import annotations

import copy
import gzip
import json
import random
import tracemalloc

import nets
import pytest
import tiny
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import graphir
from graphir import caffe2, passes
from graphir.errors import FileError, GraphirError, ParseError
from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.files import disk, load, save
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program

VALUES = (
    None, True, 0, -1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, "", "x", "gpu:0", "gpu:999999", "gpu:0.compute",
    "batch", "batch*batch*batch", "-batch", "f32", "\n", '"', "{}", "__import__('os').abort()", "\u2028", "\x00",
    "\ud800", [], {}, [None], [[[]]], {"size": "batch"}, {"symbol": "f32"}, {"float": "nan"}, {"a": {"b": []}},
    "a" * 5000, [1] * 50,
)  # fmt: skip
DOCUMENTS = [
    json.loads(disk.to_json(x))
    for x in (tiny.program(), tiny.program().step, nets.random_plan(1, 10), passes.emit(nets.random_program(1, 10)))
]
SEEDS = st.integers(0, 2**32)


def places(document, at=()):
    """The way to each value in a JSON document, itself excepted."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield *at, key
        yield from places(value, (*at, key))


def edited(document, draw):
    """The document with up to four places changed."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 4))):
        *way, key = draw.choice(list(places(document)))
        holder = document
        for step in way:
            holder = holder[step]
        match draw.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[draw.randrange(len(holder))]))
            case 2 if isinstance(holder, dict):
                holder["name"] = holder.pop(key)
            case 3 if type(holder[key]) is int:
                holder[key] += draw.choice((-1, 1, 100))
            case _:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
    return document


def cut(content, draw, pieces):
    """Text or bytes with up to four pieces taken out, doubled or put in."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        end = min(end, at + 20)
        content = content[:at] + draw.choice((content[:0], content[at:end] * 2, *pieces)) + content[end:]
    return content


def used(x):
    """Do with a value what needs no state. Where it is sound, its text is read back as it."""
    again = graphir.parse(str(x))
    graphir.show(x)
    attempts = [lambda x: graphir.verify(x, placed=False) or checked(again, x)]
    if not isinstance(x, Net):
        attempts.append(graphir.memory)
    if isinstance(x, Program):
        attempts += [passes.find_activations, passes.inject_copies, passes.share_storage, passes.emit]
        attempts.append(lambda program: passes.replicate(program, [0, 1]))
    for attempt in attempts:
        try:
            attempt(x)
        except GraphirError:
            continue


def checked(again, x):
    assert again == x


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("untrusted") / "x.json"


def refused_or_used(path):
    try:
        x = load(path)
    except FileError as e:
        assert len(str(e).splitlines()) <= 4
    else:
        used(x)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
@example(813725)  # an operator writes an output that it does not have
@example(21477)  # an instruction has a field of another kind, which no text shows
def test_edited_files_are_refused_or_used(path, seed):
    draw = random.Random(seed)
    path.write_text(json.dumps(edited(draw.choice(DOCUMENTS), draw)))
    refused_or_used(path)


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_damaged_files_are_refused_or_used(path, seed):
    draw = random.Random(seed)
    noise = [draw.randbytes(draw.randrange(1, 9)), b"{", b'"', b"[[", b"\x00", b"1e999", b"\xff", b"\\ud800"]
    path.write_bytes(cut(json.dumps(draw.choice(DOCUMENTS)).encode(), draw, noise))
    refused_or_used(path)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "p.json"
    save(nets.random_program(1, 10), path, state=True)
    return path, path.with_name("p.json.safetensors").read_bytes()


@settings(max_examples=30, deadline=None)
@given(SEEDS)
def test_damaged_tensors_are_refused(stored, seed):
    draw = random.Random(seed)
    path, raw = stored
    damaged = cut(raw[:400], draw, [draw.randbytes(4), b"\xff" * 8, b"["]) + raw[400:]
    path.with_name("p.json.safetensors").write_bytes(damaged)
    try:
        state = load(path).state
        found = {name: state[name] for name in state}
    except FileError:
        return
    assert all(torch.equal(found[name], tensor) for name, tensor in nets.random_program(1, 10).state.items())


def with_argument(value):
    """The file of a net whose first operator has this argument."""
    op = '{"type": "A", "device": "cpu", "args": {"a": ' + value + "}}, "
    return json.dumps(DOCUMENTS[1]).replace('"ops": [', '"ops": [' + op)


def test_a_type_that_no_text_could_have_is_refused(path):
    path.write_text(
        json.dumps(DOCUMENTS[1]).replace('"ops": [', '"ops": [{"type": "' + "a" * 4001 + '", "device": "cpu"}, ')
    )
    with pytest.raises(GraphirError, match="has 4001 characters"):
        load(path)


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"size":', '[{"":['])
def test_deep_values_are_refused(path, opening):
    path.write_text(with_argument(opening * 10**5))
    with pytest.raises(FileError, match="recursion limit exceeded"):
        load(path)


def test_a_key_that_is_given_twice_has_its_last_value(path):
    path.write_text(json.dumps(DOCUMENTS[1]).replace('"version": 4', '"version": 2, "version": 4', 1))
    assert load(path) == tiny.program().step


def test_a_small_file_takes_little_memory(path):
    path.write_text(with_argument(f"[{','.join(['[]'] * 10**5)}]"))
    tracemalloc.start()
    try:
        load(path)
        assert tracemalloc.get_traced_memory()[1] < 100 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_what_unpacks_to_much_is_refused_before_it_is_whole(tmp_path):
    path = tmp_path / "x.pb.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    nbytes = path.stat().st_size  # as this zlib has it
    tracemalloc.start()
    try:
        with pytest.raises(
            FileError, match=rf"the file of {nbytes} bytes unpacks to more than 2097152, which are not read"
        ):
            caffe2.load_net(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".pb.gz", ".pbtxt.gz"])
def test_a_small_file_holds_no_million_of_operators(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    op = b"\x12\x0c\x0a\x01a\x12\x01b\x22\x04Relu" if suffix == ".pb.gz" else b'op{type:"Relu"}'
    path.write_bytes(gzip.compress(op * 200_000))
    assert path.stat().st_size < 50_000
    with pytest.raises(FileError, match="unpacks to more than 2097152") as caught:
        caffe2.load_net(path)
    assert caught.value.fix == "unpack it if you trust it, and give the unpacked file"


def test_a_net_that_would_not_be_read_again_is_not_written(tmp_path):
    path = tmp_path / "x.pb.gz"
    name = "a" * 100_000
    ops = tuple(Operator("Relu", (name,), (name,), {}, gpu(0)) for _ in range(11))
    long = Net("n", ops, {name: Blob(name, None, None, gpu(0), "input", name)}, (name,))
    with pytest.raises(
        FileError, match=r"the file would have \d+ bytes and unpack to \d+; more than 2097152 are not read"
    ):
        caffe2.save_net(long, path)
    assert not path.exists()
    caffe2.save_net(long, tmp_path / "x.pb")
    assert len(caffe2.load_net(tmp_path / "x.pb").ops) == 11


def strided(strides, path):
    """A program whose one parameter, [[0, 1, 2], [0, 1, 2]], has these strides, as it is loaded."""
    blob = Blob("w", (2, 3), "f32", gpu(0), "param", "w", strides)
    init = Net("i", (Operator("graphir.load", (), ("w",), {"key": "weight"}, gpu(0), "init"),), {"w": blob})
    state = {"weight": torch.arange(3.0).repeat(2, 1)}
    save(Program("p", init, Net("s", (), {"w": blob}, ("w",)), state=state), path, state=True)
    return load(path).state["weight"]


@pytest.mark.parametrize("strides", [(3, 1), (1, 2), (0, 1), (4000, 7)])
def test_strides_of_any_view_come_back(tmp_path, strides):
    tensor = strided(strides, tmp_path / "p.json")
    assert tensor.stride() == strides
    assert tensor.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("strides", [(10**9, 1), (1, 10**14), (1, 1), (2, 1)])
def test_strides_that_no_tensor_has_are_refused(tmp_path, strides):
    with pytest.raises(FileError, match=r"tensor 'weight' of shape \[2, 3\] cannot have the strides \["):
        strided(strides, tmp_path / "p.json")


def test_a_text_with_too_few_strides_is_refused():
    with pytest.raises(ParseError, match="1 strides"):
        graphir.parse("net n {\n  input x : f32[2,2] strides [1] @gpu:0\n}")


@pytest.mark.parametrize(
    "attempt",
    [passes.inject_copies, passes.share_storage, passes.find_activations, graphir.memory],
    ids=lambda f: f.__name__,
)
def test_what_an_unsound_program_makes_fail_is_told_as_unsound(attempt):
    program = tiny.program()
    ops = [op._replace(inputs=("nowhere", *op.inputs[1:])) if op.inputs else op for op in program.step.ops]
    step = program.step.with_(ops=tuple(ops), external_inputs=(*program.step.external_inputs, "lost"))
    with pytest.raises(GraphirError, match=r"nowhere|lost|verify it"):
        attempt(program.with_(step=step))
