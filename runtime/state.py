"""What lives from step to step: the tensors of parameters, buffers, optimizer state and constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from graphir.errors import SessionError, nearest
from graphir.ir.blob import Blob, contiguous_strides
from graphir.ir.dtype import TORCH_NAME
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program
from graphir.ir.size import bind_shape

from .reference import fill

__all__ = ["State"]


class State:
    """The tensors behind a program's state blobs, filled by its ``init``.

    Each tensor stays the same object throughout: steps and :meth:`load_module` overwrite it in place.

    Args:
        program: whose state.
        given: the module's and the optimizer's own names, and ``step``, to tensors; nothing of it is kept or written.

    Attributes:
        tensors: by blob.
        steps_done: how many steps were done.

    Raises:
        SessionError: a tensor is missing, or has another shape or dtype than its blob.
    """

    def __init__(self, program: Program, given: Mapping[str, Tensor]) -> None:
        self.program = program
        missing = sorted({str(op.args["key"]) for op in program.init.ops if op.type == "graphir.load"} - given.keys())
        if missing:
            raise SessionError(
                f"the state has no {missing[0]!r}"
                + (f" (and {len(missing) - 1} more are missing)" if len(missing) > 1 else nearest(missing[0], given)),
                where=f"program {program.name!r}",
                fix="pass program.state, which has the module's and the optimizer's own names",
            )
        self.keys = {op.outputs[0]: str(op.args["key"]) for op in program.init.ops if op.type == "graphir.load"}
        with torch.inference_mode():
            values: dict[str, Tensor] = {}
            for op in program.init.ops:
                filled = _load(op, program.init, given) if op.type == "graphir.load" else fill(op, values, program)
                values.update(filled)
            self.tensors = values
            # What the module has and no step touches is handed back as it was given.
            self.untouched = {
                name: given[blob].clone()
                for name, blob in program.interface.module_state.items()
                if self.blob(blob, 0) not in self.tensors and blob in given
            }
        step = given.get("step", torch.tensor(0))
        _check("step", step, (), torch.int64)
        self.steps_done = int(step)

    def of_step(self) -> dict[str, Tensor]:
        """The tensors that a step takes."""
        return {name: self.tensors[name] for name in self.program.step.external_inputs if name in self.tensors}

    def blob(self, name: str, replica: int) -> str:
        return self.program.replicas[replica] + name

    def check_replica(self, replica: int) -> None:
        """Raise a SessionError unless there is such a replica."""
        if not 0 <= replica < len(self.program.replicas):
            raise SessionError(f"no replica {replica}", fix=f"replicas: 0 to {len(self.program.replicas) - 1}")

    def all(self, replica: int) -> dict[str, Tensor]:
        """Everything that another session can go on from, under the names of ``program.state``."""
        self.check_replica(replica)
        prefix = self.program.replicas[replica]
        found = {key: self.tensors[blob].clone() for blob, key in self.keys.items() if blob == prefix + key}
        for name, tensor in self.untouched.items():
            found.setdefault(self.program.interface.module_state[name], tensor.clone())
        return {**found, "step": torch.tensor(self.steps_done)}

    def module(self, replica: int) -> dict[str, Tensor]:
        """Copies under the names of ``module.state_dict()``; tied names share one."""
        self.check_replica(replica)
        copies: dict[str, Tensor] = {}
        found = {}
        for name, blob in self.program.interface.module_state.items():
            source = self.tensors.get(self.blob(blob, replica), self.untouched.get(name))
            if source is None:
                raise SessionError(f"the state has no {name!r}", where=f"program {self.program.name!r}")
            found[name] = copies.setdefault(blob, source.clone())
        return found

    def load_module(self, given: Mapping[str, Tensor]) -> None:
        """Overwrite the module's state on every replica; nothing changes where it does not fit.

        Raises:
            SessionError: a name is missing or unknown, or a tensor has another shape or dtype.
        """
        known = self.program.interface.module_state
        for name in given:
            if name not in known:
                raise SessionError(f"the module has no {name!r}{nearest(name, known)}")
        for name, blob in known.items():
            if name not in given:
                raise SessionError(f"the state has no {name!r}{nearest(name, given)}")
            ours = self.tensors.get(self.blob(blob, 0), self.untouched.get(name))
            if ours is not None:
                _check(name, given[name], tuple(ours.shape), ours.dtype)
        with torch.inference_mode():
            for name, blob in known.items():
                for replica in range(len(self.program.replicas)):
                    target = self.tensors.get(self.blob(blob, replica), self.untouched.get(name))
                    if target is not None:
                        target.copy_(given[name])

    def optimizer(self, groups: list[Any]) -> dict[str, Any]:
        """Copies in the format of ``torch.optim.Optimizer.state_dict()``."""
        state: dict[int, dict[str, Tensor]] = {}
        packed = []
        count = 0
        for group in groups:
            indices = list(range(count, count + len(group["params"])))
            count += len(indices)
            for index, param in zip(indices, group["params"], strict=True):
                own = self.program.interface.optimizer_state.get(param, {})
                entries = {name: self.tensors.get(self.blob(blob, 0)) for name, blob in own.items()}
                kept = {name: tensor.clone() for name, tensor in entries.items() if tensor is not None}
                if kept:
                    state[index] = kept
            packed.append({**group, "params": indices})
        return {"state": state, "param_groups": packed}


def _load(op: Operator, init: Net, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A blob's own tensor, with its geometry and the value of ``given[key]``."""
    key, blob = str(op.args["key"]), init.blob(op.outputs[0])
    source = given[key]
    if blob.shape is None or blob.dtype is None:
        return {blob.name: source.clone()}
    shape, dtype = bind_shape(blob.shape, {}), getattr(torch, TORCH_NAME[blob.dtype])
    _check(key, source, shape, dtype)
    return {blob.name: torch.empty_strided(shape, _strides(blob, shape), dtype=dtype).copy_(source)}


def _strides(blob: Blob, shape: tuple[int, ...]) -> tuple[int, ...]:
    return contiguous_strides(shape) if blob.strides is None else bind_shape(blob.strides, {})


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, Tensor):
        raise SessionError(f"{name!r} in the state is of type {type(tensor).__name__}, not a tensor")
    if tuple(tensor.shape) != shape:
        raise SessionError(f"{name!r} in the state has shape {list(tensor.shape)}, the program takes {list(shape)}")
    if tensor.dtype != dtype:
        raise SessionError(f"{name!r} in the state has dtype {tensor.dtype}, the program takes {dtype}")
