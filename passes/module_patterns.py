"""Which modules of a program patterns name, in the grammar of :mod:`graphir.ir.module_patterns`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from graphir.errors import PassError, nearest
from graphir.ir.module_patterns import ModulePattern, lineage
from graphir.ir.names import base_name
from graphir.ir.program import Program

from .base import OptionError

__all__ = ["claims", "leaves_out", "roots", "weighted_modules"]


def weighted_modules(program: Program) -> set[str]:
    """The paths of the modules that own parameters or buffers and that no others are in."""
    owners = {name.rpartition(".")[0] for name in program.interface.module_state}
    return owners - {path.rpartition(".")[0] for path in program.module_paths}


def claims(program: Program, patterns: Iterable[str] | Mapping[str, object]) -> dict[str, str]:
    """For each module that a pattern names, or that is inside of such a one, the pattern that holds for it, by the
    order in :mod:`graphir.ir.module_patterns`.

    Args:
        program: whose modules they are.
        patterns: a ``!`` before one leaves out what it names. By pattern, what it says of its modules; where the
            patterns say nothing, any of several that are equally close may hold.

    Raises:
        PassError: a pattern names no module, or none that others leave to it; or two that are equally close say
            different things of one module.
    """
    said = patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    ordered = sorted(path.split(".") for path in program.module_paths) if said else []
    named = {text: _named(program, text.removeprefix("!"), ordered) for text in said}
    without = {path: text for text in said if text.startswith("!") for path in named[text]}
    closeness = {text: _closeness(program, text) for text in said}
    claimants: dict[str, list[str]] = {}
    for text in said:
        for path in named[text] if not text.startswith("!") else ():
            claimants.setdefault(path, []).append(text)
    found: dict[str, str] = {}
    for path in [path for path in claimants if path not in without]:
        closest = found[path] = max(claimants[path], key=closeness.__getitem__)
        for other in claimants[path]:
            if closeness[other] == closeness[closest] and said[other] != said[closest]:
                raise PassError(
                    f"module {path!r} is named by two patterns that are equally close, {closest!r} and {other!r}",
                    fix=f"give {path!r} an entry of its own, or narrow one of the patterns",
                )
    _refuse_idle(said, named, found, without)
    return found


def _refuse_idle(
    said: Mapping[str, object], named: Mapping[str, Sequence[str]], found: Mapping[str, str], without: Mapping[str, str]
) -> None:
    """Refuse patterns that decide nothing."""
    for text in said:
        if text.startswith("!"):
            if not any(path in named[other] for other in said if not other.startswith("!") for path in named[text]):
                raise PassError(
                    f"{text!r} leaves out modules that no other pattern names",
                    fix="name modules that they are among, such as '**'",
                )
        elif all(path in without for path in named[text]):
            other = without[named[text][0]]
            raise PassError(f"{text!r} names only what {other!r} leaves out", fix=f"give {text!r} up, or {other!r}")
        elif all(said[found.get(path, text)] != said[text] for path in named[text] if path not in without):
            closer = [repr(other) for other in dict.fromkeys([found[path] for path in named[text] if path in found])]
            hold = (
                f"{closer[0]} holds, which is closer" if len(closer) == 1 else f"closer ones hold: {', '.join(closer)}"
            )
            raise PassError(
                f"{text!r} names only modules for which {hold}",
                fix=f"name the modules as they stand, such as {named[text][0]!r}",
            )


def leaves_out(given: dict[str, Any]) -> dict[str, Any]:
    """By pattern, where its modules go, which is None for just those with a ``!``; a field's validator."""
    for text, target in given.items():
        if text.startswith("!") and target is not None:
            raise OptionError(
                f"{text!r} leaves modules out: they go nowhere",
                fix=f"write {text!r}: None, beside a pattern that names them",
            )
        if not text.startswith("!") and target is None:
            raise OptionError(
                f"{text!r} goes to None",
                fix=f"give a device, or no entry; where another pattern names the module, write '!{text}': None",
            )
    return given


def _closeness(program: Program, text: str) -> tuple[int, int]:
    """What patterns are ordered by; a path as it stands is none that its brackets or stars make it."""
    return (4, len(lineage(text))) if text in program.module_paths else ModulePattern(text.removeprefix("!")).closeness


def _named(program: Program, text: str, ordered: Sequence[list[str]]) -> list[str]:
    """The modules that a pattern names, and those inside of them, of all in order.

    Raises:
        PassError: there are none.
    """
    if not text:
        return ["", *map(".".join, ordered)]
    # A path as it stands names what is inside of it, and nothing else.
    whole = text in program.module_paths
    found = _inside(text.split("."), ordered) if whole else _matched(ModulePattern(text), ordered)
    if not found:
        raise _unknown(program, text, program.module_paths)
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


def roots(claimed: Mapping[str, str]) -> dict[str, str]:
    """By claimed module, in the order of their paths, the outermost one that it is in with all between claimed by the
    same pattern."""
    found: dict[str, str] = {}
    for path in sorted(claimed, key=lambda path: path.split(".")):
        parent = path.rpartition(".")[0]
        same = path and claimed.get(parent) == claimed[path]
        found[path] = found[parent] if same else path
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
