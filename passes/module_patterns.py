"""Patterns over module paths: one grammar for every pass that takes modules.

::

    layer4               the module layer4, and all inside it
    transformer.h[2:4]   transformer.h.2 and transformer.h.3; h[2:] and h[:4] are open at one end, h[2] is one
    *.attn               attn of each child of the model: a * stops at a dot
    **.norm              every norm, at whatever depth
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from graphir.errors import PassError, nearest
from graphir.ir.names import base_name
from graphir.ir.program import Program

__all__ = ["ModulePattern", "claims", "module_paths"]

_TOKEN: Final = re.compile(r"(?P<any>\*\*\.?)|(?P<one>\*)|\[(?P<range>[^\]]*)\]|(?P<text>[^*\[\]]+)")
_RANGE: Final = re.compile(r"(?P<first>\d{0,9})(?P<colon>:?)(?P<end>\d{0,9})")
_INDEX: Final = re.compile(r"\.?(?P<index>\d+)(?=\.|$)")
_NO_END: Final = 10**9


class ModulePattern:
    """A pattern, read once. Matching takes time in proportion to its length times that of a path, squared.

    Args:
        text: see above.

    Raises:
        PassError: it is not a pattern.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._steps: list[Callable[[str, int], Iterable[int]]] = []
        position = 0
        while position < len(text):
            token = _TOKEN.match(text, position)
            if token is None:
                raise self._error()
            self._steps.append(self._step(token))
            position = token.end()
        if not self._steps:
            raise PassError("an empty pattern names no module", fix="write ** for the whole model")

    def _step(self, token: re.Match[str]) -> Callable[[str, int], Iterable[int]]:
        """What leads from a position in a path to those at which this part of the pattern may end."""
        if token["any"] == "**.":
            return _any_parents
        if token["any"]:
            return lambda path, start: range(start + 1, len(path) + 1)
        if token["one"]:
            return _one_name
        if token["range"] is None:
            text = token["text"]
            return lambda path, start: (start + len(text),) if path.startswith(text, start) else ()
        within = self._range(token["range"])
        return lambda path, start: _index(path, start, within)

    def _range(self, text: str) -> range:
        bounds = _RANGE.fullmatch(text)
        if bounds is None or not (bounds["first"] or bounds["colon"]):
            raise self._error()
        first = int(bounds["first"] or 0)
        found = range(first, int(bounds["end"] or _NO_END) if bounds["colon"] else first + 1)
        if not found:
            raise PassError(f"[{text}] in pattern {self.text!r} is empty", fix="write h[2:4] for h.2 and h.3")
        return found

    def _error(self) -> PassError:
        return PassError(
            f"{self.text!r} is not a pattern of modules",
            fix="write a path such as layer4, h[2:4] for h.2 and h.3, * for one name, ** for any number of them",
        )

    def matches(self, path: str) -> bool:
        """Whether *path* is a module that the pattern names; what is inside of such a one does not match by itself."""
        reached = {0}
        for step in self._steps:
            reached = {end for start in reached for end in step(path, start)}
        return len(path) in reached


def _one_name(path: str, start: int) -> Iterable[int]:
    """``*``: some characters up to the next dot."""
    dot = path.find(".", start)
    return range(start + 1, (len(path) if dot < 0 else dot) + 1)


def _any_parents(path: str, start: int) -> Iterable[int]:
    """``**.``: nothing, or any number of names with the dots behind them."""
    return [start, *[i + 1 for i in range(start + 1, len(path)) if path[i] == "."]]


def _index(path: str, start: int, within: range) -> Iterable[int]:
    """``[2:4]``: a whole name that is an index *within*, and the dot before it unless the path begins with it."""
    found = _INDEX.match(path, start)
    whole = found is not None and (found[0][0] == ".") is (start > 0)
    return (found.end(),) if found is not None and whole and int(found["index"][:10]) in within else ()


def module_paths(program: Program) -> dict[str, None]:
    """The paths of the modules that run in the step or own some of its state, and of those that they are in."""
    named = {op.module for op in program.step.ops}
    named.update(name.rpartition(".")[0] for name in program.interface.module_state)
    found: dict[str, None] = {}
    for path in sorted(named):
        parts = path.split(".") if path else []
        found.update(dict.fromkeys(".".join(parts[: i + 1]) for i in range(len(parts))))
    return found


def claims(program: Program, patterns: Iterable[str]) -> dict[str, str]:
    """For each module that a pattern names, or that is inside of such a one, the pattern.

    Raises:
        PassError: a pattern names no module, or two name the same one.
    """
    paths = module_paths(program)
    found: dict[str, str] = {}
    for text in patterns:
        pattern = ModulePattern(text)
        inside = ""
        mine = []
        for path in sorted(paths, key=lambda path: path.split(".")):
            if (inside and path.startswith(inside)) or pattern.matches(path):
                inside = inside if inside and path.startswith(inside) else f"{path}."
                mine.append(path)
        if not mine:
            raise _unknown(program, text, paths)
        for path in mine:
            if path in found:
                raise PassError(
                    f"module {path!r} is named by two patterns, {found[path]!r} and {text!r}",
                    fix="let one of them leave it out, or move it in a call of its own",
                )
            found[path] = text
    return found


def _unknown(program: Program, text: str, paths: Mapping[str, None]) -> PassError:
    """The error for a pattern that names no module: what the name is instead, and what is near."""
    step, prefix = program.step, program.replicas[0]
    blob = step.blobs.get(prefix + text)
    module, what = "", ""
    if blob is not None and blob.role in ("param", "buffer"):
        kind = "parameter" if blob.role == "param" else "buffer"
        module, what = text.rpartition(".")[0], f"a {kind} of "
    elif blob is not None:
        producer = step.producer(blob.name)
        kind = "an activation" if blob.role == "activation" else f"a blob ({blob.role})"
        module, what = producer.module if producer is not None else "", f"{kind} of "
    if module:
        return PassError(f"{text!r} is {what}module {module!r}", fix=f"name the module: {module}")
    some = ", ".join([path for path in paths if "." not in path][:6])
    return PassError(
        f"no module of program {program.name!r} is named by {base_name(text)!r}{nearest(text, paths)}",
        fix=f"modules of the model: {some or 'none'}; inside of them, such as layer4.0.conv1, by their paths",
    )
