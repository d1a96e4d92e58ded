"""Every model of the zoo trains as in eager PyTorch, bit for bit: captured once, run at two batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from direct import evaluate
from eager import ShareByShare, assert_same_bits, optimizer_tensors, total_loss
from host_only import HOST_ONLY
from idioms import loss_of
from recognisable import numbers_upon_numbers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_rows import Batch, Row
from zoo_text import TEXT
from zoo_timm import TIMM
from zoo_vision import VISION
from zoo_written import WRITTEN

import graphir
from graphir import passes, runtime
from graphir.ir.admitted import admitted
from graphir.ir.program import Program

ROWS: dict[str, Row] = {**WRITTEN, **VISION, **TIMM, **TEXT}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True),
}
"""The for-loop form of torch, and the fused one."""

BY_ADAMW = [*WRITTEN][::6] + [*VISION, *TIMM, *TEXT][::16]
"""Rows that are trained by AdamW, too: an update reads parameters, their gradients and its own state alone."""

AT_ONE_SIZE = (
    *("densenet", "efficientnet v2", "inception v3", "mnasnet", "mobilenet v2", "regnet", "resnext", "deeplab v3"),
    *("swin v2", "timm densenet121", "timm fasternet_t0", "timm lcnet_035", "timm mobilenetv4_conv_small_035"),
    *("timm resnetv2_18", "timm starnet_s050", "timm test_efficientnet_evos", "timm tresnet_m", "timm convmixer"),
    *("timm beit_base_patch16_224", "timm deit_tiny_distilled_patch16_224", "timm resmlp", "timm gmlp"),
    *("timm swinv2_cr_tiny_224", "timm test_vit3", "timm test_byobnet", "timm inception_next_atto", "timm repvit_m0_9"),
    *("timm resnest14d", "timm test_mambaout", "timm poolformer", "bart", "bloom", "gemma3", "vit", "albert"),
)
"""Rows of which others of the same kind follow the batch: captured at one size, in a third of the time."""

CASES = [*((name, "sgd") for name in ROWS), *((name, "adamw") for name in BY_ADAMW)]

SPREAD = ("resnext", "u-net", "dlrm", "vae", "gan", "swin")
"""Rows that are run on replicas, too."""


pytestmark = pytest.mark.usefixtures("one_thread")
"""Kernels this small gain nothing from threads, and lose much where tests run in parallel."""


def model_of(row: Row) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return row.model().train()


def batch_of(row: Row, size: int, step: int) -> Batch:
    """The data of a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + step)
        return row.data(size)


def captured(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer) -> Program:
    """The row's program, whose sizes follow the batch unless the row says otherwise, with gradients handed back."""
    program = capture(row, model, optimizer, row.batch_dims)
    assert (row.fixed and row.fixed in program.covers.fixed) or row.fixed == program.covers.fixed
    assert_names_are_recognisable(program, model)
    return program


def capture(row: Row, model: nn.Module, optimizer: torch.optim.Optimizer, batch_dims: Any) -> Program:
    """The row's program, with gradients handed back."""
    batch = batch_of(row, row.size, 0)
    program = graphir.capture(
        model,
        batch.inputs,
        kwargs=batch.kwargs,
        targets=batch.targets,
        loss=row.loss,
        optimizer=optimizer,
        batch_dims=batch_dims,
    )
    assert not HOST_ONLY & {op.type for op in program.step.ops}
    gradients = [op.inputs[1] for op in program.step.ops if op.phase == "update"]
    step = program.step.with_(external_outputs=(*program.step.external_outputs, *gradients))
    return program.with_(step=step)


def whole(batch: Batch) -> Any:
    """No tensor has a batch dimension."""
    return pytree.tree_map(lambda leaf: None, (batch.inputs, batch.kwargs, batch.targets))


def assert_names_are_recognisable(program: Program, model: nn.Module) -> None:
    """At most one name in a hundred has numbers upon numbers; operators know their module and their line."""
    odd = numbers_upon_numbers(program)
    assert len(odd) <= len(program.step.ops) // 100, odd
    modules = {path for path, _ in model.named_modules()} | {"loss"}
    for op in program.step.ops:
        assert op.module in modules, op
        assert op.source or op.phase == "update", op


def named_gradients(program: Program, model: nn.Module) -> dict[str, Tensor]:
    """Eager PyTorch's gradients under the names that the program gives its own."""
    params = dict(model.named_parameters())
    grads = {op.inputs[1]: params[op.inputs[0]].grad for op in program.step.ops if op.phase == "update"}
    assert sum(p.grad is not None for p in params.values()) == len(grads)
    return {name: grad for name, grad in grads.items() if grad is not None}


def assert_values_lie_as_declared(program: Program, batch: Batch) -> None:
    """Every shape, every stride and every view of a step is what its blob declares."""
    leaves = pytree.tree_leaves(((*batch.inputs, *batch.targets), batch.kwargs))
    arguments = {f.blob: t.clone() for f, t in zip(program.interface.feeds, leaves, strict=True) if f.blob is not None}
    evaluate(program, {name: tensor.clone() for name, tensor in program.state.items()}, arguments)


@pytest.mark.parametrize(("name", "optimizer"), CASES)
def test_training_has_the_bits_of_eager(name: str, optimizer: str) -> None:
    """Two steps at the captured size and one at another, each on data of its own, on both executors.

    Updates read no batch, so that one optimizer's programs are enough to see sizes follow it; those of the other are
    captured at one size, in a third of the time.
    """
    row = ROWS[name]
    model = model_of(row)
    held = OPTIMIZERS[optimizer](model.parameters())
    batch = batch_of(row, row.size, 0)
    if optimizer == "sgd" and name not in AT_ONE_SIZE:
        program = captured(row, model, held)
    else:
        program = capture(row, model, held, whole(batch))
        assert_names_are_recognisable(program, model)
    if optimizer == "sgd":
        assert_values_lie_as_declared(program, batch)
    assert all(admitted(op.type) for op in program.step.ops), "a file of it is read"
    plan = passes.emit(program)
    with (
        runtime.Session(plan, program.state, executor="reference") as reference,
        runtime.Session(plan, program.state, executor="threads") as threads,
    ):
        for step, size in enumerate((row.size, row.size, row.size + (not program.covers.fixed))):
            batch = batch_of(row, size, step)
            arguments = copy.deepcopy((*batch.inputs, *batch.targets)), copy.deepcopy(batch.kwargs)
            held.zero_grad()
            with graphir.seeded(step):
                loss = total_loss(row.loss(model(*batch.inputs, **batch.kwargs), *batch.targets))
                loss.backward()
            expected = named_gradients(program, model)
            held.step()
            assert loss.isfinite()
            for session in (reference, threads):
                assert_same_bits(
                    {"loss": loss_of(session.step(*arguments[0], **arguments[1]))}, {"loss": loss.detach()}, name
                )
                assert_same_bits(session.gradients(), expected, f"gradients of step {step}")
                if step >= 2:
                    assert_same_bits(session.state_dict(), model.state_dict(), f"state after step {step}")
                    ours, theirs = session.optimizer_state_dict(), held.state_dict()
                    assert_same_bits(optimizer_tensors(ours), optimizer_tensors(theirs), f"optimizer of step {step}")


def shares_of(row: Row, batch: Batch, replicas: int) -> list[Batch]:
    """A batch as replicas see it, by torch.chunk's rule."""
    leaves, spec = pytree.tree_flatten(tuple(batch))
    chunks = [leaf.chunk(replicas) if isinstance(leaf, Tensor) else [leaf] * replicas for leaf in leaves]
    return [Batch(*pytree.tree_unflatten([c[i] for c in chunks], spec)) for i in range(replicas)]


@pytest.mark.parametrize("name", SPREAD)
def test_replicas_with_uneven_shares_have_the_bits_of_eager(name: str) -> None:
    """Two replicas, the second half of each shifted to a device of its own."""
    row = ROWS[name]
    model = model_of(row)
    program = captured(row, model, OPTIMIZERS["sgd"](model.parameters()))
    replicated = passes.replicate(program, [0, 1])
    activations = passes.find_activations(replicated)
    shifted = passes.shift_activations(replicated, activations[len(activations) // 2 :], shifts={0: 2, 1: 3})
    shifted = passes.share_storage(passes.inject_copies(shifted))
    assert graphir.certify(replicated, shifted).holds
    eager = ShareByShare(model, row.loss, lambda model: OPTIMIZERS["sgd"](model.parameters()), 2)
    with runtime.Session(passes.emit(shifted), program.state) as session:
        for step in range(3):
            batch = batch_of(row, 2 * row.size + 1, step)
            loss = loss_of(session.step(*batch.inputs, *batch.targets, **batch.kwargs))
            expected = eager.step_on(shares_of(row, batch, 2))
            assert_same_bits({"loss": loss}, {"loss": expected}, f"step {step}")
        for replica, theirs in enumerate(eager.models):
            assert_same_bits(session.state_dict(replica), theirs.state_dict(), f"replica {replica}")
