"""What a pass is, how its text is written and read, and how passes are chained.

A pass is a small frozen model whose fields are its options, so that ``shift_activations{activations=[relu],
shifts={0: 1}}`` is both what a program's history says and what :class:`Pipeline` reads. Running one returns a new
program; the one given is never changed, and the new one is verified before it is handed back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    WrapValidator,
)

from graphir.analysis.machines import MACHINES
from graphir.analysis.topology import Topology
from graphir.collector import collector_paused
from graphir.errors import GraphirError, PassError, nearest
from graphir.ir.device import Device
from graphir.ir.history import parse_passes, print_option
from graphir.ir.program import Program
from graphir.ir.verify import blamed, verify

from .standing import Order, require_known, require_order

__all__ = [
    "Gpu",
    "OptionError",
    "Pass",
    "Pipeline",
    "Placed",
    "Run",
    "Shifts",
    "Timing",
    "as_device",
    "as_gpu",
    "build",
    "each_once",
    "parse_pipeline",
    "printed_device",
    "read_option",
    "register",
    "require_program",
]

P = TypeVar("P", bound="Pass")
T = TypeVar("T")

_REGISTRY: Final[dict[str, type[Pass]]] = {}


class OptionError(PassError, ValueError):
    """An option that a validator of a field refuses: a ValueError, as pydantic takes it, with a remedy."""


class Pass(BaseModel):
    """One transformation of a program. Its fields are its options.

    A subclass sets ``name`` and writes :meth:`rewrite`; calling the pass adds its text to the program's history and
    verifies the result.

    Attributes:
        name: as in a pipeline's text; the name of the function and of the file.
        never_behind: behind which programs the pass may not come, by what they are, each with the reason.
        only_behind: what a program has to be for the pass, each with the reason.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str] = ""
    never_behind: ClassVar[Order] = {}
    only_behind: ClassVar[Order] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        require_known(cls.name, (*cls.never_behind, *cls.only_behind))

    def rewrite(self, program: Program) -> Program:
        """The program with the change made, not yet verified.

        Raises:
            PassError: the options do not fit the program.
        """
        raise NotImplementedError

    def __call__(self, program: Program) -> Program:
        """Run the pass and verify what it made.

        Raises:
            PassError: *program* is not a program, the pass may not come behind it, or the options do not fit it.
            VerifyError: the program breaks an invariant.
        """
        require_program(program, self.name)
        with collector_paused():
            result = self.recorded(program)
            verify(result, placed=False)
        return result

    def recorded(self, program: Program) -> Program:
        """Run the pass and add its text to the history, without verifying."""
        self.require_order(program)
        with collector_paused(), blamed(program):
            result = self.rewrite(program)
        if not isinstance(result, Program):
            raise PassError(
                f"pass {self.name!r} returned {type(result).__name__}, not a Program",
                fix="return program.with_(step=…) from rewrite",
            )
        return result.with_(history=(*program.history, str(self)))

    def require_order(self, program: Program) -> None:
        """Refuse a program behind which the pass may not come, before anything is built.

        Raises:
            PassError: it is such a program; says the right order.
        """
        require_order(program, self.name, self.never_behind, self.only_behind)

    def __str__(self) -> str:
        given = [
            f"{field}={print_option(_plain(getattr(self, field)))}"
            for field, info in type(self).model_fields.items()
            if getattr(self, field) != info.get_default(call_default_factory=True)
        ]
        return self.name + (f"{{{', '.join(given)}}}" if given else "")


def _plain(value: Any) -> Any:
    """An option's value as text can have it: a topology is its name, or where nothing has that name, all of it."""
    if not isinstance(value, Topology):
        return value
    if value.name in MACHINES and MACHINES[value.name]() == value:
        return value.name
    return value.model_dump(exclude_defaults=True, exclude={"devices": {"__all__": {"free"}}})


def read_option(read: Callable[[Any], T], given: Any, fix: str = "") -> T:
    """``read(given)``; its refusal becomes one of the option, with the same remedy unless it has its own *fix*. For a
    field's validator."""
    try:
        return read(given)
    except GraphirError as e:
        raise OptionError(e.what, fix=fix or e.fix) from None


def as_device(given: Any) -> Device:
    """A device, in any spelling that :meth:`~graphir.ir.device.Device.parse` takes; a field's validator."""
    return read_option(Device.parse, given)


def as_gpu(given: Any) -> int:
    """The number of a gpu, given as it is printed or by its number; a field's validator."""
    fix = "write 'gpu:0', 'cuda:0' or 0"
    device = read_option(Device.parse, given, fix)
    if device.kind != "gpu":
        raise OptionError(f"{device} is not a gpu", fix=fix)
    return device.index


Gpu: TypeAlias = Annotated[int, BeforeValidator(as_gpu)]
"""An option that is a gpu: given as it is printed or by its number, kept and printed as its number."""


def each_once(given: Any, read: Callable[[Any], Any]) -> Any:
    """Devices, each of which is given once, however it is written; the validator of a field."""
    found = read(given)
    if isinstance(given, Mapping) and len(found) < len(given):
        first: dict[Device, Any] = {}
        for key in given:
            if (device := as_device(key)) in first:
                raise OptionError(
                    f"a device is given twice: {device}, as {first[device]!r} and {key!r}", fix="give each device once"
                )
            first[device] = key
    return found


Shifts: TypeAlias = Annotated[dict[Gpu, Gpu], WrapValidator(each_once)]
"""An option that says of gpus to which other one each goes."""


def printed_device(given: Any) -> str:
    """A device as it is printed; a field's validator."""
    return str(as_device(given))


Placed: TypeAlias = Annotated[str, BeforeValidator(printed_device)]
"""An option that is any device: given as it is printed or by a gpu's number, kept and printed as ``gpu:1``."""


def register(cls: type[P]) -> type[P]:
    """Make a pass known to :class:`Pipeline` by its name."""
    _REGISTRY[cls.name] = cls
    return cls


def build(cls: type[P], **options: Any) -> P:
    """``cls(**options)``, with every complaint of pydantic's in one :class:`~graphir.errors.PassError`. The remedy of
    an error of graphir's that a validator raises is kept.

    Sequences become tuples, so that lists, ranges and the text of a pipeline give equal passes; a string is refused
    where several names are meant.
    """
    try:
        return cls(**{name: _frozen(value) for name, value in options.items()})
    except RecursionError:
        raise PassError(f"{cls.name}: an option contains itself", fix="give lists of names and numbers") from None
    except GraphirError as e:  # of a validator that knows of no fields
        raise PassError(f"{cls.name}: {e.what}", at=e.at, where=e.where, fix=e.fix) from None
    except ValidationError as e:
        known = f"options of {cls.name}: {', '.join(cls.model_fields) or 'none'}"
        found, fixes = [], dict[str, None]()
        for complaint in e.errors():
            field = ".".join(str(part) for part in complaint["loc"] if part != "[key]") or "options"
            refusal = complaint.get("ctx", {}).get("error")
            if isinstance(refusal, OptionError):
                what, fix = refusal.what, refusal.fix
            else:
                what, fix = _complaint(complaint["type"], complaint["msg"], complaint["input"]), ""
            found.append(f"{field}: {what}")
            fixes[fix or known] = None
        raise PassError(f"{cls.name}: {'; '.join(found)}", fix="; ".join(fixes)) from None


_EXPECTED: Final[Mapping[str, str]] = {
    "tuple_type": "a list",
    "dict_type": "a dict",
    "int_type": "a whole number",
    "bool_type": "True or False",
    "string_type": "text",
}
"""What pydantic's types of errors expect, in words."""


def _complaint(type_: str, message: str, given: object) -> str:
    if type_ in _EXPECTED:
        return f"expected {_EXPECTED[type_]}, not {given!r:.40}"
    return {"missing": "not given", "extra_forbidden": "no such option"}.get(
        type_, message.removeprefix("Value error, ")
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, BaseModel)) and not callable(value):
        return tuple(map(_frozen, value))
    return value


def require_program(program: object, what: str) -> None:
    """Refuse what is not a program, before anything else complains about it.

    Raises:
        PassError: it is something else.
    """
    if not isinstance(program, Program):
        kind = type(program).__name__
        planned = kind == "Plan" or hasattr(program, "plan")  # a session, or a compiled step
        fix = "give the program that the plan was emitted from" if planned else "graphir.capture makes one"
        raise PassError(f"{what} takes a Program, not {kind}", fix=fix)


class Timing(NamedTuple):
    """Seconds that a pass took, and that the verification of its result took."""

    name: str
    seconds: float
    verify_seconds: float


class Run(NamedTuple):
    """What :meth:`Pipeline.run` returns: the last pass's program, and each pass's time."""

    program: Program
    timings: tuple[Timing, ...]


class Pipeline:
    """Passes run one after the other.

    Args:
        passes: their text, such as ``replicate{devices=[0, 1]} | inject_copies``, or the passes themselves. Empty text
            is a pipeline of no passes.

    Raises:
        ParseError: the text is not a pipeline.
        PassError: it names an unknown pass or option.
    """

    def __init__(self, passes: str | Iterable[Pass]) -> None:
        if isinstance(passes, str):
            passes = parse_pipeline(passes)
        self.passes: tuple[Pass, ...] = tuple(passes) if isinstance(passes, Iterable) else ()
        if not isinstance(passes, Iterable) or not all(isinstance(step, Pass) for step in self.passes):
            raise PassError("a pipeline is made of passes", fix="give their text, or passes such as InjectCopies()")

    def __call__(self, program: Program) -> Program:
        """Run every pass and return the last one's program."""
        return self.run(program).program

    def run(self, program: Program) -> Run:
        """Run every pass and time it."""
        require_program(program, "a pipeline")
        timings = []
        for step in self.passes:
            start = time.perf_counter()
            program = step.recorded(program)
            made = time.perf_counter()
            verify(program, placed=False)
            timings.append(Timing(step.name, made - start, time.perf_counter() - made))
        return Run(program, tuple(timings))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __str__(self) -> str:
        return " | ".join(map(str, self.passes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(str(self))


def parse_pipeline(text: str) -> tuple[Pass, ...]:
    """Read what ``str(pipeline)`` prints; empty text is a pipeline of no passes.

    Raises:
        ParseError: the text is not a pipeline.
        PassError: it names an unknown pass or option.
    """
    if not text.strip():  # balance chooses no pass where nothing has to move
        return ()
    return tuple(_built(name, options) for name, options in parse_passes(text))


def _built(name: str, options: Mapping[str, object]) -> Pass:
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY))
        raise PassError(f"unknown pass {name!r}{nearest(name, _REGISTRY)}", fix=f"passes: {known}")
    return build(_REGISTRY[name], **options)
