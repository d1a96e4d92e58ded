"""Which operators read only the elements of their operands, found by running them on operands with gaps.

Each operator that torch dispatches is run again on operands that are laid out with gaps, once for each filling of the
gaps. Where a result differs, or what lies between the elements of a new one, the gaps were read.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_FILLINGS: Final = (0, 1, 0)
"""The last one shows whether results differ by themselves."""
_MOST_BYTES: Final = 1 << 21
_UNWRITTEN: Final = ("aten.empty", "aten.new_empty", "aten.resize_")
"""Types whose results hold what was in the memory before."""


class Gaps(TorchDispatchMode):
    """While it is active, every operator is tried on operands with gaps, up to *most* times each.

    Attributes:
        free: how often each type gave the same results whatever the gaps hold.
        reaching: types that read gaps.
        refused: how often each type did not take such operands.
        failed: how many of the calls that :func:`observe` made failed, by the type of error.
    """

    def __init__(self, most: int = 3) -> None:
        super().__init__()
        self.most = most
        self.free: Counter[str] = Counter()
        self.reaching: set[str] = set()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        tried = self.free[name] >= self.most or self.refused[name] >= 4 * self.most
        if not (tried or name in self.reaching or name.startswith(_UNWRITTEN)):
            self.look(name, func, args, kwargs)
        return func(*args, **kwargs)

    def look(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run *func* on operands with gaps."""
        if not any(map(_fits, _tensors((args, kwargs)))):
            return
        results = []
        try:
            for filling in _FILLINGS:
                a, k = pytree.tree_map(lambda x, f=filling: _with_gaps(x, f) if _fits(x) else x, (args, kwargs))
                torch.manual_seed(0)
                results.append(_bits(func(*a, **k), [x.untyped_storage().data_ptr() for x in _tensors((a, k))]))
        except Exception:  # a kernel that wants its operands contiguous, say
            self.refused[name] += 1
            return
        if results[0] == results[1]:
            self.free[name] += 1
        elif results[0] == results[2]:
            self.reaching.add(name)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _fits(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and x.layout is torch.strided
        and x.dim() > 0
        and 0 < x.numel() * x.element_size() * 2 ** x.dim() < _MOST_BYTES
        and not (x.is_conj() or x.is_neg() or x.is_quantized)
    )


def _with_gaps(x: Tensor, filling: int) -> Tensor:
    strides: list[int] = []
    step = 2
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= size + 1
    floating = x.dtype.is_floating_point or x.dtype.is_complex
    value: Any = (float("nan"), -7.25e3)[filling] if floating else (99, 5)[filling]
    base = torch.full((step + 8,), bool(filling) if x.dtype == torch.bool else value, dtype=x.dtype)
    found = base.as_strided(x.shape, strides, 3)
    return found.copy_(x)


def _bits(results: Any, taken: list[int]) -> list[Any]:
    """The bits of results; of a new one with gaps, those of its storage."""
    found: list[Any] = []
    for x in _tensors(results):
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x
        new = x.untyped_storage().data_ptr() not in taken
        if new and not torch.ops.aten.is_non_overlapping_and_dense(x) and x.numel():
            found.append(_bytes(x))
        plain = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        found.append((str(x.dtype), tuple(x.shape), _bytes(plain)))
    return found


def _bytes(x: Tensor) -> bytes:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes()  # type: ignore[arg-type]


def torch_samples(every: int = 1, most: int = 12) -> Iterator[Callable[[], Any]]:
    """Calls of torch's operators on torch's own samples, of every so many operators, and their backwards."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db[::every]:
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16, torch.bool):
            if dtype in op.dtypes:
                yield from _calls(op, dtype, most, backward=False)
        if op.supports_autograd:
            yield from _calls(op, torch.float32, most, backward=True)


def _calls(op: Any, dtype: torch.dtype, most: int, backward: bool) -> Iterator[Callable[[], Any]]:
    try:
        samples = [s for s, _ in zip(op.sample_inputs("cpu", dtype, requires_grad=backward), range(most), strict=False)]
    except Exception:  # of a library that is not there
        return
    for sample in samples:
        for form in (op, op.inplace_variant):
            if form is not None and not (backward and form is not op):
                yield lambda s=sample, f=form: _call(f, s, backward, in_place=f is not op)


def _call(form: Callable[..., Any], sample: Any, backward: bool, in_place: bool) -> None:
    given = sample.input.clone() if in_place else sample.input
    results = _tensors(form(given, *sample.args, **sample.kwargs))
    if backward:
        outputs = [x for x in results if x.requires_grad]
        inputs = [x for x in _tensors((sample.input, sample.args, sample.kwargs)) if x.requires_grad]
        total: Any = sum((x.abs() if x.is_complex() else x).sum() for x in outputs)
        torch.autograd.grad(total, inputs, allow_unused=True)


def observe(calls: Iterable[Callable[[], Any]], gaps: Gaps) -> None:
    """Make the calls, those that fail included, under the eyes of *gaps*."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in calls:
            try:
                with gaps:
                    call()
            except Exception as e:  # samples that want another build of torch
                gaps.failed[type(e).__name__] += 1
