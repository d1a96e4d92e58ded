"""The invariants of nets, programs and plans, and :func:`verify`, which checks them.

Of every net, *well-formed*:

 1. A blob is kept under its own name.
 2. A view's storage is declared, owns its bytes, and has the view's device and role.
 3. External inputs are declared, once each, and no operator makes version 0 of one.
 4. Blobs that an operator names are declared, the blob that it runs beside included; a declared blob is external or
    made by an operator.
 5. The versions of a name count up from 0 in program order, one producer each.
 6. An operator reads the last version made before it.
 7. Nobody has written to a blob's storage, by whatever name, between its version and a read of it.
 8. An output shares the storage of the input that the operator's effects name; every other output owns its storage.
    A view is made where its storage is.
 9. External outputs are made, not written over later; gradients and what they are of are declared.
10. Effects are those of the type's schema; random operators have a seed id, and only they.
11. The type is torch's or graphir's own, or an imported one, without a dot; arguments, inputs and outputs fit its
    signature.
12. Shapes, element types, strides and offsets are possible ones, and those that the operator gives.
13. A collective runs on the device of its first participant. Only a ``Copy`` says how it is issued and received.

*Placed*:

14. Every operand is where :func:`graphir.ir.placement.required_devices` wants it.

Of a program: 15 to 21 (:mod:`.program`), and 30 to 32 (:mod:`.parts`). Of a plan (:mod:`.plan`): 22 to 29, and 33.

Imported nets have types that torch does not know (without a dot: ``FC``), and unknown shapes: 10, 11 and 12 hold only
of known types and shapes. A name of a Caffe2 net may hold tensors of several shapes, so that 12 only asks there that
geometries are possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from ...errors import GraphirError, VerifyError, after_last
from ..blob import Blob
from ..device import Device
from ..dtype import ITEMSIZE
from ..geometry import Geometry, absurdity, geometry, same_layout
from ..infer import Inferred, infer
from ..net import Net
from ..operator import ISSUES, PURE, RECEIVED, Operator, leaves
from ..placement import is_host_scalar, required_devices, same_memory
from ..plan import Plan, issued_as, program_of, sizes_of
from ..program import Program
from ..size import Dims, Polynomial, Size, size_dims
from .plan import plan_problems
from .problems import RAW, Misplaced, Problem, raise_all
from .program import program_problems
from .subject import Planned, require, subject_of

__all__ = ["Problem", "blamed", "net_problems", "verify"]

Subject: TypeAlias = Program | Plan | Net


def verify(subject: Subject | Planned, *, dims: Dims | None = None, placed: bool = True) -> None:
    """Check every invariant of a program, a plan or a net, and raise all that are broken as one error.

    Args:
        subject: what to verify; a session and a compiled step stand for their plan.
        dims: the value of each dimension at which shapes are compared; the program's or plan's own ones by default. A
            bare net has none, so that its operators with named dimensions are not compared with their shapes.
        placed: also check where operands are; a program may break that between a shift and its copies.

    Raises:
        GraphirError: *subject* is none of these.
        PlacementError: operands are on the wrong device, and nothing else is wrong.
        VerifyError: some other invariant is broken.
    """
    subject = subject_of(subject)
    subject = subject_of(subject)
    require(subject, (Program, Plan, Net), "verify")
    kind = type(subject).__name__.lower()
    where = f"{kind} {subject.name!r}"
    if not isinstance(subject, Net):
        where += after_last(subject.history)
    try:
        problems = _problems(subject, dims or {}, placed)
    except RAW as e:
        what = f"the {kind} is not a valid {kind}: {type(e).__name__}: {e}"
        raise VerifyError(what, where=where, fix="build it of the types that its fields are declared with") from e
    raise_all(problems, where, passes=not isinstance(subject, Net) and bool(subject.history))


@contextmanager
def blamed(subject: Subject) -> Iterator[None]:
    """If code in this context raises because *subject* breaks an invariant, raise the error for that invariant instead.
    Placement is not checked.

    Raises:
        VerifyError: it did.
    """
    try:
        yield
    except RAW:
        verify(subject, placed=False)
        raise


def _problems(subject: Subject, dims: Dims, placed: bool) -> list[Problem]:
    if isinstance(subject, Net):
        return net_problems(subject, dims, placed=placed, complete=False)
    program, sizes = program_of(subject), {**sizes_of(subject), **dims}
    problems = net_problems(program.init, sizes, placed=placed) + net_problems(program.step, sizes, placed=placed)
    problems += program_problems(program)
    if isinstance(subject, Plan) and not problems:
        problems = plan_problems(subject)
    return problems


def net_problems(net: Net, dims: Dims, *, placed: bool = True, complete: bool = True) -> list[Problem]:
    """Every invariant that *net* breaks.

    Args:
        net: the net.
        dims: the value of each dimension.
        placed: also check where operands are.
        complete: report dimensions without a value; if False, sizes with such a dimension are only not compared.
    """
    walk = _Walk(net, dims, placed, complete)
    walk.blobs()
    for position, op in enumerate(net.ops):
        walk.operator(position, op)
    walk.outputs()
    return walk.problems


class _Walk:
    """A walk through a net in program order, which collects broken invariants.

    Attributes:
        latest: the last version of each name that has been made.
        made_at: of each name, the state of its storage in which the last version was made.
        state: of each storage: the position of its last writer, -1 before the first.
        geometries: of each blob, bound.
        bindings: the geometries, by shape, element type, strides and offset as declared: each is bound once.
    """

    def __init__(self, net: Net, dims: Dims, placed: bool, complete: bool) -> None:
        self.net, self.dims, self.placed, self.complete = net, dims, placed, complete
        self.problems: list[Problem] = []
        self.latest: dict[str, int] = {}
        self.made_at: dict[str, int] = {}
        self.state: dict[str, int] = {}
        self.geometries: dict[str, Geometry | None] = {}
        self.unbound: set[str] = set()
        self.bindings: dict[tuple[object, ...], Geometry | None] = {}

    def report(self, what: str, op: Operator | None = None, *, placement: Misplaced = "") -> None:
        self.problems.append(Problem(what, op, self.net if op else None, placement=placement))

    def blobs(self) -> None:
        blobs = self.net.blobs
        for name, blob in blobs.items():
            if blob.name != name:
                self.report(f"blob {blob.name!r} is kept under the name {name!r}")
            if blob.storage != name:
                self.view(blob, blobs)
            described = blob.shape, blob.dtype, blob.strides, blob.offset
            if described not in self.bindings:
                self.bindings[described] = self.bound(blob)
            self.geometries[name] = self.bindings[described]
        for name in self.net.external_inputs:
            if name not in blobs:
                self.report(f"external input {name!r} is not declared")
            elif name in self.latest:
                self.report(f"external input {name!r} is listed twice")
            else:
                self.latest[name], self.made_at[name], self.state[blobs[name].storage] = 0, -1, -1

    def view(self, blob: Blob, blobs: Mapping[str, Blob]) -> None:
        base = blobs.get(blob.storage)
        if base is None:
            self.report(f"blob {blob.name!r} is a view of {blob.storage!r}, which is not declared")
            return
        if base.storage != base.name:
            self.report(f"blob {blob.name!r} is a view of {base.name!r}, which is itself a view of {base.storage!r}")
        if base.device != blob.device:
            self.report(f"blob {blob.name!r} is on {blob.device} but its storage {base.name!r} is on {base.device}")
        if base.role != blob.role:
            self.report(f"blob {blob.name!r} has role {blob.role} but its storage {base.name!r} has role {base.role}")

    def bound(self, blob: Blob) -> Geometry | None:
        if blob.shape is not None and blob.dtype is not None and blob.dtype not in ITEMSIZE:
            self.report(f"blob {blob.name!r} has the unknown element type {blob.dtype!r}")
            return None
        try:
            found = geometry(blob, self.dims)
            absurd = "" if found is None else absurdity(found)
        except (TypeError, ValueError, AttributeError) as e:  # sizes that are not sizes
            found, absurd = None, f"has a geometry that cannot be read: {e}"
        except GraphirError:
            sizes = (*(blob.shape or ()), *(blob.strides or ()), blob.offset)
            self.unbound_in(sizes, f"blob {blob.name!r}")
            return None
        if absurd:
            self.report(f"blob {blob.name!r} {absurd}")
            return None
        return found

    def unbound_in(self, sizes: tuple[Size, ...], owner: str) -> bool:
        """Report each dimension that has no value, once. Returns whether there is one."""
        missing = {dim for size in sizes for dim in size_dims(size)} - set(self.dims)
        if self.complete:
            for dim in sorted(missing - self.unbound):
                self.report(f"dimension {dim!r} of {owner} has no value")
            self.unbound |= missing
        return bool(missing)

    def operator(self, position: int, op: Operator) -> None:
        """Invariants 3 to 8 and 10 to 14, for one operator."""
        blobs, latest, state, geometries = self.net.blobs, self.latest, self.state, self.geometries
        inputs, outputs, device = op.inputs, op.outputs, op.device
        reads, makes = op.input_versions, op.output_versions
        if (reads is not None and len(reads) != len(inputs)) or (makes is not None and len(makes) != len(outputs)):
            self.report("the operator does not have one version for each operand", op)
            return
        try:
            read, made = [blobs[name] for name in inputs], [blobs[name] for name in outputs]
            if op.of:
                blobs[op.of]
        except KeyError:
            self.undeclared(op)
            return

        away = False
        for k, blob in enumerate(read):
            name, version = inputs[k], 0 if reads is None else reads[k]
            if latest.get(name) != version or self.made_at[name] != state[blob.storage]:
                self.misread(name, version, op)
            if blob.device != device:
                away = True

        if op.effects is PURE or op.effects == PURE:
            for k, blob in enumerate(made):
                name = outputs[k]
                self.make(name, 0 if makes is None else makes[k], op)
                if blob.storage != name:
                    self.report(f"output {name!r} is new but declared as a view of {blob.storage!r}", op)
                state[blob.storage] = self.made_at[name] = position
                if blob.device != device:
                    away = True
        else:
            away = self.aliases(position, op, read, made) or away

        if away and self.placed:
            self.place(op)
        if op.kind == "reduce" and inputs and blobs[inputs[0]].device != device:
            self.report(f"AllReduce is on {device} but its first participant is on {blobs[inputs[0]].device}", op)
        if op.issue or op.received:
            self.transfer(op)
        self.signature(op, [geometries[name] for name in inputs])

    def transfer(self, op: Operator) -> None:
        for name, value, known in (("issue", op.issue, ISSUES), ("received", op.received, RECEIVED)):
            if value not in known:
                self.report(f"{name} cannot be {value!r}, only {' or '.join(map(repr, known))}", op)
            elif value and issued_as(op) != "copy":
                self.report(f"{op.type} is not a Copy, so it cannot have {name}={value}", op)

    def undeclared(self, op: Operator) -> None:
        for name in dict.fromkeys((*op.inputs, *op.outputs, *([op.of] if op.of else []))):
            if name not in self.net.blobs:
                self.report(f"blob {name!r} is not declared", op)

    def make(self, name: str, version: int, op: Operator) -> None:
        last = self.latest.get(name, -1)
        if version != last + 1:
            if version == 0 and name in self.net.external_inputs:
                self.report(f"external input {name!r} is made by an operator", op)
            elif version <= last:
                self.report(f"version {version} of blob {name!r} is made twice", op)
            else:
                self.report(f"version {version} of blob {name!r} is made where version {last + 1} is due", op)
        self.latest[name] = max(version, last + 1)

    def aliases(self, position: int, op: Operator, read: Sequence[Blob], made: Sequence[Blob]) -> bool:
        """Invariant 8, and the states that outputs are made in. Returns whether an output is on another device."""
        state, effects = self.state, op.effects
        for output, operand in (*effects.views, *effects.writes):
            if output >= len(made) or operand >= len(read):
                self.report("the effects name operands that the operator does not have", op)
                return False
        written = dict(effects.writes)
        shared = {**dict(effects.views), **written}
        away = False
        for k, blob in enumerate(made):
            name, storage = op.outputs[k], blob.storage
            self.make(name, 0 if op.output_versions is None else op.output_versions[k], op)
            if k in shared:
                source = read[shared[k]]
                if storage != source.storage:
                    verb = "overwrites" if k in written else "is a view of"
                    self.report(f"output {name!r} {verb} {source.name!r} but its storage is {storage!r}", op)
                elif k not in written and not same_memory(blob.device, op.device) and not is_host_scalar(blob):
                    self.report(f"view {name!r} is on {blob.device}, where its storage is, but made on {op.device}", op)
            elif storage != name:
                self.report(f"output {name!r} is new but declared as a view of {storage!r}", op)
            if k in written or k not in shared:
                state[storage] = position
            if blob.device != op.device:
                away = True
        for k, blob in enumerate(made):
            self.made_at[op.outputs[k]] = state.setdefault(blob.storage, position)
        return away

    def misread(self, name: str, version: int, op: Operator | None) -> None:
        last = self.latest.get(name)
        whose = "an operator reads" if op else "an external output is"
        if last is None:
            later = self.net.producer(name) is not None
            self.report(f"blob {name!r} is read before it is made" if later else f"blob {name!r} is never made", op)
            self.latest[name], self.made_at[name] = version, self.state.setdefault(self.net.blobs[name].storage, -1)
        elif last != version:
            self.report(f"{whose} version {version} of blob {name!r}, whose last version there is {last}", op)
        else:
            storage = self.net.blobs[name].storage
            writer = self.net.ops[self.state[storage]]
            at = f"{', '.join(writer.outputs)!s} = {writer.type}"
            self.report(f"blob {name!r} is stale: its storage {storage!r} was written over since, by {at}", op)

    def place(self, op: Operator) -> None:
        blobs, dialect = self.net.blobs, self.net.dialect
        inputs, outputs = required_devices(op, blobs, dialect)
        makes: Misplaced = "brings" if dialect.workspace else "makes"
        ways: dict[str, Misplaced] = {}
        if op.effects.shows and not dialect.workspace:  # a view is made where its storage is, which invariant 8 says
            ways = dict.fromkeys((*op.inputs, *op.outputs), "")
        elif op.effects.writes:
            ways = dict.fromkeys(op.inputs, "brings")
        for name, wanted in dict.fromkeys(zip(op.inputs, inputs, strict=True)):
            self.misplaced(name, wanted, op, "read", ways.get(name, "brings"))
        for name, wanted in dict.fromkeys(zip(op.outputs, outputs, strict=True)):
            self.misplaced(name, wanted, op, "written", ways.get(name, makes))

    def misplaced(self, name: str, wanted: Device, op: Operator, verb: str, placement: Misplaced) -> None:
        actual = self.net.blobs[name].device
        if not same_memory(actual, wanted):
            self.report(f"blob {name!r} is on {actual} but {verb} on {wanted}", op, placement=placement)

    def signature(self, op: Operator, inputs: list[Geometry | None]) -> None:
        if not self.net.dialect.infers(op.type):
            return
        try:
            known = infer(op, inputs, self.dims)
        except GraphirError as e:
            sizes = tuple(leaf for arg in op.args.values() for leaf in leaves(arg) if isinstance(leaf, Polynomial))
            if not self.unbound_in(sizes, f"an argument of {op.outputs[0] if op.outputs else op.type!r}"):
                self.report(e.what, op)
            return
        except RAW as e:
            self.report(f"{op.type} cannot be checked: {type(e).__name__}: {str(e).partition(chr(10))[0]}", op)
            return
        if known.complaint:
            self.report(known.complaint, op)
        if known.effects is not None:
            if known.effects != op.effects:
                self.report(f"the effects are {tuple(op.effects)} but its schema gives {tuple(known.effects)}", op)
            if known.effects.random != (op.seed is not None):
                self.report(
                    "the operator is random, but has no seed id"
                    if op.seed is None
                    else "the operator has a seed id, but is not random",
                    op,
                )
        if known.outputs is not None and not self.net.dialect.workspace:
            for name, wanted in zip(op.outputs, known.outputs, strict=True):
                declared = self.geometries[name]
                if declared != wanted and declared is not None and wanted is not None:
                    self.compare(name, declared, wanted, known, op)

    def compare(self, name: str, declared: Geometry, wanted: Geometry, known: Inferred, op: Operator) -> None:
        same = declared.shape == wanted.shape and declared.dtype == wanted.dtype
        if same and declared.offset == wanted.offset and (known.loose or same_layout(declared, wanted)):
            return
        self.report(f"blob {name!r} is declared {declared} but {op.type} gives {wanted}", op)

    def outputs(self) -> None:
        blobs, latest = self.net.blobs, self.latest
        for name in self.net.external_outputs:
            if name not in blobs:
                self.report(f"external output {name!r} is not declared")
            elif name not in latest or self.made_at[name] != self.state[blobs[name].storage]:
                self.misread(name, latest.get(name, 0), None)
        for name in blobs:
            if name not in latest:
                self.report(f"blob {name!r} is declared, but it is not external and no operator makes it")
        for name, grad in self.net.gradients.items():
            for mentioned in (name, grad):
                if mentioned not in blobs:
                    self.report(f"net.gradients maps {name!r} to {grad!r}, but {mentioned!r} is not declared")
