"""The modules of the repository as syntax trees, under the names by which they are imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOLDERS = {"graphir": "graphir", "passes": "graphir.passes", "runtime": "graphir.runtime"}
"""Each folder and the package that it installs as."""


class Import(NamedTuple):
    """One imported thing: the absolute name of the module, the name taken from it (if any), and dots written."""

    module: str
    name: str
    level: int
    line: int


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
    def tree(self) -> ast.Module:
        return ast.parse((ROOT / self.path).read_text(encoding="utf-8"))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Every import, wherever in the file it stands."""
        return tuple(self._imports())

    def _imports(self) -> Iterator[Import]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, "", 0, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    base = self.module.split(".")
                    base = base[: len(base) - node.level + self.is_package]
                    module = ".".join([*base, *([module] if module else [])])
                for alias in node.names:
                    yield Import(module, alias.name, node.level, node.lineno)


def sources(folder: str) -> list[Source]:
    """Every module under *folder*, by path."""
    return [Source(path) for path in sorted((ROOT / folder).rglob("*.py"))]
