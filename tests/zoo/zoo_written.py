"""Models that no library offers in a small form, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_rows import Batch, Row, images

__all__ = ["WRITTEN"]


class VAE(nn.Module):
    """A variational autoencoder: returns the reconstruction, the mean and the logarithm of the variance."""

    def __init__(self, features: int = 12, hidden: int = 16, latent: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, hidden), nn.Softplus())
        self.mean, self.log_variance = nn.Linear(hidden, latent), nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ELU(), nn.Linear(hidden, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(z), mean, log_variance


def vae_loss(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> dict[str, Tensor]:
    decoded, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
    return {"reconstruction": F.binary_cross_entropy_with_logits(decoded, x), "divergence": divergence}


def pictures(n: int) -> Batch:
    x = torch.rand(n, 12)
    return Batch((x,), (x,))


class DLRM(nn.Module):
    """A recommendation model: dense features and bags of categories, whose embeddings interact pairwise."""

    def __init__(self, dense: int = 5, rows: tuple[int, ...] = (20, 30, 10), width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        i, j = torch.tril_indices(len(rows) + 1, len(rows) + 1, offset=-1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense: Tensor, *lookups: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(lookup) for table, lookup in zip(self.tables, lookups, strict=True)]
        stacked = torch.stack([x, *bags], dim=1)
        interactions = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.i, self.j]
        return self.top(torch.cat([x, interactions], dim=1)).squeeze(1)


def clicks(n: int) -> Batch:
    lookups = [torch.randint(rows, (n, 3)) for rows in (20, 30, 10)]
    return Batch((torch.randn(n, 5), *lookups), (torch.randint(2, (n,)).float(),))


class Autoencoder(nn.Module):
    """Convolutions down to a code, transposed ones up again; the decoder's last weight is the encoder's first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.norm, self.up = nn.InstanceNorm2d(16, affine=True), nn.ConvTranspose2d(16, 8, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        code = F.leaky_relu(self.norm(self.second(F.celu(self.first(x)))), 0.1)
        up = F.silu(self.up(code))
        return F.conv_transpose2d(up, self.first.weight, stride=2, padding=1, output_padding=1).sigmoid()


class UNet(nn.Module):
    """Two levels down and up, with bilinear upsampling and connections across."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()

        def block(channels_in: int, channels: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels_in, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels), nn.Mish()
            )

        self.down1, self.down2, self.bottom = block(3, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        bottom = self.bottom(F.avg_pool2d(second, 2))
        up = self.up2(torch.cat([F.interpolate(bottom, scale_factor=2, mode="bilinear"), second], 1))
        return self.head(self.up1(torch.cat([F.interpolate(up, scale_factor=2, mode="nearest"), first], 1)))


def dice(logits: Tensor, target: Tensor) -> Tensor:
    """One minus twice the overlap over the sum."""
    chance = logits.softmax(1)[:, 1].flatten(1)
    truth = target.flatten(1).float()
    return (1 - (2 * (chance * truth).sum(1) + 1) / (chance.sum(1) + truth.sum(1) + 1)).mean()


class MixtureOfExperts(nn.Module):
    """Each token goes to its two best experts, by weights: every expert sees every token, so that shapes are known."""

    def __init__(self, width: int = 8, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(experts)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(x).softmax(-1)
        best, chosen = chances.topk(2)
        weights = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        mixed = sum(expert(x) * weights[..., i, None] for i, expert in enumerate(self.experts))
        used = weights.gt(0).float().mean((0, 1))
        return self.head(x + mixed), (used * chances.mean((0, 1))).sum()


def routed_loss(output: tuple[Tensor, Tensor], target: Tensor) -> dict[str, Tensor]:
    logits, balance = output
    return {"task": F.cross_entropy(logits.flatten(0, 1), target.flatten()), "balance": 0.01 * balance}


class GAN(nn.Module):
    """Generator and discriminator in one step: the generator's gradients pass through the discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(6, 32), nn.Unflatten(1, (2, 4, 4)), nn.BatchNorm2d(2), nn.ReLU(),
            nn.ConvTranspose2d(2, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.utils.parametrizations.weight_norm(nn.Linear(64, 1)),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor) -> dict[str, Tensor]:
        fake = self.generator(noise)
        return {
            "real": self.discriminator(real),
            "fake": self.discriminator(fake.detach()),
            "fooled": self.discriminator(fake),
        }


def adversarial_loss(output: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        "discriminator": F.softplus(-output["real"]).mean() + F.softplus(output["fake"]).mean(),
        "generator": F.binary_cross_entropy_with_logits(output["fooled"], torch.ones_like(output["fooled"])),
    }


class GraphNet(nn.Module):
    """Messages along edges, gathered from their sources and added up, averaged and maximised at their targets."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.message, self.leave = nn.Linear(4, width), nn.Linear(2 * width, width), nn.Linear(3 * width, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = F.elu(self.enter(nodes))
        source, target = edges.unbind(1)
        messages = F.relu(self.message(torch.cat([x[source], x.index_select(0, target)], 1)))
        where = target[:, None].expand_as(messages)
        empty = torch.zeros_like(x)
        total = empty.index_add(0, target, messages)
        mean = empty.scatter_reduce(0, where, messages, "mean", include_self=False)
        most = empty.scatter_reduce(0, where, messages, "amax")
        return self.leave(torch.cat([total, mean, most], 1))


class GraphAttention(nn.Module):
    """Attention over the edges of a graph: a softmax at each target, by scatters."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.project = nn.Linear(4, width * heads, bias=False)
        self.score = nn.Parameter(torch.randn(2, heads, width) * 0.1)
        self.heads, self.width, self.leave = heads, width, nn.Linear(width * heads, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.project(nodes).view(-1, self.heads, self.width)
        left, right = torch.einsum("nhw,khw->knh", x, self.score)
        source, target = edges[:, 0], edges[:, 1]
        scores = F.leaky_relu(left[source] + right[target], 0.2)
        where = target[:, None].expand_as(scores)
        highest = torch.full_like(left, -1e9).scatter_reduce(0, where, scores.detach(), "amax")
        weights = torch.exp(scores - highest[target])
        total = torch.zeros_like(left).scatter_add(0, where, weights)
        weights = weights / total[target]
        gathered = torch.zeros_like(x).index_add(0, target, x[source] * weights[..., None])
        return self.leave(F.elu(gathered.flatten(1)))


def graph(n: int) -> Batch:
    """A graph of n nodes with as many edges: batches of edges and nodes grow together."""
    return Batch((torch.randn(n, 4), torch.randint(n, (n, 2))), (torch.randint(3, (n,)),))


class Capsules(nn.Module):
    """Capsules that agree with each other by two rounds of routing, written with einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, 2)
        self.votes = nn.Parameter(torch.randn(5, 18, 4, 6) * 0.1)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True)
        return norm / (1 + norm) * x / (norm + 1e-8).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        lower = self.squash(F.relu(self.conv(x)).view(x.shape[0], 18, 4))
        votes = torch.einsum("kidj,bid->bkij", self.votes, lower)
        agreement = torch.zeros_like(votes[..., 0])
        for _ in range(2):
            upper = self.squash(torch.einsum("bki,bkij->bkj", agreement.softmax(1), votes))
            agreement = agreement + torch.einsum("bkij,bkj->bki", votes, upper)
        return upper.norm(dim=-1)


def margin_loss(lengths: Tensor, target: Tensor) -> Tensor:
    present = F.one_hot(target, 5).to(lengths.dtype)
    return (present * F.relu(0.9 - lengths) ** 2 + 0.5 * (1 - present) * F.relu(lengths - 0.1) ** 2).sum(1).mean()


class Translator(nn.Module):
    """torch's own transformer, encoder and decoder, with a causal mask and dropout."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(20, width, padding_idx=0), nn.Embedding(30, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, 30)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(
            self.transformer(self.source(source), self.target(target), tgt_mask=causal, tgt_is_causal=True)
        )


def sentences(n: int) -> Batch:
    return Batch((torch.randint(20, (n, 6)), torch.randint(30, (n, 5))), (torch.randint(30, (n, 5)),))


def next_word_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), target, label_smoothing=0.1, ignore_index=0)


class Siamese(nn.Module):
    """One net on anchor, positive and negative; embeddings of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.PReLU(), nn.LayerNorm(16), nn.Linear(16, 8))

    def forward(self, *images: Tensor) -> list[Tensor]:
        return [F.normalize(self.net(image), dim=1) for image in images]


class WaveNet(nn.Module):
    """Dilated causal convolutions in one dimension with gates and skipped connections."""

    def __init__(self, width: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Conv1d(1, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))
        self.mixes = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.leave = nn.Conv1d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skipped = torch.zeros_like(x)
        for i, (layer, mix) in enumerate(zip(self.layers, self.mixes, strict=True)):
            signal, gate = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            out = mix(torch.tanh(signal) * torch.sigmoid(gate))
            skipped, x = skipped + out, x + out
        return self.leave(F.relu(skipped))


class Diffusion(nn.Module):
    """Predicts the noise that was added at a time, which enters by sines."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time, self.enter = nn.Linear(8, width), nn.Conv2d(3, width, 3, padding=1)
        self.norm, self.leave = nn.GroupNorm(2, width), nn.Conv2d(width, 3, 3, padding=1)
        self.register_buffer("scale", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        kept = self.scale[time][:, None, None, None]
        noise = torch.randn_like(x)
        angles = time[:, None].float() * torch.exp(-torch.arange(4) / 4)
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        mixed = self.enter(kept.sqrt() * x + (1 - kept).sqrt() * noise) + embedded[:, :, None, None]
        return F.mse_loss(self.leave(F.hardswish(self.norm(mixed))), noise)


class Permuted(nn.Module):
    """Activations, norms and losses on transposed tensors, where kernels choose layouts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(8)
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(0, 1)
        for activation in (F.elu, F.softplus, F.hardswish, F.hardsigmoid, F.relu6, F.logsigmoid, F.celu, F.selu):
            x = activation(x).transpose(1, 2).contiguous().transpose(1, 2)
        x = self.norm(x).transpose(0, 1)
        return self.last(self.batch_norm(x)).log_softmax(1).transpose(1, 2)


def regression_losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    losses = {"mse": F.mse_loss, "smooth": F.smooth_l1_loss, "huber": F.huber_loss, "l1": F.l1_loss}
    return {name: loss(output, target.transpose(1, 2)) for name, loss in losses.items()}


WRITTEN: dict[str, Row] = {
    "autoencoder": Row(
        Autoencoder, lambda n: Batch((image := torch.rand(n, 3, 16, 16),), (image,)), F.binary_cross_entropy
    ),
    "capsules": Row(Capsules, images(10, 1, 5), margin_loss),
    "diffusion": Row(
        Diffusion, lambda n: Batch((torch.randn(n, 3, 8, 8), torch.randint(10, (n,)))), lambda loss: loss, 3
    ),
    "dlrm": Row(DLRM, clicks, F.binary_cross_entropy_with_logits, 4),
    "gan": Row(GAN, lambda n: Batch((torch.randn(n, 6), torch.randn(n, 3, 8, 8))), adversarial_loss, 3),
    "graph attention": Row(GraphAttention, graph, F.cross_entropy, 7),
    "graph net": Row(GraphNet, graph, F.cross_entropy, 7),
    "mixture of experts": Row(
        MixtureOfExperts, lambda n: Batch((torch.randn(n, 6, 8),), (torch.randint(5, (n, 6)),)), routed_loss
    ),
    "permuted": Row(Permuted, lambda n: Batch((torch.randn(n, 5, 6),), (torch.randn(n, 5, 4),)), regression_losses, 3),
    "siamese": Row(
        Siamese,
        lambda n: Batch(tuple(torch.randn(3, n, 6))),
        lambda found: F.triplet_margin_loss(*found) + F.cosine_similarity(*found[:2]).mean(),
        4,
    ),
    "transformer": Row(Translator, sentences, next_word_loss),
    "u-net": Row(UNet, lambda n: Batch((torch.randn(n, 3, 16, 16),), (torch.randint(2, (n, 16, 16)),)), dice),
    "vae": Row(VAE, pictures, vae_loss, 3),
    "wavenet": Row(WaveNet, lambda n: Batch((torch.randn(n, 1, 16),), (torch.randint(4, (n, 16)),)), F.cross_entropy),
}
