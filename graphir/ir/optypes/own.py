"""graphir's own types: their schemas, and what else is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from .fakes import FAKES, updated
from .flops import FLOPS
from .record import OperatorType
from .scratch import SCRATCH

__all__ = ["OWN"]

_ADAM: Final = (
    "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "Tensor(e!) step, Tensor lr, Tensor? found_inf=None, *, str form='for_loop', float beta1=0.9, float beta2=0.999, "
    "float eps=1e-08, float weight_decay=0., bool maximize=False) -> ()"
)

_SCHEMAS: Final[Mapping[str, str]] = {
    "Copy": "Copy(Tensor source) -> Tensor",
    "AllReduce": "AllReduce(Tensor[] inputs, *, str reduction='sum', SymInt[] shares=[]) -> Tensor[]",
    "graphir.load": "load(*, str key) -> Tensor",
    "graphir.sgd": (
        "sgd(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor lr, Tensor? found_inf=None, *, "
        "str form='for_loop', float momentum=0., float weight_decay=0., bool nesterov=False, "
        "bool maximize=False) -> ()"
    ),
    "graphir.dampened_sgd": (
        "dampened_sgd(Tensor(a!) param, Tensor grad, Tensor(b!) momentum_buffer, Tensor(c!) next_dampening, "
        "Tensor lr, Tensor? found_inf=None, *, str form='for_loop', float momentum=0., float dampening=0., "
        "float weight_decay=0., bool nesterov=False, bool maximize=False) -> ()"
    ),
    "graphir.adam": "adam" + _ADAM,
    "graphir.adamw": "adamw" + _ADAM,
    "graphir.adagrad": (
        "adagrad(Tensor(a!) param, Tensor grad, Tensor(b!) sum, Tensor(c!) step, Tensor lr, Tensor? found_inf=None, *, "
        "str form='for_loop', float lr_decay=0., float weight_decay=0., float eps=1e-10, "
        "bool maximize=False) -> ()"
    ),
    "graphir.rmsprop": (
        "rmsprop(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? momentum_buffer, "
        "Tensor(d!)? grad_avg, Tensor(e!) step, Tensor lr, Tensor? found_inf=None, *, float alpha=0.99, "
        "float eps=1e-08, float weight_decay=0., float momentum=0., bool maximize=False) -> ()"
    ),
    "graphir.attention": (
        "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, bool is_causal=False, "
        "float? scale=None) -> (Tensor out, Tensor logsumexp)"
    ),
    "graphir.attention_backward": (
        "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor? attn_mask=None, *, bool is_causal=False, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)"
    ),
    "graphir.embedding_bag_backward": (
        "embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, "
        "Tensor maximum_indices, Tensor? per_sample_weights=None, *, SymInt num_weights, int mode=0, "
        "int padding_idx=-1) -> (Tensor, Tensor)"
    ),
    "graphir.sparse_sum": (
        "sparse_sum(Tensor[] values, Tensor[] indices, *, SymInt rows, str reduction='sum', SymInt[] shares=[]) "
        "-> (Tensor, Tensor)"
    ),
    "graphir.sparse_sgd": (
        "sparse_sgd(Tensor(a!) param, Tensor indices, Tensor values, Tensor lr, Tensor? found_inf=None, *, "
        "bool maximize=False) -> ()"
    ),
    "graphir.sparse_adagrad": (
        "sparse_adagrad(Tensor(a!) param, Tensor indices, Tensor values, Tensor(b!) sum, Tensor(c!) step, Tensor lr, "
        "Tensor? found_inf=None, *, float lr_decay=0., float eps=1e-10, bool maximize=False) -> ()"
    ),
    "graphir.sparse_adam": (
        "sparse_adam(Tensor(a!) param, Tensor indices, Tensor values, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        "Tensor(d!) step, Tensor lr, Tensor? found_inf=None, *, float beta1=0.9, float beta2=0.999, "
        "float eps=1e-08, bool maximize=False) -> ()"
    ),
}

_FACTS: Final[Mapping[str, Mapping[str, Any]]] = {
    # Their kernels hand operands to kernels of torch that reach beyond the elements.
    "graphir.attention": {"only_elements": False},
    "graphir.attention_backward": {"only_elements": False, "nondeterministic": "adds in no fixed order on CUDA"},
    "graphir.embedding_bag_backward": {"only_elements": False},
}


def _record(type: str, schema: str) -> OperatorType:
    facts = {"only_elements": True, **_FACTS.get(type, {})}
    tensors = [a.name for a in torch._C.parse_schema(f"graphir::{schema}").arguments if "Tensor" in str(a.type)]
    fake = FAKES.get(type) or updated(type, tensors)
    return OperatorType(type, schema, fake, flops=FLOPS.get(type), scratch=SCRATCH.get(type), **facts)


OWN: Final[Mapping[str, OperatorType]] = {type: _record(type, schema) for type, schema in _SCHEMAS.items()}
"""graphir's own types.

``Copy`` brings a blob to its device, strides kept. ``AllReduce`` gives every participant the sum of all inputs, added
in participant order; with ``reduction="mean"`` input r is first scaled by ``shares[r] * n / sum(shares)`` (not at all
where the shares are equal) and the sum divided by n. ``graphir.load`` reads ``program.state[key]``. The optimizers
update one parameter in place, as ``torch.optim`` does in its ``fused`` or its ``for_loop`` form; where ``found_inf``
is given and not zero they leave parameter and state as they are, as ``GradScaler.step`` does. ``next_dampening`` is the
dampening of the next update: torch dampens none before the second, so it is 0 at first and then ``dampening``.
Attention is torch's ``scaled_dot_product_attention`` without dropout, by the kernel of the device that it runs on; its
``logsumexp`` has a number for each query of each head, from which any device's backward kernel finds the weights again.

A sparse gradient is two tensors, ``indices`` (1, n) and ``values`` (n, d): ``values[k]`` is added to row
``indices[0, k]``, and -1 marks a slot that holds nothing. ``embedding_bag_backward`` and ``sparse_sum`` return such a
pair. The sum is that of sparse tensors in torch, in the order of the operands, with ``reduction`` and ``shares`` as for
``AllReduce``.
"""
