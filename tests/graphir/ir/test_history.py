"""The text of passes, as a program's history has it."""

from __future__ import annotations

import pytest

from graphir.errors import ParseError
from graphir.ir.history import PassText, parse_passes, print_option


def test_names_and_options_are_read() -> None:
    text = 'shift_modules{modules={layer4: gpu:1, "h[2:4]": {0: 2}}} | mine | park{after=1.5, strict=false, n=none}'
    assert parse_passes(text) == [
        PassText("shift_modules", {"modules": {"layer4": "gpu:1", "h[2:4]": {0: 2}}}),
        PassText("mine", {}),
        PassText("park", {"after": 1.5, "strict": False, "n": None}),
    ]


@pytest.mark.parametrize(
    "value", ["gpu:1", "a b", 'a"b\\', "true", "none", "1", [1, ["x"]], {"a": {0: True}}, -2, 1.5, None]
)
def test_an_option_is_read_as_it_was_printed(value: object) -> None:
    ((_, options),) = parse_passes(f"mine{{option={print_option(value)}}}")
    assert options["option"] == value and type(options["option"]) is type(value)


@pytest.mark.parametrize("text", ["", "mine{", "mine{a=1, a=2}", "mine | ", "mine{a=[}", "mine x"])
def test_what_is_no_text_of_passes_is_refused(text: str) -> None:
    with pytest.raises(ParseError, match="pipeline text, character"):
        parse_passes(text)
