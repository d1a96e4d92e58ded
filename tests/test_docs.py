"""The pages are true: their Python runs and prints what they show, their links lead somewhere.

In a page, every block fenced as ``python`` is run, in order, in one namespace, in a folder that holds a Caffe2 model's
``net.pb`` and ``param_init_net.pb``. A block fenced as ``text`` right after it is what it prints; a ``...`` in it
stands for anything on that line, and alone on a line for any lines.
``--update-golden`` rewrites such a block, unless there is a ``...`` in it.
"""

import ast
import contextlib
import io
import re
import shutil
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from graphir.runtime.machine.openmp import in_threads

import graphir
from graphir import passes, runtime

ROOT = Path(__file__).parent.parent
CAFFE2_MODEL = ROOT / "tests/caffe2/data/models/mlp_2dev_sgd"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)


class Example(NamedTuple):
    """A Python block of a page, its line, and what it is said to print, with the place of that text in the page."""

    code: str
    line: int
    printed: str | None
    span: tuple[int, int]


def examples(page: str) -> Iterator[Example]:
    blocks = list(FENCE.finditer(page))
    for block, following in zip_longest(blocks, blocks[1:]):
        if block[1] == "python":
            line = page.count("\n", 0, block.start(2)) + 1
            if following and following[1] == "text" and not page[block.end() : following.start()].strip():
                yield Example(block[2], line, following[2], following.span(2))
            else:
                yield Example(block[2], line, None, (0, 0))


OF_PARTS = {"ir.md", "tutorial.md"}
"""Pages that show what is inside, too."""

PUBLIC = {
    "graphir": graphir,
    "passes": passes,
    "runtime": runtime,
    "caffe2": graphir.caffe2,
    "parallel": graphir.parallel,
}
"""What users import, by the names that pages give it."""

SHOWN = {"graphir.demo.digits", "graphir.demo.model"}
"""The demo's data and model, which pages use as examples."""


def not_exported(code: str) -> Iterator[str]:
    """What an example uses of graphir that no ``__all__`` has."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "graphir":
            names = [] if node.module in SHOWN else [alias.name for alias in node.names]
            used = [(node.module.removeprefix("graphir.") or "graphir", name) for name in names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in PUBLIC:
            used = [(node.value.id, node.attr)]
        else:
            continue
        for module, name in used:
            inside = name in PUBLIC if module == "graphir" else False
            if not inside and name not in getattr(PUBLIC.get(module), "__all__", ()):
                yield f"{module}.{name}"


def matches(printed: str, shown: str) -> bool:
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
        for line in shown.splitlines()
    )
    return re.fullmatch(pattern, printed) is not None


def run(page: Path) -> Iterator[tuple[Example, str]]:
    """Each example and what it really prints."""
    names: dict[str, object] = {"__name__": page.stem}
    for example in examples(page.read_text(encoding="utf-8")):
        code = compile("\n" * (example.line - 1) + example.code, str(page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        yield example, "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [p for p in PAGES if any(examples(p.read_text(encoding="utf-8")))], ids=page_name)
def test_examples_print_what_the_page_shows(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")  # and some of one kind of processor
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    shutil.copytree(CAFFE2_MODEL, tmp_path, dirs_exist_ok=True)
    text = page.read_text(encoding="utf-8")
    with in_threads(2):  # some figures are per thread
        ran = list(run(page))
    for example, printed in reversed(ran):
        start, end = example.span
        if example.printed is None or matches(printed, example.printed):
            continue
        if request.config.getoption("--update-golden") and "..." not in example.printed:
            text = text[:start] + printed + text[end:]
        else:
            assert printed == example.printed, f"{page_name(page)}:{example.line}"
    page.write_text(text, encoding="utf-8") if text != page.read_text(encoding="utf-8") else None


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OF_PARTS], ids=page_name)
def test_examples_use_exported_names(page):
    assert [name for example in examples(page.read_text(encoding="utf-8")) for name in not_exported(example.code)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from graphir import Net, passes\npasses.emit, graphir.caffe2.load_net", []),
        ("from graphir.passes.base import Pass", ["passes.base.Pass"]),
        ("from graphir.ir.device import gpu", ["ir.device.gpu"]),
        ("from graphir import ir\npasses.base.build", ["graphir.ir", "passes.base"]),
    ],
)
def test_names_that_are_not_exported_are_found(code, found):
    assert list(not_exported(code)) == found


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_to_a_file_and_a_heading(page):
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def anchors(file: Path) -> set[str]:
    headings = HEADING.findall(file.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reached_from_the_index():
    reached, todo = set(), [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
        todo += [(page.parent / link).resolve() for link in links if link]
    assert {page for page in PAGES if page.parent != ROOT} <= reached


def test_ci_runs_the_test_command_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = [line.strip() for line in readme.splitlines() if "-m pytest" in line and "pip install" in line]
    assert command in (ROOT / ".ci/run").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("printed", "shown", "same"),
    [
        ("a 1\nb\n", "a 1\nb\n", True),
        ("a 1\nb\n", "a ...\nb\n", True),
        ("a\nb\nc\n", "a\n...\nc\n", True),
        ("a\nc\n", "a\n...\nc\n", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "b\n", False),
        ("a.b\n", "axb\n", False),
    ],
)
def test_shown_text_is_compared_line_by_line(printed, shown, same):
    assert matches(printed, shown) is same
