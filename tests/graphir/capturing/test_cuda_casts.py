"""The casts that are made of host tensors, operator by operator, against CUDA's autocast on fake CUDA tensors."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, takewhile
from typing import Any

import pytest
import torch
from asked_casts import Noted, autocast_of_cuda, fake
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from graphir.capturing.isolate.cuda_casts import CastWeights, casts_included, casts_lent

aten = torch.ops.aten


class Maker:
    """Makes the tensors of a call on fake devices, of these types in turn."""

    def __init__(self, types: list[torch.dtype], on_cuda: bool) -> None:
        self.types, self.on_cuda = cycle(types), on_cuda

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or next(self.types))
        return fake(tensor) if self.on_cuda else tensor

    def index(self, *shape: int) -> Tensor:
        """Whole numbers."""
        return self(*shape, dtype=torch.int64)


Sample = Callable[[Maker], tuple[Any, ...]]
"""Makes the arguments of an operator."""

UNARY = (
    "acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan softplus sum prod nuclear_norm "
    "linalg_vector_norm linalg_matrix_norm pdist"
)
BINARY = (
    "atan2 dist mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div hinge_embedding_loss "
    "binary_cross_entropy_with_logits cosine_similarity cross matmul mm cdist pow.Tensor_Tensor binary_cross_entropy"
)
TERNARY = "addmm addcdiv addcmul triplet_margin_loss"
PLAIN: dict[str, tuple[Any, ...]] = {
    name: ((3, 3),) * count for count, names in enumerate((UNARY, BINARY, TERNARY), 1) for name in names.split()
}
"""Shapes of tensors of operators that take nothing else."""

OTHERS: dict[str, Sample] = {
    "_convolution": lambda f: (f(2, 3, 5), f(4, 3, 3), f(4), [1], [0], [1], False, [0], 1, False, False, True, True),
    "convolution": lambda f: (f(2, 3, 5), f(4, 3, 3), None, [1], [0], [1], False, [0], 1),
    "conv1d": lambda f: (f(2, 3, 5), f(4, 3, 3), f(4)),
    "conv2d": lambda f: (f(2, 3, 5, 5), f(4, 3, 3, 3), f(4)),
    "conv3d": lambda f: (f(2, 3, 5, 5, 5), f(4, 3, 3, 3, 3)),
    "conv_tbc": lambda f: (f(5, 2, 3), f(3, 3, 4), f(4)),
    "conv_transpose1d": lambda f: (f(2, 3, 5), f(3, 4, 3)),
    "conv_transpose2d.input": lambda f: (f(2, 3, 5, 5), f(3, 4, 3, 3)),
    "conv_transpose3d.input": lambda f: (f(2, 3, 5, 5, 5), f(3, 4, 3, 3, 3)),
    "prelu": lambda f: (f(3, 3), f(1)),
    "poisson_nll_loss": lambda f: (f(3), f(3), True, False, 1e-8, 1),
    "multilabel_margin_loss": lambda f: (f(2, 2), f.index(2, 2)),
    "nuclear_norm.dim": lambda f: (f(3, 3), [0, 1]),
    "linalg_matrix_norm.str_ord": lambda f: (f(3, 3), "fro"),
    "_convolution.deprecated": lambda f: (
        f(2, 3, 5),
        f(4, 3, 3),
        None,
        [1],
        [0],
        [1],
        False,
        [0],
        1,
        False,
        False,
        True,
    ),
    "_upsample_nearest_exact1d": lambda f: (f(1, 1, 3), [6]),
    "_upsample_nearest_exact2d": lambda f: (f(1, 1, 3, 3), [6, 6]),
    "_upsample_nearest_exact3d": lambda f: (f(1, 1, 3, 3, 3), [6, 6, 6]),
    "_upsample_bilinear2d_aa": lambda f: (f(1, 1, 3, 3), [6, 6], False),
    "_upsample_bicubic2d_aa": lambda f: (f(1, 1, 3, 3), [6, 6], False),
    "pow.Tensor_Scalar": lambda f: (f(3), 2.0),
    "pow.Scalar": lambda f: (2.0, f(3)),
    "linalg_vecdot": lambda f: (f(3), f(3)),
    "vdot": lambda f: (f(3), f(3)),
    "dot": lambda f: (f(3), f(3)),
    "mv": lambda f: (f(3, 3), f(3)),
    "addr": lambda f: (f(3, 3), f(3), f(3)),
    "addmv": lambda f: (f(3), f(3, 3), f(3)),
    "baddbmm": lambda f: (f(2, 3, 3), f(2, 3, 3), f(2, 3, 3)),
    "addbmm": lambda f: (f(3, 3), f(2, 3, 3), f(2, 3, 3)),
    "bmm": lambda f: (f(2, 3, 3), f(2, 3, 3)),
    "chain_matmul": lambda f: ([f(3, 3), f(3, 3), f(3, 3)],),
    "linalg_multi_dot": lambda f: ([f(3, 3), f(3, 3), f(3, 3)],),
    "einsum": lambda f: ("ij,jk->ik", [f(3, 3), f(3, 3)]),
    "tensordot": lambda f: (f(3, 3), f(3, 3), [1], [0]),
    "linear": lambda f: (f(2, 3), f(4, 3), f(4)),
    "bilinear": lambda f: (f(2, 3), f(2, 3), f(4, 3, 3), f(4)),
    "layer_norm": lambda f: (f(2, 3), [3], f(3), None),
    "native_layer_norm": lambda f: (f(2, 3), [3], f(3), f(3), 1e-5),
    "rms_norm": lambda f: (f(2, 3), [3], f(3)),
    "group_norm": lambda f: (f(2, 4, 3), 2, f(4), None),
    "nll_loss": lambda f: (f(2, 3), f.index(2)),
    "nll_loss2d": lambda f: (f(2, 3, 1, 2), f.index(2, 1, 2), f(3)),
    "multi_margin_loss": lambda f: (f(2, 3), f.index(2)),
    "cosine_embedding_loss": lambda f: (f(2, 3), f(2, 3), f(2)),
    "margin_ranking_loss": lambda f: (f(3), f(3), f(3)),
    "prod.dim_int": lambda f: (f(3, 3), 0),
    "sum.dim_IntList": lambda f: (f(3, 3), [0], True),
    "cumsum": lambda f: (f(3, 3), 0),
    "cumprod": lambda f: (f(3, 3), 0),
    "softmax.int": lambda f: (f(3, 3), 0),
    "log_softmax.int": lambda f: (f(3, 3), 0),
    "logsumexp": lambda f: (f(3, 3), [0]),
    "norm.Scalar": lambda f: (f(3, 3), 2),
    "norm.ScalarOpt_dim": lambda f: (f(3, 3), 2, [0]),
    "frobenius_norm.dim": lambda f: (f(3, 3), [0]),
    "renorm": lambda f: (f(3, 3), 2, 0, 1.0),
    "scatter_add": lambda f: (f(2, 2), 0, f.index(2, 2), f(2, 2)),
    "index_put": lambda f: (f(2, 2), [None, f.index(2)], f(2, 2)),
    "grid_sampler": lambda f: (f(1, 1, 3, 3), f(1, 3, 3, 2), 0, 0, False),
    "upsample_nearest1d": lambda f: (f(1, 1, 3), [6]),
    "upsample_linear1d": lambda f: (f(1, 1, 3), [6], False),
    "upsample_nearest2d": lambda f: (f(1, 1, 3, 3), [6, 6]),
    "upsample_bilinear2d": lambda f: (f(1, 1, 3, 3), [6, 6], False),
    "upsample_bicubic2d": lambda f: (f(1, 1, 3, 3), [6, 6], False),
    "upsample_nearest3d": lambda f: (f(1, 1, 3, 3, 3), [6, 6, 6]),
    "upsample_trilinear3d": lambda f: (f(1, 1, 3, 3, 3), [6, 6, 6], False),
    "lstm_cell": lambda f: (f(2, 3), [f(2, 4), f(2, 4)], f(16, 3), f(16, 4), f(16), None),
    "gru_cell": lambda f: (f(2, 3), f(2, 4), f(12, 3), f(12, 4), f(12), f(12)),
    "rnn_tanh_cell": lambda f: (f(2, 3), f(2, 4), f(4, 3), f(4, 4)),
    "rnn_relu_cell": lambda f: (f(2, 3), f(2, 4), f(4, 3), f(4, 4)),
    # Operators that autocast leaves alone, and composites that are opened.
    "cat": lambda f: ([f(2, 3), f(2, 3)],),
    "stack": lambda f: ([f(2, 3), f(2, 3)],),
    "mean": lambda f: (f(3, 3),),
    "cross_entropy_loss": lambda f: (f(2, 3), f.index(2), f(3)),
    "mul.Tensor": lambda f: (f(3, 3), f(3, 3)),
    "embedding": lambda f: (f(4, 3), f.index(2, 2)),
    "nll_loss_nd": lambda f: (f(2, 3), f.index(2)),
    "upsample_linear1d.vec": lambda f: (f(1, 1, 3), [6], False, None),
}


def of_shapes(shapes: tuple[tuple[int, ...], ...], make: Maker) -> tuple[Any, ...]:
    return tuple([make(*shape) for shape in shapes])


SAMPLES: dict[str, Sample] = {**{name: partial(of_shapes, shapes) for name, shapes in PLAIN.items()}, **OTHERS}
NOT_HERE = (
    "_cudnn_rnn",
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "linalg_matrix_sqrth",
    "scaled_dot_product_attention",
)
"""Operators of CUDA devices alone, or of torch 2.14, and attention, whose kernel is chosen where it runs."""
KERNELS_OF_CUDA = ("lstm_cell", "gru_cell", "grid_sampler", "rms_norm")
"""Operators that call others on CUDA than on the host, the last one in builds for CUDA."""
TYPES = (torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.int64, torch.bool)


def called(name: str, types: list[torch.dtype], on_cuda: bool) -> tuple[Any, ...]:
    """The casts of a call, and the operators that follow, where these are the same on the host."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(aten, packet), overload or "default")
    noted = Noted(passed=("detach", "alias", "empty"))
    with FakeTensorMode(allow_fallback_kernels=False), torch.no_grad():
        args = SAMPLES[name](Maker(types, on_cuda))
        with noted, contextlib.suppress(RuntimeError, AttributeError):  # where kernels refuse what they are given
            func(*args)
    casts = sorted(takewhile(lambda op: op[0] == "_to_copy", noted.operators))
    return casts, None if name in KERNELS_OF_CUDA else noted.operators[len(casts) :]


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = True
    yield
    logger.disabled = False


def test_each_operator_is_called_as_cuda_s_autocast_calls_it(quiet: None) -> None:
    chosen = random.Random(0)
    for name in SAMPLES:
        for attempt in range(4):
            types = [torch.float32, *chosen.choices(TYPES, k=3)] if attempt else [torch.float32]
            if "softmax" in name:  # on CUDA its kernel converts f16
                types = [type for type in types if type != torch.float16]
            chosen.shuffle(types)
            with autocast_of_cuda(chosen.choice(TYPES[:2])):
                wanted = called(name, types, on_cuda=True)
                with casts_lent(CastWeights()):
                    casts_included(True)
                    found = called(name, types, on_cuda=False)
                if wanted[1] == []:  # CUDA's kernel refuses these types, as that of layer_norm mixed ones in torch 2.14
                    found = found[0], []
                assert found == wanted, (name, types)


def test_the_samples_are_of_every_operator_that_autocast_casts() -> None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    cast = {name.removeprefix("aten::") for name in names if has(name, "AutocastCUDA")}
    assert not cast - SAMPLES.keys() - set(NOT_HERE)
