"""What none of graphir's values is, is refused in graphir's words."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import tiny

import graphir
from graphir.errors import FileError, GraphirError, ParseError

TINY = tiny.program()

CALLS: dict[str, tuple[Callable[[], object], type[GraphirError], str]] = {
    "verify": (lambda: graphir.verify(None), GraphirError, "verify takes a Program, Plan or Net, not NoneType"),
    "memory": (lambda: graphir.memory(None), GraphirError, "memory takes a Program or Plan, not NoneType"),
    "memory of a net": (lambda: graphir.memory(TINY.step), GraphirError, "memory takes a Program or Plan, not Net"),
    "certify": (lambda: graphir.certify(TINY, None), GraphirError, "certify takes a Program or Plan, not NoneType"),
    "diff": (lambda: graphir.diff(TINY, "x"), GraphirError, "diff takes a Program, Plan or Net, not str"),
    "show": (lambda: graphir.show(3), GraphirError, "show takes a Program, Plan or Net, not int"),
    "load": (lambda: graphir.load(3), FileError, "a path was expected, not int"),
    "parse": (lambda: graphir.parse(None), ParseError, "text was expected, not NoneType"),
    "save": (lambda: TINY.save(None), FileError, "a path was expected, not NoneType"),
    "save state": (lambda: TINY.save(None, state=True), FileError, "a path was expected, not NoneType"),
    "save a plan": (lambda: tiny.plan(TINY).save(None), FileError, "a path was expected, not NoneType"),
}


@pytest.mark.parametrize(("call", "error", "what"), CALLS.values(), ids=CALLS)
def test_other_values_are_refused(call: Callable[[], object], error: type[GraphirError], what: str) -> None:
    with pytest.raises(GraphirError, match=f"^{re.escape(what)}\n  fix ") as e:
        call()
    assert type(e.value) is error
