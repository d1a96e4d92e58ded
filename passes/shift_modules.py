"""Move modules to other devices: all that runs inside of them, and all that they own.

::

    shift_modules(program, {"layer4": "gpu:1"})

    conv1 … layer3   @gpu:0
    avgpool, flatten         operators of containers, additions, casts: where fewer bytes cross (:mod:`.cut`)
    layer4           @gpu:1  with its parameters, buffers, backward, update, and the optimizer's state
    fc, loss         @gpu:0

A module that has parameters and is not named stays. One that has none may go along: a loss behind the last module that
moves, with its targets. Everything else follows (:mod:`.following`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias

from pydantic import AfterValidator, BeforeValidator

from graphir.errors import PassError
from graphir.ir.device import Device, DeviceName
from graphir.ir.names import base_name
from graphir.ir.program import Program

from .base import Pass, build, each_once, printed_device, register
from .cut import cheapest_sides
from .following import follow, follows
from .module_patterns import claims, leaves_out, weighted_modules
from .standing import Order

__all__ = ["Move", "ShiftModules", "Target", "shift_modules"]

Target: TypeAlias = "DeviceName | Mapping[DeviceName, DeviceName]"
"""A device, or for each source device a target."""

_CAST: Final = "aten._to_copy.default"


def _printed(target: Any) -> Any:
    """A target with its devices as they are printed; None of what is left out."""
    if target is None:
        return None
    if not isinstance(target, Mapping):
        return printed_device(target)
    return each_once(target, lambda given: {printed_device(source): printed_device(to) for source, to in given.items()})


@register
class ShiftModules(Pass):
    """See :func:`shift_modules`."""

    name: ClassVar[str] = "shift_modules"
    never_behind: ClassVar[Order] = {"shared": "an operand that moves would be overwritten in a copy alone"}

    modules: Annotated[
        dict[str, Annotated[str | dict[str, str] | None, BeforeValidator(_printed)]], AfterValidator(leaves_out)
    ]

    def rewrite(self, program: Program) -> Program:
        if program.step.dialect.workspace:
            raise PassError(
                f"the operators of {program.name!r} do not say which module they came from",
                fix="shift a Caffe2 net by shift_activations",
            )
        claimed = claims(program, self.modules)
        targets = {pattern: to for pattern, to in self.modules.items() if to is not None}
        _refuse_unused_sources(program, claimed, targets)
        return Move(program, claimed, {pattern: _targets(to) for pattern, to in targets.items()}).run()


def shift_modules(program: Program, modules: Mapping[str, Target | None]) -> Program:
    """Move modules, with everything inside of them, to other devices.

    The result needs :func:`inject_copies` before it can be emitted. At a contiguous cut each activation crosses once,
    and its gradient comes back once.

    Args:
        program: captured, or replicated.
        modules: by pattern (``"layer4"``, ``"transformer.h[2:4]"``, ``"**.mlp"``), the device to which the modules go:
            ``"gpu:1"``, ``1``, ``torch.device("cuda:1")`` or ``"cpu"``; or for each device that they are on another
            one, as ``{0: 2, 1: 3}`` for two replicas. ``""`` is the whole model, and ``"!layer4.0": None`` leaves
            modules out; of several patterns for one module the closest one holds (see docs/glossary).

    Raises:
        PassError: a pattern names no module, or none that others leave to it, or two that are equally close say
            different things of one; a device is none; or nothing of the modules is on a source. Nothing has changed
            then.
    """
    return build(ShiftModules, modules=modules)(program)


def _refuse_unused_sources(
    program: Program, claimed: Mapping[str, str], modules: Mapping[str, str | Mapping[str, str]]
) -> None:
    sources = {pattern: to for pattern, to in modules.items() if isinstance(to, Mapping)}
    used: dict[str, set[Device]] = {pattern: set() for pattern in sources}
    for op in (*program.init.ops, *program.step.ops) if sources else ():
        if claimed.get(op.module) in sources:
            used[claimed[op.module]].add(op.device)
    for pattern, to in sources.items():
        for source in to:
            if source not in used[pattern]:
                where = sorted(used[pattern], key=Device.order)
                raise PassError(f"nothing of {pattern!r} is on {source}", fix=f"sources can be {', '.join(where)}")


def _targets(to: str | Mapping[str, str]) -> Mapping[Device, Device] | Device:
    if isinstance(to, str):
        return Device.parse(to)
    return {Device.parse(source): Device.parse(target) for source, target in to.items()}


class Move:
    """One shift of modules.

    Attributes:
        claimed: by the path of a module that moves, its pattern.
        targets: by pattern, where to.
        owners: of state whose name is no path, since that would read as a replica's prefix, the module.
    """

    def __init__(
        self, program: Program, claimed: Mapping[str, str], targets: Mapping[str, Mapping[Device, Device] | Device]
    ) -> None:
        self.program, self.claimed, self.targets = program, claimed, targets
        self.weighted = weighted_modules(program)
        named = program.interface.module_state
        self.owners = {blob: name.rpartition(".")[0] for name, blob in named.items() if blob not in named}

    def device(self, module: str, now: Device) -> Device:
        """Where what belongs to *module* and is on the device *now* goes."""
        pattern = self.claimed.get(module)
        if pattern is None:
            return now
        targets = self.targets[pattern]
        return targets if isinstance(targets, Device) else targets.get(now, now)

    def run(self) -> Program:
        step = self.program.step
        placed: dict[int, Device] = {}
        free: dict[int, None] = {}
        for i, op in enumerate(step.ops):
            if follows(op):
                continue
            if op.kind == "copy":  # somebody has put it where it is, or where the module is that reads it
                placed[i] = self.device(op.module, op.device)
            elif op.type == _CAST or not (op.module in self.claimed or self.is_fixed(op.module, op.inputs)):
                free[i] = None
            else:
                placed[i] = self.device(op.module, op.device)
        overwritten = {
            step.blobs[step.ops[i].outputs[output]].storage: None
            for i in free
            for output, _ in step.ops[i].effects.writes
        }
        homes = {
            name: home for name in step.external_inputs if (home := self.home(name, name in overwritten)) is not None
        }
        sides = cheapest_sides(self.program, placed, homes, free)
        chosen = (placed | sides.ops).items()
        moved = {i: device for i, device in chosen if device != step.ops[i].device or follows(step.ops[i])}
        away = {
            name: device
            for name, device in (homes | sides.inputs).items()
            if device != step.blobs[name].device or name in overwritten
        }
        return follow(self.program, moved, away, ShiftModules.name)

    def is_fixed(self, module: str, inputs: tuple[str, ...]) -> bool:
        """Whether an operator of a module that is not named stays: the module has parameters, or it reads some."""
        blobs = self.program.step.blobs
        return module in self.weighted or any(blobs[blobs[name].storage].role == "param" for name in inputs)

    def home(self, name: str, overwritten: bool) -> Device | None:
        """Where an external input lives: a module's own where the module is. None where the fewest bytes shall cross:
        what the step is given, and buffers of containers that free operators overwrite."""
        blob = self.program.step.blobs[name]
        if blob.role in ("input", "constant") or blob.device.is_host:
            return blob.device if blob.device.is_host else None
        module = self.owners.get(base_name(name), base_name(name).rpartition(".")[0])
        if overwritten and module not in self.claimed and module not in self.weighted:
            return None
        return self.device(module, blob.device)
