"""Translations of convolutions, poolings, batch normalisation and dropout, against torch's own functions."""

import random

import pytest
import torch
import torch.nn.functional as F
from lowering import close, generator, op, program, run

from graphir import GraphirError, caffe2

CONVOLUTIONS = [
    {"kernel": 3},
    {"kernel": 3, "pad": 1, "stride": 2},
    {"kernel": 2, "dilation": 2, "pad": 1},
    {"kernel_h": 3, "kernel_w": 1, "stride_h": 1, "stride_w": 2},
    {"kernels": [2, 3], "strides": [2, 1], "pads": [1, 0, 1, 0]},
    {"kernel": 3, "pad_t": 0, "pad_l": 1, "pad_b": 2, "pad_r": 0},
    {"kernel": 3, "pads": [0, 2, 1, 0], "stride": 2},
    {"kernel": 1, "group": 2},
    {"kernel": 3, "legacy_pad": 1},
]


def sides(args):
    """(top, left), (bottom, right)"""
    if "pad" in args:
        return (args["pad"],) * 2, (args["pad"],) * 2
    if "pads" in args:
        return tuple(args["pads"][:2]), tuple(args["pads"][2:])
    return (args.get("pad_t", 0), args.get("pad_l", 0)), (args.get("pad_b", 0), args.get("pad_r", 0))


def pair(args, name, default=1):
    if name in args:
        return (args[name],) * 2
    if name + "s" in args:
        return tuple(args[name + "s"])
    return args.get(f"{name}_h", default), args.get(f"{name}_w", default)


def padded(x, args, fill=0.0):
    (top, left), (bottom, right) = sides(args)
    return F.pad(x, (left, right, top, bottom), value=fill)


@pytest.mark.parametrize("args", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_convolution_and_its_gradient(args, bias):
    g, groups = generator(len(str(args))), args.get("group", 1)
    x = torch.randn(2, 4, 7, 6, generator=g)
    w, b = torch.randn(6, 4 // groups, *pair(args, "kernel"), generator=g), torch.randn(6, generator=g)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    stride, dilation = pair(args, "stride"), pair(args, "dilation")
    wanted = F.conv2d(padded(leaves[0], args), leaves[1], leaves[2] if bias else None, stride, 0, dilation, groups)
    dy = torch.randn(wanted.shape, generator=g)
    wanted.backward(dy)
    forward = op("Conv", "x w b" if bias else "x w", "y", **args)
    gradient = op("ConvGradient", "x w dy", "dw db dx" if bias else "dw dx", no_bias=int(not bias), **args)
    inputs = {"x": x, "w": w, "b": b, "dy": dy} if bias else {"x": x, "w": w, "dy": dy}
    y, dw, dx, *db = run([forward, gradient], inputs, "y dw dx db" if bias else "y dw dx")
    close(y, wanted.detach())
    close(dx, leaves[0].grad)
    close(dw, leaves[1].grad)
    for found in db:
        close(found, leaves[2].grad)


@pytest.mark.parametrize("size", range(5, 12))
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_padding_to_the_same_size(size, stride):
    x, w = torch.randn(1, 1, size, size, generator=generator(1)), torch.randn(1, 1, 3, 3, generator=generator(2))
    (y,) = run([op("Conv", "x w", "y", kernel=3, stride=stride, legacy_pad=2)], {"x": x, "w": w}, "y")
    assert y.shape[2:] == (-(-size // stride),) * 2
    needed = max(0, (y.shape[2] - 1) * stride + 3 - size)
    before, after = needed // 2, needed - needed // 2
    close(y, F.conv2d(F.pad(x, (before, after, before, after)), w, stride=stride))


@pytest.mark.parametrize("rank", [1, 3])
def test_convolution_of_other_ranks(rank):
    x = torch.randn(2, 3, *(5,) * rank, generator=generator(1))
    w, b = torch.randn(4, 3, *(2,) * rank, generator=generator(2)), torch.randn(4, generator=generator(3))
    (y,) = run([op("Conv", "x w b", "y", kernels=[2] * rank)], {"x": x, "w": w, "b": b}, "y")
    close(y, (F.conv1d if rank == 1 else F.conv3d)(x, w, b))


POOLINGS = [
    {"kernel": 2, "stride": 2},
    {"kernel": 3, "stride": 2, "pad": 1},
    {"kernel_h": 2, "kernel_w": 3, "stride_h": 1, "stride_w": 2},
    {"kernel": 7, "stride": 1, "global_pooling": 1},
    {"kernel": 3, "stride": 2, "legacy_pad": 3},
]

UNEVEN = [{"kernel": 3, "pad": 2, "stride": 2}, {"kernel": 3, "pad_t": 0, "pad_l": 1, "pad_b": 2, "pad_r": 0}]


def pooling(kind, x, args):
    """Torch's own pooling of an image that is padded where torch cannot."""
    if args.get("global_pooling"):
        return x.amax((2, 3), keepdim=True) if kind == "Max" else x.mean((2, 3), keepdim=True)
    kernel, stride, ceil = pair(args, "kernel"), pair(args, "stride"), args.get("legacy_pad") == 3
    if kind == "Max":
        return F.max_pool2d(padded(x, args, -torch.inf), kernel, stride, ceil_mode=ceil)
    counted = bool(args.get("count_include_pad"))
    if counted and ceil:
        return F.avg_pool2d(padded(x, args), kernel, stride, ceil_mode=True, divisor_override=kernel[0] * kernel[1])
    if args in UNEVEN or counted:
        return F.avg_pool2d(padded(x, args), kernel, stride, ceil_mode=ceil)
    return F.avg_pool2d(x, kernel, stride, sides(args)[0], ceil, count_include_pad=counted)


@pytest.mark.parametrize(
    "kind, args",
    [
        *[("Max", args) for args in POOLINGS + UNEVEN],
        *[("Average", args) for args in POOLINGS],
        *[("Average", {**args, "count_include_pad": 1}) for args in UNEVEN + POOLINGS[1:2]],
        *[("Average", {"kernel": 2, "stride": 2, "legacy_pad": 3, "count_include_pad": 1})],
    ],
    ids=str,
)
@pytest.mark.parametrize("alone", [False, True], ids=["with-forward", "gradient-alone"])
def test_pooling_and_its_gradient(kind, args, alone):
    x = torch.randn(2, 3, 8, 7, generator=generator(5))
    leaf = x.clone().requires_grad_()
    wanted = pooling(kind, leaf, args)
    dy = torch.randn(wanted.shape, generator=generator(6))
    wanted.backward(dy)
    gradient = op(f"{kind}PoolGradient", "x y dy", "dx", **args)
    if alone:
        (dx,) = run([gradient], {"x": x, "y": wanted.detach(), "dy": dy}, "dx")
    else:
        y, dx = run([op(f"{kind}Pool", "x", "y", **args), gradient], {"x": x, "dy": dy}, "y dx")
        close(y, wanted.detach())
    close(dx, leaf.grad)


def test_the_forward_pooling_hands_its_indices_to_the_gradient():
    x, dy = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
    ops = [op("MaxPool", "x", "y", kernel=2, stride=2), op("MaxPoolGradient", "x y dy", "dx", kernel=2, stride=2)]
    types = [o.type for o in caffe2.lower(program(ops, {"x": x, "dy": dy})).step.ops]
    assert types.count("aten.max_pool2d_with_indices.default") == 1


def test_an_image_that_was_overwritten_is_pooled_again():
    x, dy = torch.randn(1, 1, 4, 4, generator=generator(1)), torch.ones(1, 1, 2, 2)
    args = {"kernel": 2, "stride": 2}
    ops = [op("MaxPool", "x", "y", **args), op("Scale", "x", "x", scale=-1.0)]
    (dx,) = run([*ops, op("MaxPoolGradient", "x y dy", "dx", **args)], {"x": x, "dy": dy}, "dx")
    leaf = (-x).requires_grad_()
    F.max_pool2d(leaf, 2).sum().backward()
    assert torch.equal(dx, leaf.grad)


@pytest.mark.parametrize("args", UNEVEN, ids=str)
def test_uneven_padding_that_does_not_count_is_refused(args):
    with pytest.raises(GraphirError, match="AveragePool cannot be translated"):
        run([op("AveragePool", "x", "y", **args)], {"x": torch.randn(1, 1, 8, 8)}, "y")


@pytest.mark.parametrize(
    "args, reason",
    [
        ({"kernel": 2, "order": "CHWN"}, "order is 'CHWN'"),
        ({}, "a positive kernel size"),
        ({"kernel": 0}, "a positive kernel size"),
        ({"kernels": [2]}, "kernel has 1 sizes"),
        ({"kernel": 2, "pads": [1, 1]}, "2 paddings"),
        ({"kernel": 2, "dilation": 2}, "no dilation"),
        ({"kernel": 2, "stride": 0}, r"stride \[0, 0\] and dilation \[1, 1\] are not all positive"),
        ({"kernel": "two"}, "argument 'kernel' is 'two', not int"),
    ],
    ids=str,
)
def test_windows_that_make_no_sense_are_refused(args, reason):
    with pytest.raises(GraphirError, match=reason):
        run([op("MaxPool", "x", "y", **args)], {"x": torch.randn(1, 1, 4, 4)}, "y")


def batch_norm_inputs(seed):
    rng, g = random.Random(seed), generator(seed)
    width = rng.randint(1, 4)
    shape = (rng.randint(2, 4), width, *[rng.randint(1, 4) for _ in range(rng.choice([1, 2, 3]))])
    x = torch.randn(shape, generator=g)
    return x, *(torch.rand(width, generator=g) + 0.5 for _ in range(4))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("args", [{}, {"epsilon": 1e-3, "momentum": 0.7}], ids=str)
def test_batch_normalisation_and_its_gradient(seed, args):
    x, scale, bias, mean, var = batch_norm_inputs(seed)
    dy = torch.randn(x.shape, generator=generator(seed + 50))
    forward = op("SpatialBN", "x s b m v", "y m v sm sv", is_test=0, **args)
    backward = op("SpatialBNGradient", "x s dy sm sv", "dx ds db", **args)
    names = "y m v dx ds db sm sv"
    inputs = {"x": x, "s": scale, "b": bias, "dy": dy}
    *found, saved_mean, saved_inverse = run([forward, backward], inputs, names, state={"m": mean, "v": var})
    leaves = [t.clone().requires_grad_() for t in (x, scale, bias)]
    momentum, eps = 1 - args.get("momentum", 0.9), args.get("epsilon", 1e-5)
    wanted = F.batch_norm(leaves[0], m := mean.clone(), v := var.clone(), *leaves[1:], True, momentum, eps)
    wanted.backward(dy)
    for mine, theirs in zip(found, (wanted.detach(), m, v, *[leaf.grad for leaf in leaves]), strict=True):
        close(mine, theirs)
    over = [d for d in range(x.dim()) if d != 1]
    close(saved_mean, x.mean(over))
    close(saved_inverse, (x.var(over, correction=0) + eps).rsqrt())


def test_batch_normalisation_in_a_test_keeps_its_statistics():
    x, scale, bias, mean, var = batch_norm_inputs(3)
    inputs = {"x": x, "s": scale, "b": bias, "m": mean, "v": var}
    y, m, v = run([op("SpatialBN", "x s b m v", "y", is_test=1)], inputs, "y m v")
    close(y, F.batch_norm(x, mean, var, scale, bias))
    assert torch.equal(m, mean) and torch.equal(v, var)


def test_batch_normalisation_in_place():
    x, scale, bias, mean, var = batch_norm_inputs(4)
    ops = [op("SpatialBN", "x s b m v", "x m v sm sv")]
    (y,) = run(ops, {"x": x, "s": scale, "b": bias}, "x", state={"m": mean, "v": var})
    close(y, F.batch_norm(x, None, None, scale, bias, True))


def test_dropout_scales_what_it_keeps():
    x, dy = torch.rand(50, 40, generator=generator(1)) + 1, torch.randn(50, 40, generator=generator(2))
    ops = [op("Dropout", "x", "y mask", ratio=0.3), op("DropoutGrad", "dy mask", "dx", ratio=0.3)]
    y, mask, dx = run(ops, {"x": x, "dy": dy}, "y mask dx")
    assert mask.dtype == torch.bool and 0.65 < mask.float().mean() < 0.75
    close(y, x * mask / 0.7)
    close(dx, dy * mask / 0.7)


def test_dropout_draws_anew_in_each_step_and_the_same_in_each_run():
    x = torch.ones(20, 20)
    runs = [run([op("Dropout", "x", "y mask", ratio=0.5)], {"x": x}, "mask", steps=n)[0] for n in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_dropout_in_a_test_does_nothing():
    x, dy = torch.randn(3, 3), torch.randn(3, 3)
    ops = [op("Dropout", "x", "x mask", is_test=1), op("DropoutGrad", "dy mask", "dx", is_test=1)]
    y, dx = run(ops, {"x": x, "dy": dy}, "x dx")
    assert torch.equal(y, x) and torch.equal(dx, dy)


@pytest.mark.parametrize(
    "each, reason",
    [
        (op("Dropout", "x", "y mask", ratio=1.0), "argument 'ratio' is 1.0"),
        (op("DropoutGrad", "x s", "y"), r"'s' is f32\[3\], but 'x' is f32\[1,3\]"),
        (op("SpatialBN", "x s s s s", "y m v sm sv"), r"f32\[1,3\] has no two values in a channel"),
        (op("SpatialBN", "x2 s s s s", "y"), "SpatialBN needs at least 2 outputs, 1 given"),
        (op("Conv", "x s", "y", kernel=1, kernels=[1]), "cannot be translated"),
    ],
    ids=str,
)
def test_images_and_arguments_that_make_no_sense_are_refused(each, reason):
    inputs = {"x": torch.ones(1, 3), "x2": torch.ones(2, 3), "s": torch.ones(3)}
    with pytest.raises(GraphirError, match=rf"{reason}(.|\n)*net 'step', operator 0"):
        run([each], inputs, each.output[0])
