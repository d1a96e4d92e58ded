"""From a Caffe2 program to one of torch operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch.utils import _pytree

from ...errors import GraphirError, counted, nearest
from ...ir.blob import STATE_ROLES, Blob
from ...ir.covers import Covers
from ...ir.geometry import Geometry, contiguous, geometry
from ...ir.net import Net
from ...ir.operator import Operator
from ...ir.program import Interface, Program, Slot
from ...ir.text import operator_text
from ...ir.verify import require
from .builder import ABSENT, Absent, Builder, Known, LoweredValue, Static
from .counters import with_explicit_counters
from .evaluate import evaluate
from .registry import TRANSLATIONS, Lowering

__all__ = ["lower"]

_FIXED: Final = "a lowered Caffe2 net has the shapes that its inputs were declared with"
_MOST_LISTED: Final = 8


def lower(
    program: Program, *, state: Mapping[str, torch.Tensor] | None = None, outputs: Sequence[str] | None = None
) -> Program:
    """Translate a Caffe2 program to torch operators, which ``emit`` and a session take.

    Names, devices, phases and modules stay. Every operator of ``init`` and of ``step`` is translated; those of
    ``init`` are run once, on the host, and what they give is the new program's ``state``, which its ``init`` loads. So
    a session goes on from, and saves, any state under the names of the blobs. A step takes its inputs as keywords and
    gives its outputs as a dictionary, both by the names of the blobs::

        lowered = lower(program)
        with Session(emit(lowered), lowered.state) as session:
            losses = session.step(**{"gpu_0/data": x0, "gpu_0/label": y0, "gpu_1/data": x1, "gpu_1/label": y1})

    Shapes are fixed: those that ``init`` gives, and for inputs those that ``load_program`` was given. Random numbers
    are torch's, and do not depend on where an operator runs. Differences from Caffe2 are said where they are made, in
    the modules of this package.

    Args:
        program: what ``load_program`` returned, placed or not.
        state: the values of parameters and other state, which come before what ``init`` gives: all of those that
            ``init`` does not make. An input that has a value here is kept from step to step too.
        outputs: the blobs that a step hands back. By default the net's external outputs; where it has none, what its
            backward starts from (the losses), or in a net without backward all that nobody reads.

    Raises:
        GraphirError: operators have no translation (all of them are named), an operator's arguments or shapes make no
            sense, the shape of an input or the value of a parameter is missing.
    """
    require(program, (Program,), "lower")
    _refuse_untranslated(program)
    given = _given(program, {} if state is None else state)
    program = with_explicit_counters(program, given)
    wanted = _default_outputs(program.step) if outputs is None else _names(outputs)
    first, filled = _run_init(program.init, given)
    builder, kept = _lower_step(program.step, wanted, first, given)
    names = _handed_back(builder, wanted if outputs is not None else _tensors(builder, wanted))
    tensors = _state(kept, given, filled) | builder.constants
    held = {name: builder.blobs[name] for name in builder.external if builder.blobs[name].role in STATE_ROLES}
    step = Net(
        program.step.name,
        tuple(builder.ops),
        _ordered(builder),
        tuple(builder.external),
        tuple(names.values()),
        _gradients(builder, program.step),
    )
    loads = [Operator("graphir.load", (), (name,), {"key": name}, blob.device, "init") for name, blob in held.items()]
    return program.with_(
        init=Net(program.init.name, tuple(loads), held),
        step=step,
        dims={},
        covers=Covers(fixed=_FIXED),
        replicas=("",),
        interface=_interface(builder, names, held),
        state={**tensors, "step": torch.tensor(0, device="cpu")},
    )


def _refuse_untranslated(program: Program) -> None:
    found = [
        (op, position, net)
        for net in (program.init, program.step)
        for position, op in enumerate(net.ops)
        if op.type not in TRANSLATIONS
    ]
    if not found:
        return
    types = dict.fromkeys(op.type for op, _, _ in found)
    verb = "has" if len(found) == 1 else "have"
    lines = [f"{counted(len(found), 'operator')} of {counted(len(types), 'type')} {verb} no translation"]
    for type in list(types)[:_MOST_LISTED]:
        places = [f"{net.name}[{position}]" for op, position, net in found if op.type == type]
        more = f" and {len(places) - 4} more" if len(places) > 4 else ""
        lines.append(f"  {type}{nearest(type, TRANSLATIONS)} at {', '.join(places[:4])}{more}")
    if len(types) > _MOST_LISTED:
        lines.append(f"  … and {len(types) - _MOST_LISTED} more types")
    raise GraphirError(
        "\n".join(lines),
        where=f"program {program.name!r}",
        fix="take these operators out of the net, or write them with types that have a translation",
    )


def _given(program: Program, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not isinstance(state, Mapping):
        raise GraphirError(
            f"state is of type {type(state).__name__}, not a mapping", fix="lower(program, state={name: tensor})"
        )
    known = {**program.init.blobs, **program.step.blobs}
    for name, tensor in state.items():
        if name not in known:
            raise GraphirError(
                f"state has {name!r}, which is no blob of program {program.name!r}{nearest(name, known)}",
                fix="state maps the names of blobs, prefixes included, to tensors",
            )
        if not isinstance(tensor, torch.Tensor):
            raise GraphirError(
                f"{name!r} in the state is of type {type(tensor).__name__}, not a tensor", fix="torch.from_numpy(array)"
            )
    return dict(state)


def _names(outputs: Sequence[str]) -> tuple[str, ...]:
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise GraphirError(f"outputs is {outputs!r}, not a list of names", fix=f"write outputs=[{str(outputs)!r}]")
    for name in (names := tuple(outputs)):
        if not isinstance(name, str):
            raise GraphirError(
                f"outputs has {name!r}, which is no name", fix="give the names of blobs, prefixes included"
            )
    return names


def _default_outputs(step: Net) -> tuple[str, ...]:
    if step.external_outputs:
        return step.external_outputs
    made = dict.fromkeys(name for op in step.ops for name in op.outputs)
    seeds = [op.inputs[0] for op in step.ops if op.type == "ConstantFill" and op.inputs]
    starts = [name for name in dict.fromkeys(seeds) if name in made]
    return tuple(starts or [name for name in made if name not in step.read])


# -- what there is before the first operator


def _geometry_of(tensor: torch.Tensor) -> Geometry:
    return contiguous(tuple(tensor.shape), tensor.dtype)


def _mutexes(net: Net) -> set[str]:
    made = {name for op in net.ops if op.type == "CreateMutex" for name in op.outputs}
    return made | {op.inputs[0] for op in net.ops if op.type == "AtomicIter" and op.inputs}


def _run_init(init: Net, given: Mapping[str, torch.Tensor]) -> tuple[dict[str, Known], dict[str, torch.Tensor]]:
    """What the blobs are after ``init``, and the tensors among them."""
    builder = Builder(init)
    used = {name for op in init.ops for name in op.inputs}
    for name in init.external_inputs:
        if name in given:
            builder.known[name] = builder.declare(name, _geometry_of(given[name]), init.blobs[name].device, "state")
        elif name in used:
            raise GraphirError(
                f"{name!r} is an external input of net {init.name!r}, and has no value",
                fix="lower(program, state={name: tensor})",
            )
    _translate(builder)
    defined = {**given, **builder.constants}
    values = evaluate(builder.ops, {name: defined[name] for name in builder.external})
    tensors = {}
    for name, known in builder.known.items():
        if isinstance(known, LoweredValue):
            tensors[name] = values[known.name, known.version]
        elif isinstance(known, Static):
            tensors[name] = known.tensor
    return builder.known, tensors


def _lower_step(
    step: Net, wanted: Sequence[str], first: Mapping[str, Known], given: Mapping[str, torch.Tensor]
) -> tuple[Builder, dict[str, Geometry]]:
    """The step's torch operators, and what lives from step to step."""
    fresh: set[str] = set()
    read_first = _read_first(step)
    while True:
        builder = Builder(step)
        kept = _declare(builder, step, wanted, first, given, fresh)
        _translate(builder)
        resized = [name for name in kept if _resized(builder.known[name], kept[name])]
        _refuse_resized(builder, [name for name in resized if name in read_first], kept)
        if not resized:
            _write_back(builder, kept)
            return builder, kept
        # The step makes them before it reads them: no value of another step is needed.
        fresh.update(resized)


def _declare(
    builder: Builder,
    step: Net,
    wanted: Iterable[str],
    first: Mapping[str, Known],
    given: Mapping[str, torch.Tensor],
    fresh: Collection[str],
) -> dict[str, Geometry]:
    """Declare the step's external inputs other than *fresh*; those that live from step to step, with their geometry."""
    mutexes = _mutexes(step)
    used = {*step.read, *wanted}
    kept: dict[str, Geometry] = {}
    unknown = []
    for name in step.external_inputs:
        blob, before = step.blobs[name], first.get(name)
        if name in mutexes or isinstance(before, Absent):
            builder.known[name] = ABSENT
            continue
        if name not in used or name in fresh:
            continue
        found = _geometry_of(given[name]) if name in given else _filled(before) or geometry(blob, {})
        if found is None:
            unknown.append(name)
            continue
        _check_declared(blob, found)
        role = "state" if blob.role == "input" and (name in given or before is not None) else blob.role
        builder.known[name] = builder.declare(name, found, blob.device, role)
        if role in STATE_ROLES:
            kept[name] = found
    if unknown:
        some = ", ".join(map(repr, unknown[:_MOST_LISTED])) + (", …" if len(unknown) > _MOST_LISTED else "")
        raise GraphirError(
            f"the shape of {counted(len(unknown), 'external input')} is not known: {some}",
            where=f"net {step.name!r}",
            fix=f'load_program(…, shapes={{"{unknown[0]}": ([8, 16], "f32")}}), or lower(program, state=…)',
        )
    return kept


def _filled(known: Known | None) -> Geometry | None:
    if isinstance(known, Static):
        return _geometry_of(known.tensor)
    return known.geometry if isinstance(known, LoweredValue) else None


def _check_declared(blob: Blob, found: Geometry) -> None:
    declared = geometry(blob, {})
    if declared is not None and declared != found:
        raise GraphirError(
            f"blob {blob.name!r} is declared {declared}, but its value is {found}",
            fix="give load_program the shape that the blob has, or leave it out",
        )


def _state(
    kept: Mapping[str, Geometry], given: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    missing = [name for name in kept if name not in given and name not in filled]
    if missing:
        some = ", ".join(map(repr, missing[:_MOST_LISTED])) + (", …" if len(missing) > _MOST_LISTED else "")
        raise GraphirError(
            f"{counted(len(missing), 'blob')} live from step to step, and have no value: {some}",
            fix="lower(program, state={name: tensor}) with a value of each",
        )
    return {name: given[name] if name in given else filled[name] for name in kept}


# -- operators, and what there is after the last one


def _translate(builder: Builder) -> None:
    net = builder.net
    for position, op in enumerate(net.ops):
        try:
            TRANSLATIONS[op.type](Lowering(op, builder))
        except GraphirError as e:
            raise _located(f"{op.type} cannot be translated: {e.what}", net, position, e.fix, e.at) from e
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            what = f"{op.type} cannot be translated: its operands or arguments make no sense ({e})"
            raise _located(what, net, position, "compare them with the operator's documentation") from e


def _located(what: str, net: Net, position: int, fix: str, at: str = "") -> GraphirError:
    at = at or operator_text(net.ops[position], net)
    return GraphirError(what, at=at, where=f"net {net.name!r}, operator {position}", fix=fix)


def _read_first(net: Net) -> set[str]:
    """Blobs that are read before they are made."""
    made: set[str] = set()
    found: set[str] = set()
    for op in net.ops:
        found.update([name for name in op.inputs if name not in made])
        made.update(op.outputs)
    return found


def _resized(known: Known, before: Geometry) -> bool:
    after = _filled(known)
    return after is not None and (after.shape, after.dtype) != (before.shape, before.dtype)


def _refuse_resized(builder: Builder, resized: Iterable[str], kept: Mapping[str, Geometry]) -> None:
    net = builder.net
    for name in resized:
        position = max([i for i, op in enumerate(net.ops) if name in op.outputs])
        raise _located(
            f"{builder.blobs[name].role} {name!r} is {kept[name]} before the step and "
            f"{_filled(builder.known[name])} after it",
            net,
            position,
            "what lives from step to step keeps its shape and element type",
        )


def _write_back(builder: Builder, kept: Iterable[str]) -> None:
    """Copy state that ended under another name back to its own."""
    last = builder.net.ops[-1] if builder.net.ops else None
    for name in kept:
        found = builder.known[name]
        if isinstance(found, Static):
            found = builder.constant(name, found.tensor, builder.net.blobs[name].device)
        if isinstance(found, LoweredValue) and found.padded:
            raise GraphirError(
                f"{name!r} lives from step to step, but its size depends on values",
                where=f"net {builder.net.name!r}",
                fix="let the step write another blob",
            )
        if isinstance(found, LoweredValue) and found.name != name:
            assert last is not None
            device = builder.blobs[name].device
            (builder.known[name],) = builder.emit(
                "Copy", [found], {}, last._replace(outputs=(name,), phase="update"), [name], device=device
            )


def _tensors(builder: Builder, names: Iterable[str]) -> list[str]:
    """Those of *names* that are computed tensors of a known size."""
    known = {name: builder.known.get(name) for name in names}
    return [name for name, found in known.items() if isinstance(found, LoweredValue) and not found.padded]


def _handed_back(builder: Builder, wanted: Iterable[str]) -> dict[str, str]:
    """The lowered blob of each wanted one."""
    names: dict[str, str] = {}
    for name in dict.fromkeys(wanted):
        final = builder.known.get(name)
        if isinstance(final, Static):
            final = builder.constant(name, final.tensor, builder.net.blobs[name].device)
        if not isinstance(final, LoweredValue) or final.padded:
            what = "has a size that depends on values" if isinstance(final, LoweredValue) else "is no tensor"
            if final is None:
                what = f"is not made{nearest(name, builder.known)}"
            raise GraphirError(f"output {name!r} {what}", where=f"net {builder.net.name!r}", fix="choose other outputs")
        names[name] = final.name
    return names


def _ordered(builder: Builder) -> dict[str, Blob]:
    """The blobs, external ones first."""
    external = {name: builder.blobs[name] for name in builder.external}
    return external | builder.blobs


def _gradients(builder: Builder, step: Net) -> dict[str, str]:
    pairs = [(builder.known.get(a), builder.known.get(b)) for a, b in step.gradients.items()]
    return {a.name: b.name for a, b in pairs if isinstance(a, LoweredValue) and isinstance(b, LoweredValue)}


def _interface(builder: Builder, names: Mapping[str, str], held: Iterable[str]) -> Interface:
    given = [name for name in builder.external if builder.blobs[name].role == "input"]
    arguments = _pytree.tree_structure(((), dict.fromkeys(given, 0)))
    results = _pytree.tree_structure(dict.fromkeys(names, 0))
    return Interface(
        arguments=_pytree.treespec_dumps(arguments),
        feeds=tuple([Slot(name) for name in given]),
        fetches=tuple([Slot(name) for name in names.values()]),
        results=_pytree.treespec_dumps(results),
        module_state={name: name for name in held if builder.blobs[name].role != "constant"},
    )
