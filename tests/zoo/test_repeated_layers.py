"""Repeated layers look alike: but for its index, a layer's operators are those of the next one, names included."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_rows import Batch, images, library
from zoo_text import SMALL, TEXTS, labelled, own_loss, translated

import graphir


class Layers(NamedTuple):
    """A model with six layers.

    Attributes:
        at: paths of the lists of layers.
    """

    model: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    at: tuple[str, ...]
    loss: Callable[..., Tensor] = own_loss


def transformer(model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(library("transformers"), model)
        return kind(kind.config_class(**options))  # type: ignore[no-any-return]

    return make


def resnet() -> nn.Module:
    models = library("torchvision").models.resnet
    return models.ResNet(models.BasicBlock, [6, 1, 1, 1], num_classes=10)  # type: ignore[no-any-return]


SIX = {**SMALL, "num_hidden_layers": 6}

MODELS: dict[str, Layers] = {
    "gpt2": Layers(
        transformer("GPT2LMHeadModel", n_embd=16, n_layer=6, n_head=2, n_positions=16, **TEXTS),
        labelled,
        ("transformer.h",),
    ),
    "llama": Layers(transformer("LlamaForCausalLM", use_cache=False, **SIX, **TEXTS), labelled, ("model.layers",)),
    "resnet": Layers(resnet, images(32), ("layer1",), F.cross_entropy),
    "t5": Layers(
        transformer(
            "T5ForConditionalGeneration",
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=6,
            num_heads=2,
            decoder_start_token_id=0,
            use_cache=False,
            **TEXTS,
        ),
        translated,
        ("encoder.block", "decoder.block"),
    ),
    "vit": Layers(
        lambda: library("torchvision").models.VisionTransformer(16, 4, 6, 2, 16, 32, num_classes=10),
        images(16),
        ("encoder.layers.encoder_layer",),
        F.cross_entropy,
    ),
}


def described(program: graphir.Program, at: str, layer: int) -> list[object]:
    """A layer's operators, the blobs that they read and make, and its gradients.

    Indices of the layer and of its neighbours are relative to it. T5's layers read position biases of the first one.
    """

    def relative(name: str) -> str:
        found = re.match(rf"{re.escape(at)}[._](\d+)", name)
        if found is None or abs(int(found[1]) - layer) > 1:
            return name
        return f"{at}.<{int(found[1]) - layer:+}>{name[found.end() :]}"

    step = program.step
    ops = [op for op in step.ops if f"{relative(op.module)}.".startswith(f"{at}.<+0>.")]
    assert {op.phase for op in ops} == {"forward", "backward", "update"}
    operators = [
        (
            op.phase,
            relative(op.module),
            op.type,
            [relative(name) for name in op.outputs],
            [relative(name) for name in op.inputs],
            op.args,
            op.source,
        )
        for op in ops
    ]
    made = {name for op in ops for name in op.outputs}
    gradients = [(relative(a), relative(b)) for a, b in step.gradients.items() if a in made]
    assert gradients
    return [operators, gradients]


@pytest.mark.parametrize("name", MODELS)
def test_two_inner_layers_differ_in_their_index_alone(name: str) -> None:
    row = MODELS[name]
    model, batch = row.model(), row.data(2)
    program = graphir.capture(
        model,
        batch.inputs,
        kwargs=batch.kwargs,
        targets=batch.targets,
        loss=row.loss,
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
    )
    for at in row.at:
        (first, gradients), (second, others) = described(program, at, 2), described(program, at, 3)
        assert first == second
        assert gradients == others
