"""Mutations of what lives from step to step, and of what a session reads of a program beside its operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch

from graphir.ir.blob import STATE_ROLES, Blob
from graphir.ir.guard import Guard
from graphir.ir.operator import PURE, Operator
from graphir.ir.program import Program
from graphir.ir.size import Polynomial
from mutations.edits import exchanged, renumbered, shuffled, with_net

__all__ = ["INTERFACE", "STATE"]

Found = Iterator[tuple[str, Program]]
Pairs = Iterator[tuple[str, Program, Program]]


def chain(program: Program, draw: Random) -> Pairs:
    """A factor that is one for so many steps: another one, handed down a chain of states, shows after them."""
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        name = op.outputs[0]
        blob = program.step.blobs[name]
        if op.effects != PURE or len(op.outputs) != 1 or blob.dtype != "f32" or op.phase == "update":
            continue
        if name in program.step.external_outputs or "." not in op.type:
            continue
        before = chained(program, position, ["one"])
        for length in (2, 3, 4):
            values = ["one"] * (length - 1) + [draw.choice(("two", "two", "one"))]
            yield f"{name!r} times {', then '.join(values)}", chained(program, position, values), before


def chained(program: Program, position: int, values: list[str]) -> Program:
    """The program in which what an operator makes is multiplied by a state, which is overwritten by the next one in
    every step, and so on; the last one by one. *values* are what they begin with."""
    op = program.step.ops[position]
    made = op.outputs[0]
    blob, device = program.step.blobs[made], op.device
    links = [f"{made}.factor{k}" if k else f"{made}.factor" for k in range(len(values))]
    keys = dict(zip(links, values, strict=True)) | {"one": "one", "two": "two"}
    held = {name: Blob(name, (), "f32", device, "buffer", name) for name in keys}
    product = f"{made}.product"
    times = Operator("aten.mul.Tensor", (made, links[0]), (product,), {}, device, op.phase)
    multiplied = blob._replace(name=product, storage=product, role="activation")
    later = [
        other._replace(inputs=tuple(product if n == made else n for n in other.inputs))
        for other in program.step.ops[position + 1 :]
    ]
    views = {
        n: b._replace(storage=product, role="activation")
        for n, b in program.step.blobs.items()
        if b.storage == made != n
    }
    handed = [
        Operator("Copy", (source,), (name,), {}, device, op.phase)
        for name, source in zip(links, [*links[1:], "one"], strict=True)
    ]
    ops = (*program.step.ops[: position + 1], times, *later, *handed)
    step = program.step.with_(
        ops=ops,
        blobs={**program.step.blobs, **views, **held, product: multiplied},
        external_inputs=(*program.step.external_inputs, *keys),
    )
    loads = tuple(Operator("graphir.load", (), (n,), {"key": key}, device, "init") for n, key in keys.items())
    init = program.init.with_(ops=(*program.init.ops, *loads), blobs={**program.init.blobs, **held})
    state = {**program.state, "one": torch.tensor(1.0), "two": torch.tensor(2.0)}
    return program.with_(step=renumbered(step), init=init, state=state)


def init(program: Program, draw: Random) -> Found:
    """State starts from another value: another entry that is loaded, or other numbers."""
    ops = program.init.ops
    for position, op in shuffled(list(enumerate(ops)), draw):
        if op.type == "graphir.load":
            mine = program.init.blobs[op.outputs[0]]
            others = [
                other.args["key"]
                for other in ops
                if other.type == "graphir.load"
                and other.args["key"] != op.args["key"]
                and (program.init.blobs[other.outputs[0]].shape, program.init.blobs[other.outputs[0]].dtype)
                == (mine.shape, mine.dtype)
            ]
            for key in shuffled(others, draw)[:2]:
                changed = (*ops[:position], op._replace(args={"key": key}), *ops[position + 1 :])
                yield f"{op.outputs[0]!r} from {key!r}", program.with_(init=program.init.with_(ops=changed))
        elif op.type == "Copy":
            same = [n for n, b in program.init.blobs.items() if b.shape == program.init.blobs[op.inputs[0]].shape]
            other = draw.choice(same)
            if other != op.inputs[0]:
                changed = (*ops[:position], op._replace(inputs=(other,)), *ops[position + 1 :])
                yield f"{op.outputs[0]!r} from {other!r}", program.with_(init=program.init.with_(ops=changed))


def _with(program: Program, **changes: Any) -> Program:
    return program.with_(interface=replace(program.interface, **changes))


def module_state(program: Program, draw: Random) -> Found:
    """Two names of the module's state stand for each other's blobs, or one is missing."""
    held = program.interface.module_state
    names = [(a, b) for a in held for b in held if a < b and held[a] != held[b]]
    for a, b in shuffled(names, draw):
        yield f"{a!r} and {b!r}", _with(program, module_state={**held, a: held[b], b: held[a]})
        if draw.random() < 0.2:
            yield f"no {a!r}", _with(program, module_state={n: v for n, v in held.items() if n != a})


def optimizer_state(program: Program, draw: Random) -> Found:
    """Two entries of the optimizer's state stand for each other's blobs, or have another name."""
    held = program.interface.optimizer_state
    entries = [(param, key) for param, blobs in held.items() for key in blobs]
    for (a, x), (b, y) in shuffled([(p, q) for p in entries for q in entries if p < q], draw):
        changed = {param: dict(blobs) for param, blobs in held.items()}
        changed[a][x], changed[b][y] = held[b][y], held[a][x]
        yield f"{a!r}.{x} and {b!r}.{y}", _with(program, optimizer_state=changed)
    for param, key in shuffled(entries, draw):
        changed = {p: dict(blobs) for p, blobs in held.items()}
        changed[param][key + "_"] = changed[param].pop(key)
        yield f"{param!r}.{key} has another name", _with(program, optimizer_state=changed)


def groups(program: Program, draw: Random) -> Found:
    """A parameter follows another group's learning rate, stands in another group, or groups are in another order."""
    found = program.interface.param_groups
    if len(found) < 2:
        return
    rates = [group.lr for group in found]
    yield "groups reversed", _with(program, param_groups=found[::-1])
    changed = tuple(group._replace(lr=other.lr) for group, other in zip(found, found[::-1], strict=True))
    yield "rates exchanged", _with(program, param_groups=changed)
    for number, group in enumerate(found):
        options = {**group.options, "lr": 0.5}
        yield f"another rate in group {number}", _with(program, param_groups=_at(found, number, options=options))
        options = {**group.options, "weight_decay": 0.25}
        yield f"another decay in group {number}", _with(program, param_groups=_at(found, number, options=options))
        if len(group.params) > 1:
            yield f"group {number} reversed", _with(program, param_groups=_at(found, number, params=group.params[::-1]))
    for position, op in shuffled(list(enumerate(program.step.ops)), draw):
        for k, name in enumerate(op.inputs):
            if name in rates:
                other = rates[(rates.index(name) + 1) % len(rates)]
                inputs = (*op.inputs[:k], other, *op.inputs[k + 1 :])
                yield f"{other!r} for {op.outputs[0]!r}", exchanged(program, position, inputs=inputs)
    for number, group in enumerate(found):
        for param in shuffled(group.params, draw):
            there = (number + 1) % len(found)
            changed = _at(found, number, params=tuple(p for p in group.params if p != param))
            changed = _at(changed, there, params=(*changed[there].params, param))
            yield f"{param!r} in group {there}", _with(program, param_groups=changed)


def _at(found: Any, position: int, /, **changes: Any) -> Any:
    return tuple(group._replace(**changes) if k == position else group for k, group in enumerate(found))


def _handed(what: str, found: Any) -> Iterator[tuple[str, Any]]:
    """Other feeds, or other fetches: two change places, or one stands for two; one is split or gathered along another
    dimension, is a number, or is left out."""
    for i in range(len(found)):
        for j in range(i):
            order = list(found)
            order[i], order[j] = found[j], found[i]
            yield f"{what}s {j} and {i}", tuple(order)
            yield f"{what} {i} is {found[j].blob!r}", (*found[:i], found[j], *found[i + 1 :])
    for i, handed in enumerate(found):
        for dim in (None, 0, 1):
            if dim != handed.batch_dim:
                yield f"{what} {i} along {dim}", _at(found, i, batch_dim=dim)
        yield f"{what} {i} is a number", _at(found, i, blob=None, value=3)
        yield f"{what} {i} is left out", found[:i] + found[i + 1 :]


def feeds(program: Program, draw: Random) -> Found:
    """Arguments stand for each other's blobs, are split along another dimension, or in another structure."""
    found = program.interface.feeds
    for what, changed in _handed("argument", found):
        yield what, _with(program, feeds=changed)
    if len(found) > 1:
        yield "arguments reversed", _with(program, feeds=found[::-1])
    yield "another structure", _with(program, arguments=_restructured(program.interface.arguments))
    inputs = [n for n in program.step.external_inputs if program.step.blobs[n].role == "input"]
    for a, b in shuffled([(a, b) for a in inputs for b in inputs if a < b], draw):
        swapped_ = [{a: b, b: a}.get(n, n) for n in program.step.external_inputs]
        yield f"inputs {a!r} and {b!r} in another order", with_net(program, external_inputs=tuple(swapped_))


def _restructured(text: str) -> str:
    """The structure with its first list a tuple, or the other way round."""
    swapped_ = {"builtins.tuple": "builtins.list", "builtins.list": "builtins.tuple"}
    changed = False

    def turn(node: Any) -> Any:
        nonlocal changed
        if isinstance(node, dict):
            if node.get("type") in swapped_ and not changed:
                changed = True
                return {**node, "type": swapped_[node["type"]]}
            return {key: turn(value) for key, value in node.items()}
        return [turn(item) for item in node] if isinstance(node, list) else node

    return json.dumps(turn(json.loads(text))) if text else text


def fetches(program: Program, draw: Random) -> Found:
    """Results stand for each other, are other blobs, are gathered along another dimension, or in another order."""
    interface, step = program.interface, program.step
    found = interface.fetches
    for what, changed in _handed("result", found):
        yield what, _with(program, fetches=changed)
    if interface.results:
        yield "another structure", _with(program, results=_restructured(interface.results))
    outputs = step.external_outputs
    if len(outputs) > 1:
        yield "outputs reversed", with_net(program, external_outputs=outputs[::-1])
        for name in outputs:
            rest = tuple(n for n in outputs if n != name)
            yield f"{name!r} not handed back", with_net(program, external_outputs=rest)
    replica = program.replicas[0]
    if interface.loss is not None:
        scalars = [
            n
            for n, b in step.blobs.items()
            if b.shape == () and n.startswith(replica) and b.dtype == "f32" and n != replica + interface.loss
        ]
        for name in shuffled(scalars, draw)[:6]:
            others = [prefix + name.removeprefix(replica) for prefix in program.replicas]
            if all(n in step.blobs for n in others):
                changed = with_net(program, external_outputs=tuple(dict.fromkeys((*outputs, *others))))
                yield f"the loss is {name!r}", _with(changed, loss=name.removeprefix(replica))
    for name in shuffled([n for n, b in step.blobs.items() if not b.is_view and n not in outputs], draw)[:3]:
        yield f"{name!r} handed back, too", with_net(program, external_outputs=(*outputs, name))
    for name in shuffled(outputs, draw)[:2]:
        blob = step.blobs[name]
        same = [n for n, b in step.blobs.items() if (b.shape, b.dtype) == (blob.shape, blob.dtype) and n != name]
        for other in shuffled(same, draw)[:2]:
            handed = tuple(other if n == name else n for n in outputs)
            changed = tuple(f._replace(blob=other) if f.blob == name else f for f in found)
            yield f"{other!r} for {name!r}", _with(with_net(program, external_outputs=handed), fetches=changed)


def guards(program: Program, draw: Random) -> Found:
    """A guard is missing, or says something else."""
    found = program.covers.guards

    def given(guards: tuple[Guard, ...]) -> Program:
        return program.with_(covers=program.covers.with_guards(guards))

    for i, guard in enumerate(found):
        yield f"no {guard}", given(found[:i] + found[i + 1 :])
        for number in (1, -1, 2):
            yield f"{guard} by {number}", given(_at(found, i, number=guard.number + number))
        for relation in ("<=", ">=", "==", "!="):
            if relation != guard.relation:
                yield f"{guard} with {relation}", given(_at(found, i, relation=relation))
        yield f"{guard} doubled", given((*found, guard))
        yield f"{guard} of remainders", given(_at(found, i, modulus=2, relation="==", number=0))
        yield f"another reason of {guard}", given(_at(found, i, reason="nobody knows"))
    for name in program.dims:
        size = Polynomial.of({(name,): 1})
        assert isinstance(size, Polynomial)
        for number in (1, 2, 3, 4):
            for relation in ("!=", ">=", "<="):
                more = Guard(size, relation, number)
                yield f"{more} as well", given((*found, more))


def roles(program: Program, draw: Random) -> Found:
    """A blob has another role."""
    blobs = program.step.blobs
    for name in shuffled([n for n, b in blobs.items() if not b.is_view], draw):
        role = blobs[name].role
        state = role in STATE_ROLES
        others = [r for r in ("param", "buffer", "state", "constant") if r != role] if state else [
            r for r in ("activation", "gradient", "temporary", "output", "input", "param") if r != role
        ]  # fmt: skip
        other = draw.choice(others)
        own = {n: b._replace(role=other) for n, b in blobs.items() if b.storage == name}
        changed = with_net(program, blobs={**blobs, **own})
        if name in program.init.blobs:
            mine = program.init.blobs[name]._replace(role=other)
            changed = changed.with_(init=program.init.with_(blobs={**program.init.blobs, name: mine}))
        yield f"{name!r} is {other}, not {role}", changed


def dims(program: Program, draw: Random) -> Found:
    """Another captured size; a declared shape, stride or offset that agrees at the captured size only."""
    for name, value in program.dims.items():
        for other in (value + 1, value + 2, value * 2):
            yield f"{name}={other}", program.with_(dims={**program.dims, name: other})
    blobs = program.step.blobs
    for name, blob in shuffled(list(blobs.items()), draw):
        sizes = [k for k, size in enumerate(blob.shape or ()) if isinstance(size, Polynomial)]
        if sizes:
            shape = list(blob.shape or ())
            k = draw.choice(sizes)
            at = program.dims
            number = sum(c * _product(at, monomial) for monomial, c in shape[k].terms)  # type: ignore[union-attr]
            shape[k] = number
            yield f"{name!r} is {number} long", _declared(program, blob._replace(shape=tuple(shape)))
        elif blob.shape and not blob.is_view:
            for dim, value in program.dims.items():
                fits = [k for k, size in enumerate(blob.shape) if size == value]
                if fits:
                    shape = list(blob.shape)
                    shape[fits[0]] = Polynomial.of({(dim,): 1})
                    yield f"{name!r} is {dim} long", _declared(program, blob._replace(shape=tuple(shape)))
        if isinstance(blob.offset, Polynomial):
            number = sum(c * _product(program.dims, monomial) for monomial, c in blob.offset.terms)
            yield f"{name!r} begins at {number}", _declared(program, blob._replace(offset=number))


def _declared(program: Program, blob: Blob) -> Program:
    return with_net(program, blobs={**program.step.blobs, blob.name: blob})


def _product(at: Mapping[str, int], monomial: tuple[str, ...]) -> int:
    product = 1
    for name in monomial:
        product *= at[name]
    return product


Kinds = Mapping[str, Callable[[Program, Random], Iterator[Any]]]

STATE: Kinds = {
    "chain of states": chain,
    "initial value": init,
    "module's state": module_state,
    "optimizer's state": optimizer_state,
}

INTERFACE: Kinds = {
    "learning rate's group": groups,
    "arguments": feeds,
    "results": fetches,
    "guards": guards,
    "roles": roles,
    "declared sizes": dims,
}
