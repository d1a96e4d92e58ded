"""What readers are given that nobody should give them."""

from __future__ import annotations

import random
from collections.abc import Callable

from graphir.errors import GraphirError

__all__ = ["HOSTILE", "mutated", "refused"]

HOSTILE = (
    "6", "-", "9" * 5000, "-" + "9" * 5000, "1e999", "1.", "nan", "inf", '"', '"a"', '"a', '"\\', '"\\ud800"',
    '"\\x"', "true", "none", "[", "]", "[]", "[[", "{", "}", "(", ")", "=", ":", ";", ";1", "a;1", ",", "|", "#",
    "->", "<-", "@", "@gpu:0", "gpu:0", "gpu:99999999", "cpu:0.compute", "gpu:0.nowhere", "0:0", "99:99", "f32[2]",
    "f32[?]", "?[3]", "f99[]", "f32[-1]", "f32[a*]", "a*b*c*d*e*f*g*h*i", "2*a+1", "a-", "\u2028", "\x00", "\u00b2",
    "", " ", "\n", "op 999", "of", "op", "-1", "0",
)  # fmt: skip
"""Words that are odd wherever they stand."""


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The content with up to four of its places changed."""
    for _ in range(draw.choice((1, 2, 4))):
        at = draw.randrange(len(content) + 1)
        end = min(len(content), at + draw.choice((0, 1, 2, 8)))
        new = draw.choice(
            (b"", draw.randbytes(1), draw.randbytes(4), content[at:end] * 3, b"\xff" * 9, b"\x00", b"9" * 5000)
        )
        content = content[:at] + new + content[end:]
    return content


def refused(read: Callable[[str], object], text: str) -> None:
    """Read, or be refused with a word: any other error is one of the reader's."""
    try:
        read(text)
    except GraphirError as e:
        assert str(e).strip(), text
