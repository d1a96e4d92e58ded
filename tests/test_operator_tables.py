"""Tables by operator stand in ``graphir/ir/optypes``, where everything that is known of a type is read in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from sources import Source, sources

from graphir.ir.optypes.own import OWN

HOME = "graphir/ir/optypes/"
MOST = 2
"""Operators that a container may name elsewhere."""

EXCEPTIONS = {
    "caveats.py": "sentences of one report, about a device's libraries",
    "cuda_casts.py": "the recurrent operators, whose kernels under autocast are asked",
    "factorisations.py": "which calls have vectors, and which torch functions make them",
    "extents.py": "methods of Python's integers that operators are called like",
    "mutation.py": "how a write through a view is recorded",
    "naming.py": "by labels, which users read and several types share",
    "program.py": "how results of replicas become one, in words that are also operators'",
    "recorder.py": "what the recorder lets pass, or records as another call",
    "refused.py": "remedies: sentences for what is refused, and no program has",
    "sequences.py": "the recurrent operators that torch makes of others",
    "told_sizes.py": "methods of tensors that operators are called like",
}
"""Modules of graphir/capturing, and graphir/ir/program.py, whose tables belong to one algorithm, and why."""


@cache
def names() -> frozenset[str]:
    """Names of torch's operators, and types of graphir's own."""
    registered = torch._C._dispatch_get_all_op_names()
    return frozenset([name[6:].partition(".")[0] for name in registered if name.startswith("aten::")]) | OWN.keys()


def is_operator(text: str) -> bool:
    """Whether a text is a type, or the name of an operator, of a variant of it, or of several."""
    return text in OWN or text.removeprefix("aten.").partition(".")[0] in names()


def named(node: ast.expr) -> list[str]:
    """The operators that an element of a container names: as a text, a list of words, or a function of torch's."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = node.value.split()
        return words if all(map(is_operator, words)) else []
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith(("_aten.", "aten.", "torch.ops.aten.")):
        return [ast.unparse(node)]
    return named(node.elts[0]) if isinstance(node, ast.Tuple) and node.elts else []


def is_all(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__"


def tables(text: str) -> Iterator[tuple[int, list[str]]]:
    """The lines of containers that name operators, and these."""
    tree = ast.parse(text)
    nodes = [node for statement in tree.body if not is_all(statement) for node in ast.walk(statement)]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        elements: list[ast.expr] = []
        if isinstance(node, ast.Dict):
            elements = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            elements = node.elts
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            elements = [node]
        found = [name for element in elements for name in named(element)]
        if found:
            yield getattr(node, "lineno", 0), found


def faults(source: Source) -> list[str]:
    return [f"{source}:{line} names {', '.join(found[:4])}" for line, found in tables(source.text) if len(found) > MOST]


def outside() -> list[Source]:
    found = [source for folder in ("graphir/ir", "graphir/capturing") for source in sources(folder)]
    return [source for source in found if not str(source).startswith(HOME)]


def is_exception(source: Source) -> bool:
    of_capture = source.path.parts[1] == "capturing" or str(source) == "graphir/ir/program.py"
    return of_capture and source.path.name in EXCEPTIONS


def test_tables_by_operator_stand_with_the_records() -> None:
    assert [fault for source in outside() if not is_exception(source) for fault in faults(source)] == []


def test_every_exception_is_one() -> None:
    assert {source.path.name for source in outside() if is_exception(source) and faults(source)} == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "text",
    [
        '_SAME = {"aten.detach.default": 1, "aten.alias.default": 2, "aten.view.default": 3}',
        '_SAME = frozenset({"detach", "alias", "view"})',
        '_SAME = frozenset("detach alias view".split())',
        '_SAME = [("graphir.sgd", 1), ("graphir.adam", 2), ("Copy", 3)]',
        "_SAME = {_aten.detach.default, _aten.alias.default, torch.ops.aten.view.default}",
    ],
)
def test_a_table_is_found(text: str) -> None:
    assert max(len(found) for _, found in tables(text)) > MOST


@pytest.mark.parametrize(
    "text", ['"""detach alias view"""', '_SAME = ("detach", "alias")', '_S = "detach no alias, view"']
)
def test_no_table_is_found_in_what_is_none(text: str) -> None:
    assert all(len(found) <= MOST for _, found in tables(text))
