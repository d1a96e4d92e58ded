"""The fast path of data parallelism: one node of autograd over two plans.

::

    x ──▶ shares ──▶ forward plan ──▶ outputs, gathered along the batch
                           │ saved values, of each call its own
    gradients of x  ◀── backward plan ◀── shares of the outputs' gradients
    sums of the parameters' gradients ◀──┘

The plans run on the module's own parameters and buffers. They are captured at the first call of a kind, and kept as
long as the module is what it was. Whatever they cannot stand for is left to eager replicas.

``calls`` reads a call, ``module_guard`` watches the module, ``lent_state`` lends its tensors to plans; ``plans`` has
what runs forward and ``backward`` the node.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

import torch

from graphir.runtime.machine.places import Binding
from graphir.runtime.machine.surroundings import follow_forks

from ..errors import CoverageError, EagerWarning, GraphirError, RunError, SessionError, warn
from ..replication import OWN_CALLBACK
from .calls import Call, TooFewRows, Unfit, read_call
from .devices import places_of_ids
from .module_guard import ModuleGuard
from .plans import Plans, Replicas

__all__ = ["CompiledReplicas"]

_MOST_KINDS: Final = 8
"""How many kinds of calls have plans; those not used for longest make room."""

_CAPTURES: Final = 8
"""How many captures are made before plans have run any call."""

_CALLS: Final = 64
"""How many calls plans run for each capture after these: it takes about as long as they save."""

_TWICE: Final = 4
"""How many backwards of one kind, one after the other, may run the replicas once more."""

_OTHER_KINDS: Final = "calls are of other kinds again and again, by shapes, numbers among the arguments, or modes"
_OTHER_MODULE: Final = "the module's attributes, parameters or buffers are other ones again and again"
_OTHER_OUTPUTS: Final = "gradients come for other outputs again and again"
_RUN_TWICE: Final = "its backward runs them once more each time, for gradients of gradients or for other outputs"


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
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int],
        output_device: int | torch.device | None = None,
        dim: int = 0,
        binding: Binding = "auto",
    ) -> None:
        output = device_ids[0] if output_device is None else output_device
        if not isinstance(output, torch.device):
            output = places_of_ids(device_ids, output, binding)[output]
        self._replicas = Replicas(module, tuple(device_ids), dim, binding, output)
        self._reset()

    def _reset(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._told: set[str] = set()
        self._captures = _Captures()
        self._watch()
        self._lock = threading.RLock()
        follow_forks()

    def _watch(self) -> None:
        """Note the modules and parameters whose modes tell kinds of calls apart."""
        module = self._replicas.module
        self._modules, self._params = list(module.modules()), list(module.parameters())

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
            sizes: the rows of each replica; by default as ``torch.chunk`` cuts the batch.

        Warns:
            EagerWarning: says why they have to, once for each reason.

        A call that fails is left to eager replicas, too, which raise PyTorch's own error. A backward that fails raises
        a :class:`graphir.RunError`.
        """
        try:
            with self._lock:
                call = self._read(tuple(args), dict(kwargs or {}), sizes)
                try:
                    output = self._plans(call)(call)
                except CoverageError:
                    call = call.of_this_size()
                    output = self._plans(call)(call)
                self._captures.calls += 1
                return output
        except (TooFewRows, RunError):  # what has failed is to fail in a replica, whose error says where
            return None
        except (Unfit, SessionError) as e:
            self._tell(str(e).partition("\n")[0])
            return None

    def _read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: tuple[int, ...] | None) -> Call:
        place = self._params[0].device if self._params else torch.device("cpu")
        modes = tuple([m.training for m in self._modules]), tuple([p.requires_grad for p in self._params])
        return read_call(args, kwargs, self._replicas.dim, len(self._replicas.devices), place, modes, sizes)

    def _plans(self, call: Call) -> Plans:
        """The plans for such a call, captured if need be.

        Raises:
            Unfit: there are none.
        """
        kind = self._kinds.pop(call.kind, None)
        if kind is None:
            self._captures.require(_OTHER_KINDS)
            kind = _Kind(self._captures)
        self._kinds[call.kind] = kind
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if kind.guard is None or not kind.guard.holds():
            self._watch()
            kind.start(self._replicas.module)
        return kind.plans(self._replicas, call)

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            name = type(self._replicas.module).__name__
            warn(f"the replicas of {name} run eagerly: {why}", EagerWarning)


class _Captures:
    """How many captures were made, and how many calls plans have run: those pay for these.

    A capture takes as long as many calls. Where most calls need another one, eager replicas are faster.
    """

    def __init__(self) -> None:
        self.made = self.calls = 0

    def require(self, why: str) -> None:
        """Raise Unfit, which says *why* a capture is needed, where it is not paid for."""
        if self.made >= _CAPTURES + self.calls // _CALLS:
            raise Unfit(why)


class _Kind:
    """Calls of one kind, their plans, and the module that these were captured from.

    Attributes:
        guard: of that module.
        found: the plans by the positions of the outputs whose gradients they take, or why there are none.
        wanted: the positions of the outputs for which gradients came last; None: all that need one.
        needing: those that need one, once that is known.
    """

    def __init__(self, captures: _Captures) -> None:
        self.guard: ModuleGuard | None = None
        self.found: dict[tuple[int, ...] | None, Plans | str] = {}
        self.wanted: tuple[int, ...] | None = None
        self.needing: tuple[int, ...] | None = None
        self._captures = captures
        self._twice = 0  # backwards, one after the other, for which replicas ran once more

    def plans(self, replicas: Replicas, call: Call) -> Plans:
        assert self.guard is not None
        if self.guard.hooked():
            raise Unfit("a module has hooks, which are called once for each replica")
        if self._twice > _TWICE:
            raise Unfit(_RUN_TWICE)
        found = self.found.get(self.wanted)
        if found is None:
            self._captures.require(_OTHER_OUTPUTS if self.wanted is not None else _OTHER_MODULE)
            found = self.found[self.wanted] = self._made(replicas, call)
            self.guard = ModuleGuard(replicas.module)  # the step may have set it up
        if isinstance(found, str):
            raise Unfit(found)
        return found

    def start(self, module: torch.nn.Module) -> None:
        """Begin with the module as it is now."""
        if any(map(torch.nn.parameter.is_lazy, (*module.parameters(), *module.buffers()))):
            raise Unfit("a parameter or buffer has no shape yet")
        if self.found:
            self._captures.require(_OTHER_MODULE)
        self.guard = ModuleGuard(module)
        self.found.clear()
        self.wanted = self.needing = None
        self._twice = 0

    def _made(self, replicas: Replicas, call: Call) -> Plans | str:
        module = replicas.module
        if any(hasattr(inner, OWN_CALLBACK) for inner in module.modules()):
            return "a module has a callback, which is called for each replica"
        if any(buffer.requires_grad for buffer in module.buffers()):
            return "a buffer needs a gradient"
        self._captures.made += 1
        try:
            plans = Plans(replicas, call, self.wanted, self.needing, self._tell)
        except GraphirError as e:
            return f"it cannot be captured: {e.what}"
        if self.wanted is None:
            self.needing = plans.positions
        return plans

    def _tell(self, positions: tuple[int, ...], twice: bool) -> None:
        self.wanted = None if positions == self.needing else positions
        self._twice = self._twice + 1 if twice else 0
