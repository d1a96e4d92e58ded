"""In-place operators, writes through views, and buffers: the program has the bits of eager PyTorch all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from direct import matches_eager
from graphir.runtime import Session
from models import Example
from runnable import sgd
from torch import Tensor, nn

from graphir import passes
from graphir.capturing.capture import capture
from graphir.ir.program import Program
from graphir.ir.verify import verify


class Body(nn.Module):
    """Two linear layers around a function of their features and of the module."""

    def __init__(self, body: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(self, self.fc1(x))
        return self.fc2(out)


def example(body: Callable[[Body, Tensor], Tensor]) -> Example:
    torch.manual_seed(0)
    return Example(Body(body), (torch.randn(4, 6),), (torch.randint(3, (4,)),), F.cross_entropy)


def captured(body: Callable[[Body, Tensor], Tensor]) -> tuple[Program, Example]:
    given = example(body)
    optimizer = sgd(given.model.parameters())
    program = capture(given.model, given.inputs, targets=given.targets, loss=given.loss, optimizer=optimizer)
    return program, given


def relu_in_place(m: Body, h: Tensor) -> Tensor:
    return F.relu_(h) + (h + 1).mul_(0.5)


def slice_written(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out[:, 1:3] = h[:, :2].sin()
    return out


def column_selected(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out[:, 0] += 1
    return out * out[:, :1]


def view_of_all_written(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out.view(-1).relu_()
    return out


def view_of_view_written(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out[:, 2:6][:, ::2].mul_(3)
    return out


def view_read_after_base_was_written(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    left = out[:, :4]
    out.tanh_()
    return out + torch.cat([left, left], 1)


def transposed_written(m: Body, h: Tensor) -> Tensor:
    out = (h * 2).t()
    out.exp_()
    return out.t()


def raised_to_powers(m: Body, h: Tensor) -> Tensor:
    out = h.abs().pow_(2.5)
    return (out + 1).pow_(h) * (h.detach() * 3).floor_divide_(h.detach())


def masked_fill(m: Body, h: Tensor) -> Tensor:
    return (h * 2).masked_fill_(h > 0.5, 0.25)


def index_put(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out[:, torch.tensor([0, 2])] = h[:, :2]
    out[h > 1] = 0.5
    return out


def fresh_zeros_filled(m: Body, h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, :4].copy_(h[:, 4:])
    return out + torch.empty_like(h).fill_(2)


def squeezed_in_place(m: Body, h: Tensor) -> Tensor:
    out = (h * 2).unsqueeze(1)
    out.squeeze_(1)
    return out * 2


def promoted_in_place(m: Body, h: Tensor) -> Tensor:
    counts = torch.ones(h.shape, dtype=torch.float64)
    return (h * 2).add_(counts)


def running_mean(m: Body, h: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
    return h - m.mean


def buffer_copied_into(m: Body, h: Tensor) -> Tensor:
    before = m.mean + 1
    m.mean.copy_(h.detach().sum(0))
    return h + before


def buffer_written_through_a_view(m: Body, h: Tensor) -> Tensor:
    m.table[1] += h.detach().mean()
    m.table.view(-1)[:2].zero_()
    return h * m.table.sum()


def buffer_view_read_after_a_write(m: Body, h: Tensor) -> Tensor:
    row = m.table[0]
    m.table.add_(1)
    return h * row.sum()


def data_written(m: Body, h: Tensor) -> Tensor:
    out = h.sin()
    out.data.mul_(2)
    return out.cos()


def detached_written(m: Body, h: Tensor) -> Tensor:
    out = h * 2
    out.detach().add_(1)
    return out


def split_and_joined(m: Body, h: Tensor) -> Tensor:
    a, b = h.chunk(2, dim=1)
    return torch.cat([b.clone().neg_(), a], 1)


def input_like_noise(m: Body, h: Tensor) -> Tensor:
    return h + torch.rand_like(h) + torch.randn(h.shape) + torch.zeros_like(h).uniform_(0, 1)


def drawn_and_dropped(m: Body, h: Tensor) -> Tensor:
    h = F.dropout(h, 0.5, inplace=True)
    return F.alpha_dropout(h, 0.2) + F.dropout1d(h.unsqueeze(1), 0.5).squeeze(1)


def dropout_of_a_transposed(m: Body, h: Tensor) -> Tensor:
    return F.dropout(h.t(), 0.5).t()


def statistics_dropped(m: Body, h: Tensor) -> Tensor:
    return F.batch_norm(h, torch.zeros(8), torch.ones(8), training=True)


def statistics_read(m: Body, h: Tensor) -> Tensor:
    var = torch.ones(8)
    h = F.batch_norm(h, m.mean, var, training=True)
    return h * var + m.mean


def statistics_in_one_buffer(m: Body, h: Tensor) -> Tensor:
    rows = m.table[:2]
    return F.batch_norm(h[:, :4], rows[0], rows[1].abs_(), training=True, momentum=0.3).repeat(1, 2) + h


BODIES = [
    statistics_dropped,
    statistics_read,
    statistics_in_one_buffer,
    raised_to_powers,
    relu_in_place,
    slice_written,
    column_selected,
    view_of_all_written,
    view_of_view_written,
    view_read_after_base_was_written,
    transposed_written,
    masked_fill,
    index_put,
    fresh_zeros_filled,
    squeezed_in_place,
    promoted_in_place,
    running_mean,
    buffer_copied_into,
    buffer_written_through_a_view,
    buffer_view_read_after_a_write,
    data_written,
    detached_written,
    split_and_joined,
    input_like_noise,
    drawn_and_dropped,
    dropout_of_a_transposed,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_mutation_has_the_bits_of_eager(body: Callable[[Body, Tensor], Tensor]) -> None:
    program, given = captured(body)
    verify(program)
    matches_eager(program, given, sgd, batches=(6,) if not program.covers.fixed else ())


def viewed_before_it_was_transposed(m: nn.Module, x: Tensor) -> Tensor:
    out = x * 2
    column = out[:, 0]
    out.t_()
    out.mul_(2)
    return out.t() + column.unsqueeze(1)


def viewed_before_it_was_squeezed(m: nn.Module, x: Tensor) -> Tensor:
    out = x * 2
    out.unsqueeze_(0)
    inner = out[0]
    out.squeeze_(0)
    inner[:, 1].mul_(3)
    return out * inner.cos()


@pytest.mark.parametrize("body", [viewed_before_it_was_transposed, viewed_before_it_was_squeezed])
def test_a_view_stays_one_of_what_its_tensor_was(body: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = type("Viewing", (nn.Module,), {"forward": body})()
    program = capture(model, (torch.randn(3, 4),))
    with Session(passes.emit(program), program.state) as session:
        x = torch.randn(5, 4)
        assert torch.equal(session.step(x), model(x))


def test_a_buffer_that_a_module_returns_keeps_its_name() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.count

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counter = Counter()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.counter(x)

    op = capture(Counting(), (torch.randn(4, 3),)).step.ops[0]
    assert (op.outputs, op.output_versions) == (("counter.count",), (1,))


def test_only_state_is_overwritten() -> None:
    for body in BODIES:
        program, _ = captured(body)
        for op in program.step.ops:
            for output, _ in op.effects.writes:
                name = op.outputs[output]
                assert program.step.blobs[name].role in ("param", "buffer", "state"), (body.__name__, name)


def test_the_value_before_an_in_place_operator_has_its_own_gradient() -> None:
    def body(m: Body, h: Tensor) -> Tensor:
        out = h * 2
        out.relu_()
        return out

    program, _ = captured(body)
    gradients = program.step.gradients
    assert gradients["mul"] == "mul_grad" and gradients["relu"] == "relu_grad"
    made = {name: op.type for op in program.step.ops for name in op.outputs}
    assert made["mul"] == "aten.mul.Tensor" and made["relu"] == "aten.relu.default"
    assert made["mul_grad"] == "aten.threshold_backward.default"


def test_a_buffer_takes_a_new_version_with_each_write() -> None:
    program, _ = captured(running_mean)
    written = [op.output_versions for op in program.step.ops if "mean" in op.outputs]
    assert written == [(1,), (2,)]


class Pixel(nn.Module):
    """Convolves a picture of one pixel, whose channels lie last in memory, after *change* has overwritten it."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.norm, self.conv = nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc(x)[:, None].permute(0, 2, 1).view(-1, 8, 1, 1))
        return self.conv(self.change(h)).flatten(1)


@pytest.mark.parametrize(
    "change",
    [F.relu_, lambda h: F.interpolate(h, scale_factor=1.0).add_(h), lambda h: F.hardswish(h).mul_(h.sigmoid())],
    ids=["relu", "upsampled", "hardswish"],
)
def test_a_picture_of_one_pixel_keeps_its_channels_last(change: Callable[[Tensor], Tensor]) -> None:
    """Its strides say so, though it is contiguous too, and choose the convolution's layout."""
    torch.manual_seed(0)
    given = Example(Pixel(change), (torch.randn(4, 6),), (torch.randint(8, (4,)),), F.cross_entropy)
    program = capture(
        given.model, given.inputs, targets=given.targets, loss=given.loss, optimizer=sgd(given.model.parameters())
    )
    matches_eager(program, given, sgd, batches=(6,))


class FakeQuantized(nn.Module):
    """A weight and features, rounded as a quantized net would round them, the weight by channel."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        for name, channels in (("weight", 3), ("features", 1)):
            scale, zero = torch.ones(channels), torch.zeros(channels, dtype=torch.int32)
            for part, start in (("low", -scale), ("high", scale.clone()), ("scale", scale), ("zero", zero)):
                self.register_buffer(f"{name}_{part}", start)
        self.register_buffer("on", torch.ones(1, dtype=torch.int64))

    def rounded(self, x: Tensor, name: str, by_channel: bool) -> Tensor:
        seen = [getattr(self, f"{name}_{part}") for part in ("low", "high", "scale", "zero")]
        return torch.fused_moving_avg_obs_fake_quant(x, self.on, self.on, *seen, 0.1, -128, 127, 0, by_channel)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.rounded(self.fc.weight, "weight", by_channel=True)
        return self.rounded(F.linear(x, weight, self.fc.bias), "features", by_channel=False)


def test_statistics_of_fake_quantization_are_state() -> None:
    found = Example(FakeQuantized(), (torch.randn(4, 6),), (torch.randint(3, (4,)),), F.cross_entropy)
    program = capture(found.model, found.inputs, targets=found.targets, loss=found.loss)
    matches_eager(program, found, batches=(7,))
