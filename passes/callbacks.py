"""Replication callbacks: what is called for every copy of every module of a replicated program.

This is the callback of jactorch's ``DataParallelWithCallback`` (Jiayuan Mao, Synchronized-BatchNorm-PyTorch): for each
copy, the modules in the order of ``modules()``, containers included, the master copy (0) of all modules before any
other copy of one. The copies of a module share a context, and nothing else does::

    copy 0:   f(ctx of "", 0, …)   f(ctx of "conv", 0, …)   f(ctx of "bn", 0, …)
    copy 1:   f(ctx of "", 1, …)   f(ctx of "conv", 1, …)   f(ctx of "bn", 1, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator
from torch import nn

from graphir.errors import GraphirError, PassError
from graphir.ir.program import Program
from graphir.replication import HOOKS, OWN_CALLBACK, CallbackContext

from .base import OptionError
from .edits import StepEdits
from .replica import CopiedOperators, Replica

__all__ = [
    "Callback",
    "Named",
    "OnReplica",
    "copies_of",
    "defines_callback",
    "visit",
    "with_callbacks",
]

Callback: TypeAlias = Callable[[Any, int, Replica], object]
"""``f(ctx, copy_id, replica)``."""


class Named(str):
    """A callable as a program's history has it: its module and name.

    Attributes:
        function: the callable; None where only its name is known, as from the text of a history.
    """

    __slots__ = ("function",)

    function: Callback | None

    @staticmethod
    def of(given: object) -> Named:
        """The name of a callable, or a text as the name of one that is not there."""
        if isinstance(given, Named):
            return given
        named = Named(given if isinstance(given, str) else _name_of(given))
        named.function = None if isinstance(given, str) else given  # type: ignore[assignment]  # _name_of looked
        return named

    def required(self, by: str) -> Callback:
        """The callable.

        Raises:
            PassError: it is not there.
        """
        if self.function is None:
            raise PassError(
                f"{by} was run with the callable {self!s}, and a text holds its name alone",
                fix=f"run it from Python: passes.{by}(…, {'on_replica=' if by == 'replicate' else ''}"
                f"{self.rpartition('.')[2]})",
            )
        return self.function


def _name_of(given: object) -> str:
    if not callable(given):
        raise OptionError(f"{given!r:.40} is no callback", fix="give a callable f(ctx, copy_id, replica)")
    at = given if hasattr(given, "__qualname__") else type(given)
    return f"{getattr(at, '__module__', None) or ''}.{at.__qualname__}".lstrip(".")


OnReplica: TypeAlias = Annotated[Any, BeforeValidator(lambda given: None if given is None else Named.of(given))]
"""An option that is a callback; the history names it."""


def defines_callback(module: nn.Module | None) -> bool:
    """Whether a module of the model asks to be called for each of its copies."""
    return module is not None and any(hasattr(inner, OWN_CALLBACK) for inner in module.modules())


def with_callbacks(program: Program, function: Callback | None, by: str, *, own: bool) -> Program:
    """The program as callbacks leave it.

    Args:
        program: replicated.
        function: is called for each copy of each module; None: none is.
        by: the pass that calls.
        own: call the modules that define a callback themselves, too, each before *function*.

    Raises:
        PassError: the program is not replicated, has no module, or a callback raises; nothing has changed then.
    """
    if program.module is None:
        raise PassError(
            f"program {program.name!r} has no module to call {by} for: it was loaded from a file, or copied",
            fix="capture the model in this process, and run the passes on that program",
        )
    trees = copies_of(program)

    def each(ctx: object, copy_id: int, replica: Replica) -> None:
        if own and hasattr(replica.module, OWN_CALLBACK):
            with _blamed(OWN_CALLBACK, replica.path, copy_id):
                getattr(replica.module, OWN_CALLBACK)(ctx, copy_id)
        if function is not None:
            with _blamed(_name_of(function), replica.path, copy_id):
                function(ctx, copy_id, replica)
                replica.close()

    paths = [path for path, _ in program.module.named_modules()]
    edited = visit(program, paths, each, by, [dict(tree.named_modules()) for tree in trees])
    return edited.with_(module_copies=tuple(trees))


def visit(
    program: Program,
    paths: Sequence[str],
    function: Callback,
    by: str,
    modules: Sequence[Mapping[str, nn.Module]] = (),
) -> Program:
    """Call *function* for each copy of each module, and give the program that its edits make.

    Args:
        program: replicated.
        paths: of the modules, in the order in which they are called.
        function: see there.
        by: the pass that edits.
        modules: for each copy its modules, by path; none where there are none.
    """
    if program.step.dialect.workspace:
        raise PassError(
            f"the operators of {program.name!r} do not say which module they came from", fix="capture the model"
        )
    edits, operators = StepEdits(program, by), CopiedOperators(program)
    contexts = {path: CallbackContext() for path in paths}
    for copy_id in range(len(program.replicas)):
        for path in paths:
            module = modules[copy_id][path] if modules else None
            function(contexts[path], copy_id, Replica(edits, operators, path, copy_id, module))
    step = edits.finished()
    return program.with_(step=step) if edits.changed else program


@contextmanager
def _blamed(name: str, path: str, copy_id: int) -> Iterator[None]:
    """What a callback raises says for which module and copy."""
    where = f"module {path!r}, copy {copy_id}"
    try:
        yield
    except GraphirError as e:
        raise PassError(f"callback {name}: {e.what}", at=e.at, where=where, fix=e.fix) from e
    except Exception as e:
        raise PassError(
            f"callback {name} raised {type(e).__name__}: {e}",
            where=where,
            fix="nothing was replicated; mend the callback",
        ) from e


def copies_of(program: Program) -> list[nn.Module]:
    """A shallow copy of the model for each replica: of the copies that earlier callbacks left, where there are any.

    A module of a copy has the parameters, buffers and attributes of the model's, and keeps what is set on it.
    """
    assert program.module is not None
    return [_shallow(model) for model in program.module_copies or (program.module,) * len(program.replicas)]


def _shallow(model: nn.Module) -> nn.Module:
    copies: dict[int, nn.Module] = {}
    for module in model.modules():
        made = copies[id(module)] = module.__new__(type(module))
        made.__dict__.update(module.__dict__)
        made.__dict__.update({name: hooks.copy() for name, hooks in vars(module).items() if name in HOOKS})
        for name in ("_parameters", "_buffers", "_modules"):
            made.__dict__[name] = dict(module.__dict__[name])
    for made in copies.values():
        for name, child in made._modules.items():
            made._modules[name] = None if child is None else copies[id(child)]
    return copies[id(model)]
