"""The program of one kind of call of a placed model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capturing.witness import StepWitness
from ...errors import CaptureError
from ...ir.program import Program
from ...parallel.containers import Containers
from .call import PlacedCall
from .eager import LIBRARIES, EagerParts

__all__ = ["PlacedOutput", "each_once", "programs_of"]


class PlacedOutput:
    """What a model returns, taken apart to its leaves, and put together of others."""

    def __init__(self) -> None:
        self._containers, self._spec = Containers(), pytree.tree_structure(None)

    def leaves(self, output: Any) -> list[Any]:
        """The leaves of an output."""
        leaves, self._spec = pytree.tree_flatten(self._containers.opened(output))
        return leaves

    def whole(self, leaves: Sequence[Any]) -> Any:
        """An output with these leaves, of the structure that :meth:`leaves` gave."""
        return self._containers.closed(pytree.tree_unflatten(leaves, self._spec))


def programs_of(
    parts: EagerParts,
    options: Mapping[str, Any],
    call: PlacedCall,
    wanted: tuple[int, ...] | None,
    shape: PlacedOutput,
) -> tuple[Program, Program]:
    """The program of a call, which returns the leaves of a *shape*; and the program whose backward takes the
    gradients of all outputs that need one."""
    leaves = {id(leaf): _leaf(leaf) for leaf in call.leaves if isinstance(leaf, Tensor)}  # one tensor stays one
    args, kwargs = pytree.tree_map_only(Tensor, lambda given: leaves[id(given)], (call.args, call.kwargs))
    made = partial(parts.captured, args, kwargs=kwargs, output=shape.leaves, **options)
    graded = torch.is_grad_enabled() and (bool(call.graded) or any(p.requires_grad for p in parts.model.parameters()))
    if not graded:
        _refuse_attributes(program := made(), options)
        return program, program
    try:
        program = made(backward=True)
    except CaptureError as e:
        if not e.what.startswith("no output of the model needs a gradient"):
            raise
        return (program := made()), program
    _refuse_attributes(program, options)
    needing = each_once(program)
    if wanted is None:
        # Whoever asks a model for its loss calls backward on the loss alone.
        wanted = tuple([i for i in needing if _is_scalar(program, i)]) or needing
    same = wanted == program.interface.differentiable
    return (program if same else made(backward=wanted)), program


def _refuse_attributes(program: Program, options: Mapping[str, Any]) -> None:
    """Refuse a model whose forward leaves something on it that its user may read: the plans would not."""
    assert isinstance(program.witness, StepWitness)  # it was captured here
    computed = set(_computed_before(program.module))
    for name in program.witness.changed:
        if isinstance(name, str) and not (
            name in options["allow_changes"] or name in computed or _is_of_library(program.module, name)
        ):
            raise CaptureError(
                f"forward leaves {name!r} on the model, which a plan would not do",
                fix=f"return it, or pass allow_changes=({name!r},) if nobody reads it",
            )


def _is_of_library(model: torch.nn.Module | None, name: str) -> bool:
    """Whether an attribute is a note that a library's own module makes for itself."""
    path, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(path) if model is not None else None
    of_library = type(module).__module__.partition(".")[0] in LIBRARIES
    return of_library and own.startswith("_") and not isinstance(getattr(module, own, None), Tensor)


def _computed_before(model: torch.nn.Module | None) -> Iterator[str]:
    """The attributes that torch's weight norm and spectral norm compute before each forward of a module."""
    for path, module in model.named_modules() if model is not None else ():
        for hook in module._forward_pre_hooks.values():
            if type(hook).__module__.startswith("torch.nn.utils.") and hasattr(hook, "name"):
                yield f"{path}.{hook.name}" if path else str(hook.name)


def each_once(program: Program) -> tuple[int, ...]:
    """The positions of the outputs that need a gradient; of those that are one tensor, the first."""
    first: dict[str | None, int] = {}
    for position in program.interface.differentiable:
        first.setdefault(program.interface.fetches[position].blob, position)
    return tuple(first.values())


def _is_scalar(program: Program, position: int) -> bool:
    blob = program.interface.fetches[position].blob
    return blob is not None and program.step.blobs[blob].shape == ()


def _leaf(given: Tensor) -> Tensor:
    """A tensor without history."""
    return given.detach().requires_grad_(given.requires_grad)
