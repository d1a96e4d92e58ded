"""Mutations of Caffe2's nets, made where files have them: in the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from random import Random
from typing import Any

from graphir.caffe2.dialect import CAFFE2
from graphir.caffe2.schema import messages
from mutations.edits import shuffled
from mutations.nets_of_caffe2 import Imported

__all__ = [
    "IMPORTED",
    "TEXTS",
    "Found",
    "copied",
    "each_operator",
    "meaning",
    "numbers",
    "operators",
]

Found = Iterator[tuple[str, Any, Any, Any]]
"""What, the mutated step, the mutated init, and the step that it is held against: None for the net's own."""


def copied(message: Any) -> Any:
    made = type(message)()
    made.CopyFrom(message)
    return made


def operators(net: Any, nested: bool) -> list[Any]:
    """The operators of a net, or those of the nets in their arguments."""
    inner = [op for outer in net.op for arg in outer.arg if arg.HasField("n") for op in every_operator(arg.n)]
    return inner if nested else list(net.op)


def every_operator(net: Any) -> list[Any]:
    return [*net.op, *operators(net, nested=True)]


def each_operator(net: Imported, nested: bool, draw: Random, change: Callable[[Any, Any], Iterator[str]]) -> Found:
    """Each change that *change* makes of an operator of a copy of the step: it is asked anew for the next one."""
    count = len(operators(net.step, nested))
    for position in shuffled(range(count), draw):
        for turn in range(8):
            message = copied(net.step)
            op = operators(message, nested)[position]
            what = next((w for k, w in enumerate(change(op, message)) if k == turn), None)
            if what is None:
                break
            yield f"{what} in {op.type}", message, net.init, None


def numbers(op: Any, _: Any) -> Iterator[str]:
    """Each argument of the operator is changed, kept while the text is out, and put back."""
    for arg in op.arg:
        if arg.HasField("f"):
            old = arg.f
            for new in (old * 1.5 + 0.25, -old):
                arg.f = new
                yield f"{arg.name}={new}"
            arg.f = old
        elif arg.HasField("i"):
            old = arg.i
            for new in (old + 1, -old - 1):
                arg.i = new
                yield f"{arg.name}={new}"
            arg.i = old
        elif arg.HasField("s"):
            old = arg.s
            for new in ({b"exp": b"inv", b"fixed": b"exp", b"inv": b"fixed"}.get(old, old + b" "), old[:-1] + b"9"):
                arg.s = new
                yield f"{arg.name}={new!r}"
            arg.s = old
        elif arg.floats:
            arg.floats[0] += 1
            yield f"{arg.name}[0]={arg.floats[0]}"
            arg.floats[0] -= 1
        elif arg.ints:
            arg.ints[-1] += 1
            yield f"{arg.name}[-1]={arg.ints[-1]}"
            arg.ints[-1] -= 1


def argument(net: Imported, draw: Random) -> Found:
    """An argument's number or text is another."""
    yield from each_operator(net, False, draw, numbers)


def argument_named(net: Imported, draw: Random) -> Found:
    """An argument has another name, is left out, or there is one more."""

    def change(op: Any, _: Any) -> Iterator[str]:
        for arg in op.arg:
            old = arg.name
            arg.name = old + "_"
            yield f"{old} renamed"
            arg.name = old
        if op.arg:
            kept = [copied(arg) for arg in op.arg]
            del op.arg[0]
            yield f"no {kept[0].name}"
            del op.arg[:]
            op.arg.extend(kept)
        for name in ("is_test", "broadcast", "axis", "nesterov"):
            arg = op.arg.add(name=name, i=1)
            yield f"{name}=1 more"
            op.arg.remove(arg)

    yield from each_operator(net, False, draw, change)


TEXTS = (
    ("device_id: {}", "3", "4"),
    ("device_type: {}", "0", "1"),
    ('control_input: "{}"', "x", "y"),
    ('name: "{}"', "", "a"),
    ("device_option {{ device_id: {} }}", "1", "2"),
    ("op {{ device_id: {} }}", "1", "2"),
    ("x  {}", "y", " y"),
    ('debug_info: "{}"', "", "b"),
)
"""What stands for a device, a control input or a name where it is a field, but not in the text of an argument."""


def text(net: Imported, draw: Random) -> Found:
    """The text of an argument has another device, control input, name or blank in it: it is text there."""
    for position in shuffled(range(len(net.step.op)), draw):
        for pattern, one, other in shuffled(TEXTS, draw)[:4]:
            made = []
            for part in (one, other):
                message = copied(net.step)
                note = message.op[position].arg.add(name="note")
                if position % 2:
                    note.strings.extend([pattern.format(part).encode(), b"device_id: 0"])
                else:
                    note.s = pattern.format(part).encode()
                made.append(message)
            what = f"{pattern.format(one)!r}, {pattern.format(other)!r} in {net.step.op[position].type}"
            yield what, made[1], net.init, made[0]


def operands(net: Imported, draw: Random) -> Found:
    """An operand is another blob, or two change places."""

    def change(op: Any, message: Any) -> Iterator[str]:
        yield from _renamed("operand", op.input, op.output, lambda old: [draw.choice(_names(message))])

    yield from each_operator(net, False, draw, change)


def results(net: Imported, draw: Random) -> Found:
    """A result has another name, that of another blob, or two change places; a result goes into another blob, where
    its readers find it."""

    def change(op: Any, message: Any) -> Iterator[str]:
        yield from _renamed("result", op.output, op.input, lambda old: [old + "_", draw.choice(_names(message))])

    yield from each_operator(net, False, draw, change)
    for position in shuffled(range(len(net.step.op)), draw):
        for made in net.step.op[position].output:
            for new in shuffled(dict.fromkeys(_names(net.step)), draw)[:4]:
                if new != made:
                    message = copied(net.step)
                    target = message.op[position].output
                    target[list(target).index(made)] = new
                    _follow(message, position, made, new)
                    yield f"result {new!r} for {made!r}, whose readers follow", message, net.init, None


def _follow(message: Any, position: int, made: str, new: str) -> None:
    """Let the operators behind a position name a blob otherwise."""
    for later in message.op[position + 1 :]:
        for names in (later.input, later.output):
            renamed = [new if name == made else name for name in names]
            del names[:]
            names.extend(renamed)


def _names(message: Any) -> list[str]:
    return [*message.external_input, *[name for op in message.op for name in op.output]]


def _renamed(what: str, names: Any, opposite: Any, instead: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """Each of an operator's operands, or of its results, that is not among the *opposite* ones too has each other name
    that *instead* gives; then the first two change places."""
    for k, old in enumerate(list(names)):
        for new in instead(old):
            if new != old and old not in opposite:
                names[k] = new
                yield f"{what} {new!r} for {old!r}"
                names[k] = old
    if len(names) > 1:
        names[0], names[1] = names[1], names[0]
        yield f"{what}s 0 and 1 swapped"


_LIKE = (
    ("Relu", "Tanh", "Sigmoid", "Softmax", "Scale"),
    ("Add", "Mul", "Sum"),
    ("MaxPool", "AveragePool"),
    ("XavierFill", "MSRAFill", "ConstantFill"),
    ("UniformFill", "GaussianFill"),
    ("TanhGradient", "SigmoidGradient", "ReluGradient"),
    ("FC", "FCTransposed"),
    ("NCCLAllreduce", "NCCLBroadcast"),
)


def other_type(net: Imported, draw: Random) -> Found:
    """An operator is of another type, or of another engine."""

    def change(op: Any, _: Any) -> Iterator[str]:
        family = next((f for f in _LIKE if op.type in f), ())
        old = op.type
        for other in family:
            if other != old:
                op.type = other
                yield f"{other} for {old}"
                op.type = old
        op.engine = "SOMETHING"
        yield "another engine"

    yield from each_operator(net, False, draw, change)


def in_place(net: Imported, draw: Random) -> Found:
    """An operator overwrites an operand, or no longer does; whoever reads the result, or nobody, follows."""
    for position in shuffled(range(len(net.step.op)), draw):
        op = net.step.op[position]
        if not op.input or not op.output:
            continue
        made = op.output[0]
        for source, following in product(dict.fromkeys(op.input[:2]), (True, False)):
            message = copied(net.step)
            new = source if source != made else made + "_new"
            message.op[position].output[0] = new
            if following:
                _follow(message, position, made, new)
            what = f"{op.type} -> {new!r} for {made!r}, {'all' if following else 'nobody'} follows"
            yield what, message, net.init, None


def order(net: Imported, draw: Random) -> Found:
    """An operator is executed elsewhere, twice, or not at all."""
    ops = list(net.step.op)
    for position in shuffled(range(len(ops)), draw):
        rest = [*ops[:position], *ops[position + 1 :]]
        place = min(max(position + draw.choice((-4, -2, -1, 1, 2, 4)), 0), len(rest))
        for what, changed in (
            (f"moved to {place}", [*rest[:place], ops[position], *rest[place:]]),
            ("left out", rest),
            ("twice", [*ops[: position + 1], *ops[position:]]),
        ):
            message = copied(net.step)
            del message.op[:]
            message.op.extend(changed)
            yield f"{ops[position].type} {what}", message, net.init, None


def devices(net: Imported, draw: Random) -> Found:
    """An operator, or the net, is on another device."""

    def change(op: Any, message: Any) -> Iterator[str]:
        for number in (0, 1, 2):
            if op.device_option.device_id != number or op.device_option.device_type != 1:
                op.device_option.device_type, op.device_option.device_id = 1, number
                yield f"gpu:{number}"
        op.device_option.extra_info.append("numa")
        yield "more of a device"

    yield from each_operator(net, False, draw, change)


def control(net: Imported, draw: Random) -> Found:
    """An operator waits for another blob, or for none; it has another name."""

    def change(op: Any, message: Any) -> Iterator[str]:
        if op.control_input:
            del op.control_input[:]
            yield "no control input"
        for name in message.external_input[:2]:
            op.control_input.append(name)
            yield f"waits for {name!r}"
        op.name = "other"
        yield "another name"
        op.debug_info = "why"
        yield "another note"

    yield from each_operator(net, False, draw, change)


def init(net: Imported, draw: Random) -> Found:
    """What fills a parameter is another operator, argument, name or order."""
    if net.init is None:
        return
    changed = net._replace(step=net.init)
    kinds = (argument, other_type, results, order)
    rounds = [kind(changed, draw) for kind in kinds]
    for _ in range(400):
        for each in rounds:
            found = next(each, None)
            if found is not None:
                yield found[0], net.step, found[1], None


def outside(net: Imported, draw: Random) -> Found:
    """What a net takes and hands back is declared otherwise."""
    given, handed = list(net.step.external_input), list(net.step.external_output)
    names = [n for op in net.step.op for n in op.output]
    for name in shuffled(dict.fromkeys([*names]), draw):
        message = copied(net.step)
        message.external_output.append(name)
        yield f"{name!r} handed back", message, net.init, None
        if name not in given and draw.random() < 0.5:
            message = copied(net.step)
            message.external_input.append(name)
            yield f"{name!r} is given", message, net.init, None
    for k, name in enumerate(given):
        message = copied(net.step)
        del message.external_input[k]
        yield f"{name!r} not given", message, net.init, None
    if len(given) > 1:
        message = copied(net.step)
        del message.external_input[:]
        message.external_input.extend(given[::-1])
        yield "reversed", message, net.init, None
    for k, name in enumerate(handed):
        message = copied(net.step)
        del message.external_output[k]
        yield f"{name!r} not handed back", message, net.init, None


IMPORTED: Mapping[str, Callable[[Imported, Random], Found]] = {
    "Caffe2: argument": argument,
    "Caffe2: argument named": argument_named,
    "Caffe2: text of an argument": text,
    "Caffe2: operand": operands,
    "Caffe2: result": results,
    "Caffe2: type or engine": other_type,
    "Caffe2: in place or not": in_place,
    "Caffe2: order": order,
    "Caffe2: device": devices,
    "Caffe2: control input, name": control,
    "Caffe2: init": init,
    "Caffe2: inputs and outputs": outside,
}


def meaning(net: Any) -> bytes:
    """What a net says of what it computes, as bytes: all but where operators are, after what, and what they are called;
    in nets in arguments, too. Text in arguments is text; a copy is one whatever its arguments."""
    made = messages().NetDef()
    made.CopyFrom(net)
    for field in ("name", "device_option"):
        made.ClearField(field)
    for op in every_operator(made):
        for field in ("name", "device_option", "control_input", "debug_info"):
            op.ClearField(field)
        if op.type in CAFFE2.copies and len(op.input) == len(op.output) == 1:
            op.ClearField("arg")
        for arg in op.arg:
            if arg.HasField("n"):
                arg.n.ClearField("name")
    return bytes(made.SerializeToString(deterministic=True))
