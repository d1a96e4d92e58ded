"""The modules of the repository as syntax trees, under the names by which they are imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = {"graphir": "graphir", "passes": "graphir.passes", "runtime": "graphir.runtime"}
"""Each folder and the package that it installs as."""

_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
"""What may hold an import."""


class Import(NamedTuple):
    """One imported thing.

    Attributes:
        module: its absolute name.
        name: what is taken from it, if anything.
        level: how many dots are written.
        line: where.
        within: the function whose call imports it, such as ``Plan.save``; ``TYPE_CHECKING`` where only types need it;
            empty where the module itself imports it.
    """

    module: str
    name: str
    level: int
    line: int
    within: str = ""


class Source:
    """A module's file.

    Attributes:
        path: from the root of the repository.
        folder: its top-level folder.
        module: its importable name; of a test, its path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        self.folder = self.path.parts[0]
        self.is_package = path.name == "__init__.py"
        inner = self.path.with_suffix("").parts[1:]
        self.module = ".".join((FOLDERS.get(self.folder, self.folder), *(inner[:-1] if self.is_package else inner)))

    def __str__(self) -> str:
        return self.path.as_posix()

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """Takes long for all files: rules that few files can break look into :attr:`text` first."""
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever in the file it stands."""
        return tuple(self._imports(self.tree, "", ""))

    def _imports(self, node: ast.AST, name: str, within: str) -> Iterator[Import]:
        """The imports below *node*: *name* is that of the class or function around them."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", 0, node.lineno, within)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = self.module.split(".")
                base = base[: len(base) - node.level + self.is_package]
                module = ".".join([*base, *([module] if module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node.level, node.lineno, within)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{name}.{node.name}".lstrip(".")
            within = within if isinstance(node, ast.ClassDef) else name
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            within = within or "TYPE_CHECKING"
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _STATEMENTS):  # no expression imports
                yield from self._imports(child, name, within)


@cache
def sources(folder: str) -> tuple[Source, ...]:
    """Every module under *folder*, by path; each is parsed once."""
    return tuple([Source(path) for path in sorted((ROOT / folder).rglob("*.py"))])
