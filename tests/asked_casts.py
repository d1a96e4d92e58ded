"""The element types of a forward's operators under CUDA's autocast, as torch itself has them where there is no GPU.

A model runs on fake CUDA tensors without gradients, with torch's own state of autocast: the kernels of CUDA's are in
every build. A build without CUDA has no guard of devices, for which a few functions ask; what these do is written out
here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from graphir.ir.net import Net
from graphir.ir.opset import overload

aten = torch.ops.aten
Typed = tuple[str, tuple[str, ...], tuple[str, ...]]
"""An operator: its name without marks of variants, and the floating types of its operands and results."""
FLOATS = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
PASSED = ("_to_copy", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "empty", "empty_strided")
"""Operators that are not compared. What is cast shows in what reads it; weights are cast once, or each time."""


def asked(model: nn.Module, inputs: tuple[Any, ...], run: Callable[..., Any], dtype: torch.dtype) -> list[Typed]:
    """The operators of *run* of the model and the inputs under CUDA's autocast."""
    noted = Noted()
    with FakeTensorMode(), torch.no_grad(), on_cuda(model), noted, WithoutGuard(), autocast_of_cuda(dtype):
        run(model, *tree_map_only(Tensor, fake, inputs))
    return noted.operators


def recorded(net: Net) -> list[Typed]:
    """The operators of a program's forward."""
    found = []
    for op in net.ops:
        name = op.type.split(".")[1]
        torchs = op.type.startswith("aten.")
        if op.phase == "forward" and name not in PASSED and not (torchs and overload(op.type).is_view):
            types = ([str(net.blobs[blob].dtype) for blob in names] for names in (op.inputs, op.outputs))
            found += typed(name, *types)
    return found


def typed(name: str, given: list[str], made: list[str]) -> list[Typed]:
    """An operator as it is compared; none where nothing about it is floating, as of masks and indices."""
    if "batch_norm" in name:  # forms differ in whether they are given the statistics, and return them
        name, given, made = "batch_norm", given[:3], made[:1]
    given, made = ([type for type in types if type in FLOATS.values()] for types in (given, made))
    return [(name.rstrip("_"), tuple(given), tuple(made))] if given or made else []


class Noted(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self, passed: tuple[str, ...] = PASSED) -> None:
        super().__init__()
        self.operators: list[Typed] = []
        self.passed = passed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.native_batch_norm.default:  # what writes the statistics would ask for a guard
            args = (*args[:3], None, None, *args[5:])
        out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func._opname not in self.passed and not func.is_view:
            leaves = (tree_leaves(tree) for tree in ((args, kwargs), out))
            types = ([FLOATS.get(leaf.dtype, "") for leaf in found if isinstance(leaf, Tensor)] for found in leaves)
            self.operators += typed(func._opname, *types)
        return out


class WithoutGuard(TorchFunctionMode):
    """Indexing and copies, which ask for a guard of devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return indexed(*args)
        if func is Tensor.contiguous and not args[0].is_contiguous():
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]`` for numbers, slices, None, an ellipsis and tensors."""
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    if ellipses:
        taken = len([part for part in parts if part is not None]) - 1
        parts[ellipses[0] : ellipses[0] + 1] = [slice(None)] * (tensor.dim() - taken)
    dim, tensors = 0, []
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor, dim = tensor.select(dim, part), dim - 1
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        else:
            tensors += [None] * (dim - len(tensors)) + [part]
        dim += 1
    return aten.index.Tensor(tensor, tensors) if tensors else tensor


def fake(tensor: Tensor) -> Tensor:
    """One like *tensor* on a CUDA device, within a FakeTensorMode."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")


@contextlib.contextmanager
def on_cuda(model: nn.Module) -> Iterator[None]:
    """While this is active, the model's tensors are fakes on a CUDA device, which need no gradients."""
    tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    fakes: dict[int, Tensor] = {}
    try:
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    made = fakes.setdefault(id(tensor), fake(tensor))
                    is_param = isinstance(tensor, nn.Parameter)
                    table[name] = nn.Parameter(made, requires_grad=False) if is_param else made
        yield
    finally:
        for table, tensors in zip(tables, before, strict=True):
            table.update(tensors)


@contextlib.contextmanager
def autocast_of_cuda(dtype: torch.dtype) -> Iterator[None]:
    """As ``torch.autocast("cuda", dtype)`` is where there is a GPU."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
