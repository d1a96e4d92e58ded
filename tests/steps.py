"""Training steps as people write them, each a function of its batch, after public scripts in words of their own.

A step is used as it is: what graphir adds stands outside of it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree
from zoo.zoo_rows import library

import graphir
from graphir import passes, runtime
from graphir.capturing.intake.found import read_function
from graphir.errors import GraphirError, PassError

__all__ = ["STEPS", "Made", "as_eager", "replicated"]

ROWS: Final = (6, 6, 4, 6, 3)
"""Rows of the batches of five steps: two sizes, and a short last one."""


class Made(NamedTuple):
    """A step and what it uses.

    Attributes:
        step: itself.
        state: modules and optimizers that it uses.
        batch: makes its arguments, of so many rows.
        between: what the script does between two steps.
    """

    step: Callable[..., Any]
    state: Sequence[Any]
    batch: Callable[[int, torch.Generator], tuple[Any, ...]]
    between: Callable[[], None] = lambda: None


def _rows(*shapes: tuple[int, ...], classes: int = 0) -> Callable[[int, torch.Generator], tuple[Any, ...]]:
    """Rows of these shapes, and their classes."""

    def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
        made = [torch.randn(rows, *shape, generator=draw) for shape in shapes]
        return (*made, *([torch.randint(classes, (rows,), generator=draw)] if classes else []))

    return batch


def _net(first: int = 8, last: int = 4, hidden: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, hidden), nn.ReLU(), nn.Linear(hidden, last))


def gan() -> Made:
    generator, judge = _net(4, 8), nn.Sequential(spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    opt_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(judge.parameters(), 2e-3, betas=(0.5, 0.999))

    def step(real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = generator(noise)
        opt_d.zero_grad()
        loss_d = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = F.softplus(-judge(fake)).mean()
        loss_g.backward()
        opt_g.step()
        return {"d": loss_d, "g": loss_g}

    return Made(step, (generator, judge, opt_g, opt_d), _rows((8,), (4,)))


def wasserstein() -> Made:
    """Two steps of a critic with a gradient penalty, one of the generator."""
    generator, critic = _net(4, 8), _net(8, 1)
    opt_g, opt_c = torch.optim.RMSprop(generator.parameters(), 1e-3), torch.optim.RMSprop(critic.parameters(), 1e-3)

    def step(real: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            opt_c.zero_grad()
            fake = generator(noise).detach()
            share = torch.rand(real.shape[0], 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(2, 1) - 1).square().mean()
            loss_c = critic(fake).mean() - critic(real).mean() + 10 * penalty
            loss_c.backward()
            opt_c.step()
        opt_g.zero_grad()
        loss_g = -critic(generator(noise)).mean()
        loss_g.backward()
        opt_g.step()
        return loss_c, loss_g

    return Made(step, (generator, critic, opt_g, opt_c), _rows((8,), (4,)))


class Momentum(nn.Module):
    """Two encoders, one an average of the other, and a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query = _net(8, 4)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))


def momentum_contrast() -> Made:
    model = Momentum()
    optimizer = torch.optim.SGD(model.query.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)

    def step(one: Tensor, two: Tensor) -> Tensor:
        query = F.normalize(model.query(one), dim=1)
        with torch.no_grad():
            for ours, theirs in zip(model.key.parameters(), model.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            key = F.normalize(model.key(two), dim=1)
        same, others = (query * key).sum(1, keepdim=True), query @ model.queue.clone()
        logits = torch.cat([same, others], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.queue.copy_(torch.cat([key.T, model.queue], 1)[:, :12])
        return loss

    return Made(step, (model, optimizer), _rows((8,), (8,)))


def siamese() -> Made:
    encoder, predictor = _net(8, 6), _net(6, 6)
    optimizer = torch.optim.SGD([*encoder.parameters(), *predictor.parameters()], 0.05, momentum=0.9)

    def step(one: Tensor, two: Tensor) -> Tensor:
        optimizer.zero_grad()
        first, second = encoder(one), encoder(two)
        loss = -F.cosine_similarity(predictor(first), second.detach()).mean() / 2
        loss = loss - F.cosine_similarity(predictor(second), first.detach()).mean() / 2
        loss.backward()
        optimizer.step()
        return loss

    return Made(step, (encoder, predictor, optimizer), _rows((8,), (8,)))


class Teacher(nn.Module):
    """An average of a student, and the center of what it says."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.net = copy.deepcopy(student).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 6))


def self_distillation() -> Made:
    student = _net(8, 6)
    teacher = Teacher(student)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)

    def step(small: Tensor, large: Tensor) -> Tensor:
        with torch.no_grad():
            said = teacher.net(large)
            wanted = ((said - teacher.center) / 0.04).softmax(1)
        loss = -(wanted * (student(small) / 0.1).log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(teacher.net.parameters(), student.parameters(), strict=True):
                ours.mul_(0.996).add_(theirs, alpha=0.004)
            teacher.center.mul_(0.9).add_(said.mean(0, keepdim=True), alpha=0.1)
        return loss

    return Made(step, (student, teacher, optimizer), _rows((8,), (8,)))


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(()))


def soft_actor_critic() -> Made:
    actor, first, second, temperature = _net(8, 2), _net(10, 1), _net(10, 1), Temperature()
    targets = copy.deepcopy(nn.ModuleList([first, second])).requires_grad_(False)
    opt_c = torch.optim.Adam([*first.parameters(), *second.parameters()], 1e-3)
    opt_a, opt_t = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(temperature.parameters(), 1e-3)

    def step(seen: Tensor, done: Tensor, reward: Tensor, then: Tensor) -> dict[str, Tensor]:
        alpha = temperature.log.exp().detach()
        with torch.no_grad():
            after = torch.cat([then, actor(then).tanh()], 1)
            worth = torch.min(targets[0](after), targets[1](after))
            wanted = reward + 0.99 * (worth - alpha)
        now = torch.cat([seen, done], 1)
        loss_c = F.mse_loss(first(now), wanted) + F.mse_loss(second(now), wanted)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        chosen = torch.cat([seen, actor(seen).tanh()], 1)
        loss_a = (alpha * chosen.square().sum(1, keepdim=True) - torch.min(first(chosen), second(chosen))).mean()
        opt_a.zero_grad()
        loss_a.backward()
        opt_a.step()
        loss_t = -(temperature.log * (chosen.detach().square().sum(1) - 2.0)).mean()
        opt_t.zero_grad()
        loss_t.backward()
        opt_t.step()
        with torch.no_grad():
            for mine, its in zip(targets, (first, second), strict=True):
                for ours, theirs in zip(mine.parameters(), its.parameters(), strict=True):
                    ours.lerp_(theirs, 0.005)
        return {"critic": loss_c, "actor": loss_a, "temperature": loss_t}

    state = (actor, first, second, temperature, targets, opt_c, opt_a, opt_t)
    return Made(step, state, _rows((8,), (2,), (1,), (8,)))


def proximal_policy() -> Made:
    policy, value = _net(8, 4), _net(8, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 3e-4, eps=1e-5)

    def step(seen: Tensor, gain: Tensor, done: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            before = policy(seen).log_softmax(1).gather(1, done[:, None])
        for _ in range(2):
            logs = policy(seen).log_softmax(1)
            ratio = (logs.gather(1, done[:, None]) - before).exp()
            clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            entropy = -(logs.exp() * logs).sum(1).mean()
            loss = -clipped + 0.5 * F.mse_loss(value(seen), gain) - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_([*policy.parameters(), *value.parameters()], 0.5)
            optimizer.step()
        return {"loss": loss, "entropy": entropy}

    return Made(step, (policy, value, optimizer), _rows((8,), (1,), classes=4))


def diffusion() -> Made:
    model = _net(9, 8)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        time, noise = torch.rand(x.shape[0], 1), torch.randn_like(x)
        mixed = (1 - time).sqrt() * x + time.sqrt() * noise
        loss = F.mse_loss(model(torch.cat([mixed, time], 1)), noise)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        return loss

    return Made(step, (model, average, optimizer), _rows((8,)))


def mixup() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        share = torch.rand(())
        out = model(share * x + (1 - share) * x.flip(0))
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "right": (out.argmax(1) == y).sum()}

    return Made(step, (model, optimizer), _rows((8,), classes=4))


def distillation() -> Made:
    teacher, student = _net(hidden=32).eval().requires_grad_(False), _net(hidden=8)
    optimizer = torch.optim.Adam(student.parameters(), 1e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (teacher(x) / 2).log_softmax(1)
        out = student(x)
        soft = F.kl_div((out / 2).log_softmax(1), wanted, reduction="batchmean", log_target=True) * 4
        loss = 0.7 * soft + 0.3 * F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Made(step, (teacher, student, optimizer), _rows((8,), classes=4))


class LowRank(nn.Module):
    """A frozen layer, and a product of two narrow ones beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(8, rank, bias=False), nn.Linear(rank, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) + 2 * self.up(self.down(x))
        return found


def low_rank() -> Made:
    model = nn.Sequential(LowRank(nn.Linear(8, 8)), nn.GELU(), LowRank(nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return Made(step, (model, optimizer), _rows((8,), classes=4))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.scale = _net(8, 4), _net(6, 4), nn.Parameter(torch.tensor(2.0))


def contrastive() -> Made:
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(image: Tensor, text: Tensor) -> Tensor:
        one, two = F.normalize(model.image(image), dim=1), F.normalize(model.text(text), dim=1)
        logits = model.scale.exp() * one @ two.T
        wanted = torch.arange(image.shape[0])
        loss = (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Made(step, (model, optimizer), _rows((8,), (6,)))


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_tasks = nn.Parameter(torch.ones(2))


def gradient_norms() -> Made:
    """Weights of two tasks, by the gradients that these have in a layer that they share."""
    shared, heads, weights = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)]), Weights()
    optimizer = torch.optim.SGD([*shared.parameters(), *heads.parameters()], 0.05)
    of_weights = torch.optim.SGD(weights.parameters(), 0.025)

    def step(x: Tensor, one: Tensor, two: Tensor) -> dict[str, Tensor]:
        hidden = shared(x).relu()
        losses = torch.stack([F.mse_loss(heads[0](hidden), one), F.mse_loss(heads[1](hidden), two)])
        scaled = weights.of_tasks * losses
        norms = [torch.autograd.grad(each, shared.weight, create_graph=True)[0].norm() for each in scaled]
        together = torch.stack(norms)
        balance = (together - together.mean().detach()).abs().sum()
        optimizer.zero_grad()
        of_weights.zero_grad()
        (of_tasks,) = torch.autograd.grad(balance, weights.of_tasks, retain_graph=True)
        (weights.of_tasks.detach() * losses).sum().backward()
        weights.of_tasks.grad = of_tasks
        optimizer.step()
        of_weights.step()
        return {"losses": losses, "weights": weights.of_tasks.detach().clone()}

    return Made(step, (shared, heads, weights, optimizer, of_weights), _rows((8,), (1,), (1,)))


def sharpness_aware() -> Made:
    model = _net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, 0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([param.grad.norm() for param in params if param.grad is not None]).norm()
            ways = [param.grad * (0.05 / (norm + 1e-12)) for param in params if param.grad is not None]
            torch._foreach_add_(params, ways)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(params, ways)
        optimizer.step()
        return loss

    return Made(step, (model, optimizer), _rows((8,), classes=4))


def accumulation() -> Made:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined]

    def step(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> dict[str, Any]:
        optimizer.zero_grad()
        for x, y in (one, two):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return {"loss": loss.detach(), "norm": norm}

    def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
        part = _rows((8,), classes=4)
        return part(rows, draw), part(rows, draw)

    return Made(step, (model, optimizer, scaler), batch)


def variational() -> Made:
    encoder, decoder = _net(8, 6), _net(3, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)

    def step(x: Tensor, beta: Tensor) -> dict[str, Tensor]:
        mean, log_variance = encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        built = F.mse_loss(decoder(code), x, reduction="sum") / x.shape[0]
        apart = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        optimizer.zero_grad()
        (built + beta * apart).backward()
        optimizer.step()
        return {"built": built, "apart": apart}

    def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(rows, 8, generator=draw), torch.tensor(0.5)

    return Made(step, (encoder, decoder, optimizer), batch)


def llama() -> Made:
    transformers = library("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, use_cache=False, **sizes))
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    scheduler = OneCycleLR(optimizer, 1e-3, total_steps=20)

    def step(input_ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
        return (torch.randint(32, (rows, 5), generator=draw),)

    return Made(step, (model, optimizer), batch, scheduler.step)


def whisper() -> Made:
    transformers = library("transformers")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "vocab_size": 40}
    tokens = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = transformers.WhisperConfig(max_source_positions=10, max_target_positions=12, **sizes, **heads, **tokens)
    model = transformers.WhisperForConditionalGeneration(config)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 1e-3)

    def step(input_features: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(input_features=input_features, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss  # type: ignore[no-any-return]

    def batch(rows: int, draw: torch.Generator) -> tuple[Any, ...]:
        return torch.randn(rows, 8, 20, generator=draw), torch.randint(3, 40, (rows, 6), generator=draw)

    return Made(step, (model, optimizer), batch)


def layer_decay() -> Made:
    """Groups whose learning rates fall from layer to layer, one cycle of rates and momenta, and an average."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(3)])
    groups = [{"params": list(layer.parameters()), "lr": 1e-2 * 0.5**i} for i, layer in enumerate(model)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    scheduler = OneCycleLR(optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=20)
    average = copy.deepcopy(model).requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = model(x)
        loss = F.cross_entropy(out, y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(list(average.parameters()), [param.detach() for param in model.parameters()], 0.1)
        return {"loss": loss, "right": (out.argmax(1) == y).sum()}

    return Made(step, (model, average, optimizer), _rows((8,), classes=4), scheduler.step)


def averaged() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    average = AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        return loss

    return Made(step, (model, average, optimizer), _rows((8,), classes=4))


def denoising() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.NAdam(model.parameters(), 1e-3)

    def step(x: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad()
        built = model(x + 0.1 * torch.randn_like(x))
        loss = F.smooth_l1_loss(built, x)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "built": built.detach()}

    return Made(step, (model, optimizer), _rows((8,)))


def metric_learning() -> Made:
    model = _net(8, 4)
    optimizer = torch.optim.Adamax(model.parameters(), 1e-3)

    def step(anchor: Tensor, near: Tensor, far: Tensor) -> dict[str, Tensor]:
        optimizer.zero_grad(set_to_none=False)
        found = [F.normalize(model(x), dim=1) for x in (anchor, near, far)]
        loss = F.triplet_margin_loss(*found, margin=0.3)
        loss.backward()
        optimizer.step()
        closer = (found[0] - found[1]).norm(dim=1) < (found[0] - found[2]).norm(dim=1)
        return {"loss": loss, "closer": closer.sum()}

    return Made(step, (model, optimizer), _rows((8,), (8,), (8,)))


class Tasks(nn.Module):
    """Two tasks, and how uncertain each is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.kind = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 4)
        self.uncertain = nn.Parameter(torch.zeros(2))


def uncertainty() -> Made:
    model = Tasks()
    optimizer = torch.optim.RAdam(model.parameters(), 1e-2)

    def step(x: Tensor, value: Tensor, kind: Tensor) -> dict[str, Tensor]:
        hidden = model.body(x).tanh()
        losses = torch.stack([F.mse_loss(model.value(hidden), value), F.cross_entropy(model.kind(hidden), kind)])
        loss = ((-model.uncertain).exp() * losses + model.uncertain).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "value": losses[0], "kind": losses[1]}

    return Made(step, (model, optimizer), _rows((8,), (1,), classes=4))


def adversarial() -> Made:
    """A step on what a step along the gradient's signs makes of the batch."""
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        delta = torch.zeros_like(x, requires_grad=True)
        (way,) = torch.autograd.grad(F.cross_entropy(model(x + delta), y), delta)
        out = model(x + 0.1 * way.sign())
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss, "right": (out.argmax(1) == y).sum()}

    return Made(step, (model, optimizer), _rows((8,), classes=4))


STEPS: Final[dict[str, Callable[[], Made]]] = {
    "GAN with spectral norm": gan,
    "WGAN with a gradient penalty": wasserstein,
    "momentum contrast": momentum_contrast,
    "siamese": siamese,
    "distillation without labels": self_distillation,
    "soft actor-critic": soft_actor_critic,
    "proximal policy": proximal_policy,
    "diffusion with an average": diffusion,
    "mixup": mixup,
    "distillation": distillation,
    "low rank": low_rank,
    "contrastive": contrastive,
    "gradient norms of tasks": gradient_norms,
    "sharpness-aware": sharpness_aware,
    "accumulation, clipping, scaler": accumulation,
    "variational, weight as an argument": variational,
    "Whisper": whisper,
    "LLaMA, OneCycleLR": llama,
    "layer decay, OneCycleLR": layer_decay,
    "average of weights and buffers": averaged,
    "denoising with dropout": denoising,
    "metric learning": metric_learning,
    "uncertainty of tasks": uncertainty,
    "adversarial": adversarial,
}


def _made(make: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    return make()


def _same(found: Any, expected: Any) -> bool:
    """Whether two structures have equal numbers, and equal other leaves; dicts in any order."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(_same(found[key], expected[key]) for key in found)
    if isinstance(found, (list, tuple)):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(found, Tensor):
        return torch.equal(found.detach(), torch.as_tensor(expected).detach())
    return bool(found == expected)


def as_eager(make: Callable[[], Made]) -> str:
    """How five steps differ from those run eagerly, in results, parameters, buffers and the optimizers' state; empty
    where they do not."""
    mine, eager = _made(make), _made(make)
    draw = torch.Generator().manual_seed(1)
    step = graphir.compile(mine.step, mine.batch(6, torch.Generator().manual_seed(2)), session={"binding": "cpu"})
    for number, rows in enumerate(ROWS):
        batch = eager.batch(rows, draw)
        found = step(*batch)
        with graphir.seeded(number):
            expected = eager.step(*batch)
        if not _same(found, expected):
            return f"results of step {number}"
        for made in (mine, eager):
            made.between()
    step.write_back()
    for ours, theirs in zip(mine.state, eager.state, strict=True):
        if not _same(ours.state_dict(), theirs.state_dict()):
            return f"the state of a {type(ours).__name__}"
    return ""


class _Together:
    """Two threads that run one step on the shares of a batch, and average the gradients of parameters in the order of
    the replicas.

    Args:
        at_once: whether gradients are averaged behind each backward, or when an optimizer, a scaler or clipping reads
            their sums.
    """

    def __init__(self, at_once: bool) -> None:
        self.at_once, self.barrier = at_once, threading.Barrier(2, timeout=60)
        self.given: list[Any] = [None, None]
        self.places: dict[int, int] = {}
        self.params: list[list[nn.Parameter]] = [[], []]
        self.fresh: list[dict[int, Tensor | None]] = [{}, {}]

    def mean(self, own: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of what both threads have computed."""
        place = self.places[threading.get_ident()]
        self.given[place] = own
        self.barrier.wait()
        pairs = list(zip(*self.given, strict=True))
        self.barrier.wait()
        return [None if a is None or b is None else (a + b) / 2 for a, b in pairs]

    def reduce(self) -> None:
        """Average what backwards have made since."""
        place = self.places[threading.get_ident()]
        params, fresh = self.params[place], self.fresh[place]
        own = [params[i] for i in fresh]
        with torch.no_grad():
            made = self.mean([param.grad for param in own])
            for param, before, grad in zip(own, fresh.values(), made, strict=True):
                param.grad = grad if before is None or grad is None else before + grad
        fresh.clear()

    def backward(self, run: Callable[[], Any]) -> Any:
        """A backward, whose gradients are kept apart from what is averaged."""
        params, fresh = (of[self.places[threading.get_ident()]] for of in (self.params, self.fresh))
        before = {i: param.grad for i, param in enumerate(params) if i not in fresh}
        for i in before:
            params[i].grad = None
        found = run()
        for i, grad in before.items():
            if params[i].grad is None:
                params[i].grad = grad
            else:
                fresh[i] = grad
        if self.at_once:
            self.reduce()
        return found

    def patched(self) -> contextlib.ExitStack:
        """While this is active, torch's functions do so in both threads."""
        stack = contextlib.ExitStack()
        backward, grad = torch.Tensor.backward, torch.autograd.grad

        def ours(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            return self.backward(lambda: backward(tensor, *args, **kwargs))

        def of_params(outputs: Any, inputs: Any, *args: Any, create_graph: bool = False, **kwargs: Any) -> Any:
            found = grad(outputs, inputs, *args, create_graph=create_graph, **kwargs)
            asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
            if create_graph or not all(isinstance(each, nn.Parameter) for each in asked):
                return found
            return tuple(self.mean(found))

        def behind(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.reduce()
                return function(*args, **kwargs)

            return call

        for owner, name, function in (
            (torch.Tensor, "backward", ours),
            (torch.autograd, "grad", of_params),
            (torch.nn.utils.clip_grad, "_get_total_norm", behind(torch.nn.utils.clip_grad._get_total_norm)),
            (torch.amp.GradScaler, "unscale_", behind(torch.amp.GradScaler.unscale_)),
        ):
            stack.enter_context(mock.patch.object(owner, name, function))
        stack.callback(register_optimizer_step_pre_hook(lambda *_: self.reduce()).remove)
        return stack


def _share_by_share(make: Callable[[], Made], program: graphir.Program, at_once: bool) -> list[dict[str, Tensor]]:
    """The state of the modules of each of two threads, after three steps on the shares of a batch."""
    together, states = _Together(at_once), [dict[str, Tensor](), dict[str, Tensor]()]
    mades = [_made(make), _made(make)]

    def run(place: int) -> None:
        made = mades[place]
        model = read_function(made.step).model
        together.places[threading.get_ident()] = place
        together.params[place] = list(model.parameters())
        together.barrier.wait()
        for number in range(3):
            leaves, spec = pytree.tree_flatten(made.batch(8, torch.Generator().manual_seed(3)))
            feeds = program.interface.feeds
            shares = [
                leaf if feed.batch_dim is None else leaf.chunk(2, feed.batch_dim)[place]
                for leaf, feed in zip(leaves, feeds, strict=True)
            ]
            with graphir.seeded(number, place):
                made.step(*pytree.tree_unflatten(shares, spec))
        states[place] = model.state_dict()

    with together.patched(), ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, place) for place in (0, 1)]:
            done.result()
    return states


def replicated(make: Callable[[], Made]) -> str:
    """Why two replicas cannot stand for the step; empty where they can, and where each has the bits of the step run on
    its share, with the gradients of both averaged, in the state of its modules after three steps."""
    mine = _made(make)
    batch = mine.batch(6, torch.Generator().manual_seed(2))
    try:
        program = passes.replicate(graphir.capture(mine.step, batch), [0, 1])
    except PassError as e:
        return e.what
    with runtime.Session(passes.emit(program), program.state, binding="cpu") as session:
        for _ in range(3):
            session.step(*mine.batch(8, torch.Generator().manual_seed(3)))
        found = [session.state_dict(0), session.state_dict(1)]
    if not any(_same(found, _share_by_share(make, program, at_once)) for at_once in (False, True)):
        raise GraphirError("replicas do not have the bits of the step on their shares")
    return ""
