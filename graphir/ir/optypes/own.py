"""graphir's own types: for each its schema, its fake, and what else is known of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from . import fakes
from .blocks import BLOCKS
from .ctc import CTC
from .record import OperatorType

__all__ = ["OWN"]

_ADAM: Final = (
    "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? max_exp_avg_sq, "
    "Tensor(e!) step, Tensor lr, Tensor? found_inf=None, Tensor? beta1_now=None, Tensor? beta2_now=None, "
    "Tensor? weight_decay_now=None, *, str form='for_loop', float beta1=0.9, float beta2=0.999, float eps=1e-08, "
    "float weight_decay=0., bool maximize=False) -> ()"
)


def _record(type: str, schema: str, fake: Callable[..., Any], **known: Any) -> OperatorType:
    return OperatorType(type, schema, fake, **{"only_elements": True, **known})


def _optimizer(type: str, schema: str, sparse: str = "") -> OperatorType:
    """A type that updates one parameter, and its state; *sparse* is the type that does so by a sparse gradient."""
    return _record(type, schema, fakes.updated(type, _tensors(schema)), joined=True, sparse=sparse)


def _for_loop(name: str, state: str, numbers: str, options: str) -> OperatorType:
    """A type of one of torch's optimizers, in its for-loop form alone.

    Args:
        name: of the type.
        state: the names of what is kept of a parameter; with a question mark where that may be left out.
        numbers: those that move beside the learning rate.
        options: the other arguments, as a schema has them.
    """
    kept = [
        f"Tensor({letter}!){'?' * key.endswith('?')} {key.rstrip('?')}"
        for letter, key in zip("bcdefg", state.split(), strict=False)
    ]
    moving = [f"Tensor? {number}_now=None" for number in numbers.split()]
    fixed = [f"float {number}=0." for number in numbers.split()]
    taken = ["Tensor(a!) param", "Tensor grad", *kept, "Tensor lr", "Tensor? found_inf=None", *moving]
    return _optimizer(f"graphir.{name}", f"{name}({', '.join(taken)}, *, {', '.join([*fixed, options])}) -> ()")


def _slot_by_slot(type: str, schema: str) -> OperatorType:
    """A type that updates the rows of a parameter, and their state, as one of Caffe2's sparse optimizers does."""
    return _record(type, schema, fakes.updated(type, _tensors(schema), returns="->Tensor" in schema.replace(" ", "")))


def _tensors(schema: str) -> list[str]:
    """The names of the parameters that take tensors."""
    arguments = torch._C.parse_schema(f"graphir::{schema}").arguments
    return [argument.name for argument in arguments if "Tensor" in str(argument.type)]


_RECORDS: Final = (
    _record("Copy", "Copy(Tensor source) -> Tensor", fakes.copy),
    _record(
        "AllReduce",
        "AllReduce(Tensor[] inputs, *, str reduction='sum', SymInt[] shares=[]) -> Tensor[]",
        fakes.all_reduce,
    ),
    _record("graphir.scale", "scale(Tensor rows, *, SymInt numerator, SymInt denominator) -> Tensor", fakes.scale),
    _record("graphir.load", "load(*, str key, int? dim=None, int first=0) -> Tensor", fakes.load),
    _optimizer(
        "graphir.sgd",
        "sgd(Tensor(a!) param, Tensor grad, Tensor(b!)? momentum_buffer, Tensor lr, Tensor? found_inf=None, "
        "Tensor? momentum_now=None, Tensor? weight_decay_now=None, *, str form='for_loop', float momentum=0., "
        "float weight_decay=0., bool nesterov=False, bool maximize=False) -> ()",
        sparse="graphir.sparse_sgd",
    ),
    _optimizer(
        "graphir.dampened_sgd",
        "dampened_sgd(Tensor(a!) param, Tensor grad, Tensor(b!) momentum_buffer, Tensor(c!) next_dampening, "
        "Tensor lr, Tensor? found_inf=None, Tensor? momentum_now=None, Tensor? weight_decay_now=None, *, "
        "str form='for_loop', float momentum=0., float dampening=0., float weight_decay=0., bool nesterov=False, "
        "bool maximize=False) -> ()",
    ),
    _optimizer("graphir.adam", "adam" + _ADAM),
    _optimizer("graphir.adamw", "adamw" + _ADAM),
    _optimizer(
        "graphir.adagrad",
        "adagrad(Tensor(a!) param, Tensor grad, Tensor(b!) sum, Tensor(c!) step, Tensor lr, Tensor? found_inf=None, "
        "Tensor? weight_decay_now=None, *, str form='for_loop', float lr_decay=0., float weight_decay=0., "
        "float eps=1e-10, bool maximize=False) -> ()",
        sparse="graphir.sparse_adagrad",
    ),
    _optimizer(
        "graphir.rmsprop",
        "rmsprop(Tensor(a!) param, Tensor grad, Tensor(b!) square_avg, Tensor(c!)? momentum_buffer, "
        "Tensor(d!)? grad_avg, Tensor(e!) step, Tensor lr, Tensor? found_inf=None, Tensor? momentum_now=None, "
        "Tensor? weight_decay_now=None, *, str form='for_loop', float alpha=0.99, float eps=1e-08, "
        "float weight_decay=0., float momentum=0., bool maximize=False) -> ()",
    ),
    _optimizer(
        "graphir.row_wise_adagrad",
        "row_wise_adagrad(Tensor(a!) param, Tensor grad, Tensor(b!) row_sum, Tensor lr, Tensor? found_inf=None, *, "
        "float eps=1e-10, bool maximize=False) -> ()",
        sparse="graphir.sparse_row_wise_adagrad",
    ),
    _for_loop(
        "adadelta",
        "square_avg acc_delta step",
        "weight_decay",
        "float rho=0.9, float eps=1e-06, bool maximize=False",
    ),
    _for_loop("adamax", "exp_avg exp_inf step", "beta1 beta2 weight_decay", "float eps=1e-08, bool maximize=False"),
    _for_loop(
        "nadam",
        "exp_avg exp_avg_sq mu_product step",
        "beta1 beta2 weight_decay",
        "float momentum_decay=0.004, float eps=1e-08, bool decoupled_weight_decay=False, bool maximize=False",
    ),
    _for_loop(
        "radam",
        "exp_avg exp_avg_sq step",
        "beta1 beta2 weight_decay",
        "float eps=1e-08, bool decoupled_weight_decay=False, bool maximize=False",
    ),
    _for_loop(
        "asgd",
        "ax mu eta step",
        "weight_decay",
        "float lambd=0.0001, float t0=1000000., float alpha=0.75, bool maximize=False",
    ),
    _for_loop(
        "rprop",
        "prev step_size step",
        "",
        "float etaminus=0.5, float etaplus=1.2, float step_size_min=1e-06, float step_size_max=50., "
        "bool maximize=False",
    ),
    _for_loop(
        "adafactor",
        "row_var? col_var? variance? step",
        "weight_decay",
        "float d=1., float beta2_decay=-0.8, float eps1=-1., float eps2=0.001, bool maximize=False",
    ),
    _for_loop(
        "muon",
        "momentum_buffer",
        "momentum weight_decay",
        "bool nesterov=True, float a=3.4445, float b=-4.775, float c=2.0315, float eps=1e-07, int ns_steps=5, "
        "str adjust_lr_fn='original'",
    ),
    # The kernels of attention and of embedding bags are torch's, which reach beyond the elements of their operands.
    _record(
        "graphir.attention",
        "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, *, bool is_causal=False, "
        "float? scale=None) -> (Tensor out, Tensor logsumexp)",
        fakes.attention,
        only_elements=False,
    ),
    _record(
        "graphir.attention_backward",
        "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, "
        "Tensor? attn_mask=None, *, bool is_causal=False, float? scale=None) "
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
        fakes.attention_backward,
        only_elements=False,
        nondeterministic="adds in no fixed order on CUDA",
    ),
    _record(
        "graphir.embedding_bag_backward",
        "embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, "
        "Tensor maximum_indices, Tensor? per_sample_weights=None, *, SymInt num_weights, int mode=0, "
        "int padding_idx=-1) -> (Tensor, Tensor)",
        fakes.embedding_bag_backward,
        only_elements=False,
    ),
    _record(
        "graphir.cumulative_batch_norm",
        "cumulative_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
        "Tensor(b!) running_var, Tensor batches, *, float eps) -> (Tensor out, Tensor save_mean, Tensor save_invstd)",
        fakes.cumulative_batch_norm,
        batch_norm=True,
    ),
    _record(
        "graphir.batch_norm_moments",
        "batch_norm_moments(Tensor input, *, int participant, int participants) -> Tensor",
        fakes.batch_norm_moments,
    ),
    _record(
        "graphir.synchronised_batch_norm",
        "synchronised_batch_norm(Tensor input, Tensor moments, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, "
        "Tensor(b!)? running_var, Tensor? batches=None, *, float momentum, float eps) "
        "-> (Tensor out, Tensor save_mean, Tensor save_invstd)",
        fakes.synchronised_batch_norm,
        batch_norm=True,
    ),
    _record(
        "graphir.synchronised_batch_norm_backward",
        "synchronised_batch_norm_backward(Tensor grad_out, Tensor input, Tensor moments, Tensor? weight, "
        "Tensor save_mean, Tensor save_invstd, Tensor grad_weight, Tensor grad_bias, *, SymInt numerator=1, "
        "SymInt denominator=1) -> Tensor",
        fakes.synchronised_batch_norm_backward,
    ),
    _record(
        "graphir.sparse_sum",
        "sparse_sum(Tensor[] values, Tensor[] indices, *, SymInt rows, str reduction='sum', SymInt[] shares=[]) "
        "-> (Tensor, Tensor)",
        fakes.sparse_sum,
    ),
    _optimizer(
        "graphir.sparse_sgd",
        "sparse_sgd(Tensor(a!) param, Tensor indices, Tensor values, Tensor lr, Tensor? found_inf=None, *, "
        "bool maximize=False) -> ()",
    ),
    _optimizer(
        "graphir.sparse_adagrad",
        "sparse_adagrad(Tensor(a!) param, Tensor indices, Tensor values, Tensor(b!) sum, Tensor(c!) step, Tensor lr, "
        "Tensor? found_inf=None, *, float lr_decay=0., float eps=1e-10, bool maximize=False) -> ()",
    ),
    _optimizer(
        "graphir.sparse_row_wise_adagrad",
        "sparse_row_wise_adagrad(Tensor(a!) param, Tensor indices, Tensor values, Tensor(b!) row_sum, Tensor lr, "
        "Tensor? found_inf=None, *, float eps=1e-10, bool maximize=False) -> ()",
    ),
    _optimizer(
        "graphir.sparse_adam",
        "sparse_adam(Tensor(a!) param, Tensor indices, Tensor values, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
        "Tensor(d!) step, Tensor lr, Tensor? found_inf=None, Tensor? beta1_now=None, Tensor? beta2_now=None, *, "
        "float beta1=0.9, float beta2=0.999, float eps=1e-08, bool maximize=False) -> ()",
        sparse="graphir.sparse_adam",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_adagrad",
        "caffe2_sparse_adagrad(Tensor(a!) param, Tensor(b!) moment, Tensor indices, Tensor values, Tensor lr, *, "
        "float epsilon=1e-05, float weight_decay=0., bool by_rows=False) -> ()",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_adam",
        "caffe2_sparse_adam(Tensor(a!) param, Tensor(b!) moment_1, Tensor(c!) moment_2, Tensor indices, "
        "Tensor values, Tensor lr, Tensor correction, *, float beta1=0.9, float beta2=0.999, float epsilon=1e-05, "
        "bool by_rows=False, bool adapted=False) -> Tensor",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_momentum_sgd",
        "caffe2_sparse_momentum_sgd(Tensor(a!) param, Tensor(b!) buffer, Tensor indices, Tensor values, Tensor lr, *, "
        "float momentum=0., bool nesterov=False) -> Tensor",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_ftrl",
        "caffe2_sparse_ftrl(Tensor(a!) param, Tensor(b!) n_z, Tensor indices, Tensor values, Tensor alpha_inverse, *, "
        "float beta=1., float lambda1=0.001, float lambda2=0.001) -> ()",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_adadelta",
        "caffe2_sparse_adadelta(Tensor(a!) param, Tensor(b!) moment, Tensor(c!) delta, Tensor indices, Tensor values, "
        "Tensor lr, *, float epsilon=1e-05, float decay=0.95) -> ()",
    ),
    _slot_by_slot(
        "graphir.caffe2_sparse_storm",
        "caffe2_sparse_storm(Tensor(a!) param, Tensor(b!) moment, Tensor indices, Tensor values, Tensor lr, "
        "Tensor keep) -> ()",
    ),
)

OWN: Final[Mapping[str, OperatorType]] = {record.type: record for record in (*_RECORDS, *BLOCKS, *CTC)}
"""graphir's own types.

``Copy`` brings a blob to its device, strides kept. ``AllReduce`` gives every participant the sum of all inputs, added
in participant order. Participants may be left out of the results (``[t_]``), as in a reduction to one participant. With
``reduction="mean"`` input r is first scaled by ``shares[r] * n / sum(shares)`` (not at all if the shares are equal) and
the sum divided by n. ``graphir.scale`` multiplies by a ratio of sizes: gradients of the mean over a replica's rows
become gradients of the mean over all rows, or the other way round. Its result has no gaps.
``graphir.load`` reads ``program.state[key]``. With ``dim`` it reads a part, which begins at ``first`` along that
dimension and is as long as the blob. The optimizers update one parameter in place, as ``torch.optim`` does in
its ``fused`` or its ``for_loop`` form, or as :class:`graphir.optim.RowWiseAdagrad` does. If ``found_inf`` is given
and not zero, they leave parameter and state as they are, as ``GradScaler.step`` does. ``next_dampening`` is the
dampening of the next update: torch does not dampen the first update, so ``next_dampening`` is 0 at first and then
``dampening``. A number that a scheduler moves from step to step is an operand, such as ``momentum_now``, and not the
argument ``momentum``. Attention is torch's ``scaled_dot_product_attention`` without dropout, by the kernel of the
device that it runs on. Its ``logsumexp`` has a number for each query of each head, from which any device's backward
kernel finds the weights again.

``cumulative_batch_norm`` is ``aten.native_batch_norm`` in training, with the momentum 1 / *batches*: running statistics
are averages over *batches* batches.

A batch norm over several replicas is three types, with an ``AllReduce`` of the moments in the forward, and of the
gradients of weight and bias in the backward. ``batch_norm_moments`` gives f64 (participants, 3, channels). Its row
*participant* holds for each channel the number of values, their mean, and the sum of the squares of their distances
from the mean. The other rows are zero, so that the sum over all participants has a row of each participant.
``synchronised_batch_norm`` merges the rows as Chan, Golub and LeVeque do ("Updating formulae and a pairwise algorithm
for computing sample variances", 1979), in double precision. It goes on as ``aten.native_batch_norm``, or, given
*batches*, as ``cumulative_batch_norm``. ``synchronised_batch_norm_backward`` gives the gradient of the input; the
gradients of weight and bias that it takes are the sums over all values of all participants, times denominator /
numerator.

A sparse gradient is two tensors, ``indices`` (1, n) and ``values`` (n, d): ``values[k]`` is added to row
``indices[0, k]``, and -1 marks an empty slot. ``embedding_bag_backward`` and ``sparse_sum`` return indices and values.
``sparse_sum`` adds as torch adds sparse tensors, in the order of the operands, with ``reduction`` and ``shares`` as for
``AllReduce``. The ``sparse_`` optimizers add up the slots of a row and update the row once, as torch does. The
``caffe2_sparse_`` optimizers are Caffe2's: each slot updates its row and the row's state by itself, in slot order.

Types that begin with ``block_`` look up a block of a table's rows, see :mod:`.blocks`; types that begin with
``ctc_loss`` are in :mod:`.ctc`.
"""
