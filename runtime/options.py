"""The options of a session, and the executor that they ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import torch

from graphir.errors import SessionError
from graphir.ir.device import Device

from .cuda.executor import Collectives, Cuda
from .cuda.graphs import CudaGraphs
from .executor import Setting
from .executors.adversarial import Adversarial
from .executors.choice import GONE, HOST_ONLY, Choice
from .executors.reference import Reference
from .executors.serial import Serial
from .executors.threads import Threads
from .memory_limit import Most, most_of
from .observing.probes import Observable

__all__ = ["ExecutorName", "Options", "is_of_host"]

ExecutorName: TypeAlias = Literal["auto", "reference", "serial", "threads", "cuda", "adversarial"]

_KINDS: Final[Mapping[str, Callable[[Setting, int | None], Observable]]] = {
    "reference": Reference,
    "serial": Serial,
    "threads": Threads,
}
_MOST_THREADS: Final = 4096


def is_of_host(executor: str) -> bool:
    """Whether an executor is one of the host's, whatever other devices there are."""
    return executor in (*HOST_ONLY, "adversarial")


class Options(NamedTuple):
    """What a session was asked for; see :class:`.session.Session`."""

    executor: ExecutorName
    threads: int | None
    seed: int | None
    deadline: float | None
    collectives: Collectives
    cuda_graph: bool
    keep_heap: bool
    memory_limit: Most

    @property
    def host_only(self) -> bool:
        """Whether the executor is one of the host's, whatever other devices there are."""
        return is_of_host(self.executor)

    def check(self) -> None:
        """Refuse what would not do for any plan.

        Raises:
            SessionError: says which option.
        """
        _choose("executor", self.executor, get_args(ExecutorName))
        _choose("collectives", self.collectives, get_args(Collectives))
        threads, seed, deadline = self.threads, self.seed, self.deadline
        if threads is not None and (type(threads) is not int or not 1 <= threads <= _MOST_THREADS):
            raise SessionError(
                f"threads={threads!r}: a kernel needs at least one thread",
                fix=f"give a whole number from 1 to {_MOST_THREADS}, or None",
            )
        if seed is not None and (self.executor != "adversarial" or type(seed) is not int):
            raise SessionError(
                f"seed={seed!r}: a whole number, for the adversarial executor only",
                where="Session(...)",
                fix="leave it out, or use executor='adversarial'",
            )
        most_of(self.memory_limit)
        for name, value in (("cuda_graph", self.cuda_graph), ("keep_heap", self.keep_heap)):
            if type(value) is not bool:
                raise SessionError(f"{name}={value!r}: it is on or off", where="Session(...)", fix="give True or False")
        if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
            raise SessionError(
                f"deadline={deadline!r}: seconds, more than 0", fix="give a number, or None for no limit"
            )

    def check_places(self, places: Mapping[Device, torch.device]) -> None:
        """Refuse what these real devices cannot do.

        Raises:
            SessionError: says which option.
        """
        executor = self.executor
        if executor in HOST_ONLY and any(place.type != "cpu" for place in places.values()):
            raise SessionError(
                f"the executor {executor!r} runs on the host only", where="Session(...)", fix="use executor='reference'"
            )
        on_cuda = any(place.type == "cuda" for place in places.values())
        if executor == "cuda" and not on_cuda:
            raise SessionError(
                "the executor 'cuda' runs where a device is bound to CUDA",
                where="Session(...)",
                fix="use binding='cuda', or a dict such as {'gpu:0': 'cuda:0'}",
            )
        if self.collectives == "native" and not (on_cuda and executor in ("auto", "cuda")):
            raise SessionError(
                "collectives='native' are NCCL's, of the executor 'cuda'",
                where="Session(...)",
                fix="leave it out, or use binding='cuda'",
            )
        if self.cuda_graph and not (on_cuda and executor in ("auto", "cuda") and self.collectives == "ordered"):
            raise SessionError(
                "cuda_graph=True is for the executor 'cuda', with ordered collectives",
                where="Session(...)",
                fix="leave it out, or bind all devices to one GPU",
            )

    def make(self, setting: Setting, choice: Choice) -> Observable:
        """The executor that was chosen."""
        if choice.executor == "adversarial":
            return Adversarial(setting, self.threads, self.seed or 0)
        if choice.executor == "cuda":
            if self.cuda_graph:
                return CudaGraphs(setting, self.threads)
            return Cuda(setting, self.threads, self.collectives)
        return _KINDS[choice.executor](setting, self.threads)


def _choose(what: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        fix = GONE.get(str(value), f"supported: {', '.join(known)}")
        raise SessionError(f"{what} {value!r} is not supported", where="Session(...)", fix=fix)
