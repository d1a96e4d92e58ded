"""Symbolic values: numbers that are equal only if what they stand for is, bit for bit.

The value of an operator's output is its canonical functional operator, its arguments, its seed, and the values of its
inputs; of each of them the declared layout is a part. Devices and copies are no part of it. A storage holds a *root*,
the value last written to all of it. A view has a *path*: the view operators that lead to it from its storage, each with
its arguments, so that sizes stay symbols and a conjugate is none of its operand. Reading a view applies its path to the
root that its storage holds by then::

    x      root 7                  read x            7
    x_t    path (t)                read x_t          t(7) = 9
    p      path (t, slice 1:)      read p            slice 1:(9) = 12
    x_t_1  Copy(x_t): root 9       read x_t_1        9
    p_1    path (slice 1:)         read p_1          slice 1:(9) = 12

What reads beyond the elements of its operand (its record does not say ``only_elements``) takes the root and the path
instead of the value, and of the copy of a part of a storage, beyond which nothing is defined, a value that equals no
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeAlias

from ..ir.blob import STATE_ROLES, Blob, is_dense
from ..ir.dialect import TORCH, Dialect
from ..ir.dtype import ITEMSIZE
from ..ir.names import prefix_of
from ..ir.net import Net
from ..ir.operator import Arg, Operator
from ..ir.opset import geometry_operands, signature
from ..ir.optypes.table import operator_type
from ..ir.program import Program
from ..ir.size import Size, add, multiply, product
from .meaning import canonical_type, frozen, kernel_family

__all__ = ["Made", "Numbering", "Run", "lasting", "value_numbers"]

_Key: TypeAlias = tuple[Any, ...]

_BASE: Final = -1
"""The path of what is its storage, or lies in all of it."""


class Made(NamedTuple):
    """A value that a program gave to a version of a blob: by which operator, in which net and step (-1 is init)."""

    step: int
    position: int
    name: str
    version: int
    value: int


class Numbering:
    """One table of values, so that the numbers of several programs can be compared.

    Attributes:
        numbers: of each key.
        unwritten: values that hold memory that may not have been written, and the blob that was made without writing.
        laid_out: of such values, the number of what their layout follows from.
        paths: of each path the one of the operand, and the number of the view operator.
        beyond: paths with an operator that reads beyond the elements of its operand.
        conjugate: paths with an odd number of conjugations or of negations.
        as_called: values follow from how an operator is called: from operands too that it takes and does not read, and
            of parts that may be computed apart from which of them it computes.
    """

    as_called = False

    def __init__(self) -> None:
        self.numbers: dict[_Key, int] = {}
        self.unwritten: dict[int, str] = {}
        self.laid_out: dict[int, int] = {}
        self.paths: dict[int, tuple[int, int]] = {}
        self.beyond: set[int] = set()
        self.conjugate: dict[int, frozenset[str]] = {}
        self._seen: dict[tuple[int, int], int] = {}
        self._forms: dict[_Key, _Form] = {}
        self._texts: dict[int, tuple[Mapping[str, Arg], str]] = {}

    def number(self, key: _Key) -> int:
        """The number of *key*."""
        return self.numbers.setdefault(key, len(self.numbers))

    def form(self, op: Operator, dialect: Dialect) -> _Form:
        """What an operator of a net of *dialect* does. Arguments are told apart by their text: 1 from 1.0, 0.0 from
        -0.0."""
        args = ""
        if op.args:
            known = self._texts.get(id(op.args))  # operators that were only moved share their arguments
            if known is None:
                known = self._texts[id(op.args)] = op.args, repr(op.args)
            args = known[1]
        call = dialect, op.type, args, op.operands, op.results, op.effects, op.proto, len(op.outputs)
        form = self._forms.get(call)
        if form is None:
            form = self._forms[call] = _Form(op, dialect, self)
        return form

    def path(self, parent: int, view: int, type: str, *, beyond: bool = False) -> int:
        """The path that goes on from *parent* by a view operator of *type*, whose number *view* is.

        Where the operator reads *beyond* the elements of its operand, the path begins anew at the storage.
        """
        start = _BASE if beyond else parent
        path = self.number(("path", start, view))
        if path not in self.paths:
            self.paths[path] = start, view
            if beyond or parent in self.beyond:
                self.beyond.add(path)
            bits = self.conjugate.get(parent, frozenset())
            if operator_type(type).conjugates:
                bits ^= {type}
            if bits:
                self.conjugate[path] = bits
        return path

    def seen(self, root: int, path: int) -> int:
        """The value of what *path* leads to in a storage that holds *root*."""
        known, steps = self._seen, []
        while path != _BASE and (root, path) not in known:
            steps.append(path)
            path = self.paths[path][0]
        value = root if path == _BASE else known[root, path]
        for path in reversed(steps):
            value = known[root, path] = self.number(("view", self.paths[path][1], value))
        return value

    def written(self, root: int, path: int, value: int) -> None:
        """In a storage that holds *root*, *path* leads to *value*, which was just written there."""
        self._seen[root, path] = value


class _Digests(Numbering):
    """Numbers that mean the same in every table: each is a digest of its key, and so of all that it follows from."""

    as_called = True  # as the numbers that files hold do

    def __init__(self) -> None:
        super().__init__()
        self.empty = blake2b(digest_size=8)

    def number(self, key: _Key) -> int:
        digest = self.empty.copy()  # at less cost than a new one
        digest.update(ascii(key).encode())
        return int.from_bytes(digest.digest(), "big")


def lasting(step: Net) -> tuple[str, ...]:
    """The blobs that a step hands to the next one: what it is given from outside, and is no input of its own."""
    return tuple([name for name in step.external_inputs if step.blobs[name].role != "input"])


def value_numbers(program: Program, issue: Iterable[tuple[int, int]] | None = None) -> dict[str, str]:
    """What one step makes of each external output and of each state blob that it changes, as 16 hex digits.

    State starts as a symbol under its own name, unless ``init`` copies it from other state; so neither placement nor
    copies change a number. Files hold these numbers: whatever changes them needs another version of the file format.

    Args:
        program: its operators find what they read.
        issue: the operators to execute, as position in ``step.ops`` and part of a collective, in this order; by default
            all of them in program order.
    """
    run = Run(_Digests(), program)
    run.declare(program.init)
    for op in program.init.ops:
        if op.type in program.init.dialect.copies:
            run.execute(op, -1)
        else:
            run.begin(op.outputs, -1)
    step = program.step
    run.declare(step)
    run.begin(step.external_inputs, 0)
    before = dict(run.roots)
    if issue is None:
        for op in step.ops:
            run.execute(op, 0)
    else:
        for position, part in issue:
            run.execute(step.ops[position], 0, part)
    states = (name for name in step.external_inputs if step.blobs[name].role in STATE_ROLES)
    changed = [name for name in states if run.roots[step.blobs[name].storage] != before[step.blobs[name].storage]]
    return {name: f"{value:016x}" for name, value in run.values((*step.external_outputs, *changed)).items()}


class Run:
    """The storages of one program while it is executed on values.

    Attributes:
        roots: of each storage its root, and whether it holds all that was computed there: of a strided copy, what lies
            between the elements is nothing.
        paths: of views.
        gapped: storages whose declared layout leaves bytes between the elements.
        made: every value, in the order of execution; empty unless it was asked for.
        calls: of what operators were made to compute, the number, and the last operator that did.
        unwritten: blobs that were made without writing them, and of which something is read that may still not be
            written; and those that read beyond the elements of a copy.
        shifted: of storages that begin at another address modulo 64 than a fresh one, what says where: copies keep
            the address of their source.
        world: the last call so far of an operator that is ordered, as the dialect says.
        dialect: of the net that is executed.
    """

    def __init__(self, table: Numbering, program: Program, record: bool = False) -> None:
        self.table, self.program, self.record = table, program, record
        self.roots: dict[str, tuple[int, bool]] = {}
        self.paths: dict[str, int] = {}
        self.made: list[Made] = []
        self.calls: dict[int, Operator] = {}
        self.unwritten: set[str] = set()
        self.shifted: dict[str, int] = {}
        self.world = table.number(("world",))
        self.replicas = {prefix: r for r, prefix in enumerate(program.replicas)}
        self.dialect = TORCH
        self.blobs: Mapping[str, Blob] = {}
        self.geometries: dict[str, int] = {}
        self.gapped: frozenset[str] = frozenset()
        self.declared: dict[int, tuple[Mapping[str, Blob], dict[str, int], frozenset[str]]] = {}
        self.layouts: dict[_Key, int] = {}

    def declare(self, net: Net) -> None:
        """The blobs and the dialect from now on are those of *net*."""
        self.dialect = net.dialect
        if id(net) not in self.declared:
            blobs = _blobs(net)
            geometries = {name: self.geometry(blob) for name, blob in blobs.items()}
            strided = {geometries[n]: b for n, b in blobs.items() if b.strides is not None and not b.is_view}
            gaps = {geometry for geometry, blob in strided.items() if not is_dense(blob)}
            gapped = frozenset([n for n, b in blobs.items() if geometries[n] in gaps and not b.is_view])
            self.declared[id(net)] = blobs, geometries, gapped
        self.blobs, self.geometries, self.gapped = self.declared[id(net)]

    def geometry(self, blob: Blob) -> int:
        """The number of a blob's layout."""
        layout = blob.shape, blob.dtype, blob.strides, blob.offset
        number = self.layouts.get(layout)
        if number is None:
            number = self.layouts[layout] = self.table.number(("geometry", *layout))
        return number

    def net(self, net: Net, step: int) -> None:
        """Execute all of a net."""
        self.declare(net)
        self.world = self.table.number(("world", step))
        self.begin(net.external_inputs, step)
        for position, op in enumerate(net.ops):
            self.execute(op, step)
            if self.record:
                self.made += [Made(step, position, name, v, self.read(name)) for name, v in op.makes]

    def begin(self, names: Iterable[str], step: int) -> None:
        """Give inputs a value of this step, and state that has no value yet one of its own."""
        blobs, roots = self.blobs, self.roots
        for name in names:
            storage = blobs[name].storage
            if blobs[name].role == "input" or storage not in roots:
                when = step if blobs[name].role == "input" else -1
                self.start(storage, ("external", storage, when))

    def start(self, storage: str, what: _Key) -> None:
        """Let a storage hold *what*, in its declared layout."""
        geometry = self.geometries[storage]
        self.roots[storage] = self.table.number((*what, geometry)), storage not in self.gapped

    def execute(self, op: Operator, step: int, part: int | None = None) -> None:
        """Give an operator's outputs their values; of a collective only that of *part*, unless it is None."""
        form = self.table.form(op, self.dialect)
        if form.aliases:
            form.alias(self, op)
        if not form.only_views:
            form.execute(self, op, step, part)

    def values(self, names: Iterable[str]) -> dict[str, int]:
        return {name: self.read(name) for name in names}

    def use(self, names: Iterable[str]) -> None:
        """Note which of the blobs hold memory that may not have been written."""
        unwritten = self.table.unwritten
        if unwritten:
            roots = (self.roots[self.blobs[name].storage][0] for name in names)
            self.unwritten.update(unwritten[root] for root in roots if root in unwritten)

    def path(self, name: str) -> int:
        """How a blob lies in its storage."""
        blob = self.blobs[name]
        if blob.storage == name:
            return _BASE
        path = self.paths.get(name)
        if path is None:  # given from outside as a view of what is given too
            view = self.table.number(("given", self.geometries[name]))
            path = self.paths[name] = self.table.path(_BASE, view, "")
        return path

    def read(self, name: str) -> int:
        """The value of a blob's elements, layout included."""
        storage = self.blobs[name].storage
        root, complete = self.roots[storage]
        if storage == name:
            return root
        path = self.path(name)
        if not complete and path in self.table.beyond:
            return self.stray(name, root, path)
        return self.table.seen(root, path)

    def read_storage(self, name: str) -> int:
        """What an operator may find that reads beyond the elements of its operand."""
        storage = self.blobs[name].storage
        (root, complete), path = self.roots[storage], self.path(name)
        if not complete:
            return self.stray(name, root, path)
        if path == _BASE:
            return root
        return self.table.number(("within", root, self.geometries[storage], path, self.geometries[name]))

    def layout(self, name: str, read: Callable[[str], int]) -> int:
        """What the layout of an operand follows from: of memory that may not have been written, how it was made, so
        that memory made again counts as the same; of any other operand, the value that *read* gives."""
        made = self.table.laid_out.get(self.roots[self.blobs[name].storage][0])
        return read(name) if made is None else self.table.seen(made, self.path(name))

    def stray(self, name: str, root: int, path: int) -> int:
        """The value of what reads where nothing was written. It is known by its name, which passes keep."""
        self.unwritten.add(name)
        return self.table.number(("beyond", root, path, name))

    def address(self, name: str) -> int:
        """Where a blob begins modulo 64: 0, or the number of what says that."""
        blob = self.blobs[name]
        start, base = _byte_offset(blob), self.shifted.get(blob.storage, 0)
        return base if isinstance(start, int) and start % _ALIGNED == 0 else self.table.number(("at", start, base))

    def write(self, name: str, value: int) -> None:
        """Give a blob a value of its own geometry; where it is only a part of its storage, the rest stays."""
        blob = self.blobs[name]
        storage, path, table = blob.storage, self.path(name), self.table
        if path == _BASE:
            self.roots[storage] = value, storage not in self.gapped
            return
        old, complete = self.roots[storage]
        if _covers(blob, self.blobs[storage]):
            root = table.number(("written", path, value))
        else:
            root = table.number(("write", old, path, value))
            if old in table.unwritten:
                table.unwritten[root] = table.unwritten[old]
            if old in table.laid_out:
                table.laid_out[root] = table.laid_out[old]
        self.roots[storage] = root, complete
        table.written(root, path, value)


_ALIGNED: Final = 64
"""Bytes: kernels may compute in another order where addresses differ by no multiple of it."""


class _Form:
    """What operators of one type with the same arguments and effects have in common.

    Attributes:
        kind: the canonical type.
        static: what they do, as one number.
        copies: they give their output the value of their input.
        views: which of their outputs are views.
        only_views: they make nothing else.
        aliases: some of their outputs lie in the storage of an input.
        reaches: they may read beyond the elements of their operands.
        empty: they make memory without writing it.
        geometry_only: the positions of operands of which only the layout matters. What they hold may be unwritten; the
            layout is what the operators that made the operand give it (:meth:`Run.layout`).
        batch_norm: they are a batch norm in training.
        apart: of parts that may be computed apart, what each does, as one number, and its results: their positions
            among all and in what it returns.
        unread: the positions of operands that they do not read.
        ordered: what they do follows from other calls of such operators before.
        nested: blobs that they read beside their operands.
        paths: of the views that they make, by what each depends on: layers that repeat make the same ones.
    """

    __slots__ = (
        "aliases",
        "apart",
        "batch_norm",
        "copies",
        "empty",
        "geometry_only",
        "kind",
        "nested",
        "only_views",
        "ordered",
        "paths",
        "reaches",
        "static",
        "unread",
        "views",
    )

    def __init__(self, op: Operator, dialect: Dialect, table: Numbering) -> None:
        self.kind = kind = canonical_type(op.type)
        self.copies = kind in dialect.copies and len(op.inputs) == len(op.outputs) == 1
        self.views = op.effects.viewing
        self.only_views = not self.copies and len(self.views) == len(op.outputs) > 0
        self.aliases = bool(op.effects.views or op.effects.writes)
        self.reaches = not operator_type(op.type).only_elements
        self.empty = operator_type(op.type).unwritten
        self.geometry_only = geometry_operands(kind, op.args, op.operands, len(op.inputs))
        self.ordered = dialect.is_ordered(op)
        self.batch_norm = operator_type(kind).batch_norm and bool(op.args.get("training", True))
        self.nested = dialect.nested(op)
        self.paths: dict[_Key, int] = {}
        args = tuple(sorted((name, frozen(arg)) for name, arg in op.args.items()))
        self.unread, operands = ((), op.operands) if table.as_called else _unread(op)
        self.static = table.number(("operator", kind, operands, op.results, args, dialect.meaning(op)))
        self.apart = () if table.as_called else tuple(_apart(op, table))

    def alias(self, run: Run, op: Operator) -> None:
        """Note how outputs lie in the storages of inputs, where they do."""
        for output, source in op.effects.writes:
            name = op.outputs[output]
            if name != op.inputs[source] and run.blobs[name].storage != name:
                run.paths[name] = run.path(op.inputs[source])
        for output, source in op.effects.views:
            self.view(run, op, output, op.inputs[source])

    def view(self, run: Run, op: Operator, output: int, source: str) -> None:
        """The path of a view: that of its operand, and this operator.

        An operator that reads beyond its operand's elements sees all of the storage, by what the operand's layout in
        it says.
        """
        table, name, parent = run.table, op.outputs[output], run.path(source)
        made, taken = run.blobs[name], run.blobs[source]
        layouts = run.geometries[name], run.geometries[source], run.geometries[taken.storage]
        others = tuple([run.read(other) for other in op.inputs if other != source]) if op.inputs[1:] else ()
        key = output, parent, *layouts, *others
        path = self.paths.get(key)
        if path is None:
            if self.reaches:
                view = table.number(("beyond", self.static, output, parent, *layouts, *others))
            else:
                start = _bytes_between(taken, made)
                geometry = run.geometry(made._replace(offset=0)) if made.offset else run.geometries[name]
                view = table.number(("step", self.static, output, geometry, start, *others))
            path = self.paths[key] = table.path(parent, view, op.type, beyond=self.reaches)
        run.paths[name] = path
        run.calls[run.layout(name, run.read)] = op

    def execute(self, run: Run, op: Operator, step: int, part: int | None = None) -> None:
        if self.copies:
            self.copy(run, op)
        elif self.empty:
            self.leave(run, op, step)
        elif self.batch_norm:
            self.normalize(run, op, self.inputs(run, op))
        elif self.apart:
            self.part(run, op, self.inputs(run, op))
        else:
            self.compute(run, op, step, part)

    def inputs(self, run: Run, op: Operator) -> list[int]:
        names, ignored = op.inputs, self.geometry_only
        read = run.read_storage if self.reaches else run.read
        if ignored:
            run.use([name for position, name in enumerate(names) if position not in ignored])
            return [run.layout(n, read) if position in ignored else read(n) for position, n in enumerate(names)]
        run.use(names)
        if self.unread:
            names = tuple([name for position, name in enumerate(names) if position not in self.unread])
        return [read(name) for name in names]

    def compute(self, run: Run, op: Operator, step: int, part: int | None) -> None:
        """A value is what the operator does, and its inputs: of random numbers also where and when they are drawn."""
        number, inputs = run.table.number, self.inputs(run, op)
        if op.effects.writes:
            inputs += self.shared(run, op)
        if self.ordered:
            inputs.append(run.world)
        if self.nested:
            inputs += [run.read(name) for name in self.nested if name in run.blobs and name in run.roots]
        key: _Key = (self.static, None, *inputs)
        if op.seed is not None:
            replica = run.replicas.get(prefix_of(op.outputs[0]) if op.outputs else "", -1)
            key = (number(("draws", self.static, op.seed, replica)), step, *inputs)
        call = number(key)
        if self.ordered:
            run.world = call
        if self.kind != "Free":  # Caffe2's, which gives memory back and computes nothing
            run.calls[call] = op
        if op.kind == "reduce":
            for name in op.outputs if part is None else op.outputs[part : part + 1]:
                run.write(name, number((*key, run.geometries[name])))
            return
        for output, name in enumerate(op.outputs):
            if output not in self.views:
                run.write(name, number((call, output, run.geometries[name])))

    def part(self, run: Run, op: Operator, inputs: list[int]) -> None:
        """What may be computed apart: each part is a call of its own."""
        number = run.table.number
        for static, results in self.apart:
            call = number((static, None, *inputs))
            run.calls[call] = op
            for output, returned in results:
                name = op.outputs[output]
                run.write(name, number((call, returned, run.geometries[name])))

    def shared(self, run: Run, op: Operator) -> list[int]:
        """What an operator that overwrites an operand computes beyond what its functional form does: it may read what
        it has written where another operand lies in the same memory, and its result is where that operand is."""
        found, blobs, number = [], run.blobs, run.table.number
        for _, source in op.effects.writes:
            name = op.inputs[source]
            storage = blobs[name].storage
            if run.shifted.get(storage):
                found.append(number(("in place at", run.shifted[storage])))
            for other in op.inputs:
                if other != name and blobs[other].storage == storage:
                    same = run.path(other) == run.path(name) and run.geometries[other] == run.geometries[name]
                    if not same:
                        layouts = run.geometries[storage], run.geometries[name], run.geometries[other]
                        found.append(number(("overlapping", op.type, *layouts, run.path(name), run.path(other))))
        return found

    def leave(self, run: Run, op: Operator, step: int) -> None:
        """What is not written is known by its name, which passes keep, so that a program equals itself. Of the layout
        alone a number says how the memory was made."""
        table, made = run.table, () if run.table.as_called else self.inputs(run, op)
        for name, version in op.makes:
            geometry = run.geometries[name]
            content = call = table.number(("empty", self.static, name, version, step, geometry))
            if not table.as_called:
                call = table.laid_out[content] = table.number(("laid out", self.static, *made, geometry))
            run.calls[call] = op
            if 0 not in (run.blobs[name].shape or ()):
                table.unwritten[content] = name
            run.write(name, content)

    def copy(self, run: Run, op: Operator) -> None:
        """A copy of the same layout has the value of its source; conjugate and negative elements are written out."""
        (source,), (target,) = op.inputs, op.outputs
        blob, kept = run.blobs[source], run.blobs[target]
        table, root, value = run.table, run.roots[blob.storage][0], run.read(source)
        if table.conjugate and blob.storage != source and run.path(source) in table.conjugate:
            value = table.number(("written out", value))
        if (kept.shape, kept.strides, kept.dtype) != (blob.shape, blob.strides, blob.dtype):
            value = table.number(("laid out", value, run.geometries[target]))
        if root in table.unwritten:
            table.unwritten[value] = table.unwritten[root]
        address = run.address(source)
        if kept.storage == target and kept.role not in STATE_ROLES:
            run.shifted[target] = address
        elif address != run.address(target):
            value = table.number(("moved to", run.address(target), value))
        run.write(target, value)

    def normalize(self, run: Run, op: Operator, inputs: list[int]) -> None:
        """Batch norm in training: its results don't depend on the running statistics, which follow the results."""
        table = run.table
        given = dict(zip(signature(op.type).names(op.operands, len(inputs)), inputs, strict=True))
        running = {n: given.pop(n) for n in ("running_mean", "running_var") if n in given}
        eps = op.args.get("eps", op.args.get("epsilon"))
        call = table.number(("batch norm", kernel_family(op.type), frozen(eps), tuple(given.items())))
        run.calls[call] = op
        statistics = min((output for output, _ in op.effects.writes), default=3)
        momentum = frozen(op.args.get("momentum", op.args.get("exponential_average_factor")))
        for position, name in enumerate(op.outputs):
            geometry = run.geometries[name]
            key: _Key = (call, position, geometry)
            if running and position >= statistics:
                old = running["running_mean" if position == statistics else "running_var"]
                key = (call, "running", position - statistics, momentum, old, geometry)
            run.write(name, table.number(key))


def _unread(op: Operator) -> tuple[tuple[int, ...], str | None]:
    """The positions of the operands that an operator does not read, and the pattern of the others."""
    names = operator_type(op.type).unread_in_training
    if not names or not op.args.get("train"):
        return (), op.operands
    params = [param.name for param in signature(op.type).tensors]
    pattern = op.operands or "t" * len(params)
    taken = [name for name, given in zip(params, pattern, strict=True) if given == "t"]
    unread = tuple([position for position, name in enumerate(taken) if name in names])
    return unread, "".join("_" if name in names else given for name, given in zip(params, pattern, strict=True))


def _apart(op: Operator, table: Numbering) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """The parts of an operator that may be computed apart: the first result, and the others."""
    mask = op.args.get("output_mask")
    if not operator_type(op.type).parts_apart or not isinstance(mask, tuple):
        return
    returned = [position for position, given in enumerate(op.results or "t" * len(op.outputs)) if given == "t"]
    for first in (True, False):
        results = tuple([(n, position) for n, position in enumerate(returned) if (position == 0) == first])
        if results:
            asked = tuple([bool(wanted) and (position == 0) == first for position, wanted in enumerate(mask)])
            args = sorted((name, frozen(arg)) for name, arg in {**op.args, "output_mask": asked}.items())
            yield table.number(("part", op.type, op.operands, tuple(args))), results


def _blobs(net: Net) -> Mapping[str, Blob]:
    """The net's blobs; without shapes in a workspace, where a name may hold tensors of several shapes, each of which
    follows from the operator and its inputs."""
    if not net.dialect.workspace:
        return net.blobs
    return {name: blob._replace(shape=None, dtype=None) for name, blob in net.blobs.items()}


def _bytes_between(taken: Blob, made: Blob) -> Size:
    """How many bytes after its operand a view begins. Views of one storage may count in elements of different sizes."""
    if made.offset == taken.offset and (made.dtype == taken.dtype or not made.offset):
        return 0
    return add(_byte_offset(made), multiply(-1, _byte_offset(taken)))


def _byte_offset(blob: Blob) -> Size:
    return multiply(blob.offset, ITEMSIZE[blob.dtype] if blob.dtype else 1)


def _covers(blob: Blob, base: Blob) -> bool:
    """Whether a write to *blob* leaves nothing of its storage's old value."""
    if (blob.shape, blob.strides, blob.offset, blob.dtype) == (base.shape, base.strides, base.offset, base.dtype):
        return True
    if blob.shape is None or base.shape is None:
        return True  # an imported net overwrites whole blobs
    dense = blob.strides is None and base.strides is None and blob.offset == 0 and blob.dtype == base.dtype
    return dense and product(blob.shape) == product(base.shape)
