"""A forward that runs once more in a backward: for gradients of gradients, or of some outputs only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, TypeGuard

import torch
from torch import Tensor

from ..capturing.isolate.modes import Modes
from ..facade.plan_cache import ModuleGuard
from .errors import ReplicationRuntimeError

__all__ = ["Earlier", "is_plain", "requiring_gradients"]

_VERSION: Final = attrgetter("_version")


class Earlier:
    """A module as it was in a call.

    Args:
        module: whose modes are those of the call.
        guard: of the module that was captured.
        overwritten: its tensors that a call overwrites.
        kept: its other tensors that a call reads.
        what: runs once more, for messages.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        guard: ModuleGuard,
        overwritten: Sequence[Tensor],
        kept: Sequence[Tensor],
        what: str,
    ) -> None:
        self._module, self._guard, self._modes = module, guard, Modes(module)
        self._overwritten, self._kept, self._what = overwritten, kept, what

    def versions(self) -> list[int]:
        """The versions of the tensors that a call reads, as they are now."""
        return list(map(_VERSION, self._kept))

    @contextlib.contextmanager
    def again(self, versions: Sequence[int], before: Sequence[Tensor]) -> Iterator[None]:
        """While this is active, the module has the modes and buffers that it had in a call.

        Args:
            versions: what :meth:`versions` was in the call.
            before: what the overwritten tensors were.

        Raises:
            ReplicationRuntimeError: something else of the module is not what it was.
        """
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        with self._modes.held():
            if self.versions() != versions:
                raise self._changed(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "a parameter or buffer that is read once more"
                )
            self.require()
            try:
                for tensor, value in zip(self._overwritten, before, strict=True):
                    tensor.data.copy_(value)
                yield
            finally:
                for buffer, value in buffers:
                    buffer.data.copy_(value)  # which no version counts: the graph may have kept the buffer

    def require(self) -> None:
        """Raise if the module is not what it was.

        Raises:
            ReplicationRuntimeError: it is not.
        """
        if not self._guard.holds():
            raise self._changed("the module's attributes, parameters or buffers are other ones than in the forward")

    def _changed(self, what: str) -> ReplicationRuntimeError:
        return ReplicationRuntimeError(
            what,
            where=f"a backward that runs {self._what} once more: for gradients of gradients, or of some outputs only",
            fix="change the module after the backward",
        )


@contextlib.contextmanager
def requiring_gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Let tensors require a gradient that did in the forward and were frozen since, as autograd's graph of it does."""
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    try:
        for tensor in frozen:
            tensor.requires_grad_()
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def is_plain(grad: Tensor | None) -> TypeGuard[Tensor]:
    """Whether a plan can be given it: no batch of gradients, as ``is_grads_batched`` makes them."""
    batched = torch._C._functorch.is_legacy_batchedtensor
    return type(grad) is Tensor and grad.layout == torch.strided and not (batched(grad) or _is_wrapped(grad))


_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
