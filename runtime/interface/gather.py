"""What a step hands back: the replicas' losses as one, or their outputs gathered along the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from graphir.errors import SessionError, counted
from graphir.ir.names import base_name
from graphir.ir.program import Program, Scalar, Slot
from graphir.ir.size import BATCH, Dims
from graphir.ir.structure import paths, read_structure, unflatten

from ..kernels.communication import all_reduce, mean_weights
from ..kernels.joined import Joined

__all__ = ["Gather"]


class Gather:
    """Turns a step's external outputs into its result. Results are tensors of their own, outside inference mode.

    Attributes:
        results: for each result, the positions of the replicas' parts of it among the external outputs.
        others: name and position of each output that is no result, such as a gradient.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = {name: i for i, name in enumerate(program.step.external_outputs)}
        interface = program.interface
        self._alone = interface.results is None and interface.loss is not None
        names = [interface.loss] if self._alone else [fetch.blob for fetch in interface.fetches]
        self.results = [
            [] if name is None else [self.result_at(p + name) for p in interface.placed.get(name, program.sharing)]
            for name in names
        ]
        self.structure = read_structure(interface.results) if interface.results is not None else None
        if self.structure is not None and len(list(paths(self.structure, ""))) != len(names):
            raise SessionError(
                f"a step's results have another structure than {counted(len(names), 'result')}",
                where=f"program {program.name!r}",
                fix="capture the program again",
            )
        handed = {i for positions in self.results for i in positions}
        if interface.loss is not None and not self._alone:
            handed |= {self.result_at(p + interface.loss) for p in program.sharing}
        self.others = [(name, i) for name, i in self.position.items() if i not in handed]

    def result_at(self, name: str) -> int:
        try:
            return self.position[name]
        except KeyError:
            raise SessionError(
                f"{name!r} is a result of the program, but no external output of its step",
                where=f"program {self.program.name!r}",
                fix="capture the program again",
            ) from None

    def result(self, outputs: Sequence[Tensor], dims: Dims) -> Any:
        """The loss, or the results in the structure in which the step returned them."""
        if self._alone:
            return self.mean([outputs[i] for i in self.results[0]], dims)
        with torch.no_grad():
            leaves = [
                self.slot(fetch, [outputs[i] for i in positions], dims)
                for fetch, positions in zip(self.program.interface.fetches, self.results, strict=True)
            ]
        return unflatten(self.structure, iter(leaves)) if self.structure is not None else tuple(leaves)

    def slot(self, fetch: Slot, found: Sequence[Tensor], dims: Dims) -> Tensor | Scalar | list[Tensor]:
        """One result of several replicas'."""
        if not found:
            return fetch.value
        if len(found) == 1:
            alone = found[0].clone()
            return [alone] if fetch.gather == "each" else alone[None] if _is_number_of_many(fetch, alone) else alone
        if fetch.batch_dim is not None:
            return torch.cat([part.to(found[0].device) for part in found], fetch.batch_dim)
        if fetch.gather == "mean":
            return self.mean(found, dims)
        if fetch.gather == "each":
            return [part.clone() for part in found]
        if fetch.gather in (None, "first"):
            return found[0].clone()
        here = [part.to(found[0].device) for part in found]
        if fetch.gather == "sum":
            return all_reduce(here, None)
        if fetch.gather == "cat":
            return torch.cat(here) if here[0].dim() else torch.stack(here)
        return reduce(torch.minimum if fetch.gather == "min" else torch.maximum, here)

    def mean(self, found: Sequence[Tensor], dims: Dims) -> Tensor:
        """The mean of what replicas have, each weighted by its share of the batch, as ``AllReduce`` forms it."""
        if len(found) == 1:
            return found[0].clone()
        with torch.no_grad():
            here = [tensor.to(found[0].device) for tensor in found]
            return all_reduce(here, len(here), mean_weights(self.shares(dims)))

    def shares(self, dims: Dims) -> list[int]:
        """The share of each replica that shares in the batch; 1 each where sizes are fixed."""
        return [dims.get(prefix + BATCH, 1) for prefix in self.program.sharing]

    def gradients(self, outputs: Sequence[Tensor], replica: int) -> dict[str, Tensor]:
        """Copies of a replica's remaining outputs, those that others have alone included: gradients by their
        parameters' names, others by base name."""
        interface = self.program.interface
        params = {gradient: param for param, gradient in interface.gradients.items()}
        wholes = {blob: name for name, parts in interface.parts.items() for blob in parts.blobs}
        named = partial(self.program.blob_of, replica=replica)
        held = {base_name(name): outputs[i] for name, i in self.others if name == named(base_name(name))}
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(wholes.get(blob, blob) for blob in held):
            dim = interface.parts[name].dim if name in interface.parts else None
            tensors = [held[blob] for blob in interface.blobs_of(name)]
            found[params.get(name, name)] = Joined(dim, tensors).clone()
        return found


def _is_number_of_many(fetch: Slot, found: Tensor) -> bool:
    """Whether a result of one replica is a vector all the same, with one number for each replica."""
    return fetch.gather == "cat" and not found.dim()
