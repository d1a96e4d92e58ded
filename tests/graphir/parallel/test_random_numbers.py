"""Replicas draw from generators of their own: equal bits in each run, whatever the threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_only import EagerOnly
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphir

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS = 6


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def run(function: Callable[..., Any], *args: Any, replicas: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return EagerOnly(Of(function), list(range(replicas)))(*args)


def dropped(x: Tensor) -> Tensor:
    return F.dropout(F.dropout(x, 0.3) + 1, 0.5)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": dropped,
    "dropout in place": lambda x: F.dropout(x * 1, 0.5, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "rand": lambda x: torch.rand(len(x), 2),
    "rand_like": lambda x: torch.rand_like(x) + torch.randn_like(x),
    "randn": lambda x: torch.randn(len(x)),
    "randint": lambda x: torch.randint(100, (len(x),)),
    "randperm": lambda x: torch.randperm(16)[: len(x)],
    "normal_": lambda x: x.new_empty(len(x)).normal_(),
    "uniform_": lambda x: nn.init.kaiming_uniform_(x.new_empty(len(x), 3)),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: torch.multinomial(torch.ones(len(x), 9), 3),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "native dropout, which takes no generator": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(len(x), 1, 2, -1)] * 3, dropout_p=0.5),
    "a distribution": lambda x: torch.distributions.Gamma(2.0, 1.0).sample((len(x),)),
    "the default generator, by name": lambda x: torch.rand(len(x), generator=torch.default_generator),
}


@pytest.mark.parametrize("name", DRAWS)
def test_two_runs_after_one_seed_give_equal_bits(name: str) -> None:
    x = torch.randn(8, 8)
    first = run(DRAWS[name], x)
    assert all(torch.equal(first, run(DRAWS[name], x)) for _ in range(RUNS))
    assert not torch.equal(first, run(DRAWS[name], x, seed=1))


@pytest.mark.parametrize("name", ["an RNN", "a transformer"])
def test_modules_that_drop_within(name: str) -> None:
    module: nn.Module = nn.GRU(4, 4, 2, dropout=0.5, batch_first=True)
    if name == "a transformer":
        module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    x = torch.randn(6, 3, 4)

    def forward(x: Tensor) -> Tensor:
        y = module(x)
        return y[0] if isinstance(y, tuple) else y

    first = run(forward, x)
    assert all(torch.equal(first, run(forward, x)) for _ in range(RUNS))


def test_masks_do_not_depend_on_timing() -> None:
    x = torch.ones(8, 8)
    found = []
    for late in (None, 0, 4):

        def forward(x: Tensor, rows: Tensor, late: Any = late) -> Tensor:
            if rows[0] == late:
                time.sleep(0.05)
            return dropped(x)

        found.append(run(forward, x, torch.arange(8)))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_successive_calls_and_replicas_draw_other_numbers() -> None:
    wrapped = EagerOnly(Of(lambda x: F.dropout(x, 0.5)), [0, 1])
    x = torch.ones(64, 8)
    first, second = wrapped(x), wrapped(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:32], first[32:])


def test_a_mask_is_that_of_the_step_the_replica_and_the_operator() -> None:
    """The step is one number of torch's generator; the rest is as in a session."""
    x = torch.randn(5, 4)
    ours = run(dropped, x, replicas=3)
    torch.manual_seed(0)
    step = int(torch.randint(2**62, ()))
    shares = []
    for replica, share in enumerate(x.chunk(3)):
        with graphir.seeded(step, replica):
            shares.append(dropped(share))
    assert torch.equal(ours, torch.cat(shares))


def test_within_seeded_the_step_is_its() -> None:
    x = torch.randn(5, 4)
    with graphir.seeded(3):
        ours = EagerOnly(Of(dropped), [0, 1])(x)
    shares = []
    for replica, share in enumerate(x.chunk(2)):
        with graphir.seeded(3, replica):
            shares.append(dropped(share))
    assert torch.equal(ours, torch.cat(shares))


def test_torch_s_generator_gives_one_number_to_a_forward_that_draws_and_none_to_another() -> None:
    x = torch.randn(4, 4)
    before = torch.get_rng_state()
    EagerOnly(Of(torch.tanh), [0, 1])(x)
    assert torch.equal(before, torch.get_rng_state())
    run(dropped, x)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    torch.randint(2**62, ())
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same_numbers_again(reentrant: bool) -> None:
    x = torch.randn(6, 4, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        noisy = F.dropout(x, 0.5)
        return noisy + checkpoint(lambda x: F.dropout(F.dropout(x, 0.5) * 3, 0.2).exp(), x, use_reentrant=reentrant)

    def slope(of: Callable[[Tensor], Tensor]) -> Tensor:
        x.grad = None
        run(of, x).sum().backward()
        assert x.grad is not None
        return x.grad

    def probe(x: Tensor) -> Tensor:
        """The same, with what a checkpoint does to the random state and without a checkpoint."""
        noisy = F.dropout(x, 0.5)
        torch.get_rng_state()
        return noisy + F.dropout(F.dropout(x, 0.5) * 3, 0.2).exp()

    assert torch.equal(slope(forward), slope(probe))


def test_a_replica_that_seeds_draws_what_torch_draws_and_changes_nothing_else() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3, 2)

    def forward(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            assert torch.initial_seed() == 5
            return torch.rand(len(x), 2)

    torch.manual_seed(9)
    before = torch.get_rng_state()
    ours = EagerOnly(Of(forward), [0, 1])(torch.ones(6, 1))
    assert torch.equal(ours, torch.cat([wanted, wanted]))
    torch.manual_seed(9)
    assert torch.equal(before, torch.get_rng_state())


def test_a_state_that_is_restored_gives_the_same_numbers() -> None:
    def forward(x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        first = torch.rand(len(x))
        torch.set_rng_state(state)
        return torch.stack([first, torch.rand(len(x)), torch.rand(len(x))], 1)

    first, again, other = run(forward, torch.ones(6, 1)).unbind(1)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_generators_of_the_user_are_used_as_they_are() -> None:
    def forward(x: Tensor) -> Tensor:
        return torch.rand(len(x), generator=torch.Generator().manual_seed(3))

    wanted = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(run(forward, torch.ones(4, 1)), wanted.repeat(2))


def test_replicas_of_replicas_draw_numbers_of_their_own() -> None:
    inner = EagerOnly(Of(dropped), [0, 1])
    x = torch.ones(16, 8)
    found = [run(inner, x) for _ in range(RUNS)]
    assert all(torch.equal(found[0], other) for other in found)
    assert len({tuple(part.flatten().tolist()) for part in found[0].chunk(4)}) == 4


def test_torch_s_functions_are_torch_s_afterwards() -> None:
    names = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
    before = [getattr(torch, name) for name in names]
    run(dropped, torch.ones(4, 4))
    assert all(getattr(torch, name) is function for name, function in zip(names, before, strict=True))
    assert type(torch) is type(pytest)
