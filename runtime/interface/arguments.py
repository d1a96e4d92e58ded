"""A step's arguments as the leaves of the captured structure, each with a name for messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphir.errors import SessionError, counted
from graphir.ir.program import Slot
from graphir.ir.structure import flatten, paths, read_structure

__all__ = ["Arguments"]


class Arguments:
    """The captured structure of ``(args, kwargs)``.

    Attributes:
        names: for each leaf, what messages call it: ``argument 0 ('x')``, ``argument 'mask'['a']``.
    """

    def __init__(self, structure: str, feeds: Sequence[Slot]) -> None:
        root = read_structure(structure)
        if root.type is not tuple or [child.type for child in root.children] != [tuple, dict]:
            raise SessionError("a step's argument structure is not (args, kwargs)", fix="capture the program again")
        self.positional = root.children[0].children
        if not all(isinstance(name, str) for name in root.children[1].keys):
            raise SessionError("a keyword argument's name is no text", fix="capture the program again")
        self.keyword = dict(zip(root.children[1].keys, root.children[1].children, strict=True))
        found = [path for i, node in enumerate(self.positional) for path in paths(node, f"argument {i}")]
        found += [path for name, node in self.keyword.items() for path in paths(node, f"argument {name!r}")]
        if len(found) != len(feeds):
            raise SessionError(
                f"a step's argument structure has {len(found)} leaves, the program {counted(len(feeds), 'feed')}",
                fix="capture the program again",
            )
        self.names = tuple([f"{p} ({feed.blob!r})" if feed.blob else p for p, feed in zip(found, feeds, strict=True)])
        self.flat = not self.keyword and all(node.is_leaf for node in self.positional)

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """The leaves of a call's arguments, in the captured order; dictionaries match by key.

        Raises:
            SessionError: the structure is another one; the argument is named.
        """
        if len(args) != len(self.positional) or kwargs.keys() != self.keyword.keys():
            raise self.miscounted(args, kwargs)
        if self.flat:
            return args
        found: list[Any] = []
        for i, (node, value) in enumerate(zip(self.positional, args, strict=True)):
            found.extend(flatten(node, value, f"argument {i}"))
        for name, node in self.keyword.items():
            found.extend(flatten(node, kwargs[name], f"argument {name!r}"))
        return found

    def miscounted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> SessionError:
        takes = counted(len(self.positional), "positional argument")
        if self.keyword:
            takes += f" and {', '.join(map(repr, self.keyword))}"
        given = f"{len(args)}" + (f" and {', '.join(map(repr, kwargs))}" if kwargs else "")
        return SessionError(
            f"a step takes {takes}, {given} given",
            fix=f"inputs, then targets, then keywords: {', '.join(self.names)}",
        )
