"""What a step keeps from its forward for its backward, and how one names it: what can be parked or recomputed.

A storage is *saved* if an operator of the forward makes it and one of a later phase reads it. Names stand for blobs of
every replica, or of one where they have its prefix; patterns stand for modules, or for state where no module matches::

    relu                   the activation relu of every replica
    gpu_1/relu             that of one replica
    layer4, h[2:4], **     whatever these modules save
    **.exp_avg             this optimizer state of every parameter
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from graphir.errors import PassError, PassWarning, nearest, warn
from graphir.ir.blob import STATE_ROLES
from graphir.ir.module_patterns import ModulePattern
from graphir.ir.names import base_name
from graphir.ir.net import Net
from graphir.ir.program import Program

from .activations import find_activations
from .module_patterns import claims
from .standing import parked_storages, recomputed_storages

__all__ = [
    "Chosen",
    "Use",
    "choose",
    "nothing_saved",
    "require_captured",
    "saved_in",
    "unsaved",
    "uses_of",
    "warn_of_modules",
]

_NOTABLE: Final = 0.5
"""Bytes that a module saves beside its activation, as a share of the activation's, above which it matters which of the
two a name means. The statistics of a batch norm are fewer."""


class Use(NamedTuple):
    """Where a step touches a storage, by positions of operators; -1 where no operator does.

    Attributes:
        made: the operator that makes it; -1 of what is given from outside.
        early: the last operator that touches it before *late*.
        late: the first operator after the forward that touches it.
        written: the last operator that overwrites it.
    """

    made: int
    early: int
    late: int
    written: int


class Chosen(NamedTuple):
    """What a pass was told to work on.

    Attributes:
        blobs: each blob that is named, with what names it.
        modules: each module that a pattern names, or that is inside of such a one, with the pattern.
    """

    blobs: Mapping[str, str]
    modules: Mapping[str, str]


def require_captured(program: Program, by: str) -> None:
    """Refuse a program from Caffe2, which keeps a blob's bytes until something frees it.

    Raises:
        PassError: it is one.
    """
    if program.step.dialect.workspace:
        raise PassError(
            f"{by}: the blobs of Caffe2 program {program.name!r} keep their bytes when nobody reads them any more",
            fix="translate it to a captured program first: graphir.caffe2.lower(program)",
        )


def uses_of(net: Net) -> dict[str, Use]:
    """Where each storage of a step is touched."""
    blobs, found = net.blobs, dict[str, list[int]]()
    for name in net.external_inputs:
        found.setdefault(blobs[name].storage, [-1, -1, -1, -1])
    for i, op in enumerate(net.ops):
        early = op.phase == "forward"
        views = op.effects.viewing
        for name in op.inputs:
            use = found[blobs[name].storage]
            if use[2] < 0:
                use[1 if early else 2] = i
        for position, name in enumerate(op.outputs):
            use = found.setdefault(blobs[name].storage, [i, i, -1, -1])
            if use[2] < 0:
                use[1 if early or use[0] == i else 2] = i
            if position not in views and use[0] != i:
                use[3] = i
    return {storage: Use(*use) for storage, use in found.items()}


def choose(program: Program, what: Sequence[str], by: str) -> Chosen:
    """The blobs and modules that names and patterns stand for. What is a blob's name stands for the blob.

    Args:
        program: captured, replicated or sharded.
        what: names and patterns.
        by: the pass.

    Raises:
        PassError: something names nothing, or two patterns name one module.
    """
    blobs, paths = program.step.blobs, program.module_paths
    named: dict[str, str] = {}
    patterns: list[str] = []
    for text in what:
        names = [text] if text in blobs else [p + text for p in program.replicas if p + text in blobs]
        if not names and not text.startswith("!") and not any(map(ModulePattern(text).matches, ["", *paths])):
            names = _states(program, text)
            if not names:
                raise _unknown(program, text, paths, by)
        if names:
            named.update(dict.fromkeys(names, text))
        else:
            patterns.append(text)
    return Chosen(named, claims(program, patterns) if patterns else {})


def warn_of_modules(program: Program, what: Sequence[str], by: str) -> None:
    """Warn where a name is an activation's, for which it stands, and that of a module that saves much else, too.

    Warns:
        PassWarning: it is; says how the module is written.
    """
    blobs = program.step.blobs
    for text in what:
        taken = {blobs[p + text].storage for p in program.replicas if p + text in blobs}
        if not taken or text not in program.module_paths:
            continue
        others = saved_in(program, claims(program, [text]), uses_of(program.step)).keys() - taken
        nbytes = [sum(blobs[name].nbytes(program.dims) for name in names) for names in (others, taken)]
        if nbytes[0] > _NOTABLE * nbytes[1]:
            means = f"{text!r} means the activation of this name, not the module"
            warn(f"{by}: {means}; {_module_written(program, text)}", PassWarning)


def _module_written(program: Program, name: str) -> str:
    """How to write the module that a blob has the name of; empty where there is none."""
    path = base_name(name)
    if path not in program.module_paths:
        return ""
    head, dot, last = path.rpartition(".")
    for pattern in (re.sub(r"(?:^|\.)(\d+)(?=\.|$)", r"[\1]", path, count=1), f"{head}{dot}**.{last}"):
        if pattern != path and claims(program, [pattern]).keys() == claims(program, [path]).keys():
            return f"write {pattern!r} for the module"
    return f"for the module, name what is in it, as {path + '.*'!r} does"


def _states(program: Program, text: str) -> list[str]:
    """The state blobs whose names a pattern matches."""
    pattern, blobs = ModulePattern(text), program.step.blobs
    return [n for n in program.step.external_inputs if blobs[n].role in STATE_ROLES and pattern.matches(base_name(n))]


def nothing_saved(
    program: Program, modules: Mapping[str, str], pattern: str, by: str, otherwise: str, fix: str
) -> PassError:
    """The error that the modules of a pattern save nothing: since an earlier pass has done with it, or *otherwise*."""
    ops = program.step.ops
    made = [n for op in ops if op.phase == "forward" and modules.get(op.module) == pattern for n in op.outputs]
    done = _done_with(program.step, made)
    if done:
        return PassError(f"{by}: what {pattern!r} saves for the backward is {done}", fix="leave one of the two out")
    return PassError(f"{by}: {pattern!r} saves nothing for the backward {otherwise}", fix=fix)


def saved_in(program: Program, modules: Mapping[str, str], uses: Mapping[str, Use]) -> dict[str, str]:
    """The storages that *modules* make and the backward reads, each with the pattern that names the module."""
    ops, kept = program.step.ops, _handed_back(program.step)
    return {
        storage: modules[ops[use.made].module]
        for storage, use in uses.items()
        if use.made >= 0 and ops[use.made].phase == "forward" and ops[use.made].module in modules
        if use.late >= 0 and use.written < 0 and storage not in kept
    }


def unsaved(program: Program, name: str, uses: Mapping[str, Use], by: str) -> tuple[str, str] | None:
    """Why a blob is no activation that is saved for the backward, and what to do; None if it is one."""
    why = _unsaved(program, name, uses, by)
    module = _module_written(program, name) if why is not None else ""
    return (why[0], f"{why[1]}, or {module}") if why is not None and module else why


def _unsaved(program: Program, name: str, uses: Mapping[str, Use], by: str) -> tuple[str, str] | None:
    step, blob = program.step, program.step.blobs[name]
    if blob.is_view:
        return f"is a view of {blob.storage!r}, which holds the bytes", f"name {base_name(blob.storage)!r}"
    use = uses[name]
    if blob.role == "input":
        return "is an input of the step, which callers hold until it returns", "leave it out"
    if blob.role in STATE_ROLES:
        return f"is state ({blob.role}), which no operator of the forward makes", "name an activation"
    if step.ops[use.made].phase != "forward":
        return f"is made in the {step.ops[use.made].phase}, not in the forward", "name an activation"
    if name in _handed_back(step):
        return "is handed back, so it stays until the step ends", "leave it out"
    if use.written >= 0:
        return f"is overwritten by {step.ops[use.written].type}", f"run {by} before share_storage"
    if use.late < 0:
        done = _done_with(step, [name])
        return f"is {done or 'not read in the backward, so it is freed in the forward anyway'}", "leave it out"
    return None


def _done_with(net: Net, made: Iterable[str]) -> str:
    """What an earlier pass does with some of these blobs of the forward, so that nothing of them is kept: they are
    parked, or computed again. Empty if it does neither."""
    storages = {net.blobs[name].storage for name in made}
    if not storages.isdisjoint(parked_storages(net)):
        return "parked already"
    return "" if storages.isdisjoint(recomputed_storages(net)) else "computed again already"


def _handed_back(net: Net) -> set[str]:
    return {net.blobs[name].storage for name in net.external_outputs}


def _unknown(program: Program, text: str, paths: Iterable[str], by: str) -> PassError:
    listed = find_activations(program)
    some = ", ".join(listed[:6]) + (", …" if len(listed) > 6 else "")
    return PassError(
        f"{by}: program {program.name!r} has no blob and no module {text!r}{nearest(text, [*listed, *paths])}",
        fix=f"name activations ({some or 'there are none'}), other blobs, or modules by their patterns",
    )
