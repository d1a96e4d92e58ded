"""Images with channels first and with channels last, against what Caffe2's operators are defined to give."""

import images
import numpy as np
import pytest
import torch
from images import Window
from lowering import close, generator, op, program, run

import graphir
from graphir import GraphirError, caffe2, passes

ORDERS = pytest.mark.parametrize("order", ["NCHW", "NHWC"])
SEEDS = pytest.mark.parametrize("seed", range(3))


def drawn(seed, *shape):
    """Numbers with channels last."""
    return torch.randn(*shape, generator=generator(seed))


def laid(value, order):
    """What has channels last, in this order; what has no channels stays."""
    first = order == "NCHW" and value.dim() > 2
    return value.movedim(-1, 1).contiguous() if first else value


def found_as(order, ops, inputs, outputs, rtol=1e-5, **wanted):
    """Run the operators in this order; every output is what is *wanted* of it, in numpy with channels last."""
    values = run(ops, {name: laid(value, order) for name, value in inputs.items()}, outputs)
    for name, value in zip(outputs.split(), values, strict=True):
        close(value, laid(torch.from_numpy(np.asarray(wanted[name])).float(), order), rtol)


def doubles(*tensors):
    return [tensor.double().numpy() for tensor in tensors]


CONVOLUTIONS = [
    ({"kernel": 3}, Window((3, 3))),
    ({"kernel": 3, "pad": 1, "stride": 2}, Window((3, 3), (2, 2), pads=(1, 1, 1, 1))),
    ({"kernels": [2, 3], "strides": [2, 1], "pads": [1, 0, 0, 2]}, Window((2, 3), (2, 1), pads=(1, 0, 0, 2))),
    ({"kernel": 2, "dilation": 2, "pad": 1}, Window((2, 2), dilation=(2, 2), pads=(1, 1, 1, 1))),
    ({"kernel_h": 3, "kernel_w": 1, "group": 2}, Window((3, 1), group=2)),
    ({"kernel": 1}, Window((1, 1))),
]


@ORDERS
@SEEDS
@pytest.mark.parametrize("args, window", CONVOLUTIONS, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_convolution(order, seed, args, window):
    x, w = drawn(seed, 2, 7, 6, 4), drawn(seed + 1, 6, *window.kernel, 4 // window.group)
    b = drawn(seed + 2, 6)
    y = images.conv(*doubles(x, w, b), window)
    dy = drawn(seed + 3, *y.shape)
    dx, dw, db = images.conv_gradient(*doubles(x, w, dy), window)
    ops = [
        op("Conv", "x w b", "y", order=order, **args),
        op("ConvGradient", "x w dy", "dw db dx", order=order, **args),
        op("ConvGradient", "x w dy", "dw2 dx2", order=order, no_bias=1, **args),
    ]
    wanted = {"y": y, "dw": dw, "db": db, "dx": dx, "dw2": dw, "dx2": dx}
    found_as(order, ops, {"x": x, "w": w, "b": b, "dy": dy}, "y dw db dx dw2 dx2", **wanted)


TRANSPOSED = [
    ({"kernel": 3}, Window((3, 3)), (0, 0)),
    ({"kernel": 3, "stride": 2, "pad": 1, "adj": 1}, Window((3, 3), (2, 2), pads=(1, 1, 1, 1)), (1, 1)),
    (
        {"kernels": [2, 3], "strides": [3, 2], "pads": [1, 0, 0, 2], "adjs": [2, 0]},
        Window((2, 3), (3, 2), pads=(1, 0, 0, 2)),
        (2, 0),
    ),
    ({"kernel": 2, "stride": 2, "legacy_pad": 2}, Window((2, 2), (2, 2)), (0, 0)),
    ({"kernel": 2, "group": 2}, Window((2, 2), group=2), (0, 0)),
]


@ORDERS
@SEEDS
@pytest.mark.parametrize("args, window, adj", TRANSPOSED, ids=lambda value: str(value) if type(value) is dict else "")
def test_transposed_convolution(order, seed, args, window, adj):
    x, w = drawn(seed, 2, 5, 4, 4), drawn(seed + 1, 4, *window.kernel, 6 // window.group)
    b = drawn(seed + 2, 6)
    y = images.conv_transpose(*doubles(x, w, b), window, adj)
    dy = drawn(seed + 3, *y.shape)
    dx, dw, db = images.conv_transpose_gradient(*doubles(x, w, dy), window)
    ops = [
        op("ConvTranspose", "x w b", "y", order=order, **args),
        op("ConvTransposeGradient", "x w dy", "dw db dx", order=order, **args),
        op("ConvTransposeGradient", "x w dy", "dw2 db2", order=order, **args),
    ]
    wanted = {"y": y, "dw": dw, "db": db, "dx": dx, "dw2": dw, "db2": db}
    found_as(order, ops, {"x": x, "w": w, "b": b, "dy": dy}, "y dw db dx dw2 db2", **wanted)


def test_a_convolution_gives_the_same_bits_in_both_orders():
    x, w, dy = drawn(1, 2, 7, 6, 4), drawn(2, 6, 3, 3, 4), drawn(3, 2, 5, 4, 6)
    found = []
    for order in ("NCHW", "NHWC"):
        args = {"kernel": 3, "order": order}
        ops = [op("Conv", "x w", "y", **args), op("ConvGradient", "x w dy", "dw dx", no_bias=1, **args)]
        inputs = {"x": laid(x, order), "w": laid(w, order), "dy": laid(dy, order)}
        found.append(run(ops, inputs, "y dw dx"))
    assert all(torch.equal(laid(last, "NCHW"), first) for first, last in zip(*found, strict=True))


POOLINGS = [
    ({"kernel": 2, "stride": 2}, Window((2, 2), (2, 2))),
    ({"kernel": 3, "stride": 2, "pad": 1}, Window((3, 3), (2, 2), pads=(1, 1, 1, 1))),
    ({"kernels": [3, 2], "strides": [1, 2], "pads": [0, 1, 2, 1]}, Window((3, 2), (1, 2), pads=(0, 1, 2, 1))),
    ({"global_pooling": 1, "kernel": 9}, Window((7, 6))),
]
NAMED = pytest.mark.parametrize("args, window", POOLINGS, ids=lambda value: str(value) if type(value) is dict else "")


@ORDERS
@SEEDS
@NAMED
def test_max_pooling(order, seed, args, window):
    x = drawn(seed, 2, 7, 6, 3)
    dy = drawn(seed + 1, 2, *window.count(window.padded(x.numpy()).shape[1:3]), 3)
    y, dx = images.max_pool(*doubles(x, dy), window)
    ops = [op("MaxPool", "x", "y", order=order, **args), op("MaxPoolGradient", "x y dy", "dx", order=order, **args)]
    found_as(order, ops, {"x": x, "dy": dy}, "y dx", y=y, dx=dx)
    alone = {"x": x, "dy": dy, "y": torch.from_numpy(y).float()}
    found_as(order, ops[1:], alone, "dx", dx=dx)


@ORDERS
@SEEDS
@pytest.mark.parametrize(
    "args, window, counted",
    [(args, window, n) for args, window in POOLINGS for n in (0, 1) if n or "pads" not in args],
    ids=lambda value: str(value) if type(value) in (dict, int) else "",
)
def test_average_pooling(order, seed, args, window, counted):
    """Without the padding counted, pads are refused: tests/caffe2/test_lower_images.py."""
    x = drawn(seed, 2, 7, 6, 3)
    dy = drawn(seed + 1, 2, *window.count(window.padded(x.numpy()).shape[1:3]), 3)
    y, dx = images.average_pool(*doubles(x, dy), window, counted)
    args = {**args, "order": order, "count_include_pad": counted}
    ops = [op("AveragePool", "x", "y", **args), op("AveragePoolGradient", "x y dy", "dx", **args)]
    found_as(order, ops, {"x": x, "dy": dy}, "y dx", y=y, dx=dx)


@ORDERS
@SEEDS
@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (6, 3), (3, 5, 2), (2, 3, 2, 4, 3)], ids=str)
def test_batch_normalisation(order, seed, shape):
    width = shape[-1]
    x, dy, s, b = drawn(seed, *shape), drawn(seed + 1, *shape), drawn(seed + 2, width), drawn(seed + 3, width)
    m, v = drawn(seed + 4, width), drawn(seed + 5, width).abs()
    y, mean, inverse, dx, ds, db = images.batch_norm(*doubles(x, s, b, dy), 1e-3)
    args, count = {"order": order, "epsilon": 1e-3, "momentum": 0.75}, x.numel() // width
    unbiased = (1 / inverse**2 - 1e-3) * count / (count - 1)
    running = {"m2": 0.75 * m.numpy() + 0.25 * mean, "v2": 0.75 * v.numpy() + 0.25 * unbiased}
    tested = (x.double() - m) / (v.double() + 1e-3).sqrt() * s + b
    ops = [
        op("SpatialBN", "x s b m v", "z", is_test=1, **args),
        op("SpatialBN", "x s b m v", "y m2 v2 sm sv", **args),
        op("SpatialBNGradient", "x s dy sm sv", "dx ds db", **args),
    ]
    wanted = {"y": y, "sm": mean, "sv": inverse, "dx": dx, "ds": ds, "db": db, **running, "z": tested.numpy()}
    inputs = {"x": x, "s": s, "b": b, "m": m, "v": v, "dy": dy}
    found_as(order, ops, inputs, " ".join(wanted), 2e-5, **wanted)


@ORDERS
@SEEDS
@pytest.mark.parametrize("size", [1, 3, 7])
def test_response_normalisation(order, seed, size):
    x, dy = drawn(seed, 2, 3, 4, 5), drawn(seed + 1, 2, 3, 4, 5)
    y, scale, dx = images.response_norm(*doubles(x, dy), size, 0.5, 0.75, 2.0)
    args = {"order": order, "size": size, "alpha": 0.5, "beta": 0.75, "bias": 2.0}
    ops = [
        op("LRN", "x", "y scale", **args),
        op("LRN", "x", "alone", **args),
        op("LRNGradient", "x y dy", "dx", **args),
    ]
    found_as(order, ops, {"x": x, "dy": dy}, "y scale alone dx", y=y, scale=scale, alone=y, dx=dx)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4), (2, 3), (2, 3, 2, 3, 4)], ids=str)
def test_an_order_is_switched_and_switched_back(shape):
    x = torch.randn(shape)
    ops = [op("NCHW2NHWC", "x", "last"), op("NHWC2NCHW", "last", "first")]
    last, first = run(ops, {"x": x}, "last first")
    assert torch.equal(last, x.movedim(1, -1)) and last.is_contiguous() and torch.equal(first, x)


def layers(order):
    """A net of images that trains: every operator that has an order."""
    o = {"order": order}
    window = {"kernel": 3, "pad": 1, **o}
    halved = {"kernel": 2, "stride": 2, **o}
    norm = {"size": 3, "alpha": 0.1, "beta": 0.75, **o}
    mean = {"kernel": 1, "global_pooling": 1, **o}
    forward = [
        op("Conv", "x w b", "c", **window),
        op("SpatialBN", "c s t m v", "n m v sm sv", **o),
        op("Relu", "n", "r"),
        op("MaxPool", "r", "p", **halved),
        op("LRN", "p", "l", **norm),
        op("ConvTranspose", "l u d", "e", **halved),
        op("AveragePool", "e", "a", **mean),
        op("FC", "a fw fb", "f"),
        op("SoftmaxWithLoss", "f y", "q loss"),
        op("ConstantFill", "loss", "loss_grad", value=1.0),
    ]
    backward = [
        op("SoftmaxWithLossGradient", "f y q loss_grad", "f_grad"),
        op("FCGradient", "a fw f_grad", "fw_grad fb_grad a_grad"),
        op("AveragePoolGradient", "e a a_grad", "e_grad", **mean),
        op("ConvTransposeGradient", "l u e_grad", "u_grad d_grad l_grad", **halved),
        op("LRNGradient", "p l l_grad", "p_grad", **norm),
        op("MaxPoolGradient", "r p p_grad", "r_grad", **halved),
        op("ReluGradient", "r r_grad", "n_grad"),
        op("SpatialBNGradient", "c s n_grad sm sv", "c_grad s_grad t_grad", **o),
        op("ConvGradient", "x w c_grad", "w_grad b_grad x_grad", **window),
    ]
    updates = [op("WeightedSum", f"{p} one {p}_grad rate", p) for p in ["w", "b", "s", "t", "u", "d", "fw", "fb"]]
    return forward + backward + updates


def trained(order, executor="reference", steps=4):
    """Losses, and what was trained, with channels last."""
    shapes = {
        "w": (4, 3, 3, 3),
        "b": (4,),
        "s": (4,),
        "t": (4,),
        "u": (4, 2, 2, 5),
        "d": (5,),
        "fw": (3, 5),
        "fb": (3,),
    }
    state = {name: laid(drawn(i, *shape) * 0.3, order) for i, (name, shape) in enumerate(shapes.items())}
    state |= {"m": torch.zeros(4), "v": torch.ones(4), "one": torch.ones(1), "rate": torch.tensor([-0.2])}
    inputs = {"x": laid(drawn(9, 6, 8, 6, 3), order), "y": torch.arange(6, dtype=torch.int32) % 3}
    lowered = caffe2.lower(program(layers(order), {**inputs, **state}), state=state, outputs=["loss"])
    graphir.verify(lowered)
    with graphir.runtime.Session(passes.emit(lowered), lowered.state, executor=executor) as session:
        losses = [session.step(**inputs)["loss"] for _ in range(steps)]
        kept = session.state_dict()
    turned = {n: t.movedim(1, -1) if order == "NCHW" and t.dim() > 2 else t for n, t in kept.items()}
    return torch.stack(losses), turned


def test_a_net_trains_alike_in_both_orders():
    (first, kept), (last, others) = trained("NCHW"), trained("NHWC")
    assert last[-1] < last[0] and kept.keys() == others.keys()
    close(first, last)
    for name, value in kept.items():
        close(others[name], value.contiguous(), 1e-4 if name in "wb" else 1e-5)  # a bias before a norm has no gradient


def test_channels_last_give_the_same_bits_by_every_executor():
    losses, kept = trained("NHWC")
    for executor in ("serial", "threads"):
        others, state = trained("NHWC", executor)
        assert torch.equal(losses, others) and all(torch.equal(kept[name], state[name]) for name in kept)


@pytest.mark.parametrize(
    "each, reason",
    [
        (op("Conv", "x w", "y", kernel=1, order="NCWH"), "order is 'NCWH'"),
        (op("SpatialBN", "x b b b b", "y", is_test=1, order="first"), "order is 'first'"),
        (op("LRN", "x", "y", size=2), "argument 'size' is 2"),
        (op("LRN", "x", "y"), "argument 'size' is 0"),
        (op("LRN", "b", "y", size=3), "is no batch of images"),
        (op("ConvTranspose", "x w", "y", kernel=1, stride=2, adj=2), r"adj is \[2, 2\], the stride \[2, 2\]"),
        (op("ConvTranspose", "x w", "y", kernel=1, legacy_pad=3), "argument 'legacy_pad' is 3"),
        (op("ConvTranspose", "x w", "y"), "a positive kernel size is needed"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(each, reason):
    inputs = {"x": torch.ones(1, 2, 3, 3), "w": torch.ones(2, 2, 1, 1), "b": torch.ones(2)}
    with pytest.raises(GraphirError, match=rf"{each.type} cannot be translated: .*{reason}"):
        run([each], {name: inputs[name] for name in each.input}, "y")
