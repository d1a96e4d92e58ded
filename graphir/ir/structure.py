"""The structure of a step's arguments and results: nested containers around leaves.

It is stored as ``torch.utils._pytree``'s JSON text, and this is its one reader: torch's own imports the modules that a
text names. Tuples, lists and dictionaries are handled here, dictionaries by key in any order; types that the user
registered with torch are found by the names under which they were registered, and torch takes them apart. What is read
is data: no text names a module, an enumeration or a function.
"""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import Any, Final, NamedTuple

from torch.utils import _pytree

from ..errors import SessionError

__all__ = ["Node", "flatten", "names", "paths", "read_structure", "tree_spec", "unflatten"]

_PROTOCOL: Final = 1
_CONTAINERS: Final[dict[str, type[Any]]] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
}
_NEVER: Final = frozenset({"collections.defaultdict", _pytree.NO_SERIALIZED_TYPE_NAME_FOUND})
"""Names under which torch has types that no text describes: of a factory's module, or of several types at once."""
_DEEPEST: Final = 100
_LEAF: Final = _pytree.tree_structure(0)


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
        if type(protocol) is not int or protocol != _PROTOCOL:
            raise ValueError(f"{protocol!r} is not the form in which it is written, which is {_PROTOCOL}")
        return _node(root, 0)
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise SessionError(f"a step's argument structure cannot be read: {e}", fix="capture the program again") from e


def tree_spec(node: Node) -> _pytree.TreeSpec:
    """A structure as torch has it."""
    if node.spec is not None:
        return node.spec
    if node.type is None:
        return _LEAF
    context = list(node.keys) if issubclass(node.type, dict) else None
    return _pytree.TreeSpec(node.type, context, [tree_spec(child) for child in node.children])


def _node(found: Any, depth: int) -> Node:
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    name = found["type"]
    if name is None:
        return Node(None)
    if not isinstance(name, str) or not isinstance(found["children_spec"], list):
        raise ValueError("a container has a name and a list of children")
    children = tuple([_node(child, depth + 1) for child in found["children_spec"]])
    if name in _CONTAINERS:
        container = _CONTAINERS[name]
        keys = _keys(found["context"]) if issubclass(container, dict) else range(len(children))
        if len(keys) != len(children):
            raise ValueError("a dictionary has other keys than entries")
        return Node(container, tuple(keys), children)
    registered = None if name in _NEVER else _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if registered is None or _names_code(found["context"], 0):
        raise ValueError(f"containers of type {name!r} are not supported")
    context = _context(registered, found["context"])
    spec = _pytree.TreeSpec(registered, context, [tree_spec(child) for child in children])
    return Node(None, tuple(range(spec.num_leaves)), (Node(None),) * spec.num_leaves, spec)


def _keys(context: Any) -> Sequence[Any]:
    """The keys of a dictionary: words and numbers, as JSON has them."""
    keys = json.loads(context)
    if not isinstance(keys, list) or not all(isinstance(key, (str, int, float, NoneType)) for key in keys):
        raise ValueError("keys of dictionaries are strings, numbers, true, false and null")
    if len(set(keys)) != len(keys):
        raise ValueError("a dictionary has a key twice")
    return keys


def _context(registered: Any, written: Any) -> Any:
    """What torch keeps of a container of a registered type beside its children."""
    read = _pytree.SUPPORTED_SERIALIZED_TYPES[registered].from_dumpable_context
    if registered is namedtuple or (registered in _pytree.SUPPORTED_NODES and _is_namedtuple(registered)):
        named = _pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(written) if isinstance(written, str) else None
        if not _is_namedtuple(named):
            raise ValueError(f"{written!r} is no named tuple that was registered")
        return named
    if read is None:
        return json.loads(written)
    if read.__module__.partition(".")[0] == "torch":  # such as that of defaultdict, which imports
        raise ValueError(f"containers of type {registered.__name__!r} are not supported")
    return read(written)


def _is_namedtuple(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, tuple) and hasattr(type_, "_fields")


def _names_code(found: Any, depth: int) -> bool:
    """Whether a context, or JSON within it, names an enumeration's class, as torch writes them."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(found, dict):
        return "__enum__" in found or any(_names_code(item, depth + 1) for item in found.values())
    if isinstance(found, list):
        return any(_names_code(item, depth + 1) for item in found)
    return isinstance(found, str) and _names_code(_json(found), depth + 1)


def _json(text: str) -> Any:
    """What a text says as JSON; None where it is a plain word."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def names(node: Node, name: str = "") -> Iterator[str]:
    """The keys that lead to each leaf: ``loss``, ``pair.0``."""
    if node.is_leaf:
        yield name
    for key, child in zip(node.keys, node.children, strict=True):
        yield from names(child, f"{name}.{key}" if name else str(key))


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
        taken = [next(leaves) for _ in node.keys]
        try:
            return _pytree.tree_unflatten(taken, node.spec)
        except Exception as e:  # of the user's function, for a context that it has not written
            raise SessionError(f"{node.spec} cannot be rebuilt: {e}", fix="capture the program again") from e
    entries = [unflatten(child, leaves) for child in node.children]
    assert node.type is not None
    return node.type(zip(node.keys, entries, strict=True)) if issubclass(node.type, dict) else node.type(entries)
