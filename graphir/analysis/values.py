"""Symbolic values: numbers that are equal only if what they stand for is, bit for bit.

The value of an operator's output is its canonical functional operator, its arguments, its seed, and the values and
layouts of its inputs. Devices and copies are no part of it. A storage holds a *root*: the value last written to all of
it; reading a blob gives the root itself, or a view (root, geometry) of it::

    x      root 7                   read x            7
    x_t    a view of x              read x_t          (view 7, shape, strides, offset) = 9
    x_t_1  Copy(x_t)                root 7 seen from x_t's offset, so that
                                    read x_t_1        (view 7, shape, strides, offset) = 9
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

from ..errors import GraphirError
from ..ir.blob import STATE_ROLES, Blob
from ..ir.dtype import ITEMSIZE
from ..ir.names import prefix_of
from ..ir.net import Net
from ..ir.operator import Arg, Operator, groups, mentioned
from ..ir.opset import NAMESPACES, UNWRITTEN, overload, signature
from ..ir.placement import COPIES
from ..ir.program import Program
from ..ir.size import Polynomial, Size, add, multiply, product
from ..plan import parts_of

__all__ = ["Numbering", "Trace", "canonical_type", "value_numbers"]

_Key: TypeAlias = tuple[Any, ...]
_Root: TypeAlias = "tuple[int, int, Size]"
"""A storage's content: a value, the layout in which it was computed, and at which byte of that value's own storage this
storage begins."""

_IGNORES_FIRST: Final = frozenset(
    {
        "aten.copy.default",
        "aten.fill.Scalar",
        "aten.fill.Tensor",
        "aten.zero.default",
        "aten.zeros_like.default",
        "aten.ones_like.default",
        "aten.full_like.default",
        "aten.rand_like.default",
        "aten.randn_like.default",
        "aten.new_zeros.default",
        "aten.new_ones.default",
        "aten.new_full.default",
        "aten.bernoulli.p",
        "aten.bernoulli.float",
        "aten.uniform.default",
        "aten.normal_functional.default",
    }
)
"""Types that take only the geometry of their first operand, not its value."""

_BATCH_NORM: Final = frozenset(
    {
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten.cudnn_batch_norm.default",
        "aten.miopen_batch_norm.default",
    }
)


@cache
def canonical_type(type: str) -> str:
    """The functional operator that computes what *type* does: ``aten.relu.default`` for ``aten.relu_.default``."""
    namespace, _, rest = type.partition(".")
    name, _, variant = rest.partition(".")
    if namespace not in NAMESPACES or not name.endswith("_") or name.endswith("__"):
        return type
    functional = f"{namespace}.{name[:-1]}.{variant}"
    try:
        overload(functional)
    except GraphirError:
        return type
    ours, theirs = signature(type).params, signature(functional).params
    same = [(p.name, p.type) for p in ours] == [(p.name, p.type) for p in theirs]
    return functional if same else type


class Made(NamedTuple):
    """A value that a program gave to a version of a blob: by which operator, in which net and step (-1 is init)."""

    step: int
    position: int
    name: str
    version: int
    value: int


class Trace(NamedTuple):
    """What one program computes.

    Attributes:
        outputs: the value of each external output after each step.
        final: the value of each parameter, buffer and optimizer state after the last step.
        made: every value, in the order of execution; empty unless it was asked for.
        unwritten: blobs that were made without writing them, and of which something is read that may still not be
            written.
    """

    outputs: tuple[dict[str, int], ...]
    final: dict[str, int]
    made: list[Made]
    unwritten: frozenset[str] = frozenset()


class Numbering:
    """One table of values, so that the numbers of several programs can be compared.

    Attributes:
        numbers: of each key.
        unwritten: values that hold memory that may not have been written, and the blob that was made without writing.
    """

    def __init__(self) -> None:
        self.numbers: dict[_Key, int] = {}
        self.unwritten: dict[int, str] = {}

    def number(self, key: _Key) -> int:
        """The number of *key*."""
        return self.numbers.setdefault(key, len(self.numbers))

    def trace(
        self, program: Program, steps: int = 2, *, record: bool = False, outputs: Sequence[str] | None = None
    ) -> Trace:
        """Number everything that ``init`` and *steps* steps of the program compute.

        *outputs* are the blobs whose values are wanted after each step: the external outputs by default.
        """
        run = _Run(self, program, record)
        wanted = [n for n in (program.step.external_outputs if outputs is None else outputs) if n in program.step.blobs]
        run.net(program.init, -1)
        values = []
        for step in range(steps):
            run.net(program.step, step)
            values.append(run.values(wanted))
            run.use(wanted)
        lasting = [
            n for n in program.step.external_inputs if program.step.blobs[n].role in ("param", "buffer", "state")
        ]
        return Trace(tuple(values), run.values(lasting), run.made, frozenset(run.unwritten))


class _Digests(Numbering):
    """Numbers that mean the same in every table: each is a digest of its key, and so of all that it follows from."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = blake2b(digest_size=8)

    def number(self, key: _Key) -> int:
        digest = self.empty.copy()  # at less cost than a new one
        digest.update(ascii(key).encode())
        return int.from_bytes(digest.digest(), "big")


def value_numbers(program: Program, issue: Iterable[tuple[int, int]] | None = None) -> dict[str, str]:
    """What one step makes of each external output and of each state blob that it changes, as 16 hex digits.

    State starts as a symbol under its own name, unless ``init`` copies it from other state; so neither placement nor
    copies change a number. Files hold these numbers: whatever changes them needs another version of the file format.

    Args:
        program: its operators find what they read.
        issue: the operators to execute, as position in ``step.ops`` and part of a collective, in this order; by default
            all of them in program order.
    """
    table = _Digests()
    run = _Run(table, program, record=False)
    run.declare(program.init)
    for op in program.init.ops:
        if op.type in COPIES:
            run.execute(op, -1)
        else:
            run.begin(op.outputs, -1)
    step = program.step
    run.declare(step)
    run.begin(step.external_inputs, 0)
    before = dict(run.roots)
    in_order = ((position, part) for position, op in enumerate(step.ops) for part in range(parts_of(op)))
    for position, part in in_order if issue is None else issue:
        run.execute(step.ops[position], 0, part)
    states = (name for name in step.external_inputs if step.blobs[name].role in STATE_ROLES)
    changed = [name for name in states if run.roots[step.blobs[name].storage] != before[step.blobs[name].storage]]
    return {name: f"{value:016x}" for name, value in run.values((*step.external_outputs, *changed)).items()}


class _Run:
    """The storages of one program while it is executed on values."""

    def __init__(self, table: Numbering, program: Program, record: bool) -> None:
        self.table, self.program, self.record = table, program, record
        self.roots: dict[str, _Root] = {}
        self.made: list[Made] = []
        self.unwritten: set[str] = set()
        self.replicas = {prefix: r for r, prefix in enumerate(program.replicas)}
        self.blobs: Mapping[str, Blob] = {}
        self.geometries: dict[str, int] = {}
        self.declared: dict[int, tuple[Mapping[str, Blob], dict[str, int]]] = {}
        self.layouts: dict[_Key, int] = {}
        self.forms: dict[_Key, _Form] = {}

    def declare(self, net: Net) -> None:
        """The blobs from now on are those of *net*."""
        if id(net) not in self.declared:
            blobs = _blobs(net)
            self.declared[id(net)] = blobs, {name: self.geometry(blob) for name, blob in blobs.items()}
        self.blobs, self.geometries = self.declared[id(net)]

    def geometry(self, blob: Blob) -> int:
        """The number of a blob's layout."""
        layout = blob.shape, blob.dtype, blob.strides, blob.offset
        number = self.layouts.get(layout)
        if number is None:
            number = self.layouts[layout] = self.table.number(_geometry(blob))
        return number

    def execute(self, op: Operator, step: int, part: int | None = None) -> None:
        """Give an operator's outputs their values; of a collective only that of *part*, unless it is None."""
        views = op.effects.views
        if views and len(dict(views)) == len(op.outputs) and op.type not in COPIES:
            self.view(op, step)
        else:
            self.form(op).execute(self, op, step, part)

    def view(self, op: Operator, step: int) -> None:
        """A view is its storage's value and its own geometry, so there is nothing to note: unless it reaches beyond
        its operand, into what a copy of a part of a storage does not have."""
        if not op.type.startswith("aten.as_strided"):
            return
        storage = self.blobs[op.inputs[0]].storage
        root, layout, start = self.roots[storage]
        geometry = self.geometries[storage]
        if start != 0 or geometry != layout:
            beyond = self.table.number(("beyond", root, start, op.outputs[0], step, geometry))
            self.table.unwritten[beyond] = op.outputs[0]
            self.roots[storage] = beyond, geometry, 0

    def form(self, op: Operator) -> _Form:
        """What an operator does. Arguments are told apart by their text: 1 from 1.0, 0.0 from -0.0."""
        call = op.type, repr(op.args) if op.args else "", op.operands, op.results, op.effects, op.proto
        form = self.forms.get(call)
        if form is None:
            form = self.forms[call] = _Form(op, self.table)
        return form

    def begin(self, names: Iterable[str], step: int) -> None:
        """Give inputs a value of this step, and state that has no value yet one of its own."""
        blobs, roots = self.blobs, self.roots
        for name in names:
            storage = blobs[name].storage
            if blobs[name].role == "input" or storage not in roots:
                when = step if blobs[name].role == "input" else -1
                geometry = self.geometries[storage]
                roots[storage] = self.table.number(("external", storage, when, geometry)), geometry, 0

    def net(self, net: Net, step: int) -> None:
        self.declare(net)
        self.begin(net.external_inputs, step)
        for position, op in enumerate(net.ops):
            self.execute(op, step)
            if self.record:
                self.made += [Made(step, position, name, v, self.read(name)) for name, v in op.makes]

    def values(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self.read(name) for name in names}

    def use(self, names: Iterable[str]) -> None:
        """Note which of the blobs hold memory that may not have been written."""
        unwritten = self.table.unwritten
        if unwritten:
            roots = (self.roots[self.blobs[name].storage][0] for name in names)
            self.unwritten.update(unwritten[root] for root in roots if root in unwritten)

    def read(self, name: str) -> int:
        """The value of a blob, layout included."""
        blob = self.blobs[name]
        root, layout, start = self.roots[blob.storage]
        geometry = self.table.number(_geometry(blob, start)) if start else self.geometries[name]
        return root if geometry == layout else self.table.number(("view", root, geometry))

    def write(self, name: str, value: int) -> None:
        """Give a blob a value of its own geometry; where it is only a part of its storage, the rest stays."""
        storage, geometry = self.blobs[name].storage, self.geometries[name]
        if storage == name or _covers(self.blobs[name], self.blobs[storage]):
            self.roots[storage] = value, geometry, 0
            return
        old, _, start = self.roots[storage]
        layout = self.geometries[storage]
        written = self.table.number(("write", old, start, layout, geometry, value))
        self.roots[storage] = written, layout, 0
        if old in self.table.unwritten:
            self.table.unwritten[written] = self.table.unwritten[old]


class _Form:
    """What operators of one type with the same arguments and effects have in common.

    Attributes:
        kind: the canonical type.
        static: what they do, as one number.
        copies: they give their output the value of their input.
        views: which of their outputs are views.
        empty: they make memory without writing it.
        ignores_first: only the geometry of their first operand matters.
        batch_norm: they are a batch norm in training.
        mentioned: blobs that they read beside their operands.
    """

    __slots__ = ("batch_norm", "copies", "empty", "ignores_first", "kind", "mentioned", "static", "views")

    def __init__(self, op: Operator, table: Numbering) -> None:
        self.kind = kind = canonical_type(op.type)
        self.copies = kind in COPIES
        self.views = op.effects.viewing
        self.empty = op.type.startswith(UNWRITTEN)
        self.ignores_first = kind in _IGNORES_FIRST
        self.batch_norm = kind in _BATCH_NORM and bool(op.args.get("training", True))
        self.mentioned = mentioned(op.proto) if "op {" in op.proto else ()
        args = tuple(sorted((name, _freeze(arg)) for name, arg in op.args.items()))
        self.static = table.number(("operator", kind, op.operands, op.results, args, _meaning(op.proto)))

    def execute(self, run: _Run, op: Operator, step: int, part: int | None = None) -> None:
        if self.copies and len(op.inputs) == len(op.outputs) == 1:
            self.copy(run, op)
        elif self.empty:
            self.leave(run, op, step)
        elif self.batch_norm:
            self.normalize(run, op, self.inputs(run, op))
        else:
            self.compute(run, op, step, part)

    def inputs(self, run: _Run, op: Operator) -> list[int]:
        inputs = [run.read(name) for name in op.inputs]
        if self.ignores_first and inputs:
            inputs[0] = -1 - run.geometry(run.blobs[op.inputs[0]]._replace(offset=0))
            run.use(op.inputs[1:])
        else:
            run.use(op.inputs)
        return inputs

    def compute(self, run: _Run, op: Operator, step: int, part: int | None) -> None:
        """A value is what the operator does, and its inputs: of random numbers also where and when they are drawn."""
        number, inputs = run.table.number, self.inputs(run, op)
        if self.mentioned:
            inputs += [run.read(name) for name in self.mentioned if name in run.blobs and name in run.roots]
        key: _Key = (self.static, None, *inputs)
        if op.seed is not None:
            replica = run.replicas.get(prefix_of(op.outputs[0]) if op.outputs else "", -1)
            key = (number(("draws", self.static, op.seed, replica)), step, *inputs)
        if self.kind == "AllReduce":
            for name in op.outputs if part is None else op.outputs[part : part + 1]:
                run.write(name, number((*key, run.geometries[name])))
            return
        call = number(key)
        for output, name in enumerate(op.outputs):
            if output not in self.views:
                run.write(name, number((call, output, run.geometries[name])))

    def leave(self, run: _Run, op: Operator, step: int) -> None:
        """What is not written is known by its name, which passes keep, so that a program equals itself."""
        for name, version in op.makes:
            content = run.table.number(("empty", self.kind, name, version, step, run.geometries[name]))
            if 0 not in (run.blobs[name].shape or ()):
                run.table.unwritten[content] = name
            run.write(name, content)

    def copy(self, run: _Run, op: Operator) -> None:
        """The copy's storage is the source's storage, seen from where the source begins."""
        (source,), (target,) = op.inputs, op.outputs
        blob, kept = run.blobs[source], run.blobs[target]
        root, layout, start = run.roots[blob.storage]
        same = (kept.shape, kept.strides, kept.dtype, kept.offset) == (blob.shape, blob.strides, blob.dtype, 0)
        if same and not kept.is_view:
            run.roots[target] = root, layout, add(_byte_offset(blob), start)
        else:
            run.use(op.inputs)
            key = ("laid out", run.read(source), run.geometries[target])
            run.write(target, run.table.number(key))

    def normalize(self, run: _Run, op: Operator, inputs: list[int]) -> None:
        """Batch norm in training: its results don't depend on the running statistics, which follow the results."""
        table = run.table
        operands = zip(signature(op.type).tensors, groups(op.operands, len(inputs)), strict=False)
        given = {param.name: inputs[group] for param, group in operands if isinstance(group, int)}
        running = {n: given.pop(n) for n in ("running_mean", "running_var") if n in given}
        eps = op.args.get("eps", op.args.get("epsilon"))
        call = table.number(("batch norm", _family(op.type), _freeze(eps), tuple(given.items())))
        statistics = min((output for output, _ in op.effects.writes), default=3)
        momentum = _freeze(op.args.get("momentum", op.args.get("exponential_average_factor")))
        for position, name in enumerate(op.outputs):
            geometry = run.geometries[name]
            key: _Key = (call, position, geometry)
            if running and position >= statistics:
                old = running["running_mean" if position == statistics else "running_var"]
                key = (call, "running", position - statistics, momentum, old, geometry)
            run.write(name, table.number(key))


_PLACE: Final = re.compile(r'\b(?:device_type|device_id): \w+ ?|\bcontrol_input: "(?:[^"\\]|\\.)*" ?|^name: "" ?')

_NOWHERE: Final = re.compile(r"\bdevice_option \{ *\}")


@cache
def _meaning(proto: str) -> str:
    """What an imported operator's text says of what it computes: not where, nor after what."""
    return " ".join(_NOWHERE.sub("", _PLACE.sub("", proto)).split())


def _family(type: str) -> str:
    """Kernels that give the same bits."""
    name = type.split(".")[1]
    return name.partition("_")[0] if name.startswith(("cudnn", "miopen")) else "native"


def _blobs(net: Net) -> Mapping[str, Blob]:
    """The net's blobs; without shapes where it is Caffe2's, since there a name may hold tensors of several shapes, each
    of which follows from the operator and its inputs."""
    if net.proto is None:
        return net.blobs
    return {name: blob._replace(shape=None, dtype=None) for name, blob in net.blobs.items()}


def _geometry(blob: Blob, start: Size = 0) -> _Key:
    """The layout of a blob whose storage begins at the byte *start* of another one."""
    offset = _byte_offset(blob) if blob.offset else 0
    return ("geometry", blob.shape, blob.dtype, blob.strides, add(offset, start) if start else offset)


def _byte_offset(blob: Blob) -> Size:
    """Views of one storage may count in elements of different sizes."""
    itemsize = ITEMSIZE[blob.dtype] if blob.dtype else 1
    return multiply(blob.offset, itemsize)


def _covers(blob: Blob, base: Blob) -> bool:
    """Whether a write to *blob* leaves nothing of its storage's old value."""
    if (blob.shape, blob.strides, blob.offset, blob.dtype) == (base.shape, base.strides, base.offset, base.dtype):
        return True
    if blob.shape is None or base.shape is None:
        return True  # an imported net overwrites whole blobs
    dense = blob.strides is None and base.strides is None and blob.offset == 0 and blob.dtype == base.dtype
    return dense and product(blob.shape) == product(base.shape)


def _freeze(arg: Arg) -> Any:
    """An argument as a key that tells apart whatever gives other bits: 1 from 1.0, 0.0 from -0.0."""
    if isinstance(arg, Polynomial):
        return ("size", arg)
    if isinstance(arg, tuple):
        return tuple([_freeze(item) for item in arg])
    return (type(arg).__name__, repr(arg) if isinstance(arg, float) else arg)
