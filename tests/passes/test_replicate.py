"""passes.replicate: one copy per device, gradients reduced in replica order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nets
import pytest
from small import two_layers

import graphir
from graphir import passes
from graphir.errors import PassError
from graphir.ir.covers import Covers


def test_text_of_two_replicas(golden: Callable[[str, str], None]) -> None:
    golden("two_layers.replicated", str(passes.replicate(two_layers(), devices=[0, 1]).step))


def test_every_replica_has_its_own_state_and_shares_the_learning_rate() -> None:
    program = passes.replicate(nets.random_program(1), devices=[3, 0])
    assert program.replicas == ("gpu_3/", "gpu_0/")
    names = set(program.step.external_inputs)
    assert {"gpu_3/fc1.weight", "gpu_0/fc1.weight", "lr"} <= names
    assert not any(name.endswith("/lr") for name in names)
    assert program.step.blobs["gpu_3/fc1.weight"].device == "gpu:3"


def test_dimensions_are_each_replicas_own() -> None:
    program = passes.replicate(nets.random_program(1), devices=[0, 1])
    assert set(program.dims) == {"gpu_0/batch", "gpu_1/batch"}
    assert str(program.step.blobs["gpu_1/x"].shape[0]) == "gpu_1/batch"


def test_mean_weighs_by_shares_and_sum_does_not() -> None:
    mean = passes.replicate(nets.random_program(1), devices=[0, 1])
    total = passes.replicate(nets.random_program(1), devices=[0, 1], reduction="sum")
    reduction = next(op for op in mean.step.ops if op.type == "AllReduce")
    assert reduction.args["reduction"] == "mean"
    assert [str(share) for share in reduction.args["shares"]] == ["gpu_0/batch", "gpu_1/batch"]
    assert next(op for op in total.step.ops if op.type == "AllReduce").args == {}


def test_updates_read_reduced_gradients_only() -> None:
    program = passes.replicate(nets.random_program(4), devices=[0, 1, 2])
    reduced = {name for op in program.step.ops if op.type == "AllReduce" for name in op.outputs}
    updates = [op for op in program.step.ops if op.phase == "update"]
    assert updates
    assert all(op.inputs[1] in reduced for op in updates)


def test_gradients_that_are_outputs_are_reduced() -> None:
    program = passes.replicate(nets.random_program(5, mutate=False), devices=[0, 1])
    gradients = [name for name in program.step.external_outputs if program.step.blobs[name].role == "gradient"]
    assert gradients
    assert all(name.endswith("_reduced") for name in gradients)


def test_one_replica_only_gets_its_prefix() -> None:
    program = passes.replicate(two_layers(), devices=[2])
    assert all(op.type != "AllReduce" for op in program.step.ops)
    assert len(program.step.ops) == len(two_layers().step.ops)
    assert {op.device for op in program.step.ops} == {"gpu:2"}


def test_added_operators_say_so() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    assert {op.by for op in program.step.ops if op.outputs[0].startswith("gpu_1/")} == {"replicate"}
    assert {op.by for op in program.step.ops if op.type == "AllReduce"} == {"replicate"}


def test_the_captured_program_is_untouched() -> None:
    program = two_layers()
    before = str(program)
    passes.replicate(program, devices=[0, 1])
    assert str(program) == before


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([0, 1, 0], "device 0 is given more than once\n  fix  give each replica a device of its own"),
        ([], r"devices: no devices\n  fix  give at least one, such as \[0\]"),
        ([0, -1], r"devices\.1: -1 is not a device\n  fix  write 'gpu:0', 'cuda:0' or 0"),
        (["a"], r"devices\.0: 'a' is not a device"),
        ([True, False], "True is not a device"),
        ([0.0], r"0\.0 is not a device"),
        (["cpu"], "cpu:0 is not a gpu"),
        ([0, "gpu:0"], "device 0 is given more than once"),
        (2, "devices: expected a list, not 2\n  fix  options of replicate: devices, reduction"),
        (None, "expected a list, not None\n  fix  options of replicate: devices, reduction"),
    ],
)
def test_bad_devices_are_refused(devices: list[int], message: str) -> None:
    with pytest.raises(PassError, match=message):
        passes.replicate(two_layers(), devices=devices)


def test_devices_are_taken_as_they_are_printed() -> None:
    program = passes.replicate(two_layers(), devices=["gpu:0", 2])
    assert program == passes.replicate(two_layers(), devices=[0, 2])
    assert program.history == ("replicate{devices=[0, 2]}",)


def test_shares_divide_the_rows_of_all_replicas() -> None:
    program = passes.replicate(nets.random_program(1), devices=[2, 0], shares=[1, 3])
    (captured,) = nets.random_program(1).dims.values()
    assert program.shares == (1, 3)
    assert dict(program.dims) == {"gpu_2/batch": captured // 2, "gpu_0/batch": captured * 2 - captured // 2}
    assert program.history == ("replicate{devices=[2, 0], shares=[1, 3]}",)
    assert graphir.parse(str(program)) == program


@pytest.mark.parametrize("text", ["shares=[6, 2]", "shares=[3, 1]"])
def test_shares_are_in_lowest_terms(text: str) -> None:
    program = passes.Pipeline(f"replicate{{devices=[0, 1], {text}}}")(nets.random_program(1))
    assert program == passes.replicate(nets.random_program(1), devices=[0, 1], shares=(3, 1))


@pytest.mark.parametrize("devices", [[0], [0, 1], [3, 1, 2]])
def test_equal_shares_are_none(devices: list[int]) -> None:
    program = passes.replicate(nets.random_program(1), devices=devices, shares=[2] * len(devices))
    assert program == passes.replicate(nets.random_program(1), devices=devices)
    assert program.shares == ()


def test_shares_are_kept_by_the_passes_that_follow() -> None:
    program = passes.replicate(nets.random_program(1), devices=[0, 1], shares=[2, 1])
    shifted = passes.shift_activations(program, passes.find_activations(program)[2:], shifts={1: 2})
    placed = passes.share_storage(passes.inject_copies(shifted))
    assert placed.shares == (2, 1)
    assert graphir.certify(program, placed).holds


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([3, 1, 1], "replicate: shares: 3 shares for 2 devices\n  fix  give each device a positive whole number"),
        ([3, 0], "shares: a share cannot be 0"),
        ([3, True], "shares: a share cannot be True"),
        ([0.75, 0.25], r"shares: a share cannot be 0\.75"),
        ("31", "shares: '31' is not a list of shares"),
        (3, "shares: 3 is not a list of shares"),
        ([100, 1], r"shares=\[100, 1\] divides the 12 rows .* as \[12, 0\], and the last gets none\n  fix  capture"),
    ],
)
def test_bad_shares_are_refused(shares: Any, message: str) -> None:
    program = nets.random_program(1)
    assert dict(program.dims) == {"batch": 6}
    with pytest.raises(PassError, match=message):
        passes.replicate(program, devices=[0, 1], shares=shares)


def test_unlike_shares_of_fixed_sizes_are_refused() -> None:
    for program, reason in (
        (two_layers().with_(covers=Covers(fixed="a view")), "a view"),
        (two_layers(), "no dimension is the batch"),
    ):
        with pytest.raises(PassError, match=rf"so that shares cannot differ: {reason}\n  fix  let its sizes follow"):
            passes.replicate(program, devices=[0, 1], shares=[3, 1])


def spread(devices: list[int], **options: Any) -> graphir.Program:
    return passes.replicate(nets.random_program(1), devices=devices, **options)


@pytest.mark.parametrize(("devices", "shares"), [([0, 1], (3, 1)), ([2, 0, 1], (1, 2, 3))])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_replicas_get_other_shares_as_if_they_had_been_made_with_these(
    devices: list[int], shares: tuple[int, ...], reduction: Any
) -> None:
    made = spread(devices, shares=shares, reduction=reduction)
    for before in (None, shares[::-1]):
        program = spread(devices, shares=before, reduction=reduction)
        again = passes.replicate(program, devices=devices, shares=[2 * share for share in shares], reduction=reduction)
        assert again.with_(history=made.history) == made
        assert again.history == (*program.history, *made.history)


def test_a_program_that_is_placed_gets_other_shares_too() -> None:
    """Behind every pass, the same program as where the shares come first."""
    behind = "shift_activations{activations=[], shifts={1: 2}} | inject_copies | share_storage"
    later = passes.Pipeline(f"{behind} | replicate{{devices=[0, 1], shares=[3, 1]}}")(spread([0, 1]))
    first = passes.Pipeline(behind)(spread([0, 1], shares=[3, 1]))
    assert later.with_(history=first.history) == first
    assert graphir.certify(first, later).holds
    message = r"shares of the batch differ: \[\] before, \[3, 1\] after\n(.*\n)+  fix  certify programs with the same"
    with pytest.raises(graphir.EquivalenceError, match=message):
        graphir.certify(passes.Pipeline(behind)(spread([0, 1])), later)


def test_other_shares_are_refused_as_first_ones_are() -> None:
    program = spread([0, 1])
    for shares, message in (
        ([3, 1, 1], "3 shares for 2 devices"),
        ([3, 0], "a share cannot be 0"),
        ([100, 1], r"divides the 12 rows of 2 replicas as \[12, 0\], and the last gets none"),
        ([1, 1], "is replicated already"),
    ):
        with pytest.raises(PassError, match=message):
            passes.replicate(program, devices=[0, 1], shares=shares)
    fixed = passes.replicate(two_layers().with_(covers=Covers(fixed="a view")), devices=[0, 1])
    with pytest.raises(PassError, match=r"so that shares cannot differ: a view\n  fix  let its sizes follow"):
        passes.replicate(fixed, devices=[0, 1], shares=[3, 1])
    for devices in ([1, 0], [0, 2], [0, 1, 2]):
        with pytest.raises(PassError, match="is replicated already"):
            passes.replicate(program, devices=devices, shares=range(1, len(devices) + 1))
    message = "on these devices, which get other shares alone, not {}\n  fix  {}, or replicate the captured program"
    with pytest.raises(PassError, match=message.format("reduction=sum", "give reduction='mean'")):
        passes.replicate(program, devices=[0, 1], shares=[3, 1], reduction="sum")
    with pytest.raises(PassError, match=message.format("on_replica=.*print", "leave on_replica out")):
        passes.replicate(program, devices=[0, 1], shares=[3, 1], on_replica=print)


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(PassError, match="reduction: Input should be 'mean' or 'sum'"):
        passes.replicate(two_layers(), devices=[0], reduction="max")  # type: ignore[arg-type]


def test_replicating_twice_is_refused() -> None:
    once = passes.replicate(two_layers(), devices=[0, 1])
    with pytest.raises(
        PassError, match=r"is replicated already: .*\n  fix  replicate or shard the captured program once"
    ):
        passes.replicate(once, devices=[0, 1])


def test_replicating_a_shifted_program_is_refused() -> None:
    shifted = passes.shift_activations(two_layers(), ["relu"], shifts={0: 1})
    with pytest.raises(
        PassError,
        match=r"is placed already: .*\n  fix  run replicate before shift_modules, shift_activations or balance",
    ):
        passes.replicate(shifted, devices=[0, 1])


def test_random_programs_verify() -> None:
    for seed in range(15):
        graphir.verify(passes.replicate(nets.random_program(seed), devices=[seed % 3, 5, 3]))
