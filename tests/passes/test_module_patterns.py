"""Patterns over module paths: what they name, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from graphir.passes.module_patterns import claims
from torch import nn

from graphir import Program, capture, passes
from graphir.errors import PassError
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
    ],
)
def test_what_a_pattern_names(pattern: str, named: list[str], others: list[str]) -> None:
    found = ModulePattern(pattern)
    assert [path for path in [*named, *others] if found.matches(path)] == named


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "an empty pattern names no module\n  fix  write .. for the whole model"),
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


@pytest.mark.parametrize("other", ["second", "second.0", "**.0", "*"])
def test_two_patterns_for_one_module_are_refused(other: str) -> None:
    with pytest.raises(PassError, match=r"module 'second(\.0)?' is named by two patterns") as e:
        claims(blocks(), ["second.**" if other == "second.0" else "secon*", other])
    assert "let one of them leave it out" in str(e.value)


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
