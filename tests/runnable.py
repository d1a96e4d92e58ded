"""Programs that a session can run, and what tests of sessions share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import models
import torch
from graphir.runtime.executor import Setting
from graphir.runtime.kernels.buffers import Buffer
from profiled_models import Case
from small import program_of
from torch.utils import _pytree

import graphir
from graphir import passes
from graphir.ir.plan import Plan
from graphir.ir.program import Interface, Program, Slot

if TYPE_CHECKING:  # benchmarks run where there is no pytest
    import pytest

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def sgd(params: Iterable[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Momentum SGD."""
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def captured(example: models.Example | Case, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Program:
    """The training step of an example, captured with these options."""
    return graphir.capture(
        example.model,
        inputs=example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=optimizer,
        **options,
    )


def step_of(example: models.Example, **options: Any) -> Program:
    """The training step of an example by momentum SGD."""
    return captured(example, sgd(example.model.parameters()), **options)


@cache
def trained(make: Callable[..., models.Example], accumulate: int = 1, **sizes: Any) -> Program:
    """The training step of the example that *make* makes of *sizes*, by momentum SGD: captured once for all tests."""
    return step_of(make(**sizes), accumulate=accumulate)


def captured_case(case: Case) -> Program:
    """The training step of a case, with its own optimizer."""
    return captured(case, case.optimizer(case.model.parameters(), **case.options))


def batch_of(example: models.Example) -> tuple[torch.Tensor, ...]:
    """What a step on an example is given."""
    return (*example.inputs, *example.targets)


def spread(program: Program, share: bool = True) -> Program:
    """Two replicas on four devices, the second half of the activations shifted, in place where that is safe, unless
    they are not to *share* storages."""
    program = passes.replicate(program, devices=[0, 1])
    acts = passes.find_activations(program)
    program = passes.inject_copies(passes.shift_activations(program, acts[len(acts) // 2 :], shifts={0: 2, 1: 3}))
    return passes.share_storage(program) if share else program


def forward_plan(
    body: str, *inputs: str, output: str, state: dict[str, torch.Tensor] | None = None, **changes: Any
) -> Plan:
    """The plan of a forward step written as text, which takes *inputs* and hands back *output*."""
    structure = _pytree.treespec_dumps(_pytree.tree_structure((inputs, {})))
    interface = Interface(
        arguments=structure,
        feeds=tuple(Slot(name) for name in inputs),
        fetches=(Slot(output),),
        results=_pytree.treespec_dumps(_pytree.tree_structure(0)),
        module_state={name: name for name in state or ()},
    )
    return passes.emit(
        program_of(f"{body}\noutput {json.dumps(output)}", interface=interface, state=state or {}, **changes)
    )


def copy_by(monkeypatch: pytest.MonkeyPatch, copy: Callable[[torch.Tensor, torch.device], Any]) -> None:
    """Let generated code call *copy* for every copy, into a receive buffer or not."""
    monkeypatch.setattr("graphir.runtime.codegen.statements.copy", copy)
    monkeypatch.setattr(Buffer, "receive", lambda buffer, source: copy(source, source.device))


def eager_step(example: models.Example, optimizer: torch.optim.Optimizer, step: int = 0) -> torch.Tensor:
    """One step of plain PyTorch with the random numbers of that step."""
    with graphir.seeded(step):
        optimizer.zero_grad()
        loss = example.loss(example.model(*example.inputs), *example.targets)
        loss.backward()
        optimizer.step()
    return loss.detach()


def setting_of(plan: Plan, *inputs: str, **state: torch.Tensor) -> Setting:
    """What an executor runs a plan on, without a session and its checks."""
    devices = plan.devices
    return Setting(
        plan, state, inputs, dict.fromkeys(devices, torch.device("cpu")), {d: torch.Generator() for d in devices}
    )


def threads_of_sessions() -> list[threading.Thread]:
    """Those that executors have started and not ended."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("graphir-")]


def short_searches(monkeypatch: pytest.MonkeyPatch, evaluations: int) -> None:
    """Searches of compile end after so many evaluations: layers are few, and the default waits for two seconds."""

    def build(cls: Any, **options: Any) -> passes.Pass:
        return passes.build(cls, **({"evaluations": evaluations} if cls is passes.Balance else {}), **options)

    monkeypatch.setattr("graphir.facade.placing.build", build)
    one_search(monkeypatch)


def one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balance searches with all options alone, also where evaluations are the budget: this takes a part of the time
    that is taken with fewer options, too."""
    monkeypatch.setattr("graphir.passes.choice.fewer._with_fewer", lambda _: ())
