"""Transformers and recurrent nets, built from transformers and torch, and small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_rows import Batch, Row, library

__all__ = ["TEXT"]

LENGTH = 6
"""Tokens of a sample."""

VOCABULARY = 50


def own_loss(output: Any) -> Tensor:
    """The loss that a model of transformers computes where it is given labels."""
    return output.loss  # type: ignore[no-any-return]


def tokens(n: int, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (n, length))


def padding(n: int, length: int = LENGTH) -> Tensor:
    """A mask of ones, with the last two tokens of the first sample left out."""
    mask = torch.ones(n, length, dtype=torch.long)
    mask[0, -2:] = 0
    return mask


def labelled(n: int) -> Batch:
    return Batch((tokens(n),), kwargs={"labels": tokens(n)})


def padded(n: int) -> Batch:
    return Batch((), kwargs={"input_ids": tokens(n), "attention_mask": padding(n), "labels": tokens(n)})


def translated(n: int) -> Batch:
    """A source, padded, and a target of another length."""
    return Batch((tokens(n),), kwargs={"attention_mask": padding(n), "labels": tokens(n, 4)})


def transformer(
    model: str,
    data: Callable[[int], Batch] = labelled,
    loss: Callable[..., Any] = own_loss,
    fixed: str = "",
    prepare: Callable[[Any], None] = lambda model: None,
    **options: Any,
) -> Row:
    """A model of transformers with its configuration's *options*."""

    def make() -> nn.Module:
        kind = getattr(library("transformers"), model)
        made: nn.Module = kind(kind.config_class(**options))
        prepare(made)
        return made

    return Row(make, data, loss, fixed=fixed)


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXTS = {"vocab_size": VOCABULARY, "pad_token_id": 0}
DECODER = {**SMALL, **TEXTS, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False}
SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
PICTURE = {"image_size": 16, "patch_size": 8}


def picture(n: int) -> Batch:
    return Batch((torch.randn(n, 3, 16, 16),), kwargs={"labels": torch.randint(2, (n,))})


def segments(n: int) -> Batch:
    return Batch((torch.randn(n, 3, 32, 32),), kwargs={"labels": torch.randint(3, (n, 32, 32))})


def captions(n: int) -> Batch:
    """Pictures and texts that belong together."""
    mask = padding(n)
    return Batch((tokens(n), torch.randn(n, 3, 16, 16), mask), kwargs={"return_loss": True})


def spectrogram(n: int) -> Batch:
    return Batch((torch.randn(n, 8, 16),), kwargs={"labels": tokens(n, 4)})


def wave(n: int) -> Batch:
    return Batch((torch.randn(n, 80),), kwargs={"labels": torch.randint(2, (n,))})


class Tagger(nn.Module):
    """A label for each token, by a recurrent net.

    The fused CPU kernel that torch takes for LSTM can't be captured; without mkldnn torch takes its own.
    """

    def __init__(self, recurrent: type[nn.RNNBase], width: int = 8, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.recurrent = recurrent(width, width, **options)
        directions = 2 if self.recurrent.bidirectional else 1
        self.head = nn.Linear(directions * (self.recurrent.proj_size or width), 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            states, _ = self.recurrent(self.embedding(x))
        return self.head(states)  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """The class of a sequence, by cells in a loop over time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lower, self.upper = nn.LSTMCell(width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden, cell = x.new_zeros(2, len(x), self.lower.hidden_size, dtype=torch.float32).unbind()
        top = torch.zeros_like(hidden)
        for token in self.embedding(x).unbind(1):
            hidden, cell = self.lower(token, (hidden, cell))
            top = self.upper(hidden, top)
        return self.head(top)  # type: ignore[no-any-return]


def per_token(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def tagged(n: int) -> Batch:
    return Batch((tokens(n),), (torch.randint(5, (n, LENGTH)),))


def tagged_time_first(n: int) -> Batch:
    return Batch((tokens(n).T.contiguous(),), (torch.randint(5, (LENGTH, n)),))


def classified(n: int) -> Batch:
    return Batch((tokens(n),), (torch.randint(5, (n,)),))


TEXT: dict[str, Row] = {
    "gpt2": transformer("GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=16, **TEXTS),
    "bert": transformer("BertForMaskedLM", padded, max_position_embeddings=16, **SMALL, **TEXTS),
    "albert": transformer("AlbertForMaskedLM", padded, embedding_size=8, max_position_embeddings=16, **SMALL, **TEXTS),
    "deberta": transformer(
        "DebertaV2ForMaskedLM",
        padded,
        max_position_embeddings=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        **SMALL,
        **TEXTS,
    ),
    "xlnet": transformer("XLNetLMHeadModel", padded, d_model=16, n_layer=2, n_head=2, d_inner=32, **TEXTS),
    "t5": transformer(
        "T5ForConditionalGeneration",
        translated,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
        **TEXTS,
    ),
    "bart": transformer(
        "BartForConditionalGeneration", translated, max_position_embeddings=16, use_cache=False, **SEQ2SEQ, **TEXTS
    ),
    "llama": transformer("LlamaForCausalLM", padded, **DECODER),
    "llama tied": transformer("LlamaForCausalLM", tie_word_embeddings=True, prepare=checkpointed, **DECODER),
    "gemma3": transformer("Gemma3ForCausalLM", padded, head_dim=8, sliding_window=3, **DECODER),
    "bloom": transformer("BloomForCausalLM", padded, hidden_size=16, n_layer=2, n_head=2, use_cache=False, **TEXTS),
    "mixtral": transformer("MixtralForCausalLM", num_local_experts=4, output_router_logits=True, **DECODER),
    "mamba": transformer(
        "MambaForCausalLM",
        hidden_size=16,
        state_size=4,
        num_hidden_layers=1,
        time_step_rank=2,
        use_cache=False,
        **TEXTS,
    ),
    "rwkv": transformer(
        "RwkvForCausalLM", hidden_size=16, attention_hidden_size=16, num_hidden_layers=2, use_cache=False, **TEXTS
    ),
    "whisper": transformer(
        "WhisperForConditionalGeneration",
        spectrogram,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=8,
        use_cache=False,
        **SEQ2SEQ,
        **TEXTS,
    ),
    "wav2vec2": transformer(
        "Wav2Vec2ForSequenceClassification",
        wave,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(8, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=8,
        layerdrop=0.0,
        apply_spec_augment=False,
        **SMALL,
    ),
    "vit": transformer("ViTForImageClassification", picture, **SMALL, **PICTURE),
    "clip": transformer(
        "CLIPModel",
        captions,
        text_config={"max_position_embeddings": 16, "eos_token_id": 2, **SMALL, **TEXTS},
        vision_config={**SMALL, **PICTURE},
        projection_dim=8,
    ),
    "segformer": transformer(
        "SegformerForSemanticSegmentation",
        segments,
        hidden_sizes=[4, 8],
        depths=[1, 1],
        num_encoder_blocks=2,
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
        num_labels=3,
    ),
    "lstm": Row(
        lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True, proj_size=4, dropout=0.2, batch_first=True),
        tagged,
        per_token,
    ),
    "gru": Row(lambda: Tagger(nn.GRU, bidirectional=True), tagged_time_first, per_token, batch_dims=1),
    "rnn": Row(lambda: Tagger(nn.RNN, nonlinearity="relu", batch_first=True), tagged, per_token),
    "recurrent cells": Row(CellLoop, classified, F.cross_entropy),
}
