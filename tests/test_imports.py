"""Which way imports go: ``graphir`` at the bottom, ``passes`` and ``runtime`` side by side on it, facades on top.

Inside a folder imports are relative, across folders absolute. The rules hold for imports inside functions and under
``TYPE_CHECKING`` too. Modules never import each other in a circle, and what a call imports is listed here.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import networkx
import pytest
from sources import FOLDERS, ROOT, Import, Source, sources

ON_TOP = ("graphir/demo/", "graphir/facade/", "graphir/parallel/")
"""The part of graphir/ that stands on passes and runtime."""

TEXT, FILES = "the text form prints it", "files are written of it"
WITHIN_CALLS = {
    ("graphir.ir.net", "Net.__str__"): ("graphir.ir.text", TEXT),
    ("graphir.ir.program", "Program.__str__"): ("graphir.ir.text", TEXT),
    ("graphir.ir.plan", "Plan.__str__"): ("graphir.ir.text", TEXT),
    ("graphir.ir.program", "Program.save"): ("graphir.ir.files", FILES),
    ("graphir.ir.plan", "Plan.save"): ("graphir.ir.files", FILES),
    ("graphir.analysis.topology", "Topology.named"): ("graphir.analysis.machines", "machines are made of it"),
    ("graphir.analysis.topology", "Topology.of"): ("graphir.analysis.cards", "machines are made of it"),
    ("graphir.analysis.topology", "Topology.here"): ("graphir.runtime.machine.here", "the runtime measures one"),
    ("graphir.analysis.profiles", "Profile.load"): ("graphir.analysis.profile_files", "files are read into it"),
}
"""What a call imports: by module and method, the module, which stands on the method's class, and how.

All are methods that users know. What is new and reaches up is a function, in the module that it reaches up to.
"""

ON_DEMAND = {("graphir.facade.cli", "demo"): ("graphir.demo.run", "importing rich draws random numbers")}
"""What else a call imports, since an import of graphir would be noticed by its process."""

REACHES_UP = {("graphir.analysis.topology", "Topology.here")}
"""Those that reach another folder."""

BELOW_IR = {"collector", "errors", "version"}
"""What ``graphir.ir`` imports beside itself."""

MAY_USE = {"graphir": set(), "passes": {"graphir"}, "runtime": {"graphir"}}
"""The folders that each folder may import, beside itself."""

_AGREED = {"executor"}
"""What all rooms of runtime/ agree on."""

_READ = {"words", "intake", "isolate"}

_VALUES = {"blob", "device", "dtype", "geometry", "operator", "size", "symbols", "tensor"}
_WHOLE = _VALUES | {"covers", "dialect", "guard", "history", "names", "net", "opset", "parts", "plan", "program"}
_CHECKED = {"calls", "infer", "meta", "placement", "shares"}

ROOMS = {
    "graphir/ir": {
        "optypes": _VALUES,
        "text": _WHOLE | {"admitted"},
        "verify": _WHOLE | _CHECKED | {"text"},
        "files": _WHOLE | {"admitted", "frozen", "verify"},
    },
    "runtime": {
        "machine": _AGREED,
        "kernels": {"machine"} | _AGREED,
        "observing": _AGREED,
        "proof": {"kernels"} | _AGREED,
        "profiling": {"machine", "kernels"} | _AGREED,
        "interface": {"machine", "kernels"} | _AGREED,
        "codegen": {"kernels", "proof"} | _AGREED,
        "failures": {"machine", "codegen"} | _AGREED,
        "executors": {"kernels", "machine", "observing", "codegen", "failures"} | _AGREED,
        "cuda": {"kernels", "machine", "observing", "codegen", "failures", "executors"} | _AGREED,
    },
    "graphir/capturing": {
        "words": set(),
        "isolate": {"words"},
        "intake": {"words", "isolate"},
        "record": _READ,
        "step": _READ | {"record"},
        "sizes": {"words", "record", "step"},
        "program": _READ | {"record", "step", "sizes"},
    },
    "graphir/caffe2": {"lower": {"dialect"}},
}
"""By folder, its rooms, those below first: which others, and which files beside the rooms, each imports.

Files beside the rooms import any room.
"""

DEPENDENCIES = {"networkx", "numpy", "protobuf", "pydantic", "rich", "safetensors", "scipy", "torch", "typer"}

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
        if folder and folder not in allowed and (source.module, imported.within) not in REACHES_UP:
            yield f"{source}:{imported.line} imports {imported.module}, of {folder}/"


def style_faults(source: Source) -> Iterator[str]:
    for imported in source.imports:
        folder = folder_of(imported)
        if folder == source.folder and not imported.level:
            yield f"{source}:{imported.line} imports its own folder absolutely"
        elif folder != source.folder and imported.level:
            yield f"{source}:{imported.line} imports another folder relatively"


def room_of(source: Source) -> tuple[str, str]:
    """The folder with rooms that a module lies in, and its room; both empty for a module in none."""
    *folders, _ = source.path.parts
    for depth in range(1, len(folders)):
        if "/".join(folders[:depth]) in ROOMS:
            return "/".join(folders[:depth]), folders[depth]
    return "", ""


def room_faults(source: Source) -> Iterator[str]:
    """Imports of what lies in the same folder, and neither in the module's room nor in what this room may import."""
    folder, room = room_of(source)
    inside = f"graphir.{folder.removeprefix('graphir/').replace('/', '.')}."
    for imported in source.imports if room else ():
        dotted = f"{imported.module}.{imported.name}."
        part = dotted.removeprefix(inside).partition(".")[0]
        if dotted.startswith(inside) and part not in {room, *ROOMS[folder].get(room, ())}:
            yield f"{source}:{imported.line} imports {imported.module}"


ALL = [source for folder in FOLDERS for source in sources(folder)]
MODULES = {source.module: source for source in ALL}


def reached(source: Source, imported: Import) -> Iterator[str]:
    """Our modules that an import runs: the one that it names, and the packages that this one lies in.

    Not the packages that *source* itself lies in: they are being imported already.
    """
    taken = f"{imported.module}.{imported.name}"
    module = taken if taken in MODULES else imported.module
    own = f"{source.module}."
    while module in MODULES and not own.startswith(f"{module}."):
        yield module
        module = module.rpartition(".")[0]


def edges(found: Iterable[Source], *, types: bool = False) -> Iterator[tuple[str, str]]:
    """Which module imports which as it is imported; with *types* also what it imports for types alone."""
    for source in found:
        for imported in source.imports:
            if not imported.within or (types and imported.within == "TYPE_CHECKING"):
                yield from ((source.module, module) for module in reached(source, imported))


def circles(found: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The modules that import each other, directly or through others."""
    parts = networkx.strongly_connected_components(networkx.DiGraph(found))
    return sorted(sorted(part) for part in parts if len(part) > 1)


def late_faults(source: Source) -> Iterator[str]:
    """Imports of our own modules within a call, where none is allowed."""
    for imported in source.imports:
        if imported.within not in ("", "TYPE_CHECKING"):
            allowed, _ = {**WITHIN_CALLS, **ON_DEMAND}.get((source.module, imported.within), ("", ""))
            for module in reached(source, imported):
                if not f"{allowed}.".startswith(f"{module}."):
                    yield f"{source}:{imported.line} imports {module} within {imported.within}"


def ir_faults(source: Source) -> Iterator[str]:
    """What a module of ``graphir.ir`` imports that stands above it."""
    for imported in source.imports:
        if folder_of(imported) and (source.module, imported.within) not in WITHIN_CALLS:
            part = f"{imported.module}.{imported.name}".removeprefix("graphir.").partition(".")[0]
            if part not in {"ir", *BELOW_IR}:
                yield f"{source}:{imported.line} imports {imported.module}"


def faults(rule: Callable[[Source], Iterable[object]], found: Iterable[Source]) -> dict[str, list[object]]:
    """What a rule finds, by module. All modules are one test: a test for each would take longer than the rules."""
    return {str(source): broken for source in found if (broken := list(rule(source)))}


def test_imports_go_down_only():
    assert faults(direction_faults, ALL) == {}


def test_rooms_import_rooms_below():
    assert faults(room_faults, ALL) == {}


@pytest.mark.parametrize("folder", ROOMS)
def test_the_table_of_rooms_goes_down(folder):
    above: set[str] = set()
    for room, used in reversed(ROOMS[folder].items()):
        above.add(room)
        assert not above & used


def test_no_module_imports_another_in_a_circle():
    assert circles(edges(ALL)) == []


def test_imports_for_types_close_no_circle_either():
    assert circles(edges(ALL, types=True)) == []


def test_calls_import_nothing_of_ours_but_what_is_listed():
    assert faults(late_faults, ALL) == {}


@pytest.mark.parametrize(("module", "within"), WITHIN_CALLS)
def test_what_a_listed_call_imports_stands_on_its_module(module, within):
    late, *packages = [
        name for i in MODULES[module].imports if i.within == within for name in reached(MODULES[module], i)
    ]
    assert late == WITHIN_CALLS[module, within][0] and all(late.startswith(f"{package}.") for package in packages)
    assert networkx.has_path(networkx.DiGraph(edges(ALL)), late, module)


def test_the_ir_imports_nothing_above_it():
    assert faults(ir_faults, sources("graphir/ir")) == {}


def test_the_rooms_are_the_folders():
    found = {folder: {room for place, room in map(room_of, ALL) if place == folder} for folder in ROOMS}
    assert found == {folder: set(rooms) for folder, rooms in ROOMS.items()}


def test_imports_are_relative_inside_a_folder_and_absolute_across():
    assert faults(style_faults, ALL) == {}


def imported_roots(source: Source) -> set[str]:
    """The top-level modules of absolute imports."""
    return {i.module.partition(".")[0] for i in source.imports if not i.level}


def test_nobody_imports_the_folders_by_their_bare_names():
    bare = re.compile(r"^\s*(?:from (?:passes|runtime)\b|import .*\b(?:passes|runtime)\b)", re.M)
    suspects = [source for source in (*ALL, *sources("tests")) if bare.search(source.text)]
    assert faults(lambda source: imported_roots(source) & {"passes", "runtime"}, suspects) == {}


def test_only_declared_dependencies_are_imported():
    known = {"graphir", *DEPENDENCIES, *PARTS, *sys.stdlib_module_names}
    assert faults(lambda source: imported_roots(source) - known, ALL) == {}


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
        ("graphir/capturing/isolate/x.py", Import("graphir.capturing.record.values", "Value", 2, 1)),
        ("graphir/capturing/step/x.py", Import("graphir.capturing", "capture", 2, 1)),
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


def test_a_circle_is_found_through_a_package():
    a = Example("graphir/ir/net.py", Import("graphir.analysis.memory", "memory", 2, 1))
    b = Example("graphir/analysis/__init__.py", Import("graphir.ir.net", "Net", 2, 1))
    assert circles(edges([a])) == []
    assert circles(edges([a, b])) == [["graphir.analysis", "graphir.ir.net"]]


def test_a_circle_of_types_is_found_only_where_types_are_asked_for():
    a = Example("graphir/ir/net.py", Import("graphir.ir.plan", "Plan", 1, 1, "TYPE_CHECKING"))
    b = Example("graphir/ir/plan.py", Import("graphir.ir.net", "Net", 1, 1))
    assert circles(edges([a, b])) == []
    assert circles(edges([a, b], types=True)) == [["graphir.ir.net", "graphir.ir.plan"]]


@pytest.mark.parametrize(
    "imported",
    [
        Import("graphir.capturing.capture", "capture", 2, 1),
        Import("graphir.facade.fx", "to_fx", 2, 1, "Program.to_onnx"),
        Import("graphir.analysis.memory", "Memory", 2, 1, "TYPE_CHECKING"),
    ],
)
def test_an_import_above_the_ir_is_found(imported):
    assert list(ir_faults(Example("graphir/ir/program.py", imported)))


def test_an_import_within_a_call_is_found():
    assert list(late_faults(Example("graphir/ir/net.py", Import("graphir.ir.files", "save", 1, 1, "Net.save"))))


def test_imports_know_where_they_stand():
    found = {(i.module, i.name): i.within for i in MODULES["graphir.ir.program"].imports}
    assert found["graphir.ir.device", "Device"] == ""
    assert found["torch", ""] == "TYPE_CHECKING"
    assert found["graphir.ir.files", "save"] == "Program.save"
