"""Readers of text take time in proportion to its length, whatever stands in it: compared at two sizes."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from graphir.passes import Pipeline
from hostile import refused

import graphir
from graphir import caffe2
from graphir.caffe2.dialect import mentioned

PIECES = (
    '"', "'", "(", ")", "[", "]", "{", "}", "<", ">", "\\", "#", "?", ";", ":", ",", "=", "|", "@", ".", "-", "+", "*",
    "/", " ", "\t", "0", "a", "e", "\\\"", "\\'", '"\\', '"a"', "a[", "?[", "[[", "[]", "a[b", 'a["', "a ", "a,", "a=",
    "a:", "a;1", "1:", "1.", "1e", "->", "<-", "@a", "gpu:", "gpu:0.", "a*", "2*a+", "-a", "a/", ' "', '| "', "| ",
    "a{", "[a, ", '{"a": ', 's: "', 's: "\\', 'input: "a" ', "op {", "op { arg {", "\\x",
)  # fmt: skip
"""What is repeated: every bracket, quote and mark, and beginnings of every kind of word."""

HEADS = {
    "net": "net n {\n  x : f32[2] @gpu:0 = ",
    "blob": "net n {\n  input x : ",
    "attributes": "net n {\n  x : f32[2] @gpu:0 = A() {proto=",
    "passes": "program p {\n  passes ",
    "fixed": "program p {\n  fixed ",
    "guard": "plan m on gpu:0 {\n  guard ",
    "arguments": "program p {\n  interface {\n    arguments ",
    "group": "program p {\n  interface {\n    group lr {a=",
    "first word": "",
}
SIZES = 1 << 11, 1 << 14


def is_linear(read: Callable[[str], object], text_of: Callable[[int], str]) -> bool:
    """Whether eight times the text takes less than 24 times as long; in proportion to its square it takes 64 times."""
    for _ in range(4):  # a time can be long by chance, not short
        seconds = []
        for size in SIZES:
            text = text_of(size)
            start = time.thread_time()
            refused(read, text)
            seconds.append(time.thread_time() - start)
        if seconds[1] < 24 * max(seconds[0], 2e-4):
            return True
    return False


def repeated(head: str, piece: str, end: str = "") -> Callable[[int], str]:
    return lambda size: head + piece * (size // len(piece)) + end


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("head", HEADS)
def test_text_is_parsed_in_linear_time(head: str) -> None:
    for piece in PIECES:
        for end in ("", '"'):
            assert is_linear(graphir.parse, repeated(HEADS[head], piece, end)), (piece, end)


@pytest.mark.parametrize("head", ["", "replicate{devices=", 'replicate{devices="'], ids=["pass", "option", "string"])
def test_pipelines_are_parsed_in_linear_time(head: str) -> None:
    for piece in PIECES:
        assert is_linear(Pipeline, repeated(head, piece)), piece


@pytest.mark.parametrize(
    "head", ["", 'op { type: "A" arg { name: "a" s: "', "op { arg { i: "], ids=["net", "string", "number"]
)
def test_caffe2_texts_are_read_in_linear_time(head: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pbtxt"

    def read(text: str) -> object:
        path.write_text(text)
        return caffe2.load_net(path)

    for piece in PIECES:
        assert is_linear(read, repeated(head, piece)), piece


def test_what_a_proto_mentions_is_found_in_linear_time() -> None:
    for piece in PIECES:
        assert is_linear(mentioned, repeated('s: "', piece)), piece


@pytest.mark.parametrize("field", ["name", "fixed", "history", "guards", "arguments", "size"])
def test_files_are_read_in_linear_time(field: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    net = {"name": "n"}

    def read(text: str) -> object:
        program: dict[str, object] = {"name": "p", "init": net, "step": net}
        match field:
            case "history":
                program[field] = [text]
            case "guards":
                program[field] = [{"guard": text, "reason": text}]
            case "arguments":
                program["interface"] = {"arguments": text}
            case "size":
                program["step"] = {
                    "name": "n",
                    "blobs": [{"name": "b", "device": "cpu", "role": "input", "shape": [text]}],
                }
            case _:
                program[field] = text
        path.write_text(json.dumps({"format": "graphir.program", "version": 3, "program": program}))
        loaded = graphir.load(path)
        graphir.parse(str(loaded))
        return graphir.show(loaded)

    for piece in PIECES:
        assert is_linear(read, repeated("", piece)), piece
