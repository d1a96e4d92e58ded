"""The whole way in one call: a module's step captured, replicated, placed, emitted, and run at the sizes that come.

::

    step(x, y) ──▶ the model is what sessions were made of? ──no──▶ what has changed? ─┐
                            │ yes                                                     │
                            ▼                                                         │
                   these sessions, the last used first ──covered──▶ its step          │
                            │ covered by none                                         │
                            ▼                                                         │
                   capture with (x, y) ◀──────────────────────────────────────────────┘
                            │ passes, emit
                            ▼
                   a session beside the others, on the same state

:mod:`.plan_cache` holds the sessions, and says what of a model counts.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn

import torch

from graphir.passes import Balanced, Pipeline, Replicate, emit, inject_copies, replicate
from graphir.passes.base import build
from graphir.passes.following import follow
from graphir.runtime import Report, Session
from graphir.runtime.loop import run_loader
from graphir.runtime.machine.places import Binding, is_on_cuda
from graphir.runtime.options import is_of_host

from ..analysis.alone import alone
from ..analysis.topology import Topology
from ..capturing.capture import capture
from ..capturing.intake.arguments import Arguments, read_arguments
from ..capturing.intake.found import StepFunction, Together, read_function
from ..capturing.intake.options import refuse_model
from ..capturing.isolate.modes import Modes
from ..capturing.witness import StepWitness
from ..errors import (
    CaptureError,
    CoverageError,
    PassError,
    PlacementError,
    RecaptureWarning,
    SessionError,
    counted,
    nearest,
    warn,
)
from ..ir.device import DeviceName
from ..ir.plan import Plan
from ..ir.program import GRADIENT, Gathered, Program
from ..ir.tensor import same_bits
from .behind import Behind
from .placing import Placing
from .plan_cache import AROUND, ModuleGuard, PlanCache, told

__all__ = ["Compiled", "compile"]

_OURS: Final = ("plan", "state", "beside", "witness", "limits", "lent", "optimizer")
_OPTIONS: Final = tuple([name for name in inspect.signature(Session).parameters if name not in _OURS])
"""Arguments of a session that are for its user to choose."""


_CALLED: Final = {"loss function": "loss", "output function": "output"}
"""What else than the model a step calls: its name in messages, and the option of capture."""


class Compiled:
    """A step, captured, replicated, sent through *passes*, and used like a :class:`graphir.runtime.Session`.

    Steps of other sizes use the same plan where the program's sizes follow them; small batches take fewer replicas, as
    in a session, and so do those that fixed sizes can't share equally. Where they are fixed, a plan would hold more
    than *limits* at them, an argument that is no tensor or an option of the optimizer has changed, or the model has,
    the step is captured anew with these arguments: the model in the mode that it was in at first, on the present
    parameters, buffers, optimizer state and number of steps, which all plans share. The numbers of optimizers that
    schedulers move, such as learning rates, are read before each step. Each such capture is told by a
    :class:`graphir.RecaptureWarning`. After eight captures for one attribute of the model a step is refused. Of a
    function, the cells, globals and defaults that it names, and that users' functions which it calls name, count as
    attributes of the model do.

    Args:
        step: a module, or a function that is the whole step, as :func:`graphir.capture` takes them.
        inputs: its positional arguments for a whole batch, as ``step`` is given them; each replica has its share. None:
            the first step is captured with what it is given, so that ``@graphir.compile`` stands above a function.
        kwargs: its keyword arguments.
        targets: what the loss is given after the model's output.
        batch_dims: as :func:`graphir.capture` takes it: dimensions that are named here need no plans of their own.
        devices: one replica on each, as :func:`graphir.passes.replicate` takes them.
        shares: the ratio of the replicas' rows, as :func:`graphir.passes.replicate` takes them, or ``auto`` for what
            :func:`graphir.passes.balance` chooses within *limits*, by speed and memory, for the first plan; later ones
            keep it. Equal by default.
        gather: what results are over the replicas, as :func:`graphir.passes.replicate` takes it.
        limits: by device, the most that a plan may hold there, as ``{"gpu:0": "3.3 GiB", "gpu:1": "3.3 GiB"}``, or
            ``auto`` for what is free, which is printed to standard error: what :func:`graphir.passes.balance` chooses.
            Later captures keep modules where they are. With ``accumulate=4``, or another number, micro-batches flow
            through the devices: :func:`graphir.passes.pipeline` orders them within the limits.
        topology: the machine for which *limits* choose, as :func:`graphir.passes.balance` takes it; by default this
            one, with devices bound as *session* binds them.
        passes: a pipeline's text, such as ``"share_storage"``, or a function from program to program. It gets the
            replicated program, within *limits* if there are any. Copies that are missing after it are put in.
        most_plans: how many plans are kept; the one that was not used for longest makes room.
        session: arguments of :class:`graphir.runtime.Session` for every plan's, such as ``{"executor": "reference"}``,
            ``{"check_finite": True}`` or ``{"steps_done": 1000}``.
        state: what to go on from, as :meth:`state` gives it, with the number of steps done; by default the model's and
            the optimizer's, and no step done.
        beside: a compiled step of the same modules, whose state and optimizers this one shares: a step of either is a
            step of both. Gradients that one leaves and the other adds to, reads or updates by last from step to step:
            micro-batches may be steps of one function, and the update a step of another. *devices*, *shares*, *limits*,
            *topology* and *session* are those of the other one.
        witness: whether the step is recorded once more before the first step at sizes that were not recorded, and
            captured anew where it is not the plan's there.
        options: what else :func:`graphir.capture` takes: ``loss``, ``optimizer``, …. Attributes in *allow_changes* may
            change without a capture. *target* is ``"cuda"`` where the session's binding has CUDA devices.

    Raises:
        CaptureError: the step can't be captured.
        PassError: *devices*, *shares*, *limits* or *passes* do not fit the program.
        SessionError: *state* is not that of such a model, or an argument of the session does not fit.
    """

    def __init__(
        self,
        step: torch.nn.Module | Callable[..., Any],
        inputs: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        targets: Sequence[Any] = (),
        batch_dims: Any = None,
        devices: Sequence[DeviceName] = (0,),
        shares: Sequence[int] | Literal["auto"] | None = None,
        gather: Mapping[str, Gathered] | None = None,
        limits: Mapping[DeviceName, int | str] | Literal["auto"] | None = None,
        topology: Topology | str | None = None,
        passes: str | Callable[[Program], Program] = "",
        most_plans: int = 8,
        session: Mapping[str, Any] | None = None,
        state: Mapping[str, torch.Tensor] | None = None,
        beside: Compiled | None = None,
        witness: bool = True,
        **options: Any,
    ) -> None:
        if type(most_plans) is not int or most_plans < 1:
            raise SessionError(
                f"most_plans={most_plans!r}: there is at least one plan", fix="give a whole number from 1 up"
            )
        _check_options(session)
        if not isinstance(state, Mapping | None):
            raise SessionError(f"state is a {type(state).__name__}, not a mapping", fix="give what state() returned")
        if beside is not None:
            given = {"devices": devices != (0,), "session": session, "state": state, "topology": topology}
            _check_beside(beside, {**given, "shares": shares, "limits": limits})
        self._group: _Group = _Group() if beside is None else beside._group
        self._function: StepFunction | None = None
        model: torch.nn.Module = step  # type: ignore[assignment]  # what is no module is refused
        if not isinstance(step, (torch.nn.Module, type)) and callable(step):
            self._function = read_function(step, options.get("stateful", ()), self._group.program)
            model = self._function.model
        refuse_model(model, "compile")
        self._behind = Behind(model.children() if isinstance(model, Together) else [model])
        weakref.finalize(self, self._behind.end)
        if not isinstance(passes, str) and not callable(passes):
            raise PassError(
                f"passes is a {type(passes).__name__}",
                fix="give a pipeline's text, or a function from program to program",
            )
        self._captures, self._model, self._most_plans = step, model, most_plans
        if shares == "auto" and limits is None:
            raise PassError("shares='auto' is of a placement, and nothing is placed without limits", fix="give limits")
        replicas = build(Replicate, devices=devices, shares=None if shares == "auto" else shares)
        self._devices, self._shares, self._gather = replicas.devices, replicas.shares, gather
        self._passes: Callable[[Program], Program] | None = None
        if passes:
            self._passes = Pipeline(passes) if isinstance(passes, str) else passes
        if limits is None and topology is not None:
            raise PassError("topology is for the placement, and nothing is placed without limits", fix="give limits")
        self._placing: Placing | None = None
        if limits is not None:
            self._placing = Placing(limits, topology, _binding(session or {}), shares == "auto")
        self._options, self._session_options = options, dict(session or {})
        if beside is not None:
            self._devices, self._shares, self._placing = beside._devices, beside._shares, beside._placing
            self._session_options = beside._session_options
        self._seen, self._writes = self._group.grown, False
        self._earlier: list[Session] = []
        self._touched: weakref.WeakKeyDictionary[Session, set[str]] = weakref.WeakKeyDictionary()
        asked = self._session_options
        if is_on_cuda(asked.get("binding", "auto"), is_of_host(asked.get("executor", "auto"))):
            options.setdefault("target", "cuda")
        self._state = dict(state or {})  # what no plan has taken over so far
        self._modes, self._witness = Modes(model), witness
        self._running = threading.Lock()
        self._measuring: contextlib.ExitStack | None = None
        self._results: list[Any] = []
        self._batch_dims, self._count = batch_dims, 0
        called = {name: options[key] for name, key in _CALLED.items() if options.get(key) is not None}
        if not isinstance(options.get("allow_changes", ""), str):
            options["allow_changes"] = tuple(options["allow_changes"])
        if self._function is not None:
            self._function.around.look()
            called = {self._function.name: self._function.call, AROUND: self._function.around.names}
        self._cache: PlanCache[Session] = PlanCache({"": model, **called}, most_plans, options.get("allow_changes", ()))
        self._tensors = _tensors_of(model)
        self._measured: Session | None = None
        if inputs is not None or kwargs is not None or self._function is None:
            inputs = () if inputs is None else inputs
            if self._function is not None and isinstance(inputs, (tuple, list)) and isinstance(kwargs, Mapping | None):
                inputs, kwargs = self._function.bound(inputs, kwargs or {})
            self._begin(inputs, kwargs, targets)

    def _begin(
        self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None = None, targets: Sequence[Any] = ()
    ) -> None:
        """Capture the step for the first time."""
        arguments = self._read(inputs, kwargs, targets, self._batch_dims)
        guard = self._look()
        session = self._made(arguments, self._group.session, guard)
        self._count = arguments.inputs
        if self._batch_dims is None:
            # The same dimensions hold for every later capture, where lengths alone could tell them otherwise.
            self._batch_dims = _dims_tree(arguments)
        self._measured = session
        self._cache.keep(guard, session)

    def _look(self) -> ModuleGuard:
        """The guard that holds of what a capture reads."""
        if self._function is not None:
            self._function.around.look()
        return self._cache.look()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as :meth:`step`."""
        return self.step(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as :meth:`graphir.runtime.Session.step`; captures anew where no plan covers the arguments.

        Raises:
            SessionError: the arguments fit no plan and none could be made for them; one attribute of the model has
                changed too often; the model has other parameters or buffers than the compiled ones; or another thread
                is in a step; nothing has changed. Or the session cannot be used any more.
            CaptureError: the step can't be captured with these arguments; nothing has changed.
            PassError: no placement of the step with these arguments is within the limits; nothing has changed.
            RunError: an operator failed; the model can go on where the error's ``usable`` says so.
        """
        if self._function is not None:
            args, kwargs = self._function.bound(args, kwargs)
        if not self._running.acquire(blocking=False):
            raise SessionError("another thread is in a step of this model", fix="compile it once for each thread")
        try:
            if not (self._cache.plans or self._earlier):
                self._begin(args, kwargs)
            if self._seen != self._group.grown:
                self._drop_behind()
            refusal: CoverageError | None = None
            guard = self._look()
            for session in self._cache.found(guard):
                try:
                    result = session.step(*args, **kwargs)
                except CoverageError as e:
                    refusal = refusal or e
                else:
                    self._cache.used(session)
                    break
            else:
                result = self._step_anew(guard, refusal, args, kwargs)
            if self._writes:
                self._behind.moved_on()
            return result
        finally:
            self._running.release()

    def _step_anew(
        self, guard: ModuleGuard, refusal: CoverageError | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """A step that no plan covers: for the reason *refusal*; without one, since the model is another one."""
        why = "its plan had made room for others"
        if self._earlier:
            why = "a step beside leaves gradients now, which its plan did not begin with"
        elif refusal is not None:
            why = f"{refusal.what} ({refusal.fix})"
        elif guard.changes:
            self._check_tensors()
            self._cache.refuse_another(guard)
            why = told(guard.changes)
        arguments = self._read(args[: self._count], dict(kwargs), args[self._count :], self._batch_dims)
        try:
            session, result = self._stepped(self._made, arguments, guard, args, kwargs)
        except (CaptureError, CoverageError):
            if len(self._devices) == 1:
                raise
            # Its sizes are fixed, and the shares of this batch are not equal; or a share is too small for the model.
            session, result = self._stepped(self._made_alone, arguments, guard, args, kwargs)
        dropped = self._cache.keep(guard, session)
        for old in (*dropped, *self._earlier):
            old.close()
        self._earlier = []
        text = f"the step of {session.plan.name!r} was captured anew: {why}"
        kept = f"; {self._most_plans} plans are kept, the one not used for longest was dropped" if dropped else ""
        warn(text + kept, RecaptureWarning)
        return result

    def _stepped(
        self,
        made: Callable[[Arguments, Session, ModuleGuard], Session],
        arguments: Arguments,
        guard: ModuleGuard,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> tuple[Session, Any]:
        """A session that is made for these arguments, and what its first step returns."""
        before = dict(vars(self._group))
        with self._modes.held():
            session = made(arguments, self._sessions[0], guard)
        try:
            if self._measuring is not None:
                self._measuring.enter_context(session.measured())
            return session, session.step(*args, **kwargs)
        except BaseException:
            session.close()
            vars(self._group).update(before)
            raise

    def _check_tensors(self) -> None:
        """Raise where the model has other parameters or buffers than those that the state was taken from."""
        now = _tensors_of(self._model)
        for name in dict.fromkeys([*now, *self._tensors]):
            (before, *kind), (tensor, *other) = self._tensors.get(name, (None,)), now.get(name, (None,))
            if tensor is not before or kind != other:
                raise SessionError(
                    f"{name!r} of the model is another tensor than the one that was compiled, whose value each step "
                    "goes on from",
                    where=f"plan {self.plan.name!r}",
                    fix="compile the model anew, or give load_state_dict(...) of what was compiled the new values",
                )

    @property
    def _sessions(self) -> list[Session]:
        """Those of the plans that are kept, the last used first.

        Raises:
            SessionError: nothing was captured so far.
        """
        if not (self._cache.plans or self._earlier):
            raise SessionError(
                "nothing is captured before the first step of a function that was compiled without inputs",
                fix="do a step before, or compile the function with inputs",
            )
        return self._cache.plans or self._earlier

    @property
    def _updating(self) -> Session:
        """The session that was used last of those that make updates; of those that do not, if there are no others."""
        sessions = self._sessions
        return next((s for s in sessions if s.plan.program.interface.optimizers), sessions[0])

    def _drop_behind(self) -> None:
        """Drop plans that do not begin with all gradients which steps beside leave. One is kept until there is another:
        the state is reached through a session."""
        self._seen = self._group.grown
        behind = [session for session in self._cache.plans if self._touched.get(session, set()) & self._group.lasting]
        self._cache.drop(behind)
        self._earlier += behind
        for session in self._earlier[1:]:
            session.close()
        del self._earlier[1:]

    def run(self, loader: Iterable[Any], steps: int | None = None, progress: bool = True) -> list[Any]:
        """Steps on the batches of a loader, as :meth:`graphir.runtime.Session.run`; captures anew as :meth:`step` does.

        Raises:
            SessionError: the loader is none, or failed; *steps* is no number of steps; or as :meth:`step`.
            CaptureError: as :meth:`step`.
            RunError: as :meth:`step`.
        """
        self._sessions[0].run((), progress=False)  # what is closed or broken is to refuse before a batch is taken
        results = self._results = []
        run_loader(self.step, loader, steps, progress, results, f"plan {self.plan.name!r}")
        return results

    @property
    def results(self) -> list[Any]:
        """What the steps of the last :meth:`run` have returned so far."""
        return self._results

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the steps that are done in this context, each plan's for itself; for :meth:`report`.

        The first one of each plan counts bytes, as in :meth:`graphir.runtime.Session.measured`.

        Raises:
            SessionError: the executor cannot be observed, steps are being measured already, or no steps can be made any
                more.
        """
        with contextlib.ExitStack() as stack:
            for session in self._sessions:
                stack.enter_context(session.measured())
            self._measuring = stack
            try:
                yield
            finally:
                self._measuring, self._measured = None, self._sessions[0]

    def report(self, plan: Plan | None = None) -> Report:
        """What the steps of one plan took in the last :meth:`measured`; see :meth:`graphir.runtime.Session.report`.

        Args:
            plan: one of :attr:`plans`; by default that of the last measured step.

        Raises:
            SessionError: no step of the plan was measured, or the plan is not kept.
        """
        return self._measured_session(plan).report()

    def trace(self, path: str | Path, plan: Plan | None = None) -> None:
        """Write the last measured step of one plan as a trace; see :meth:`graphir.runtime.Session.trace`.

        Args:
            path: of the JSON file, which is written whole or not at all.
            plan: as :meth:`report` takes it.

        Raises:
            SessionError: as :meth:`report`.
            FileError: the file cannot be written.
        """
        self._measured_session(plan).trace(path)

    def _measured_session(self, plan: Plan | None) -> Session:
        if plan is None:
            return self._measured if self._measuring is None and self._measured is not None else self._sessions[0]
        for session in self._sessions:
            if session.plan is plan:
                return session
        raise SessionError("this is none of the plans that are kept", fix="give one of plans, such as plans[1]")

    def _read(
        self, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None, targets: Sequence[Any], batch_dims: Any
    ) -> Arguments:
        called = self._model.forward if self._function is None else self._function.call
        return read_arguments(called, inputs, kwargs, targets, self._options.get("loss"), batch_dims)

    def _made(self, arguments: Arguments, beside: Session | None, guard: ModuleGuard) -> Session:
        """A session of the step with these arguments, of the model that *guard* holds of."""
        captured = self._captured(arguments, len(self._devices))
        if beside is None and self._state:
            _check_state(self._state, captured)
        program, found = self._replicated(captured, first=beside is None), None
        if beside is not None and not any(op.phase == "forward" for op in captured.step.ops):
            program = _at_home(program, beside.plan.program)  # an update, of what is placed already
        elif self._placing is not None:
            found = self._placing.placed(program)
            program = self._placing.followed(found)
        if self._passes is not None:
            program = self._passes(program)
        try:
            plan = emit(program)
        except PlacementError:
            plan = emit(inject_copies(program))
        assert isinstance(captured.witness, StepWitness)  # it was captured here
        self._cache.leave_out(guard, captured.witness.changed)
        lent = captured.witness.lend()
        witness = captured if self._witness else None
        limits, options = None, self._session_options
        if self._placing is not None:
            limits, options = self._placing.limits_of(plan), {**options, "binding": self._placing.binding_of(plan)}
        state = {**captured.state, **self._state}
        followed = self._optimizers() if captured.interface.optimizers and not self._group.followed else None
        session = Session(
            plan,
            state,
            beside=beside,
            witness=witness,
            limits=limits,
            lent=lent,
            optimizer=followed,
            **options,
        )
        self._session_options.pop("steps_done", None)  # from here on, all sessions count together
        self._group.add(session, captured)
        self._writes |= _writes(captured)
        if captured.witness.between is not None:
            self._touched[session] = captured.witness.between.touched
        self._state = {name: tensor for name, tensor in self._state.items() if name not in captured.state}
        if self._placing is not None and found is not None:
            self._placing.keep(found)
            self._shares = found.program.shares
        return session

    def _replicated(self, captured: Program, *, first: bool) -> Program:
        """A replica on each device. A later batch that *shares* cannot divide is for one replica alone."""
        try:
            return replicate(captured, self._devices, shares=self._shares or None, gather=self._gather)
        except PassError as e:
            if first:
                raise
            raise CoverageError(e.what, where=e.where, fix=e.fix) from None

    def _made_alone(self, arguments: Arguments, beside: Session, guard: ModuleGuard) -> Session:
        """A session in which the first replica takes all of a batch that can't be split over several."""
        captured, state = self._captured(arguments, 1), beside.state()
        constants = [name for name, blob in captured.step.blobs.items() if blob.role == "constant"]
        for name in constants:
            if name not in state or not same_bits(captured.state[name], state[name]):
                raise CoverageError(
                    f"the constant {name!r} of the step has other values for a batch that one replica takes alone",
                    where=f"program {captured.name!r}",
                    fix=f"give a batch that {counted(len(self._devices), 'replica')} share equally",
                )
        plan = alone(beside.plan, captured.with_(dims=arguments.dims))
        assert isinstance(captured.witness, StepWitness)  # it was captured here
        self._cache.leave_out(guard, captured.witness.changed)
        lent = captured.witness.lend()
        return Session(plan, state, beside=beside, lent=lent, **self._session_options)

    def _captured(self, arguments: Arguments, replicas: int) -> Program:
        """The step of one of some replicas that share the batch."""
        parts = self._options.get("accumulate")
        parts = parts if type(parts) is int and parts > 0 else 1  # what else it may be is for capture to refuse
        inputs, kwargs, targets = arguments.split(_first_share(arguments, replicas, parts))
        beside = self._group.program if self._function is not None else None
        batch_dims = _dims_tree(arguments)
        return capture(
            self._captures, inputs, kwargs, targets=targets, batch_dims=batch_dims, beside=beside, **self._options
        )

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the step uses."""
        if self._function is not None:
            return list(self._function.optimizers.values())
        optimizer = self._options.get("optimizer")
        return [] if optimizer is None else [optimizer]

    @property
    def balanced(self) -> Balanced | None:
        """The placement that was chosen for the last capture; None without limits."""
        return None if self._placing is None else self._placing.balanced

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans that are kept, the last used first."""
        return tuple(session.plan for session in self._sessions)

    @property
    def plan(self) -> Plan:
        """The plan that was used last."""
        return self._sessions[0].plan

    @property
    def usable(self) -> bool:
        """Whether steps can be made; see :attr:`graphir.runtime.Session.usable`."""
        return self._sessions[0].usable

    @property
    def executor(self) -> str:
        """The executor of the plan that was used last; see :attr:`graphir.runtime.Session.executor`."""
        return self._sessions[0].executor

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why results of any plan need not be the reference executor's; see :attr:`graphir.runtime.Session.caveats`."""
        return tuple(dict.fromkeys([caveat for session in self._sessions for caveat in session.caveats]))

    @property
    def steps_done(self) -> int:
        """How many steps were done, by all plans together."""
        return self._sessions[0].steps_done

    @property
    def param_groups(self) -> list[Any]:
        """The parameter groups; ``param_groups[0]["lr"] = 0.1`` holds from the next step on, whatever its plan.

        Setting a number ends the following of the optimizer: all others stay as it has them then.
        """
        return self._updating.param_groups

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """Read the numbers of *optimizers* before each step, as those of the captured ones are from the start; see
        :meth:`graphir.runtime.Session.follow`."""
        self._updating.follow(*optimizers)

    def state_dict(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """The module's state under its own names, copied."""
        return self._sessions[0].state_dict(replica)

    def optimizer_state_dict(self, replica: int = 0, of: int | torch.optim.Optimizer = 0) -> dict[str, Any]:
        """The optimizer's state as ``optimizer.load_state_dict`` takes it, copied; see
        :meth:`graphir.runtime.Session.optimizer_state_dict`."""
        return self._updating.optimizer_state_dict(replica, of)

    def loss_scaler_state_dict(self) -> dict[str, Any]:
        """The loss scaler's state; see :meth:`graphir.runtime.Session.loss_scaler_state_dict`."""
        return self._updating.loss_scaler_state_dict()

    def state(self, replica: int | None = None) -> dict[str, torch.Tensor]:
        """All state, copied; see :meth:`graphir.runtime.Session.state`."""
        return self._sessions[0].state(replica)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the module's state on every replica."""
        self._sessions[0].load_state_dict(state)

    def write_back(self) -> None:
        """Copy all state into the model, its optimizers and its gradient scaler, which steps leave as they were: for an
        evaluation, or for a checkpoint as eager PyTorch writes it. Gradients that last from step to step go into
        ``p.grad``."""
        state, program, lasting = self.state_dict(), self._updating.plan.program, self._group.lasting
        optimizers = self._optimizers() if program.interface.optimizers else []
        states = [self.optimizer_state_dict(of=position) for position in range(len(optimizers))]
        scaler = self._options.get("loss_scale") if self._function is None else self._function.scaler
        gradients = self._sessions[0].gradients() if lasting else {}
        self._model.load_state_dict(state)
        for name in lasting:
            param = self._model.get_parameter(name)
            param.grad = gradients[name].to(param.device) if name in gradients else None
        self._behind.caught_up()
        for optimizer, kept in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(kept)
        if isinstance(scaler, torch.amp.GradScaler):
            scaler.load_state_dict(self.loss_scaler_state_dict())

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """While this is active, the model's parameters and buffers have the values that steps have made, as for an
        evaluation; what is written there is lost."""
        state, own = self.state_dict(), self._model.state_dict(keep_vars=True)
        before = {name: tensor.data for name, tensor in own.items()}
        try:
            for name, tensor in own.items():
                tensor.data = state[name].to(tensor.device)
            self._behind.caught_up()
            yield
        finally:
            for name, tensor in own.items():
                tensor.data = before[name]
            if self._writes:
                self._behind.moved_on()

    def gradients(self, replica: int = 0) -> dict[str, torch.Tensor]:
        """The last step's gradients by parameter; see :meth:`graphir.runtime.Session.gradients`."""
        return self._sessions[0].gradients(replica)

    def close(self) -> None:
        """End the threads of every session. What is closed refuses everything else."""
        self._behind.end()
        for session in (*self._cache.plans, *self._earlier):
            session.close()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a compiled model has threads and tensors of its own, and cannot be copied or pickled",
            fix="compile the model where it runs, and load this one's state_dict()",
        )

    def __repr__(self) -> str:
        if not self._cache.plans:
            return "<compiled function: nothing is captured so far>"
        plans, steps = counted(len(self.plans), "plan"), counted(self.steps_done, "step")
        placed = "" if self.balanced is None else f", placed for {self.balanced.machine}"
        return f"<compiled {self.plan.name!r}: {plans}, {steps} done{placed}>"

    def __enter__(self) -> Compiled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


compile = Compiled
"""The whole way in one call."""


class _Group:
    """Compiled steps that share their state.

    Attributes:
        session: one of their sessions, whose state is that of all; None before the first.
        program: the program of a function that was captured last, which knows of those before; or the first one.
        lasting: the gradients that last from step to step.
        grown: counts how often these have become more.
        followed: whether the optimizers were given to a session.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.program: Program | None = None
        self.lasting: frozenset[str] = frozenset()
        self.grown = 0
        self.followed = False

    def add(self, session: Session, program: Program) -> None:
        """Note a session, and the program that it was made of."""
        kept = program.interface.optimizer_state.items()
        lasting = self.lasting.union([param for param, own in kept if GRADIENT in own])
        self.grown += self.lasting != lasting
        self.session, self.lasting = session, lasting
        if self.program is None or (isinstance(program.witness, StepWitness) and program.witness.between is not None):
            self.program = program
        self.followed |= bool(program.interface.optimizers)


def _at_home(program: Program, beside: Program) -> Program:
    """The program with its state where another one has it, and what follows the state."""
    there, here = beside.init.blobs, program.init.blobs
    homes = {name: there[name].device for name in here if name in there and there[name].device != here[name].device}
    return follow(program, {}, homes, "compile") if homes else program


def _writes(program: Program) -> bool:
    """Whether a step writes parameters or buffers."""
    blobs = program.step.blobs
    made = {blobs[op.outputs[output]].storage for op in program.step.ops for output, _ in op.effects.writes}
    return any(blobs[storage].role in ("param", "buffer") for storage in made)


def _check_beside(beside: object, given: Mapping[str, object]) -> None:
    """Refuse what is no compiled step, one that has captured nothing, and arguments that it has given already."""
    if not isinstance(beside, Compiled):
        raise SessionError(f"beside is a {type(beside).__name__}", fix="give what graphir.compile returned")
    beside._sessions  # noqa: B018  # raises where nothing was captured
    for name, value in given.items():
        if value:
            raise SessionError(f"{name} is given beside a compiled step, which has it", fix=f"leave {name} out")


def _check_state(state: Mapping[str, torch.Tensor], program: Program) -> None:
    """Raise where a state lacks parameters or buffers: those of the model would take the place of another's unseen."""
    for name in program.interface.module_state.values():
        if name not in state:
            raise SessionError(
                f"the state has no {name!r}{nearest(name, state)}",
                where=f"program {program.name!r}",
                fix="give what state() returned, of a compiled model like this one",
            )


def _check_options(session: object) -> None:
    """Refuse options of the session that are none, before the model is captured."""
    if not isinstance(session, Mapping | None):
        raise SessionError(f"session is a {type(session).__name__}, not a mapping", fix="give a dict of its arguments")
    for name in session or {}:
        if name not in _OPTIONS:
            raise SessionError(
                f"a session has no option {name!r}{nearest(name, _OPTIONS)}", fix=f"options: {', '.join(_OPTIONS)}"
            )


def _binding(session: Mapping[str, Any]) -> Binding:
    """How sessions with these options bind devices."""
    binding: Binding = session.get("binding", "auto")
    return "cpu" if binding == "auto" and is_of_host(session.get("executor", "auto")) else binding


def _tensors_of(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor | None, Any, Any]]:
    """A model's parameters and buffers by name, with their element types and shapes."""
    named = chain(model.named_parameters(), model.named_buffers())
    return {name: (tensor, tensor.dtype, tensor.shape) for name, tensor in named}


def _dims_tree(arguments: Arguments) -> tuple[Any, Any, Any]:
    """The named dimensions as ``batch_dims`` takes them: a tree over inputs, kwargs and targets."""
    inputs, kwargs, targets = arguments.split([dict(leaf.dims) or None for leaf in arguments.leaves])
    return inputs, kwargs, targets


def _first_share(arguments: Arguments, replicas: int, accumulate: int) -> list[Any]:
    """The leaves as the first replica gets them, in whole micro-batches by torch.chunk's rule; one tensor stays one."""
    cut: dict[int, torch.Tensor] = {}
    shares: list[Any] = []
    for leaf in arguments.leaves:
        tensor, dim = leaf.tensor, leaf.batch_dim
        if tensor is None or dim is None or replicas == 1:
            shares.append(leaf.value)
            continue
        if id(tensor) not in cut:
            size = tensor.shape[dim]
            share = tensor.detach().narrow(dim, 0, min(-(-size // (accumulate * replicas)) * accumulate, size))
            cut[id(tensor)] = share.requires_grad_(tensor.requires_grad)
        shares.append(cut[id(tensor)])
    return shares
