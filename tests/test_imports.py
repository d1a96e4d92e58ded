"""Which way imports go: ``graphir`` at the bottom, ``passes`` and ``runtime`` side by side on it, facades on top.

Inside a folder imports are relative, across folders absolute. The rules hold for imports inside functions and under
``TYPE_CHECKING`` too.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import FOLDERS, ROOT, Import, Source, sources

ON_TOP = ("graphir/cli.py", "graphir/compile.py", "graphir/fx.py", "graphir/profile.py", "graphir/demo/")
"""The part of graphir/ that stands on passes and runtime."""

REACHES_UP = {("graphir/plan.py", "graphir", "runtime")}
"""The one import that goes up, within ``Plan.python``, which asks the runtime for the code that it generates."""

MAY_USE = {"graphir": set(), "passes": {"graphir"}, "runtime": {"graphir"}}
"""The folders that each folder may import, beside itself."""

ROOMS = {
    "machine": set(),
    "kernels": {"machine"},
    "observing": set(),
    "proof": {"kernels"},
    "profiling": {"machine", "kernels"},
    "interface": {"machine", "kernels"},
    "codegen": {"kernels", "proof"},
    "failures": {"machine", "codegen"},
    "executors": {"kernels", "machine", "observing", "codegen", "failures"},
    "cuda": {"kernels", "machine", "observing", "codegen", "failures", "executors"},
}
"""The rooms of runtime/, those below first: which others each imports. What lies beside them imports any."""

DEPENDENCIES = {"networkx", "numpy", "protobuf", "pydantic", "rich", "safetensors", "torch", "typer"}

PARTS = {"google", "pydantic_core"}
"""Modules that come with a dependency."""


def folder_of(imported: Import) -> str:
    """The folder that an import reaches, or nothing for a module of others."""
    dotted = f"{imported.module}.{imported.name}."
    for folder in ("passes", "runtime"):
        if dotted.startswith((f"{folder}.", f"graphir.{folder}.")):
            return folder
    return "graphir" if dotted.startswith("graphir.") else ""


def direction_faults(source: Source) -> Iterator[str]:
    allowed = {source.folder, *MAY_USE[source.folder]}
    if source.path.as_posix().startswith(ON_TOP):
        allowed |= set(FOLDERS)
    for imported in source.imports:
        folder = folder_of(imported)
        if folder and folder not in allowed and (str(source), imported.module, imported.name) not in REACHES_UP:
            yield f"{source}:{imported.line} imports {imported.module}, of {folder}/"


def style_faults(source: Source) -> Iterator[str]:
    for imported in source.imports:
        folder = folder_of(imported)
        if folder == source.folder and not imported.level:
            yield f"{source}:{imported.line} imports its own folder absolutely"
        elif folder != source.folder and imported.level:
            yield f"{source}:{imported.line} imports another folder relatively"


def room_faults(source: Source) -> Iterator[str]:
    """Imports of a room of runtime/ that are neither of a room below it nor of what all executors agree on."""
    room = source.path.parts[1]
    if source.folder == "runtime" and source.path.parts[2:]:
        for imported in source.imports:
            reached = f"{imported.module}.{imported.name}".removeprefix("graphir.runtime.").partition(".")[0]
            if folder_of(imported) == "runtime" and reached not in {room, "executor", *ROOMS.get(room, ())}:
                yield f"{source}:{imported.line} imports {imported.module}"


ALL = [source for folder in FOLDERS for source in sources(folder)]


@pytest.mark.parametrize("source", ALL, ids=str)
def test_imports_go_down_only(source):
    assert list(direction_faults(source)) == []


@pytest.mark.parametrize("source", sources("runtime"), ids=str)
def test_rooms_import_rooms_below(source):
    assert list(room_faults(source)) == []


def test_the_rooms_are_the_folders():
    assert set(ROOMS) == {source.path.parts[1] for source in sources("runtime") if source.path.parts[2:]}


@pytest.mark.parametrize("source", ALL, ids=str)
def test_imports_are_relative_inside_a_folder_and_absolute_across(source):
    assert list(style_faults(source)) == []


@pytest.mark.parametrize("source", [*ALL, *sources("tests")], ids=str)
def test_nobody_imports_the_folders_by_their_bare_names(source):
    bare = [i for i in source.imports if not i.level and i.module.partition(".")[0] in ("passes", "runtime")]
    assert bare == []


@pytest.mark.parametrize("source", ALL, ids=str)
def test_only_declared_dependencies_are_imported(source):
    known = {"graphir", *DEPENDENCIES, *PARTS, *sys.stdlib_module_names}
    assert {i.module.partition(".")[0] for i in source.imports if not i.level} <= known


def test_the_declared_dependencies_are_those_of_the_project_file():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)
    assert listed
    assert set(re.findall(r'"([a-z]+)[>=]', listed[1])) == DEPENDENCIES


class Example(Source):
    """A module that does not exist, to see that the rules find a fault."""

    def __init__(self, path: str, *imports: Import) -> None:
        super().__init__(ROOT / Path(path))
        self.__dict__["imports"] = imports


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("graphir/ir/x.py", Import("graphir.passes.base", "Pass", 0, 1)),
        ("graphir/ir/x.py", Import("graphir", "runtime", 2, 1)),
        ("passes/x.py", Import("graphir", "runtime", 0, 1)),
        ("runtime/x.py", Import("graphir.passes", "emit", 0, 1)),
    ],
)
def test_an_import_upwards_is_found(path, imported):
    assert list(direction_faults(Example(path, imported)))


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("runtime/kernels/x.py", Import("graphir.runtime.proof.check", "check", 2, 1)),
        ("runtime/kernels/x.py", Import("graphir.runtime", "proof", 2, 1)),
        ("runtime/cuda/x.py", Import("graphir.runtime.session", "Session", 2, 1)),
        ("runtime/cuda/x.py", Import("graphir.runtime", "check", 2, 1)),
    ],
)
def test_an_import_of_a_room_above_is_found(path, imported):
    assert list(room_faults(Example(path, imported)))


@pytest.mark.parametrize(
    ("path", "imported"),
    [
        ("graphir/ir/x.py", Import("graphir.ir.blob", "Blob", 0, 1)),
        ("passes/x.py", Import("graphir.passes.base", "Pass", 0, 1)),
        ("passes/x.py", Import("graphir.ir.blob", "Blob", 2, 1)),
    ],
)
def test_an_import_in_the_wrong_form_is_found(path, imported):
    assert list(style_faults(Example(path, imported)))


def test_relative_imports_are_resolved():
    (plan,) = [source for source in ALL if str(source) == "graphir/plan.py"]
    assert ("graphir.ir.device", "Device") in {(i.module, i.name) for i in plan.imports}
