"""The function ``place``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch.nn.parameter import is_lazy

from graphir.passes.choice.asked import Option
from graphir.runtime.machine.places import Binding, is_on_cuda

from ...analysis.topology import Topology
from ...capturing.intake.options import refuse_model
from ...errors import CaptureError, GraphirError, PassError
from ...ir.device import DeviceName
from ...ir.text import nbytes_text
from ..plan_cache.captures import Unfit
from .calls import PlacedCalls
from .held import Held, Optimizing, read_optimizer_of
from .homes import Homes
from .placement import Placement
from .reserve import read_reserve
from .swapped import is_placed, twin_of

__all__ = ["place"]

_TRIES: Final = 3
"""How often a placement is chosen anew whose parts take more than the program for which it was chosen."""

_NAMED: Final = 3
"""How many limits a refusal tries before it names some."""

_RESERVE: Final = "5%"
_OPTIONS: Final[tuple[Option, ...]] = ("shift", "park", "recompute")


def place(
    model: torch.nn.Module,
    inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    limits: Mapping[DeviceName, int | str] | Literal["auto"] | None = None,
    device_map: Mapping[str, DeviceName] | None = None,
    backward: bool = True,
    options: Sequence[Option] = _OPTIONS,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer] | str | None = None,
    reserve: int | str = _RESERVE,
    batch_dims: Any = None,
    topology: Topology | str | None = None,
    binding: Binding = "auto",
    allow_changes: Iterable[str] = (),
) -> torch.nn.Module:
    """Place a module, whose loop is its user's, and return it.

    ::

        graphir.place(model, (x,), limits={"gpu:0": "10 GiB", "gpu:1": "22 GiB"}, optimizer=optimizer)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward(); optimizer.step(); optimizer.zero_grad()

    The model's class becomes a subclass of its own, by the same name. Its parameters are the same objects, on the
    devices where the placement has them, so that an optimizer that was made before goes on with them. A call runs a
    plan, and so does its backward, one node of autograd. Equal calls under equal ``torch.manual_seed`` have equal bits,
    on however many devices.

    A call that no plan can stand for runs the model's own code, and an :class:`graphir.EagerWarning` says why. Calls of
    other sizes, modes or dtypes, and a model that has changed, are captured anew, with every module where it is.
    ``model.placement`` has ``memory()``, ``plans``, ``certificate``, ``balanced``, ``device_map`` and ``undo()``.

    Args:
        model: in the mode that it trains in.
        inputs: its positional arguments, for a batch as large as those to come.
        kwargs: its keyword arguments.
        limits: by device, the most bytes that a step of the loop may take there, as :func:`graphir.passes.balance`
            takes them: forward, backward, gradients between steps, what *optimizer* and *loss* say, and *reserve*.
        device_map: by module, its device, as Accelerate and transformers write it, instead of *limits*.
        backward: whether calls have a backward.
        options: what may be done within limits: ``shift`` modules, ``park`` or ``recompute`` what they save.
        loss: what the loop computes of the model's output and *targets*, as :func:`graphir.capture` takes it: it counts
            where the placement is chosen.
        targets: for it.
        optimizer: of the model's parameters, or a class or name of one: its state counts, and its step is predicted.
        reserve: what stays free of each limit for what is not counted, such as a loss and an optimizer that are not
            given: a part of the limit, ``"5%"``, or bytes. ``limits="auto"`` are 95 % of what is free already.
        batch_dims, allow_changes: as :func:`graphir.capture` takes them.
        topology: as :func:`graphir.passes.balance` takes it.
        binding: the real device of each logical one, as :class:`graphir.runtime.Session` takes it.

    Raises:
        CaptureError: the model can't be captured with these arguments, or its class have no subclass.
        PassError: no placement within the limits is found, or *device_map* does not fit; nothing has changed then.

    Returns:
        The model.
    """
    refuse_model(model, "place")
    if is_placed(model):
        raise CaptureError("place: the model is placed already", fix="let it go by model.placement.undo() first")
    _check(inputs, kwargs, backward, allow_changes)
    if limits is None and (tuple(options) != _OPTIONS or topology is not None or reserve != _RESERVE):
        raise PassError("place: options, topology and reserve are for a placement within limits", fix="give limits")
    if limits == "auto" and reserve != _RESERVE:
        raise PassError(
            "place: limits='auto' leaves 5 % of what is free", fix="give limits in bytes, or leave reserve out"
        )
    kept = read_reserve(reserve)
    if loss is None and targets:
        raise CaptureError("place: targets are given, but no loss", fix="pass loss=, or leave targets out")
    if limits is not None and device_map is not None:
        raise PassError("place: limits and device_map are both given", fix="leave one of them out")
    _check_model(model)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad and backward}
    optimizing = read_optimizer_of(optimizer, params.values())
    held = _held(params, optimizing)
    modules = dict(model.named_modules())
    capture_options = {"batch_dims": batch_dims, "allow_changes": tuple(allow_changes)}
    if is_on_cuda(binding):
        capture_options["target"] = "cuda"
    given = tuple(inputs), dict(kwargs or {})

    def placed(within: Any, less: Mapping[str, int]) -> Placement:
        homes = Homes(within, kept, less, device_map, options, topology, binding, held, modules)
        twin = twin_of(model)
        calls = PlacedCalls(twin, homes, capture_options)
        with torch.set_grad_enabled(backward):
            if loss is not None:
                step = calls.eager.captured(given[0], kwargs=given[1], targets=targets, loss=loss, **capture_options)
                homes.choose(step)
            try:
                calls.begin(*given)
            except Unfit as e:
                raise CaptureError(f"place: {e}", fix="place the model without that, or give other arguments") from None
        return Placement(model, homes, calls, held, optimizing)

    placement = placed(None, {}) if limits is None else _named(limits, placed)
    placement.take()
    return model


def _check(inputs: object, kwargs: object, backward: object, allow_changes: object) -> None:
    """Refuse arguments of another kind."""
    if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Sequence):
        raise CaptureError(f"place: inputs is a {type(inputs).__name__}, not a tuple", fix="write (x,)")
    if not isinstance(kwargs, Mapping | None):
        raise CaptureError(f"place: kwargs is a {type(kwargs).__name__}, not a dict", fix='write {"x": x}')
    if isinstance(allow_changes, str) or not isinstance(allow_changes, Iterable):
        raise CaptureError(f"place: allow_changes is {allow_changes!r}", fix='write ("counter",)')
    if type(backward) is not bool:
        raise CaptureError(f"place: backward is {backward!r}", fix="give True or False")


def _check_model(model: torch.nn.Module) -> None:
    """Refuse a model that cannot be placed, whatever its class."""
    if hasattr(model, "placement"):
        raise CaptureError(
            "place: the model has an attribute 'placement' of its own", fix="rename the attribute, or place its parts"
        )
    for name, module in model.named_modules():
        if name and is_placed(module):
            raise CaptureError(f"place: {name!r} is placed already", fix=f"let {name!r} go by placement.undo() first")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise CaptureError(f"place: {name!r} has no shape yet", fix="call the model once with a batch")
        if tensor.is_meta:
            raise CaptureError(f"place: {name!r} is on meta, so it has no data", fix="give the model data first")


def _named(limits: Any, placed: Callable[[Any, Mapping[str, int]], Placement]) -> Placement:
    """A placement within limits; a refusal names limits within which it was tried to find one.

    Raises:
        PassError: none is found.
    """
    try:
        return _within(limits, placed)
    except PassError as e:
        refused = e
    nearest, works = refused.limits, False
    if not nearest or limits == "auto":
        raise refused
    for _ in range(_NAMED):
        try:
            _within(nearest, placed)
        except PassError as e:
            nearest = e.limits or nearest
        else:
            works = True
            break
    needed = ", ".join([f"{name!r}: {limit}" for name, limit in nearest.items()])
    says = "works" if works else "is the nearest that was found"
    others = refused.fix.partition("; or ")[2]
    fix = f"limits={{{needed}}} {says}{f'; or {others}' if others else ''}"
    raise PassError(refused.what, at=refused.at, where=refused.where, fix=fix)


def _within(limits: Any, placed: Callable[[Any, Mapping[str, int]], Placement]) -> Placement:
    """A placement whose forward, backward and optimizer's step, each by itself, keep within what is left of the limits.

    What is chosen is chosen for one program, which holds less than these do together: in a step of the loop, all
    gradients and saved values of the model are there at once.

    Args:
        limits: as they were given.
        placed: a placement within limits for which a program holds less by so many bytes a device.

    Raises:
        PassError: none is found.
    """
    placement, less = placed(limits, {}), Counter[str]()
    for _ in range(_TRIES):
        held = placement.memory()
        most = {device: limit - held.reserve.get(device, 0) for device, limit in held.limits.items()}
        over = {device: more for device, limit in most.items() if (more := held.peak.get(device, 0) - limit) > 0}
        if not over:
            return placement
        less.update(over)
        try:
            placement = placed(limits, less)
        except PassError:
            break
    device = max(over, key=lambda name: over[name] / most[name])
    phase = max(held.phases, key=lambda name: held.phases[name].get(device, 0))
    nearest = {
        name: max(limit, placement.reserve.limit_of(held.peak.get(name, 0))) for name, limit in held.limits.items()
    }
    error = PassError(
        f"place: no placement within the limits was found: the {phase} lacks {nbytes_text(over[device])} on {device}",
        where=placement.reserve.where,
        fix=f"limits={nearest} is the nearest that was found",
    )
    error.limits = nearest
    raise error


def _held(params: Mapping[str, torch.Tensor], optimizing: Optimizing | None) -> Held:
    """The gradients of parameters, and the optimizer's state: a step of the loop holds these beside the plans."""
    gradients = {name: p.numel() * p.element_size() for name, p in params.items()}
    if optimizing is None:
        return Held(gradients, {})
    try:
        return Held(gradients, optimizing.figures(params)[0])
    except GraphirError as e:
        return Held(gradients, {}, e.what)
