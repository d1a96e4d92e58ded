"""What operators allocate inside: formulas against the events of PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import cast

import models
import pytest
import torch
from allocations import measured_peak, predicted_peak
from graphir.runtime.profiling.calls import Subject, measured
from runnable import captured, forward_plan
from single_calls import subject_of
from small import program_of
from torch import Tensor, nn

import graphir
from graphir import passes, runtime
from graphir.analysis.scratch import scratch
from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512"
    or torch.cpu._is_amx_tile_supported()
    or not torch.backends.mkldnn.is_available(),
    reason="convolutions' scratch is that of oneDNN's kernels for AVX-512",
)


def peaks(plan: Plan, inputs: tuple[Tensor, ...], state: dict[str, Tensor], executor: str = "threads") -> list[int]:
    """The measured and the predicted peak of a step, after a first one."""
    with runtime.Session(plan, state, executor=executor) as session:  # type: ignore[arg-type]
        session.step(*inputs)
        return [measured_peak(lambda: session.step(*inputs)), predicted_peak(plan)]


def trained(module: nn.Module, x: Tensor, optimizer: type[torch.optim.Optimizer], **options: object) -> list[int]:
    """The peaks of a training step with the loss ``sum(module(x) * y)``."""
    y = torch.randn_like(module(x)).detach()
    example = models.Example(module, (x,), (y,), lambda out, y: (out * y).sum())
    program = captured(example, optimizer(module.parameters(), **options))  # type: ignore[arg-type]
    return peaks(passes.emit(program), (x, y), dict(program.state))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_net_without_scratch_is_predicted_to_the_byte(devices: int) -> None:
    example = models.mlp(batch=8, features=32, hidden=64)
    program = captured(example, torch.optim.SGD(example.model.parameters(), lr=0.1, momentum=0.9))
    program = passes.replicate(program, devices=list(range(devices)))
    batch = [tensor.repeat(devices, *[1] * (tensor.dim() - 1)) for tensor in (*example.inputs, *example.targets)]
    for subject in (program, passes.share_storage(program)):
        plan = passes.emit(subject)
        measured, predicted = peaks(plan, tuple(batch), dict(program.state), "threads" if devices == 1 else "reference")
        assert predicted == pytest.approx(measured, abs=12 * (devices - 1)), "what gradients are divided by"
        assert not graphir.memory(plan).timeline("gpu:0", "scratch").any()


CONVOLUTIONS = {
    "3x3": (nn.Conv2d(32, 48, 3, padding=1, bias=False), 12),
    "first": (nn.Conv2d(3, 32, 3, padding=1, bias=False), 24),
    "few channels": (nn.Conv2d(8, 32, 3, padding=1, bias=False), 24),
    "odd channels": (nn.Conv2d(40, 20, 3, padding=1, bias=False), 24),
    "1x1": (nn.Conv2d(64, 128, 1, bias=False), 12),
    "strided": (nn.Conv2d(32, 32, 3, stride=2, padding=1, bias=False), 24),
    "strided 1x1": (nn.Conv2d(64, 128, 1, stride=2, bias=False), 24),
    "depthwise": (nn.Conv2d(32, 32, 3, padding=1, groups=32, bias=False), 24),
    "patches": (nn.Conv2d(3, 32, 16, stride=16, bias=False), 64),
    "transposed": (nn.ConvTranspose2d(32, 16, 2, stride=2, bias=False), 12),
    "one dimension": (nn.Conv1d(32, 64, 3, padding=1, bias=False), 64),
    "f64": (nn.Conv2d(16, 16, 3, padding=1, bias=False, dtype=torch.float64), 12),
}


@needs_avx512
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_convolutions(case: str) -> None:
    """Forward and backward: off by what oneDNN takes for barriers, and by padding in blocks at most."""
    module, size = CONVOLUTIONS[case]
    weight = module.weight
    x = torch.randn(4, module.in_channels, *[size] * (weight.dim() - 2), dtype=weight.dtype, requires_grad=True)
    assert isinstance(x, Tensor)
    before = nn.Sequential(nn.Identity(), module)
    measured, predicted = trained(Scaled(before, module.in_channels, weight.dtype), x.detach(), torch.optim.SGD, lr=0.1)
    assert predicted == pytest.approx(measured, rel=0.005, abs=12288)


UNKNOWN = {
    "groups": nn.Conv2d(64, 64, 3, padding=1, groups=16),
    "dilated": nn.Conv2d(32, 32, 3, padding=2, dilation=2),
    "wide": nn.Conv2d(32, 32, 7, padding=3),
    "three dimensions": nn.Conv3d(8, 8, 3),
    "half precision": nn.Conv2d(32, 32, 3, dtype=torch.bfloat16),
    "overlapping, transposed": nn.ConvTranspose2d(32, 16, 4, stride=2),
    "channels last": nn.Conv2d(32, 32, 3).to(memory_format=torch.channels_last),
}


@needs_avx512
def test_kernels_for_amx_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = passes.emit(graphir.capture(CONVOLUTIONS["3x3"][0], inputs=(torch.randn(4, 32, 12, 12),)))
    assert graphir.memory(plan).sources()["computed"] == 1
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert graphir.memory(plan).sources()["unknown"] == 1


@pytest.mark.parametrize("case", UNKNOWN)
def test_convolutions_that_no_formula_covers(case: str) -> None:
    module = UNKNOWN[case]
    x = torch.randn(4, module.in_channels, *[12] * (module.weight.dim() - 2), dtype=module.weight.dtype)
    plan = passes.emit(graphir.capture(module, inputs=(x,)))
    found = graphir.memory(plan)
    assert found.sources() == {"measured": 0, "bound": 0, "computed": 0, "unknown": 1}
    assert "scratch" not in found.at_peak["gpu:0"]
    scratch, peak = [line.split() for line in str(found).splitlines() if line.split()[0] in ("scratch", "peak")][:2]
    assert scratch == ["scratch", "+"] and peak[-1].endswith("+"), "what is unknown is not shown as nothing"
    assert "scratch of 1 operator: 1 unknown" in str(found) and "aten.convolution.default (1)" in str(found)


class Scaled(nn.Module):
    """A module whose input has a gradient."""

    def __init__(self, module: nn.Module, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module
        self.scale = nn.Parameter(torch.ones(channels, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x * self.scale.view(-1, *[1] * (x.dim() - 2)))


def test_batch_norm() -> None:
    x = torch.randn(4, 16, 12, 12)
    measured, predicted = trained(Scaled(nn.BatchNorm2d(16), 16, x.dtype), x, torch.optim.SGD, lr=0.1)
    assert measured == predicted


F32 = "f32[4,16,8,8]"
OPERATORS = {
    "batch norm, in evaluation": (
        "p : f32[16] @gpu:0 = aten.sum.dim_IntList(x, dim=[0, 2, 3])\n"
        f"y : {F32} @gpu:0, m : f32[16] @gpu:0, s : f32[16] @gpu:0 = "
        "aten.native_batch_norm(x, p, p, p, p, training=false, momentum=0.1, eps=1e-05)"
    ),
    "bilinear, small": (
        "y : f32[4,16,16,16] @gpu:0 = aten.upsample_bilinear2d(x, output_size=[16, 16], align_corners=false)"
    ),
    "nearest, small": "y : f32[4,16,16,16] @gpu:0 = aten.upsample_nearest2d(x, output_size=[16, 16])",
    "logsumexp": "y : f32[4,16,8] @gpu:0 = aten.logsumexp(x, dim=[3])",
    "promotion": (
        f"h : bf16[4,16,8,8] @gpu:0 = aten._to_copy(x, dtype=bf16)\ny : {F32} @gpu:0 = aten.add.Tensor(x, h)"
    ),
    "dropout": f"y : {F32} @gpu:0, m : bool[4,16,8,8] @gpu:0 = aten.native_dropout(x, p=0.5, train=true) {{seed=1}}",
    "a product of every other column": (
        "v : f32[64,32] strides [64,2] in x @gpu:0 = aten.as_strided(x, size=[64, 32], stride=[64, 2])\n"
        "w : f32[32,64] in x @gpu:0 = aten.as_strided(x, size=[32, 64], stride=[64, 1])\n"
        "y : f32[64,64] @gpu:0 = aten.mm(v, w)"
    ),
    "binary cross entropy": "y : f32[] @gpu:0 = aten.binary_cross_entropy(x, x)",
    "binary cross entropy with logits": "y : f32[] @gpu:0 = aten.binary_cross_entropy_with_logits(x, x)",
    "binary cross entropy with logits, weights of positives": (
        "y : f32[] @gpu:0 = aten.binary_cross_entropy_with_logits(x, x, _, x)"
    ),
    "binary cross entropy with logits, of each element": (
        f"y : {F32} @gpu:0 = aten.binary_cross_entropy_with_logits(x, x, reduction=0)"
    ),
    "huber": "y : f32[] @gpu:0 = aten.huber_loss(x, x)",
    "squares": "y : f32[] @gpu:0 = aten.mse_loss(x, x)",
    "smooth l1": "y : f32[] @gpu:0 = aten.smooth_l1_loss(x, x)",
    "soft margin": "y : f32[] @gpu:0 = aten.soft_margin_loss(x, x)",
}


@pytest.mark.parametrize("case", OPERATORS)
def test_operators(case: str) -> None:
    """To some bytes for scalars and for the window of each column and row."""
    body = f"input x : {F32} @gpu:0\n{OPERATORS[case]}\nz : f32[] @gpu:0 = aten.sum(y)"
    plan = forward_plan(body, "x", output="z")
    measured, predicted = peaks(plan, (torch.rand(4, 16, 8, 8),), {})
    without = predicted_peak(plan, scratch=False)
    assert predicted == pytest.approx(measured, abs=512)
    assert predicted > without


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd, weight decay": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "sgd, nesterov": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "sgd, maximize": (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    "adam": (torch.optim.Adam, {}),
    "adam, weight decay": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
    "adam, fused": (torch.optim.Adam, {"fused": True}),
    "adam, foreach": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    "adamw, foreach": (torch.optim.AdamW, {"amsgrad": True, "foreach": True}),
    "sgd, foreach": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
    "adagrad, foreach": (torch.optim.Adagrad, {"foreach": True}),
    "adagrad, weight decay, foreach": (torch.optim.Adagrad, {"weight_decay": 0.1, "foreach": True}),
    "rmsprop, foreach": (torch.optim.RMSprop, {"weight_decay": 0.1, "foreach": True}),
    "rmsprop, centered, foreach": (torch.optim.RMSprop, {"centered": True, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop, centered": (torch.optim.RMSprop, {"centered": True, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adadelta, weight decay": (torch.optim.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    "adamax": (torch.optim.Adamax, {}),
    "adamax, weight decay": (torch.optim.Adamax, {"weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {}),
    "nadam, decoupled": (torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "nadam, weight decay": (torch.optim.NAdam, {"weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "radam, weight decay": (torch.optim.RAdam, {"weight_decay": 0.1, "maximize": True}),
    "asgd": (torch.optim.ASGD, {}),
    "asgd, weight decay": (torch.optim.ASGD, {"weight_decay": 0.1}),
    "rprop": (torch.optim.Rprop, {}),
    "rprop, maximize": (torch.optim.Rprop, {"maximize": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adafactor, weight decay": (torch.optim.Adafactor, {"weight_decay": 0.1, "maximize": True}),
}


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_optimizers(case: str) -> None:
    """Two parameters that are large beside everything else, so that their updates are the peak."""
    kind, options = OPTIMIZERS[case]
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    form = {} if "fused" in options else {"foreach": False}
    measured, predicted = trained(module, torch.randn(2, 64), kind, lr=0.1, **{**form, **options})
    assert predicted == pytest.approx(measured, abs=600 if kind is torch.optim.ASGD else 64)  # which copies numbers


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("nesterov", [True, False])
def test_matrix_products_in_an_update(nesterov: bool) -> None:
    """In one thread: kernels of products in bfloat16 take more in several, by no rule that a formula could have."""
    module = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 32, bias=False))
    measured, predicted = trained(module, torch.randn(2, 64), torch.optim.Muon, lr=0.1, nesterov=nesterov)
    assert 0.75 * predicted < measured <= predicted


def test_attention_and_layer_norm() -> None:
    example = models.gpt(batch=4, length=64, width=64, heads=2, layers=2, vocabulary=64)
    program = captured(example, torch.optim.SGD(example.model.parameters(), lr=0.1))
    plan = passes.emit(program)
    measured, predicted = peaks(plan, (*example.inputs, *example.targets), dict(program.state))
    assert predicted == pytest.approx(measured, rel=0.002)
    assert graphir.memory(plan, threads=64).peak["gpu:0"] > graphir.memory(plan, threads=1).peak["gpu:0"]


SHAPE = (4, 16, 6, 6)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "gaps": lambda x: torch.empty(4, 32, 6, 6)[:, :16].copy_(x),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "gaps, channels last": lambda x: torch.empty(4, 32, 6, 6).to(memory_format=torch.channels_last)[:, :16].copy_(x),
}


def calls_of_images() -> dict[str, Subject | None]:
    """Calls on images in all these layouts, and on those whose channels are numbers."""
    of_each = torch.rand(16)
    both, evaluated = {"momentum": 0.1, "eps": 1e-5}, {"train": True, "eps": 1e-5, "output_mask": (True, True, True)}
    images = {name: change(torch.rand(SHAPE)) for name, change in LAYOUTS.items()}
    images |= {"one pixel": torch.rand(4, 16, 1, 1), "no pixels": torch.rand(40, 16)}
    found = {}
    for name, x in images.items():
        for training in (True, False):
            operands = [x, *[of_each.clone() for _ in range(4)]]
            found[f"batch norm, {name}, {training}"] = subject_of(
                "aten.native_batch_norm.default", operands, {"training": training, **both}
            )
        for other, grad in images.items():
            if grad.shape == x.shape:
                found[f"its backward, {name}, {other}"] = subject_of(
                    "aten.native_batch_norm_backward.default", [grad, x, *[of_each] * 5], evaluated
                )
        if x.dim() == 4:
            for kind, options in (("bilinear", {"align_corners": False}), ("nearest", {})):
                for size in (12, 120):
                    found[f"{kind}, {name}, {size}"] = subject_of(
                        f"aten.upsample_{kind}2d.default", [x], {"output_size": (size, size), **options}
                    )
                    of = {"output_size": tuple(x.shape[2:]), "input_size": (4, 16, 3, 3)}
                    backward = f"aten.upsample_{kind}2d_backward.default"
                    found[f"{kind} backward, {name}"] = subject_of(backward, [x], {**of, **options})
            sizes = {"N": 4, "C": 16, "HxW": prod(x.shape[2:]), "group": 4, "eps": 1e-5}
            found[f"group norm, {name}"] = subject_of("aten.native_group_norm.default", [x, of_each, of_each], sizes)
    for size in (40, 9, 3):
        for kind in ("bilinear", "bicubic"):
            for name in ("plain", "channels last"):
                found[f"antialiased {kind}, {size}, {name}"] = subject_of(
                    f"aten._upsample_{kind}2d_aa.default",
                    [LAYOUTS[name](torch.rand(SHAPE))],
                    {"output_size": (size, size + 1), "align_corners": False},
                )
                found[f"antialiased {kind} backward, {size}, {name}"] = subject_of(
                    f"aten._upsample_{kind}2d_aa_backward.default",
                    [LAYOUTS[name](torch.rand(SHAPE))],
                    {"output_size": (6, 6), "input_size": (4, 16, size, size), "align_corners": False},
                )
    for dtype in (torch.float32, torch.float64):
        found[f"affine grid, {dtype}"] = subject_of(
            "aten.affine_grid_generator.default",
            [torch.rand(4, 2, 3, dtype=dtype)],
            {"size": (4, 3, 20, 30), "align_corners": False},
        )
    found["safe softmax"] = subject_of("aten._safe_softmax.default", [torch.rand(4, 8, 30)], {"dim": -1})
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_images_in_every_layout_and_what_is_resized(threads: int) -> None:
    calls = {name: call for name, call in calls_of_images().items() if call is not None}
    found, failed = measured(calls, threads)
    assert set(failed) == {"group norm, gaps", "group norm, gaps, channels last"}, "whose kernel wants no gaps"
    said = {name: scratch(*calls[name][:3], threads) for name in found}
    wrong = {n: (b, found[n]) for n, b in said.items() if b is not None and abs(b - found[n].scratch) > 64}
    assert not wrong
    assert sum(b is not None for b in said.values()) > 60 > sum(b is None for b in said.values())


def test_the_gradient_of_attention_is_copied_where_its_kernel_wants_another_order() -> None:
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)):
        tensors = [torch.rand([(2, 3, 40, 8)[d] for d in order]).permute(*map(order.index, range(4))) for _ in range(5)]
        blobs = {
            f"x{i}": Blob(f"x{i}", tuple(t.shape), "f32", gpu(0), "temporary", f"x{i}", tuple(t.stride()))
            for i, t in enumerate([*tensors, torch.rand(2, 40, 3).transpose(1, 2)])
        }
        like = ("x1", "x2", "x3")
        made = {f"y{i}": blobs[name]._replace(name=f"y{i}", storage=f"y{i}") for i, name in enumerate(like)}
        op = Operator("graphir.attention_backward", tuple(blobs), tuple(made), {}, gpu(0))
        found, failed = measured({"": Subject(op, {**blobs, **made}, {})}, 2)
        assert not failed
        assert scratch(op, {**blobs, **made}, {}, 2) == pytest.approx(found[""].scratch, abs=64)


class Softmax(nn.Module):
    """The sum of a softmax, or of what its backward makes of a gradient and a result."""

    def __init__(self, log: bool) -> None:
        super().__init__()
        self.log = "log_" if log else ""

    def forward(self, *operands: Tensor) -> Tensor:
        if len(operands) == 1:
            made = getattr(torch.ops.aten, f"_{self.log}softmax")(*operands, 1, False)
        else:
            made = getattr(torch.ops.aten, f"_{self.log}softmax_backward_data")(*operands, 1, torch.float32)
        return cast(Tensor, made.sum())


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("operands", [1, 2])
def test_softmax_reads_in_row_major_order(log: bool, operands: int) -> None:
    x = torch.randn(8, 16, 12, 16)
    for layout in (x, x.transpose(1, 3), x.contiguous(memory_format=torch.channels_last)):
        given = (layout, x.transpose(1, 3))[:operands]
        program = graphir.capture(Softmax(log), inputs=given)
        measured, predicted = peaks(passes.emit(program), given, {})
        assert predicted == pytest.approx(measured, abs=64)


UNEVEN = """
    input a : f32[100] @gpu:0
    input b : f32[100] @gpu:1
    [s : f32[100] @gpu:0, t : f32[100] @gpu:1] = AllReduce([a, b], reduction="mean", shares={shares})
    output s
    output t
"""


def test_uneven_shares_are_scaled_by_each_participant() -> None:
    for shares, each in (("[2, 2]", 0), ("[2, 1]", 400)):
        found = graphir.memory(program_of(UNEVEN.format(shares=shares)))
        for device in ("gpu:0", "gpu:1"):
            assert found.timeline(device, "scratch").max() == each
        assert sum(found.high_water.values()) == sum(found.total.values()) - 800 == 800, "scratch is nobody's blob"


def test_what_is_not_known_has_no_scratch() -> None:
    program = program_of("input x : f32[4,8] @gpu:0\n a : f32[4] @gpu:0 = aten.logsumexp(x)\n b : ? @gpu:0 = FC(a)")
    assert [scratch(op, program.step.blobs, {}, 1) for op in program.step.ops] == [(8 + 1) * 4 * 4, None]
    unknown = program_of("a : ? @gpu:0 = Source()\n b : ? @gpu:0 = aten.logsumexp(a)")
    assert scratch(unknown.step.ops[1], unknown.step.blobs, {}, 1) is None


@pytest.mark.parametrize("threads", [0, True, 1.5])
def test_threads_are_counted(threads: object) -> None:
    with pytest.raises(GraphirError, match=f"threads={threads!r}: a kernel needs at least one thread"):
        graphir.memory(program_of("input x : f32[4] @gpu:0"), threads=threads)  # type: ignore[arg-type]


def test_the_largest_are_shown_with_their_modules() -> None:
    example = models.resnet(batch=8, channels=16)
    found = graphir.memory(passes.emit(captured(example, torch.optim.SGD(example.model.parameters(), lr=0.1))))
    head, *lines = found.largest_text("gpu:0", 4).splitlines()
    assert head.startswith("the largest of ") and "on gpu:0 at its peak, position " in head
    for line, use in zip(lines[:4], found.largest("gpu:0", 4), strict=True):
        assert use.blob in line and use.category in line and line.endswith(use.module)
    assert any(use.module for use in found.largest("gpu:0", 4))
    assert "scratch" in str(found)
