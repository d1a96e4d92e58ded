"""Models for the table of predicted bytes: kinds that formulas had wrong, and twenty that none was written for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MISSED", "OTHERS", "Case"]


class Case(NamedTuple):
    """A training step: what is captured, and what it is run on."""

    model: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss: Callable[..., Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    options: Mapping[str, Any] = {"lr": 0.01}


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    """The loss of most of these models."""
    return ((out - target) ** 2).mean()


class Applied(nn.Module):
    """Layers with a function of their own between them."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.function = function

    def forward(self, *x: Tensor) -> Tensor:
        return self.function(self.layers, *x)


def images(channels: int = 3, size: int = 64, batch: int = 8) -> Tensor:
    return torch.randn(batch, channels, size, size)


def classes(batch: int = 8, count: int = 10) -> Tensor:
    return torch.randint(count, (batch,))


def conv(channels_in: int, channels: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, kernel, padding="same", **options)


def pooled(body: nn.Module, channels: int, x: Tensor, **changes: Any) -> Case:
    """A classifier of images."""
    head = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return Case(head, (x,), (classes(len(x)),), F.cross_entropy)._replace(**changes)


# Kinds that formulas have missed


def antialiased() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = F.relu(m["a"](x))
        h = F.interpolate(h, size=(40, 40), mode="bilinear", antialias=True)
        return m["b"](h)

    return Case(Applied(run, a=conv(3, 32), b=conv(32, 3)), (images(),), (images(size=40),), mean_square)


def antialiased_bicubic() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["b"](F.interpolate(m["a"](x), size=(96, 96), mode="bicubic", antialias=True))

    return Case(Applied(run, a=conv(3, 16), b=conv(16, 3)), (images(),), (images(size=96),), mean_square)


def unfolded() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        columns = F.unfold(m["a"](x), 3, padding=1).transpose(1, 2)
        return m["b"](columns).transpose(1, 2).reshape(-1, 8, 64, 64)

    layers = {"a": conv(3, 16), "b": nn.Linear(144, 8)}
    return Case(Applied(run, **layers), (images(),), (images(8),), mean_square)


def transformed() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        theta = m["where"](F.adaptive_avg_pool2d(x, 4).flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, [len(x), 3, 128, 128], align_corners=False)
        return m["a"](F.grid_sample(x, grid, align_corners=False))

    layers = {"where": nn.Linear(48, 6), "a": conv(3, 2, 1)}
    return Case(Applied(run, **layers), (images(size=128),), (images(2, 128),), mean_square)


def looked_up(optimizer: Callable[..., torch.optim.Optimizer], length: int = 32) -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["e"](x).sum(1)

    table = nn.Embedding(2000, 64, sparse=True)
    x = torch.randint(2000, (64, length))
    return Case(Applied(run, e=table), (x,), (torch.randn(64, 64),), mean_square, optimizer)


def channels_last() -> Case:
    body = nn.Sequential(conv(16, 32), nn.ReLU(), nn.AvgPool2d(3, 2, 1), conv(32, 32), nn.ReLU(), nn.MaxPool2d(2))
    x = images(16).contiguous(memory_format=torch.channels_last)
    return pooled(body.to(memory_format=torch.channels_last), 32, x)


def in_bf16() -> Case:
    body = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512, bias=False), nn.GELU(), nn.Linear(512, 64))
    x, y = torch.randn(256, 256), torch.randn(256, 64)
    return Case(body.bfloat16(), (x.bfloat16(),), (y.bfloat16(),), mean_square)


def positions_of_a_mask() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        positions = (x != 1).cumsum(1) * (x != 1)
        return m["out"](m["tokens"](x) + m["positions"](positions))

    layers = {"tokens": nn.Embedding(100, 8), "positions": nn.Embedding(600, 8), "out": nn.Linear(8, 4)}
    x = torch.randint(100, (16, 512))
    return Case(Applied(run, **layers), (x,), (torch.randn(16, 512, 4),), mean_square)


def grouped() -> Case:
    body = nn.Sequential(conv(3, 64), nn.ReLU(), conv(64, 64, groups=8), nn.ReLU(), conv(64, 64, groups=4))
    return pooled(body, 64, images())


def dilated() -> Case:
    body = nn.Sequential(conv(3, 32), nn.ReLU(), conv(32, 32, dilation=2), nn.ReLU(), conv(32, 32, dilation=4))
    return pooled(body, 32, images())


def wide_kernels() -> Case:
    body = nn.Sequential(conv(3, 32, 7), nn.ReLU(), conv(32, 32, 7, groups=32), nn.GELU(), conv(32, 40, 7))
    return pooled(body, 40, images())


class Attending(nn.Module):
    """A layer of attention, with or without a mask."""

    def __init__(self, width: int, heads: int, mask: Callable[[int], Tensor] | None = None) -> None:
        super().__init__()
        self.heads, self.mask = heads, mask
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if self.mask is None else self.mask(x.shape[1])
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(h.transpose(1, 2).flatten(2))


def attention(dtype: torch.dtype = torch.float32, masked: str = "") -> Case:
    def added(length: int) -> Tensor:
        return torch.ones(length, length, dtype=dtype).tril().log().clamp(min=-100.0)

    def boolean(length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    mask = {"": None, "added": added, "boolean": boolean}[masked]
    model = nn.Sequential(nn.Linear(64, 128), Attending(128, 4, mask), nn.Linear(128, 16)).to(dtype)
    return Case(model, (torch.randn(4, 256, 64, dtype=dtype),), (torch.randn(4, 256, 16, dtype=dtype),), mean_square)


MISSED: Final[Mapping[str, Callable[[], Case]]] = {
    "antialiased bilinear resizing": antialiased,
    "antialiased bicubic resizing": antialiased_bicubic,
    "windows as columns (im2col)": unfolded,
    "spatial transformer (affine grid)": transformed,
    "sparse Adam": lambda: looked_up(torch.optim.SparseAdam),
    "sparse Adagrad": lambda: looked_up(torch.optim.Adagrad),
    "sparse SGD": lambda: looked_up(torch.optim.SGD),
    "pools, channels last": channels_last,
    "linear layers in bf16": in_bf16,
    "positions of a mask (cumsum of bool)": positions_of_a_mask,
    "grouped convolutions": grouped,
    "dilated convolutions": dilated,
    "7 x 7 convolutions": wide_kernels,
    "attention in f64": lambda: attention(torch.float64),
    "attention with an added mask": lambda: attention(masked="added"),
    "attention with a boolean mask": lambda: attention(masked="boolean"),
}


# Twenty others


def speech() -> Case:
    """Convolutions over time, a GRU in both directions, a phone for each frame."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = F.relu(m["conv"](x)).transpose(1, 2)
        return m["out"](m["gru"](h)[0]).flatten(0, 1)

    gru = nn.GRU(64, 48, batch_first=True, bidirectional=True)
    layers = {"conv": nn.Conv1d(40, 64, 5, 2, 2), "gru": gru, "out": nn.Linear(96, 30)}
    return Case(Applied(run, **layers), (torch.randn(8, 40, 60),), (classes(240, 30),), F.cross_entropy)


def recurrent_language_model() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = m["e"](x)
        with torch.backends.mkldnn.flags(enabled=False):
            h, _ = m["lstm"](h)
        return m["out"](h).flatten(0, 1)

    layers = {"e": nn.Embedding(500, 64), "lstm": nn.LSTM(64, 96, 2, batch_first=True), "out": nn.Linear(96, 500)}
    x = torch.randint(500, (8, 24))
    return Case(Applied(run, **layers), (x,), (classes(192, 500),), F.cross_entropy, torch.optim.Adam)


def fourier_mixing() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = m["norm"](x + torch.fft.fft2(x, dim=(1, 2)).real)
        return m["b"](F.gelu(m["a"](h)))

    layers = {"norm": nn.LayerNorm(64), "a": nn.Linear(64, 256), "b": nn.Linear(256, 64)}
    return Case(Applied(run, **layers), (torch.randn(8, 128, 64),), (torch.randn(8, 128, 64),), mean_square)


def radiance_field() -> Case:
    """Positions in frequencies, an MLP, and colours added along rays."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        scaled = x.unsqueeze(-1) * 2.0 ** torch.arange(6)
        h = m["net"](torch.cat([scaled.sin(), scaled.cos()], -1).flatten(2))
        density, colour = F.softplus(h[..., :1]), h[..., 1:].sigmoid()
        alpha = 1 - torch.exp(-density * 0.1)
        seen = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
        return (seen * alpha * colour).sum(1)

    net = nn.Sequential(nn.Linear(36, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    return Case(Applied(run, net=net), (torch.rand(128, 32, 3),), (torch.rand(128, 3),), mean_square, torch.optim.Adam)


def point_cloud() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["head"](m["each"](x).max(2).values)

    each = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1), nn.ReLU())
    return Case(
        Applied(run, each=each, head=nn.Linear(128, 10)), (torch.randn(8, 3, 256),), (classes(),), F.cross_entropy
    )


def volumes() -> Case:
    body = nn.Sequential(
        nn.Conv3d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.LeakyReLU(), nn.MaxPool3d(2),
        nn.Conv3d(16, 16, 3, padding=1), nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(16, 1, 1),
    )  # fmt: skip
    return Case(body, (torch.randn(2, 1, 24, 24, 24),), (torch.randn(2, 1, 24, 24, 24),), mean_square)


def quantised() -> Case:
    """A vector-quantised autoencoder: distances to a codebook, the nearest entry, gradients passed through."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = m["encode"](x).permute(0, 2, 3, 1)
        codes = torch.cdist(h.flatten(0, 2), m["book"].weight).argmin(1)
        found = m["book"](codes).view_as(h)
        return m["decode"]((h + (found - h).detach() + 0.1 * found).permute(0, 3, 1, 2))

    layers = {
        "encode": nn.Conv2d(3, 32, 4, 4),
        "book": nn.Embedding(128, 32),
        "decode": nn.ConvTranspose2d(32, 3, 4, 4),
    }
    return Case(Applied(run, **layers), (images(),), (images(),), mean_square, torch.optim.AdamW)


def flow() -> Case:
    """Affine couplings, whose loss has the determinant's logarithm."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        total: Any = 0
        for net in m.values():
            a, b = x.chunk(2, 1)
            shift, scale = net(a).chunk(2, 1)
            x = torch.cat([b * torch.exp(torch.tanh(scale)) + shift, a], 1)
            total = total + torch.tanh(scale).sum(1)
        return 0.5 * (x**2).sum(1) - total

    nets = {f"n{i}": nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 32)) for i in range(4)}
    return Case(Applied(run, **nets), (torch.randn(512, 32),), (), lambda out: out.mean(), torch.optim.RMSprop)


def differential_equation() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        for _ in range(3):
            a = m["f"](x)
            b = m["f"](x + 0.05 * a)
            c = m["f"](x + 0.05 * b)
            x = x + 0.1 * (a + 2 * b + 2 * c + m["f"](x + 0.1 * c)) / 6
        return x

    f = nn.Sequential(nn.Linear(32, 128), nn.Softplus(), nn.Linear(128, 32))
    return Case(Applied(run, f=f), (torch.randn(256, 32),), (torch.randn(256, 32),), F.smooth_l1_loss)


def sub_pixels() -> Case:
    body = nn.Sequential(conv(3, 32, 5), nn.Tanh(), conv(32, 16), nn.Tanh(), conv(16, 12), nn.PixelShuffle(2))
    return Case(body, (images(size=32),), (images(),), F.l1_loss, torch.optim.Adam)


def modulated() -> Case:
    """StyleGAN's convolutions, whose weights differ by sample: one group for each."""

    def run(m: nn.ModuleDict, x: Tensor, style: Tensor) -> Tensor:
        weight = m["conv"].weight.unsqueeze(0) * m["style"](style).view(-1, 1, 16, 1, 1)
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        out = F.conv2d(x.reshape(1, -1, 32, 32), weight.flatten(0, 1), padding=1, groups=len(x))
        return F.leaky_relu(out.view(len(x), 16, 32, 32), 0.2)

    layers = {"conv": nn.Conv2d(16, 16, 3), "style": nn.Linear(32, 16)}
    return Case(Applied(run, **layers), (images(16, 32, 4), torch.randn(4, 32)), (images(16, 32, 4),), mean_square)


def temporal() -> Case:
    """A temporal convolutional net: dilated, depthwise and weight-normalised convolutions over time."""
    body = nn.Sequential(
        nn.Conv1d(8, 32, 3, padding=2, dilation=2), nn.PReLU(), nn.Dropout(0.1),
        nn.Conv1d(32, 32, 3, padding=4, dilation=4, groups=32), nn.BatchNorm1d(32), nn.PReLU(), nn.Conv1d(32, 8, 1),
    )  # fmt: skip
    return Case(body, (torch.randn(8, 8, 400),), (torch.randn(8, 8, 400),), F.huber_loss)


def selective_scan() -> Case:
    """A state-space layer: decays added up in logarithms, and a depthwise convolution over time."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h, gate = m["in"](x).chunk(2, -1)
        h = F.silu(m["conv"](h.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay = F.softplus(m["decay"](h)).cumsum(1)
        states = torch.logcumsumexp(decay + F.logsigmoid(h), 1) - decay
        return m["out"](states * F.silu(gate))

    conv1 = nn.Conv1d(64, 64, 4, padding=3, groups=64)
    layers = {"in": nn.Linear(32, 128), "conv": conv1, "decay": nn.Linear(64, 64), "out": nn.Linear(64, 32)}
    return Case(Applied(run, **layers), (torch.randn(8, 96, 32),), (torch.randn(8, 96, 32),), mean_square)


def linear_attention() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = m["qkv"](x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        out = torch.einsum("bnd,bde->bne", q, torch.einsum("bnd,bne->bde", k, v))
        return m["out"](out / (q @ k.sum(1).unsqueeze(-1)))

    layers = {"qkv": nn.Linear(64, 192), "out": nn.Linear(64, 64)}
    return Case(Applied(run, **layers), (torch.randn(8, 256, 64),), (torch.randn(8, 256, 64),), mean_square)


class RootMeanSquare(nn.Module):
    """LLaMA's norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def llama() -> Case:
    """Rotary positions, keys shared by several heads, a gated MLP."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = m["e"](x)
        q, k, v = m["qkv"](m["n1"](h)).split([128, 32, 32], -1)
        angles = torch.outer(torch.arange(x.shape[1]), 10000 ** (-torch.arange(0, 32, 2) / 32)).repeat(1, 2)

        def turned(t: Tensor) -> Tensor:
            t = t.unflatten(2, (-1, 32)).transpose(1, 2)
            a, b = t.chunk(2, -1)
            return t * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

        values = v.unflatten(2, (-1, 32)).transpose(1, 2)
        out = F.scaled_dot_product_attention(turned(q), turned(k), values, is_causal=True, enable_gqa=True)
        h = h + m["o"](out.transpose(1, 2).flatten(2))
        a = m["n2"](h)
        return m["head"](h + m["down"](F.silu(m["gate"](a)) * m["up"](a))).flatten(0, 1)

    layers = {
        "e": nn.Embedding(300, 128), "n1": RootMeanSquare(128), "qkv": nn.Linear(128, 192, bias=False),
        "o": nn.Linear(128, 128), "n2": RootMeanSquare(128), "gate": nn.Linear(128, 344, bias=False),
        "up": nn.Linear(128, 344, bias=False), "down": nn.Linear(344, 128, bias=False), "head": nn.Linear(128, 300),
    }  # fmt: skip
    x = torch.randint(300, (4, 96))
    return Case(Applied(run, **layers), (x,), (torch.randint(300, (384,)),), F.cross_entropy, torch.optim.AdamW)


def factorisation_machine() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        e = m["e"](x)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1)
        return m["deep"](e.flatten(1)).squeeze(1) + pairs

    deep = nn.Sequential(nn.Linear(160, 64), nn.ReLU(), nn.Linear(64, 1))
    layers = {"e": nn.Embedding(1000, 16), "deep": deep}
    x, y = torch.randint(1000, (256, 10)), torch.rand(256)
    return Case(Applied(run, **layers), (x,), (y,), F.binary_cross_entropy_with_logits, torch.optim.Adagrad)


def message_passing() -> Case:
    def run(m: nn.ModuleDict, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = torch.relu(m["a"](nodes))
        for _ in range(2):
            sent = m["edge"](torch.cat([h[source], h[target]], 1))
            total = torch.zeros_like(h).index_add(0, target, sent)
            h = h + torch.tanh(total.scatter_reduce(0, target.unsqueeze(1).expand_as(sent), sent, "amax"))
        return m["out"](h)

    layers = {"a": nn.Linear(16, 32), "edge": nn.Linear(64, 32), "out": nn.Linear(32, 4)}
    given = torch.randn(200, 16), torch.randint(200, (2, 900))
    return Case(
        Applied(run, **layers), given, (torch.randn(200, 4),), mean_square,
    )  # fmt: skip


def squeezed() -> Case:
    """Squeeze and excitation, hard activations, separable convolutions with stride."""

    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        h = F.hardswish(m["n1"](m["a"](x)))
        h = m["n2"](m["b"](h))
        weight = F.hardsigmoid(m["up"](F.relu(m["down"](h.mean((2, 3), keepdim=True)))))
        return m["out"](F.adaptive_avg_pool2d(h * weight, 1).flatten(1))

    layers = {
        "a": nn.Conv2d(3, 48, 3, 2, 1, bias=False), "n1": nn.BatchNorm2d(48), "out": nn.Linear(48, 10),
        "b": nn.Conv2d(48, 48, 5, 2, 2, groups=48, bias=False), "n2": nn.BatchNorm2d(48),
        "down": nn.Conv2d(48, 12, 1), "up": nn.Conv2d(12, 48, 1),
    }  # fmt: skip
    return Case(Applied(run, **layers), (images(),), (classes(),), F.cross_entropy)


def mixture_density() -> Case:
    def run(m: nn.ModuleDict, x: Tensor) -> Tensor:
        return m["net"](x)

    def loss(out: Tensor, target: Tensor) -> Tensor:
        weights, means, scales = out.chunk(3, 1)
        scores = -0.5 * ((target - means) / F.softplus(scales)) ** 2 - F.softplus(scales).log()
        return -torch.logsumexp(weights.log_softmax(1) + scores - 0.5 * math.log(2 * math.pi), 1).mean()

    net = nn.Sequential(nn.Linear(8, 128), nn.SELU(), nn.Linear(128, 96))
    return Case(Applied(run, net=net), (torch.randn(512, 8),), (torch.randn(512, 1),), loss, torch.optim.Adam)


def contrastive() -> Case:
    """Two views of images, normalised, each against all others."""

    def run(m: nn.ModuleDict, a: Tensor, b: Tensor) -> Tensor:
        x, y = F.normalize(m["net"](a)), F.normalize(m["net"](b))
        return x @ y.t() / 0.1

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) + F.cross_entropy(out.t(), target)

    body = nn.Sequential(nn.Conv2d(3, 24, 8, 8), nn.InstanceNorm2d(24, affine=True), nn.GELU(), nn.Flatten())
    net = nn.Sequential(body, nn.Linear(24 * 64, 64), nn.LayerNorm(64))
    return Case(Applied(run, net=net), (images(), images()), (torch.arange(8),), loss)


OTHERS: Final[Mapping[str, Callable[[], Case]]] = {
    "speech": speech,
    "LSTM language model": recurrent_language_model,
    "Fourier mixing": fourier_mixing,
    "radiance field": radiance_field,
    "point cloud": point_cloud,
    "volumes (3-d)": volumes,
    "vector-quantised autoencoder": quantised,
    "normalising flow": flow,
    "differential equation": differential_equation,
    "sub-pixel convolutions": sub_pixels,
    "modulated convolutions": modulated,
    "temporal convolutions": temporal,
    "selective scan": selective_scan,
    "linear attention": linear_attention,
    "LLaMA layer": llama,
    "factorisation machine": factorisation_machine,
    "message passing": message_passing,
    "squeeze and excitation": squeezed,
    "mixture density": mixture_density,
    "contrastive": contrastive,
}
