"""Mutations of nets that stand in arguments of Caffe2's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from mutations.edits import shuffled
from mutations.imported import TEXTS, Found, copied, each_operator, numbers, operators
from mutations.nets_of_caffe2 import Imported

__all__ = ["NESTED"]


def nested_operand(net: Imported, draw: Random) -> Found:
    """A blob of a net in an argument has another name, or two change places."""
    yield from _nested(net, draw, _renamed)


def _renamed(op: Any, message: Any) -> Iterator[str]:
    for names in (op.input, op.output):
        for k, old in enumerate(list(names)):
            for other in ("x", "q", "w", old + "_"):
                if other != old:
                    names[k] = other
                    yield f"{other!r} for {old!r}"
                    names[k] = old
    if len(op.input) > 1:
        op.input[0], op.input[1] = op.input[1], op.input[0]
        yield "operands swapped"


def nested_argument(net: Imported, draw: Random) -> Found:
    """An argument, or the type, of an operator of a net in an argument is another."""

    def change(op: Any, message: Any) -> Iterator[str]:
        yield from numbers(op, message)
        old = op.type
        op.type = "Sigmoid"
        yield f"Sigmoid for {old}"
        op.type = old
        op.arg.add(name="alpha", f=0.5)
        yield "alpha=0.5 more"

    yield from _nested(net, draw, change)


def nested_text(net: Imported, draw: Random) -> Found:
    """The text of an argument in a net in an argument has another device, control input, name or blank in it."""
    start = _with_nets(net, draw)
    for position in shuffled(range(len(operators(start, nested=True))), draw):
        for pattern, one, other in shuffled(TEXTS, draw)[:4]:
            made = []
            for part in (one, other):
                message = copied(start)
                op = operators(message, nested=True)[position]
                note = op.arg.add(name="note")
                note.s = f"{pattern.format(part)} type".encode()
                made.append(message)
            what = f"{pattern.format(one)!r}, {pattern.format(other)!r} in a nested {op.type}"
            yield what, made[1], net.init, made[0]


def nested_device(net: Imported, draw: Random) -> Found:
    """An operator of a net in an argument is on another device, has another name, or waits for something."""

    def change(op: Any, message: Any) -> Iterator[str]:
        op.device_option.device_type, op.device_option.device_id = 1, 3
        yield "gpu:3"
        op.name = "other"
        yield "another name"
        op.control_input.append("x")
        yield "waits for 'x'"
        op.debug_info = "device_id: 5"
        yield "another note"

    yield from _nested(net, draw, change)


def nested_order(net: Imported, draw: Random) -> Found:
    """Operators of a net in an argument are in another order, left out, twice, or its interface is another."""
    for net_ in (_with_nets(net, draw),):
        inner = [k for k, op in enumerate(net_.op) if any(arg.HasField("n") for arg in op.arg)]
        for k in inner:
            for a in range(len(net_.op[k].arg)):
                if not net_.op[k].arg[a].HasField("n"):
                    continue
                count = len(net_.op[k].arg[a].n.op)
                for i in range(count):
                    for what in ("left out", "twice", "first", "last", "inputs", "outputs", "name"):
                        message = copied(net_)
                        body = message.op[k].arg[a].n
                        ops = [copied(op) for op in body.op]
                        moved = ops.pop(i)
                        found = {
                            "twice": [*ops[:i], moved, moved, *ops[i:]],
                            "first": [moved, *ops],
                            "last": [*ops, moved],
                            "left out": ops,
                        }
                        if what in found:
                            del body.op[:]
                            body.op.extend(found[what])
                        elif what == "inputs":
                            body.external_input.append(f"w{i}")
                        elif what == "outputs":
                            body.external_output.append(f"v{i}")
                        else:
                            body.name = f"other{i}"
                        yield f"{moved.type} of the net in {net_.op[k].type} {what}", message, net.init, net_


def _with_nets(net: Imported, draw: Random) -> Any:
    """The step, with a net in an argument of one of its operators where it has none."""
    if operators(net.step, nested=True) or not net.step.op:
        return net.step
    message = copied(net.step)
    outer = message.op[draw.randrange(len(message.op))]
    names = [*message.external_input, *outer.input, *outer.output, "w", "v"][:4]
    body = outer.arg.add(name="body").n
    body.name = "inner"
    for k, kind in enumerate(("Tanh", "Scale", "Relu", "Exp")):
        inner = body.op.add(type=kind, input=[names[k % len(names)]], output=[f"inner{k}"])
        inner.arg.add(name="scale", f=0.5 + k)
        inner.device_option.device_type, inner.device_option.device_id = 1, k
    body.external_output.append("inner3")
    return message


def _nested(net: Imported, draw: Random, change: Callable[[Any, Any], Iterator[str]]) -> Found:
    before = _with_nets(net, draw)
    for what, message, init, _ in each_operator(net._replace(step=before), True, draw, change):
        yield what, message, init, before


NESTED: Mapping[str, Callable[[Imported, Random], Found]] = {
    "Caffe2: nested operand": nested_operand,
    "Caffe2: nested argument": nested_argument,
    "Caffe2: nested text": nested_text,
    "Caffe2: nested device, name": nested_device,
    "Caffe2: nested order": nested_order,
}
