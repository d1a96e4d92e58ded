"""Printing nets: names, values, operators, and the defaults that text leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ...errors import GraphirError
from ..blob import ROLE_OF_PHASE, ROLES, Blob
from ..dialect import TORCH
from ..names import base_name
from ..net import Net
from ..operator import PURE, SYMBOLS, Arg, Effects, Operator, Symbol, groups, map_arg
from ..opset import NAMESPACES
from ..size import Dims, Shape
from .nbytes import nbytes_text
from .tokens import BARE_NAME

__all__ = [
    "RESERVED",
    "Printer",
    "Style",
    "declarations",
    "default_effects",
    "default_module",
    "default_role",
    "json_string",
    "key_text",
    "net_lines",
    "net_phase",
    "quoted",
    "result_lines",
    "shown_pattern",
    "type_name",
    "value_text",
]

RESERVED: Final = frozenset(ROLES) | {"_", "blob", "external", "grad", "of", "op"}
"""Words that start something else than a name. As the name of a blob they are quoted."""

_KEYWORD_VALUES: Final = SYMBOLS | {"true", "false", "none", "inf", "nan"}


# Names and values


@lru_cache(maxsize=1 << 16)
def quoted(name: str) -> str:
    """A name as it is printed: bare where that is unambiguous, else a JSON string."""
    return name if BARE_NAME.fullmatch(name) and name not in RESERVED else json_string(name)


def json_string(text: str) -> str:
    """A JSON string that stays in its line and is readable where it can be."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def key_text(name: str) -> str:
    """A name, for places where only a name can stand."""
    return name if BARE_NAME.fullmatch(name) else json_string(name)


def value_text(arg: Arg) -> str:
    """A non-tensor argument as it is printed."""
    if arg.__class__ is int:  # as most arguments are
        return repr(arg)
    return map_arg(arg, _scalar_text, _list_text)  # type: ignore[no-any-return]  # both functions make text


def _list_text(items: list[str]) -> str:
    return f"[{', '.join(items)}]"


def _scalar_text(arg: Any) -> str:
    if arg.__class__ is int:
        return repr(arg)
    if arg is None:
        return "none"
    if isinstance(arg, bool):
        return "true" if arg else "false"
    if isinstance(arg, (int, float)):
        return repr(arg)
    if isinstance(arg, Symbol):
        if arg not in SYMBOLS:
            raise GraphirError(f"{str(arg)!r} names no torch constant", fix=f"known: {', '.join(sorted(SYMBOLS))}")
        return str(arg)
    if isinstance(arg, str):
        return json_string(arg)
    text = str(arg)
    sign, name = ("-", text[1:]) if text.startswith("-") else ("", text)
    return f"{sign}1*{name}" if name in _KEYWORD_VALUES else text


@lru_cache(maxsize=1 << 16)
def _type(dtype: str | None, shape: Shape | None) -> str:
    if shape is None:
        return f"{dtype}[?]" if dtype else "?"
    return f"{dtype or '?'}[{','.join(map(str, shape))}]"


# Defaults, which the parser shares


def default_role(type: str, phase: str, storage: Blob | None) -> str:
    """The role that an output has unless its text says otherwise."""
    if storage is not None:
        return storage.role
    return "temporary" if type == "Copy" else ROLE_OF_PHASE.get(phase, "temporary")


def default_module(type: str, phase: str, outputs: Sequence[str]) -> str:
    """The module that an operator has unless its text says otherwise."""
    own = phase == "forward" and outputs and type.partition(".")[0] in NAMESPACES
    return base_name(outputs[0]) if own else ""


def default_effects(
    type: str, inputs: Sequence[str], outputs: Sequence[str], blobs: Mapping[str, Blob], seeded: bool
) -> Effects:
    """The effects that an operator has unless its text says otherwise: those that its names show.

    An output that is also an input is overwritten. An output in an input's storage is a view of that input, or the
    input overwritten under a new name if the type ends in ``_``, as torch's in-place operators do. An operator with a
    seed id is random.
    """
    writes: list[tuple[int, int]] = []
    views: list[tuple[int, int]] = []
    for position, name in enumerate(outputs):
        blob = blobs.get(name)
        if name in inputs:
            writes.append((position, inputs.index(name)))
        elif blob is not None and blob.storage != name:
            for source, operand in enumerate(inputs):
                if operand in blobs and blobs[operand].storage == blob.storage:
                    (writes if type.partition(".")[2].partition(".")[0].endswith("_") else views).append(
                        (position, source)
                    )
                    break
    return Effects(tuple(writes), tuple(views), seeded) if writes or views or seeded else PURE


def shown_pattern(chars: str, overwritten: int = 0) -> str | None:
    """The operand or result pattern that brackets and ``_`` show; *overwritten* trailing outputs are not part of it."""
    while overwritten and chars.endswith("t"):
        chars, overwritten = chars[:-1], overwritten - 1
    return None if chars == "t" * len(chars) else chars


def net_phase(net: Net) -> str:
    """The phase that the net's operators have unless their text says otherwise."""
    return "init" if net.ops and all(op.phase == "init" for op in net.ops) else "forward"


# Operators


class Style(NamedTuple):
    """Which parts of the text are printed.

    Attributes:
        dims: the value of each dimension, by which figures are computed; None: no figures.
        attributes: the operators' attributes and the program's interface.
        types: the geometry and the device of blobs.
        source: the operators' source lines, as comments.
    """

    dims: Dims | None = None
    attributes: bool = True
    types: bool = True
    source: bool = False


class Printer:
    """Prints the operators of one net; remembers which blobs it has declared."""

    def __init__(self, blobs: Mapping[str, Blob], phase: str, style: Style) -> None:
        self.blobs, self.phase, self.style = blobs, phase, style
        self.declared: set[str] = set()

    def declaration(self, word: str, name: str) -> str:
        self.declared.add(name)
        blob = self.blobs.get(name)
        if blob is None:
            return f"external {quoted(name)}"
        return f"{word}{blob.role} {quoted(name)}{self.geometry(blob)}{_comment(self.figure([name]))}"

    def geometry(self, blob: Blob) -> str:
        if not self.style.types:
            return ""
        text = f" : {_type(blob.dtype, blob.shape)}"
        if blob.strides is not None:
            text += f" strides [{','.join(map(str, blob.strides))}]"
        if blob.offset:
            text += f" offset {blob.offset}"
        if blob.storage != blob.name:
            text += f" in {quoted(blob.storage)}"
        return f"{text} @{blob.device}"

    def figure(self, names: Iterable[str]) -> str:
        """The bytes of the storages among *names*."""
        if self.style.dims is None:
            return ""
        try:
            nbytes = sum(blob.nbytes(self.style.dims) for name in names if not (blob := self.blobs[name]).is_view)
        except GraphirError:
            return ""
        return nbytes_text(nbytes) if nbytes else ""

    def operator(self, op: Operator, copy: bool = False) -> str:
        """``OUT : TYPE @dev = TYPE(inputs, name=value) {attributes}``; a *copy* as ``OUT : TYPE @dev <- IN``."""
        new = [] if self.style.dims is None else [n for n in op.outputs if n not in self.declared and n in self.blobs]
        outputs, shown_results = self.outputs(op)
        inputs, shown_operands = self.inputs(op)
        if copy:
            text = f"{outputs} <- {inputs}"
        else:
            call = [inputs] if inputs else []
            call += [f"{key_text(name)}={value_text(arg)}" for name, arg in op.args.items()]
            text = f"{outputs} = {type_name(op.type)}({', '.join(call)})"
        if self.style.attributes:
            text += self.attribute_text(op, shown_operands, shown_results)
        return text + _comment(self.figure(new), op.source if self.style.source else "")

    def output(self, name: str, version: int, marked: bool, op: Operator) -> str:
        text = f"{quoted(name)};{version}" if marked else quoted(name)
        blob = None if name in self.declared else self.blobs.get(name)
        if blob is None:
            return text
        storage = self.blobs[blob.storage] if blob.storage in self.declared and blob.storage in self.blobs else None
        self.declared.add(name)
        usual = not self.style.types or blob.role == default_role(op.type, op.phase, storage)
        role = "" if usual else f"{blob.role} "
        return f"{role}{text}{self.geometry(blob)}"

    def outputs(self, op: Operator) -> tuple[str, str | None]:
        """The text left of ``=``, and the pattern that it shows."""
        typed = [name not in self.declared and name in self.blobs for name in op.outputs]
        versions = op.output_versions or (0,) * len(op.outputs)
        explicit = op.output_versions is not None and not any(op.output_versions)
        items = [
            self.output(name, version, version > 0 or (explicit and i == 0), op)
            for i, (name, version) in enumerate(zip(op.outputs, versions, strict=True))
        ]
        if not items and not op.results:
            return "()", None
        if op.results is None:
            return ", ".join(items), None
        text, chars = _arranged(op.results, items)
        overwritten = 0
        while overwritten < len(typed) and not typed[-1 - overwritten]:
            overwritten += 1
        return text, shown_pattern(chars, overwritten)

    def inputs(self, op: Operator) -> tuple[str, str | None]:
        """The text of the operands, and the pattern that it shows."""
        versions = op.input_versions
        if not versions:
            items = [quoted(name) for name in op.inputs]
        else:
            explicit = not any(versions)
            items = [
                f"{quoted(name)};{version}" if version or (explicit and i == 0) else quoted(name)
                for i, (name, version) in enumerate(zip(op.inputs, versions, strict=True))
            ]
        if op.operands is None:
            return ", ".join(items), None
        text, chars = _arranged(op.operands, items)
        return text, shown_pattern(chars)

    def attribute_text(self, op: Operator, shown_operands: str | None, shown_results: str | None) -> str:
        """`` {phase=…, …}``, or nothing."""
        found = []
        if op.phase != self.phase:
            found.append(f"phase={op.phase}")
        if op.module != default_module(op.type, op.phase, op.outputs):
            found.append(f"module={key_text(op.module)}")
        if op.of:
            found.append(f"of={key_text(op.of)}")
        if op.by:
            found.append(f"by={key_text(op.by)}")
        if op.issue:
            found.append(f"issue={op.issue}")
        if op.received:
            found.append(f"received={op.received}")
        if op.seed is not None:
            found.append(f"seed={op.seed}")
        first = self.blobs.get(op.outputs[0]) if op.outputs else None
        if first is None or op.device != first.device:
            found.append(f"device={op.device}")
        if op.operands != shown_operands:
            found.append(f"operands={json_string(op.operands) if op.operands is not None else 'none'}")
        if op.results != shown_results:
            found.append(f"results={json_string(op.results) if op.results is not None else 'none'}")
        if op.proto:
            found.append(f"proto={json_string(op.proto)}")
        default = default_effects(op.type, op.inputs, op.outputs, self.blobs, op.seed is not None)
        if op.effects != default:
            found += _effects(op.effects, default)
        return f" {{{', '.join(found)}}}" if found else ""


def _comment(*parts: str) -> str:
    """``  # 16.0 MiB, models/net.py:42``, or nothing. Text that could end the line is shown as JSON."""
    shown = [part if part.isprintable() else json.dumps(part) for part in parts if part]
    return f"  # {', '.join(shown)}" if shown else ""


def _effects(effects: Effects, default: Effects) -> Iterator[str]:
    """The effects that differ from the default ones."""
    for word in ("writes", "views"):
        pairs = getattr(effects, word)
        if pairs != getattr(default, word):
            yield f"{word}=[{', '.join(f'{output}:{source}' for output, source in pairs)}]"
    if effects.random != default.random:
        yield f"random={value_text(effects.random)}"


@lru_cache(maxsize=4096)
def type_name(type: str) -> str:
    """A type as it is printed: the overload ``default`` of a torch operator is left out.

    A type that would then read as another type is quoted.
    """
    namespace, _, rest = type.partition(".")
    if namespace in NAMESPACES:
        name, _, variant = rest.partition(".")
        if variant == "default" and name and BARE_NAME.fullmatch(type):
            return f"{namespace}.{name}"
        if not variant:
            return json_string(type)
    return type if BARE_NAME.fullmatch(type) else json_string(type)


def _arranged(pattern: str, items: Sequence[str]) -> tuple[str, str]:
    """Items as a pattern arranges them, surplus items at the end; and the pattern that the text shows."""
    count = pattern.count("t")
    if count > len(items):
        return ", ".join(items), "t" * len(items)
    parts = []
    for group in groups(pattern, count):
        if isinstance(group, list):
            parts.append("[" + ", ".join("_" if i is None else items[i] for i in group) + "]")
        else:
            parts.append("_" if group is None else items[group])
    return ", ".join([*parts, *items[count:]]), pattern + "t" * (len(items) - count)


# Nets


def net_lines(net: Net, style: Style) -> Iterator[str]:
    """The lines of a net."""
    phase = net_phase(net)
    printer = Printer(net.blobs, phase, style)
    yield f"{'init ' if phase == 'init' else ''}net {quoted(net.name)} {{"
    yield from declarations(net, printer)
    for op in net.ops:
        yield f"  {printer.operator(op)}"
    yield from result_lines(net)
    yield "}"


def declarations(net: Net, printer: Printer) -> Iterator[str]:
    """The lines of the blobs that no operator makes."""
    for name in net.external_inputs:
        yield f"  {printer.declaration('', name)}"
    made = {name for op in net.ops for name in op.outputs}
    for name in net.blobs:
        if name not in printer.declared and name not in made:
            yield f"  {printer.declaration('blob ', name)}"


def result_lines(net: Net) -> Iterator[str]:
    """The lines of external outputs and gradients, and of a Caffe2 net's other fields."""
    if net.dialect is not TORCH:
        yield f"  proto {json_string(net.proto)}"
    for name in net.external_outputs:
        yield f"  output {quoted(name)}"
    for activation, gradient in net.gradients.items():
        yield f"  grad {quoted(activation)} -> {quoted(gradient)}"
