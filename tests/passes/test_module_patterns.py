"""Patterns over module paths: what they name, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphir.passes.module_patterns import claims
from torch import nn

from graphir import Program, capture, passes
from graphir.errors import PassError
from graphir.ir.device import gpu
from graphir.ir.module_patterns import ModulePattern


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("layer4", ["layer4"], ["layer", "layer40", "a.layer4", "layer4.0"]),
        ("h[2:4]", ["h.2", "h.3"], ["h.1", "h.4", "h.20", "h", "gh.2"]),
        ("h[2]", ["h.2"], ["h.1", "h.20"]),
        ("h[10:]", ["h.10", "h.123"], ["h.1", "h.9"]),
        ("h[:2]", ["h.0", "h.1"], ["h.2"]),
        ("[1:3]", ["1", "2"], ["0", "3", "h.1"]),
        ("h[1:3].attn", ["h.1.attn", "h.2.attn"], ["h.3.attn", "h.1"]),
        ("a[0].b[1]", ["a.0.b.1"], ["a.1.b.1", "a.0.b.0"]),
        ("*.attn", ["a.attn", "b.attn"], ["attn", "a.b.attn"]),
        ("**.norm", ["norm", "a.norm", "a.b.norm"], ["a.norm1", "anorm"]),
        ("a.**", ["a.b", "a.b.c"], ["a", "b"]),
        ("conv*", ["conv1", "conv2"], ["conv", "conv1.a"]),
        ("**", ["a", "a.b"], []),
        ("a.b", ["a.b"], ["axb"]),
        ("", [""], ["a", "a.b"]),
    ],
)
def test_what_a_pattern_names(pattern: str, named: list[str], others: list[str]) -> None:
    found = ModulePattern(pattern)
    assert [path for path in [*named, *others] if found.matches(path)] == named


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("h[", "'h\\[' is not a pattern of modules"),
        ("h]", "'h]' is not a pattern"),
        ("h[]", "'h\\[\\]' is not a pattern"),
        ("h[-1]", "'h\\[-1\\]' is not a pattern"),
        ("h[1:2:3]", "is not a pattern"),
        ("h[" + "9" * 40 + "]", "is not a pattern"),
        ("h[3:3]", "\\[3:3\\] in pattern 'h\\[3:3\\]' is empty"),
    ],
)
def test_what_is_no_pattern(pattern: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        ModulePattern(pattern)


def test_a_long_pattern_of_stars_is_matched_in_time() -> None:
    assert not ModulePattern("**.a" * 12).matches("a." * 60 + "b")


def blocks() -> Program:
    """Two blocks of two layers."""
    block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))  # noqa: E731
    model = nn.Sequential()
    model.add_module("first", block())
    model.add_module("second", block())
    return capture(model, (torch.randn(2, 4),), loss=lambda out: out.sum())


def test_a_module_is_claimed_with_all_inside_of_it() -> None:
    claimed = claims(blocks(), ["second", "first[1:]"])
    assert claimed == {
        **dict.fromkeys(["second", "second.0", "second.1", "second.2"], "second"),
        **dict.fromkeys(["first.1", "first.2"], "first[1:]"),
    }


CLOSE = ["second.0", "second", "second[0]", "second.*", "*", "second.**", "**", ""]
"""Patterns that name ``second.0``, or a module that it is in, the closest one first."""


def test_of_several_patterns_for_one_module_the_closest_one_holds() -> None:
    program = blocks()
    for i, pattern in enumerate(CLOSE):
        for farther in CLOSE[i + 1 :]:
            for given in ([pattern, farther], [farther, pattern]):
                assert claims(program, given)["second.0"] == pattern


@pytest.mark.parametrize(("one", "other"), [("second.*", "*.0"), ("second.**", "**.0"), ("secon*", "*cond")])
def test_patterns_that_are_equally_close_are_refused_where_they_say_different_things(one: str, other: str) -> None:
    path = "second" if one == "secon*" else "second.0"
    with pytest.raises(PassError) as refusal:
        claims(blocks(), {one: 0, other: 1})
    assert str(refusal.value) == (
        f"module {path!r} is named by two patterns that are equally close, {one!r} and {other!r}\n"
        f"  fix  give {path!r} an entry of its own, or narrow one of the patterns"
    )
    assert claims(blocks(), [one, other])[path] == one  # patterns of a list say nothing that could differ
    assert claims(blocks(), {one: 0, other: 0})[path] == one
    if path == "second.0":
        assert claims(blocks(), {one: 0, other: 1, path: 2})[path] == path  # what the remedy says


def test_patterns_leave_out() -> None:
    left = claims(blocks(), {"**": 1, "!second": None, "!first[1:]": None})
    assert left == dict.fromkeys(["first", "first.0", "loss"], "**")
    assert "second.0" not in claims(blocks(), ["second", "!**.0"])  # though the path as it stands is closer


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["!second"],
            "'!second' leaves out modules that no other pattern names\n  fix  name modules that",
        ),
        (["first", "!second"], "'!second' leaves out modules that no other pattern names"),
        (["first.0", "!first"], "'first.0' names only what '!first' leaves out\n  fix  give 'first.0' up, or '!first'"),
        (["**", "!third"], "no module of program 'sequential' is named by 'third'"),
        (
            {"second": 0, "second[1:]": 1},
            "'second[1:]' names only modules for which 'second' holds, which is closer\n"
            "  fix  name the modules as they stand, such as 'second.1'",
        ),
        (
            {"first": 0, "*": 1, "**": 2},
            "'**' names only modules for which closer ones hold: 'first', '*'\n  fix  name the modules as",
        ),
    ],
)
def test_patterns_that_decide_nothing_are_refused(patterns: Any, message: str) -> None:
    with pytest.raises(PassError) as refusal:
        claims(blocks(), patterns)
    assert str(refusal.value).startswith(message)


def test_everything_is_the_model_itself() -> None:
    program = blocks()
    moved = passes.shift_modules(program, {"": 1})
    assert {op.device for op in moved.step.ops} == {gpu(1)}
    assert passes.shift_modules(program, {"": torch.device("cuda:1")}) == moved
    but = passes.shift_modules(program, {"": 1, "second": 0})
    assert {op.device for op in but.step.ops if op.module[:6] == "second" and op.phase == "forward"} == {gpu(0)}
    assert {op.device for op in but.step.ops if op.module[:5] == "first" and op.phase == "forward"} == {gpu(1)}
    for other in (moved, but, passes.shift_modules(program, {"**": 1, "!second": None})):
        assert passes.Pipeline(other.history[-1])(program) == other


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            {"!second": 1, "**": 0},
            "modules: '!second' leaves modules out: they go nowhere\n  fix  write '!second': None, beside",
        ),
        (
            {"second": None},
            "modules: 'second' goes to None\n  fix  give a device, or no entry; where another pattern names",
        ),
    ],
)
def test_just_what_is_left_out_goes_nowhere(modules: dict[str, Any], message: str) -> None:
    for pattern_pass in (passes.shift_modules, lambda p, given: passes.shard(p, given, [0, 1])):
        with pytest.raises(PassError, match=message.replace("modules:", "(modules|placement):")):
            pattern_pass(blocks(), modules)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("secnd", "no module of program '.*' is named by 'secnd'; did you mean 'second'"),
        ("first.0.weight", "'first.0.weight' is a parameter of module 'first.0'\n.*name the module: first.0"),
        ("relu", "no module .* is named by 'relu'"),
        ("h[3:]", "no module .* is named by 'h\\[3:\\]'.*\n  fix  modules of the model: first, loss, second"),
    ],
)
def test_what_names_no_module_says_what_it_is(pattern: str, message: str) -> None:
    program = blocks()
    before = str(program)
    with pytest.raises(PassError, match=message):
        passes.shift_modules(program, {pattern: "gpu:1"})
    assert str(program) == before


def test_an_activation_that_is_no_module_names_its_module() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).tanh()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Own()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) + 1

    program = capture(Outer(), (torch.randn(2, 4),), loss=lambda out: out.sum())
    inner = next(op.outputs[0] for op in program.step.ops if op.module == "own" and op.outputs[0] != "own")
    with pytest.raises(PassError, match=f"'{inner}' is an activation of module 'own'|a blob"):
        passes.shift_modules(program, {inner: 1})
