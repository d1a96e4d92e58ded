"""Which micro-batch a device works on."""

import json

import pytest
import torch
from graphir.runtime import Session
from small import program_of

import graphir
from graphir import passes
from graphir.analysis.overlap import flows, overlap_of
from graphir.analysis.schedule import Interval
from graphir.errors import GraphirError
from graphir.ir.program import Program

TWO_MICRO_BATCHES = """
    input x : f32[2] @gpu:0
    micro_0/a : f32[2] @gpu:0 = aten.neg(x)
    micro_0/a_gpu_1 : f32[2] @gpu:1 = Copy(micro_0/a)
    micro_0/b : f32[2] @gpu:1 = aten.neg(micro_0/a_gpu_1) {phase=backward}
    micro_1/a : f32[2] @gpu:0 = aten.neg(x)
    micro_1/a_gpu_1 : f32[2] @gpu:1 = Copy(micro_1/a)
    micro_1/b : f32[2] @gpu:1 = aten.neg(micro_1/a_gpu_1) {phase=backward}
    output micro_0/b
    output micro_1/b
"""


def test_a_row_shows_what_a_device_does_when():
    found = graphir.overlap(passes.emit(program_of(TWO_MICRO_BATCHES)), [1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    assert found.seconds == 3.0
    assert found.grid == {"gpu:0": "0" * 24 + "1" * 24 + "-" * 24, "gpu:1": "-" * 24 + "a" * 24 + "b" * 24}
    assert found.busy == {"gpu:0": 2.0, "gpu:1": 2.0}
    assert found.bubble == {device: pytest.approx(1 / 3) for device in ("gpu:0", "gpu:1")}
    first, *rows = str(found).splitlines()
    assert first.startswith("overlap of 'small'")
    assert rows[1] == "  gpu:1  " + "-" * 24 + "a" * 24 + "b" * 24 + "  33% idle"


def test_without_operators_nothing_is_idle():
    model = torch.nn.Identity()
    plan = passes.emit(graphir.capture(model, inputs=(torch.ones(2),)))
    assert all(share == 0.0 for share in graphir.overlap(plan).bubble.values())


def test_only_plans_have_an_overlap():
    with pytest.raises(GraphirError, match="overlap takes a Plan, not str"):
        graphir.overlap("plan")  # type: ignore[arg-type]


def test_one_micro_batch_or_one_device_is_no_schedule_to_see():
    one = program_of("input x : f32[2] @gpu:0\nmicro_0/a : f32[2] @gpu:0 = aten.neg(x)\noutput micro_0/a")
    assert not flows(passes.emit(one))
    assert flows(passes.emit(program_of(TWO_MICRO_BATCHES)))


def test_measured_intervals_are_shown_as_predicted_ones_are():
    plan = passes.emit(program_of(TWO_MICRO_BATCHES))
    runs = [n for n, instruction in enumerate(plan.instructions) if instruction.lane == "gpu:1.compute"]
    runs = [n for n in runs if plan.instructions[n].kind == "run"]
    found = overlap_of(plan, {runs[0]: Interval(0.0, 1.0), runs[1]: Interval(3.0, 4.0)})
    assert found.grid["gpu:1"] == "a" * 18 + "-" * 36 + "b" * 18
    assert found.bubble == {"gpu:0": 1.0, "gpu:1": 0.5}


def flowing() -> Program:
    """Four micro-batches through two halves."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    x, loss = torch.ones(8, 8), torch.nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = graphir.capture(model, inputs=(x,), targets=(x,), loss=loss, optimizer=optimizer, accumulate=4)
    return passes.pipeline(passes.inject_copies(passes.shift_modules(program, {"[2:4]": 1})))


def test_estimate_and_traffic_show_the_schedule():
    plan = passes.emit(flowing())
    found, moved = graphir.estimate(plan, executor="threads", profile=None), graphir.traffic(plan)
    assert found.overlap is not None and moved.overlap == graphir.overlap(plan)
    assert found.overlap.seconds == pytest.approx(found.seconds)
    for text, shown in ((str(found), found.overlap), (str(moved), moved.overlap)):
        for device, row in shown.grid.items():
            assert f"\n  {device}  {row}  {shown.bubble[device]:.0%} idle" in text
    assert json.loads(found.to_json())["overlap"]["bubble"] == found.overlap.bubble
    assert json.loads(moved.to_json())["overlap"]["grid"] == moved.overlap.grid


def test_without_micro_batches_nobody_shows_one():
    plan = passes.emit(graphir.capture(torch.nn.Linear(2, 2), inputs=(torch.ones(2, 2),)))
    assert graphir.estimate(plan, executor="serial").overlap is None
    assert "micro-batches" not in str(graphir.estimate(plan, executor="serial")) + str(graphir.traffic(plan))
    assert graphir.traffic(plan.program).overlap is None


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_measured_step_shows_what_was_executed_when(tmp_path, executor):
    program = flowing()
    plan, x = passes.emit(program), torch.ones(8, 8)
    with Session(plan, program.state, binding="cpu", executor=executor) as session:
        with session.measured():
            session.step(x, x)
        report = session.report()
        session.trace(tmp_path / "step.json")
    found = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    about = found["otherData"]["overlap"]
    assert report.overlap is not None and about["measured"] == report.overlap.to_dict()
    assert about["predicted"]["grid"].keys() == about["measured"]["grid"].keys() == {"gpu:0", "gpu:1"}
    assert f"gpu:1  {report.overlap.grid['gpu:1']}  " in str(report)
    assert set("-") < set("".join(report.overlap.grid.values())) <= set("0123abcdu-")
    if executor == "serial":  # one thread: where a device computes, the others do not
        assert sum(report.overlap.busy.values()) <= report.overlap.seconds
    told = {event["args"]["micro_batch"] for event in found["traceEvents"] if "micro_batch" in event.get("args", {})}
    assert told == {0, 1, 2, 3}
