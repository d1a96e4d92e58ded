"""Plans with one wait, record, free, copy or receive buffer dropped, moved or redirected, and what notices it.

Each mutant is held against judges that know nothing of each other: ``verify``; ``check``; ``running`` it on the
adversarial executor, in as many steps as there are lanes, against the bits of the plan that it was made of; and
``oracle``, a proof by brute force that it is as good as that plan: all pairs of instructions that touch a storage, one
of them writing or freeing it, are ordered as the program has them, all uses of what a receive buffer held come before
the copy that fills it again, the program computes the same values, and the same storages are freed.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from graphir.runtime import check
from graphir.runtime.executors.adversarial import Adversarial
from graphir.runtime.executors.reference import Reference
from interleaving import happens_before
from runnable import setting_of
from small import program_of

import graphir
from graphir import passes
from graphir.errors import EquivalenceError, PlanError, RunError, VerifyError
from graphir.ir.blob import STATE_ROLES
from graphir.ir.dtype import TORCH_NAME
from graphir.ir.plan import Event, Instruction, Plan
from graphir.ir.size import bind_shape

KINDS = ("wait", "record", "free", "copy", "buffer")
CHANGES = ("dropped", "moved", "redirected")


class Mutant(NamedTuple):
    """A plan with one change: of which kind of instruction, which change, and what exactly."""

    kind: str
    change: str
    what: str
    plan: Plan


def mutants(plan: Plan, seed: int = 0) -> Iterator[Mutant]:
    """Every single change of a kind and an instruction; what it is moved or redirected to is drawn. Two storages of one
    device get one receive buffer in every way, whether or not their lifetimes overlap."""
    draw = random.Random(seed)
    for position, instruction in enumerate(plan.instructions):
        if instruction.kind not in KINDS:
            continue
        rest = [*plan.instructions[:position], *plan.instructions[position + 1 :]]
        text = f"{position} {instruction}"
        yield Mutant(instruction.kind, "dropped", text, plan.with_(instructions=tuple(rest)))
        own = [i for i, other in enumerate(rest) if other.lane == instruction.lane]
        before = [i for i in own if i < position]
        after = [i + 1 for i in own if i >= position]
        drawn = [draw.choice([*before, *after])] if own else []
        for place in (*before[-1:], *after[:1], *drawn):
            moved = (*rest[:place], instruction, *rest[place:])
            yield Mutant(instruction.kind, "moved", f"{text} to {place}", plan.with_(instructions=moved))
        other = redirected(plan, position, draw)
        if other is not None:
            yield Mutant(instruction.kind, "redirected", text, other)
    for storage, number in plan.buffers.items():
        device = plan.step.blobs[storage].device
        others = {other for name, other in plan.buffers.items() if plan.step.blobs[name].device == device}
        for shared in sorted(others - {number}):
            moved = plan.with_(buffers={**plan.buffers, storage: shared})
            yield Mutant("buffer", "redirected", f"{storage} from {number} to {shared}", moved)


def redirected(plan: Plan, position: int, draw: random.Random) -> Plan | None:
    """The plan with the instruction at a position aimed at something else; None where there is nothing else."""
    instruction, blobs = plan.instructions[position], plan.step.blobs
    if instruction.kind == "copy":
        return _copied_from_elsewhere(plan, instruction, draw)
    if instruction.kind == "free":
        storages = [name for name, blob in blobs.items() if blob.storage == name != instruction.storage]
        return _with(plan, position, instruction._replace(storage=draw.choice(storages)))
    event = instruction.event
    assert event is not None
    seen = dict.fromkeys(i.event for i in plan.instructions[:position] if i.kind == "record")
    events = [e for e in seen if e is not None and e != event]
    if instruction.kind == "record":
        events = [Event(name, 0, event.lane) for name in blobs if name != event.blob]
    return _with(plan, position, instruction._replace(event=draw.choice(events))) if events else None


def _with(plan: Plan, position: int, instruction: Instruction) -> Plan:
    kept = plan.instructions
    return plan.with_(instructions=(*kept[:position], instruction, *kept[position + 1 :]))


def _copied_from_elsewhere(plan: Plan, instruction: Instruction, draw: random.Random) -> Plan | None:
    step = plan.step
    op = step.ops[instruction.op]
    (source,) = op.inputs
    geometry = step.blobs[source]._replace(name="", storage="", role="activation")
    made = {*step.external_inputs, *[name for other in step.ops[: instruction.op] for name in other.outputs]}
    alike = [
        name
        for name, blob in step.blobs.items()
        if name != source and name in made and blob._replace(name="", storage="", role="activation") == geometry
    ]
    if not alike:
        return None
    ops = list(step.ops)
    ops[instruction.op] = op._replace(inputs=(draw.choice(alike),), input_versions=None)
    return plan.with_(program=plan.program.with_(step=step.with_(ops=tuple(ops))))


def to_and_fro(seed: int) -> Plan:
    """Sums on three devices, all of one geometry, so that many copies can share a buffer."""
    draw = random.Random(seed)
    lines, names = ["input x : f32[8] @gpu:0", "input y : f32[8] @gpu:1"], ["x", "y"]
    for i in range(14):
        lines.append(
            f"v{i} : f32[8] @gpu:{draw.randrange(3)} = aten.add.Tensor({draw.choice(names)}, {draw.choice(names)})"
        )
        names.append(f"v{i}")
    return passes.emit(passes.inject_copies(program_of("\n".join([*lines, "output v13"]))))


class Trial:
    """A sound plan with inputs, state and the bits that its steps give."""

    def __init__(self, plan: Plan, steps: int | None = None) -> None:
        self.plan, self.steps = plan, steps or len(plan.lanes)
        generator = torch.Generator().manual_seed(1)
        self.given: dict[str, torch.Tensor] = {}
        for name in plan.step.external_inputs:
            blob = plan.step.blobs[name]
            assert blob.shape is not None
            given = torch.rand(bind_shape(blob.shape, plan.dims), generator=generator)
            self.given[name] = given.to(getattr(torch, TORCH_NAME[str(blob.dtype)]))
        self.wanted = self.outcome(Reference, plan, 0)

    def outcome(self, kind: type[Reference], plan: Plan, seed: int) -> list[torch.Tensor]:
        """Every step's outputs, and the last one's state."""
        blobs = self.plan.step.blobs
        state = {name: given.clone() for name, given in self.given.items() if blobs[name].role in STATE_ROLES}
        inputs = {name: given for name, given in self.given.items() if name not in state}
        setting = setting_of(plan, *inputs, **state)
        executor = Adversarial(setting, 1, seed) if kind is Adversarial else Reference(setting, 1)
        found: list[torch.Tensor] = []
        for step in range(self.steps):
            found += [output.clone() for output in executor.run(plan.dims, list(inputs.values()), step)]
        return [*found, *state.values()]

    def running(self, mutant: Plan, seed: int = 0) -> bool:
        """Whether running a mutant notices it."""
        try:
            found = self.outcome(Adversarial, mutant, seed)
        except (PlanError, RunError):
            return True
        pairs = zip(found, self.wanted, strict=True)
        return not all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)

    def oracle(self, mutant: Plan) -> bool:
        """Whether a mutant is as good as the plan."""
        if mutant.program is not self.plan.program:
            try:
                graphir.certify(self.plan.program, mutant.program)
            except (EquivalenceError, VerifyError):
                return False
        if _freed(mutant) != _freed(self.plan):
            return False
        return all(before in earlier for earlier, befores in _ordered(mutant) for before in befores)


def _freed(plan: Plan) -> list[str]:
    return sorted(i.storage for i in plan.instructions if i.kind == "free")


def _ordered(plan: Plan) -> Iterator[tuple[set[int], set[int]]]:
    """For each instruction, what comes before it in every interleaving, and what has to."""
    wanted: dict[int, set[int]] = defaultdict(set)
    blobs = plan.step.blobs
    makers: dict[tuple[str, int], int] = {}
    readers: dict[str, list[int]] = defaultdict(list)
    writers: dict[str, list[int]] = defaultdict(list)
    frees = [(len(plan.step.ops), 0, position) for position, i in enumerate(plan.instructions) if i.kind == "free"]
    executed = [(i.op, i.part, position) for position, i in enumerate(plan.instructions) if i.op >= 0]
    for _, part, position in sorted(executed) + frees:
        instruction = plan.instructions[position]
        reads, writes = [], [instruction.storage]
        if instruction.kind != "free":
            op = plan.step.ops[instruction.op]
            makes = list(op.makes)
            views = [makes[output] for output, _ in op.effects.views]
            if instruction.kind == "collective":
                makes = [makes[part]]
            wanted[position] |= {makers[read] for read in op.reads if read in makers}
            makers |= dict.fromkeys(makes, position)
            reads = [blobs[name].storage for name in [*op.inputs, *[name for name, _ in views]]]
            writes = [blobs[name].storage for name, version in makes if (name, version) not in views]
        for storage in reads:
            wanted[position] |= set(writers[storage])
        for storage in writes:
            wanted[position] |= {*writers[storage], *readers[storage]}
        for storage in reads:
            readers[storage].append(position)
        for storage in writes:
            writers[storage].append(position)
    freeing = {position for _, _, position in frees}
    used = {storage: {*readers[storage], *writers[storage]} - freeing for storage in plan.buffers}
    held: dict[tuple[str, int], str] = {}
    for position, instruction in enumerate(plan.instructions):
        storage = plan.step.ops[instruction.op].outputs[0] if instruction.kind == "copy" else ""
        if storage in used:
            buffer = blobs[storage].device, plan.buffers[storage]
            wanted[position] |= used.get(held.get(buffer, ""), set())
            held[buffer] = storage
    for position, reached in enumerate(happens_before(plan)):
        yield reached, wanted[position] - {position}


VERDICTS = ("refused by verify", "found by check", "of them by running", "equivalent", "missed", "accused wrongly")


def verdicts(trial: Trial, mutant: Mutant) -> list[str]:
    """What becomes of a mutant.

    Missed: check does not notice one that is not equivalent. Accused wrongly: one of them notices one that
    the oracle finds as good as the plan.
    """
    try:
        graphir.verify(mutant.plan)
    except VerifyError:
        return [VERDICTS[0]]
    checked, ran, harmless = bool(check(mutant.plan)), trial.running(mutant.plan), trial.oracle(mutant.plan)
    found = [name for name, yes in zip(VERDICTS[1:3], (checked, ran), strict=True) if yes]
    if harmless:
        return [VERDICTS[5], *found] if found else [VERDICTS[3]]
    return found if checked else [VERDICTS[4], *found]


def counts(plan: Plan, share: float = 1.0, seed: int = 0) -> dict[tuple[str, str], Counter[str]]:
    """How many mutants of a plan have each verdict, by kind and change; of a random *share* of them."""
    trial, draw = Trial(plan), random.Random(seed)
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for mutant in mutants(plan, seed):
        if draw.random() < share:
            found[mutant.kind, mutant.change].update(["mutants", *verdicts(trial, mutant)])
    return found
