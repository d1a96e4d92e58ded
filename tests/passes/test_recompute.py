"""passes.recompute: what is repeated, from what, when, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import models
import nets
import parking
import pytest
import torch
from runnable import batch_of, sgd, step_of, trained
from small import program_of
from torch.utils.checkpoint import checkpoint

import graphir
from graphir import Program, passes, runtime
from graphir.errors import PassError

pytestmark = pytest.mark.usefixtures("one_thread")


def repeated(program: Program) -> list[str]:
    return [op.of for op in program.step.ops if op.by == "recompute" and op.of]


def test_whole_chains_are_repeated_late_from_what_is_kept() -> None:
    program = trained(models.resnet)
    made = passes.recompute(program, ["blocks.0.relu"])
    ops = made.step.ops
    at = [i for i, op in enumerate(ops) if op.by == "recompute"]
    assert repeated(made) == ["blocks.0.bn1", "blocks.0.relu"]
    assert at[1] == at[0] + 1
    assert "blocks.0.relu_again" in ops[at[1] + 1].inputs
    assert ops[at[0]].inputs[0] == "blocks.0.conv1"
    assert {op.phase for op in ops if op.by == "recompute"} == {"backward"}
    assert {op.module for op in ops if op.by == "recompute"} == {"blocks.0.bn1", "blocks.0.relu"}


def test_a_batch_norm_is_repeated_without_its_statistics() -> None:
    made = passes.recompute(trained(models.resnet), ["relu"])
    again = next(op for op in made.step.ops if op.of == "bn1" and op.by == "recompute")
    assert again.inputs == ("conv1", "bn1.weight", "bn1.bias")
    assert (again.operands, again.effects.writes, again.args["training"]) == ("ttt__", (), True)


def test_random_numbers_are_drawn_again() -> None:
    """Dropout's mask is not kept, and the same when it is made again."""
    example, program = models.gpt(dropout=0.5), trained(models.gpt, dropout=0.5)
    made = parking.placed(program, passes.recompute(program, "layers.*"))
    seeds = [op.seed for op in made.step.ops if op.by == "recompute" and op.seed is not None]
    assert seeds
    assert set(seeds) < {op.seed for op in program.step.ops}
    parking.assert_runs_the_same(program, made, [(batch_of(example), {})] * 2)


class Noisy(torch.nn.Module):
    """A layer, and random numbers drawn into memory that nothing has written."""

    def __init__(self, noise: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.noise = torch.nn.Linear(8, 8), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.noise(self.fc(x)))


NOISES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "drop path": lambda x: x * x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8),
    "stochastic depth": lambda x: x * torch.empty([x.shape[0], 1], dtype=x.dtype).bernoulli_(0.8),
    "channels": lambda x: torch.nn.functional.dropout1d(x[:, :, None], 0.2)[:, :, 0],
    "feature alpha": lambda x: torch.nn.functional.feature_alpha_dropout(x[:, :, None], 0.2, True)[:, :, 0],
    "rrelu": lambda x: torch.nn.functional.rrelu(x, training=True),
    "normal": lambda x: x * x.new_empty(x.shape).normal_(),
    "by a view": lambda x: x * torch.empty_like(x).view(-1).uniform_().view(x.shape),
    "exponential": lambda x: x * x.new_empty_strided(x.shape, (1, x.shape[0])).exponential_(),
    "of probabilities": lambda x: x * torch.empty_like(x).bernoulli_(x.sigmoid().detach()),
}


def test_random_numbers_are_drawn_again_into_new_memory() -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), *map(Noisy, NOISES.values()))
    program = step_of(models.Example(model, (x,), (x,), torch.nn.functional.mse_loss))
    again = passes.recompute(program, f"[1:{len(model)}]")
    drawn = {op.of: op for op in again.step.ops if op.by == "recompute" and op.seed is not None}
    assert {op.module for op in drawn.values()} == {str(n + 1) for n in range(len(NOISES))}
    made = parking.placed(program, again)
    assert not graphir.certify(program, made).caveats
    assert parking.peak(made) < 0.5 * parking.peak(program)
    parking.assert_runs_the_same(program, made, [((x, x), {})] * 2, ["serial", "adversarial"])
    needed = graphir.memory(passes.emit(program), threads=1, profile=None).peak["gpu:0"]
    balanced = passes.balance(
        program, {"gpu:0": int(0.7 * needed)}, options=["recompute"], topology="h200x8", evaluations=100
    ).program
    assert any("empty" in of for of in repeated(balanced))


READ = """
    param w : f32[8,8] @gpu:0
    input x : f32[8,8] @gpu:0
    a : f32[8,8] @gpu:0 = aten.mm(x, w)
    e : f32[8,8] @gpu:0 = aten.empty_like(a)
    n : f32[8,8] @gpu:0 = aten.bernoulli.p(e, p=0.5) {seed=0}
    e_t : f32[8,8] strides [1,8] in e @gpu:0 = aten.t(e)
    b : f32[8,8] @gpu:0 = aten.add.Tensor(n, e_t)
    b_grad : f32[8,8] @gpu:0 = aten.mm(b, b) {phase=backward, of=b}
    output b_grad
"""


def test_memory_of_which_something_is_read_is_not_made_again() -> None:
    with pytest.raises(PassError) as refused:
        passes.recompute(program_of(READ), "b")
    assert str(refused.value) == (
        "recompute: aten.empty_like.default cannot be repeated in the backward: "
        "it leaves memory unwritten, of which something is read\n"
        "  at   e : f32[8,8] @gpu:0 = aten.empty_like(a)\n"
        "  fix  keep its result"
    )


class Checkpointed(torch.nn.Module):
    """Blocks one after the other, each under a checkpoint or none."""

    def __init__(self, under: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.GELU()) for _ in range(4)
        ]
        self.h, self.under = torch.nn.ModuleList(layers), under

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.under else block(x)
        return x


def test_the_bits_are_those_of_a_checkpoint() -> None:
    """Of the captured step that is recomputed, of eager PyTorch with a checkpoint, and without."""
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    found = []
    for under in (False, True):
        model = Checkpointed(under)
        optimizer = sgd(model.parameters())
        for step in range(2):
            with graphir.seeded(step):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        found.append(dict(model.state_dict()))
    model = Checkpointed(under=False)
    program = graphir.capture(
        model, (x,), targets=(y,), loss=torch.nn.functional.mse_loss, optimizer=sgd(model.parameters())
    )
    made = parking.placed(program, passes.recompute(program, "h[0:4]"))
    assert parking.peak(made) < parking.peak(program)
    with runtime.Session(passes.emit(made), made.state, binding="cpu") as session:
        session.step(x, y)
        session.step(x, y)
        found.append(session.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name])
        assert torch.equal(value, found[2][name])


@pytest.mark.parametrize(
    ("example", "modules"), [(models.resnet, "blocks.*"), (models.gpt, "layers.*")], ids=["resnet", "gpt"]
)
def test_memory_falls(example: Callable[[], models.Example], modules: str) -> None:
    program = trained(example)
    made = parking.placed(program, passes.recompute(program, modules))
    assert parking.peak(made) < 0.9 * parking.peak(program)
    parking.assert_runs_the_same(program, made, [(batch_of(example()), {})] * 2)


def test_of_a_module_what_others_read_is_kept() -> None:
    made = passes.recompute(trained(models.gpt), "layers.*")
    assert not {"layers.0", "layers.1", "add"} & set(repeated(made))


def test_where_the_forward_ran() -> None:
    program = trained(models.gpt)
    shifted = passes.shift_modules(program, {"layers[1]": "gpu:1"})
    made = passes.recompute(shifted, "layers.*")
    devices = {op.of: op.device for op in made.step.ops if op.by == "recompute" and op.of}
    assert {name.startswith("layers.1") for name, device in devices.items() if device == "gpu:1"} == {True}
    parking.placed(program, made)


def test_random_programs() -> None:
    count = 0
    for seed in range(30):
        program = nets.random_program(seed, ops=40)
        names = []
        for name in parking.saved(program):
            try:
                passes.recompute(program, name)
            except PassError:
                continue
            names.append(name)
        if not names:
            continue
        try:
            again = passes.recompute(program, names)
        except PassError:
            continue
        count += 1
        made = parking.placed(program, again, share=False)
        if seed % 6 == 0:
            given = (nets.example_inputs(program), {})
            parking.assert_runs_the_same(program, made, [given, given], ["threads", "adversarial"])
    assert count > 15


def test_the_pass_round_trips() -> None:
    program = trained(models.resnet)
    made = passes.recompute(program, ["relu", "blocks.*"])
    assert made.history == ('recompute{what=[relu, "blocks.*"]}',)
    assert passes.Pipeline(made.history[0])(program) == made


BODY = """
    param w : f32[8,8] @gpu:0
    buffer m : f32[8,8] @gpu:0
    input x : f32[8,8] @gpu:0
    a : f32[8,8] @gpu:0 = aten.mm(x, m)
    m;1 = aten.add_.Scalar(m, other=1)
    b : f32[8,8] @gpu:0 = aten.tanh(a)
    c : f32[8,8] @gpu:0 = aten.mm(b, w)
    b_grad : f32[8,8] @gpu:0 = aten.mm(c, c) {phase=backward, of=c}
    a_grad : f32[8,8] @gpu:0 = aten.tanh_backward(b_grad, b) {phase=backward, of=b}
    output a_grad
"""


def test_what_was_overwritten_in_between_is_refused() -> None:
    with pytest.raises(PassError) as refused:
        passes.recompute(program_of(BODY), "b")
    assert str(refused.value) == (
        "recompute: aten.mm.default cannot be repeated in the backward: "
        "'m', which it reads, is overwritten in between by aten.add_.Scalar\n"
        "  at   a : f32[8,8] @gpu:0 = aten.mm(x, m)\n"
        "  fix  leave it out"
    )


def test_what_mutates_is_refused() -> None:
    body = BODY.replace("m;1 = aten.add_.Scalar(m, other=1)", "").replace("aten.mm(x, m)", "aten.relu(x)")
    body = body.replace("b : f32[8,8] @gpu:0 = aten.tanh(a)", "b : f32[8,8] in a @gpu:0 = aten.tanh_(a)")
    with pytest.raises(PassError, match=r"overwrite their operands: .*\n  fix  run recompute before share_storage"):
        passes.recompute(program_of(body), "b")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fc.weight", "recompute: 'fc.weight' is state (param), which no operator of the forward makes"),
        ("view", "recompute: 'view' is a view of 'avgpool', which holds the bytes"),
        ("bn1", "recompute: 'bn1' is not read in the backward, so it is freed in the forward anyway"),
        ("x", "recompute: 'x' is an input of the step, which callers hold until it returns"),
        ("blocks[7]", "recompute: program 'resnet' has no blob and no module 'blocks[7]'"),
        ("*.0.relu", "recompute: '*.0.relu' saves nothing for the backward but what other modules read"),
    ],
)
def test_refusals(what: str, message: str) -> None:
    with pytest.raises(PassError) as refused:
        passes.recompute(trained(models.resnet), what)
    assert str(refused.value).startswith(message)
