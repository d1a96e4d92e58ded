"""Structures of arguments and results, read from text that may be hostile."""

import collections
import contextlib
import json
import sys
from pathlib import Path

import pytest
from torch.utils import _pytree

import graphir
from graphir.errors import SessionError
from graphir.ir.structure import flatten, paths, read_structure, tree_spec, unflatten

Point = collections.namedtuple("Point", ["a", "b"])
_pytree._register_namedtuple(Point, serialized_type_name="test_structure.Point")


def written(value):
    return _pytree.treespec_dumps(_pytree.tree_structure(value))


VALUES = [
    1,
    (1, [2, 3], {"b": 4, "a": (5,)}),
    {"x": {}, "y": []},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    {"p": Point(1, (2, 3)), "q": 4},
    Point(Point(1, 2), {"a": [Point(3, 4)]}),
    collections.deque([1, (2,)], maxlen=3),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_leaves_and_back(value):
    node = read_structure(written(value))
    leaves = list(flatten(node, value, "argument 0"))
    assert leaves == _pytree.tree_leaves(value)
    assert unflatten(node, iter(leaves)) == value


def test_dictionaries_match_by_key_in_any_order():
    node = read_structure(written({"a": 1, "b": 2}))
    assert list(flatten(node, {"b": 20, "a": 10}, "argument 0")) == [10, 20]


def test_leaves_are_named():
    node = read_structure(written([{"m": 1}, (2, 3)]))
    assert list(paths(node, "argument 1")) == ["argument 1[0]['m']", "argument 1[1][0]", "argument 1[1][1]"]


@pytest.mark.parametrize(
    ("captured", "given", "message"),
    [
        ({"a": 1}, {"b": 1}, r"argument 0 has the keys \['b'\], the program takes \['a'\]"),
        ((1, 2), (1,), "argument 0 has 1 entries, the program takes 2"),
        ((1, 2), [1, 2], "argument 0 is of type list, the program takes a tuple"),
        (((1,),), (1,), r"argument 0\[0\] is of type int, the program takes a tuple"),
        (Point(1, 2), (1, 2), "argument 0 has the structure"),
    ],
)
def test_another_structure_is_refused(captured, given, message):
    with pytest.raises(SessionError, match=message) as caught:
        list(flatten(read_structure(written(captured)), given, "argument 0"))
    assert caught.value.fix


def inside_point(n):
    return node("test_structure.Point", "test_structure.Point", n, LEAF)


LEAF = {"type": None, "context": None, "children_spec": []}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        json.dumps([1, {"type": "os.system", "context": "null", "children_spec": []}]),
        json.dumps([1, {"type": "builtins.dict", "context": '["a"]', "children_spec": []}]),
        "[1, " + '{"type": "builtins.list", "context": "null", "children_spec": [' * 5000 + "]}" * 5000 + "]",
    ],
    ids=["empty", "object", "short", "unknown", "keys", "deep"],
)
def test_a_damaged_text_is_refused(text):
    with pytest.raises(SessionError, match="argument structure cannot be read"):
        read_structure(text)


def node(type, context, *children):
    return {"type": type, "context": context, "children_spec": list(children)}


ENUMERATION = {"__enum__": True, "fqn": "this:s", "name": "x"}
FACTORY = {"default_factory_module": "this", "default_factory_name": "s", "dict_context": "[]"}
IMPORTING = {
    "factory": node("collections.defaultdict", FACTORY),
    "enumeration of a key": node("builtins.dict", json.dumps([ENUMERATION]), LEAF),
    "enumeration in a tuple": node("builtins.tuple", json.dumps([ENUMERATION])),
    "enumeration of a length": node("collections.deque", json.dumps(ENUMERATION)),
}
"""What makes torch's reader import a module, the one called ``this``."""


def imported(run, refusals):
    """Whether *run*, which may end in one of these errors, imports the module that the texts above name."""
    sys.modules.pop("this", None)
    with contextlib.suppress(refusals):
        run()
    return "this" in sys.modules


@pytest.mark.parametrize("hostile", IMPORTING.values(), ids=IMPORTING)
@pytest.mark.parametrize(
    "at",
    [lambda n: n, lambda n: node("builtins.list", "null", n), inside_point],
    ids=["bare", "in a list", "in a tuple"],
)
def test_no_text_makes_torch_import_a_module(hostile, at, capsys):
    text = json.dumps([1, at(hostile)])
    assert not imported(lambda: tree_spec(read_structure(text)), SessionError)
    assert not capsys.readouterr().out
    assert imported(lambda: _pytree.treespec_loads(text), TypeError), "torch's own reader does"


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        (IMPORTING["factory"], "containers of type 'collections.defaultdict' are not supported"),
        (IMPORTING["enumeration of a key"], "keys of dictionaries are strings, numbers, true, false and null"),
        (IMPORTING["enumeration of a length"], "containers of type 'collections.deque' are not supported"),
        (
            node("collections.namedtuple", "collections.defaultdict", LEAF),
            "'collections.defaultdict' is no named tuple that was registered",
        ),
        (
            node("collections.namedtuple", "collections.namedtuple", LEAF, LEAF),
            "'collections.namedtuple' is no named tuple",
        ),
        (
            node("test_structure.Point", json.dumps(ENUMERATION), LEAF, LEAF),
            "containers of type 'test_structure.Point' are not supported",
        ),
        (
            node("collections.deque", json.dumps([json.dumps(ENUMERATION)])),
            "containers of type 'collections.deque' are not supported",
        ),
        (node("builtins.dict", '["a", "a"]', LEAF, LEAF), "a dictionary has a key twice"),
        (node("collections.namedtuple", "builtins.dict", LEAF), "'builtins.dict' is no named tuple"),
        (node(["builtins.dict"], "[]"), "a container has a name and a list of children"),
        (node("builtins.list", "null") | {"children_spec": {}}, "a container has a name and a list of children"),
    ],
)
def test_what_only_code_could_rebuild_is_refused(hostile, message):
    with pytest.raises(SessionError, match=message):
        read_structure(json.dumps([1, hostile]))


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_torch_has_the_same_structure(value):
    assert tree_spec(read_structure(written(value))) == _pytree.tree_structure(value)


def test_a_container_that_its_type_cannot_be_made_of_is_refused():
    text = json.dumps([1, node("collections.deque", "-1", LEAF)])
    with pytest.raises(SessionError, match="cannot be rebuilt: maxlen must be non-negative"):
        unflatten(read_structure(text), iter([1]))


def test_no_module_asks_torch_to_read_a_structure():
    """The reader above is the one reader: torch's imports what a text names."""
    root = Path(graphir.__file__).parents[1]
    files = [file for folder in ("graphir", "passes", "runtime") for file in (root / folder).rglob("*.py")]
    assert len(files) > 100
    asked = {"treespec_loads", "str_to_pytree", "enum_object_hook"}
    for file in files:
        text = file.read_text()
        assert not [name for name in asked if name in text], file
