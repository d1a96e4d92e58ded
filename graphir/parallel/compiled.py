"""The fast path of data parallelism: one node of autograd over two plans.

::

    x ──▶ shares ──▶ forward plan ──▶ outputs, gathered along the batch
                           │ saved values, of each call its own
    gradients of x  ◀── backward plan ◀── shares of the outputs' gradients
    sums of the parameters' gradients ◀──┘

The plans run on the module's own parameters and buffers. They are captured at the first call of a kind, and kept for
calls of that kind while the module is what it was: :mod:`graphir.facade.plan_cache`. Whatever they cannot stand for is
left to eager replicas.

``calls`` reads a call, ``lent_state`` lends the module's tensors to plans; ``plans`` has what runs forward and
``backward`` the node.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from graphir.runtime.machine.places import Binding
from graphir.runtime.machine.surroundings import follow_forks

from ..errors import CoverageError, EagerWarning, GraphirError, RecaptureWarning, RunError, SessionError, warn
from ..facade.plan_cache import ModuleGuard, PlanCache, told
from ..facade.plan_cache.captures import Captures, Unfit
from ..replication import OWN_CALLBACK
from .calls import ReplicatedCall, TooFewRows, read_call
from .devices import places_of_ids
from .plans import Plans, Replicas

__all__ = ["CompiledReplicas", "lock_of"]

_MOST_KINDS: Final = 8
"""How many kinds of calls have plans; those not used for longest make room."""

_TWICE: Final = 4
"""How many backwards of one kind, one after the other, may run the replicas once more."""

_OTHER_KINDS: Final = "calls are of other kinds again and again, by shapes, numbers among the arguments, or modes"
_OTHER_OUTPUTS: Final = "gradients come for other outputs again and again"
_RUN_TWICE: Final = "its backward runs them once more each time, for gradients of gradients or for other outputs"


_locks: Final[WeakKeyDictionary[torch.nn.Module, Any]] = WeakKeyDictionary()


def lock_of(module: torch.nn.Module) -> Any:
    """The lock that is held while a module is captured or its plans run, and while it is copied for eager replicas.

    What a capture has not put back yet would be in the copies.
    """
    return _locks.setdefault(module, threading.RLock())


class CompiledReplicas:
    """Calls a module's replicas through plans, where plans can stand for them.

    A call draws one number (``torch.randint(2**62, ())``) from torch's generator if the module draws any. Its masks
    are made of that number, the replica and the operator, as those of :func:`graphir.seeded` with that number as the
    step: after ``torch.manual_seed`` two runs give equal bits.

    Args:
        module: whose parameters and buffers are read, and written, where they are.
        device_ids: of the replicas, at least two: numbers of logical devices.
        output_device: where outputs go: the number of a logical device, a real device, or -1 for the CPU; by default
            the first replica's.
        dim: along which inputs are split and outputs gathered.
        binding: the real device of each logical one, as :class:`graphir.runtime.Session` takes it.
        allow_changes: attributes whose changes make no difference, as :func:`graphir.capture` takes them.
        shares: of the batch, by replica; empty where all are equal.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int],
        output_device: int | torch.device | None = None,
        dim: int = 0,
        binding: Binding = "auto",
        allow_changes: Iterable[str] = (),
        shares: tuple[int, ...] = (),
    ) -> None:
        output = device_ids[0] if output_device is None else output_device
        if not isinstance(output, torch.device):
            output = places_of_ids(device_ids, output, binding)[output]
        shares = shares or (1,) * len(device_ids)
        self._replicas = Replicas(module, tuple(device_ids), dim, binding, output, shares, tuple(allow_changes))
        self._reset()

    def _reset(self) -> None:
        module, allowed = self._replicas.module, self._replicas.allow_changes
        self._cache: PlanCache[_Kind] = PlanCache({"": module}, _MOST_KINDS, allowed, in_place=True)
        self._told: set[str] = set()
        self._captures = Captures()
        self._lock = lock_of(module)
        follow_forks()

    def __getstate__(self) -> dict[str, Any]:
        return {"_replicas": self._replicas}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """The module's output for these arguments, gathered; None where eager replicas have to run.

        Args:
            args: positional ones, of the whole batch.
            kwargs: keyword arguments.
            sizes: the rows of each replica; by default by the shares.

        Warns:
            EagerWarning: says why they have to, once for each reason.

        A call that fails is left to eager replicas, too, which raise PyTorch's own error. A backward that fails raises
        a :class:`graphir.RunError`.
        """
        try:
            with self._lock:
                guard = self._cache.look()
                call = self._read(guard, tuple(args), dict(kwargs or {}), sizes)
                try:
                    output = self._plans(guard, call)(call)
                except CoverageError:
                    call = call.of_this_size()
                    output = self._plans(guard, call)(call)
                self._captures.calls += 1
                return output
        except (TooFewRows, RunError):  # what has failed is to fail in a replica, whose error says where
            return None
        except (Unfit, SessionError) as e:
            self._tell(str(e).partition("\n")[0])
            return None

    def _read(
        self, guard: ModuleGuard, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: tuple[int, ...] | None
    ) -> ReplicatedCall:
        modes = tuple([module.training for module in guard.modules])
        param = next(self._replicas.module.parameters(), None)
        place = torch.device("cpu") if param is None else param.device
        return read_call(args, kwargs, self._replicas.dim, self._replicas.shares, place, modes, sizes)

    def _plans(self, guard: ModuleGuard, call: ReplicatedCall) -> Plans:
        """The plans for such a call of the module that *guard* holds of, captured if need be.

        Raises:
            Unfit: there are none.
        """
        if guard.hooked():
            raise Unfit("a module has hooks, which are called once for each replica")
        for kind in self._cache.found(guard, call.kind):
            self._cache.used(kind)
            return kind.plans(guard, call)
        changes = () if self._cache.holds_plans_of(guard) else guard.changes
        why = f"the module's {changes[0].attribute!r} has changed again and again" if changes else _OTHER_KINDS
        self._captures.require(why)
        module = self._replicas.module
        if any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
            raise Unfit("a parameter or buffer has no shape yet")
        kind = _Kind(self._replicas, self._captures, self._cache)
        self._cache.keep(guard, kind, call.kind)
        plans = kind.plans(guard, call)
        if changes:
            self._cache.drop_other_tensors(guard)
            warn(f"the replicas of {self._name()} were captured anew: {told(changes)}", RecaptureWarning)
        return plans

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            warn(f"the replicas of {self._name()} run eagerly: {why}", EagerWarning)

    def _name(self) -> str:
        return type(self._replicas.module).__name__


class _Kind:
    """Calls of one kind of a module, and their plans.

    Args:
        replicas: what is replicated.
        captures: which pay for these.
        cache: that the kind is in.

    Attributes:
        found: the plans by the positions of the outputs whose gradients they take, or why there are none.
        wanted: the positions of the outputs for which gradients came last; None: all that need one.
        needing: those that need one, once that is known.
    """

    def __init__(self, replicas: Replicas, captures: Captures, cache: PlanCache[_Kind]) -> None:
        self.found: dict[tuple[int, ...] | None, Plans | str] = {}
        self.wanted: tuple[int, ...] | None = None
        self.needing: tuple[int, ...] | None = None
        self._replicas, self._captures, self._cache = replicas, captures, cache
        self._twice = 0  # backwards, one after the other, for which replicas ran once more

    def plans(self, guard: ModuleGuard, call: ReplicatedCall) -> Plans:
        """The plans for a call; for the outputs that gradients came for last."""
        if self._twice > _TWICE:
            raise Unfit(_RUN_TWICE)
        found = self.found.get(self.wanted)
        if found is None:
            if self.wanted is not None:
                self._captures.require(_OTHER_OUTPUTS)
            found = self.found[self.wanted] = self._made(guard, call)
        if isinstance(found, str):
            raise Unfit(found)
        return found

    def _made(self, guard: ModuleGuard, call: ReplicatedCall) -> Plans | str:
        module = self._replicas.module
        if any(hasattr(inner, OWN_CALLBACK) for inner in module.modules()):
            return "a module has a callback, which is called for each replica"
        if any(buffer.requires_grad for buffer in module.buffers()):
            return "a buffer needs a gradient"
        self._captures.made += 1
        try:
            plans = Plans(self._replicas, call, self.wanted, self.needing, guard, self._tell)
        except GraphirError as e:
            return f"it cannot be captured: {e.what}"
        self._cache.leave_out(guard, plans.changed)
        if self.wanted is None:
            self.needing = plans.positions
        return plans

    def _tell(self, positions: tuple[int, ...], twice: bool) -> None:
        self.wanted = None if positions == self.needing else positions
        self._twice = self._twice + 1 if twice else 0
