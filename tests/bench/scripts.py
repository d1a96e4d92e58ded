"""Training scripts of public libraries, with and without the line that places the model: losses and weights."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy
import torch
from limits import limited
from placed_nets import placed
from torch import nn
from torch.nn import functional as F
from zoo_rows import library

import graphir

__all__ = ["rows"]

DROPOUT: Final = 0.1
ROWS, BATCH, STEPS, MORE = 16, 4, 4, 6


class Ran(NamedTuple):
    """What a script has computed."""

    losses: list[float]
    model: nn.Module


Place = Callable[..., nn.Module]
Script = Callable[[Place, float], Ran]


def rows() -> Iterator[str]:
    """By script: how many of its losses and weights are others with the line, on two devices within 0.6 of what one
    would need, each; and with dropout, how many are others than on one device."""
    yield "| script | losses | weights | others on two devices | with dropout, others than on one device |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, script in _scripts().items():
        plain, two = script(lambda model, *_, **__: model, 0.0), script(placed, 0.0)
        assert plain.losses and two.model.placement.plans  # type: ignore[union-attr]
        one, both = script(_alone, DROPOUT), script(placed, DROPOUT)
        losses, weights = len(plain.losses), len(plain.model.state_dict())
        others = [limited(str(_others(*pair)), at_most=0) for pair in ((plain, two), (one, both))]
        yield f"| {name} | {losses} | {weights} | {' | '.join(others)} |"


def _alone(model: nn.Module, inputs: Any = (), **options: Any) -> nn.Module:
    return graphir.place(model, inputs, **options)


def _others(one: Ran, other: Ran) -> int:
    """How many losses and weights are not equal."""
    found = sum(a != b for a, b in zip(one.losses, other.losses, strict=True))
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    return found + sum(not torch.equal(a, b) for a, b in pairs)


def _scripts() -> Mapping[str, Script]:
    llama, vit, t5 = _llama(), _vit(), _t5()
    return {
        "Trainer, LLaMA": _trainer(*llama),
        "Trainer, LLaMA, 2 batches a step": _trainer(*llama, gradient_accumulation_steps=2),
        "Trainer, LLaMA, checkpointing": _trainer(*llama, gradient_checkpointing=True),
        "Trainer, ViT": _trainer(*vit),
        "Trainer, ViT, checkpointing": _trainer(*vit, gradient_checkpointing=True),
        "Trainer, T5": _trainer(*t5),
        "Trainer, T5, 2 batches a step": _trainer(*t5, gradient_accumulation_steps=2),
        "timm, mixup, average of weights": _timm,
    }


Model = Callable[[float], nn.Module]
Data = list[dict[str, torch.Tensor]]


def _texts() -> tuple[Data, torch.Tensor, torch.Tensor]:
    """Rows of numbers, each padded: a mask of ones alone is left out by the model's own code."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 64, (ROWS, 12), generator=draw)
    mask = (torch.arange(12) < 9 + torch.arange(ROWS)[:, None] % 3).long()
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)], ids, mask


def _llama() -> tuple[Model, Data]:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    data, ids, mask = _texts()
    for row, i, m in zip(data, ids, mask, strict=True):
        row["labels"] = i.where(m > 0, -100)

    def model(dropout: float) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, attention_dropout=dropout, **sizes
        )
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]

    return model, data


def _vit() -> tuple[Model, Data]:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 32, 32, generator=draw)
    labels = torch.randint(5, (ROWS,), generator=draw)

    def model(dropout: float) -> nn.Module:
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        config = transformers.ViTConfig(image_size=32, patch_size=8, num_labels=5, **sizes, **drops)
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    return model, [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]


def _t5() -> tuple[Model, Data]:
    transformers = library("transformers")
    data, ids, mask = _texts()
    for row, i, m in zip(data, ids.flip(1), mask, strict=True):
        row["labels"] = i.where(m > 0, -100)

    def model(dropout: float) -> nn.Module:
        config = transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=dropout
        )
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]

    return model, data


def _trainer(made: Model, data: Data, **options: Any) -> Script:
    """A Trainer that evaluates and saves on the way, and another one that resumes from what was saved."""

    def script(place: Place, dropout: float) -> Ran:
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers = library("transformers")
        torch.manual_seed(0)
        model = made(dropout)
        batch = {name: torch.stack([row[name] for row in data[:BATCH]]) for name in data[0]}
        place(model, (), kwargs=batch, optimizer="AdamW")
        arguments = {"per_device_train_batch_size": BATCH, "report_to": [], "disable_tqdm": True, "use_cpu": True}
        often = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            given = transformers.TrainingArguments(folder, max_steps=STEPS, **often, **arguments, **options)
            trainer = transformers.Trainer(model, given, train_dataset=data, eval_dataset=data[: BATCH + 1])
            trainer.train()
            losses = [entry.get("loss", entry.get("eval_loss", 0.0)) for entry in trainer.state.log_history]
            given = transformers.TrainingArguments(folder, max_steps=MORE, **arguments, **options)
            trainer = transformers.Trainer(model, given, train_dataset=data)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS}")
            losses += [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
        return Ran(losses, model)

    return script


def _timm(place: Place, dropout: float) -> Ran:
    """timm's training step, with its mixup, its loss of soft targets, and its average of weights."""
    timm = library("timm")
    parts = {name: importlib.import_module(f"timm.{name}") for name in ("data", "loss", "optim", "utils")}
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5, drop_rate=dropout)
    mixup = parts["data"].Mixup(mixup_alpha=0.2, num_classes=5)
    x, y = torch.randn(4, 8, 3, 32, 32), torch.randint(5, (4, 8))
    place(model, (x[0],), optimizer="AdamW")
    average = parts["utils"].ModelEmaV3(model, decay=0.9)
    optimizer = parts["optim"].create_optimizer_v2(model, "adamw", lr=1e-3)
    lossed = parts["loss"].SoftTargetCrossEntropy()
    losses = []
    torch.manual_seed(1)
    numpy.random.seed(1)
    for images, labels in zip(x, y, strict=True):
        mixed, targets = mixup(images.clone(), labels)
        loss = lossed(model(mixed), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update(model)
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(F.cross_entropy(average.module(x[0]), y[0]).item())
    return Ran(losses, model)
