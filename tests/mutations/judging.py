"""What tells two programs apart: running both, at two batch sizes, for five steps each, from equal state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphir.runtime import Session
from graphir.runtime.interface.scatter import Scatter
from graphir.runtime.param_groups import ParamGroups
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir import caffe2, passes
from graphir.errors import CoverageError, GraphirError, PlacementError
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.tensor import byte_view
from mutations.imported import meaning
from mutations.nets_of_caffe2 import Imported
from mutations.running import Running
from mutations.subjects import Subject

__all__ = ["STEPS", "ImportedTrial", "Trial", "change_rates"]

STEPS = 5
_MOST_ROWS = 40
"""Guards are tried at no larger batch."""

Seen = list[tuple[str, Any]]
"""What is seen after a step, by name."""


class Trial:
    """A subject, and what its program gives, against which others are held.

    Where a mutant has the original's interface, the operators of both are executed one by one, and every output and all
    state are compared after every step. Else both are run by sessions, and so is what they give under the users' names:
    results, the module's and the optimizer's state, gradients, and whether they take batches that guards refuse.
    Learning rates change between steps, each group's in its own way.

    Args:
        subject: what steps are given.
        original: the program; the subject's own by default.
    """

    def __init__(self, subject: Subject, original: Program | None = None) -> None:
        self.subject = subject
        self.original = original or subject.program
        self.given = {size: list(self.inputs(size)) for size in subject.sizes}
        self.run = {size: list(self.steps(self.original, size)) for size in subject.sizes}
        self.served: dict[int, list[Seen]] = {}
        for steps in self.run.values():
            assert len(steps) == STEPS, f"{subject.name} cannot be run: {steps[-1]}"

    def inputs(self, size: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        """The dimensions and the inputs of each step, as a session would have them."""
        program = self.original
        scatter, numbers = Scatter(program), ParamGroups(program, program.state)
        for step in range(STEPS):
            dims, shares = scatter.split(*self.subject.batch(size, step))
            yield dims, dict(zip((*scatter.names, *numbers.names), (*shares, *numbers.now()), strict=True))
            change_rates(numbers.groups)

    def differs(self, other: Program) -> bool:
        """Whether anything is different, bit for bit; an error is a difference, too."""
        if _as_called(other) == _as_called(self.original):
            return any(self.apart(self.run[size], self.steps(other, size)) for size in self.subject.sizes)
        return any(self.apart(self.sessions(size), self.session(other, size)) for size in self.sizes())

    def apart(self, wanted: list[Seen], found: Iterator[Seen]) -> bool:
        """Whether two runs differ in a step; the second one ends where they do."""
        return any(not _same(next(found, []), step) for step in wanted)

    def steps(self, program: Program, size: int) -> Iterator[Seen]:
        """What each step gives, by the operators alone."""
        try:
            running = Running(program, program.state)
            for step, (dims, inputs) in enumerate(self.given[size]):
                found = running.step(dims, inputs, step)
                states = {f"state {name}" for name in self.original.step.external_inputs}
                yield [(name, _kept(value)) for name, value in found.items() if name[:6] != "state " or name in states]
        except (GraphirError, RuntimeError, IndexError, TypeError, ValueError) as e:
            yield [("failed", type(e).__name__)]

    def sizes(self) -> list[int]:
        """The subject's, and for each guard one that it refuses, if there is a small one."""
        program, replicas = self.original, len(self.original.replicas)
        refused = []
        for guard in program.covers.guards:
            broken = [n for n in range(1, _MOST_ROWS) if not guard.holds(dict.fromkeys(program.dims, n))]
            refused += broken[:1]
        return list(dict.fromkeys([*self.subject.sizes, *(n * replicas for n in refused)]))

    def sessions(self, size: int) -> list[Seen]:
        """What the original's session gives, kept."""
        if size not in self.served:
            self.served[size] = list(self.session(self.original, size))
            assert len(self.served[size]) == STEPS or self.served[size][-1][0][0] == "not covered", self.served[size]
        return self.served[size]

    def session(self, program: Program, size: int) -> Iterator[Seen]:
        """What a session gives after each step."""
        try:
            with Session(_plan(program), program.state, executor="serial", deadline=None) as session:
                for step in range(STEPS):
                    args, kwargs = self.subject.batch(size, step)
                    yield [*_leaves("result", session.step(*args, **kwargs)), *_state(session, program)]
                    change_rates(session.param_groups)
        except CoverageError:
            yield [("not covered", "")]
        except (GraphirError, RuntimeError, IndexError, TypeError, ValueError) as e:
            yield [("failed", type(e).__name__)]


class ImportedTrial:
    """A Caffe2 net, and what it gives where it can be lowered; else mutants are told from it by what they say.

    Args:
        net: what steps are given.
        step: a ``NetDef``, for that of the net.
        init: another one.
        read: whether mutants are told from it by reading alone.
    """

    def __init__(self, net: Imported, step: Any, init: Any, *, read: bool) -> None:
        self.net, self.read = net, read or net.fed is None
        self.program = net.program(step, init)
        self.meanings = meaning(step), init and meaning(init)
        self.outputs: list[str] = []
        if not self.read:
            known = caffe2.lower(self.program).step.blobs
            wanted = self.program.step.external_outputs or self.program.step.unread
            self.outputs = [name for name in wanted if name in known]
        self.run = [] if self.read else [list(self.steps(step, init, more)) for more in (0, 1)[: 1 + bool(net.fed)]]
        for steps in self.run:
            assert len(steps) == STEPS, f"{net.name} cannot be run: {steps}"

    def differs(self, step: Any, init: Any) -> bool:
        """Whether a mutant is another net, by running it or by reading it."""
        if self.read:
            return self.meanings != (meaning(step), init and meaning(init))
        return any(
            not _same(next(found, []), wanted)
            for more, steps in enumerate(self.run)
            for found in (self.steps(step, init, more),)
            for wanted in steps
        )

    def steps(self, step: Any, init: Any, more: int) -> Iterator[Seen]:
        """What each step gives: what is handed back or left unread, and all state."""
        try:
            program = caffe2.lower(self.net.program(step, init, more), outputs=self.outputs)
            running = Running(program, program.state)
            for number in range(STEPS):
                batch = self.net.batch(number, program)
                found = running.step({}, batch, number)
                handed = [fetch.blob for fetch in program.interface.fetches]
                seen = [(name, found[blob]) for name, blob in zip(self.outputs, handed, strict=True) if blob]
                states = sorted(name for name in found if name[:6] == "state ")  # which have no order
                yield [(name, _kept(value)) for name, value in (*seen, *((name, found[name]) for name in states))]
        except (GraphirError, RuntimeError, IndexError, TypeError, ValueError, KeyError) as e:
            yield [("failed", type(e).__name__)]


def change_rates(groups: Any) -> None:
    """Each group's learning rate, in its own way, as between two steps of a trial."""
    for number, group in enumerate(groups):
        group["lr"] = group["lr"] * (0.9 - 0.2 * number)


def _as_called(program: Program) -> tuple[Any, ...]:
    """All that a session reads of a program beside its operators and what they are declared to make."""
    step = program.step
    inputs = [(name, step.blobs[name].role) for name in step.external_inputs if step.blobs[name].role == "input"]
    sizes = [step.blobs[name].shape for name, _ in inputs]
    return (
        program.interface,
        program.replicas,
        program.covers.guards,
        program.dims,
        step.external_outputs,
        inputs,
        sizes,
    )


def _plan(program: Program) -> Plan:
    try:
        return passes.emit(program)
    except PlacementError:
        return passes.emit(passes.inject_copies(program))


def _leaves(name: str, result: Any) -> Seen:
    leaves, spec = pytree.tree_flatten(result)
    return [(name, str(spec)), *[(name, _kept(leaf)) for leaf in leaves]]


def _state(session: Session, program: Program) -> Seen:
    found: Seen = [("groups", [dict(group) for group in session.param_groups])]
    interface = program.interface
    for replica in range(len(program.replicas)):
        found += _leaves(f"state of replica {replica}", dict(sorted(session.state_dict(replica).items())))
        if interface.optimizers:
            found += _leaves("optimizer", session.optimizer_state_dict(replica))
        if interface.gradients:
            found += _leaves("gradients", dict(sorted(session.gradients(replica).items())))
    return found


def _kept(value: Any) -> Any:
    """A tensor as its shape, element type and bytes, so that it can be compared later; the rest as it is."""
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), str(value.dtype), byte_view(value).numpy().tobytes()


def _same(ours: Seen, theirs: Seen) -> bool:
    return len(ours) == len(theirs) and all(
        name == other and type(a) is type(b) and bool(a == b)
        for (name, a), (other, b) in zip(ours, theirs, strict=True)
    )
