"""Models of public libraries under autocast for CUDA, captured without a GPU, have the casts that torch has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from asked_casts import asked, recorded
from torch import Tensor, nn
from zoo_rows import library

from graphir.capturing.capture import capture

SMALL = {"vocab_size": 50, "use_cache": False, "attn_implementation": "eager"}


def transformer(name: str, config: str, **options: Any) -> nn.Module:
    transformers = library("transformers")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**SMALL, **special, **options))
    return model


def gpt2() -> nn.Module:
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformer("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, n_positions=16, **dropped)


def llama() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformer("LlamaForCausalLM", "LlamaConfig", **sizes, **heads)


def resnet() -> nn.Module:
    model: nn.Module = library("torchvision").models.resnet18(num_classes=10)
    return model


def labelled(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


IDS, IMAGES = torch.arange(16).view(2, 8), torch.ones(2, 3, 32, 32)
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[..., Any]]] = {
    "gpt2": (gpt2, IDS, labelled),
    "llama": (llama, IDS, labelled),
    "resnet18": (resnet, IMAGES, lambda model, x: model(x)),
}


class Cast(nn.Module):
    def __init__(self, model: nn.Module, run: Callable[..., Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.run, self.dtype = model, run, dtype

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cuda", self.dtype):
            return self.run(self.model, x)


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_has_the_element_types_of_cuda(name: str) -> None:
    make, x, run = MODELS[name]
    model = make()
    wanted = asked(model, (x,), run, torch.bfloat16)
    net = capture(Cast(model, run, torch.bfloat16), (x,)).step
    assert recorded(net) == wanted
    assert {"bf16", "f32"} <= {type for _, inputs, _ in wanted for type in inputs} and len(wanted) > 50
