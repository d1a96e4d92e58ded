"""Whatever is given to a reader of text, files or options, only graphir's own errors leave it."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nets
import pytest
import tiny
from graphir.passes import Pipeline
from hostile import HOSTILE, mutated, refused

import graphir
from graphir import caffe2
from graphir.analysis.profile_files import add
from graphir.analysis.profiles import Measured, Profile, machine
from graphir.errors import GraphirError, ParseError
from graphir.facade import cli
from graphir.ir.files import disk

TEXTS = [
    str(x)
    for x in (
        tiny.program(),
        tiny.program().step,
        nets.random_plan(1, 8),
        graphir.passes.emit(nets.random_program(1, 8)),
    )
]
PIPELINES = (
    "replicate{devices=[0, 1]} | inject_copies",
    'shift_activations{activations=[relu, "a b"], shifts={0: 1}, strict=false} | share_storage',
)


def spliced(text: str, draw: random.Random) -> str:
    """The text with up to three of its words replaced, left out, doubled, or followed by a hostile one."""
    words = [*_words(text)]
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(words))
        match draw.randrange(5):
            case 0:
                words[at] = ""
            case 1:
                words[at] *= 2
            case 2:
                words[at] = draw.choice(words)
            case 3:
                words = words[: at + 1]
            case _:
                words[at] = draw.choice(HOSTILE)
    return "".join(words)


def _words(text: str) -> Sequence[str]:
    found = [""]
    for char in text:
        if char.isalnum() and found[-1].isalnum():
            found[-1] += char
        else:
            found.append(char)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_texts(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        refused(graphir.parse, spliced(draw.choice(TEXTS), draw))


STATEMENTS = (
    "dims", "fixed", "guard", "replicas", "passes", "sizes", "value", "buffer", "interface {", "arguments",
    "results", "loss", "optimizer", "feed", "output", "gradient", "module", "group", "state", "net n {",
    "init net n {", "input", "x : ", "}", "gpu:0.compute:", "gpu:0.compute: run", "gpu:0.compute: wait",
    "gpu:0.compute: free", "gpu:0.copy_in: collective", "external", "x : f32[2] @gpu:0 = A(",
    "x : f32[2] @gpu:0 = aten.add(x, x) {phase=", "proto", "param x : f32[2] strides", "group lr {a=",
)  # fmt: skip


@pytest.mark.parametrize("opening", ["program m {", "plan m on gpu:0 {", "net m {"])
def test_each_statement_with_each_word(opening: str) -> None:
    for statement in STATEMENTS:
        for word in HOSTILE:
            for inside in ("", "interface {\n", "net n {\n"):
                refused(graphir.parse, f"{opening}\n{inside}{statement} {word}")
                refused(graphir.parse, f"{opening}\n{inside}{statement} {word} {word}\n}}\n}}")


@pytest.mark.parametrize(
    "text", ["plan m on gpu:0{\nguard 6", 'program m {\nguard "a>=1" 6', "program m {\nfixed none"]
)
def test_a_word_that_is_no_string_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match=r"(6|none) is not a string") as caught:
        graphir.parse(text)
    assert caught.value.fix.startswith("write strings as in JSON")


@pytest.mark.parametrize("seed", range(4))
def test_pipelines(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(250):
        refused(Pipeline, spliced(draw.choice(PIPELINES), draw))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("replicate{devices=[" + "1" * 5000 + "]}", "a number of more than 4000 characters"),
        ("shift_activations{activations=[a], shifts={[0]: 1}}", "a key is a number or a word"),
        ("shift_activations{activations=[a], shifts={{}: 1}}", "a key is a number or a word"),
        ("replicate{devices=[1e999]}", "inf is not a device"),
    ],
    ids=["digits", "list", "dict", "infinity"],
)
def test_odd_options_are_refused(text: str, message: str) -> None:
    with pytest.raises(GraphirError, match=message):
        Pipeline(text)


@pytest.mark.parametrize("suffix", [".pb", ".pbtxt", ".pb.gz", ".pbtxt.gz"])
def test_caffe2_files(suffix: str, tmp_path: Path) -> None:
    draw = random.Random(suffix)
    folder = Path(__file__).parent / "caffe2" / "data" / "models" / "mlp_2dev_sgd"
    net = caffe2.load_net(folder / "net.pb")
    path = tmp_path / f"x{suffix}"
    caffe2.save_net(net.with_(ops=net.ops[:12]), path)
    whole = path.read_bytes()
    for turn in range(150 if "txt" in suffix else 400):
        damaged = mutated(whole, draw)
        if suffix.endswith(".gz") and turn % 2:
            damaged = gzip.compress(mutated(gzip.decompress(whole), draw))
        path.write_bytes(damaged)
        for read in (caffe2.load_net, caffe2.load_program):
            refused(lambda _, read=read: graphir.show(read(path)), repr(damaged[:60]))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(2))
def test_files_of_profiles(seed: int, tmp_path: Path) -> None:
    draw, path = random.Random(seed), tmp_path / "p.json"
    add(path, PROFILE)
    whole = path.read_bytes()
    document = json.loads(whole)
    for way in _ways(document):
        for value in draw.sample((None, True, 10**400, -1, 1.5, "", [], {}, "\ud800", *HOSTILE), 6):
            path.write_text(json.dumps(_with(document, way, value)))
            refused(lambda _: str(graphir.Profile.load(path)), str(way))
    for _ in range(200):
        path.write_bytes(mutated(whole, draw))
        before = path.read_bytes()
        refused(lambda _: str(graphir.Profile.load(path)), repr(before[:60]))
        refused(lambda _: add(path, PROFILE), repr(before[:60]))


PROFILE = Profile(machine(), {"1 thread: aten.relu.default(f32[4])": Measured(4096, -8, 1e-6, True)})
COMMANDS = ("show", "check", "profile")


@pytest.mark.parametrize("seed", range(3))
def test_the_command_line(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "x.json"
    documents = [disk.to_json(x) for x in (tiny.program(), nets.random_plan(1, 8))]
    for _ in range(12):
        text = mutated(draw.choice(documents).encode(), draw)
        path.write_bytes(text)
        command = draw.choice(COMMANDS)
        kept = tmp_path / "p.json"
        add(kept, PROFILE)
        kept.write_bytes(mutated(kept.read_bytes(), draw))
        code = run(monkeypatch, command, [str(path), *(["--path", str(kept)] if command == "profile" else [])])
        kept.unlink()
        said = capsys.readouterr()
        assert "Traceback" not in said.err, (command, said.err)
        assert code in (0, 1, 2), (command, code)


def run(monkeypatch: pytest.MonkeyPatch, command: str, args: list[str]) -> int:
    monkeypatch.setattr("sys.argv", ["graphir", command, *args])
    try:
        cli.main()
    except SystemExit as e:
        return int(e.code or 0)
    return 0


def test_statements_of_files_are_checked_before_they_are_used(tmp_path: Path) -> None:
    """Each value of a program's file, replaced by each hostile one: the file is refused, or it can be printed."""
    path = tmp_path / "x.json"
    document = json.loads(disk.to_json(nets.random_plan(2, 6)))
    draw = random.Random(1)
    for way in _ways(document):
        for value in draw.sample((None, True, 10**400, -1, 1.5, "", "9" * 5000, [], {}, "\ud800", *HOSTILE), 3):
            edited = _with(document, way, value)
            path.write_text(json.dumps(edited))
            refused(lambda _: str(graphir.load(path)), str(way))


def _ways(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return (
        [at, *(way for key, item in items for way in _ways(item, (*at, key)))]
        if at
        else [way for key, item in items for way in _ways(item, (key,))]
    )


def _with(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    copied = value.copy()
    copied[way[0]] = _with(value[way[0]], way[1:], new)
    return copied
