"""Single calls of torch's operators, as operators of a net."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from graphir.runtime.kernels.communication import copy
from graphir.runtime.profiling.calls import Subject
from torch import Tensor
from torch.utils import _pytree as pytree

from graphir.ir.blob import Blob
from graphir.ir.calls import call_of, evaluate, filled
from graphir.ir.device import gpu
from graphir.ir.operator import PURE, Operator
from graphir.ir.opset import effects_of, overload
from graphir.ir.symbols import to_symbol

__all__ = ["subject_of"]


def subject_of(type: str, given: list[Any], args: Mapping[str, Any]) -> Subject | None:
    """The call, if torch takes it, as an operator of a net."""
    tensors: list[Tensor] = []
    pattern = ""
    for item in given:
        items = item if isinstance(item, list) else [item]
        inner = "".join("t" if isinstance(x, Tensor) else "_" for x in items)
        pattern += f"[{inner}]" if isinstance(item, list) else inner
        tensors += [x for x in items if isinstance(x, Tensor)]
    stored = {name: to_symbol(x) if isinstance(x, torch.dtype) else x for name, x in args.items()}
    if type == "Copy":
        returned: Any = copy(tensors[0])
    else:
        try:
            call = call_of(type, stored, pattern, len(tensors))
            clones = [x.clone() for x in tensors]
            positional, named = filled(call, clones, lambda arg: evaluate(arg, {}), torch.device("cpu"))
            returned = overload(type)(*positional, **named)
        except (RuntimeError, ValueError, IndexError):
            return None
    made = [x for x in pytree.tree_leaves(returned) if isinstance(x, Tensor)]
    effects = effects_of(type, stored, pattern, len(tensors), None) if type != "Copy" else PURE
    if effects.writes and 0 in tensors[0].stride():
        return None
    names = [f"x{i}" for i in range(len(tensors))]
    blobs = {n: blob(n, t) for n, t in zip(names, tensors, strict=True)}
    overwritten = dict(effects.writes)
    outputs = [names[overwritten[i]] if i in overwritten else f"y{i}" for i in range(len(made))]
    blobs.update({n: blob(n, t) for n, t in zip(outputs, made, strict=True) if n not in blobs})
    op = Operator(type, tuple(names), tuple(outputs), stored, gpu(0), operands=pattern or None, effects=effects)
    return Subject(op, blobs, {})


def blob(name: str, tensor: Tensor) -> Blob:
    return Blob(
        name, tuple(tensor.shape), str(to_symbol(tensor.dtype)), gpu(0), "temporary", name, tuple(tensor.stride())
    )
