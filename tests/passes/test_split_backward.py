"""passes.split_backward: a forward and a backward program of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import models
import pytest
import torch
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.errors import PassError


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def joint(model: nn.Module | None = None, replicas: int = 2, requires_grad: bool = True) -> graphir.Program:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(requires_grad)
    program = graphir.capture(model or net(), inputs=(x,), backward=True)
    return passes.replicate(program, range(replicas), reduction="sum") if replicas > 1 else program


def state_of(program: graphir.Program) -> dict[str, Tensor]:
    """A tensor for each blob that ``init`` loads."""
    return {op.outputs[0]: program.state[str(op.args["key"])].clone() for op in program.init.ops}


def run(
    halves: passes.Halves, state: Mapping[str, Tensor], given: Mapping[str, Tensor], executor: str
) -> dict[str, Tensor]:
    """Both programs, one after the other, by hand."""
    known = dict(given)
    for program in halves[:2]:
        function = runtime.Function(passes.emit(program), state, executor=executor)
        known.update(zip(function.outputs, function(program.dims, [known[n] for n in function.inputs], 5), strict=True))
        function.close()
    return known


def test_text(golden: Callable[[str, str], None]) -> None:
    halves = passes.split_backward(joint())
    golden("split.forward", str(halves.forward))
    golden("split.backward", str(halves.backward))


@pytest.mark.parametrize("sums", ["first", "spread"])
@pytest.mark.parametrize("make", [models.mlp, models.resnet, models.gpt])
def test_both_together_compute_what_the_whole_computes(
    make: Callable[..., models.Example], sums: Literal["first", "spread"]
) -> None:
    example = make(4)
    program = graphir.capture(example.model, inputs=example.inputs, backward=True)
    program = passes.replicate(program, [0, 1], reduction="sum")
    halves = passes.split_backward(program, sums)
    generator = torch.Generator().manual_seed(2)
    blobs = {name: program.step.blobs[name] for name in program.step.external_inputs}
    given = {}
    for name, blob in blobs.items():
        if blob.role == "input":
            shape = [program.dims.get(str(size), size) for size in blob.shape or ()]
            floats = torch.randn(shape, generator=generator)
            given[name] = floats if blob.dtype == "f32" else torch.randint(0, 7, shape, generator=generator)
    whole = runtime.Function(passes.emit(program), state_of(program), executor="reference")
    wanted = dict(zip(whole.outputs, whole(program.dims, [given[n] for n in whole.inputs], 5), strict=True))
    for executor in ("reference", "serial", "threads"):
        ours = run(halves, state_of(program), given, executor)
        for name in (*halves.forward.step.external_outputs, *halves.backward.step.external_outputs):
            if name in wanted:
                assert torch.equal(ours[name], wanted[name]), executor
    gradients = [halves.backward.blob_of(name) for name in halves.backward.interface.gradients.values()]
    assert set(gradients) <= set(halves.backward.step.external_outputs)
    assert len(gradients) == len(program.interface.gradients)


def test_nothing_is_computed_twice_and_views_cross_as_their_storages() -> None:
    example = models.gpt(4)
    program = graphir.capture(example.model, inputs=example.inputs, backward=True)
    halves = passes.split_backward(program)
    steps = halves.forward.step, halves.backward.step
    computing = [[op for op in step.ops if not op.effects.shows] for step in (program.step, *steps)]
    assert len(computing[0]) == len(computing[1]) + len(computing[2])
    assert all(program.step.blobs[name].storage == name for name in halves.saved)
    read = {program.step.blobs[name].storage for op in halves.backward.step.ops for name in op.inputs}
    assert set(halves.saved) <= read
    assert not set(halves.saved) & set(program.params)


def test_both_are_sound_and_print_and_parse() -> None:
    for half in passes.split_backward(joint())[:2]:
        assert not runtime.check(passes.emit(half))
        assert graphir.parse(str(half)) == half


def test_sums_are_made_once_each() -> None:
    program = joint()
    for sums, homes in (("first", {"gpu_0/"}), ("spread", {"gpu_0/", "gpu_1/"})):
        backward = passes.split_backward(program, sums).backward
        reductions = [op for op in backward.step.ops if op.type == "AllReduce"]
        assert [len(op.outputs) for op in reductions] == [1] * 6
        assert {backward.interface.placed[name][0] for name in backward.interface.gradients.values()} == homes
        assert not runtime.check(passes.emit(backward))


def test_a_program_of_one_replica() -> None:
    halves = passes.split_backward(joint(replicas=1))
    assert halves.outputs == (0,)
    assert "input" in halves.saved
    assert not any(op.type == "AllReduce" for op in halves.backward.step.ops)


def test_inputs_that_the_backward_does_not_read_do_not_cross() -> None:
    halves = passes.split_backward(joint(nn.Sequential(nn.ReLU(), nn.Linear(4, 3)), replicas=1, requires_grad=False))
    assert halves.saved == ("0",)
    assert halves.backward.step.external_inputs == ("0", "1_grad")


class Overwriting(nn.Module):
    """A forward that overwrites the factor of its own gradient after it has read a clone, or has not."""

    def __init__(self, cloned: bool) -> None:
        super().__init__()
        self.fc, self.cloned = nn.Linear(4, 4), cloned
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.factor.add_(1)
        return self.fc(x) * (self.factor.clone() if self.cloned else self.factor)


def test_what_the_forward_overwrites_is_read_by_no_backward() -> None:
    passes.split_backward(joint(Overwriting(cloned=True)))
    with pytest.raises(PassError) as caught:
        passes.split_backward(joint(Overwriting(cloned=False), replicas=1))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "the backward reads 'factor', which the forward overwrites: the next forward would overwrite it before this "
        "one's backward"
    )
    assert lines[-1] == "  fix  read a copy in the forward (buffer.clone())"


def test_what_is_parked_crosses_where_it_is_parked() -> None:
    """Copies back that begin before the forward ends belong to the backward, and have the bits of what left."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.GELU())])
    x, gradient = torch.randn(64, 16), torch.randn(64, 16)
    captured = graphir.capture(model, inputs=(x,), backward=True)
    parked = passes.inject_copies(passes.park(captured, "[8:12]", "cpu", ahead=6))
    early = [op.outputs[0] for op in parked.step.ops if op.kind == "copy" and op.phase == "forward"]
    halves = passes.split_backward(parked)
    blobs = parked.step.blobs
    assert any(not blobs[name].device.is_host for name in early)
    assert all(blobs[name].device.is_host for name in halves.saved if name in early)
    state = state_of(captured)
    given = {"input": x, str(halves.backward.interface.feeds[0].blob): gradient}
    plain = run(passes.split_backward(captured), state, given, "serial")
    found = run(halves, state, given, "serial")
    for gradients in captured.interface.gradients.values():
        assert torch.equal(found[gradients], plain[gradients])


@pytest.mark.parametrize("options", [{}, {"loss": lambda out: out.sum()}])
def test_programs_without_such_a_backward_are_refused(options: dict[str, Any]) -> None:
    program = graphir.capture(net(), inputs=(torch.randn(6, 4),), **options)
    with pytest.raises(PassError) as caught:
        passes.split_backward(program)
    assert str(caught.value) == (
        "program 'sequential' has no backward that starts from its outputs' gradients\n"
        "  fix  capture the model with backward=True, and without a loss"
    )


def test_what_is_no_program_is_refused() -> None:
    wrong: Sequence[Any] = ("a", 3)
    for given in wrong:
        with pytest.raises(PassError, match="split_backward takes a Program"):
            passes.split_backward(given)
