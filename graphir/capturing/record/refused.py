"""Refusals of operators that no program has, and of steps that fail: the module, the operator, and a remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from ...errors import CaptureError, GraphirError
from ...ir.opset import NAMESPACES
from ...ir.optypes.table import operator_type
from ..words.libraries import Outside
from ..words.places import READS_DATA, in_short, where
from .forms import Form, form_of

__all__ = ["FAKE_ERRORS", "REFUSED_AT_TIMES", "failure", "refuse_operator", "refused_by_fake", "refused_trace"]

_IN_TORCHS_WORDS: Final = (
    (
        r"Cannot access data pointer",
        "the step asks for the address of a tensor's data, and tensors have no data while the step is recorded",
        "in place of copy.deepcopy use tensor.clone(), and for a module torch.func.functional_call with parameters of "
        "its own; call neither data_ptr() nor foreign code",
    ),
    (
        r"Creating a new Tensor subclass (\w+)",
        r"a tensor of type \1 is not supported",
        "use plain tensors: attention takes is_causal=True or a mask in place of a CausalBias",
    ),
    (
        r".*binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
        "the step calls binary_cross_entropy under autocast for CUDA, which PyTorch refuses there",
        "replace binary_cross_entropy and the sigmoid before it by binary_cross_entropy_with_logits",
    ),
    (
        r"_share_\w+: only available",
        "the step moves a tensor into shared memory",
        "call share_memory() before the capture",
    ),
)
"""For each of torch's refusals of fake tensors: a pattern of its text, what the step did, and a remedy."""

_BRANCHES: Final = ("cond", "while_loop")
"""Operators that take functions, and choose by data which functions run, or how often."""

FAKE_ERRORS: Final = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""The errors of torch's fake tensors where a result can't be known without the data."""

REFUSED_AT_TIMES: Final = frozenset(
    {
        torch.ops.aten.index.Tensor,
        torch.ops.aten.cumprod.default,
        torch.ops.aten._fused_moving_avg_obs_fq_helper.default,
        torch.ops.aten._linalg_svd.default,
        torch.ops.aten._linalg_eigh.default,
        torch.ops.aten.linalg_eig.default,
    }
)
"""Operators that are refused or accepted by their arguments or by their caller."""

_REMEDIES: Final[Mapping[str, str]] = {
    "aten.nonzero": "index with a mask of fixed shape: torch.where(mask, a, b), or multiply by the mask",
    "aten.masked_select": "keep the shape: torch.where(mask, a, b), or multiply by the mask",
    "aten.index": "a boolean mask selects an unknown number of elements: use torch.where(mask, a, b)",
    "aten._ctc_loss": "call torch.nn.functional.ctc_loss, which is captured",
    "aten._pack_padded_sequence": "call torch.nn.utils.rnn.pack_padded_sequence, which is captured for lengths that "
    "are Python integers",
    "aten.equal": READS_DATA + "; in place of torch.istft, which calls equal, use torch.fft.irfft and F.fold",
    "aten.linalg_lstsq": "solve the normal equations, torch.linalg.solve(A.mT @ A, A.mT @ b), or use torch.linalg.pinv",
    "aten.resize_": "make a new tensor instead; if only the first step resizes the tensor, run one step before the "
    "capture",
    "aten.resize_as_": "make a new tensor instead",
    "aten.set_": "make a new tensor instead",
}

_FIXED_SHAPE: Final = "use an operator whose output shape does not depend on the data"

_UNSUPPORTED: Final[Mapping[str, tuple[str, str]]] = {
    "aten.mkldnn_rnn_layer": (
        "the fused CPU kernel of LSTM is not supported",
        Outside(
            "call the LSTM in a forward of your own, and switch the kernel off around the LSTM alone, so that eager "
            "PyTorch computes the same bits: with torch.backends.mkldnn.flags(enabled=False): ..."
        ),
    ),
    "aten._nested_tensor_from_mask_left_aligned": (
        "nn.TransformerEncoder makes nested tensors of the positions that a mask keeps, so sizes depend on data",
        Outside("pass enable_nested_tensor=False to nn.TransformerEncoder, or set its use_nested_tensor to False"),
    ),
    "aten._efficientzerotensor": (
        "zero tangents of forward-mode AD are tensors without memory, which no program can express",
        "use reverse mode: torch.func.grad, torch.func.vjp, torch.autograd.grad; in place of jvp "
        "torch.autograd.functional.jvp(…, create_graph=True)",
    ),
}
"""Operators that no program has: the complaint about each, and a remedy."""


def refuse_operator(func: object, scope: str, args: tuple[object, ...]) -> None:
    """Raise if *func* can't be recorded.

    Raises:
        CaptureError: *func* is higher-order, foreign or not supported, or its result depends on data.
    """
    complaint = _complaint(func, args) if isinstance(func, torch._ops.OpOverload) else _on_functions(func)
    if complaint is not None:
        what, fix = complaint
        raise CaptureError(what, where=where(scope), fix=fix)
    try:
        form_of(func)
    except GraphirError as e:
        raise CaptureError(e.what, where=where(scope), fix=e.fix) from e


def _on_functions(func: object) -> tuple[str, str]:
    """The complaint about an operator that takes functions, and a remedy."""
    if isinstance(func, torch._ops.HigherOrderOperator) and not func.name().startswith(_BRANCHES):
        return (
            f"{func} is a higher-order operator, and programs have no operators that take functions",
            "call the function directly, in a loop if it runs several times",
        )
    return (
        f"{func} can't be captured: which branch runs depends on data",
        "compute both branches and choose with torch.where, or decide outside of the step",
    )


def _complaint(func: torch._ops.OpOverload, args: tuple[object, ...]) -> tuple[str, str] | None:
    """The complaint about an operator with these arguments, and a remedy; None if it can be recorded."""
    name = f"{func.namespace}.{func._opname}"
    if func.namespace not in NAMESPACES and not operator_type(f"{name}.{func._overloadname}").registered:
        allowed = ", ".join(sorted(NAMESPACES))
        return (
            f"operator {func} is not one of torch's own",
            Outside(
                f"call graphir.register_operator(torch.ops.{name}) once before the capture, or write the operator with "
                f"operators of {allowed}"
            ),
        )
    if name in _UNSUPPORTED:
        return _UNSUPPORTED[name]
    if name == "aten.index" and not _has_mask(args[1]):
        return None
    if torch.Tag.data_dependent_output in func.tags or name == "aten._local_scalar_dense":
        what = f"{func} reads a number out of a tensor, so the step depends on data"
        return what, _REMEDIES.get(name, READS_DATA)
    node = torch._C._current_autograd_node()
    computes = "" if node is None else node.name()
    if name == "aten.index" and computes == "EmbeddingBackward0":
        return (
            "the sparse gradient of an embedding with padding_idx leaves out the rows of padding, whose number depends "
            "on data",
            Outside("use sparse=False, leave padding_idx out, or use nn.EmbeddingBag"),
        )
    if name == "aten.cumprod" and computes.startswith("ProdBackward"):
        return (
            "PyTorch computes the gradient of prod in two ways, depending on whether the data contain zeros",
            "multiply one by one, functools.reduce(torch.mul, x.unbind(dim)), or take the last value of torch.cumprod",
        )
    if name == "aten._fused_moving_avg_obs_fq_helper" and _resizes_statistics(*args):
        return (
            "the first step of a per-channel fake quantization resizes the statistics",
            Outside("run one step before the capture"),
        )
    if torch.Tag.dynamic_output_shape in func.tags:
        return f"the shape of {func}'s result depends on data", _REMEDIES.get(name, _FIXED_SHAPE)
    if name in ("aten.resize_", "aten.resize_as_", "aten.set_"):
        return f"{func} changes the size or the storage of a tensor", _REMEDIES[name]
    return None


def _resizes_statistics(*args: Any) -> bool:
    """Whether a fake quantization by channel has no scale for each channel yet."""
    x, scale, channels, by_channel = args[0], args[5], args[10], args[11:12]
    return by_channel == (True,) and scale.numel() != x.shape[channels]


def _has_mask(indices: object) -> bool:
    """Whether one of the *indices* is a mask, which selects as many elements as it has ones."""
    given = indices if isinstance(indices, (list, tuple)) else ()
    return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in given)


def failure(error: Exception) -> tuple[str, str]:
    """The complaint about a step that failed while it was recorded, and a remedy; an error of graphir's has both."""
    if isinstance(error, GraphirError):
        return error.what, error.fix
    said = str(error)
    for pattern, what, fix in _IN_TORCHS_WORDS:
        if match := re.match(pattern, said):
            return match.expand(what), fix
    return (
        f"the step failed while it was recorded: {in_short(error)}",
        "check that the step runs by itself on these inputs; numpy and foreign code can't be recorded",
    )


def refused_by_fake(error: Exception, form: Form, scope: str) -> CaptureError:
    """The error to raise where fake tensors can't compute a result."""
    if isinstance(error, UnsupportedOperatorException):
        return CaptureError(
            f"torch can't tell the shape of {form.type}'s result without computing the result",
            where=where(scope),
            fix="use operators on plain dense tensors",
        )
    return CaptureError(
        f"the result of {form.type} can't be known without the data: {type(error).__name__}",
        where=where(scope),
        fix=_REMEDIES.get(form.type.rpartition(".")[0], _FIXED_SHAPE),
    )


def refused_trace(scope: str) -> CaptureError:
    """The error to raise where the step traces a function.

    Torch would trace the operators that the recorder runs, and the recorder runs none where it remembers a result.
    """
    return CaptureError(
        "the step traces a function, as make_fx, torch.func.linearize and operators such as cond and scan do",
        where=where(scope),
        fix="call the function directly, in a loop if it runs several times; compute both of two branches, and choose "
        "with torch.where",
    )
