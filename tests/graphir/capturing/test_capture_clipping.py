"""``clip_grad_norm`` and ``clip_grad_value``: the bits of ``torch.nn.utils``, one replica or several."""

import models
import pytest
import torch
from idioms import Idioms, captured, runs_as_eager
from torch import nn

import graphir
from graphir import passes
from graphir.errors import CaptureError


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def batches(example, sizes=(6, 6, 4)):
    generator, shape = torch.Generator().manual_seed(3), example.inputs[0].shape[1:]
    return [
        (torch.randn(n, *shape, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes
    ]


CLIPS = [{"clip_grad_norm": 0.1}, {"clip_grad_norm": 1e6}, {"clip_grad_value": 0.01}]


@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("optimizer", [adamw, fused, None], ids=["for_loop", "fused", "gradients"])
def test_clipping_has_the_bits_of_torch(clip, optimizer):
    example = models.mlp()
    program = captured(example, optimizer, **clip)
    assert not program.covers.fixed
    runs_as_eager(program, Idioms(example, optimizer, 1, **clip), batches(example), "reference")


@pytest.mark.parametrize("clip", CLIPS[::2], ids=str)
def test_replicas_clip_the_reduced_gradients(clip):
    example = models.mlp()
    program = passes.replicate(captured(example, adamw, **clip), devices=[0, 1])
    runs_as_eager(program, Idioms(example, adamw, 2, **clip), batches(example, (6, 7, 5)))


def moved_for_the_update(**clip):
    """The blobs of a shifted program that are copied for its updates."""
    program = passes.replicate(captured(models.mlp(), adamw, **clip), devices=[0, 1])
    acts = passes.find_activations(program)
    placed = passes.inject_copies(passes.shift_activations(program, acts[len(acts) // 2 :], shifts={0: 2, 1: 3}))
    graphir.certify(program, placed)
    blobs = placed.step.blobs
    updates = [op for op in placed.step.ops if op.type == "graphir.adamw"]
    assert {op.device.index for op in updates} == {0, 1, 2, 3}
    assert all(blobs[op.inputs[0]].device == op.device for op in updates)
    return [blobs[op.outputs[0]] for op in placed.step.ops if op.type == "Copy" and op.phase == "update"]


def test_a_shift_adds_copies_of_norms_and_of_the_coefficient_only():
    before, after = moved_for_the_update(), moved_for_the_update(clip_grad_norm=0.1)
    scalars = [blob for blob in after if blob.shape == ()]
    assert [blob.shape for blob in after if blob.shape != ()] == [blob.shape for blob in before]
    # Of each replica: the norms of fc2.weight's and fc2.bias' gradients, and back the coefficient.
    assert len(scalars) == 2 * 3


def test_names_are_those_of_the_gradients():
    blobs = captured(models.mlp(), adamw, clip_grad_norm=1.0).step.blobs
    assert {"fc1.weight_grad", "fc1.weight_grad.norm", "fc1.weight_grad.clipped", "grad_norms", "grad_norm"} <= set(
        blobs
    )
    update = [op for op in captured(models.mlp(), adamw, clip_grad_value=1.0).step.ops if op.phase == "update"]
    assert update[0].outputs == ("fc1.weight_grad.clipped",) and update[0].module == "fc1"


class Strange(nn.Module):
    """Gradients of two element types, of other layouts than rows, of one tensor, and of parameters that are views."""

    def __init__(self):
        super().__init__()
        self.bf16 = nn.Parameter(torch.randn(5, 4, dtype=torch.bfloat16))
        self.columns = nn.Parameter(torch.randn(4, 5).t())
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return x @ self.columns.t() + (x.bfloat16() @ self.bf16.t()).float() + (self.a + self.b).sum()


@pytest.mark.parametrize("clip", CLIPS[::2], ids=str)
def test_strange_gradients(clip):
    torch.manual_seed(0)
    example = models.Example(Strange(), (torch.randn(6, 4),), (torch.randint(0, 5, (6,)),), nn.functional.cross_entropy)
    program = captured(example, adamw, **clip)
    runs_as_eager(program, Idioms(example, adamw, 1, **clip), batches(example))


def test_only_gradients_of_the_optimizers_parameters_count():
    example = models.mlp()

    def of_fc2(model):
        return torch.optim.SGD(model.fc2.parameters(), lr=0.1)

    program = captured(example, of_fc2, clip_grad_norm=0.1)
    assert "fc1.weight_grad.norm" not in program.step.blobs
    assert program.step.producer("grad_norms").inputs == ("fc2.weight_grad.norm", "fc2.bias_grad.norm")


@pytest.mark.parametrize("name", ["clip_grad_norm", "clip_grad_value", "loss_scale"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), 10**400, True])
def test_a_bound_has_to_be_a_positive_number(name, value):
    with pytest.raises(CaptureError, match=f"{name}={value!r} is not a positive number"):
        captured(models.mlp(), **{name: value})


def test_two_ways_to_clip_are_refused():
    with pytest.raises(CaptureError, match="clip_grad_norm and clip_grad_value are both given"):
        captured(models.mlp(), clip_grad_norm=1.0, clip_grad_value=1.0)


@pytest.mark.parametrize(
    "option", [{"clip_grad_norm": 1.0}, {"clip_grad_value": 1.0}, {"accumulate": 2}, {"loss_scale": 2.0}], ids=str
)
def test_a_forward_only_program_has_none_of_them(option):
    example = models.mlp()
    with pytest.raises(CaptureError, match=f"{next(iter(option))} is given, but no loss"):
        graphir.capture(example.model, example.inputs, **option)


@pytest.mark.parametrize(
    "option", [{"clip_grad_norm": 1.0}, {"clip_grad_value": 1.0}, {"accumulate": 2}, {"loss_scale": 2.0}], ids=str
)
def test_sparse_gradients_go_with_none_of_them(option):
    model = nn.Sequential(nn.Embedding(7, 5, sparse=True))
    example = models.Example(
        model, (torch.arange(6),), (torch.zeros(6, dtype=torch.int64),), nn.functional.cross_entropy
    )
    with pytest.raises(CaptureError, match=f"{next(iter(option))} is given, but '0.weight' has a sparse gradient"):
        captured(example, lambda model: torch.optim.SGD(model.parameters(), lr=0.1), **option)


def test_nothing_to_clip_is_refused():
    example = models.mlp()
    example.model.requires_grad_(False)
    example.model.fc2.bias.requires_grad_(True)
    with pytest.raises(CaptureError, match="no parameter of the optimizer has a gradient"):
        graphir.capture(
            example.model,
            example.inputs,
            targets=example.targets,
            loss=example.loss,
            optimizer=torch.optim.SGD([example.model.fc1.weight], lr=0.1),
            clip_grad_value=1.0,
        )
