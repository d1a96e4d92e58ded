"""Sessions: a plan with its state, executed step by step."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from graphir.analysis.alone import alone
from graphir.analysis.short_batch import short_batch
from graphir.errors import CoverageError, GraphirError, RunError, SessionError, TrainingWarning, counted, warn
from graphir.ir.plan import Plan
from graphir.ir.program import Program
from graphir.ir.size import Dims

from .cuda.executor import Collectives, Cuda
from .executor import Feedable, OnDevices
from .executors.threads import end_threads_at_exit
from .failures.faults import fault, reason_of, writes_state
from .interface.gather import Gather
from .interface.scatter import SmallShares
from .kernels.repeatable import unrepeatable
from .loop import run_loader
from .machine.ending import ENDS_IN, stay
from .machine.heap import kept_heap
from .machine.places import Binding, places_of
from .machine.stopwatch import Stopwatch
from .machine.surroundings import FORKS, follow_forks
from .memory_limit import MemoryLimit, Most, PlanLimits
from .observing.measurement import Measurement
from .observing.report import Report
from .observing.trace import write_trace
from .options import ExecutorName, Options
from .param_groups import Group, ParamGroups
from .proof.admission import admit
from .state import State, Use
from .stepping import Common, Stepping

__all__ = ["Session"]

_EXIT_SECONDS: Final = 10.0
"""How long all steps of other threads together are waited for at the interpreter's exit."""

_LOOK_SECONDS: Final = 0.05
"""How often a session that is being closed checks whether the step that it waits for is its own."""


class Session(Stepping):
    """Runs the steps of a plan on its own copy of the state.

    ::

        with Session(plan, program.state) as session:
            loss = session.step(x, y)
            model.load_state_dict(session.state_dict())

    Args:
        plan: verified before anything else.
        state: the module's and the optimizer's own names, and ``step`` (how many steps were done), to tensors, as in
            ``program.state``; an entry under a blob's full name is for one replica, and one of a parameter group's
            number, as ``lr``, is its value in the first step; :meth:`state` gives both. All are copied. No entry that
            the program needs may be missing; others are passed over, so that a program without optimizer, or with fewer
            replicas, goes on from a training one.
        binding: which real device each logical one is: ``cpu`` puts all on the host, ``cuda`` each on the CUDA device
            of its number, or deals them out where there are too few, a dict says it for each
            (``{"gpu:0": "cuda:0"}``). ``auto`` is ``cuda`` where there is any such device, unless the executor is one
            of the host's, and else ``cpu``.
        executor: ``reference`` runs one instruction after the other, on any device. On the host, ``serial`` runs
            generated code in the calling thread, ``threads`` in a thread for each logical device where there are
            several, and ``auto`` chooses the one that is predicted to be fastest. Where devices are bound to CUDA it is
            ``cuda``, which issues each lane to a stream; elsewhere ``reference``.
            ``adversarial``, for tests, interleaves the lanes as badly as the plan allows.
        threads: how many threads one kernel may use; by default as many as in the thread that makes the session, so
            that results equal those of eager PyTorch there bit for bit. Steps called from other threads use as many.
        beside: a session of another plan of the same model and optimizer, whose parameters, buffers, optimizer state,
            numbers of parameter groups and number of steps this one shares: a step of either is a step of both. The
            steps of a program without optimizer beside one with, such as an evaluation's, are not counted.
        seed: of the adversarial executor's interleavings, 0 by default.
        check_finite: whether to stop a step at the first operator that makes NaN or infinities of finite values, with
            a RunError that names it. Every value of a step costs one reduction more.
        deadline: seconds. A step of several threads is given up where no lane has come to its next instruction for as
            long; None: never. Lanes that wait for each other, and threads that have died, are noticed at once.
        collectives: ``ordered`` sums in participant order, so that bits are the same everywhere; ``native``, of the
            executor ``cuda`` and among distinct GPUs, in NCCL's, see :attr:`caveats`.
        cuda_graph: whether the executor ``cuda`` captures its steps as CUDA graphs, on one GPU; with the same bits.
        keep_heap: whether the process keeps what steps on the host free, instead of giving it back to the operating
            system, as long as the session is open; faster, and for the whole process.
        witness: the program that ``graphir.capture`` returned for the plan. Before the first step at sizes that were
            not recorded, the module's step is recorded at them and compared with the program.
        memory_limit: bytes that a step may take on each real device, as :func:`graphir.memory` predicts them; by
            default as many as the machine has. A plan that takes more is refused, at its own sizes when the session is
            made, and at others before the first step of that size. None: no plan is.
        limits: what :func:`graphir.compile` has placed the plan within; at larger sizes at which the plan would hold
            more on one of its devices, a step is refused with a CoverageError.
        lent: constants, by name, that steps read where they are instead of from a copy: what is written there holds
            from the next step on. Those that are on another device or laid out otherwise are copied like all state,
            and once torch has counted a write into one of them, steps are refused with a CoverageError.
        optimizer: whose numbers are read before each step, see :meth:`follow`; of a program with several optimizers all
            of them.
        steps_done: how many steps were done before, for a state that does not say so, such as that of a model which was
            loaded from a checkpoint; what the steps draw follows the number.

    Warns:
        TrainingWarning: the program was recorded for CUDA, and all devices are the host.

    Raises:
        VerifyError: the plan is not sound.
        PlanError: the plan has what no executor can run.
        SessionError: it is no plan; the state does not fit it; an unknown binding or executor; devices that are not
            there; the session beside is closed, or cannot be used; the plan takes more than *memory_limit*.
        RunError: an operator that fills the state failed.
    """

    def __init__(
        self,
        plan: Plan,
        state: Mapping[str, Tensor],
        binding: Binding = "auto",
        executor: ExecutorName = "auto",
        threads: int | None = None,
        beside: Session | None = None,
        seed: int | None = None,
        check_finite: bool = False,
        deadline: float | None = 600.0,
        collectives: Collectives = "ordered",
        cuda_graph: bool = False,
        keep_heap: bool = False,
        witness: Program | None = None,
        memory_limit: Most = "machine",
        limits: PlanLimits | None = None,
        lent: Mapping[str, Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        steps_done: int | None = None,
    ) -> None:
        if steps_done is not None:
            if type(steps_done) is not int or not 0 <= steps_done < 1 << 62:
                raise SessionError(f"steps_done={steps_done!r} is no number of steps", fix="give a whole number")
            if beside is not None:
                raise SessionError(
                    "steps_done is given beside a session, whose steps are counted together with this one's",
                    fix="leave steps_done out",
                )
            state = {**state, "step": torch.tensor(steps_done, device="cpu")} if isinstance(state, Mapping) else state
        options = Options(executor, threads, seed, deadline, collectives, cuda_graph, keep_heap, memory_limit)
        options.check()
        if not isinstance(beside, (Session, type(None))):
            raise SessionError(
                f"beside is a {type(beside).__name__}, not a session", where="Session(...)", fix="pass a Session"
            )
        if beside is not None:
            beside._check_usable()
        admit(plan)
        places = places_of(binding, plan.devices, host_only=options.host_only)
        options.check_places(places)
        if beside is None and plan.program.caveats and all(place.type == "cpu" for place in places.values()):
            warn(
                f"program {plan.program.name!r} was recorded for CUDA and runs on the host: its bits are the host's",
                TrainingWarning,
            )
        intraop = threads or torch.get_num_threads()
        limit = MemoryLimit(plan, places, intraop, memory_limit)
        self._closed = False
        self._running: threading.Lock = threading.Lock() if beside is None else beside._running
        follow_forks()
        self._forks = FORKS[0]
        program = plan.program
        self._state: State = State(program, state, None if beside is None else beside._state, places, lent)
        self._groups: ParamGroups = ParamGroups(program, state, None if beside is None else beside._groups)
        self._progress = self._state.progress
        self._places = places
        self._common = Common(self._state, self._groups, places, options, intraop, witness, check_finite, limits)
        super().__init__(plan, self._common, limit)
        self._short: dict[int, Stepping] = {}
        self._alone: dict[tuple[int, ...], Stepping] = {}
        self._outputs: tuple[Tensor, ...] = ()
        self._handed: Gather = self._gather
        self._results: list[Any] = []
        self._held = ExitStack()
        if keep_heap:
            self._held.enter_context(kept_heap())
        if optimizer is not None:
            followed = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
            self._groups.follow(followed, state)
        _end_at_exit()
        _open.add(self)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One step on a batch: inputs, then targets, then keyword arguments, as they were captured.

        Tensors are split over the replicas along their batch dimension, by torch.chunk's rule or by the program's
        shares, see :func:`graphir.passes.replicate`; other batch sizes than the captured one are fine unless
        ``plan.program.covers`` says otherwise. Where a share would be one row, which
        the program does not take, there are fewer shares. A replica that gets no rows computes nothing but its update,
        with the gradients of the others. A batch of one row is recorded by itself, if the module is there, and taken by
        the first replica.

        Returns:
            The loss as a 0-dim tensor: the mean over replicas, weighted by their shares. For a program without loss,
            the module's outputs, gathered; those without a batch dimension are the first replica's.

        Raises:
            CoverageError: the program does not cover the arguments, or at their sizes is not what its witness says, or
                the plan would hold more than its limits; nothing has changed.
            SessionError: the arguments do not fit, the step takes more memory than it may at their sizes, or another
                thread is in a step; nothing has changed. Or the session cannot be used any more.
            RunError: an operator failed; the session is :attr:`usable` where no state had been written.
        """
        if self._running.locked() or self._forks != FORKS[0]:
            raise self._busy()
        progress = self._progress
        with self._running, Use(progress, "is in a step of"):  # of two that came past the check at once, one waits
            if self._closed or progress.broken:
                self._check_usable()
            step = progress.steps_done
            try:
                taken, dims, shares = self._split(args, kwargs)
            except RuntimeError as e:  # of a device that has no memory for its share, or is lost
                raise self._failed(step, e, usable=True) from e
            inputs: list[Feedable] = [*shares, *self._groups.now()] if self._groups.names else list(shares)
            self._outputs = ()
            try:
                outputs = (taken._observed or taken._executor).run(dims, inputs, step)
                progress.steps_done += self._state.counted
            except BaseException as e:
                if not (isinstance(e, RunError) and e.usable):
                    progress.broken = _broken(step, e)
                raise
            if taken._gather.others:
                self._outputs, self._handed = tuple(outputs), taken._gather
            try:
                return taken._gather.result(outputs, dims)
            except RuntimeError as e:
                written = any(writes_state(taken.plan, instruction) for instruction in taken.plan.instructions)
                raise self._failed(step, e, usable=not written) from e

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Stepping, Dims, list[Tensor]]:
        """What takes a step, the dimensions, and the tensor of each of its inputs."""
        self._state.check_copied()
        taken: Stepping = self
        while True:  # each time with fewer replicas
            try:
                return taken, *taken._scatter.split(args, kwargs)
            except SmallShares as e:
                if e.fewer:
                    taken = self._short.get(e.fewer) or self._shortened(e)
                elif e.dims:
                    taken = self._lone(e)
                else:
                    raise

    def _shortened(self, small: SmallShares) -> Stepping:
        """What takes the steps in which only so many replicas have rows, from now on.

        Raises:
            SessionError: there is no such plan.
        """
        try:
            plan = short_batch(self.plan, small.fewer)
            admit(plan)
        except GraphirError as e:
            raise SessionError(f"{small.what}; {e.what}", at=e.at, where=small.where, fix=small.fix) from e
        return self._short.setdefault(small.fewer, self._stepping(plan, self._common))

    def _stepping(self, plan: Plan, common: Common) -> Stepping:
        """What takes the steps of another plan of the session."""
        limit = MemoryLimit(plan, common.places, self._intraop, common.options.memory_limit)
        taken = Stepping(plan, common, limit)
        if self._observed is not None and self._observed.measurement is not None:
            taken._measure()
        return taken

    def _lone(self, small: SmallShares) -> Stepping:
        """What takes the steps of such a batch, which one replica takes by a recording of its own.

        Raises:
            CoverageError: there is no such recording, or the plan does not fit it.
        """
        first, witness = self.plan.program.replicas[0], self.plan.program.witness
        if witness is None:
            fix = "give more rows, or make the plan in the process that captures the model: it records this size then"
            raise CoverageError(small.what, where=small.where, fix=fix)
        dims = {dim[len(first) :]: size for dim, size in small.dims.items() if dim.startswith(first)}
        point = tuple(dims.values())
        if point not in self._alone:
            try:
                plan = alone(self.plan, witness.recorded(dims))
                admit(plan)
            except GraphirError as e:
                told = e.what.rpartition(": ")[2] in small.what  # by torch, at the capture already
                what = small.what if told else f"{small.what}; {e.what}"
                raise CoverageError(what, at=e.at, where=e.where, fix=small.fix) from e
            self._alone[point] = self._stepping(plan, self._common._replace(witness=None))
        return self._alone[point]

    def _all(self) -> list[Stepping]:
        """All that take steps, those with the most replicas that have rows first."""
        return [self, *(self._short[count] for count in sorted(self._short, reverse=True)), *self._alone.values()]

    @property
    def usable(self) -> bool:
        """Whether steps can be made: not once the session is closed, nor after a step that failed or was interrupted,
        unless no lane had written state before it failed."""
        return not (self._closed or self._progress.broken or self._forks != FORKS[0])

    def run(self, loader: Iterable[Any], steps: int | None = None, progress: bool = True) -> list[Any]:
        """Steps on the batches of a loader: once through it, and at most *steps*.

        A batch that is a tuple or a list gives a step's arguments, one that is a mapping its keyword arguments, and any
        other, such as a tensor, is the one argument. No batch is taken that is not used.

        Ctrl-C stops between steps: the one that runs is finished first, unless Ctrl-C comes a second time. Then, and
        where the loader fails, all steps that were begun are done, the session can go on, and :attr:`results` has what
        they returned.

        Args:
            loader: a ``DataLoader``, or any other iterable of batches.
            steps: the most steps; None: as many as there are batches.
            progress: show progress on the terminal, if the error stream is one.

        Returns:
            What each step returned: for a training step its loss.

        Raises:
            SessionError: the loader is none, or failed; *steps* is no number of steps; or as :meth:`step`.
            RunError: as :meth:`step`.
        """
        self._check_usable()
        results = self._results = []
        run_loader(self.step, loader, steps, progress, results, self._where())
        return results

    @property
    def results(self) -> list[Any]:
        """What the steps of the last :meth:`run` have returned so far."""
        return self._results

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the steps that are done in this context, for :meth:`report`.

        They are steps like all others, with the same bits. The first one counts bytes, which takes time, and those
        after it are timed; where there is only one, it does both. Steps with fewer rows than replicas are measured
        apart, and told of where there are no others.

        Raises:
            SessionError: steps are being measured already, or the session cannot be used any more.
        """
        self._check_usable()
        if self._observed is not None and self._observed.measurement is not None:
            raise SessionError(
                "the session's steps are being measured already", where=self._where(), fix="leave that context first"
            )
        for taken in self._all():
            taken._measure()
        try:
            yield
        finally:
            for taken in self._all():
                taken._observe(None)

    def report(self) -> Report:
        """What the steps of the last :meth:`measured` took: seconds by lane and by operator, bytes by device against
        the prediction, on CUDA also against what the allocator says now, copies and their bandwidth.

        Raises:
            SessionError: no step was measured.
        """
        taken, measurement = self._measured_steps()
        return taken._reported(measurement, self._places)

    def trace(self, path: str | Path) -> None:
        """Write the last step of the last :meth:`measured` as a trace for Perfetto or Chrome's tracing page: each
        lane's instructions as they were executed and, on the host, as they were predicted, and arrows along the events
        between lanes.

        Args:
            path: of the JSON file, which is written whole or not at all.

        Raises:
            SessionError: no step was measured.
            FileError: the file cannot be written.
        """
        taken, measurement = self._measured_steps()
        predicted = taken._predicted(measurement.last_dims)
        write_trace(path, measurement, *taken._choice, None if predicted is None else predicted.schedule.intervals())

    def _measured_steps(self) -> tuple[Stepping, Measurement]:
        for taken in self._all():
            if taken._measurement is not None and taken._measurement.steps:
                return taken, taken._measurement
        raise SessionError("no step was measured", where=self._where(), fix="with session.measured(): session.step(…)")

    @property
    def executor(self) -> str:
        """The executor that runs the steps; with ``executor="auto"``, the one that was chosen."""
        return self._choice.executor

    @property
    def caveats(self) -> tuple[str, ...]:
        """Why results need not be bit for bit those of the reference executor; empty where they are."""
        native = isinstance(self._executor, Cuda) and self._executor.native
        found = ["collectives are summed in NCCL's order, not in participant order"] if native else []
        found += [f"{type} adds in no fixed order on CUDA" for type in unrepeatable(self.plan.step, self._places)]
        return tuple(found)

    @property
    def steps_done(self) -> int:
        """How many steps were done, those before the session's state was taken included."""
        return self._progress.steps_done

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups; ``session.param_groups[0]["lr"] = 0.1`` holds from the next step on, and ends the
        following of an optimizer."""
        return self._groups.groups

    def follow(self, *optimizers: torch.optim.Optimizer) -> None:
        """Read the numbers of *optimizers*, all of the program, before each step, so that their
        schedulers work: learning rates, and momentum, weight decay and betas where the program's ``param_groups`` have
        them as ``numbers``.

        A step is refused once another of their options changes, or a momentum or weight decay that was 0 at capture.
        Setting a number in :attr:`param_groups` ends the following of all: they stay as optimizers have them then.

        Raises:
            SessionError: a class, groups or their other options are not those of the program.
        """
        self._check_open()
        self._groups.follow(optimizers)

    def state_dict(self, replica: int = 0) -> dict[str, Tensor]:
        """The module's state under its own names, copied. Replicas differ only in buffers and in parameters that the
        forward overwrites."""
        with self._between_steps():
            return self._state.module(replica)

    def optimizer_state_dict(self, replica: int = 0, of: int | torch.optim.Optimizer = 0) -> dict[str, Any]:
        """The optimizer's state as ``optimizer.load_state_dict`` takes it, copied. Replicas have the same.

        The options of its groups are those of the followed optimizer now; where none is followed, as captured, with
        the numbers of the next step.

        Args:
            replica: whose tensors.
            of: which of several optimizers: one that is followed or was captured, or its position.

        Raises:
            SessionError: there is no such replica or optimizer.
        """
        with self._between_steps():
            position = self._groups.position(of)
            kind = "".join(self.plan.program.interface.optimizers[position : position + 1])
            return self._state.optimizer(self._groups.of_optimizer(position), kind, replica)

    def loss_scaler_state_dict(self) -> dict[str, Any]:
        """The loss scaler's state as ``torch.amp.GradScaler.load_state_dict`` takes it.

        Raises:
            SessionError: the program was captured without one.
        """
        with self._between_steps():
            return self._state.loss_scaler()

    def state(self, replica: int | None = None) -> dict[str, Tensor]:
        """All state under the names of ``program.state``, copied: ``Session(plan, state)`` goes on from there.

        It has the numbers of parameter groups too, by blob (``lr``), and each further replica's buffers under their
        full names (``gpu_1/bn.running_mean``); where the forward overwrites parameters, all state of each replica. With
        a *replica*, all entries are that one's, so that every replica would go on from it.
        """
        with self._between_steps():
            return {**self._state.all(replica), **self._groups.state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Overwrite the module's state on every replica. Optimizer state stays as it is.

        Raises:
            SessionError: a name is missing or unknown, or a tensor does not fit; nothing has changed. Or a step has
                failed: its optimizer state would stay half updated.
        """
        with self._between_steps():
            self._state.load_module(state)

    def gradients(self, replica: int = 0) -> dict[str, Tensor]:
        """The gradients that the last step of a program without optimizer handed back, and those that last from step to
        step, copied, by the names of ``model.named_parameters()``; those of several replicas are reduced. What else a
        program hands back beside its loss is there by base name.

        Raises:
            SessionError: no step was done, or the program hands back nothing else.
        """
        with self._between_steps():
            kept = self._state.gradients(replica)
            if not self._gather.others:
                if kept is not None:
                    return kept
                what, fix = "the program hands back no gradients", "capture it with a loss, without an optimizer"
                raise SessionError(what, where=self._where(), fix=fix)
            if not self._outputs:
                what, fix = "no step was done yet, so there are no gradients", "call step() first"
                raise SessionError(what, where=self._where(), fix=fix)
            return {**(kept or {}), **self._handed.gradients(self._outputs, replica)}

    def close(self) -> None:
        """End the session's threads. A closed session refuses everything else. A step in another thread is waited for.

        Raises:
            SessionError: it is called from within a step of this session; nothing has changed.
        """
        if self._forks == FORKS[0]:  # a forked process has neither the threads nor the one that is in a step
            while not self._running.acquire(timeout=_LOOK_SECONDS):
                if self._progress.user[0] == threading.get_ident():
                    raise self._busy()
                if ENDS_IN:
                    break  # who holds it stays where it is
            else:
                try:
                    self._end()
                finally:
                    self._running.release()
        self._closed, self._outputs = True, ()

    def _end(self) -> None:
        """End what this thread has the use of."""
        with Use(self._progress, "is closing"):
            self._closed = True  # Ctrl-C may strike while threads end
            for taken in self._all():
                taken._executor.close()
            self._held.close()

    def _end_at_exit(self, waited: Stopwatch) -> None:
        """Close the session once the step that another thread is in has ended. If that takes too long, leave it
        open."""
        while self._forks == FORKS[0] and self._progress.user[0] and waited.look() <= _EXIT_SECONDS:
            time.sleep(_LOOK_SECONDS)
        if self._forks == FORKS[0] and not self._progress.user[0]:
            self._end()

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a session has threads and tensors of its own, and cannot be copied or pickled",
            where=self._where(),
            fix="copy plan and state(), and make a Session of them: Session(session.plan, session.state())",
        )

    def __repr__(self) -> str:
        steps = counted(self.steps_done, "step")
        return f"<session of plan {self.plan.name!r}: executor {self.executor}, {steps} done>"

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            stay()
            raise SessionError(
                "the session is closed", where=self._where(), fix="make a new Session; take state_dict() before closing"
            )

    def _where(self) -> str:
        return f"plan {self.plan.name!r}"

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """In this context the caller may read or overwrite state: it is between two steps of a session that is
        usable."""
        self._check_open()
        if not self._running.acquire(blocking=False):
            raise self._busy()
        try:
            with Use(self._progress, "is reading or overwriting the state of"), ExitStack() as aside:
                for taken in self._all():
                    if isinstance(taken._executor, OnDevices):
                        aside.enter_context(taken._executor.aside())
                self._check_usable()
                yield
        except torch.AcceleratorError as e:  # of a kernel of a step
            raise self._failed(self._progress.steps_done, e) from e
        finally:
            self._running.release()

    def _failed(self, step: int, cause: RuntimeError, usable: bool = False) -> RunError:
        """The error for what torch raised before or after the plan's own instructions."""
        error = fault(self.plan, None, step, cause, usable=usable)
        if not error.usable:
            self._progress.broken = _broken(step, error)
        return error

    def _busy(self) -> SessionError:
        """The error for a call while a step runs, or in a forked process, which lacks the threads that run steps."""
        thread, what = self._progress.user
        what = f"{what or 'is using'} this session"
        if self._forks != FORKS[0]:
            what = "the session was made before this process was forked, and its threads are not in it"
            fix = "make the session in the process that runs it"
        elif thread == threading.get_ident():
            what, fix = f"this thread {what} already", "use the session once that has returned"
        else:
            what, fix = f"another thread {what}", "wait for it to end, or make one Session for each thread"
        return SessionError(what, where=self._where(), fix=fix)

    def _check_usable(self) -> None:
        self._check_open()
        if self._progress.broken:
            raise SessionError(
                f"the session is unusable: {self._progress.broken}",
                where=self._where(),
                fix="make a new Session from a state() taken before, or from program.state",
            )


_open: Final[weakref.WeakSet[Session]] = weakref.WeakSet()


@cache
def _end_at_exit() -> None:
    """Close sessions that nobody closed before the interpreter ends, once no thread is in a step any more."""
    end_threads_at_exit()  # registered first, and so called last: for steps that were not waited for

    def end() -> None:
        ENDS_IN.append(threading.get_ident())
        waited = Stopwatch()
        for session in list(_open):
            session._end_at_exit(waited)

    atexit.register(end)


def _broken(step: int, error: BaseException) -> str:
    what = error.what.partition("\n")[0] if isinstance(error, RunError) else reason_of(error)
    return f"step {step} failed ({what}), so its state may be half updated"
