"""The text of passes: each entry of a program's history, and pipelines, which are read back.

``shift_activations{activations=[relu], shifts={0: 1}}`` is the name of a pass and its options. Only the passes know
what names and options mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from ..errors import ParseError
from .size import LONGEST_TEXT

__all__ = ["PassText", "parse_passes", "pass_name", "print_option"]

T = TypeVar("T")


class PassText(NamedTuple):
    """A pass as its text has it: its name, and its options without those that have their defaults."""

    name: str
    options: Mapping[str, object]


_BARE: Final = re.compile(r"[A-Za-z_](?:[\w./:-]*[\w./-])?")  # never ends in a colon, which ends a key
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_DEEPEST: Final = 8
_WORDS: Final[Mapping[str, object]] = {"true": True, "false": False, "none": None}


def print_option(value: object) -> str:
    """An option's value as pipeline text."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = _BARE.fullmatch(value) and value not in _WORDS
        return value if plain else '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{print_option(k)}: {print_option(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(print_option, value)) + "]"
    return str(value)


def pass_name(text: str) -> str:
    """The pass's name in an entry of a history. The rest of the entry need not be readable as a pass."""
    return text.partition("{")[0].strip()


def parse_passes(text: str) -> list[PassText]:
    """Read passes that are separated by ``|``.

    Raises:
        ParseError: the text is not that of passes.
    """
    return _Reader(text).passes()


class _Reader:
    """A recursive-descent reader of pipeline text.

    ::

        pipeline = pass { "|" pass }
        pass     = name [ "{" [ name "=" value { "," name "=" value } ] "}" ]
        value    = number | word | string | "[" values "]" | "{" value ":" value … "}"
    """

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth = text, 0, 0

    def passes(self) -> list[PassText]:
        passes = [self.one_pass()]
        while self.accept("|"):
            passes.append(self.one_pass())
        self.skip()
        if self.position < len(self.text):
            raise self.error("expected '|' or the end")
        return passes

    def one_pass(self) -> PassText:
        name = self.match(_BARE, "the name of a pass")
        options: dict[str, Any] = {}
        if self.accept("{"):
            for key, value in self.items("}", self.option):
                if key in options:
                    raise self.error(f"option {key!r} is given twice")
                options[key] = value
        return PassText(name, options)

    def option(self) -> tuple[str, object]:
        key = self.match(_BARE, "the name of an option")
        self.expect("=")
        return key, self.value()

    def value(self) -> object:
        if self.accept("["):
            return self.items("]", self.value)
        if self.accept("{"):
            pairs = self.items("}", self.pair)
            if len({repr(key) for key, _ in pairs}) < len(pairs):
                raise self.error("a key is given twice")
            return dict(pairs)
        self.skip()
        if match := _STRING.match(self.text, self.position):
            self.position = match.end()
            return re.sub(r"\\(.)", r"\1", match[0][1:-1], flags=re.DOTALL)
        if match := _NUMBER.match(self.text, self.position):
            if len(match[0]) > LONGEST_TEXT:
                raise self.error(f"a number of more than {LONGEST_TEXT} characters")
            self.position = match.end()
            return float(match[0]) if match[1] or match[2] else int(match[0])
        word = self.match(_BARE, "a value")
        return _WORDS.get(word, word)

    def pair(self) -> tuple[object, object]:
        key = self.value()
        if isinstance(key, (list, dict)):
            raise self.error("a key is a number or a word")
        self.expect(":")
        return key, self.value()

    def items(self, end: str, one: Callable[[], T]) -> list[T]:
        found: list[T] = []
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"options are nested more than {_DEEPEST} deep")
        while not self.accept(end):
            if found:
                self.expect(",")
            found.append(one())
        self.depth -= 1
        return found

    def skip(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def accept(self, token: str) -> bool:
        self.skip()
        found = self.text.startswith(token, self.position)
        self.position += len(token) if found else 0
        return found

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise self.error(f"expected {token!r}")

    def match(self, pattern: re.Pattern[str], what: str) -> str:
        self.skip()
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.error(f"expected {what}")
        self.position = match.end()
        return match[0]

    def error(self, what: str) -> ParseError:
        window = self.text[max(0, self.position - 30) : self.position + 30]
        return ParseError(
            f"pipeline text, character {self.position}: {what}",
            at=window,
            fix="write passes as name{option=value, …} separated by |",
        )
