"""Where a placed model's modules are, in the first program that was captured of it and in all others."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from graphir.passes import Balanced, Pipeline, emit, inject_copies
from graphir.passes.base import build
from graphir.passes.choice.asked import Option
from graphir.passes.shift_modules import ShiftModules
from graphir.runtime.machine.places import Binding, places_of

from ...analysis.topology import Topology
from ...errors import PassError, PassWarning, warn
from ...ir.device import CPU, Device, DeviceName, gpu
from ...ir.module_patterns import lineage
from ...ir.plan import Plan
from ...ir.program import Program
from ..placing import Placing
from .held import Held, weighed
from .reserve import Reserve

__all__ = ["Homes"]


class Homes:
    """Places programs of one model: the first within limits, the others with every module where the first has it.

    Args:
        limits: as :func:`graphir.passes.balance` takes them; None: there are none.
        reserve: what stays free of these.
        less: by device, bytes that a program may hold less than that.
        device_map: by module, its device as Accelerate writes it, instead; None: limits decide.
        options: of a balance.
        topology: likewise.
        binding: as a session takes it.
        held: of the model.
        modules: of the model, by path: one that does nothing in a step has nothing to place.

    Attributes:
        balanced: the placement that was chosen; None where none was.
        device_map: by module, its device as Accelerate writes it.
        step: the plan of a step with its loss, if the placement was chosen for one.
    """

    def __init__(
        self,
        limits: Mapping[DeviceName, int | str] | Literal["auto"] | None,
        reserve: Reserve,
        less: Mapping[str, int],
        device_map: Mapping[str, DeviceName] | None,
        options: Sequence[Option],
        topology: Topology | str | None,
        binding: Binding,
        held: Held,
        modules: Collection[str],
    ) -> None:
        self.binding, self.held, self._modules = binding, held, frozenset(modules)
        self.reserve = reserve
        self._placing = None if limits is None else Placing(limits, topology, binding, options=options)
        self._given = {} if self._placing is None or self._placing.limits == "auto" else self._placing.limits
        if self._given:
            left: Mapping[DeviceName, int] = {
                d: nbytes - less.get(d, 0) for d, nbytes in reserve.less(self._given).items()
            }
            self._placing = Placing(left, topology, binding, options=options)
        self._moves = None if device_map is None else _moves(device_map)
        self.device_map: Mapping[str, int | str] = {"": 0}
        self._known: dict[str, Device] = {}
        self._first: str | None = None
        self.step: Plan | None = None

    @property
    def balanced(self) -> Balanced | None:
        """The placement that was kept last; None without limits."""
        return None if self._placing is None else self._placing.balanced

    @property
    def limits(self) -> Mapping[str, int]:
        """By device, in bytes, with what stays free; none where none were given."""
        if self._placing is None or self._given:
            return self._given
        return {} if self._placing.limits == "auto" else self._placing.limits

    @property
    def reserved(self) -> Mapping[str, int]:
        """By device, the bytes of limits that stay free."""
        return {device: self.reserve.of(limit) for device, limit in self._given.items()}

    def choose(self, step: Program) -> None:
        """Choose the placement for a step with its loss.

        Raises:
            PassError: as :meth:`placed`.
        """
        if self._placing is None:
            return
        found = self._within(self._placing, step)
        self._placing.keep(found)
        self.device_map, self._first = found.device_map, found.pipeline
        self.step = emit(inject_copies(_by(found.pipeline, step)))

    def placed(self, captured: Program) -> Program:
        """A captured program on its devices, with copies.

        Raises:
            PassError: no placement within the limits is found, or the device map does not fit.
        """
        if self._moves is not None:
            program = self._moved(captured)
        elif self._placing is None:
            program = captured
        else:
            program = self._chosen(captured, self._placing)
        for name in program.step.external_inputs:
            self._known.setdefault(name, program.step.blobs[name].device)
        return inject_copies(program)

    def _chosen(self, captured: Program, placing: Placing) -> Program:
        if self._first is not None:
            pipeline, self._first = self._first, None
            with contextlib.suppress(PassError):  # names that the program of the loss alone has
                return _by(pipeline, captured)
        found = self._within(placing, captured)
        if not self._known:
            self.device_map = found.device_map
        placing.keep(found)
        return _by(found.pipeline, captured)

    def _within(self, placing: Placing, program: Program) -> Balanced:
        try:
            return placing.placed(weighed(program, self.held))
        except PassError as e:
            error = PassError(e.what, at=e.at, where=e.where or (self.reserve.where if self._given else ""), fix=e.fix)
            least = self.reserve.limit_of
            error.limits = {device: max(least(most), self._given.get(device, 0)) for device, most in e.limits.items()}
            raise error from None

    def _moved(self, captured: Program) -> Program:
        assert self._moves is not None
        known = captured.module_paths
        tensors = {path: to for path, to in self._moves.items() if path in captured.step.blobs and path not in known}
        moves = {path: to for path, to in self._moves.items() if path not in tensors}
        moves = {path: to for path, to in moves.items() if not path or path in known or path not in self._modules}
        program = build(ShiftModules, modules=moves).recorded(captured)
        if not self._known:
            there = {path: str(program.step.blobs[path].device) for path in tensors}
            path = next((path for path in tensors if there[path] != tensors[path]), None)
            if path is not None:
                at = f"on {there[path]}, where its module is, and not on {tensors[path]}"
                warn(f"place: {path!r} is {at}", PassWarning)
            found = {**self._moves, **there}
            self.device_map = {path: "cpu" if to == CPU else Device.parse(to).index for path, to in found.items()}
        return program

    def places(self) -> Mapping[Device, torch.device]:
        """The real device of each logical one in use."""
        return places_of(self.binding, sorted(set(self._known.values()), key=Device.order))

    def home(self, name: str) -> Device:
        """Where a parameter or buffer is; of one that no program has, where its module's are."""
        if name in self._known:
            return self._known[name]
        for path in reversed(lineage(name)):
            for other, device in self._known.items():
                if other.startswith(f"{path}."):
                    return device
        return gpu(0)


def _by(pipeline: str, program: Program) -> Program:
    """A program after a pipeline, whose text is empty where a placement moves nothing."""
    return Pipeline(pipeline)(program) if pipeline else program


def _moves(device_map: Mapping[str, DeviceName]) -> dict[str, str]:
    """A device map as moves of modules.

    Raises:
        PassError: it is none, or leaves something on disk.
    """
    if device_map == {}:
        raise PassError("place: device_map is empty", fix='write device_map={"": 0} for one device')
    if not isinstance(device_map, Mapping):
        raise PassError(
            f"place: device_map is a {type(device_map).__name__}, not a dict of modules and devices",
            fix='write device_map={"encoder": 0, "decoder": 1}, or give limits',
        )
    found: dict[str, str] = {}
    for path, to in device_map.items():
        if to == "disk":
            raise PassError(f"place: device_map leaves {path!r} on disk", fix='give its device, or "cpu"')
        found[path] = str(_device(to))
    return found


def _device(to: Any) -> Device:
    return CPU if str(to) == "cpu" else Device.parse(to)
