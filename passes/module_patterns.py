"""Which modules of a program patterns name, in the grammar of :mod:`graphir.ir.module_patterns`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

from graphir.errors import PassError, nearest
from graphir.ir.module_patterns import ModulePattern, lineage
from graphir.ir.names import base_name
from graphir.ir.program import Program

__all__ = ["claims", "outermost", "weighted_modules"]


def weighted_modules(program: Program) -> set[str]:
    """The paths of the modules that own parameters or buffers and that no others are in."""
    owners = {name.rpartition(".")[0] for name in program.interface.module_state}
    return owners - {path.rpartition(".")[0] for path in program.module_paths}


def claims(program: Program, patterns: Iterable[str]) -> dict[str, str]:
    """For each module that a pattern names, or that is inside of such a one, the pattern.

    Raises:
        PassError: a pattern names no module, or two name the same one.
    """
    paths, patterns = program.module_paths, list(patterns)
    found: dict[str, str] = {}
    ordered = sorted(path.split(".") for path in paths) if patterns else []
    for text in patterns:
        pattern = ModulePattern(text)
        # A path as it stands names what is inside of it, and nothing else.
        mine = _inside(text.split("."), ordered) if text in paths else _matched(pattern, ordered)
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


def _inside(names: list[str], ordered: Sequence[list[str]]) -> list[str]:
    """A module and those inside of it, of all in order."""
    behind = islice(ordered, bisect_left(ordered, names), None)
    return [".".join(path) for path in takewhile(lambda path: path[: len(names)] == names, behind)]


def _matched(pattern: ModulePattern, ordered: Sequence[Sequence[str]]) -> list[str]:
    """The paths that a pattern names, and those inside of them."""
    inside, found = "", []
    for names in ordered:
        path = ".".join(names)
        if (inside and path.startswith(inside)) or pattern.matches(path):
            inside = inside if inside and path.startswith(inside) else f"{path}."
            found.append(path)
    return found


def outermost(claimed: Mapping[str, str]) -> list[str]:
    """The claimed modules that are inside of no other one of them, in the order of their paths."""
    paths = sorted(claimed, key=lambda path: path.split("."))
    return [path for path in paths if claimed.keys().isdisjoint(lineage(path)[:-1])]


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
