"""``NetDef`` to net and back.

What a ``NetDef`` says is held in two places. Types, names, order, devices and arguments of one plain value are fields
of the net and its operators, where passes read and change them. All else (an operator's name, engine and control
inputs, arguments that are nets or tensors, which fields of a device are set, …) is text: ``Operator.proto`` and
``Net.proto`` hold an ``OperatorDef`` and a ``NetDef`` with what the fields do not say. :func:`encode` puts the two
together, so that ``encode(decode(x))`` equals ``x``, and what a pass changed takes the place of what was there.

Where the text has some of an operator's arguments, it has all of them, in their order; those that are fields stand
there with their name alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import isinf
from typing import Final, NamedTuple, cast

from ..errors import FileError, GraphirError
from ..ir.blob import Blob, Role
from ..ir.device import KINDS, Device
from ..ir.net import Net
from ..ir.operator import PURE, Arg, Effects, Operator, stored_versions
from ..ir.placement import blob_devices
from ..ir.text.printer import default_role
from .dialect import CAFFE2
from .operators import is_random, phase_of
from .schema import Message, messages

__all__ = ["decode", "encode"]

_NOT_CAFFE2: Final = "a NetDef holds Caffe2's operators only; graphir's own files hold any (program.save)"
_KEPT: Final = "names are text in UTF-8, and what Operator.proto and Net.proto hold is left as it was read"


def decode(message: Message, where: str) -> Net:
    """The net that a ``NetDef`` describes.

    A blob's versions count its writes. An operator that writes a blob which it reads overwrites it
    (``effects.writes``); one that writes it without reading it gives it a new value. A blob that nobody makes is
    declared but not external, so that ``verify`` names it.

    Args:
        message: a ``NetDef``; it is left as it is.
        where: the file that it came from.

    Raises:
        FileError: it says something that no net can; the place in the file is given.
    """
    place = where
    try:
        external, results = _names(message.external_input), _names(message.external_output)
        name, proto = _net_text(message)
        default = _device(message.device_option)
        ops: list[Operator] = []
        reader = _Reader(external, default)
        for position, op in enumerate(message.op):
            place = f"{where}, at op[{position}]"
            ops.append(reader.operator(op))
    except GraphirError as e:
        raise FileError(e.what, at=e.at, where=place, fix=e.fix) from None
    _refuse_cycles(ops, reader.control, external, where)
    external = tuple(dict.fromkeys(external))
    devices = blob_devices(ops, {}, CAFFE2, external, default)
    return Net(name, tuple(ops), _blobs(ops, external, devices), external, results, _gradients(ops), CAFFE2, proto)


def encode(net: Net) -> Message:
    """The ``NetDef`` that describes a net.

    Raises:
        GraphirError: the net has an operator, an argument or a name that a ``NetDef`` cannot hold.
    """
    place, at = f"net {net.name!r}", ""
    try:
        message = messages().NetDef()
        message.CopyFrom(_parsed_net(net.proto))
        if net.name:
            _put(message, "name", net.name)
        if tuple(dict.fromkeys(message.external_input)) != net.external_inputs:
            message.ClearField("external_input")
            _put(message, "external_input", net.external_inputs)
        _put(message, "external_output", net.external_outputs)
        default = _device(message.device_option)
        for position, op in enumerate(net.ops):
            place, at = f"net {net.name!r}, op[{position}]", _shown(op)
            written = message.op.add()
            _write(op, written, default)
            _put(written, "input", op.inputs)
            _put(written, "output", op.outputs)
    except GraphirError as e:
        raise GraphirError(e.what, at=at, where=place, fix=e.fix) from None
    return message


# Operators, read


class _Rest(NamedTuple):
    """An operator without its inputs and outputs: the same for many operators of a net."""

    type: str
    args: Mapping[str, Arg]
    device: Device
    proto: str
    random: bool
    is_gradient: bool
    control: tuple[str, ...]


class _Reader:
    """Reads the operators of a net in their order.

    Args:
        external: the external inputs.
        default: the device of the net, on which operators run that name none.

    Attributes:
        control: the control inputs of the operators that have any, by position.
    """

    def __init__(self, external: Iterable[str], default: Device) -> None:
        self.default = default
        self.control: dict[int, tuple[str, ...]] = {}
        self._latest = dict.fromkeys(external, 0)
        self._gradients: set[str] = set()
        self._rests: dict[bytes, _Rest] = {}
        self._position = self._random = 0

    def operator(self, op: Message) -> Operator:
        inputs, outputs = _names(op.input), _names(op.output)
        rest = self._rest(op)
        if rest.control:
            self.control[self._position] = rest.control
        self._position += 1
        phase = phase_of(rest.type, inputs, outputs, rest.is_gradient, self._gradients)
        if phase in ("backward", "reduce"):
            self._gradients.update(outputs)
        seed = None
        if rest.random:
            seed, self._random = self._random, self._random + 1
        latest = self._latest
        reads = [latest.get(name, 0) for name in inputs]
        makes = []
        for name in outputs:
            latest[name] = version = latest.get(name, -1) + 1
            makes.append(version)
        return Operator(
            rest.type,
            inputs,
            outputs,
            rest.args,
            rest.device,
            phase,
            seed=seed,
            effects=_effects(_overwritten(inputs, outputs), rest.random),
            input_versions=stored_versions(reads),
            output_versions=stored_versions(makes),
            proto=rest.proto,
        )

    def _rest(self, op: Message) -> _Rest:
        rest = messages().OperatorDef()
        rest.CopyFrom(op)
        rest.ClearField("input")
        rest.ClearField("output")
        key: bytes = rest.SerializeToString(deterministic=True)
        found = self._rests.get(key)
        if found is None:
            found = self._rests[key] = _split(rest, self.default)
        return found


def _split(rest: Message, default: Device) -> _Rest:
    """Take an operator without inputs and outputs apart, and see that it can be put together again."""
    (type,) = _names((rest.type,))
    if not type:
        raise GraphirError("an operator has no type", fix="give it one")
    if "." in type:
        raise GraphirError(
            f"the operator type {type!r} has a dot; Caffe2's have none", fix="types with dots are torch's"
        )
    kept = messages().OperatorDef()
    kept.CopyFrom(rest)
    kept.ClearField("type")
    device = _device(rest.device_option) if rest.HasField("device_option") else default
    if device != default and rest.device_option == _option(device):
        kept.ClearField("device_option")
    args = _arguments(rest.arg)
    if len(args) == len(rest.arg):
        kept.ClearField("arg")
    else:
        for arg in kept.arg:
            if arg.name in args:
                name = arg.name
                arg.Clear()
                arg.name = name
    proto = _text(kept)
    again = messages().OperatorDef()
    _write(Operator(type, (), (), args, device, proto=proto), again, default)
    if again != rest and _text(again) != _text(rest):  # two NaN are not equal, but read the same
        raise GraphirError("the operator cannot be kept as it is", at=_text(rest), fix="report it as a bug")
    return _Rest(type, args, device, proto, is_random(type, args), rest.is_gradient_op, tuple(rest.control_input))


def _arguments(args: Iterable[Message]) -> dict[str, Arg]:
    """The arguments that have a name of their own and at most one plain value."""
    names = Counter(_names(arg.name for arg in args))
    values = {arg.name: _value(arg) for arg in args if arg.HasField("name") and names[arg.name] == 1}
    return {name: value for name, value in values.items() if value is not None}


def _value(arg: Message) -> Arg:
    """What an argument says; None where that is no plain value."""
    values = {field.name: value for field, value in arg.ListFields() if field.name != "name"}
    if not values:
        return ()
    if len(values) > 1:
        return None
    ((kind, value),) = values.items()
    try:
        if kind in ("i", "f"):
            return cast("int | float", value)
        if kind in ("ints", "floats"):
            return tuple(value)
        if kind == "s":
            return str(value, "utf-8")
        if kind == "strings":
            return tuple([str(item, "utf-8") for item in value])
    except UnicodeDecodeError:
        pass
    return None


def _overwritten(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    return tuple([(k, inputs.index(name)) for k, name in enumerate(outputs) if name in inputs])


@lru_cache(maxsize=4096)
def _effects(writes: tuple[tuple[int, int], ...], random: bool) -> Effects:
    return Effects(writes, (), random) if writes or random else PURE


# Operators, written


def _write(op: Operator, message: Message, default: Device) -> None:
    """Write an operator without its inputs and outputs.

    Args:
        op: the operator.
        message: where to; an ``OperatorDef``.
        default: where it runs if it names no device.
    """
    if "." in op.type or op.type in ("", "AllReduce") or op.operands is not None or op.results is not None:
        raise GraphirError(f"operators of type {op.type!r} are not Caffe2's", fix=_NOT_CAFFE2)
    message.CopyFrom(_parsed_operator(op.proto))
    _put(message, "type", op.type)
    if message.HasField("device_option"):
        if _device(message.device_option) != op.device:
            message.device_option.MergeFrom(_option(op.device))
    elif op.device != default:
        message.device_option.CopyFrom(_option(op.device))
    if message.arg:
        _merge(message, op.args)
    else:
        for name, value in op.args.items():
            _add(message, name, value)


def _merge(message: Message, args: Mapping[str, Arg]) -> None:
    """Put arguments among those that the text has; the text says where."""
    texts = list(message.arg)
    names = Counter(arg.name for arg in texts)
    message.ClearField("arg")
    for arg in texts:
        if names[arg.name] == 1 and arg.HasField("name") and arg.name in args:
            _add(message, arg.name, args[arg.name])
        elif names[arg.name] > 1 or not arg.HasField("name") or len(arg.ListFields()) > 1:
            message.arg.add().CopyFrom(arg)  # else its value was taken away since
    for name, value in args.items():
        if name not in names:
            _add(message, name, value)


_FIELDS: Final = {bool: ("i", "ints"), int: ("i", "ints"), float: ("f", "floats"), str: ("s", "strings")}
"""Where an argument of each type is written: one value, and a tuple of them."""


def _add(message: Message, name: str, value: Arg) -> None:
    arg = message.arg.add()
    _put(arg, "name", name)
    items = value if isinstance(value, tuple) else (value,)
    fields = {_FIELDS.get(type(item)) for item in items}
    if len(fields) > 1 or None in fields:
        what = f"argument {name}={value!r} is not Caffe2's"
        raise GraphirError(what, fix="Caffe2 has integers, floats, strings, and tuples of one of these")
    for one, many in filter(None, fields):
        try:
            written = [item.encode() if isinstance(item, str) else item for item in items]
            if isinstance(value, tuple):
                getattr(arg, many).extend(written)
            else:
                setattr(arg, one, written[0])
        except ValueError:  # of which UnicodeEncodeError is one
            what = f"argument {name}={value!r} does not fit"
            raise GraphirError(what, fix="integers have 64 bits, strings are UTF-8") from None
    stored = arg.floats if isinstance(value, tuple) else (arg.f,)
    if any(isinf(a) and a != b for a, b in zip(stored, items, strict=False)):
        raise GraphirError(f"argument {name}={value!r} does not fit", fix="floats have 32 bits")


# Devices, names, text


@lru_cache(maxsize=4096)
def _option(device: Device) -> Message:
    return messages().DeviceOption(device_type=KINDS.index(device.kind), device_id=device.index)


def _device(option: Message) -> Device:
    kind = option.device_type
    if not 0 <= kind < len(KINDS):
        numbers = ", ".join(f"{number} {name}" for number, name in enumerate(KINDS))
        raise GraphirError(f"there is no device type {kind}", fix=f"Caffe2's are {numbers}")
    return Device.parse(f"{KINDS[kind]}:{option.device_id}")


def _names(names: Iterable[str | bytes]) -> tuple[str, ...]:
    """The names as they are; protobuf gives bytes where they are not UTF-8."""
    found = tuple(names)
    if bytes in map(type, found):
        odd = next(name for name in found if isinstance(name, bytes))
        raise GraphirError(f"the name {odd!r} is not text in UTF-8", fix="Caffe2's names are text; the file is damaged")
    return cast("tuple[str, ...]", found)


def _put(message: Message, field: str, value: str | Sequence[str]) -> None:
    try:
        if isinstance(value, str):
            setattr(message, field, value)
        else:
            getattr(message, field).extend(value)
    except (TypeError, ValueError):  # of which UnicodeEncodeError is one
        raise GraphirError(f"{field} {value!r} is not text in UTF-8", fix="rename it") from None


def _text(message: Message) -> str:
    """A message in one line."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(message, as_one_line=True, as_utf8=False)
    return text


def _parsed(text: str, empty: Message) -> Message:
    from google.protobuf import text_format

    try:
        return text_format.Parse(text, empty)
    except (text_format.ParseError, RecursionError) as e:
        raise GraphirError(f"the text of a NetDef cannot be read: {e}", at=text[:200], fix=_KEPT) from None


@lru_cache(maxsize=4096)
def _parsed_operator(text: str) -> Message:
    return _parsed(text, messages().OperatorDef())


@lru_cache(maxsize=16)
def _parsed_net(text: str) -> Message:
    return _parsed(text, messages().NetDef())


def _shown(op: Operator) -> str:
    return f"{', '.join(op.outputs)} = {op.type}({', '.join(op.inputs)})"


# Nets


def _net_text(message: Message) -> tuple[str, str]:
    """The net's name, and the text of what else it says beside its operators and its inputs and outputs."""
    (name,) = _names((message.name,))
    kept = messages().NetDef()
    kept.CopyFrom(message)
    if len(set(message.external_input)) == len(message.external_input):
        kept.ClearField("external_input")
    for field in ("op", "external_output", *["name"] * bool(name)):
        kept.ClearField(field)
    text = _text(kept)
    _parsed_net(text)
    return name, text


def _blobs(ops: Sequence[Operator], external: Iterable[str], devices: Mapping[str, Device]) -> dict[str, Blob]:
    blobs = {name: Blob(name, None, None, devices[name], "input", name) for name in external}
    for op in ops:
        for name in op.inputs:
            if name not in blobs:  # nobody has made it
                blobs[name] = Blob(name, None, None, devices.get(name, op.device), "input", name)
        role = cast("Role", default_role(op.type, op.phase, None))
        for name in op.outputs:
            if name not in blobs:
                blobs[name] = Blob(name, None, None, devices[name], role, name)
    return blobs


def _gradients(ops: Sequence[Operator]) -> dict[str, str]:
    """The gradient of each output, where some operator reads it: Caffe2 names it ``<output>_grad``."""
    read = {name for op in ops for name in op.inputs}
    return {name: f"{name}_grad" for op in ops for name in op.outputs if f"{name}_grad" in read}


def _refuse_cycles(
    ops: Sequence[Operator], control: Mapping[int, tuple[str, ...]], external: Iterable[str], where: str
) -> None:
    """Refuse operators that wait for what is made only after them. Control inputs are names of blobs."""
    if not control:
        return
    makers = dict.fromkeys(external, -1)
    for position, op in enumerate(ops):
        for name in op.outputs:
            makers.setdefault(name, position)
    needs = {
        position: {makers.get(name, -1) for name in (*op.inputs, *control.get(position, ()))}
        for position, op in enumerate(ops)
    }
    for position, names in control.items():
        for name in names:
            maker = makers.get(name, -1)
            if maker < position:
                continue
            path = _path(needs, maker, position)
            what = f"control input {name!r} is made only by a later operator, op[{maker}]"
            if path:
                what = "control inputs form a cycle: " + " waits for ".join(f"op[{p}]" for p in (position, *path))
            fix = "drop the control input, or put what it waits for before it"
            raise FileError(what, at=_shown(ops[position]), where=f"{where}, at op[{position}]", fix=fix)


def _path(needs: Mapping[int, Iterable[int]], start: int, end: int) -> list[int]:
    """Operators from *start* to *end*, each of which needs the next; empty where there is no such path."""
    came_from: dict[int, int | None] = {start: None}
    for position in (queue := [start]):
        if position == end:
            break
        for other in sorted(needs.get(position, ())):
            if other not in came_from:
                came_from[other] = position
                queue.append(other)
    if end not in came_from:
        return []
    path: list[int] = []
    step: int | None = end
    while step is not None:
        path.append(step)
        step = came_from[step]
    return path[::-1]
