"""passes.park: what leaves, when it comes back, what it costs, and what is refused."""

from __future__ import annotations

import warnings

import models
import nets
import parking
import pytest
import torch
from graphir.passes.trips import Clock, Trip, two_at_a_time
from runnable import batch_of, captured, trained
from small import program_of

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError
from graphir.ir.device import gpu

pytestmark = pytest.mark.usefixtures("one_thread")


def lines(program: Program, by: str = "park") -> list[str]:
    """The operators that a pass made, as text without attributes."""
    names = {op.outputs[0] for op in program.step.ops if op.by == by}
    found = [line.strip() for line in str(program.step).splitlines() if " = " in line]
    return [line.partition(" {")[0] for line in found if line.split()[0].partition(";")[0] in names and "Copy" in line]


STEP = """
    param w : f32[8,8] @gpu:0
    input x : f32[8,8] @gpu:0
    a : f32[8,8] @gpu:0 = aten.relu(x)
    b : f32[8,8] @gpu:0 = aten.mm(a, w)
    a.t : f32[8,8] strides [1,8] in a @gpu:0 = aten.t(a)
    c : f32[8,8] @gpu:0 = aten.mm(b, a.t)
    d : f32[8,8] @gpu:0 = aten.tanh(c)
    c_grad : f32[8,8] @gpu:0 = aten.tanh_backward(d, d) {phase=backward, of=d}
    b_grad : f32[8,8] @gpu:0 = aten.mm(c_grad, a.t) {phase=backward, of=c}
    a_grad : f32[8,8] @gpu:0 = aten.threshold_backward(b_grad, a, threshold=0) {phase=backward, of=a}
    output a_grad
"""


def test_an_activation_leaves_after_its_last_use_and_comes_back_before_its_first() -> None:
    program = program_of(STEP)
    parked = passes.park(program, "a", "gpu:1", ahead=0)
    texts = [line.strip().partition(" {")[0] for line in str(parked.step).splitlines() if " = " in line]
    assert texts[3:] == [
        "c : f32[8,8] @gpu:0 = aten.mm(b, a.t)",
        "a_gpu_1 : f32[8,8] @gpu:1 = Copy(a)",
        "d : f32[8,8] @gpu:0 = aten.tanh(c)",
        "c_grad : f32[8,8] @gpu:0 = aten.tanh_backward(d, d)",
        "a_gpu_0 : f32[8,8] @gpu:0 = Copy(a_gpu_1)",
        "a.t_parked : f32[8,8] strides [1,8] in a_gpu_0 @gpu:0 = aten.t(a_gpu_0)",
        "b_grad : f32[8,8] @gpu:0 = aten.mm(c_grad, a.t_parked)",
        "a_grad : f32[8,8] @gpu:0 = aten.threshold_backward(b_grad, a_gpu_0, threshold=0)",
    ]
    assert graphir.certify(program, parked).holds


def test_ahead_counts_operators_of_the_device() -> None:
    for ahead, after in ((0, "c_grad"), (1, "d"), (5, "a_gpu_1")):
        ops = passes.park(program_of(STEP), "a", 1, ahead=ahead).step.ops
        at = [op.outputs[0] for op in ops].index("a_gpu_0")
        assert ops[at - 1].outputs[0] == after


def test_by_default_a_copy_has_time_to_cross() -> None:
    """A link to the host is slower than one to a peer, so its copies set out earlier."""
    program = trained(models.gpt)
    places = []
    for to in ("gpu:1", "cpu"):
        names = [op.outputs[0] for op in passes.park(program, "layers.1.mlp.1", to).step.ops]
        places.append(names.index("layers.1.mlp.1_gpu_0"))
    needed = [op.outputs[0] for op in passes.park(program, "layers.1.mlp.1", "cpu", ahead=0).step.ops]
    assert places[1] < places[0] < needed.index("layers.1.mlp.1_gpu_0")


def test_state_lives_where_it_is_parked() -> None:
    program = trained(models.mlp)
    parked = passes.park(program, "**.momentum_buffer", "cpu", ahead=0)
    moved = {name for name, blob in parked.step.blobs.items() if blob.role == "state" and blob.device == "cpu:0"}
    assert moved == {name for name, blob in program.step.blobs.items() if blob.role == "state" and not blob.is_view}
    assert {op.device for op in parked.init.ops if op.outputs[0] in moved} == {"cpu:0"}
    name = sorted(moved)[0]
    of_it = [line for line in lines(parked) if line.startswith(name)]
    assert of_it == [
        f"{name}_gpu_0 : {of_it[0].split(' : ')[1]}",
        f"{name};1 = Copy({name}_gpu_0;1)",
    ]
    made = parking.placed(program, parked)
    assert graphir.memory(made).state["gpu:0"] < graphir.memory(program).state["gpu:0"]
    parking.assert_runs_the_same(program, made, [(batch_of(models.mlp()), {})] * 3)


def test_a_parameter_comes_in_for_each_phase() -> None:
    program = trained(models.mlp)
    parked = passes.park(program, "fc2.weight", 1, ahead=0)
    assert [op.phase for op in parked.step.ops if op.by == "park" and op.type == "Copy"] == [
        "forward",
        "backward",
        "update",
        "update",
    ]
    made = parking.placed(program, parked)
    parking.assert_runs_the_same(program, made, [(batch_of(models.mlp()), {})] * 3)


STATE = ["**.exp_avg", "**.exp_avg_sq"]
TRIP = 2 * 64 * (64 + 1) * 4
"""Bytes of Adam's state of a layer of 64 by 64."""


def layers(bias: bool = True) -> models.Example:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias) for _ in range(8)]), torch.randn(4, 64)
    return models.Example(model, (x,), (torch.randn(4, 64),), torch.nn.functional.mse_loss)


def with_adam(example: models.Example) -> Program:
    return captured(example, torch.optim.AdamW(example.model.parameters()))


def saved(before: Program, after: Program) -> int:
    """How much less a plan's first device holds at its peak."""
    found = [graphir.memory(passes.emit(program), profile=None).peak["gpu:0"] for program in (before, after)]
    return found[0] - found[1]


def under_way(program: Program, ahead: int | None = None) -> int:
    """The most bytes that a plan's first device holds at once of what was copied to it."""
    return int(graphir.memory(passes.emit(program, ahead=ahead), profile=None).timeline("gpu:0", "copies").max())


@pytest.mark.parametrize(("to", "bias"), [("gpu:1", False), ("cpu", True)])
def test_state_comes_back_two_trips_at_a_time(to: str, bias: bool) -> None:
    program = with_adam(layers(bias))
    made = passes.inject_copies(passes.park(program, STATE, to))
    assert {op.issue for op in made.step.ops if op.type == "Copy" and op.by == "park"} == {"due", "placed"}
    for ahead in (None, 0, 40):
        assert under_way(made, ahead) <= 2 * TRIP
    assert saved(program, made) > 5.9 * TRIP
    plan = passes.emit(made)
    assert not runtime.check(plan)
    with runtime.Session(plan, made.state, binding="cpu", executor="threads") as session:
        with session.measured():
            session.step(*batch_of(layers(bias)))
        found = {device.device: device for device in session.report().devices}
    assert found["gpu:0"].peak == found["gpu:0"].predicted_peak
    assert graphir.certify(program, made).holds
    parking.assert_runs_the_same(program, made, [(batch_of(layers(bias)), {})] * 2, ["serial", "adversarial"])


def test_replicas_update_as_what_they_keep_elsewhere_comes() -> None:
    """Updates follow their reductions, in any order that the program has; state comes in the program's order."""
    program = passes.replicate(with_adam(layers()), devices=[0, 1])
    made = passes.inject_copies(passes.park(program, STATE, {0: 2, 1: "cpu"}))
    assert under_way(made) <= 2 * TRIP
    assert saved(program, made) > 5.9 * TRIP
    batch = tuple(torch.cat([given, given]) for given in batch_of(layers()))
    parking.assert_runs_the_same(program, made, [(batch, {})] * 2, ["threads", "adversarial"])


def test_parameters_come_in_two_at_a_time_in_each_phase() -> None:
    program = with_adam(layers())
    made = parking.placed(program, passes.park(program, ["**.weight", *STATE], "cpu"))
    for ahead in (None, 0, 40):
        assert under_way(made, ahead) <= 2 * 1.5 * TRIP
    parking.assert_runs_the_same(program, made, [(batch_of(layers()), {})] * 2, ["threads", "adversarial"])


def trip(needed: int, ends: int) -> Trip:
    return Trip(f"s{needed}", needed, 0, ends)


def test_trips_wait_for_the_last_but_one() -> None:
    nbytes = {"s2": 100, "s4": 4, "s6": 100, "s8": 100, "s10": 100, "s12": 100}
    wanted = [(trip(2, 3), 0), (trip(4, 5), 0), (trip(6, 7), 0), (trip(8, 20), 0), (trip(10, 11), 0), (trip(12, 13), 0)]
    places = {one.needed: place for one, place in two_at_a_time(wanted, nbytes.__getitem__)}
    # s4 goes with s2, s8 is under way until 20, and s12 must not wait for it.
    assert places == {2: 0, 4: 0, 6: 0, 8: 5, 10: 7, 12: 11}


def test_a_park_that_saves_little_warns() -> None:
    program = with_adam(layers())
    with pytest.warns(graphir.PassWarning) as found:
        passes.park(program, STATE, "cpu", ahead=100)
    assert [str(warning.message) for warning in found] == [
        "park saves 0 B of the 260.0 KiB that it parks of gpu:0: 260.0 KiB are there at once; "
        "ahead=2 brings them back later"
    ]
    assert found[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes.park(program, STATE, "cpu")
        passes.park(program, STATE, "cpu", ahead=2)
        passes.Pipeline('park{what=["**.exp_avg"], to=cpu}')(program)
    with pytest.warns(graphir.PassWarning, match="of gpu:0, and as little on 1 other device: "):
        passes.park(passes.replicate(trained(models.resnet), devices=[0, 1]), "blocks[1]", "cpu")
    torch.manual_seed(0)
    large = torch.nn.Sequential(*[torch.nn.Embedding(5000, 64), *[torch.nn.Linear(64, 64, False) for _ in range(4)]])
    example = models.Example(large, (torch.arange(4),), (torch.randn(4, 64),), torch.nn.functional.mse_loss)
    with pytest.warns(graphir.PassWarning, match=r"one update reads most of them, and update_there=True runs it where"):
        passes.park(with_adam(example), STATE, "cpu")
    program = nets.random_program(11, ops=40)
    with pytest.warns(
        graphir.PassWarning, match="432 B are there at once; the step reads them together, so leave them out"
    ):
        passes.park(program, parking.saved(program), "gpu:1", ahead=0)


@pytest.mark.parametrize("example", [models.resnet, models.gpt], ids=["resnet", "gpt"])
@pytest.mark.parametrize("to", ["gpu:1", "cpu"])
def test_all_that_is_saved(example: type, to: str) -> None:
    program = trained(example)
    made = parking.placed(program, passes.park(program, parking.saved(program), to, ahead=1))
    assert parking.peak(made) < 0.9 * parking.peak(program)
    parking.assert_runs_the_same(program, made, [(batch_of(example()), {})] * 2)


def test_a_plan_holds_what_its_program_says() -> None:
    """Neither receive buffers nor late frees keep on the device what is parked."""
    program = trained(models.resnet)
    made = parking.placed(program, passes.park(program, "**", 1, ahead=1))
    plan = passes.emit(made, ahead=0)
    assert not any(plan.step.blobs[name].device == "gpu:0" for name in plan.buffers)
    assert parking.peak(made) < parking.peak(made, ahead=8) < parking.peak(program)


def test_each_replica_parks_on_its_own_device() -> None:
    program = passes.replicate(trained(models.resnet), devices=[0, 1])
    parked = passes.park(program, "relu", {0: 2, "gpu:1": "gpu:3"})
    assert parked.history[-1] == "park{what=[relu], to={0: gpu:2, 1: gpu:3}}"
    away = {op.of: op.device for op in parked.step.ops if op.by == "park" and op.phase == "forward"}
    assert away == {"gpu_0/relu": "gpu:2", "gpu_1/relu": "gpu:3"}
    one = passes.park(program, "gpu_1/relu", "cpu")
    assert {op.of for op in one.step.ops if op.by == "park"} == {"gpu_1/relu"}
    made = parking.placed(program, parked)
    x, y = batch_of(models.resnet())
    parking.assert_runs_the_same(program, made, [((x.repeat(2, 1, 1, 1), y.repeat(2)), {})] * 2)


def test_with_shifts_recomputing_and_accumulation() -> None:
    example = models.gpt(batch=2)
    program = trained(models.gpt, accumulate=2, batch=2)
    made = passes.shift_modules(program, {"layers[1]": "gpu:1"})
    made = passes.recompute(made, "layers[0]")
    made = passes.park(made, "layers[1]", {1: 2}, ahead=1)
    made = parking.placed(program, made)
    assert parking.peak(made) < parking.peak(program)
    parking.assert_runs_the_same(program, made, [(batch_of(example), {})] * 2)


def test_readers_elsewhere_read_what_is_there() -> None:
    """A device that has a copy from the forward reads it; one where the blob is parked reads that."""
    body = STEP.replace("b_grad : f32[8,8] @gpu:0", "b_grad : f32[8,8] @gpu:1")
    program = program_of(body)
    parked = passes.park(program, "a", 1, ahead=0)
    reads = {name for op in parked.step.ops for name in op.inputs if op.outputs == ("b_grad",)}
    assert parked.step.blobs[next(n for n in reads if n.startswith("a"))].storage == "a_gpu_1"
    assert graphir.certify(program, passes.inject_copies(parked)).holds


def test_random_programs() -> None:
    """Proved, and with no more memory: what leaves is on the device for a shorter time."""
    parked = 0
    for seed in range(30):
        program = nets.random_program(seed, ops=40)
        names = parking.saved(program)
        if not names:
            continue
        parked += len(names)
        made = parking.placed(program, passes.park(program, names, "gpu:1", ahead=0), share=False)
        before, after = graphir.memory(program, profile=None), graphir.memory(made, profile=None)
        assert after.peak_of_storages("gpu:0") <= before.peak_of_storages("gpu:0"), seed
        if seed % 6 == 0:
            given = (nets.example_inputs(program), {})
            parking.assert_runs_the_same(program, made, [given, given], ["threads", "adversarial"])
    assert parked > 50


def test_traffic_says_why() -> None:
    program = passes.inject_copies(passes.park(trained(models.resnet), "blocks[1]", "cpu"))
    found = graphir.traffic(program)
    assert {str(reason) for copied in found.copies for reason in copied.reasons} == {"park blocks[1]: cpu:0"}
    assert not found.warnings
    assert "because of park blocks[1]: cpu:0" in str(found)


def test_the_pass_round_trips() -> None:
    program = trained(models.resnet)
    parked = passes.park(program, ["relu", "blocks[1]"], "cpu", ahead=3)
    assert parked.history == ('park{what=[relu, "blocks[1]"], to=cpu:0, ahead=3}',)
    assert passes.Pipeline(parked.history[0])(program) == parked


@pytest.mark.parametrize(
    ("what", "to", "message"),
    [
        ("view", 1, "park: 'view' is a view of 'avgpool', which holds the bytes\n  fix  name 'avgpool'"),
        (
            "bn1",
            1,
            "park: 'bn1' is not read in the backward, so it is freed in the forward anyway\n  fix  leave it out",
        ),
        ("x", 1, "park: 'x' is an input of the step, which callers hold until it returns\n  fix  leave it out"),
        ("loss", 1, "park: 'loss' is handed back, so it stays until the step ends\n  fix  leave it out"),
        ("fc_grad", 1, "park: 'fc_grad' is made in the backward, not in the forward\n  fix  name an activation"),
        ("relu", 0, "park: 'relu' is on gpu:0 already\n  fix  park it on another device"),
        ("relu", {1: 2}, "park: 'relu' is on gpu:0, and 'to' says nothing of it\n  fix  add it to 'to'"),
        ("lr", 1, "park: 'lr' is on the host, where parking saves no memory of a gpu\n  fix  leave it out"),
        ("rleu", 1, "park: program 'resnet' has no blob and no module 'rleu'; did you mean 'relu'"),
        ("loss[", 1, "'loss[' is not a pattern of modules"),
    ],
)
def test_refusals(what: str, to: object, message: str) -> None:
    program = trained(models.resnet)
    with pytest.raises(PassError) as refused:
        passes.park(program, what, to)
    assert str(refused.value).startswith(message)


def test_a_device_that_parks_on_itself_is_refused() -> None:
    with pytest.raises(PassError, match="gpu:0 is where it is already\n  fix  give another device"):
        passes.park(trained(models.resnet), "relu", {0: 0})


def test_what_was_put_in_place_is_refused() -> None:
    body = STEP.replace("d : f32[8,8] @gpu:0 = aten.tanh(c)", "d : f32[8,8] in c @gpu:0 = aten.tanh_(c)")
    with pytest.raises(
        PassError, match=r"has operators that overwrite their operands: .*\n  fix  run park before share_storage"
    ):
        passes.park(program_of(body), "c", 1)


def test_state_that_is_not_alone_or_not_used_is_refused() -> None:
    body = STEP.replace("input x", "param v : f32[64] in w @gpu:0\n    param u : f32[8] @gpu:0\n    input x")
    with pytest.raises(PassError, match=r"park: 'w' is given together with its view 'v'\n  fix  leave it out"):
        passes.park(program_of(body), "w", 1)
    with pytest.raises(PassError, match=r"park: no operator of the step uses 'u'\n  fix  leave it out, or shift its"):
        passes.park(program_of(body), "u", 1)


def test_what_is_not_on_a_device_that_parks_is_left() -> None:
    program = passes.replicate(trained(models.resnet), devices=[0, 1])
    parked = passes.park(program, ["relu", "blocks[1]"], {1: "cpu"})
    assert {prefix for op in parked.step.ops if op.by == "park" for prefix in [op.of.partition("/")[0]]} == {"gpu_1"}
    with pytest.raises(PassError) as refused:
        passes.park(program, "blocks[1]", {2: "cpu"})
    assert str(refused.value) == (
        "park: 'blocks[1]' saves nothing for the backward that is not where it would be parked\n"
        "  fix  name a module with saved activations, and another device than theirs"
    )
    text = "park{what=[relu], to={0: gpu:2, 1: cpu:0}, ahead=4}"
    assert str(passes.Pipeline(text)) == text


def test_emit_refuses_a_look_ahead_that_is_none() -> None:
    with pytest.raises(
        PassError, match=r"ahead=-1 is no number of operators\n  fix  give a whole number, 8 by default"
    ):
        passes.emit(trained(models.mlp), ahead=-1)


def test_a_lookup_takes_as_long_as_the_rows_that_it_reads() -> None:
    """The clock by which copies come back does not count a table, of which a lookup reads some rows."""
    body = """
        input table : f32[100000,64] @gpu:0
        input i : i64[8] @gpu:0
        input x : f32[64] @gpu:0
        x1 : f32[64] @gpu:0 = aten.relu(x)
        x2 : f32[64] @gpu:0 = aten.neg(x1)
        rows : f32[8,64] @gpu:0 = aten.embedding(table, i)
        output y : f32[64] @gpu:0 = aten.add.Tensor(x1, x2) {phase=backward}
        output rows
    """
    clock = Clock.of(program_of(body).step, gpu(0), {})
    assert clock.times[3] - clock.times[2] < 100 * 64 * 8
