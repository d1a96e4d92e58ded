"""The structure of a step's arguments and results: nested containers around leaves.

It is stored as ``torch.utils._pytree``'s JSON text. Tuples, lists and dictionaries are handled here, dictionaries by
key in any order; types that the user registered with torch are left to torch, which finds them by the names under which
they were registered. Texts that would make torch import a module are refused: a file is only data.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from torch.utils import _pytree

from graphir.errors import SessionError

__all__ = ["Node", "flatten", "paths", "read_structure", "unflatten"]

_CONTAINERS: Final[dict[str, type[Any]]] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
}
_DEEPEST: Final = 100


class Node(NamedTuple):
    """One node of a structure.

    Attributes:
        type: the container; None for a leaf, or where *spec* is set.
        keys: of a dictionary, in order; positions otherwise.
        children: one for each key.
        spec: torch's own structure of this subtree, where the container is a registered type.
    """

    type: type[Any] | None
    keys: tuple[Any, ...] = ()
    children: tuple[Node, ...] = ()
    spec: _pytree.TreeSpec | None = None

    @property
    def is_leaf(self) -> bool:
        return self.type is None and self.spec is None


def read_structure(text: str) -> Node:
    """The structure that ``_pytree.treespec_dumps`` wrote.

    Raises:
        SessionError: the text is no such structure, or one that only code could rebuild.
    """
    try:
        protocol, root = json.loads(text)
        return _node(protocol, root, 0)
    except (ValueError, KeyError, TypeError, RecursionError, NotImplementedError) as e:
        raise SessionError(f"a step's argument structure cannot be read: {e}", fix="capture the program again") from e


def _node(protocol: int, found: Any, depth: int) -> Node:
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    name = found["type"]
    if name is None:
        return Node(None)
    children = tuple([_node(protocol, child, depth + 1) for child in found["children_spec"]])
    if name in _CONTAINERS:
        container = _CONTAINERS[name]
        keys = json.loads(found["context"]) if issubclass(container, dict) else range(len(children))
        if len(keys) != len(children):
            raise ValueError("a dictionary has other keys than entries")
        return Node(container, tuple(keys), children)
    if _imports(found):
        raise ValueError(f"containers of type {name!r} are not supported")
    spec = _pytree.treespec_loads(json.dumps([protocol, found]))
    return Node(None, tuple(range(spec.num_leaves)), (Node(None),) * spec.num_leaves, spec)


def _imports(found: Any) -> bool:
    """Whether torch would import what the text names: enumerations, and default factories of dictionaries."""
    if isinstance(found, dict):
        if "__enum__" in found or found.get("type") == "collections.defaultdict":
            return True
        return any(map(_imports, [*found.values(), _nested(found.get("context"))]))
    return isinstance(found, list) and any(map(_imports, found))


def _nested(context: Any) -> Any:
    """A context that is JSON again; None where it is a plain word."""
    try:
        return json.loads(context)
    except (TypeError, ValueError):
        return None


def paths(node: Node, path: str) -> Iterator[str]:
    """What messages call each leaf."""
    if node.is_leaf:
        yield path
    for key, child in zip(node.keys, node.children, strict=True):
        yield from paths(child, f"{path}[{key!r}]")


def flatten(node: Node, value: Any, path: str) -> Iterator[Any]:
    """The leaves of *value*, which has to have the structure *node*.

    Raises:
        SessionError: it has another one; *path* says where.
    """
    if node.is_leaf:
        yield value
    elif node.spec is not None:
        leaves, spec = _pytree.tree_flatten(value)
        if spec != node.spec:
            raise _misfit(f"{path} has the structure {spec}", node.spec)
        yield from leaves
    else:
        for key, child, entry in zip(node.keys, node.children, _entries(node, value, path), strict=True):
            yield from flatten(child, entry, f"{path}[{key!r}]")


def _misfit(given: str, taken: object) -> SessionError:
    return SessionError(f"{given}, the program takes {taken}", fix="give it in the structure that was captured")


def _entries(node: Node, value: Any, path: str) -> Sequence[Any]:
    assert node.type is not None
    if type(value) is not node.type:
        raise _misfit(f"{path} is of type {type(value).__name__}", f"a {node.type.__name__}")
    if isinstance(value, dict):
        if value.keys() != set(node.keys):
            raise _misfit(f"{path} has the keys {list(value)}", list(node.keys))
        return [value[key] for key in node.keys]
    if len(value) != len(node.keys):
        raise _misfit(f"{path} has {len(value)} entries", len(node.keys))
    entries: Sequence[Any] = value
    return entries


def unflatten(node: Node, leaves: Iterator[Any]) -> Any:
    """The value with this structure and these leaves."""
    if node.is_leaf:
        return next(leaves)
    if node.spec is not None:
        return _pytree.tree_unflatten([next(leaves) for _ in node.keys], node.spec)
    entries = [unflatten(child, leaves) for child in node.children]
    assert node.type is not None
    return node.type(zip(node.keys, entries, strict=True)) if issubclass(node.type, dict) else node.type(entries)
