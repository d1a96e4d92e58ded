"""How storages and modules are named in a pipeline, so that it reads as one would write it.

::

    h.0.attn, h.0.attn.softmax, h.1.attn, …    what is computed again or parked, by storage
    h.0, h.1, h.2                              modules that save just that
    h[0:3]                                     as a pattern
    h[0:3].**.exp_avg                          what the optimizer has of them
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Literal

from graphir.ir.blob import STATE_ROLES
from graphir.ir.module_patterns import lineage
from graphir.ir.names import base_name
from graphir.ir.net import Net
from graphir.ir.program import Program

from ..saved import Use, choose, saved_in, uses_of

__all__ = ["patterns", "states_named", "storages_named"]


def storages_named(program: Program, storages: Sequence[str], by: Literal["park", "recompute"]) -> list[str]:
    """Patterns of the outermost modules that stand for just some of these storages where *by* is given them, and the
    names of the other storages.

    Args:
        program: whose storages they are. Of a replicated one a module would stand for those of every replica, so that
            storages are named.
        storages: that are saved.
        by: the pass. To ``recompute``, a module stands for what no other module reads.
    """
    if program.replicas != ("",):
        return list(storages)
    uses = uses_of(program.step)
    saved = saved_in(program, dict.fromkeys([op.module for op in program.step.ops], ""), uses)
    within = _makers(program.step, saved, uses)
    if by == "recompute":
        _narrow(program.step, within)
    held = Counter(path for storage in saved for path in lineage(within[storage]))
    wanted = Counter(path for storage in storages for path in lineage(within[storage]))
    known = program.module_paths
    chosen = {path for path, number in wanted.items() if number == held[path] and path in known}
    found, left = dict[str, None](), list[str]()
    for storage in storages:
        path = next((path for path in lineage(within[storage]) if path in chosen and _pattern(program, path)), "")
        if path:
            found[path] = None
        else:
            left.append(storage)
    return [*patterns(found, program.step.blobs), *left]


def states_named(program: Program, states: Sequence[str]) -> list[str]:
    """Patterns that stand for just some of the state that ``park`` takes, and the names of the rest: ``**.exp_avg``, or
    ``h[0:3].**.exp_avg`` for three modules' own."""
    blobs, going = program.step.blobs, set(states)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in program.step.external_inputs:
        if blobs[name].role in STATE_ROLES:
            kinds[base_name(name).rpartition(".")[2]].append(name)
    found: list[str] = []
    for kind, names in kinds.items():
        within = {name: ("", *lineage(base_name(name))[:-1]) for name in names}
        held = Counter(path for name in names for path in within[name])
        wanted = Counter(path for name in names if name in going for path in within[name])
        modules = dict[str, None]()
        for name in names:
            if name in going:
                path = next((path for path in within[name] if wanted[path] == held[path]), None)
                if path is None or path == within[name][-1]:
                    found.append(name)
                else:
                    modules[path] = None
        if "" in modules:
            found.append(f"**.{kind}")
        else:
            found += [f"{pattern}.**.{kind}" for pattern in patterns(modules)]
    return found if choose(program, found, "park").blobs.keys() == going else list(states)


def _makers(net: Net, storages: Iterable[str], uses: Mapping[str, Use]) -> dict[str, str]:
    """By storage, the module that makes it."""
    return {storage: net.ops[uses[storage].made].module for storage in storages}


def _narrow(net: Net, within: dict[str, str]) -> None:
    """Put what other modules read where all of its readers are."""
    for op in net.ops:
        if op.phase == "forward" and not op.effects.shows:
            for name in op.inputs:
                storage = net.blobs[name].storage
                if storage in within:
                    shared = [a for a, b in zip(lineage(within[storage]), lineage(op.module), strict=False) if a == b]
                    within[storage] = shared[-1] if shared else ""


def _pattern(program: Program, path: str) -> str:
    """A pattern that names a module, which a blob may be called like; empty where there is none."""
    found = patterns([path], program.step.blobs)
    return found[0] if found else ""


def patterns(paths: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """Patterns that name these modules: ``h[0:3]`` for h.0, h.1 and h.2.

    Args:
        paths: of modules, none inside of another.
        taken: names that stand for something else. A module with one of these is named by an index in its path, such
            as ``h[0]``, and left out where it has none.
    """
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    order: dict[tuple[str, str] | str, None] = {}
    for path in paths:
        parts = path.split(".")
        index = next((i for i, part in enumerate(parts) if part.isdecimal() and str(int(part)) == part), None)
        if index is not None:
            key = ".".join(parts[:index]), "".join(f".{part}" for part in parts[index + 1 :])
            numbers[key].append(int(parts[index]))
            order[key] = None
        elif path not in taken:
            order[path] = None
    found = []
    for one in order:
        found += [one] if isinstance(one, str) else [_ranged(*one, run, taken) for run in _runs(numbers[one])]
    return found


def _runs(numbers: Iterable[int]) -> Iterable[list[int]]:
    """Numbers that follow each other."""
    runs: dict[int, list[int]] = defaultdict(list)
    for number, position in zip(sorted(numbers), count()):
        runs[number - position].append(number)
    return runs.values()


def _ranged(before: str, after: str, run: Sequence[int], taken: Iterable[str]) -> str:
    if len(run) > 1:
        return f"{before}[{run[0]}:{run[-1] + 1}]{after}"
    path = f"{before}.{run[0]}{after}" if before else f"{run[0]}{after}"
    return f"{before}[{run[0]}]{after}" if path in taken else path
