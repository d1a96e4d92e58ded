"""``accumulate``: micro-batches in one program have the bits of the loop that adds up ``param.grad``."""

import models
import pytest
import torch
from idioms import Idioms, captured, runs_as_eager
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError, SessionError


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def resnet(rows):
    """With batch norm, whose statistics advance with each micro-batch, and dropout."""
    return models.resnet(rows, dropout=0.2)


def batches(example, sizes):
    generator, shape = torch.Generator().manual_seed(3), example.inputs[0].shape[1:]
    return [
        (torch.randn(n, *shape, generator=generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes
    ]


@pytest.mark.parametrize("optimizer", [sgd, None], ids=["sgd", "gradients"])
def test_micro_batches_have_the_bits_of_the_loop(optimizer):
    example = resnet(6)
    program = captured(example, optimizer, accumulate=3)
    assert not program.covers.fixed and program.dims == {"batch": 2}
    runs_as_eager(program, Idioms(example, optimizer, 1, accumulate=3), batches(example, (6, 9)), "reference")


def test_uneven_replicas():
    example = resnet(4)
    program = passes.replicate(captured(example, sgd, accumulate=2), devices=[0, 1])
    # Ten rows are five pairs: three for the first replica, two for the second.
    runs_as_eager(program, Idioms(example, sgd, 2, accumulate=2), batches(example, (8, 10)))


class Layouts(nn.Module):
    """Parameters in several layouts, one used twice, one unused, one frozen; the input is overwritten."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.columns = nn.Parameter(torch.randn(4, 4).t())
        self.shared = nn.Parameter(torch.randn(4))
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        x.mul_(0.5)
        x = self.conv(x).mean((2, 3)) * self.shared + self.shared * self.frozen
        return x @ self.columns


def test_layouts_buffers_and_inputs_that_are_overwritten():
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 5, 5), torch.randint(0, 4, (6,))
    example = models.Example(Layouts(), (x,), (y,), nn.functional.cross_entropy)
    program = captured(example, sgd, accumulate=2)
    given = batches(example, (6, 8))
    kept = [(x.clone(), y) for x, y in given]
    runs_as_eager(program, Idioms(example, sgd, 1, accumulate=2), kept, "reference")


def test_names_modules_and_seed_ids():
    program = captured(resnet(4), sgd, accumulate=2)
    step = program.step
    assert {"micro_0/x", "micro_0/conv1", "micro_1/conv1", "micro_1/loss", "loss", "conv1.weight_grad"} <= set(
        step.blobs
    )
    assert "micro_2/conv1" not in step.blobs and "micro_1/add" not in step.blobs
    assert step.producer("micro_1/conv1").module == "conv1"
    assert step.producer("conv1.weight_grad").inputs == ("micro_0/conv1.weight_grad", "micro_1/conv1.weight_grad")
    seeds = [op.seed for op in step.ops if op.seed is not None]
    assert seeds == list(range(len(seeds)))
    first, second = (
        [op.type for op in step.ops if op.outputs[0].startswith(f"micro_{i}/") and "add" not in op.type] for i in (0, 1)
    )
    assert first == second


def test_sums_of_three_are_named():
    blobs = captured(models.mlp(batch=6), sgd, accumulate=3).step.blobs
    assert "micro_1/fc1.weight_grad.sum" in blobs and "micro_1/loss.sum" in blobs
    assert "micro_2/fc1.weight_grad.sum" not in blobs


def test_one_micro_batch_lives_at_a_time():
    def activations(rows, **options):
        return graphir.memory(captured(resnet(rows), sgd, **options)).timeline("gpu:0", "activations").max()

    assert activations(4) <= activations(8, accumulate=2) < 1.2 * activations(4)


def test_a_micro_batch_is_shifted_by_itself():
    program = passes.replicate(captured(models.mlp(batch=6), sgd, accumulate=2), devices=[0])
    assert {"micro_0/relu", "micro_1/relu"} <= set(passes.find_activations(program))
    placed = passes.inject_copies(passes.shift_activations(program, ["micro_1/relu"], shifts={0: 1}))
    graphir.certify(program, placed)
    relus = [placed.step.blobs[f"gpu_0/micro_{i}/relu"].device.index for i in (0, 1)]
    assert relus == [0, 1]


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_micro_batches_is_refused(accumulate):
    with pytest.raises(CaptureError, match=f"accumulate={accumulate!r} is not a number of micro-batches"):
        captured(models.mlp(), accumulate=accumulate)


def test_a_batch_that_does_not_divide_is_refused_by_capture():
    with pytest.raises(CaptureError, match="accumulate=4 does not divide the batch of 6"):
        captured(models.mlp(batch=6), accumulate=4)


def test_a_batch_that_does_not_divide_is_refused_by_a_step():
    program = captured(models.mlp(batch=6), sgd, accumulate=2)
    (x,), (y,) = models.mlp(batch=5)[1:3]
    with runtime.Session(passes.emit(program), program.state) as session:
        with pytest.raises(SessionError, match=r"'x'\) has 5 rows along dimension 0, which 2 micro-batches"):
            session.step(x, y)
        session.step(x[:4], y[:4])
        with pytest.raises(SessionError, match=r"'x'\) has 4 rows, argument 1 \('target'\) 2"):
            session.step(x[:4], y[:2])


def test_without_a_batch_dimension_it_is_refused():
    example = models.mlp()
    with pytest.raises(CaptureError, match="accumulate=2, but no argument has a batch dimension to cut"):
        captured(example, accumulate=2, batch_dims=((None,), {}, (None,)))
