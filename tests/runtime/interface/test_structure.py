"""Structures of arguments and results, read from text that may be hostile."""

import collections
import json
import sys

import pytest
from graphir.runtime.interface.structure import flatten, paths, read_structure, unflatten
from torch.utils import _pytree

from graphir.errors import SessionError

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


HOSTILE = [
    {
        "type": "collections.defaultdict",
        "context": json.dumps({"default_factory_module": "this", "default_factory_name": "s", "dict_context": "[]"}),
        "children_spec": [],
    },
    {
        "type": "test_structure.Point",
        "context": json.dumps({"__enum__": True, "fqn": "this:s", "name": "x"}),
        "children_spec": [LEAF, LEAF],
    },
]


@pytest.mark.parametrize("node", HOSTILE, ids=["factory", "enumeration"])
def test_a_text_that_would_import_a_module_is_refused(node):
    sys.modules.pop("this", None)
    with pytest.raises(SessionError, match=r"cannot be read: containers of type .* are not supported"):
        read_structure(json.dumps([1, node]))
    assert "this" not in sys.modules
