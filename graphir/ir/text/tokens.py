"""The text form's lines, read word by word: names, numbers, sizes, values, strings, and errors that show the line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from ...errors import GraphirError, ParseError, nearest
from ..device import KINDS, Device
from ..operator import SYMBOLS, Arg, Symbol
from ..size import LONGEST_TEXT, Shape, Size, parse_size

__all__ = ["BARE_NAME", "Line", "Lines"]

T = TypeVar("T")

# No alternative scans text again that an earlier alternative has scanned in vain, so that a line takes time in
# proportion to its length. A string without an end is the rest of its line; a second bracket ends the search for the
# end of the first.
_TOKEN: Final = re.compile(
    rf"""
      "(?:[^"\\]|\\.)*(?:"(?:;\d+)?|\\?$)  # a string, or a quoted name and its version
    | \#.*                              # a comment
    | -> | <-
    | @[\w:]+                         # where a blob lives
    | (?:{"|".join(KINDS)}):\d+(?:\.\w+)?  # a device or a lane
    | \d+:\d+                           # a pair of positions
    | (?:\w+|\?)\[[^\]["]*\]            # a type
    | [\w./*+\-]+(?:;\d+)?              # a name and its version, a number, a size
    | \S
    """,
    re.VERBOSE,
)
BARE_NAME: Final = re.compile(r"[\w.][\w./\-]*")
"""Names that are written as they are; others stand in quotes."""
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_COMMENT: Final = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^"#])*)#.*')
_INT: Final = re.compile(rf"-?\d{{1,{LONGEST_TEXT - 1}}}")
_FLOAT: Final = re.compile(r"-?(?:\d+(?:\.\d*)?(?:e[+-]?\d+)?|inf|nan)")
_CONSTANTS: Final[Mapping[str, Arg]] = {"true": True, "false": False, "none": None}
_DEEPEST: Final = 64


class Lines:
    """The lines that are not empty."""

    def __init__(self, text: str) -> None:
        self.lines = text.split("\n")
        self.number = 0
        self.tokens: list[str] = []

    def more(self) -> bool:
        """Whether there is another line; reads its tokens."""
        lines, find = self.lines, _TOKEN.findall
        while self.number < len(lines):
            tokens: list[str] = find(lines[self.number])
            self.number += 1
            if tokens and tokens[-1][0] == "#":
                tokens.pop()
            if tokens:
                self.tokens = tokens
                return True
        return False

    def next(self, expected: str) -> Line:
        if not self.more():
            last = next((line for line in reversed(self.lines) if line.strip()), "")
            where = f"line {len(self.lines)}"
            raise ParseError(
                f"the text ends where {expected} is expected",
                at=_shortened(last),
                where=where,
                fix="close every { with }",
            )
        return Line(self)


class Line:
    """The tokens of one line, and how far they have been read."""

    __slots__ = ("i", "n", "reader", "tokens")

    def __init__(self, reader: Lines) -> None:
        self.tokens, self.reader = reader.tokens, reader
        self.i, self.n = 0, len(reader.tokens)

    def peek(self) -> str:
        """The next token; empty at the end."""
        return self.tokens[self.i] if self.i < self.n else ""

    def take(self) -> str:
        """The next token, which is then read."""
        token = self.tokens[self.i] if self.i < self.n else ""
        self.i += 1
        return token

    def accept(self, token: str) -> bool:
        """Read the next token if it is this one."""
        if self.i < self.n and self.tokens[self.i] == token:
            self.i += 1
            return True
        return False

    def expect(self, token: str, fix: str) -> None:
        if not self.accept(token):
            raise self.error(f"expected {token!r}, found {self.shown()}", fix)

    def end(self) -> None:
        if self.i < self.n:
            raise self.error(f"expected the end of the line, found {self.shown()}", "write one statement in each line")

    def shown(self) -> str:
        return repr(self.tokens[self.i]) if self.i < self.n else "the end of the line"

    def error(self, what: str, fix: str) -> ParseError:
        """An error in this line."""
        number = self.reader.number
        return ParseError(what, at=_shortened(self.reader.lines[number - 1]), where=f"line {number}", fix=fix)

    def read(self, read: Callable[[str], T], token: str) -> T:
        """``read(token)``, with its error placed in this line."""
        if len(token) > LONGEST_TEXT:
            raise self.error(
                f"{_shortened(token)!r} is too long", f"numbers and sizes have up to {LONGEST_TEXT} characters"
            )
        try:
            return read(token)
        except GraphirError as e:
            raise self.error(e.what, e.fix) from None

    # -- what tokens mean

    def rest(self) -> str:
        """The line after its first word, without comment, as it stands."""
        _, _, text = self.reader.lines[self.reader.number - 1].strip().partition(" ")
        comment = _COMMENT.fullmatch(text)
        self.i = self.n
        return (comment.group(1) if comment else text).strip()

    def raw(self) -> str:
        """The rest of the line as it stands, or the content of a string there."""
        text = self.rest()
        return self.string(text) if text.startswith('"') else text

    def string(self, token: str) -> str:
        try:
            found = json.loads(token) if token[:1] == '"' else None
        except ValueError:
            if not _STRING.match(token):
                raise self.error(
                    "a string that does not end in its line", 'close it with "; write a line break as \\n'
                ) from None
            found = None
        if not isinstance(found, str):
            raise self.error(
                f"{_shortened(token) or 'the end of the line'} is not a string",
                'write strings as in JSON: "a \\"quoted\\" word"',
            )
        return found

    def name(self) -> str:
        """A name without a version."""
        name, version = self.versioned()
        if version is not None:
            raise self.error(f"a version (;{version}) where none can be", "leave it out")
        return name

    def versioned(self) -> tuple[str, int | None]:
        """A name, and its version where one is written."""
        token = self.take()
        if BARE_NAME.fullmatch(token):
            return token, None
        head, semicolon, version = token.rpartition(";")
        if semicolon and version.isdecimal() and (BARE_NAME.fullmatch(head) or head[:1] == '"'):
            return self.string(head) if head[0] == '"' else head, self.integer(version)
        if token[:1] == '"':
            return self.string(token), None
        self.i -= 1
        raise self.error(f"expected a name, found {self.shown()}", 'put odd names in quotes: "a name"')

    def integer(self, token: str) -> int:
        if not _INT.fullmatch(token):
            raise self.error(f"expected an integer, found {token!r}", "write digits")
        return int(token)

    def size(self, token: str) -> Size:
        return int(token) if _INT.fullmatch(token) else self.read(parse_size, token)

    def sizes(self) -> Shape:
        self.expect("[", "write sizes as [1,64]")
        found: list[Size] = []
        while not self.accept("]"):
            if found:
                self.expect(",", "separate sizes by commas")
            found.append(self.size(self.take()))
        return tuple(found)

    def value(self, depth: int = 0) -> Arg:
        """A non-tensor argument."""
        token = self.take()
        if _INT.fullmatch(token):
            return int(token)
        if token == "[":
            if depth == _DEEPEST:
                raise self.error(f"lists in lists more than {_DEEPEST} deep", "use fewer levels")
            items: list[Arg] = []
            while not self.accept("]"):
                if items:
                    self.expect(",", "separate items by commas, close lists with ]")
                items.append(self.value(depth + 1))
            return tuple(items)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token[:1] == '"':
            return self.string(token)
        if token in SYMBOLS:
            return Symbol(token)
        if len(token) <= LONGEST_TEXT and _FLOAT.fullmatch(token):
            return math.nan if token.endswith("nan") else float(token)
        if token and (token[0].isalnum() or token[0] in "-_"):
            return self.read(parse_size, token)
        self.i -= 1
        raise self.error(
            f"expected a value, found {self.shown()}", "write a number, true, false, none, a string or a [list]"
        )

    def assignments(self, read: Callable[[], T], close: str = "") -> dict[str, T]:
        """``name=value, …`` up to *close* or the end of the line."""
        found: dict[str, T] = {}
        while not self.accept(close) if close else self.i < self.n:
            if found:
                self.expect(",", "separate assignments by commas")
            name = self.name()
            self.expect("=", f"write {name}=value")
            if name in found:
                raise self.error(f"{name} is given twice", "give it once")
            found[name] = read()
        return found

    def take_integer(self) -> int:
        return self.integer(self.take())

    def one_of(self, words: Sequence[str], kind: str) -> str:
        """The next name, which must be one of *words*, the words of a *kind*."""
        word = self.name()
        if word not in words:
            raise self.error(f"{word!r} is not a {kind}{nearest(word, words)}", f"{kind}s: {', '.join(words)}")
        return word

    def several(self, read: Callable[[], T]) -> tuple[T, ...]:
        """``a, b, …`` up to the end of the line."""
        found: list[T] = []
        while self.i < self.n:
            if found:
                self.expect(",", "separate values by commas")
            found.append(read())
        return tuple(found)

    def names(self) -> tuple[str, ...]:
        return self.several(self.name)

    def renamed(self, default: Callable[[str], str]) -> tuple[str, str]:
        """``name -> blob``, or ``name`` alone."""
        name = self.name()
        return name, self.name() if self.accept("->") else default(name)

    def device(self) -> Device:
        token = self.take()
        return self.read(Device.parse, token)


def _shortened(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 200 else f"{line[:200]} …"
