"""Attention kernels: the CPU's own is exact, and every other one computes the same from the same form.

CUDA's kernels are stood in for where there is no GPU: their calls are bound by torch's schemas, held against what the
real kernels demand, and computed from the definition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from graphir.runtime.kernels import attention as kernels
from graphir.runtime.kernels.attention import KERNELS, attention, attention_backward, choose
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Case(NamedTuple):
    """Operands and options of an attention."""

    heads: int = 4
    key_heads: int = 4
    queries: int = 5
    keys: int = 7
    size: int = 8
    dtype: torch.dtype = torch.float32
    mask: str = ""
    mask_dtype: torch.dtype | None = None
    is_causal: bool = False
    scale: float | None = None
    by_sequence: bool = False

    def operands(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        random = torch.Generator().manual_seed(0)

        def tensor(heads: int, length: int) -> Tensor:
            shape = (2, length, heads, self.size) if self.by_sequence else (2, heads, length, self.size)
            made = torch.randn(shape, generator=random).to(device, self.dtype)
            return made.transpose(1, 2) if self.by_sequence else made

        shapes = {"keys": (2, 1, 1, self.keys), "queries": (1, 1, self.queries, 1)}
        mask = None
        if self.mask:
            mask = torch.randn(shapes.get(self.mask, (self.queries, self.keys)), generator=random)
            if self.mask == "hidden":  # the second query sees no key at all
                mask = mask.masked_fill(mask > 0.5, -math.inf)
                mask[1] = -math.inf
            mask = mask.to(device, self.mask_dtype or self.dtype)
        query = tensor(self.heads, self.queries)
        return query, tensor(self.key_heads, self.keys), tensor(self.key_heads, self.keys), mask


CASES = {
    "plain": Case(),
    "by sequence": Case(by_sequence=True),
    "causal": Case(is_causal=True),
    "causal square": Case(is_causal=True, keys=5),
    "mask of keys": Case(mask="keys"),
    "mask of all": Case(mask="whole"),
    "mask of queries": Case(mask="queries"),
    "hidden": Case(mask="hidden"),
    "grouped": Case(key_heads=2),
    "one key head": Case(key_heads=1, mask="keys"),
    "scaled": Case(scale=0.3),
    "odd size": Case(size=7),
    "long": Case(queries=70, keys=45, mask="whole"),
    "bf16": Case(dtype=torch.bfloat16),
    "f32 mask": Case(dtype=torch.bfloat16, mask="whole", mask_dtype=torch.float32),
    "f16": Case(dtype=torch.float16, size=6),
    "f16 of a model": Case(dtype=torch.float16, queries=70, keys=45, size=64),
    "f64": Case(dtype=torch.float64),
}


def both(name: str, case: Case) -> tuple[Tensor, ...]:
    """What kernel *name* gives, forward and backward, on the CPU's tensors."""
    query, key, value, mask = case.operands()
    options = query, key, value, mask, case.is_causal, case.scale or 1 / math.sqrt(case.size)
    out, logsumexp = KERNELS[name].forward(*options)
    grad = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    return out, logsumexp, *KERNELS[name].backward(grad, *options, out, logsumexp)


def agrees(name: str, case: Case) -> None:
    """Kernel *name* gives what the CPU's gives: values up to rounding, shapes, types; and the layouts of all but
    ``logsumexp``."""
    coarse = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 2e-5, torch.float64: 1e-12}[case.dtype]
    for i, (mine, theirs) in enumerate(zip(both(name, case), both("host", case), strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=coarse, atol=coarse)
        assert i == 1 or layout(mine) == layout(theirs)


def layout(tensor: Tensor) -> list[int]:
    """The strides of dimensions that have several elements."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("name", CASES)
def test_the_math_kernel_agrees_with_the_cpus(name: str) -> None:
    agrees("math", CASES[name])


def by_sequence(out: Tensor) -> Tensor:
    """An output as CUDA's kernels lay it out, whatever the layout of the query."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


class Stand(TorchDispatchMode):
    """CUDA's attention kernels, by the definition; it asserts what they demand of their operands.

    Sources: ``sdp_utils.cpp`` and ``attention.cu`` in aten/src/ATen/native/transformers/cuda, and the checks at the
    head of ``_flash_attention_forward`` and ``_efficient_attention_forward``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.any_heads = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        if "attention" not in name or "cpu" in name:
            return func(*args, **(kwargs or {}))
        self.calls.append(name)
        given = {a.name: a.default_value for a in func._schema.arguments}
        given.update(zip([a.name for a in func._schema.arguments], args, strict=False), **(kwargs or {}))
        assert given["dropout_p"] == 0.0 and given["scale"] is not None
        with torch.no_grad():
            return getattr(self, name)(**given)

    def operands(self, query: Tensor, key: Tensor, value: Tensor, *, grouped: bool) -> None:
        assert all(t.stride(-1) == 1 for t in (query, key, value)) and query.dtype == key.dtype == value.dtype
        assert query.size(1) == key.size(1) or (grouped and query.size(1) % key.size(1) == 0)
        assert key.size(1) == value.size(1)

    def _scaled_dot_product_flash_attention(self, query, key, value, is_causal, scale, return_debug_mask, **rest):
        self.operands(query, key, value, grouped=True)
        assert query.size(-1) % 8 == 0 and return_debug_mask is False
        out, lse = KERNELS["math"].forward(query, key, value, None, is_causal, scale)
        seed = torch.empty(2, dtype=torch.uint64)
        return by_sequence(out), lse.contiguous(), None, None, query.size(2), key.size(2), seed, seed[0], torch.empty(0)

    def _scaled_dot_product_flash_attention_backward(self, grad_out, query, key, value, out, logsumexp, **rest):
        assert torch.get_deterministic_debug_mode() == 2
        self.operands(query, key, value, grouped=True)
        assert all(t.size(-1) % 8 == 0 for t in (grad_out, query, key, value, out))
        assert logsumexp.shape == query.shape[:3] and logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
        assert rest["cum_seq_q"] is None and rest["cum_seq_k"] is None
        assert (rest["max_q"], rest["max_k"]) == (query.size(2), key.size(2))
        assert rest["philox_seed"].dtype == torch.uint64 and rest["philox_seed"].shape == (2,)
        options = query, key, value, None, rest["is_causal"], rest["scale"]
        return tuple(g.contiguous() for g in KERNELS["math"].backward(grad_out, *options, out, logsumexp))

    def bias(self, bias: Tensor | None, query: Tensor, key: Tensor) -> None:
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.size(2)) and bias.dtype == query.dtype
            assert bias.stride(-1) == 1 and bias.stride(-2) % 8 == 0

    def _scaled_dot_product_efficient_attention(self, query, key, value, attn_bias, is_causal, scale, **rest):
        self.operands(query, key, value, grouped=False)
        self.bias(attn_bias, query, key)
        assert rest["compute_log_sumexp"] is True
        out, lse = KERNELS["math"].forward(query, key, value, attn_bias, is_causal, scale)
        rows = torch.full((*lse.shape[:2], -(-lse.size(2) // 32) * 32), math.inf)
        rows[..., : lse.size(2)] = lse
        return by_sequence(out), rows, torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)

    def _efficient_attention_backward(
        self, grad_out_, query, key, value, bias, out, logsumexp, custom_mask_type, scale, num_splits_key, **rest
    ):
        """Operands are in the order batch, sequence, heads, size. The kernel reads the output as if it were dense."""
        assert out.is_contiguous()
        assert torch.get_deterministic_debug_mode() == 0 and num_splits_key == 1
        assert query.size(0) <= 65535 and not rest["bias_requires_grad"]
        assert (rest["max_seqlen_q"], rest["max_seqlen_k"]) == (query.size(1), key.size(1))
        assert rest["cu_seqlens_q"] is None and rest["cu_seqlens_k"] is None and custom_mask_type in (0, 1)
        grad_out, query, key, value, out = (t.transpose(1, 2) for t in (grad_out_, query, key, value, out))
        self.operands(query, key, value, grouped=False)
        self.bias(bias, query, key)
        assert query.dtype == torch.float32 or query.size(-1) % 8 == 0 or self.any_heads
        queries = query.size(2)
        assert grad_out.stride(-1) == 1 and logsumexp.is_contiguous() and logsumexp.dtype == torch.float32
        assert logsumexp.size(2) == -(-queries // 32) * 32 and (logsumexp[..., queries:] == math.inf).all()
        assert rest["philox_seed"].dtype == rest["philox_offset"].dtype == torch.int64
        options = query, key, value, bias, bool(custom_mask_type), scale
        grads = KERNELS["math"].backward(grad_out, *options, out, logsumexp[..., :queries])
        return *[grad.transpose(1, 2) for grad in grads], None


@pytest.fixture
def refusing() -> Iterator[None]:
    """The program has torch refuse operators that add in no fixed order."""
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode("default")


CUDA = [
    (kernel, name)
    for kernel in ("flash", "efficient")
    for name, case in CASES.items()
    if case.dtype != torch.float64 and not (kernel == "flash" and case.mask)
]


@pytest.mark.parametrize(("kernel", "name"), CUDA)
def test_cudas_kernels_are_given_what_they_demand(kernel: str, name: str) -> None:
    with Stand() as stand:
        stand.any_heads = kernel == "efficient"  # flash pads heads, which holds for the backward of its results too
        agrees(kernel, CASES[name])
    assert stand.calls == [f"_scaled_dot_product_{kernel}_attention", "_efficient_attention_backward"]


@pytest.mark.parametrize("name", [name for kernel, name in CUDA if kernel == "flash"])
def test_flashs_backward_is_for_programs_that_refuse_what_has_no_fixed_order(name: str, refusing: None) -> None:
    with Stand() as stand:
        agrees("flash", CASES[name])
    called = "_scaled_dot_product_flash_attention"
    assert stand.calls == [called, f"{called}_backward"]


def test_a_backward_of_a_large_batch_is_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_BATCH", 1)  # of the two that there are
    with Stand() as stand:
        agrees("efficient", CASES["mask of all"])
    assert stand.calls[1:] == ["_efficient_attention_backward"] * 2


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
def test_backward_kernels_are_given_gradients_and_sums_of_any_layout(kernel: str) -> None:
    query, key, value, _ = Case().operands()
    options = query, key, value, None, False, 0.3
    out, logsumexp = KERNELS["host"].forward(*options)
    given = torch.randn(query.mT.shape).mT, *options, out, logsumexp.mT.contiguous().mT
    with Stand():
        grads = KERNELS[kernel].backward(*given)
    for mine, theirs in zip(grads, KERNELS["host"].backward(*given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("kernel", "name"), CUDA)
def test_calls_fit_torchs_own_shape_rules(kernel: str, name: str, refusing: None) -> None:
    """The efficient backward has none: torch's rule for it lacks an operand (meta__efficient_attention_backward)."""
    query, key, value, mask = CASES[name].operands("meta")
    out, logsumexp = KERNELS[kernel].forward(query, key, value, mask, False, 1.0)
    assert (out.shape, logsumexp.shape) == (query.shape, query.shape[:3])
    if kernel == "flash":
        grads = KERNELS[kernel].backward(out, query, key, value, mask, False, 1.0, out, logsumexp)
        assert [g.shape for g in grads] == [query.shape, key.shape, value.shape]


class Placed(NamedTuple):
    """What :func:`choose` asks of a tensor."""

    device: torch.device
    shape: tuple[int, ...]

    def size(self, dim: int) -> int:
        return self.shape[dim]


@pytest.mark.parametrize(
    ("device", "size", "flash", "efficient", "wanted"),
    [
        ("cpu", 8, True, True, "host"),
        ("cuda", 8, True, True, "flash"),
        ("cuda", 192, True, True, "flash"),
        ("cuda", 200, True, True, "efficient"),
        ("cuda", 8, False, True, "efficient"),
        ("cuda", 8, False, False, "math"),
        ("mps", 8, True, True, "math"),
    ],
)
def test_the_device_and_the_operands_choose(
    monkeypatch: pytest.MonkeyPatch, device: str, size: int, flash: bool, efficient: bool, wanted: str
) -> None:
    monkeypatch.setattr(kernels, "SDPAParams", lambda *args: args)
    monkeypatch.setattr(kernels, "can_use_flash_attention", lambda params: flash)
    monkeypatch.setattr(kernels, "can_use_efficient_attention", lambda params: efficient)
    tensor: Any = Placed(torch.device(device), (2, 4, 5, size))
    assert choose(tensor, tensor, tensor, None, False) == wanted


def test_grouped_heads_are_told_to_flash_and_spread_for_the_efficient_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, tuple[int, ...], bool]] = []

    def asking(name: str) -> Any:
        return lambda params: asked.append((name, params[1].size(1), params[3].shape, params[-1]))

    monkeypatch.setattr(kernels, "SDPAParams", lambda *args: args)
    monkeypatch.setattr(kernels, "can_use_flash_attention", asking("flash"))
    monkeypatch.setattr(kernels, "can_use_efficient_attention", asking("efficient"))
    query, key, value, mask = Case(key_heads=2, mask="keys").operands()
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"))
    assert choose(query, key, value, mask, False) == "math"
    assert asked == [("flash", 2, (2, 1, 1, 7), True), ("efficient", 4, (2, 4, 5, 7), False)]


def test_the_cpus_results_are_eagers() -> None:
    query, key, value, mask = Case(mask="keys").operands()
    leaves = [t.requires_grad_() for t in (query, key, value)]
    eager = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    grad = torch.randn(eager.shape)
    theirs = torch.autograd.grad(eager, leaves, grad)
    with torch.no_grad():
        out, logsumexp = attention(query, key, value, mask)
        ours = attention_backward(grad, query, key, value, out, logsumexp, mask)
    assert all(
        torch.equal(a, b) and a.stride() == b.stride() for a, b in zip((out, *ours), (eager, *theirs), strict=True)
    )


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_agrees_with_the_cpu(name: str) -> None:
    case = CASES[name]
    operands = case.operands()
    grad = torch.randn(operands[0].shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    found = []
    for device in ("cpu", "cuda"):
        *given, mask = [None if t is None else t.to(device) for t in operands]
        options = {"is_causal": case.is_causal, "scale": case.scale}
        out, logsumexp = attention(*given, mask, **options)
        grads = attention_backward(grad.to(device), *given, out, logsumexp, mask, **options)
        found.append([out, logsumexp, *grads])
    coarse = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-3, torch.float64: 1e-12}[case.dtype]
    for i, (cpu, gpu) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=coarse, atol=coarse)
        assert i == 1 or layout(gpu) == layout(cpu)
