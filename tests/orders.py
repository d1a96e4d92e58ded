"""Orders of passes: seven programs, passes with options that fit them, and the verdict on an order.

A pass of an order is refused in one sentence, and an order that the sentence names works. What the other passes make is
equal to eager PyTorch. Any other outcome is a :class:`Fault`.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from eager import ShareByShare, furthest
from idioms import loss_of
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.errors import PassError, PlacementError
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.parallel import SynchronizedBatchNorm1d

__all__ = ["STEPS", "SUBJECTS", "Fault", "pairs", "random_orders", "run", "verdict"]

TRAINED, ROWS, SHARE = 2, 8, 4
"""Steps that are compared, rows of a batch, and rows at which programs are captured."""

CLOSE = 1e-11
"""How far doubles may be from those of another order of additions."""


class Fault(Exception):
    """An order that is neither equal to eager PyTorch nor refused in a sentence that helps."""


class Tables(nn.Module):
    """Two tables of bags, and a layer on both."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.ModuleList([nn.EmbeddingBag(12, 4, mode="sum"), nn.EmbeddingBag(10, 4, mode="sum")])
        self.top = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, i: Tensor) -> Tensor:
        out: Tensor = self.top(torch.cat([self.t[0](i), self.t[1](i)], 1))
        return out


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.between, self.b = nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 5)
        self.b.weight = self.a.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.b(self.between(self.a(x).relu())).relu())
        return out


def _layers(*first: nn.Module) -> nn.Module:
    """A layer, a block of several, and a layer."""
    return nn.Sequential(nn.Linear(5, 6), nn.Sequential(*first, nn.ReLU(), nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3))


class Subject(NamedTuple):
    """A program, and what its passes are given.

    Attributes:
        model: makes it.
        modules: to place by ``shard``, to shift, and to park or recompute.
        activation: to shift.
        by_share: its reference is eager PyTorch share by share, unless norms are synchronised.
        tables: its input is indices.
        options: how it is captured.
    """

    name: str
    model: Callable[[], nn.Module]
    modules: tuple[str, str, str] = ("0", "1", "1")
    activation: str = "2"
    by_share: bool = False
    tables: bool = False
    options: Callable[[], dict[str, Any]] = dict

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
        if self.tables:
            return torch.randint(10, (rows, 3), generator=generator), y
        return torch.randn(rows, 5, generator=generator, dtype=torch.float64) + seed, y


SUBJECTS = {
    s.name: s
    for s in (
        Subject("batch norm", lambda: _layers(nn.BatchNorm1d(6)), by_share=True),
        Subject("synchronised batch norm", lambda: _layers(SynchronizedBatchNorm1d(6)), by_share=True),
        Subject("dropout", lambda: _layers(nn.Dropout(0.3)), by_share=True),
        Subject("tied weights", Tied, ("between", "between", "between"), "relu_1"),
        Subject("sharded table", Tables, ("t.0", "top[1:3]", "top"), "top.1", tables=True),
        Subject(
            "clipping and GradScaler",
            _layers,
            options=lambda: {"clip_grad_norm": 0.05, "loss_scale": torch.amp.GradScaler("cpu", init_scale=8.0)},
        ),
        Subject("micro-batches", _layers, activation="micro_1/2", options=lambda: {"accumulate": 2}),
    )
}


class Clipping(torch.optim.SGD):
    """SGD with momentum that clips the norm of gradients first."""

    def __init__(self, model: nn.Module, clip: float | None = None) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.clip = clip

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self.clip)
        super().step(closure)


@cache
def _model(name: str) -> nn.Module:
    torch.manual_seed(3)
    return SUBJECTS[name].model().double()


@cache
def captured(name: str) -> Program:
    """A subject's program, captured at one replica's share."""
    subject, model = SUBJECTS[name], _model(name)
    x, y = subject.batch(SHARE, 0)
    return graphir.capture(
        model,
        (x,),
        targets=(y,),
        loss=F.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        **subject.options(),
    )


def _nothing(ctx: object, copy_id: int, replica: passes.Replica) -> None:
    """A callback that edits nothing."""


def run_pass(name: str, step: str, given: Any) -> Any:
    """What a pass, or ``emit``, makes of a program of a subject."""
    placed, shifted, kept = SUBJECTS[name].modules
    target: Any = ("rows", [0, 1]) if SUBJECTS[name].tables else 1
    limits = {"gpu:0": "64 MiB", "gpu:1": "64 MiB"}
    given_to: dict[str, Callable[[], Any]] = {
        "replicate": lambda: passes.replicate(given, [0, 1]),
        "shard": lambda: passes.shard(given, {placed: target}, [0, 1]),
        "replication_callback": lambda: passes.replication_callback(given, _nothing),
        "sync_batch_norm": lambda: passes.sync_batch_norm(given),
        "shift_modules": lambda: passes.shift_modules(given, {shifted: 2}),
        "shift_activations": lambda: passes.shift_activations(given, [SUBJECTS[name].activation], {0: 3}),
        "recompute": lambda: passes.recompute(given, kept),
        "park": lambda: passes.park(given, kept, "cpu"),
        "park state": lambda: passes.park(given, "**.momentum_buffer", "cpu"),
        "balance": lambda: passes.balance(given, limits, topology="h200x8", evaluations=20).program,
        "inject_copies": lambda: passes.inject_copies(given),
        "split_gradients": lambda: passes.split_gradients(given),
        "pipeline": lambda: passes.pipeline(given),
        "share_storage": lambda: passes.share_storage(given),
        "emit": lambda: passes.emit(given),
    }
    return given_to[step]()


STEPS = (
    "replicate", "shard", "replication_callback", "sync_batch_norm", "shift_modules", "shift_activations", "recompute",
    "park", "park state", "balance", "inject_copies", "split_gradients", "pipeline", "share_storage", "emit",
)  # fmt: skip
"""The passes in the order in which they are usually run. State is parked by a pass of its own."""


def stripped(given: Any) -> Any:
    """A program as somebody has it who saved and loaded it, without its history and who made its operators."""
    if not isinstance(given, Program):
        return given
    with tempfile.TemporaryDirectory() as folder:
        given.save(Path(folder) / "program.json")
        loaded = graphir.load(Path(folder) / "program.json")
    init, step = (net.with_(ops=tuple([op._replace(by="") for op in net.ops])) for net in (loaded.init, loaded.step))
    return loaded.with_(init=init, step=step, history=())


class Ran(NamedTuple):
    """What became of an order.

    Attributes:
        made: by the passes that were not refused.
        done: these passes.
        refused: by pass, what its refusal says.
    """

    made: Any
    done: list[str]
    refused: dict[str, str]


def run(name: str, order: Sequence[str], strip: bool) -> Ran:
    """Run the passes of an order one after the other, leaving out those that are refused.

    Raises:
        Fault: a pass raises anything but a refusal in one sentence.
    """
    kept = stripped if strip else lambda given: given
    ran = Ran(kept(captured(name)), [], {})
    for step in order:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # what is worth little here, as parking small states
                made = kept(run_pass(name, step, ran.made))
            ran = ran._replace(made=made, done=[*ran.done, step])
        except (PassError, PlacementError) as e:
            if "invariants are broken" in str(e) or "\n" in e.what or not e.fix:
                raise Fault(f"{step} behind {ran.done}: {e}") from e
            ran.refused[step] = str(e)
        except Exception as e:
            raise Fault(f"{step} behind {ran.done}: {type(e).__name__}: {e}") from e
    return ran


def verdict(name: str, order: Sequence[str], strip: bool = False) -> tuple[int, int]:
    """How many passes of an order ran, with a result that is equal to eager PyTorch's, and how many were refused.

    Args:
        name: of the subject.
        order: the passes.
        strip: strip the program before each pass.

    Raises:
        Fault: the result is another; a refusal is no sentence; or the order that it names is refused, too.
    """
    ran = run(name, order, strip)
    for step in ran.refused:
        _follow(name, [*order[: order.index(step)], step], strip)
    made = ran.made
    for step in ("inject_copies", "emit") if isinstance(made, Program) else ():
        try:
            made = run_pass(name, step, made)
        except Exception as e:
            raise Fault(f"{step} behind {ran.done}: {type(e).__name__}: {e}") from e
    _compare(name, made, ran.done)
    return len(ran.done), len(ran.refused)


def _follow(name: str, order: list[str], strip: bool) -> None:
    """Change an order as its refusals say, until its last pass runs or is refused for another reason than the order.

    Raises:
        Fault: that does not come about.
    """
    step, tried = order[-1], list[list[str]]()
    while order not in tried:
        tried.append(order)
        refused = run(name, order, strip).refused
        named = {late: found for late, said in refused.items() if (found := re.search(r"run (\w+) before (.+)$", said))}
        if step not in refused or step not in named:
            return
        late, found = next(iter(named.items()))
        first = late if late.startswith(found[1]) else found[1]
        rest = [other for other in order if other != first]
        later = tuple(re.findall(r"\w{3,}", found[2]))
        at = next(i for i, other in enumerate(rest) if other.startswith(later))
        order = [*rest[:at], first, *rest[at:]]
    raise Fault(f"{tried[0]}: {refused[step]} does not help: {tried[-1]} is refused, too")


def _compare(name: str, plan: Plan, done: Sequence[str]) -> None:
    """Steps of a plan beside eager PyTorch's.

    Raises:
        Fault: they differ.
    """
    subject, replicas = SUBJECTS[name], len(plan.program.replicas)
    synchronised = any(op.type == "graphir.synchronised_batch_norm" for op in plan.step.ops)
    shares = replicas if subject.by_share and not synchronised else 1
    clip = subject.options().get("clip_grad_norm")
    reference = ShareByShare(_model(name), F.mse_loss, lambda model: Clipping(model, clip), shares)
    exact = subject.by_share and not synchronised and "shard" not in done
    with runtime.Session(plan, captured(name).state, binding="cpu", executor="reference") as session:
        for seed in range(1, TRAINED + 1):
            x, y = subject.batch(ROWS, seed)
            ours, theirs = loss_of(session.step(x, y)), reference.step(x, y)
            if not _same(ours.reshape(()), theirs.reshape(()), exact):
                raise Fault(f"{done}: the loss is {ours.item()!r}, not {theirs.item()!r}")
        for replica in range(replicas):
            state = session.state_dict(replica)
            for key, value in reference.models[replica % shares].state_dict().items():
                if not _same(state[key], value, exact):
                    raise Fault(f"{done}: {key} of replica {replica} is another")


def _same(ours: Tensor, theirs: Tensor, exact: bool) -> bool:
    return torch.equal(ours, theirs) if exact else furthest(ours.double(), theirs.double()) < CLOSE


def pairs() -> Iterator[tuple[str, str]]:
    """Every ordered pair of passes and ``emit``."""
    return product(STEPS, repeat=2)


def random_orders(count: int, seed: int) -> list[tuple[str, list[str]]]:
    """Orders of five to nine passes, each with the name of its subject."""
    rng, names = Random(seed), list(SUBJECTS)
    return [(names[i % len(names)], rng.sample(STEPS[:-1], rng.randint(5, 9))) for i in range(count)]
