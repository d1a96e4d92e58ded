"""Operators, nets, programs, plans and interfaces are values: nothing that they hold can be changed in place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from dataclasses import fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphir
from graphir import passes
from graphir.ir.frozen import FrozenDict
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.plan import Plan
from graphir.ir.program import Interface, Program

OPEN = {"state", "module", "witness", "module_copies", "touches"}
"""Tensors and modules of a program, which are the user's; and columns of arrays, which are made anew for each net."""


class Items(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm, self.fc = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        return self.fc(F.dropout(self.norm(self.emb(items))))


def captured() -> Program:
    torch.manual_seed(0)
    model = Items()
    given = torch.arange(6), torch.randn(6, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return graphir.capture(model, given[:1], targets=given[1:], loss=F.mse_loss, optimizer=optimizer, accumulate=2)


def placed() -> Program:
    sharded = passes.shard(captured(), {"emb": ("rows", [0, 1])}, devices=[0, 1])
    parked = passes.park(passes.shift_modules(sharded, {"fc": {0: 2}}), "fc.weight", "cpu")
    return passes.inject_copies(parked).with_(notes={"found": {"groups": [1, {"at": 2}]}})


def loaded(tmp_path: Path) -> Plan:
    passes.emit(placed()).save(tmp_path / "plan.json")
    plan = graphir.load(tmp_path / "plan.json")
    assert isinstance(plan, Plan)
    return plan


def read(tmp_path: Path) -> Any:
    return graphir.parse(str(passes.emit(placed())))


def imported(tmp_path: Path) -> Program:
    from graphir import caffe2

    (tmp_path / "net.pbtxt").write_text(
        'name: "n" external_input: "x" op { type: "Relu" input: "x" output: "y" arg { name: "order" s: "NCHW" } }'
    )
    return caffe2.load_program(tmp_path / "net.pbtxt")


VALUES = {
    "captured": lambda tmp_path: captured(),
    "placed": lambda tmp_path: placed(),
    "plan": lambda tmp_path: passes.emit(placed()),
    "loaded": loaded,
    "read": read,
    "imported": imported,
    "copied": lambda tmp_path: copy.deepcopy(passes.emit(placed())),
    "pickled": lambda tmp_path: pickle.loads(pickle.dumps(passes.emit(placed()))),
}


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value holds: its fields, and what its class finds out about it."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    names = [field.name for field in fields(value)] if is_dataclass(value) else getattr(value, "_fields", ())
    derived = [
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, property | cached_property) and not name.startswith("_")
    ]
    for name in dict.fromkeys([*found, *names, *derived]):
        if name not in OPEN and not name.startswith("_"):
            yield name, getattr(value, name)


def walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Every value within a value, and where it is."""
    if id(value) in seen or isinstance(value, str | int | float | None | torch.Tensor):
        return
    seen.add(id(value))
    yield path, value
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from walk(key, f"{path} key", seen)
            yield from walk(part, f"{path}[{key!r}]", seen)
    elif isinstance(value, tuple | list | set | frozenset):
        for i, part in enumerate(value):
            yield from walk(part, f"{path}[{i}]", seen)
    if not isinstance(value, Mapping) and type(value) not in (tuple, list, set, frozenset):
        for name, part in attributes(value):
            yield from walk(part, f"{path}.{name}", seen)


@pytest.mark.parametrize("name", VALUES)
def test_nothing_that_a_value_holds_can_be_changed(name: str, tmp_path: Path) -> None:
    value, keep, mappings = VALUES[name](tmp_path), [], 0
    text = str(value)
    for path, part in walk(value, "", set()):
        keep.append(part)  # so that no other object gets its id
        if isinstance(part, Mapping):
            assert type(part) is FrozenDict, f"{path} is a {type(part).__name__}"
            mappings += 1
        assert isinstance(part, FrozenDict) or not isinstance(part, MutableMapping | MutableSequence | MutableSet), path
    assert mappings > 5 and str(value) == text


CHANGES = {
    "set": lambda x: x.__setitem__("a", 1),
    "delete": lambda x: x.__delitem__("a"),
    "update": lambda x: x.update(a=1),
    "in place": lambda x: x.__ior__({"a": 1}),
    "clear": lambda x: x.clear(),
    "pop": lambda x: x.pop("a"),
    "popitem": lambda x: x.popitem(),
    "setdefault": lambda x: x.setdefault("b", 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_refused_with_the_way_to_make_one(change: str) -> None:
    found = FrozenDict({"a": 0})
    with pytest.raises(TypeError, match=r"are read-only; make a changed value: net\.with_\(blobs="):
        CHANGES[change](found)
    assert found == {"a": 0}
    own, known = vars(FrozenDict), {name for name in dir(MutableMapping) if not hasattr(Mapping, name)}
    assert {name for name in known if hasattr(dict, name)} < {name for name in own if own[name] is own["_refuse"]}


def test_frozen_dicts_are_read_compared_and_copied_as_dicts_are() -> None:
    found = FrozenDict({"a": (1, 2), "b": 3})
    assert found == {"a": (1, 2), "b": 3} and repr(found) == "{'a': (1, 2), 'b': 3}"
    for plain in (dict(found), {**found}, found.copy(), found | {}):
        assert type(plain) is dict and plain == found
    for again in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(again) is FrozenDict and again == found


def test_what_a_caller_changes_afterwards_changes_no_value() -> None:
    args, blobs, dims = {"a": 1}, {}, {"batch": 2}
    net = Net("n", (Operator("FC", (), (), args, "gpu:0"),), blobs)
    program = Program("p", net, net, dims)
    before = hash(program), str(program)
    args["b"] = blobs["x"] = dims["batch"] = 3
    assert (hash(program), str(program)) == before
    assert program == Program("p", net, net, {"batch": 2})


def test_operators_with_the_same_arguments_share_them() -> None:
    """A pass that moves operators makes no new arguments."""
    program = captured()
    moved = passes.shift_modules(program, {"fc": 1})
    ours, theirs = program.step.ops, moved.step.ops
    assert all(a.args is b.args for a, b in zip(ours, theirs, strict=True))


def test_interfaces_of_several_levels() -> None:
    states = {"w": {"m": "w.m"}}
    interface = Interface(optimizer_state=states)
    with pytest.raises(TypeError):
        interface.optimizer_state["w"]["m"] = "x"  # type: ignore[index]
    states["w"]["m"] = "x"
    assert interface.optimizer_state == {"w": {"m": "w.m"}}
