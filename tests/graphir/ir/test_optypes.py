"""Records of operator types: of types that there are, and one for each."""

import pytest
import torch

from graphir.ir.opset import overload, signature
from graphir.ir.optypes.facts import facts_of, known
from graphir.ir.optypes.own import OWN
from graphir.ir.optypes.record import OperatorType
from graphir.ir.optypes.table import ADMITTED, LISTED, operator_type


def there_is(type):
    name, _, variant = type.removeprefix("aten.").partition(".")
    return hasattr(getattr(torch.ops.aten, name, None), variant)


def test_records_are_of_types_that_torch_has():
    assert [type for type in {*LISTED, *ADMITTED} if not there_is(type)] == []


def test_a_type_is_known_once_and_a_name_in_one_way():
    with pytest.raises(ValueError, match="relu is known twice"):
        facts_of([known("tanh relu"), known("relu", strides_vary=True)])
    with pytest.raises(ValueError, match=r"add\.Scalar is known twice"):
        facts_of([known("add.Tensor", only_elements=True), known("add.Scalar")])


def test_facts_of_a_name_hold_in_place_and_those_of_a_call_for_one_type():
    assert operator_type("aten.index_put_.default").alike == operator_type("aten.index_put.default").alike != ()
    assert operator_type("aten.div.Tensor").in_place == "aten.div_.Tensor"
    assert not operator_type("aten.div.Tensor_mode").in_place


def test_a_type_without_a_record_has_nothing_special():
    assert operator_type("aten.argsort.stable") == OperatorType("aten.argsort.stable")
    assert not operator_type("mylib.unknown.default").registered


def test_facts_of_a_type_stand_together():
    known = operator_type("aten.native_batch_norm.default")
    assert known.batch_norm and known.kept_varies_in_evaluation and known.only_elements
    assert known.hidden_writes is not None
    assert known.hidden_writes({"training": True}) == ("running_mean", "running_var")
    assert known.hidden_writes({"training": False}) == ()


def test_memory_that_is_not_written_is_told_by_the_name():
    unwritten = [operator_type(type).unwritten for type in ("aten.empty.memory_format", "aten.new_empty.default")]
    assert unwritten == [True, True]
    assert not operator_type("aten.zeros.default").unwritten


ARGUMENTS = {"size": [3], "stride": [1], "p": 0.5, "value": 2.0, "fill_value": 2.0, "to": 5, "from": 2, "high": 5}
OPERANDS = {"value": torch.tensor(0.25)}


def called(type, content):
    """The results on an operand that is full of *content* where only its geometry counts."""
    given = {"training": True} if "rrelu" in type else {}
    alone = operator_type(type).geometry_only(given)
    for param in signature(type).params:
        if param.name in alone:
            given[param.name] = torch.full((3,), content)
        elif param.name == "generator":
            given[param.name] = torch.Generator().manual_seed(0)
        elif param.kind == "tensor":
            given[param.name] = OPERANDS.get(param.name, torch.tensor([0.1, 0.5, 0.9]))
        elif param.required:
            given[param.name] = ARGUMENTS.get(param.name, 1)
    torch.manual_seed(0)
    results = overload(type)(**given)
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("type", sorted(type for type in LISTED if operator_type(type).geometry_only))
def test_what_an_operand_holds_changes_nothing_where_its_geometry_alone_counts(type):
    pairs = list(zip(called(type, float("nan")), called(type, 0.5), strict=True))
    assert all(a.stride() == b.stride() for a, b in pairs)
    assert operator_type(type).unwritten or all(torch.equal(a, b) for a, b in pairs)


def test_in_place_types_take_what_their_functional_ones_take():
    for type in LISTED:
        known = operator_type(type)
        if known.in_place:
            assert overload(known.in_place)._schema.is_mutable
            assert [p.name for p in signature(known.in_place).params] == [p.name for p in signature(type).params]


def test_own_types_have_a_schema_and_a_fake():
    assert [type for type, known in OWN.items() if not known.schema or known.fake is None] == []
