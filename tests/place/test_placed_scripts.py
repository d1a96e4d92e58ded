"""Scripts as people have them, with one line more: losses and weights are those of the script without it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from placed_nets import deep, placed, same
from runnable import short_searches
from torch import Tensor, nn
from torch.nn import functional as F
from zoo.zoo_rows import library


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)


X, Y = torch.randn(64, 16), torch.randn(64, 1)


class Ran(NamedTuple):
    """What a script has computed."""

    losses: list[float]
    models: list[nn.Module]


def both(script: Callable[[Callable[..., nn.Module]], Ran]) -> None:
    """Run a script as it is, and with its models placed."""
    plain = script(lambda model, *_, **__: model)
    ours = script(placed)
    assert ours.losses == plain.losses
    assert all(map(same, ours.models, plain.models))
    for model in ours.models:
        assert not hasattr(model, "placement") or model.placement.plans


def critic() -> nn.Module:
    return deep(64, 5, (16, 1))


def test_two_nets_against_each_other() -> None:
    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        maker, judge = deep(64, 5, (8, 16)), critic()
        place(maker, (torch.zeros(32, 8),), optimizer="Adam")
        place(judge, (torch.zeros(32, 16),), optimizer="Adam")
        torch.manual_seed(1)
        optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in (judge, maker)]
        losses = []
        for _ in range(4):
            made = maker(torch.randn(32, 8))
            optimizers[0].zero_grad()
            loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(torch.randn(32, 16))).mean()
            loss.backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            other = F.softplus(-judge(made)).mean()
            other.backward()
            optimizers[1].step()
            losses += [loss.item(), other.item()]
        return Ran(losses, [maker, judge])

    both(script)


def test_lbfgs() -> None:
    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        model = critic()
        place(model, (X,))
        optimizer = torch.optim.LBFGS(model.parameters(), history_size=2, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(X), Y)
            loss.backward()
            return loss

        return Ran([optimizer.step(closure).item() for _ in range(3)], [model])

    both(script)


class LowRank(nn.Module):
    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::graphir.RecaptureWarning")
def test_layers_of_low_rank_that_are_added_after_placing() -> None:
    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        model: Any = critic()
        place(model, (X,), optimizer="AdamW")
        torch.manual_seed(2)
        model.requires_grad_(False)
        model[2], model[0] = LowRank(model[2]), LowRank(model[0])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        losses = []
        for _ in range(3):
            loss = F.mse_loss(model(X), Y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Ran(losses, [model])

    both(script)


def test_accelerate() -> None:
    accelerate = library("accelerate")

    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        model = critic()
        place(model, (X[:16],), optimizer="AdamW")
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
        prepared, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
        losses = []
        for x, y in data:
            with accelerator.accumulate(prepared):
                loss = F.mse_loss(prepared(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert accelerator.unwrap_model(prepared) is model
        return Ran(losses, [model])

    both(script)


def test_lightning(tmp_path: Path) -> None:
    lightning = library("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = critic(), []

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        module = Module()
        place(module.net, (X[:16],), optimizer="AdamW")
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        trainer.fit(module, data)
        return Ran(module.losses, [module.net])

    both(script)


@pytest.mark.filterwarnings("ignore::graphir.RecaptureWarning")
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}])
def test_trainer(options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(64, (12,), generator=draw) for _ in range(16)]
    # Each row is padded: a mask of ones alone is left out by the model's own code, whose kernels round otherwise then.
    masks = [(torch.arange(12) < 9 + i % 3).long() for i in range(16)]
    data = [
        {"input_ids": r, "attention_mask": m, "labels": r.where(m > 0, -100)} for r, m in zip(rows, masks, strict=True)
    ]
    batch = {name: torch.stack([row[name] for row in data[:4]]) for name in data[0]}
    arguments = {"per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True, **options}

    def script(place: Callable[..., nn.Module]) -> Ran:
        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(config)
        place(model, (), kwargs=batch, optimizer="AdamW")
        folder, losses = str(tmp_path / type(model).__name__ / str(id(model))), []
        often = {"save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "logging_steps": 1}
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(folder, max_steps=4, **often, **arguments),
            train_dataset=data,
            eval_dataset=data[:5],
        )
        trainer.train()
        trainer.save_model(f"{folder}/final")
        losses += [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
        more = transformers.TrainingArguments(folder, max_steps=6, **arguments)
        resumed = transformers.Trainer(model, more, train_dataset=data)
        losses.append(resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4").training_loss)
        assert Path(folder, "final", "config.json").is_file()
        if hasattr(model, "placement"):
            assert trainer.is_model_parallel
        return Ran(losses, [model])

    both(script)
