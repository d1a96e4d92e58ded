"""Which of torch's operators a file may name."""

from __future__ import annotations

import pytest
import torch
from small import program_of

import graphir
from graphir.errors import FileError, GraphirError, ParseError
from graphir.ir import admitted
from graphir.ir.admitted import allow_operators
from graphir.ir.files import load, save
from graphir.ir.opset import overload
from graphir.ir.optypes.table import ADMITTED
from graphir.ir.program import Program

UNSAFE = "aten._sparse_coo_tensor_unsafe.default"


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    """Types that a test allows are allowed for that test."""
    types: set[str] = set()
    monkeypatch.setattr(admitted, "_allowed", types)
    return types


def program_with(type: str) -> Program:
    program = program_of("input x : f32[4] @gpu:0\ny : f32[4] @gpu:0 = aten.neg(x)")
    return program.with_(step=program.step.with_(ops=(program.step.ops[0]._replace(type=type),)))


@pytest.mark.parametrize("type", [UNSAFE, "aten.set_.source_Tensor", "aten.binomial.default", "prims.fma.default"])
def test_a_file_with_another_type_is_refused(tmp_path, type):
    save(program_with(type), tmp_path / "p.json")
    with pytest.raises(FileError) as caught:
        load(tmp_path / "p.json")
    assert caught.value.what.startswith(f"a file may not name the operator '{type}'")
    assert caught.value.where.endswith("p.json, at program.step.ops[0]")
    assert caught.value.fix == f"if you trust the file: graphir.allow_operators('{type}') before it is read"


def test_a_text_with_another_type_is_refused():
    with pytest.raises(ParseError, match=r"a file may not name the operator 'aten.binomial.default'") as caught:
        graphir.parse(str(program_with("aten.binomial.default")))
    assert caught.value.where == "line 6"
    with pytest.raises(ParseError, match=r"did you mean .*'aten\.relu\.default'"):
        graphir.parse(str(program_with("aten.relu_or.default")))


def test_what_the_user_allows_is_read(tmp_path):
    program = program_with("aten.binomial.default")
    save(program, tmp_path / "p.json")
    graphir.allow_operators("aten.binomial.default", "aten.poisson.default")
    assert load(tmp_path / "p.json").step == program.step
    assert graphir.parse(str(program.step)) == program.step


@pytest.mark.parametrize("type", ["aten.nothing.default", "aten.add", "os.system", UNSAFE + "x"])
def test_only_operators_that_there_are_can_be_allowed(type, allowed):
    with pytest.raises(GraphirError, match=type.partition(".")[2].partition(".")[0]):
        allow_operators("aten.poisson.default", type)
    assert not allowed


@pytest.mark.parametrize("type", ["graphir.sgd", "Copy", "Relu", "foo.bar.baz"])
def test_types_that_are_not_torchs_are_not_limited(type):
    assert admitted.admitted(type) == type


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="the list is of torch 2.13")
def test_every_type_of_the_list_is_one_of_torchs():
    for type in ADMITTED:
        overload(type)


def test_no_type_of_the_list_is_called_unsafe_for_its_operands():
    views = {"aten._unsafe_view.default", "aten.unsafe_split.Tensor"}  # unsafe for autograd alone
    assert {type for type in ADMITTED if "unsafe" in type} == views
    assert not [type for type in ADMITTED if "sparse" in type or "nested" in type or "quant" in type]


@pytest.mark.parametrize("name", ["masked_select.default", "nonzero.default", "outer.default", "_neg_view.default"])
def test_types_that_few_programs_have_are_in_the_list(name):
    assert f"aten.{name}" in ADMITTED
