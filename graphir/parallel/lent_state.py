"""The module's own tensors as the state of plans: read where they are, copied only where a replica needs its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from graphir.runtime.machine.places import Binding, places_of

from ..analysis.interfaces import written_before_update
from ..ir.blob import Blob
from ..ir.program import Program

__all__ = ["LentState"]


class LentState:
    """A tensor for each parameter, buffer and constant of some programs.

    The first replica's are the module's own, where these are on its device. The others share them, but for buffers that
    a program overwrites: of these, and on other devices of all, they have copies, which :meth:`broadcast` fills.

    Args:
        module: its parameters and buffers, and plain tensors that it reads, by their blobs' names.
        constants: of the captured program, by name; for those that are none of these.
        programs: replicated alike; the parts of one step.
        binding: as a session takes it.

    Attributes:
        tensors: by the blobs' full names.
        overwritten: the module's own that a program overwrites.
    """

    def __init__(
        self,
        module: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        programs: Sequence[Program],
        binding: Binding,
    ) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.overwritten: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._sources: list[Tensor] = []
        self.written = frozenset[str]().union(*(written_before_update(program.step) for program in programs))
        places = {device: place for p in programs for device, place in places_of(binding, p.devices).items()}
        for blob, key, first in _loaded(programs):
            source = module[key].detach() if key in module else constants[key]
            if first and key in module and blob.name in self.written:
                self.overwritten.append(source)
            place = places.get(blob.device, source.device)
            if place == source.device and (first or blob.name not in self.written):
                self.tensors[blob.name] = source
                continue
            copy = torch.empty_like(source, device=place)
            self.tensors[blob.name] = copy.copy_(source)
            if key in module:
                self._copies.append(copy)
                self._sources.append(source)

    def broadcast(self) -> None:
        """Give the copies the values that the module's tensors have now."""
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._sources)

    @contextmanager
    def restored_if_it_fails(self) -> Iterator[Sequence[Tensor]]:
        """What the overwritten tensors were; they are that again where what runs meanwhile raises."""
        before = [tensor.clone() for tensor in self.overwritten]
        try:
            yield before
        except BaseException:
            with torch.no_grad():
                for tensor, value in zip(self.overwritten, before, strict=True):
                    tensor.copy_(value)
            raise


def _loaded(programs: Sequence[Program]) -> Iterator[tuple[Blob, str, bool]]:
    """Each blob of the state once, what it is called in the module, and whether it is the first replica's."""
    seen = set()
    for program in programs:
        for op in program.init.ops:
            (name,), key = op.outputs, str(op.args["key"])
            if name not in seen:
                seen.add(name)
                yield program.init.blobs[name], key, name == program.replicas[0] + key
