"""What graphir knows of a placed model, and what its class asks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graphir.passes import Balanced

from ...analysis.certify import Certificate
from ...analysis.memory import memory
from ...errors import EagerWarning, GraphirError, counted, warn
from ...ir.plan import Plan
from ...ir.text import nbytes_text
from .calls import PlacedCalls
from .held import Held, Optimizing
from .homes import Homes
from .plans import PlacedPlans
from .reserve import Reserve
from .swapped import swap, swap_back, twin_of

__all__ = ["PlacedMemory", "Placement"]


class PlacedMemory(NamedTuple):
    """What devices hold in each part of a step. Prints as a table.

    Attributes:
        phases: by part, by device, the most bytes.
        limits: by device, as they were given.
        reserve: by device, what stays free of these.
        notes: what is not counted.
    """

    phases: Mapping[str, Mapping[str, int]]
    limits: Mapping[str, int]
    reserve: Mapping[str, int]
    notes: Sequence[str]

    @property
    def peak(self) -> dict[str, int]:
        """By device, the most bytes."""
        devices = dict.fromkeys(device for held in self.phases.values() for device in held)
        return {device: max([held.get(device, 0) for held in self.phases.values()]) for device in devices}

    def __str__(self) -> str:
        devices = list(self.peak)
        rows = [("", devices)]
        for phase, held in self.phases.items():
            rows.append((phase, [nbytes_text(held.get(device, 0)) for device in devices]))
        if self.limits:
            rows.append(("limit", [nbytes_text(self.limits[d]) if d in self.limits else "" for d in devices]))
        if any(self.reserve.values()):
            rows.append(
                ("of this, reserve", [nbytes_text(self.reserve[d]) if d in self.reserve else "" for d in devices])
            )
        lines = [f"  {label:<18}" + "".join([f"{cell:>12}" for cell in cells]) for label, cells in rows]
        return "\n".join([*lines, *[f"  {note}" for note in self.notes]])


class Placement:
    """How a model is placed: ``model.placement``.

    Args:
        model: itself.
        twin: the model as its own class has it.
        homes: places its programs.
        calls: of the model.
        held: beside plans.
        optimizing: the optimizer, if it is known.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        homes: Homes,
        calls: PlacedCalls,
        held: Held,
        optimizing: Optimizing | None,
    ) -> None:
        self._model, self._homes, self._held = weakref.ref(model), homes, held
        self._calls, self._optimizing = calls, optimizing
        self._before: list[tuple[torch.Tensor, torch.device]] = []
        self._said: set[str] = set()

    # What users ask.

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept, those used last first: of each kind of call that of the forward, and that of the
        backward if there is one."""
        return tuple([plan for plans in self._calls.plans for plan in plans.plans])

    @property
    def certificate(self) -> Certificate:
        """That the program which was used last computes, placed, what was captured."""
        return self._last().certificate

    @property
    def balanced(self) -> Balanced | None:
        """The placement that was chosen; None where a device map was given, or no limits."""
        return self._homes.balanced

    @property
    def reserve(self) -> Reserve:
        """What stays free of limits."""
        return self._homes.reserve

    @property
    def limits(self) -> Mapping[str, int]:
        """By device, in bytes; none where none were given."""
        return self._homes.limits

    @property
    def device_map(self) -> Mapping[str, int | str]:
        """By module, its device as Accelerate writes it: the number of a gpu, or ``cpu``."""
        return self._homes.device_map

    def memory(self) -> PlacedMemory:
        """What devices hold in each part of a step of the kind of call that was used last."""
        model, plans = self._known_model(), self._last()
        state, beside, kept = Counter[str](), Counter[str](), Counter[str]()
        trained: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            device, nbytes = str(self._homes.home(name)), tensor.numel() * tensor.element_size()
            state[device] += nbytes
            beside[device] += self._held.of(name)
            kept[device] += nbytes if name in plans.overwritten else 0
            if tensor.requires_grad:
                trained.setdefault(device, {})[name] = tensor

        unknown = Counter[str]()

        def held(plan: Plan, consumed: Sequence[str], more: Mapping[str, int]) -> dict[str, int]:
            found = memory(plan, consumed=consumed)
            unknown.update([one.type for one in found.scratch if one.nbytes is None])
            devices = dict.fromkeys([*found.peak, *state])
            own = {device: found.peak.get(device, 0) - found.state.get(device, 0) for device in devices}
            return {d: nbytes + state[d] + beside[d] + more.get(d, 0) for d, nbytes in own.items()}

        phases = {"forward": held(plans.plans[0], (), kept)}
        if len(plans.plans) > 1:
            phases["backward"] = held(plans.plans[1], plans.consumed, kept + plans.returned())
        if self._homes.step is not None:
            phases["whole step"] = held(self._homes.step, (), kept)
        notes = [self._held.unknown] if self._held.unknown else []
        if unknown:
            notes.append(f"scratch of {', '.join(unknown)}: not counted; graphir.profile measures it")
        if self._optimizing is not None and not self._held.unknown:
            phases["optimizer's step"] = {
                device: state[device] + beside[device] + self._optimizing.figures(some)[1]
                for device, some in trained.items()
            }
        elif len(plans.plans) > 1:
            notes.append("your optimizer: not counted")
        if self._homes.step is None and len(plans.plans) > 1:
            notes.append("your loss: not counted")
        return PlacedMemory(phases, self._homes.limits, self._homes.reserved, notes)

    def undo(self) -> None:
        """Make the model what it was: its class, and its tensors where they were."""
        model = self._known_model()
        swap_back(model)
        for tensor, place in self._before:
            _move(tensor, place)

    def __repr__(self) -> str:
        devices = dict.fromkeys(device for plan in self.plans for device in plan.devices)
        return f"<placement on {', '.join(map(str, devices))}: {counted(len(self.plans), 'plan')}>"

    def _last(self) -> PlacedPlans:
        found = self._calls.plans
        if not found:
            raise GraphirError("no plan stands for the model's calls", fix="see the EagerWarning that says why")
        return found[0]

    def _known_model(self) -> torch.nn.Module:
        model = self._model()
        if model is None:
            raise GraphirError("the placed model is gone", fix="keep the model")
        return model

    # What the model's class asks.

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """See :class:`.swapped.Placer`."""
        return self._calls(args, kwargs)

    def apply(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """See :class:`.swapped.Placer`."""

        def changed(tensor: torch.Tensor) -> torch.Tensor:
            made = change(tensor)
            if made.device == tensor.device or made.is_meta:
                return made
            if "moved" not in self._said:
                self._said.add("moved")
                warn(
                    f"{type(self._known_model()).__name__} is placed: its tensors stay on their devices, and were not "
                    f"moved to {made.device}; model.placement.undo() lets the model go",
                    EagerWarning,
                )
            return tensor if made.dtype == tensor.dtype else tensor.to(made.dtype)

        return changed

    @property
    def hf_device_map(self) -> Mapping[str, int | str] | None:
        """See :class:`.swapped.Placer`. Trainers compare the one device of a map with a card, and there may be none."""
        real = self._homes.places().values()
        several = len(set(self.device_map.values())) > 1
        return self.device_map if several or any(place.type == "cuda" for place in real) else None

    def place_copy(self, model: torch.nn.Module) -> None:
        """See :class:`.swapped.Placer`."""
        calls = PlacedCalls(twin_of(model), self._homes, self._calls.options)
        Placement(model, self._homes, calls, self._held, self._optimizing).take()

    # What the door does.

    def take(self) -> None:
        """Move the model's tensors to their devices, and give the model its class."""
        model = self._known_model()
        places = self._homes.places()
        swap(model, self)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        try:
            for name, tensor in tensors:
                place = places.get(self._homes.home(name), tensor.device)
                if place != tensor.device:
                    self._before.append((tensor, tensor.device))
                    _move(tensor, place)
        except BaseException:
            self.undo()
            raise
        weakref.finalize(model, self._calls.close)


def _move(tensor: torch.Tensor, place: torch.device) -> None:
    """Move a parameter or buffer, which stays the same object, and its gradient."""
    gradient = tensor.grad
    tensor.data = tensor.data.to(place)
    if gradient is not None:
        tensor.grad = gradient.to(place)
