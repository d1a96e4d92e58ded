"""Models whose outputs hold a cache run as plans in DataParallel, with the bits of eager replicas."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor
from torch.utils import _pytree as pytree
from zoo_rows import library

import graphir

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "MixtralForCausalLM": {**SMALL, **EXPERTS, "intermediate_size": 32, "num_key_value_heads": 1},
    "LlamaForCausalLM": {**SMALL, "intermediate_size": 32, "num_key_value_heads": 1},
    "GPT2LMHeadModel": {
        "vocab_size": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def leaves(output: Any) -> list[Tensor]:
    """The tensors of an output, those of its cache as well."""
    *found, cache = pytree.tree_leaves(dict(output), is_leaf=lambda part: type(part).__name__ == "DynamicCache")
    return [*found, *(tensor for layer in cache for tensor in layer if tensor is not None)]


@pytest.mark.parametrize(
    ("name", "labelled"),
    [("MixtralForCausalLM", False), ("LlamaForCausalLM", True), ("GPT2LMHeadModel", False)],
)
def test_a_cache_is_gathered_by_plans_as_by_eager_replicas(name: str, labelled: bool) -> None:
    torch.manual_seed(0)
    kind = getattr(library("transformers"), name)
    module = kind(kind.config_class(**MODELS[name])).train()
    tokens = torch.randint(32, (5, 6))
    given = {"labels": tokens} if labelled else {}
    found = []
    for data_parallel in (graphir.DataParallel, EagerOnly):
        replicated = copy.deepcopy(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error", graphir.errors.EagerWarning)
            for seed in (1, 2):  # what gradients come is known from the second call on
                torch.manual_seed(seed)
                output = data_parallel(replicated, device_ids=[0, 1], binding="cpu")(tokens, **given)
                replicated.zero_grad()
                (output.loss.mean() if labelled else output.logits.square().mean()).backward()
        found.append([type(output), *leaves(output), *(param.grad for param in replicated.parameters())])
    (ours, *tensors), (theirs, *expected) = found
    assert ours is theirs and len(tensors) == len(expected) > 8
    assert all(map(torch.equal, tensors, expected))
