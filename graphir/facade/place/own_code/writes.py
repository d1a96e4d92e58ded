"""What refuses to overwrite memory that code is given, before a number there changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["WritesRefused", "storages"]


def storages(tensors: Iterable[torch.Tensor]) -> set[int]:
    """The memory of tensors: what tells a storage from others that are alive."""
    return {t.untyped_storage()._cdata for t in tensors if t.layout == torch.strided}


class WritesRefused(TorchDispatchMode):
    """While this is active, no operator writes into so many tensors, also through ``.data``, under ``no_grad``, or
    where only some numbers bring the write about.

    Args:
        tensors: themselves.
    """

    supports_higher_order_operators = True

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = storages(tensors)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for at in _written(func):
            written = args[at[0]] if at[0] < len(args) else kwargs.get(at[1])
            if not self._given.isdisjoint(
                storages(t for t in pytree.tree_leaves(written) if isinstance(t, torch.Tensor))
            ):
                raise RuntimeError("it overwrites an argument, a parameter, a buffer, or another tensor of its own")
        return func(*args, **kwargs)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the operands that an operator overwrites."""
    schema = getattr(func, "_schema", None)
    arguments = enumerate(schema.arguments) if schema is not None else ()
    return tuple([(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write])
