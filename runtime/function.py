"""A plan as a function of tensors, over state that others hold."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from graphir.errors import SessionError
from graphir.ir.blob import STATE_ROLES, Blob, bound_layout, same_strides
from graphir.ir.plan import Plan
from graphir.ir.size import Dims
from graphir.ir.symbols import to_torch

from .executor import Setting
from .executors.choice import choose
from .machine.places import Binding, generator_on, places_of
from .machine.surroundings import FORKS, follow_forks
from .options import ExecutorName, Options
from .proof.admission import admit

__all__ = ["Function"]

_DROPS: Final = ("serial", "threads", "cuda")
"""The executors that drop inputs where the plan frees them."""


class Function:
    """Runs a plan on tensors that it is handed, and hands back the external outputs, as they are.

    A session owns its state, splits a batch, and gathers results. A function does none of that: its parameters and
    buffers are tensors of its caller, which may change between calls and which calls overwrite where the plan does.
    Replicas on one device may share a tensor that no operator overwrites.

    Args:
        plan: verified, and checked, before anything else.
        state: the tensor of each parameter, buffer and constant of the plan's step, by the blob's full name, on the
            device to which the blob's is bound, laid out as the blob. They are kept, not copied.
        binding, executor, threads, deadline: as :class:`.session.Session` takes them.
        consumed: inputs that a call takes out of the list which it is given, and drops where the plan frees them, so
            that their memory is free then unless others hold it. The reference executor drops them at the end.

    Attributes:
        inputs: the blobs that a call is given, in order.
        outputs: the blobs that it returns, in order.
        executor: the name of the one that runs it.

    Raises:
        VerifyError, PlanError: as a session.
        SessionError: a tensor of the state is missing or does not fit; an unknown binding or executor.
    """

    def __init__(
        self,
        plan: Plan,
        state: Mapping[str, Tensor],
        binding: Binding = "auto",
        executor: ExecutorName = "auto",
        threads: int | None = None,
        deadline: float | None = 600.0,
        consumed: Collection[str] = (),
    ) -> None:
        options = Options(executor, threads, None, deadline, "ordered", False, False, None)
        options.check()
        admit(plan)
        places = places_of(binding, plan.devices, host_only=options.host_only)
        options.check_places(places)
        step = plan.program.step
        held = [name for name in step.external_inputs if step.blobs[name].role in STATE_ROLES]
        for name in held:
            _check(step.blobs[name], state.get(name), places.get(step.blobs[name].device, torch.device("cpu")), plan)
        self.plan, self.places = plan, places
        self.inputs = tuple([name for name in step.external_inputs if step.blobs[name].role not in STATE_ROLES])
        self.outputs = step.external_outputs
        generators = {device: generator_on(place) for device, place in places.items()}
        choice = choose(plan, executor, places, threads or torch.get_num_threads())
        self.executor = choice.executor
        dropped = frozenset(consumed) if choice.executor in _DROPS else frozenset[str]()
        self._consumed = [(i, name in dropped) for i, name in enumerate(self.inputs) if name in consumed]
        setting = Setting(
            plan,
            {name: state[name] for name in held},
            self.inputs,
            places,
            generators,
            deadline,
            lasting=True,
            consumed=dropped,
        )
        self._executor = options.make(setting, choice)
        self._running = threading.Lock()
        follow_forks()
        self._forks = FORKS[0]

    def __call__(self, dims: Dims, inputs: Sequence[Tensor], step: int = 0) -> Sequence[Tensor]:
        """One call; one from another thread is waited for.

        Args:
            dims: the value of each dimension of the plan.
            inputs: in the order of :attr:`inputs`, laid out as their blobs; they are not checked. Of inputs that are
                consumed, a list has None afterwards.
            step: what the seeds of random operators are mixed of, beside the replica and the seed id.

        Returns:
            The external outputs, in order: ordinary tensors that need no gradient.

        Raises:
            RunError: an operator failed.
            SessionError: the process was forked since.
        """
        if self._forks != FORKS[0]:
            raise SessionError(
                "the function was made before this process was forked, and its threads are not in it",
                where=f"plan {self.plan.name!r}",
                fix="make it in the process that runs it",
            )
        given: list[Any] = [*inputs]
        for i, boxed in self._consumed:
            given[i] = [given[i]] if boxed else given[i]
            inputs[i] = None  # type: ignore[index]
        with self._running:
            return self._executor.run(dims, given, step)

    def close(self) -> None:
        """End its threads; they also end when nobody holds the function any more."""
        with self._running:
            self._executor.close()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a function has threads of its own, and cannot be copied or pickled",
            where=f"plan {self.plan.name!r}",
            fix="copy the plan, and make a Function of it",
        )

    def __repr__(self) -> str:
        return f"<function of plan {self.plan.name!r}: executor {self.executor}>"


def _check(blob: Blob, tensor: Tensor | None, place: torch.device, plan: Plan) -> None:
    """Raise a SessionError where the tensor is not what the blob says."""
    where = f"plan {plan.name!r}"
    if tensor is None:
        raise SessionError(
            f"the state has no {blob.name!r}", where=where, fix="give a tensor for each blob of the plan's state"
        )
    if blob.shape is None or blob.dtype is None:
        return
    (shape, strides), dtype = bound_layout(blob, {}), to_torch(blob.dtype)
    laid_out = tuple(tensor.shape) == shape and same_strides(shape, tensor.stride(), strides)
    if not laid_out or tensor.dtype != dtype or tensor.device != place:
        raise SessionError(
            f"{blob.name!r} in the state is {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} "
            f"on {tensor.device}, the plan takes {dtype} {list(shape)} with strides {list(strides)} on {place}",
            where=where,
            fix="give a tensor that fits",
        )
