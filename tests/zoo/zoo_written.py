"""Models that no library offers in a small form, written out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_rows import Batch, Row

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


WRITTEN: dict[str, Row] = {
    "vae": Row(VAE, pictures, vae_loss, 3),
    "dlrm": Row(DLRM, clicks, F.binary_cross_entropy_with_logits, 4),
}
