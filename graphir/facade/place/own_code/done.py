"""What modules' own code has done in a plan that has failed since: the model's own code goes on from there.

Code may have changed what no plan knows of: it runs once, whatever comes behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .call import OwnCall
from .hooks import unhooked
from .trial import leaves_beyond

__all__ = ["Done"]


class Done:
    """A call of a module's own code.

    Args:
        call: its kind.
        known: the operands as the code had them.

    Attributes:
        error: what it has raised; or why the call is no operator, which only its effects show.
    """

    def __init__(self, call: OwnCall, known: Sequence[Tensor]) -> None:
        self.call, self._graded = call, [known[i] for i in call.graded]
        self._output: Any = None
        self._known = known
        self._overwritten: Mapping[int, Tensor] = {}
        self.error: Exception | None = None

    def returned(self, output: Any) -> None:
        """Note what the code has returned."""
        self._output = output

    def overwrote(self, arguments: Mapping[int, Tensor]) -> None:
        """Note what the code has made of arguments, by position."""
        self._overwritten = arguments

    def again(self, call: OwnCall, operands: Sequence[Tensor]) -> Any:
        """What the code has returned, as the result of a call with these operands.

        Raises:
            Exception: that of the code.
            RuntimeError: the call is of another kind.
        """
        if self.error is not None:
            raise self.error
        if call.loose != self.call.loose:
            raise RuntimeError("a placed model cannot go on behind a module's own code, which is called in another way")
        with torch.no_grad():
            for i, made in self._overwritten.items():
                operands[i].copy_(made)
        leaves, spec = pytree.tree_flatten(self._output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = leaves_beyond(tensors, self._known)  # at some numbers the code reads more than its own tensors
        self._graded += others
        found = iter(_Continued.apply(self, tensors, len(operands), *operands, *others))  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten([next(found) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def gradients(self, outputs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of the operands that need one, and of the other tensors that the code has read."""
        with torch.enable_grad(), unhooked(self._graded, outputs):
            return torch.autograd.grad(outputs, self._graded, grads, allow_unused=True, retain_graph=True)


class _Continued(torch.autograd.Function):
    """The node of a call that has run: its graph goes on behind it."""

    @staticmethod
    def forward(ctx: Any, done: Done, tensors: Sequence[Tensor], count: int, *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.done, ctx.tensors = done, tensors
        ctx.places = [*done.call.graded, *range(count, len(operands))]
        ctx.count = len(operands)
        ctx.set_materialize_grads(False)
        made = tuple([tensor.detach() for tensor in tensors])
        ctx.mark_non_differentiable(*[t for t, tensor in zip(made, tensors, strict=True) if not tensor.requires_grad])
        return made

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = [(tensor, grad) for tensor, grad in zip(ctx.tensors, grads, strict=True) if grad is not None]
        found: list[Tensor | None] = [None] * ctx.count
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            for i, gradient in zip(ctx.places, ctx.done.gradients(outputs, given), strict=True):
                found[i] = gradient
        return (None, None, None, *found)
