"""Passes as text: printing, reading, timing, refusing."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import two_layers

from graphir import passes
from graphir.errors import ParseError, PassError
from graphir.ir.program import Program

TEXT = "replicate{devices=[0, 1]} | shift_activations{activations=[fc2, loss], shifts={0: 2, 1: 3}} | inject_copies"


def test_text_round_trips() -> None:
    assert str(passes.Pipeline(TEXT)) == TEXT
    assert passes.Pipeline(str(passes.Pipeline(TEXT))) == passes.Pipeline(TEXT)


def test_space_does_not_matter() -> None:
    squeezed = "replicate{devices=[0,1]}|shift_activations{activations=[fc2,loss],shifts={0:2,1:3}}|inject_copies{}"
    assert passes.Pipeline(squeezed) == passes.Pipeline(TEXT)


@given(names=st.lists(st.text(max_size=12), max_size=4), strict=st.booleans(), source=st.integers(0, 5))
def test_any_name_round_trips(names: list[str], strict: bool, source: int) -> None:
    step = passes.ShiftActivations(activations=tuple(names), shifts={source: source + 1}, strict=strict)
    assert passes.Pipeline(str(step)).passes == (step,)


def test_history_is_the_pipeline_that_made_the_program() -> None:
    program = passes.Pipeline(TEXT)(two_layers())
    assert " | ".join(program.history) == TEXT
    assert passes.Pipeline(" | ".join(program.history))(two_layers()) == program


def test_functions_and_pipelines_agree() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    program = passes.shift_activations(program, ["fc2", "loss"], shifts={0: 2, 1: 3})
    assert passes.inject_copies(program) == passes.Pipeline(TEXT)(two_layers())


def test_a_pipeline_of_no_passes_is_read_back() -> None:
    nothing = passes.Pipeline([])
    assert passes.Pipeline(str(nothing)) == nothing
    assert nothing(two_layers()) == two_layers()


def test_a_run_times_each_pass() -> None:
    run = passes.Pipeline(TEXT).run(two_layers())
    assert [timing.name for timing in run.timings] == ["replicate", "shift_activations", "inject_copies"]
    assert all(timing.seconds > 0 and timing.verify_seconds > 0 for timing in run.timings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("| inject_copies", "character 0: expected the name of a pass"),
        ("inject_copies |", "character 15: expected the name of a pass"),
        ("inject_copies inject_copies", "character 14: expected '|' or the end"),
        ("replicate{devices=[0, 1}", "character 23: expected ','"),
        ("replicate{devices}", "character 17: expected '='"),
        ("replicate{devices=[0], devices=[1]}", "option 'devices' is given twice"),
        ("shift_activations{activations=[], shifts={0: 2, 0: 3}}", "a key is given twice"),
        ("replicate{devices=" + "[" * 5000 + "]" * 5000 + "}", "options are nested more than 8 deep"),
    ],
)
def test_bad_text_says_where(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=re.escape(message)):
        passes.Pipeline(text)


def test_a_pass_that_returns_no_program_is_refused() -> None:
    class Forgets(passes.Pass):
        name: ClassVar[str] = "forgets"

        def rewrite(self, program: Program) -> Program:
            program.with_()  # type: ignore[return]

    with pytest.raises(PassError, match=r"pass 'forgets' returned NoneType, not a Program\n  fix  return program"):
        Forgets()(two_layers())


def test_unknown_pass_names_the_nearest() -> None:
    with pytest.raises(PassError, match="unknown pass 'inject_copy'; did you mean 'inject_copies'"):
        passes.Pipeline("inject_copy")


def test_unknown_option_is_refused() -> None:
    with pytest.raises(PassError, match=r"replicate: devises: no such option\n.*options of replicate: devices"):
        passes.Pipeline("replicate{devices=[0], devises=[1]}")


@pytest.mark.parametrize("passes_", [[None], 3 * [two_layers]])
def test_what_is_no_pass_is_refused(passes_: object) -> None:
    with pytest.raises(PassError, match="a pipeline is made of passes"):
        passes.Pipeline(passes_)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda given: passes.replicate(given, [0]), "replicate takes a Program, not"),
        (lambda given: passes.shift_activations(given, [], {}), "shift_activations takes a Program, not"),
        (passes.inject_copies, "inject_copies takes a Program, not"),
        (passes.share_storage, "share_storage takes a Program, not"),
        (passes.find_activations, "find_activations takes a Program, not"),
        (passes.emit, "emit takes a Program, not"),
        (passes.Pipeline("inject_copies"), "a pipeline takes a Program, not"),
    ],
)
def test_what_is_no_program_is_refused(call, message: str) -> None:
    with pytest.raises(PassError, match=f"{message} Plan\n +fix +give the program that the plan was emitted from"):
        call(passes.emit(two_layers()))
    with pytest.raises(PassError, match=f"{message} NoneType\n +fix +graphir.capture makes one"):
        call(None)


def test_an_option_that_contains_itself_is_refused() -> None:
    names: list[Any] = []
    names.append(names)
    with pytest.raises(PassError, match="shift_activations: an option contains itself"):
        passes.shift_activations(two_layers(), names, {0: 1})
