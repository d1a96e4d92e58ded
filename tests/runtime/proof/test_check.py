"""runtime.check: how each kind of finding reads, that emitted plans have none, and that it sees what is left out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import models
import nets
import pytest
import tiny
from graphir.runtime import Session, check
from graphir.runtime.proof.findings import FindingKind
from runnable import captured, sgd, spread

from graphir import passes
from graphir.analysis.values import value_numbers
from graphir.errors import GraphirError, PlanError
from graphir.ir.plan import Event, Instruction, Plan
from graphir.ir.text import parse

NETS = """
  init net small.init {
    param w : f32[4] @gpu:0 = graphir.load(key="w")
    param v : f32[4] @gpu:1 = graphir.load(key="v")
  }
  net small.step {
    param w : f32[4] @gpu:0
    param v : f32[4] @gpu:1
    input x : f32[4] @gpu:0
    output c
  }
"""
INSTRUCTIONS = """
gpu:0.compute: run a : f32[4] @gpu:0 = aten.mul.Tensor(x, w)
gpu:0.compute: record a
gpu:0.compute: run b : f32[4] @gpu:0 = aten.mul.Tensor(x, a)
gpu:0.compute: record b
gpu:0.compute: free x
gpu:1.copy_in: wait a by gpu:0.compute
gpu:1.copy_in: copy a_gpu_1 : f32[4] @gpu:1 <- a
gpu:1.copy_in: wait b by gpu:0.compute
gpu:1.copy_in: copy b_gpu_1 : f32[4] @gpu:1 <- b
gpu:1.copy_in: record b
gpu:0.compute: wait b by gpu:1.copy_in
gpu:0.compute: free a
gpu:0.compute: free b
gpu:1.compute: wait b by gpu:1.copy_in
gpu:1.compute: run output c : f32[4] @gpu:1 = aten.addcmul(v, a_gpu_1, b_gpu_1)
gpu:1.compute: free b_gpu_1
gpu:1.compute: run v;1 = aten.add_.Tensor(v, a_gpu_1) {phase=update}
gpu:1.compute: free a_gpu_1
""".strip().split("\n")


def plan_of(lines: list[str]) -> Plan:
    found = parse(f"plan small on gpu:0, gpu:1 {{{NETS}" + "\n".join(lines) + "\n}")
    assert isinstance(found, Plan)
    return found


SOUND = plan_of(INSTRUCTIONS)
SOUND = SOUND.with_(values=value_numbers(SOUND.program))


def line(text: str) -> int:
    """The first line of the instructions in which *text* stands."""
    return next(i for i, instruction in enumerate(INSTRUCTIONS) if text in instruction)


def without(text: str) -> Plan:
    """The plan less an instruction; its program stays whole."""
    issued = list(SOUND.instructions)
    del issued[line(text)]
    return SOUND.with_(instructions=tuple(issued))


def moved(text: str, to: str) -> Plan:
    """The plan with an instruction before another one."""
    issued, position, target = list(SOUND.instructions), line(text), line(to)
    issued.insert(target - (position < target), issued.pop(position))
    return SOUND.with_(instructions=tuple(issued))


def added(instruction: Instruction, before: str) -> Plan:
    issued = list(SOUND.instructions)
    issued.insert(line(before), instruction)
    return SOUND.with_(instructions=tuple(issued))


def edited(*pairs: tuple[str, str]) -> Plan:
    """The plan whose instructions have other text, under the same value numbers."""
    text = "\n".join(INSTRUCTIONS)
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return plan_of(text.split("\n")).with_(values=SOUND.values)


def received_twice(between: str) -> Plan:
    """``b_gpu_1`` is received where ``a_gpu_1`` was, after these instructions, the last of which is the copy's wait."""
    plan = plan_of(
        f"""
gpu:0.compute: run a : f32[4] @gpu:0 = aten.mul.Tensor(x, w)
gpu:0.compute: run b : f32[4] @gpu:0 = aten.mul.Tensor(x, a)
gpu:0.compute: record b
gpu:0.compute: free x
gpu:1.copy_in: wait b by gpu:0.compute
gpu:1.copy_in: copy a_gpu_1 : f32[4] @gpu:1 <- a
gpu:1.copy_in: record a_gpu_1
gpu:1.compute: wait a_gpu_1 by gpu:1.copy_in
{between.strip()}
gpu:1.copy_in: copy b_gpu_1 : f32[4] @gpu:1 <- b
gpu:1.copy_in: record b_gpu_1
gpu:1.compute: wait b_gpu_1 by gpu:1.copy_in
gpu:1.compute: run output c : f32[4] @gpu:1 = aten.mul.Tensor(d, b_gpu_1)
gpu:1.compute: free d
gpu:1.compute: free b_gpu_1
gpu:0.compute: wait b_gpu_1 by gpu:1.copy_in
gpu:0.compute: free a
gpu:0.compute: free b
""".strip().split("\n")
    )
    return plan.with_(buffers={"a_gpu_1": 0, "b_gpu_1": 0})


def reused(wait: str) -> Plan:
    """The copy's lane waits so for the computation."""
    return received_twice(f"""
gpu:1.compute: run d : f32[4] @gpu:1 = aten.relu(a_gpu_1)
gpu:1.compute: record a_gpu_1
gpu:1.compute: free a_gpu_1
{wait}
""")


def reused_after_a_write(event: str) -> Plan:
    """``a_gpu_1`` is overwritten by the lane that then reads it; the copy waits for one of the two."""
    return received_twice(f"""
gpu:1.compute: run a_gpu_1;1 = aten.add_.Tensor(a_gpu_1, v)
gpu:1.compute: record a_gpu_1;1
gpu:1.compute: run d : f32[4] @gpu:1 = aten.relu(a_gpu_1)
gpu:1.compute: record d
gpu:1.compute: free a_gpu_1
gpu:1.copy_in: wait {event} by gpu:1.compute
""")


HANDED_BACK = """
gpu:1.copy_in: copy x_gpu_1 : f32[4] @gpu:1 <- x
gpu:1.copy_in: record x_gpu_1
gpu:1.compute: wait x_gpu_1 by gpu:1.copy_in
gpu:1.compute: run d : f32[4] @gpu:1 = aten.relu(x_gpu_1)
gpu:1.compute: record d
gpu:1.compute: free x_gpu_1
gpu:1.compute: free d
gpu:1.copy_in: wait d by gpu:1.compute
gpu:1.copy_in: copy output c : f32[4] @gpu:1 <- x
gpu:1.copy_in: record c
gpu:0.compute: wait c by gpu:1.copy_in
gpu:0.compute: free x
""".strip().split("\n")


COLLECTIVES = """
gpu:0.copy_in: collective 0 [x_0 : f32[4] @gpu:0, x_1 : f32[4] @gpu:1] = AllReduce([w, v]) {phase=reduce}
gpu:1.copy_in: collective 1 of x_0
gpu:0.copy_in: collective 0 [y_0 : f32[4] @gpu:0, y_1 : f32[4] @gpu:1] = AllReduce([w, v]) {phase=reduce}
gpu:1.copy_in: collective 1 of y_0
gpu:1.copy_in: record y_1
gpu:0.copy_in: record y_0
gpu:0.compute: wait y_0 by gpu:0.copy_in
gpu:1.compute: wait y_1 by gpu:1.copy_in
gpu:0.compute: free x_0
gpu:0.compute: free y_0
gpu:1.compute: free y_1
gpu:1.compute: run output c : f32[4] @gpu:1 = aten.relu(x_1)
gpu:1.compute: free x_1
""".strip().split("\n")


def collectives(*order: int) -> Plan:
    """Two collectives, the first four parts in this order."""
    plan = plan_of(COLLECTIVES)
    return plan.with_(instructions=tuple([plan.instructions[i] for i in order] + list(plan.instructions[4:])))


STATE = """
gpu:0.compute: run t : f32[4] in w @gpu:0 = aten.view(w, size=[4])
gpu:0.compute: record t
gpu:1.copy_in: wait t by gpu:0.compute
gpu:1.copy_in: copy w_gpu_1 : f32[4] @gpu:1 <- t
gpu:1.copy_in: record t
gpu:0.compute: wait t by gpu:1.copy_in
gpu:0.compute: run w;1 = aten.add_.Tensor(w, x) {phase=update}
gpu:0.compute: free x
gpu:1.copy_in: record w_gpu_1
gpu:1.compute: wait w_gpu_1 by gpu:1.copy_in
gpu:1.compute: run output c : f32[4] @gpu:1 = aten.relu(w_gpu_1)
gpu:1.compute: free w_gpu_1
""".strip().split("\n")


def state(less: str = "") -> Plan:
    """A view of state is copied before the state is updated; less one instruction."""
    plan = plan_of(STATE)
    left = [i for i, text in zip(plan.instructions, STATE, strict=True) if not less or less not in text]
    return plan.with_(instructions=tuple(left))


FOREIGN = Instruction("record", "gpu:0.compute", event=Event("b", 0, "gpu:1.copy_in"))

UNSOUND: dict[str, Callable[[], Plan]] = {
    "a read without a wait": lambda: without("copy_in: wait a"),
    "a write without a wait": lambda: state("gpu:0.compute: wait t"),
    "a view read without a wait": lambda: state("gpu:1.copy_in: wait t"),
    "a free without a wait": lambda: without("gpu:0.compute: wait b"),
    "a use after its free": lambda: moved("free b_gpu_1", "run output c"),
    "a free too early": lambda: moved("free a", "copy_in: wait b"),
    "a free of what is freed": lambda: added(SOUND.instructions[line("free x")], "free a"),
    "a free of state": lambda: added(Instruction("free", "gpu:0.compute", storage="w"), "free a"),
    "a free of what is not made": lambda: moved("free b_gpu_1", "copy a_gpu_1"),
    "a free of nothing": lambda: added(Instruction("free", "gpu:0.compute", storage="nothing"), "free a"),
    "no free": lambda: without("free a_gpu_1"),
    "no copy": lambda: without("copy b_gpu_1"),
    "no output": lambda: without("run output c"),
    "another order than the program's": lambda: moved("run v;1", "run output c"),
    "an operator issued twice": lambda: added(SOUND.instructions[line("run v;1")], "free a_gpu_1"),
    "a wait without a record": lambda: without("record a"),
    "a wait before its record": lambda: moved("copy_in: wait b", "record b"),
    "lanes that wait for each other": lambda: moved("gpu:0.compute: wait b", "record b"),
    "a record of another lane's event": lambda: added(FOREIGN, "free a"),
    "collectives in two orders": lambda: collectives(0, 3, 1, 2),
    "a buffer filled too early": lambda: reused("gpu:1.copy_in: record b_gpu_1"),
    "a buffer filled after a write and before a read": lambda: reused_after_a_write("a_gpu_1;1"),
    "a buffer that leaves the step": lambda: plan_of(HANDED_BACK).with_(buffers={"x_gpu_1": 0, "c": 0}),
    "a buffer read after it is filled": lambda: SOUND.with_(buffers={"a_gpu_1": 0, "b_gpu_1": 0}),
    "a redirected copy": lambda: edited(("b_gpu_1 : f32[4] @gpu:1 <- b", "b_gpu_1 : f32[4] @gpu:1 <- a")),
    "another operator": lambda: edited(("(v, a_gpu_1, b_gpu_1)", "(v, b_gpu_1, a_gpu_1)")),
    "state that changes": lambda: edited(
        ("run b :", "run w;1 = aten.add_.Tensor(w, a) {phase=update}\ngpu:0.compute: run b :")
    ),
    "state that does not change": lambda: without("run v;1"),
}


def test_findings_read_as_the_golden_ones(golden: Callable[[str, str], None]) -> None:
    found = [f"# {name}\n" + "\n".join(map(str, check(make()))) for name, make in UNSOUND.items()]
    golden("check.findings", "\n\n".join(found))


def test_plans_that_differ_in_less_are_sound() -> None:
    assert [*check(SOUND), *check(state()), *check(collectives(0, 1, 2, 3)), *check(collectives(1, 0, 3, 2))] == []
    assert check(reused("gpu:1.copy_in: wait a_gpu_1 by gpu:1.compute")) == []
    assert check(reused_after_a_write("d")) == []
    assert check(plan_of(HANDED_BACK).with_(buffers={"x_gpu_1": 0})) == []
    assert check(SOUND.with_(buffers={"a": 0, "b": 0})) == []  # no copy makes them
    assert check(SOUND.with_(values={})) == []


@pytest.mark.parametrize(("event", "kinds"), [("t", ["race"]), ("c", [])])
def test_another_lane_overwrites_only_after_reads_by_the_lane_that_wrote(event: str, kinds: list[str]) -> None:
    plan = plan_of(
        f"""
gpu:1.compute: run t : f32[4] @gpu:1 = aten.relu(v)
gpu:1.compute: record t
gpu:1.compute: run output c : f32[4] @gpu:1 = aten.relu(t)
gpu:1.compute: record c
gpu:1.copy_in: wait {event} by gpu:1.compute
gpu:1.copy_in: copy t;1 <- x
gpu:1.copy_in: free t
gpu:1.copy_in: free x
""".strip().split("\n")
    )
    found = check(plan)
    assert [finding.kind for finding in found] == kinds
    assert all((finding.first, finding.second) == (2, 5) for finding in found)


def test_every_kind_of_finding_has_an_example() -> None:
    kinds = {finding.kind for make in UNSOUND.values() for finding in check(make())}
    assert kinds == set(get_args(FindingKind))


def test_the_finding_names_both_instructions_the_storage_and_the_edge() -> None:
    plan = without("copy_in: wait a")
    (finding,) = check(plan)
    texts = [instruction.kind for instruction in (plan.instructions[finding.first], plan.instructions[finding.second])]
    assert (finding.kind, finding.storage, texts) == ("race", "a", ["run", "copy"])
    assert finding.missing.startswith("a record by gpu:0.compute after #0, and a wait for it by gpu:1.copy_in")
    assert [i["position"] for i in finding.to_json()["instructions"]] == [finding.first, finding.second]


@pytest.mark.parametrize("seed", range(6))
def test_emitted_plans_are_sound(seed: int) -> None:
    assert check(passes.emit(spread(nets.random_program(seed), share=bool(seed % 2)))) == []


def test_whatever_is_left_out_is_found() -> None:
    plan = passes.emit(tiny.moved())
    for position, instruction in enumerate(plan.instructions):
        if instruction.kind in ("record", "wait", "free", "copy"):
            issued = (*plan.instructions[:position], *plan.instructions[position + 1 :])
            assert check(plan.with_(instructions=issued)), instruction


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (Instruction("run", "gpu:0.compute", 99), "instruction 4 executes operator 99, which is not there"),
        (Instruction("run", "gpu:0.compute", -1), "instruction 4 executes operator -1, which is not there"),
        (Instruction("collective", "gpu:0.copy_in", 0, 7), "instruction 4 executes part 7 of an operator with 1"),
        (Instruction("wait", "gpu:0.compute"), "instruction 4 is a wait without an event"),
    ],
)
def test_instructions_that_make_no_sense_are_refused(change: Instruction, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        check(added(change, "free x"))


def test_programs_that_make_no_sense_are_refused() -> None:
    step = SOUND.step
    less = {name: blob for name, blob in step.blobs.items() if name != "a"}
    with pytest.raises(PlanError, match="the plan names a blob 'a', which is not declared"):
        check(SOUND.with_(program=SOUND.program.with_(step=step.with_(blobs=less))))
    odd = {**step.blobs, "a": step.blobs["a"]._replace(strides=3)}
    with pytest.raises(PlanError, match="the values that the plan computes cannot be followed"):
        check(SOUND.with_(program=SOUND.program.with_(step=step.with_(blobs=odd))))
    with pytest.raises(GraphirError, match="check takes a Plan, not Program"):
        check(SOUND.program)  # type: ignore[arg-type]


def test_a_session_refuses_an_unsound_plan_and_shows_the_first_findings() -> None:
    program = tiny.moved()
    plan = passes.emit(program)
    waits = [i for i in plan.instructions if i.kind == "wait"]
    unsound = plan.with_(instructions=tuple(i for i in plan.instructions if i not in waits))
    with pytest.raises(PlanError) as caught:
        Session(unsound, program.state)
    findings = check(unsound)
    assert caught.value.what == f"the plan is not sound: {len(findings)} findings"
    assert str(findings[2]).splitlines()[0] in caught.value.at
    assert f"and {len(findings) - 3} more" in caught.value.at
    assert caught.value.fix == "emit the plan again; runtime.check(plan) lists all findings"


def test_collectives_in_any_other_order_are_findings_or_sound() -> None:
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(passes.inject_copies(passes.replicate(program, [0, 1, 2])))
    for lane in plan.lanes:
        parts = [
            i
            for i, instruction in enumerate(plan.instructions)
            if (instruction.kind, instruction.lane) == ("collective", lane)
        ]
        for one, other in pairwise(parts):
            listed = list(plan.instructions)
            listed[one], listed[other] = listed[other], listed[one]
            found = {finding.kind for finding in check(plan.with_(instructions=tuple(listed)))}
            assert "collective order" in found
