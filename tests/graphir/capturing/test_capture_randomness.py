"""Every random operator that models use draws in a captured step what eager PyTorch draws under ``graphir.seeded``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from direct import evaluate, matches_eager
from models import Example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.capturing.isolate import patches
from graphir.capturing.seeded import seeded
from graphir.errors import CaptureError
from graphir.ir.program import Program

Draw = Callable[[Tensor], Tensor]


class Drawing(nn.Module):
    """A linear layer between two uses of a function that draws random numbers."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self.fc, self.draw = nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.fc(self.draw(x)))


def channels(x: Tensor, dims: int) -> Tensor:
    return x.reshape(*x.shape, *[1] * dims).expand(*x.shape, *range(2, 2 + dims))


def drop_path(x: Tensor) -> Tensor:
    """As timm has it: whole samples are dropped."""
    keep = x.new_empty(x.shape[0], 1).bernoulli_(0.6)
    return x * keep.div_(0.6)


def written_in_parts(x: Tensor) -> Tensor:
    noise = torch.zeros_like(x)
    noise[:, :3].uniform_()
    noise[:, 3:].normal_()
    return x * noise


DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout of bf16": lambda x: F.dropout(x.bfloat16(), 0.3).float(),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(channels(x, 1), 0.3, training=True).sum(-1),
    "dropout1d": lambda x: F.dropout1d(channels(x, 1), 0.3).sum(-1),
    "dropout2d": lambda x: F.dropout2d(channels(x, 2), 0.3).sum((-1, -2)),
    "dropout3d": lambda x: F.dropout3d(channels(x, 3), 0.3).sum((-1, -2, -3)),
    "drop path": drop_path,
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x).detach()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_ of tensors": lambda x: x * torch.empty_like(x).bernoulli_(torch.sigmoid(x).detach()),
    "bernoulli_ permuted": lambda x: x * torch.ones(6, x.shape[0]).t().bernoulli_(0.4),
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x * torch.randn(x.shape),
    "randn_like": lambda x: x * torch.randn_like(x),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 5),
    "randint_like from": lambda x: x * torch.randint_like(x, 2, 5),
    "randperm": lambda x: x[:, torch.randperm(6)],
    "randperm of the batch": lambda x: x[torch.randperm(x.shape[0])],
    "normal": lambda x: x * torch.normal(0.0, 1.0, x.shape),
    "normal of tensors": lambda x: x + torch.normal(x.detach(), x.detach().abs()),
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "uniform_ in parts": written_in_parts,
    "exponential_": lambda x: x + torch.empty_like(x).exponential_(),
    "log_normal_": lambda x: x + torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: x + torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: x + torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: x + torch.empty_like(x).random_(0, 7),
    "multinomial": lambda x: x + torch.multinomial(x.detach().softmax(-1), 6),
    "poisson": lambda x: x + torch.poisson(x.detach().exp()),
    "binomial": lambda x: x + torch.binomial(torch.full_like(x, 5.0).detach(), x.detach().sigmoid()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, hard=True),
    "gamma": lambda x: x + torch._standard_gamma(x.detach().exp()),
    "distributions": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "xavier_uniform_": lambda x: x @ nn.init.xavier_uniform_(torch.empty(6, 6)),
    "kaiming_normal_": lambda x: x @ nn.init.kaiming_normal_(torch.empty(6, 6)),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(
        x[..., None, None] * torch.arange(49.0).sin().view(7, 7), 2, output_size=3
    ).sum((-1, -2)),
    "default generator": lambda x: x * torch.rand(x.shape, generator=torch.default_generator),
    "checkpoint": lambda x: checkpoint(lambda y: F.dropout(torch.tanh(y), 0.3), x, use_reentrant=False),  # type: ignore[dict-item, return-value]
}


def example(draw: Draw) -> Example:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Example(Drawing(draw), (torch.randn(4, 6),), (torch.randn(4, 6),), F.mse_loss)


def captured(given: Example) -> Program:
    return capture(given.model, given.inputs, targets=given.targets, loss=given.loss)


def losses(program: Program, given: Example, at: list[tuple[int, int]]) -> list[float]:
    feeds = dict(zip([feed.blob for feed in program.interface.feeds], (*given.inputs, *given.targets), strict=True))
    return [evaluate(program, dict(program.state), feeds, *where)["loss"].item() for where in at]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DRAWS)
def test_captured_steps_draw_what_eager_draws_under_seeded(name: str) -> None:
    given = example(DRAWS[name])
    program = captured(given)
    matches_eager(program, given)
    steps_and_replicas = [(0, 0), (1, 0), (0, 1), (1, 1)]
    found = losses(program, given, steps_and_replicas)
    for loss, (step, replica) in zip(found, steps_and_replicas, strict=True):
        with seeded(step, replica):
            assert given.loss(given.model(*given.inputs), *given.targets).item() == loss
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", ["dropout", "randperm of the batch", "rrelu", "checkpoint"])
def test_sizes_follow_the_batch(name: str) -> None:
    given = example(DRAWS[name])
    program = captured(given)
    assert program.covers.fixed == ""
    matches_eager(program, given, batches=(7,), steps=1)


def test_each_use_has_a_seed_id_of_its_own() -> None:
    seeds = [op.seed for op in captured(example(DRAWS["dropout"])).step.ops if op.seed is not None]
    assert seeds == [0, 1]


def test_a_recomputation_draws_the_numbers_of_its_forward() -> None:
    program = captured(example(DRAWS["checkpoint"]))
    seeds = [(op.phase, op.seed) for op in program.step.ops if op.seed is not None]
    assert sorted(seeds) == [("backward", 1), ("forward", 0), ("forward", 1)]


def test_a_random_state_that_the_step_saved_may_be_restored() -> None:
    def twice(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            first = torch.rand(6)
        return x * (first - torch.rand(6))

    given = example(twice)
    program = captured(given)
    assert [op.seed for op in program.step.ops if op.seed is not None] == [0, 0, 1, 1]
    matches_eager(program, given)


OWN = torch.Generator()
STATE = torch.get_rng_state()


def restored(x: Tensor) -> Tensor:
    torch.set_rng_state(STATE)
    return x * torch.rand(6)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return x * torch.rand(6)


REFUSED: dict[str, tuple[Draw, str]] = {
    "generator": (lambda x: x * torch.rand(6, generator=OWN), "aten.rand.generator draws from a generator of its own"),
    "generator in place": (
        lambda x: x * torch.empty_like(x).bernoulli_(0.5, generator=OWN),
        "aten.bernoulli_.float draws from a generator of its own",
    ),
    "generator by position": (
        lambda x: x * torch.poisson(x.detach().exp(), OWN),
        "aten.poisson.default draws from a generator of its own",
    ),
    "new generator": (
        lambda x: x * torch.rand(6, generator=torch.Generator().manual_seed(1)),
        "aten.rand.generator draws from a generator of its own",
    ),
    "manual_seed": (forked, "the step calls torch.manual_seed"),
    "seed": (lambda x: x * (torch.seed() and 1), "the step calls torch.seed"),
    "initial_seed": (lambda x: x * (torch.initial_seed() % 7), "the step calls torch.initial_seed"),
    "set_rng_state": (restored, "the step restores a random state that it did not save"),
    "native_dropout": (
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        "aten.native_dropout.default draws random numbers but takes no generator",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_seeded_is_refused(name: str) -> None:
    draw, what = REFUSED[name]
    before, functions = torch.get_rng_state(), (torch.manual_seed, torch.set_rng_state)
    with pytest.raises(CaptureError) as caught:
        captured(example(draw))
    assert caught.value.what == what and caught.value.fix
    assert torch.equal(torch.get_rng_state(), before)
    assert (torch.manual_seed, torch.set_rng_state) == functions


def test_eager_generators_stay_their_own_under_seeded() -> None:
    wanted = torch.rand(3, generator=torch.Generator().manual_seed(5))
    with seeded(0):
        assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), wanted)
        first = torch.rand(3)
    with seeded(0):
        assert torch.equal(torch.rand(3), first)  # it took no seed id


def test_numbers_do_not_depend_on_devices_or_threads() -> None:
    given = example(DRAWS["dropout"])
    program = passes.replicate(captured(given), devices=[0, 1])
    found: list[Any] = []
    acts = passes.find_activations(program)
    shifted = passes.shift_activations(program, acts[len(acts) // 2 :], shifts={0: 2, 1: 3})
    shifted = passes.inject_copies(shifted)
    for placed, executor in ((program, "reference"), (program, "threads"), (shifted, "threads")):
        with runtime.Session(passes.emit(placed), placed.state, executor=executor) as session:
            x, y = (t.repeat(2, 1) for t in (*given.inputs, *given.targets))
            found.append([session.step(x, y).item() for _ in range(2)])
    assert found[0] == found[1] == found[2]


def test_contexts_that_overlap_in_threads_leave_torch_as_it_was() -> None:
    own = torch.get_rng_state, torch.set_rng_state
    first, second = seeded(0), seeded(1)
    entered, left = threading.Event(), threading.Event()

    def in_another_thread() -> None:
        with second:
            entered.set()
            left.wait(20)

    thread = threading.Thread(target=in_another_thread)
    with first:
        thread.start()
        assert entered.wait(20)
    left.set()
    thread.join(20)
    assert (torch.get_rng_state, torch.set_rng_state) == own


def test_other_threads_have_torchs_own_random_state_during_a_capture() -> None:
    state, done = torch.get_rng_state(), []

    class Busy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=others)
            thread.start()
            thread.join(20)
            return x.relu()

    def others() -> None:
        torch.set_rng_state(state)
        done.append(torch.initial_seed())

    capture(Busy(), (torch.ones(2),))
    assert done and set(done) == {torch.initial_seed()}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_during_a_capture_has_torchs_own_functions_and_captures() -> None:
    own, inside = torch.manual_seed, threading.Event()

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            time.sleep(0.05)
            return x.relu()

    thread = threading.Thread(target=capture, args=(Slow(), (torch.ones(2),)))
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            with seeded(0):
                same = torch.manual_seed is own
            capture(nn.ReLU(), (torch.ones(2),))
            os._exit(0 if same else 1)
        finally:
            os._exit(2)
    thread.join(20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_process_forked_while_a_thread_enters_seeded_has_its_lock_free() -> None:
    inside = threading.Event()

    def entering() -> None:
        patches.fork_waits_for(patches.LOCK)
        with patches.LOCK:
            inside.set()
            time.sleep(0.05)

    thread = threading.Thread(target=entering)
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        os._exit(0 if patches.LOCK.acquire(timeout=5) else 1)
    thread.join(20)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
