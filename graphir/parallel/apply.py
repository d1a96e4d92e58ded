"""Replicas called at the same time, each in a thread of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper

from .devices import DeviceId, device_id, places_of_ids
from .errors import ReplicationAssertionError
from .generators import ForwardSeed, ReplicaDraws, replicas_followed
from .rounds import Desertion, Round
from .settings import ThreadSettings

__all__ = ["apply_replicas", "parallel_apply"]


def parallel_apply(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any]] | None = None,
    devices: Sequence[DeviceId] | None = None,
) -> list[Any]:
    """Call each module with its arguments, all at the same time; ``torch.nn.parallel.parallel_apply``'s signature.

    The modules are replicas of one: modules such as :class:`SynchronizedBatchNorm1d` meet their copies, and each draws
    random numbers from a generator of its own.

    Args:
        modules: the replicas.
        inputs: the positional arguments of each, or its only one.
        kwargs_tup: the keyword arguments of each.
        devices: that of each; logical devices on the host where there is no GPU.

    Returns:
        What each returned, in order.

    Raises:
        ReplicationAssertionError: the lists differ in length.
        Exception: of the first module that failed, with its number and its device.
    """
    if devices is None:
        devices = list(range(len(modules)))
    ids = [device_id(device, "devices") for device in devices]
    places = places_of_ids(ids, ids[0], "auto") if ids else {}
    kwargs = [{}] * len(modules) if kwargs_tup is None else kwargs_tup
    return apply_replicas(modules, inputs, kwargs, ids, [places[device] for device in ids])


def apply_replicas(
    modules: Sequence[Any],
    inputs: Sequence[Any],
    kwargs: Sequence[Mapping[str, Any]],
    ids: Sequence[int],
    places: Sequence[torch.device],
) -> list[Any]:
    """:func:`parallel_apply` on these devices, of these numbers.

    A single replica is called in the calling thread.
    """
    for name, given in (("inputs", inputs), ("kwargs", kwargs), ("devices", places)):
        if len(given) != len(modules):
            raise ReplicationAssertionError(
                f"there are {len(modules)} modules and {len(given)} {name}",
                where="parallel_apply",
                fix="give one of each for each module",
            )
    round, seed = Round(len(modules)), ForwardSeed()
    calls = [
        _Call(replica, *of_it, round, seed)
        for replica, of_it in enumerate(zip(modules, inputs, kwargs, ids, places, strict=True))
    ]
    with replicas_followed():
        if len(calls) == 1:
            outcomes = [calls[0].outcome()]
        else:
            outcomes = _in_threads(calls, round, ThreadSettings({"cpu", *(place.type for place in places)}))
    _raise_failure(outcomes)
    return [outcome.output for outcome in outcomes]


class _Outcome(NamedTuple):
    output: Any
    failure: BaseException | None = None
    told: ExceptionWrapper | None = None


class _Call(NamedTuple):
    """One replica's call."""

    replica: int
    module: Any
    args: Any
    kwargs: Mapping[str, Any]
    id: int
    place: torch.device
    round: Round
    seed: ForwardSeed

    def outcome(self, settings: ThreadSettings | None = None) -> _Outcome:
        """What it returns or raises; in a new thread, with the *settings* of the one that it works for."""
        try:
            with self.round.attend(self.replica, self.module):
                return _Outcome(self._output() if settings is None else settings.call(self._output))
        except BaseException as e:
            where = f"in replica {self.replica} on device gpu:{self.id} ({self.place})"
            return _Outcome(None, e, ExceptionWrapper(sys.exc_info(), where=where))

    def _output(self) -> Any:
        args = self.args if isinstance(self.args, (list, tuple)) else (self.args,)
        with ReplicaDraws(self.seed, self.replica), _on(self.place):
            return self.module(*args, **self.kwargs)


def _in_threads(calls: Sequence[_Call], round: Round, settings: ThreadSettings) -> list[_Outcome]:
    outcomes: dict[int, _Outcome] = {}

    def work(call: _Call) -> None:
        outcomes[call.replica] = call.outcome(settings)

    threads = [
        threading.Thread(target=work, args=(call,), name=f"graphir replica {call.replica}", daemon=True)
        for call in calls
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C, or no more threads
        round.leave()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        raise
    return [outcomes[call.replica] for call in calls]


def _raise_failure(outcomes: Sequence[_Outcome]) -> None:
    """Raise the first replica's failure, before that of one which only waited for it."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    failed.sort(key=lambda outcome: isinstance(outcome.failure, Desertion))
    for outcome in failed:
        assert outcome.told is not None
        try:
            outcome.told.reraise()
        except BaseException as e:
            raise e from outcome.failure


def _on(place: torch.device) -> AbstractContextManager[Any]:
    if place.type != "cuda":
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(place))
    stack.enter_context(torch.cuda.stream(torch.cuda.current_stream(place)))
    return stack
