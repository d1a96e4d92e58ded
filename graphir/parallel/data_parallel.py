"""A module on several devices: its batch is split, replicas run at the same time, their outputs are put together. ::

    inputs ──scatter──▶ shares ─┐
                                ├─ parallel_apply ──▶ outputs ──gather──▶ output
    module ──replicate─▶ copies ┘

Each arrow is a method that a subclass can override, as of ``torch.nn.DataParallel``. Where none is, a call runs as
plans if these can stand for it (:mod:`.compiled`): the same bits but for random masks. A warning says once why not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Literal, TypeAlias, TypeVar, cast

import torch
from torch import nn

from ..capturing.isolate.attributes import AllowedChanges
from ..capturing.record.seeds import active_ids
from .apply import apply_replicas
from .compiled import CompiledReplicas, lock_of
from .devices import Binding, DeviceId, device_id, ids_of, places_of_ids
from .errors import ReplicationRuntimeError, ReplicationTypeError, ReplicationValueError
from .gather import gather
from .replicas import replicate
from .scatter import scatter_kwargs, shares_given, shares_with_rows

__all__ = ["DataParallel", "data_parallel"]

_M = TypeVar("_M", bound=nn.Module)
_FORWARD: Final = "DataParallel.forward"
_STEPS: Final = ("scatter", "replicate", "parallel_apply", "gather")
"""What a subclass can override; plans cannot stand for it then."""

_Replicated: TypeAlias = tuple[nn.Module, tuple[int, ...], int, int, Binding, tuple[str, ...], tuple[int, ...]]


class DataParallel(nn.DataParallel[Any]):
    """``torch.nn.DataParallel``, also on logical devices, and with random numbers that do not depend on timing.

    The batch is split along *dim* by torch's ``chunk`` rule, or by unlike *shares*. Each share goes through a replica
    of the module, in a thread of its own, and the outputs are put together. Gradients are summed into the module's own
    parameters, in replica order; one that no replica has used gets zeros, as in torch. What replica 0 writes into
    parameters and buffers in place stays; everything else that a replica changes in itself is lost.

    It differs from torch's in this: without any GPU explicit ids are logical devices on the host; replicas keep
    autocast's element type and inference mode; each draws from a generator of its own, derived from torch's; and each
    share is a tensor of its own, also where it stays on its device.

    Args:
        module: what is replicated; its parameters and buffers are on the first device.
        device_ids: one replica on each, as numbers, devices or texts; all GPUs if it is left out, and without a GPU the
            module itself runs. So it does with one device.
        output_device: where outputs are gathered; -1 is the host. By default the first device.
        dim: the dimension along which tensors are split and put together.
        binding: on which real device each id is, as :class:`graphir.runtime.Session` takes it. ``auto``: the GPU of
            that number, or the host where there is none. ``cpu``: the host anywhere. ``cuda``, or a dict such as
            ``{"gpu:0": "cuda:0", "gpu:1": "cuda:0"}``, lets several share a GPU.
        idle: ``call`` calls a replica that has no rows, as torch does where there are arguments that are not split: the
            module has to do without the others. ``skip`` leaves such replicas out.
        allow_changes: attributes, such as ``("counter", "layers.0.counter")``, that only keep books: calls and their
            callers may change them, and plans go on with the values that were captured.
        shares: a positive whole number for each device: with ``[3, 1]`` the first replica gets three quarters of the
            rows, by the rule of :func:`graphir.passes.replicate`. By default all are equal.

    Attributes:
        module: the module.
        device_ids: the numbers of the devices; empty where the module itself runs.
        shares: in lowest terms; empty where all are equal.

    Raises:
        CaptureError: *allow_changes* is no tuple of attributes.
        ReplicationTypeError: *module* is no module.
        ReplicationIndexError: *device_ids* is empty.
        ReplicationValueError: a device is none or is named twice; the binding does not fit; *idle* is another word;
            *shares* do not fit the devices.
        ReplicationRuntimeError: there are fewer GPUs, and the binding shares none.
    """

    _compiled: tuple[_Replicated, CompiledReplicas] | None = None
    """The fast path, and what it was made for."""

    _moves: bool = True
    """Whether a module for one device is moved there, as torch's class does and its function does not."""

    _splits: bool = True
    """Whether a call's tensors are split, so that there may be unlike shares."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[DeviceId] | None = None,
        output_device: DeviceId | None = None,
        dim: int = 0,
        *,
        binding: Binding = "auto",
        idle: Literal["call", "skip"] = "call",
        allow_changes: Iterable[str] = (),
        shares: Sequence[int] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(module, nn.Module):
            raise ReplicationTypeError(
                f"the module is a {type(module).__name__}, not an nn.Module",
                where=f"{type(self).__name__}(...)",
                fix="pass the model itself; a function goes into the forward of an nn.Module",
            )
        if idle not in ("call", "skip"):
            raise ReplicationValueError(
                f"idle is {idle!r}", where="DataParallel(...)", fix="give 'call', as torch does, or 'skip'"
            )
        if shares is not None and not self._splits:
            raise ReplicationTypeError(
                f"{type(self).__name__} splits nothing, so that shares= says nothing",
                where=f"{type(self).__name__}(...)",
                fix="give each call a list of the shares, of as many rows as you like",
            )
        self.idle = idle
        names = allow_changes if isinstance(allow_changes, str) else tuple(allow_changes)
        AllowedChanges(module, names)  # raises where there cannot be such attributes
        self.allow_changes = tuple(names)
        ids = ids_of(device_ids, binding)
        self.shares = shares_given(shares, len(ids), "DataParallel(...)")
        self.module = module
        self.dim = dim
        self.binding = binding
        self.device_ids = cast(Any, ids)
        if not ids:
            return
        output = ids[0] if output_device is None else device_id(output_device, "output_device")
        self.places = places_of_ids(ids, output, binding)
        self.output_device = output
        self.src_device_obj = self.places[ids[0]]
        if len(ids) == 1 and self._moves:
            module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns for the whole batch.

        Raises:
            ReplicationRuntimeError: a parameter or buffer is not on the first device; tensors cannot be split; outputs
                cannot be put together; the module cannot be replicated.
            ReplicationTypeError, ReplicationValueError, ReplicationIndexError: outputs cannot be put together.
            Exception: of a replica, with its number and its device.
        """
        with torch.autograd.profiler.record_function(_FORWARD):
            if not self.device_ids:
                return self.module(*inputs, **kwargs)
            self._check_module()
            if (fast := self._fast_path()) is not None and (output := self._planned(fast, inputs, kwargs)) is not None:
                return output
            args, named = self.scatter(inputs, kwargs, self.device_ids)
            if not args and not named:
                args, named = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*args[0], **named[0])
            busy = shares_with_rows(args, named, self.dim)
            if self.idle == "skip":
                args, named = args[:busy], named[:busy]
            with lock_of(self.module):
                replicas = self.replicate(self.module, self.device_ids[: len(args)])
            try:
                outputs = self.parallel_apply(replicas, args, named)
            except TypeError as e:
                idle = next((i for i in range(busy, len(args)) if f"in replica {i} " in str(e)), None)
                if idle is None or type(e) is not TypeError:
                    raise
                raise _without_rows(e, idle) from e.__cause__
            return self.gather(outputs, self.output_device)

    def _planned(self, plans: CompiledReplicas, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output by *plans*; None where eager replicas have to run."""
        return plans(inputs, kwargs)

    def _fast_path(self) -> CompiledReplicas | None:
        """What runs the replicas as plans; None with one device, where steps are overridden, and within
        :func:`graphir.seeded`, whose masks are those of eager replicas."""
        if len(self.device_ids) < 2 or active_ids() is not None or any(map(self._overrides, _STEPS)):
            return None
        where = self.module, tuple(self.device_ids), self.output_device, self.dim, self.binding
        of = *where, self.allow_changes, self.shares
        if self._compiled is None or any(a is not b and a != b for a, b in zip(self._compiled[0], of, strict=True)):
            self._compiled = of, CompiledReplicas(*of)
        return self._compiled[1]

    def _overrides(self, name: str) -> bool:
        return name in self.__dict__ or getattr(type(self), name) is not getattr(self._own_steps(), name)

    @staticmethod
    def _own_steps() -> type[DataParallel]:
        """The class whose steps plans stand for."""
        return DataParallel

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_compiled": None}

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None, device_ids: Sequence[DeviceId]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """The arguments of each replica, positional and keyword; see :func:`graphir.parallel.scatter_kwargs`."""
        shares = self.shares[: len(device_ids)] or None
        return scatter_kwargs(inputs, kwargs, self._places(device_ids), self.dim, shares)

    def replicate(self, module: _M, device_ids: Sequence[int | torch.device]) -> list[_M]:
        """A copy of the module for each device; without gradients where they are switched off."""
        return replicate(module, self._places(device_ids), not torch.is_grad_enabled())

    def parallel_apply(self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """What each replica returns for its arguments, all called at the same time."""
        ids = [device_id(device, "device_ids") for device in self.device_ids[: len(replicas)]]
        return apply_replicas(replicas, inputs, kwargs, ids, self._places(ids))

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """The outputs as one, on the output's device."""
        return gather(outputs, self._places([output_device])[0], self.dim)

    def _places(self, devices: Sequence[DeviceId]) -> list[torch.device]:
        ids = [device_id(device, "device_ids") for device in devices]
        missing = [device for device in ids if device not in self.places]
        if missing:
            self.places = {**self.places, **places_of_ids(missing, missing[0], self.binding)}
        return [self.places[device] for device in ids]

    def _check_module(self) -> None:
        recording = active_ids()
        if recording is not None and not recording.draws:
            raise ReplicationRuntimeError(
                "a DataParallel cannot be captured",
                where=_FORWARD,
                fix="put the module in it, `.module`, in its place, capture one replica's share, then "
                "graphir.passes.replicate",
            )
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise ReplicationRuntimeError(
                    f"module must have its parameters and buffers on device {self.src_device_obj} (device_ids[0]) but "
                    f"found one of them on device: {tensor.device}",
                    where=f"{_FORWARD}, {self._named(tensor)}",
                    fix=f"module.to({str(self.src_device_obj)!r})",
                )

    def _named(self, wanted: torch.Tensor) -> str:
        tensors = chain(self.module.named_parameters(), self.module.named_buffers())
        return next((name for name, tensor in tensors if tensor is wanted), "")


def _without_rows(error: TypeError, replica: int) -> TypeError:
    """The *error* of a *replica* that has no rows, which says how to leave it out."""
    fix = f"replica {replica} has no rows of this batch: DataParallel(..., idle='skip') does not call it"
    return TypeError(f"{error}\n  fix  {fix}")


class _Call(DataParallel):
    """One call's, which leaves the module where it is. There is no second call, which plans would be for."""

    _moves = False

    def _fast_path(self) -> None:
        return None


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[DeviceId] | None = None,
    output_device: DeviceId | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    binding: Binding = "auto",
    idle: Literal["call", "skip"] = "call",
    shares: Sequence[int] | None = None,
) -> Any:
    """Call a module once as :class:`DataParallel` does; ``torch.nn.parallel.data_parallel``'s signature.

    Args:
        module: as of :class:`DataParallel`, like the other arguments.
        inputs: a tuple of positional arguments, or the only one; None: there are none.
        device_ids: the devices.
        output_device: where outputs are gathered.
        dim: along which tensors are split and put together.
        module_kwargs: keyword arguments of the module.
        binding: the real device of each id.
        idle: whether replicas without rows are called.
        shares: of the rows, for each device.

    Raises:
        ReplicationError: as :class:`DataParallel`.
    """
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    call = _Call(module, device_ids, output_device, dim, binding=binding, idle=idle, shares=shares)
    return call.forward(*inputs, **dict(module_kwargs or {}))
