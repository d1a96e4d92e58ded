"""Reading the text form of nets: declarations, operators, and their attributes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from ...errors import nearest
from ..admitted import admitted
from ..blob import ROLES, Blob
from ..device import Device
from ..dialect import TORCH, dialect_called
from ..dtype import ITEMSIZE
from ..net import Net
from ..operator import ISSUES, PHASES, RECEIVED, Arg, Effects, Operator
from ..opset import NAMESPACES
from ..size import Shape, Size
from .printer import default_effects, default_module, default_role, shown_pattern
from .tokens import Line, Lines

__all__ = ["NetReader", "read_net"]

_ROLES: Final = frozenset(ROLES)


class _Output(NamedTuple):
    """One output at the left of ``=``, with its geometry if it is declared there."""

    name: str
    version: int | None
    role: str | None
    geometry: tuple[Shape | None, str | None, Device, str, Shape | None, Size] | None


class NetReader:
    """Reads the statements of one net."""

    def __init__(self, name: str, phase: str) -> None:
        self.name, self.phase = name, phase
        self.ops: list[Operator] = []
        self.blobs: dict[str, Blob] = {}
        self.external: list[str] = []
        self.results: list[str] = []
        self.gradients: dict[str, str] = {}
        self.types: dict[str, tuple[str | None, Shape | None]] = {}
        self.proto: str | None = None

    def net(self) -> Net:
        external, results = tuple(self.external), tuple(self.results)
        dialect = TORCH if self.proto is None else dialect_called("caffe2")
        proto = self.proto or ""
        return Net(self.name, tuple(self.ops), self.blobs, external, results, self.gradients, dialect, proto)

    def statement(self, line: Line) -> None:
        word = line.tokens[0]
        if word == "output" and line.n == 2:
            line.take()
            self.results.append(line.name())
        elif word == "proto" and line.n == 2:
            line.take()
            self.proto = line.name()
        elif word == "grad":
            line.take()
            activation = line.name()
            line.expect("->", "write grad ACTIVATION -> GRADIENT")
            self.gradients[activation] = line.name()
        elif word == "external":
            line.take()
            self.external.append(line.name())
        elif word == "blob" or (word in _ROLES and "=" not in line.tokens):
            self.declaration(line)
        else:
            self.ops.append(self.operator(line))
        line.end()

    def declaration(self, line: Line) -> None:
        made_here = not line.accept("blob")
        role = line.take()
        if role not in _ROLES:
            raise line.error(f"{role!r} is not a role{nearest(role, ROLES)}", f"roles: {', '.join(ROLES)}")
        name = line.name()
        line.expect(":", "write ROLE NAME : TYPE @DEVICE")
        self.declare(line, _Output(name, None, role, self.geometry(line, name)))
        if made_here:
            self.external.append(name)

    def declare(self, line: Line, output: _Output, type: str = "", phase: str = "forward") -> None:
        assert output.geometry is not None
        name = output.name
        if name in self.blobs:
            raise line.error(f"blob {name!r} is declared twice", "give its type where it first appears")
        shape, dtype, device, storage, strides, offset = output.geometry
        role = output.role or default_role(type, phase, self.blobs.get(storage))
        self.blobs[name] = Blob(name, shape, dtype, device, role, storage, strides, offset)  # type: ignore[arg-type]

    def geometry(self, line: Line, name: str) -> tuple[Shape | None, str | None, Device, str, Shape | None, Size]:
        token = line.take()
        known = self.types.get(token)
        if known is None:
            known = self.types[token] = _type(line, token)
        dtype, shape = known
        storage = name
        strides: Shape | None = None
        offset: Size = 0
        while True:
            token = line.take()
            if token[:1] == "@":
                return shape, dtype, line.read(Device.parse, token[1:]), storage, strides, offset
            if token == "strides":
                strides = line.sizes()
                if shape is None or len(strides) != len(shape):
                    raise line.error(f"{len(strides)} strides", "a blob has one stride for each dimension of its shape")
            elif token == "offset":
                offset = line.size(line.take())
            elif token == "in":
                storage = line.name()
            else:
                line.i -= 1
                raise line.error(f"expected @DEVICE, found {line.shown()}", "write NAME : TYPE @gpu:0")

    def output(self, line: Line) -> _Output:
        role = line.take() if line.peek() in _ROLES else None
        name, version = line.versioned()
        return _Output(name, version, role, self.geometry(line, name) if line.accept(":") else None)

    def operator(self, line: Line) -> Operator:
        """``OUTPUTS = TYPE(inputs, name=value) {attributes}``, or ``OUTPUT <- INPUT {attributes}``."""
        outputs, results = self.outputs(line)
        args: dict[str, Arg] = {}
        if line.tokens[line.i - 1] == "<-":
            type, inputs, operands = "Copy", [line.versioned()], None
        else:
            type = self.type_name(line)
            line.expect("(", "write OUTPUT : TYPE @DEVICE = OPERATOR(inputs, name=value)")
            inputs, operands = self.arguments(line, args)
        given = self.attributes(line) if line.accept("{") else {}

        phase = given.get("phase", self.phase)
        for output in outputs:
            if output.geometry is not None:
                self.declare(line, output, type, phase)
        names = tuple([output.name for output in outputs])
        device = given.get("device")
        if device is None:
            if not names or names[0] not in self.blobs:
                raise line.error(
                    "the operator's device is not known", "write {device=gpu:0} after it, or its output's type"
                )
            device = self.blobs[names[0]].device
        operand_names = tuple([name for name, _ in inputs])
        effects = default_effects(type, operand_names, names, self.blobs, given.get("seed") is not None)
        if changed := given.keys() & _EFFECTS:
            effects = effects._replace(**{field: given[field] for field in changed})
        return Operator(
            type,
            operand_names,
            names,
            args,
            device,
            phase,
            given.get("module", default_module(type, phase, names)),
            given.get("by", ""),
            given.get("seed"),
            given.get("operands", operands),
            given.get("results", results),
            effects,
            _versions([version for _, version in inputs]),
            _versions([output.version for output in outputs]),
            given.get("proto", ""),
            given.get("of", ""),
            given.get("issue", ""),
            given.get("received", ""),
        )

    def outputs(self, line: Line) -> tuple[list[_Output], str | None]:
        """The outputs up to ``=`` or ``<-``, and the pattern that they show."""
        found: list[_Output] = []
        chars, nested, overwritten = "", False, 0
        if line.accept("("):
            line.expect(")", "write () for an operator without outputs")
            line.expect("=", "write () = OPERATOR(inputs)")
            return found, None
        while True:
            token = line.peek()
            if token in ("[", "_"):
                line.i += 1
                chars += token
                nested |= token == "["
                if token == "[":
                    if not line.accept("]"):
                        continue
                    chars += "]"
                    nested = False
            else:
                output = self.output(line)
                found.append(output)
                chars += "t"
                overwritten = 0 if output.geometry else overwritten + 1
            if nested and line.accept("]"):
                chars += "]"
                nested = False
            token = line.take()
            if token in ("=", "<-") and not nested:
                return found, shown_pattern(chars, overwritten)
            if token != ",":
                line.i -= 1
                raise line.error(
                    f"expected ',' or '=', found {line.shown()}", "write OUTPUT : TYPE @DEVICE = OPERATOR(inputs)"
                )

    def type_name(self, line: Line) -> str:
        token = line.peek()
        name = line.name()
        namespace, dot, rest = token.partition(".")
        return line.read(admitted, f"{name}.default" if namespace in NAMESPACES and dot and "." not in rest else name)

    def arguments(self, line: Line, args: dict[str, Arg]) -> tuple[list[tuple[str, int | None]], str | None]:
        """The operands and arguments up to ``)``; operands are returned with the pattern that they show."""
        tokens = line.tokens
        inputs: list[tuple[str, int | None]] = []
        chars, nested, first = "", False, True
        while not (not nested and first and line.accept(")")):
            first = False
            token = line.peek()
            if not nested and line.i + 1 < line.n and tokens[line.i + 1] == "=":
                name = line.name()
                line.i += 1
                if name in args:
                    raise line.error(f"argument {name} is given twice", "give it once")
                args[name] = line.value()
            elif args:
                raise line.error(f"expected name=value, found {line.shown()}", "write operands first, then name=value")
            elif token == "[" and not nested:
                line.i += 1
                chars += "["
                if not line.accept("]"):
                    nested = True
                    continue
                chars += "]"
            elif token == "_":
                line.i += 1
                chars += "_"
            else:
                inputs.append(line.versioned())
                chars += "t"
            if nested and line.accept("]"):
                chars += "]"
                nested = False
            token = line.take()
            if token == ")" and not nested:
                break
            if token != ",":
                line.i -= 1
                raise line.error(f"expected ',' or ')', found {line.shown()}", "write OPERATOR(a, [b, c], name=value)")
        return inputs, shown_pattern(chars)

    def attributes(self, line: Line) -> dict[str, Any]:
        """``name=value, …}``."""
        found: dict[str, Any] = {}
        while True:
            key = line.take()
            if key not in _ATTRIBUTES:
                raise line.error(
                    f"unknown attribute {key!r}{nearest(key, _ATTRIBUTES)}", f"known: {', '.join(_ATTRIBUTES)}"
                )
            line.expect("=", f"write {key}=value")
            if key in found:
                raise line.error(f"attribute {key} is given twice", "give it once")
            found[key] = _ATTRIBUTES[key](line)
            if line.accept("}"):
                return found
            line.expect(",", "separate attributes by commas, close them with }")


def _versions(versions: list[int | None]) -> tuple[int, ...] | None:
    """The versions of all names: 0 for a name without one. None if no name has one: all are the first."""
    for version in versions:
        if version is not None:
            return tuple([version or 0 for version in versions])
    return None


def _phase(line: Line) -> str:
    return line.one_of(PHASES, "phase")


def _issue(line: Line) -> str:
    return line.one_of(ISSUES[1:], "way to issue")


def _received(line: Line) -> str:
    return line.one_of(RECEIVED[1:], "way to receive")


def _pattern(line: Line) -> str | None:
    token = line.take()
    if token == "none":
        return None
    if not re.fullmatch(r'"(?:[t_]|\[[t_]*\])*"', token):
        raise line.error(f"{token} is not a pattern", 'write "t_[tt]": t for a tensor, _ for none, [ ] for a list')
    return token[1:-1]


def _pairs(line: Line) -> tuple[tuple[int, int], ...]:
    line.expect("[", "write pairs as [0:0, 1:2]")
    found: list[tuple[int, int]] = []
    while not line.accept("]"):
        if found:
            line.expect(",", "separate pairs by commas")
        output, colon, source = line.take().partition(":")
        if not colon:
            raise line.error("expected a pair of positions", "write OUTPUT:INPUT, such as 0:0")
        found.append((line.integer(output), line.integer(source)))
    return tuple(found)


def _flag(line: Line) -> bool:
    word = line.take()
    if word not in ("true", "false"):
        raise line.error(f"expected true or false, found {word}", "write random=true or random=false")
    return word == "true"


_ATTRIBUTES: Final[Mapping[str, Callable[[Line], Any]]] = {
    "phase": _phase,
    "module": Line.name,
    "of": Line.name,
    "by": Line.name,
    "issue": _issue,
    "received": _received,
    "seed": Line.take_integer,
    "device": Line.device,
    "operands": _pattern,
    "results": _pattern,
    "writes": _pairs,
    "views": _pairs,
    "random": _flag,
    "proto": Line.name,
}

_EFFECTS: Final = frozenset(Effects._fields)


def _type(line: Line, token: str) -> tuple[str | None, Shape | None]:
    """``f32[batch,64]``, ``f32[?]``, ``?[64]`` or ``?``."""
    if token == "?":
        return None, None
    dtype, bracket, sizes = token.partition("[")
    if not bracket or not sizes.endswith("]"):
        line.i -= 1
        raise line.error(
            f"expected a type, found {line.shown()}", "write a type such as f32[batch,64], or ? if not known"
        )
    if dtype != "?" and dtype not in ITEMSIZE:
        raise line.error(f"{dtype!r} is not an element type{nearest(dtype, ITEMSIZE)}", f"types: {', '.join(ITEMSIZE)}")
    body = sizes[:-1].strip()
    shape = None if body == "?" else tuple(line.size(size.strip()) for size in body.split(",")) if body else ()
    return (None if dtype == "?" else dtype), shape


def read_net(reader: Lines, line: Line) -> NetReader:
    """A net whose first line is *line*, up to its ``}``."""
    phase = "init" if line.accept("init") else "forward"
    line.expect("net", "write net NAME { or init net NAME {")
    net = NetReader(line.name(), phase)
    line.expect("{", "write net NAME {")
    line.end()
    expected = f"}} of net {net.name!r}"
    while True:
        line = reader.next(expected)
        if line.tokens[0] == "}":
            line.take()
            line.end()
            return net
        net.statement(line)
