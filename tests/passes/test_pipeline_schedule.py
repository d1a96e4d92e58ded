"""passes.pipeline: the same bits in an order that overlaps micro-batches, within limits of bytes."""

from __future__ import annotations

import ast
import random
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import models
import pytest
import torch
from micro import assert_same, captured, captured_mlp, captured_resnet, mlp, steps
from torch import nn

import graphir
from graphir import passes
from graphir.analysis.cost import Rates, operator_costs
from graphir.errors import PassError, PipelineWarning
from graphir.ir.program import Program

SCHEDULES = ("gpipe", "1f1b", "zero_bubble")


@cache
def half(parts: int = 4) -> Program:
    """An MLP whose second half is on gpu:1."""
    return passes.inject_copies(passes.shift_modules(captured_mlp(parts), {"[3:6]": 1}))


def seconds(program: Program) -> float:
    """Predicted, on devices for which an operator is a long one."""
    rates = Rates({"f32": 1e9}, 1e9, 1e-6)
    costs = [cost.seconds for cost in operator_costs(program.step, program.dims, lambda _: rates)]
    return graphir.overlap(passes.emit(program), costs).seconds


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_overlap(name: str) -> None:
    before = half()
    after = passes.pipeline(before, name)  # type: ignore[arg-type]
    assert_same(before, after)
    assert seconds(before) / seconds(after) > 1.3


@pytest.mark.parametrize("executor", ["serial", "threads", "reference"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_executor_gives_the_bits_of_the_captured_order(name: str, executor: str) -> None:
    example = mlp()
    inputs = (*example.inputs, *example.targets)
    expected, state = steps(half(), "reference", inputs)
    losses, after = steps(passes.pipeline(half(), name), executor, inputs)  # type: ignore[arg-type]
    assert all(map(torch.equal, losses, expected))
    assert state.keys() == after.keys() and all(torch.equal(after[name], state[name]) for name in state)


def gpt(parts: int) -> models.Example:
    return models.gpt(batch=2 * parts, length=8, width=16, heads=2, layers=4, vocabulary=32, dropout=0.1)


def cuts(rng: random.Random, modules: list[str], devices: int) -> dict[str, int]:
    """A random cut, contiguous or not."""
    while True:
        places = [rng.randrange(devices) for _ in modules]
        if rng.random() < 0.5:
            places.sort()
        if found := {module: place for module, place in zip(modules, places, strict=True) if place}:
            return found


MODELS: dict[str, tuple[Callable[[int], models.Example], list[str]]] = {
    "gpt": (gpt, [*(f"layers[{i}]" for i in range(4)), "norm"]),
    "resnet": (lambda parts: models.resnet(batch=2 * parts), ["conv1", "bn1", "blocks", "avgpool", "fc"]),
    "mlp": (lambda parts: mlp(4 * parts, 16, 5), [f"[{i}]" for i in range(5)]),
}


@pytest.mark.parametrize("seed", range(1, 4))
def test_random_cuts_keep_values_and_limits(seed: int) -> None:
    rng = random.Random(seed)
    make, modules = MODELS[sorted(MODELS)[seed % 3]]
    parts = rng.choice((2, 3, 5))
    clipping = {"clip_grad_norm": 1.0} if rng.random() < 0.5 else {"loss_scale": torch.amp.GradScaler("cpu")}
    program = captured(make(parts), parts, **clipping)
    before = program
    while len(before.step.devices) < 3:  # until something is moved that computes
        before = passes.inject_copies(passes.shift_modules(program, cuts(rng, modules, rng.choice((2, 3)))))
    serial = graphir.memory(passes.emit(before)).peak
    for name in SCHEDULES:
        after = passes.pipeline(before, name)  # type: ignore[arg-type]
        assert_same(before, after)
        assert_same(before, passes.pipeline(after, name))  # type: ignore[arg-type]
        assert passes.pipeline(before, name) == after  # type: ignore[arg-type]
        free = graphir.memory(passes.emit(after)).peak
        share = rng.choice((0.0, 0.3, 0.7))
        limits = {d: int(serial[d] + share * max(0, free[d] - serial[d])) for d in serial if d.startswith("gpu")}
        within = passes.pipeline(before, name, limits=limits)  # type: ignore[arg-type]
        assert_same(before, within)
        peak = graphir.memory(passes.emit(within)).peak
        assert all(peak[device] <= limit for device, limit in limits.items())


def test_more_memory_makes_no_slower_a_step() -> None:
    before = passes.inject_copies(passes.shift_modules(captured(mlp(batch=1024), 8), {"[3:6]": 1}))
    serial = graphir.memory(passes.emit(before)).peak["gpu:0"]
    free = graphir.memory(passes.emit(passes.pipeline(before, "gpipe"))).peak["gpu:0"]
    limits = [int(serial + share * (free - serial)) for share in (0.1, 0.4, 1.2)]
    taken = [seconds(passes.pipeline(before, limits={"gpu:0": n, "gpu:1": n})) for n in limits]
    assert (
        seconds(before) > taken[0] > taken[1] >= 0.95 * taken[2]
    )  # of list schedules, a looser limit may give a slightly longer one


@pytest.mark.parametrize("devices", [2, 4])
def test_limits_of_1f1b_are_no_hindrance_to_zero_bubble(devices: int) -> None:
    """Forwards were let in beside deferred gradients of parameters that did not fit, so that all that was left was one
    micro-batch after the other."""
    example = models.gpt(batch=8, length=16, width=64, heads=2, layers=devices, vocabulary=32)
    cut = {f"layers[{device}]": device for device in range(1, devices)}
    before = passes.inject_copies(passes.shift_modules(captured(example, 4), {**cut, "norm": devices - 1}))
    plain = passes.pipeline(before, "1f1b")
    most = max(n for device, n in graphir.memory(passes.emit(plain)).peak.items() if device.startswith("gpu"))
    limits = {f"gpu:{device}": most for device in range(devices)}
    assert seconds(passes.pipeline(before, limits=limits)) < 0.95 * seconds(plain)


@pytest.mark.parametrize("devices", [2, 4])
def test_limits_that_an_order_keeps_within_leave_it_as_fast(devices: int) -> None:
    """Receive buffers that were needed late in the step broke the limit in the plan, where they are there throughout;
    and what was let in by what it takes at most came too late where all would have fit."""
    example = models.gpt(batch=2 * devices, length=128, width=64, heads=2, layers=devices, vocabulary=32)
    cut = {f"layers[{device}]": device for device in range(1, devices)}
    before = passes.inject_copies(passes.shift_modules(captured(example, devices), {**cut, "norm": devices - 1}))

    def planned(limits: dict[str, int] | None) -> tuple[float, dict[str, int]]:
        plan = passes.emit(passes.pipeline(before, limits=limits))
        return graphir.overlap(plan).seconds, graphir.memory(plan).peak

    free, taken = planned({})
    assert planned({device: n for device, n in taken.items() if device.startswith("gpu")})[0] <= free
    plain = graphir.memory(passes.emit(passes.pipeline(before, "1f1b"))).peak
    fullest = max(n for device, n in plain.items() if device.startswith("gpu"))
    assert planned({f"gpu:{device}": fullest for device in range(devices)})[0] <= planned(None)[0]


def test_zero_bubble_is_no_slower_than_1f1b_with_the_same_limits() -> None:
    """Where little room is left, it lets in a micro-batch less. At the costs at which both orders are found."""
    cut = {"blocks[2:4]": 1, "blocks[4:6]": 2, "avgpool": 2, "fc": 2}
    before = passes.inject_copies(passes.shift_modules(captured(models.resnet(batch=16, blocks=6), 8), cut))
    serial = graphir.memory(passes.emit(before)).peak["gpu:1"]
    free = graphir.memory(passes.emit(passes.pipeline(before, "gpipe"))).peak["gpu:1"]
    for sixth in (0, 1, 3):
        limits = {"gpu:1": serial + (free - serial) * sixth // 6}
        orders = [passes.pipeline(before, name, limits=limits) for name in ("zero_bubble", "1f1b")]  # type: ignore[arg-type]
        taken = [graphir.overlap(passes.emit(order)).seconds for order in orders]
        assert taken[0] <= taken[1]


def test_limits_that_nothing_keeps_are_refused_with_the_least() -> None:
    with pytest.raises(PassError) as e:
        passes.pipeline(half(), limits={"gpu:0": "20 KiB"})
    first, *_, last = str(e.value).splitlines()
    assert first == "no order by 'zero_bubble' of the micro-batches keeps within 20.0 KiB on gpu:0"
    assert last.startswith("  fix  the least that can is limits={'gpu:0': ")
    least = int(last.rpartition(": ")[2].rstrip("}"))
    after = passes.pipeline(half(), limits={"gpu:0": least})
    assert graphir.memory(passes.emit(after)).peak["gpu:0"] <= least


class TwiceCalled(nn.Module):
    """Layers that are called twice, and a weight that two of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))
        self.c.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(torch.relu(self.b(self.a(x)))) + self.a(self.b(x))
        return y


@cache
def twice_called() -> Program:
    """In eight micro-batches, each layer on a device of its own."""
    torch.manual_seed(0)
    example = models.Example(TwiceCalled(), (torch.randn(16, 16),), (torch.randn(16, 16),), nn.functional.mse_loss)
    return passes.inject_copies(passes.shift_modules(captured(example, 8), {"c": 1, "b": 2}))


@pytest.mark.parametrize("gpus", [(5964, 3622, 2626), (9405, 2858, 4357), (9429, 958, 7361)])
def test_the_least_that_a_refusal_names_works(gpus: tuple[int, int, int]) -> None:
    """What the nearest order holds was named, which was not found again within that."""
    before = twice_called()
    limits = {f"gpu:{device}": nbytes for device, nbytes in enumerate(gpus)}
    with pytest.raises(PassError) as e:
        passes.pipeline(before, limits=limits)
    named = ast.literal_eval(e.value.fix.partition("limits=")[2])
    after = passes.pipeline(before, limits={**limits, **named})
    peak = graphir.memory(passes.emit(after)).peak
    assert all(peak[device] <= nbytes for device, nbytes in {**limits, **named}.items())


@pytest.mark.parametrize("gpus", [(12978, 3504, 8282), (10720, 4320, 9235)])
def test_zero_bubble_is_no_slower_than_any_1f1b_within_the_limits(gpus: tuple[int, int, int]) -> None:
    """The 1F1B that has no limits, and keeps within them, was not looked at."""
    before = twice_called()
    limits = {f"gpu:{device}": nbytes for device, nbytes in enumerate(gpus)}
    orders = [passes.pipeline(before, name, limits=limits) for name in ("zero_bubble", "1f1b")]  # type: ignore[arg-type]
    taken = [graphir.overlap(passes.emit(order)).seconds for order in orders]
    assert taken[0] <= 1.01 * taken[1]


def test_a_forward_that_fits_nowhere_goes_ahead_in_the_end() -> None:
    """Where every device waits, it was let in and turned back for ever."""
    serial = graphir.memory(passes.emit(half(8))).peak
    limits = {device: serial[device] for device in ("gpu:0", "gpu:1")}
    after = passes.pipeline(half(8), limits=limits)
    assert_same(half(8), after)
    peak = graphir.memory(passes.emit(after)).peak
    assert all(peak[device] <= limit for device, limit in limits.items())


def test_zero_bubble_takes_about_what_1f1b_takes_on_its_fullest_device() -> None:
    plain, bubble = (
        graphir.memory(passes.emit(passes.pipeline(half(8), name))).peak for name in ("1f1b", "zero_bubble")
    )
    assert max(bubble.values()) <= max(plain.values())


def test_replicas_are_pipelines_side_by_side() -> None:
    program = passes.replicate(captured_mlp(), [0, 1])
    moved = passes.inject_copies(passes.shift_modules(program, {"[3:6]": {0: 2, 1: 3}}))
    for name in SCHEDULES:
        after = passes.pipeline(moved, name)  # type: ignore[arg-type]
        assert_same(moved, after)
        assert seconds(after) < 0.85 * seconds(moved)


def test_in_flight_bounds_what_a_device_has_begun() -> None:
    peaks = [
        graphir.memory(passes.emit(passes.pipeline(half(8), "gpipe", in_flight=n))).peak["gpu:0"] for n in (1, 2, 4, 8)
    ]
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


def test_a_training_batch_norm_holds_no_micro_batches_together() -> None:
    program = captured_resnet()
    backward = [op for op in program.step.ops if op.type == "aten.native_batch_norm_backward.default"]
    assert backward and all("running" not in name for op in backward for name in op.inputs)
    moved = passes.inject_copies(passes.shift_modules(program, {"blocks": 1, "fc": 1}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes.pipeline(moved)


def with_running_statistics(program: Program) -> Program:
    """The program as an earlier graphir captured it: each batch norm's backward takes the running statistics."""
    step, statistics, ops = program.step, {}, []
    for op in step.ops:
        if op.type == "aten.native_batch_norm.default":
            statistics[op.outputs[0]] = tuple(op.makes)[3:]
        if op.type == "aten.native_batch_norm_backward.default":
            (mean, m), (var, v) = statistics[op.of]
            op = op._replace(
                inputs=(*op.inputs[:3], mean, var, *op.inputs[3:]), operands=None, input_versions=(0, 0, 0, m, v, 0, 0)
            )
        ops.append(op)
    return program.with_(step=step.with_(ops=tuple(ops)))


def test_what_holds_micro_batches_together_is_named() -> None:
    program = captured_resnet()
    earlier = with_running_statistics(program)
    assert graphir.certify(earlier, program).holds  # what is not read is no part of a value
    moved = passes.inject_copies(passes.shift_modules(earlier, {"blocks": 1, "fc": 1}))
    with pytest.warns(PipelineWarning) as found:
        after = passes.pipeline(moved)
    text = str(found[0].message)
    assert text.startswith("'bn1.running_mean' holds the micro-batches of 'resnet' together: ")
    assert found[0].filename == __file__
    assert_same(moved, after)


def test_its_text_is_read_back() -> None:
    text = "pipeline{schedule=gpipe, limits={gpu:0: 25165824}, in_flight=3}"
    step = passes.build(passes.PipelineSchedule, schedule="gpipe", limits={0: "24 MiB"}, in_flight=3)
    assert passes.Pipeline(str(step)).passes == (step,) and passes.Pipeline(text).passes == (step,)


REFUSED: list[tuple[Callable[[], Program], dict[str, Any], str]] = [
    (
        lambda: passes.inject_copies(passes.shift_modules(captured_mlp(1), {"[3:6]": 1})),
        {},
        "pipeline: program 'sequential' has one micro-batch: there is nothing to overlap\n"
        "  fix  capture it with accumulate=4, or as many micro-batches as you like",
    ),
    (
        lambda: captured_mlp(),
        {},
        "pipeline: program 'sequential' has all layers of a replica on one device: there is nothing to overlap\n"
        "  fix  run shift_modules or shift_activations, then inject_copies, before pipeline",
    ),
    (
        lambda: passes.replicate(captured_mlp(), [0, 1]),
        {},
        "pipeline: program 'sequential' has all layers of a replica on one device: there is nothing to overlap",
    ),
    (
        lambda: passes.shift_modules(captured_mlp(), {"[3:6]": 1}),
        {},
        "pipeline: program 'sequential' has no copies between its devices: its order is that of the operators and the "
        "copies\n"
        "  fix  run inject_copies before pipeline",
    ),
    (
        half,
        {"schedule": "1f2b"},
        "pipeline: schedule: unknown schedule '1f2b'; did you mean '1f1b'?\n"
        "  fix  schedules: 'zero_bubble', '1f1b', 'gpipe'",
    ),
    (
        half,
        {"in_flight": 0},
        "pipeline: in_flight: 0 micro-batches cannot be in flight\n  fix  give a whole number from 1 up",
    ),
    (
        half,
        {"limits": {"gpu:7": 1 << 30}},
        "limits has 'gpu:7', on which the step has nothing\n  in   program 'sequential'\n"
        "  fix  its devices: gpu:0, gpu:1, cpu:0",
    ),
    (
        half,
        {"limits": {"gpu:0": "much"}},
        "pipeline: limits.gpu:0: 'much' is not a number of bytes\n  fix  write a whole number from 1 up",
    ),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_it_refuses(make: Callable[[], Program], options: dict[str, Any], message: str) -> None:
    program = make()
    with pytest.raises(PassError) as e:
        passes.pipeline(program, **options)
    assert str(e.value).startswith(message)
