"""Nested arguments and results: names for their leaves, and their structure as a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import CaptureError

__all__ = ["named_leaves", "tuple_of", "written_structure"]


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Each leaf of *value* under *name* and the keys that lead to it: ``batch.image``, ``pair.0``.

    Raises:
        CaptureError: *value* contains itself.
    """
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    try:
        leaves = pytree.tree_flatten_with_path(value)[0]
    except RecursionError:
        raise CaptureError(
            f"{name!r} is nested too deep; a container may contain itself",
            fix="pass tensors in tuples, lists and dicts that do not contain themselves",
        ) from None
    except ValueError:  # a registered class that gives no keys: positions
        yield from ((f"{name}.{i}", leaf) for i, leaf in enumerate(pytree.tree_leaves(value)))
        return
    for keys, leaf in leaves:
        yield ".".join([name, *map(_text, keys)]), leaf


def _text(key: Any) -> str:
    return str(next(getattr(key, field) for field in ("key", "idx", "name") if hasattr(key, field)))


def tuple_of(parts: Iterable[pytree.TreeSpec]) -> pytree.TreeSpec:
    """The structure of a tuple of values that have these structures.

    Structures are combined, not values with None or numbers in the place of tensors: a container that is rebuilt from
    placeholders may have other leaves, as a cache of transformers does.
    """
    return pytree.TreeSpec(tuple, None, list(parts))


def written_structure(spec: pytree.TreeSpec, what: str) -> str:
    """A structure as JSON.

    Raises:
        CaptureError: JSON has no form for the structure of *what*.
    """
    try:
        return pytree.treespec_dumps(spec)
    except Exception as e:
        raise CaptureError(
            f"the structure of {what} can't be serialized: {e}",
            fix="use tuples, lists and dicts, or register the class with a serialized_type_name "
            "(torch.export.register_dataclass, torch.utils._pytree.register_pytree_node)",
        ) from e
