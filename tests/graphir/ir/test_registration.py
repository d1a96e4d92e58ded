"""What is asked of a user's operator, and what each refusal says."""

from typing import Any

import pytest
import torch

import graphir
from graphir.errors import GraphirError, VerifyError
from graphir.ir.opset import effects_of, signature
from graphir.ir.optypes.table import operator_type

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def like(x, *others, **options):
    return torch.empty_like(x)


def twice(x):
    return x * 2


def unregistered(name):
    """An operator that torch has, and nobody has registered."""

    @torch.library.custom_op(f"graphir_refused::{name}", mutates_args=())
    def operator(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return operator


def test_a_schema_becomes_an_operator_of_torch_and_a_type():
    found = graphir.register_operator(
        "graphir_tests::shifted(Tensor x, float by=2.0) -> Tensor",
        kernel=lambda x, by=2.0: x + by,
        fake=like,
        nondeterministic="it says so",
    )
    assert torch.equal(found(X, 1.5), X + 1.5)
    assert torch.equal(torch.ops.graphir_tests.shifted(X), X + 2.0)
    assert [(p.name, p.default) for p in signature("graphir_tests.shifted.default").params] == [
        ("x", None),
        ("by", 2.0),
    ]
    assert operator_type("graphir_tests.shifted.default").nondeterministic == "it says so"


def test_an_operator_is_meant_by_itself_its_packet_or_its_name():
    made = unregistered("by_itself").register_fake(like)
    made = torch.ops.graphir_refused.by_itself
    assert graphir.register_operator(made, example=(X,)) is made.default
    unregistered("by_name").register_fake(like)
    assert graphir.register_operator("graphir_refused::by_name") is torch.ops.graphir_refused.by_name.default
    unregistered("by_variant").register_fake(like)
    variant = torch.ops.graphir_refused.by_variant.default
    assert graphir.register_operator(variant) is variant


def test_what_an_operator_lacks_is_added():
    unregistered("without_fake")
    graphir.register_operator("graphir_refused::without_fake", fake=like, example=(X,))
    library = torch.library.Library("graphir_refused", "FRAGMENT")
    library.define("without_kernel(Tensor x) -> Tensor")
    graphir.register_operator("graphir_refused::without_kernel", kernel={"cpu": twice}, fake=like, example=(X,))
    assert torch.equal(torch.ops.graphir_refused.without_kernel(X), X * 2)


def test_effects_follow_from_the_schema():
    graphir.register_operator(
        "graphir_tests::count_(Tensor x, Tensor(a!) seen) -> Tensor",
        kernel=lambda x, seen: (seen.add_(1), x * 1)[1],
        fake=like,
        example=(X, torch.zeros(())),
    )
    effects = effects_of("graphir_tests.count_.default", {}, None, 2, None)
    assert effects.writes == ((1, 1),) and not effects.views and not effects.random


SCHEMA = "graphir_refused::none(Tensor x) -> Tensor"
REFUSED = {
    "no schema": (("graphir_refused::none(Tensor x -> Tensor",), {"kernel": twice, "fake": like}, "is not a schema"),
    "no namespace": (("none(Tensor x) -> Tensor",), {"kernel": twice, "fake": like}, "names no namespace"),
    "a reserved namespace": (("aten::mine(Tensor x) -> Tensor",), {"kernel": twice, "fake": like}, "namespace 'aten'"),
    "graphir's namespace": (
        ("graphir::mine(Tensor x) -> Tensor",),
        {"kernel": twice, "fake": like},
        "not for operators of your own",
    ),
    "an operator of torch's": ((torch.ops.aten.relu.default,), {}, "namespace 'aten'"),
    "several variants": ((torch.ops.aten.add,), {}, "has several overloads: "),
    "no such operator": (("graphir_refused::nowhere",), {}, "torch has no operator graphir_refused::nowhere"),
    "no operator": ((7,), {}, "takes an operator or its schema, not a int"),
    "a function": ((twice,), {}, "takes an operator or its schema, not a function"),
    "no kernel": ((SCHEMA,), {"fake": like}, "graphir_refused::none has no kernel"),
    "no fake": ((SCHEMA,), {"kernel": twice}, "graphir_refused::none has no fake"),
    "a kernel that is none": ((SCHEMA,), {"kernel": 3, "fake": like}, "the kernel of graphir_refused::none is a int"),
    "a kernel for no device": ((SCHEMA,), {"kernel": {"tpu": twice}, "fake": like}, "is for 'tpu'"),
    "too many parameters": (
        (SCHEMA,),
        {"kernel": lambda x, y: x, "fake": like},
        "the kernel of graphir_refused::none: missing a required argument: 'y'",
    ),
    "too few parameters": (
        (SCHEMA,),
        {"kernel": twice, "fake": lambda: None},
        "the fake of graphir_refused::none: too",
    ),
    "a default that is missing": (
        ("graphir_refused::none(Tensor x, int n=1) -> Tensor",),
        {"kernel": lambda x, n: x * n, "fake": like},
        "missing a required argument: 'n'",
    ),
    "a result that is no tensor": (
        ("graphir_refused::none(Tensor x) -> int",),
        {"kernel": twice, "fake": like},
        "returns a int",
    ),
    "nothing at all": (
        ("graphir_refused::none(Tensor x) -> ()",),
        {"kernel": twice, "fake": like},
        "returns nothing, and overwrites nothing",
    ),
    "an operand that programs do not have": (
        ("graphir_refused::none(Tensor x, Storage s) -> Tensor",),
        {"kernel": lambda x, s: x, "fake": like},
        "takes s, a Storage",
    ),
    "a kernel that fails": (
        (SCHEMA,),
        {"kernel": lambda x: x.view(7), "fake": like, "example": (X,)},
        "fails on the example: RuntimeError: ",
    ),
    "a mutation that is not declared": (
        (SCHEMA,),
        {"kernel": lambda x: x.add_(1).clone(), "fake": like, "example": (X,)},
        "overwrites x, which its schema does not say",
    ),
    "an alias that is not declared": (
        (SCHEMA,),
        {"kernel": lambda x: x[:], "fake": like, "example": (X,)},
        "returns memory of x, which its schema does not say",
    ),
    "a fake of another shape": (
        (SCHEMA,),
        {"kernel": twice, "fake": lambda x: x.new_empty(2), "example": (X,)},
        r"returns torch.float32\[3, 4\] with strides \[4, 1\] as result 0, but its fake returns torch.float32\[2\]",
    ),
    "a fake that reads data": (
        (SCHEMA,),
        {"kernel": twice, "fake": lambda x: x.new_empty(int(x.sum())), "example": (X,)},
        "has a fake that fails on the example",
    ),
    "other bits": (
        (SCHEMA,),
        {"kernel": lambda x: torch.rand_like(x), "fake": like, "example": (X,)},
        "gives different bits when it is called again",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_nothing_behind(case):
    given, options, why = REFUSED[case]
    with pytest.raises(GraphirError, match=why) as raised:
        graphir.register_operator(*given, **options)
    assert raised.value.fix
    assert not hasattr(torch.ops.graphir_refused, "none")
    assert not operator_type("graphir_refused.none.default").registered


def test_a_name_is_taken_once():
    schema = "graphir_tests::taken(Tensor x) -> Tensor"
    graphir.register_operator(schema, kernel=twice, fake=like)
    with pytest.raises(GraphirError, match="graphir_tests::taken is registered already"):
        graphir.register_operator(torch.ops.graphir_tests.taken)
    with pytest.raises(GraphirError, match="graphir_tests::taken is registered already"):
        graphir.register_operator(schema, kernel=twice, fake=like)
    unregistered("of_torch")
    with pytest.raises(GraphirError, match="torch has an operator graphir_refused::of_torch already") as raised:
        graphir.register_operator("graphir_refused::of_torch(Tensor x) -> Tensor", kernel=twice, fake=like)
    assert raised.value.fix.endswith("graphir.register_operator('graphir_refused::of_torch')")


def test_an_operator_of_others_without_a_fake_is_refused():
    unregistered("unfaked")
    with pytest.raises(GraphirError, match="graphir_refused::unfaked has no fake"):
        graphir.register_operator("graphir_refused::unfaked")


def test_an_operator_that_consists_of_others_is_refused():
    library = torch.library.Library("graphir_refused", "FRAGMENT")
    library.define("composite(Tensor x) -> Tensor")
    library.impl("composite", twice, "CompositeImplicitAutograd")
    with pytest.raises(GraphirError, match="consists of other operators"):
        graphir.register_operator("graphir_refused::composite")


def test_random_numbers_from_nowhere_are_refused():
    library = torch.library.Library("graphir_refused", "FRAGMENT")
    library.define("drawn(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("drawn", torch.rand_like, "CompositeExplicitAutograd")
    with pytest.raises(GraphirError, match="draws random numbers, but not from a generator that it is given"):
        graphir.register_operator("graphir_refused::drawn")


def test_a_type_that_nobody_registered_is_named_with_what_registers_it():
    net = "net n {{\n  input x : f32[2] @gpu:0\n  y : f32[2] @gpu:0 = {}(x)\n  output y\n}}"
    with pytest.raises(
        VerifyError, match=r"'elsewhere.twice.default'; graphir.register_operator registers one of yours"
    ):
        graphir.verify(graphir.parse(net.format("elsewhere.twice.default")))


def test_what_was_unknown_is_known_when_it_is_registered():
    text = "net n {\n  input x : f32[2] @gpu:0\n  y : f32[2] @gpu:0 = graphir_tests.later.default(x)\n  output y\n}"
    with pytest.raises(VerifyError, match=r"'graphir_tests\.later\.default'; graphir\.register_operator registers"):
        graphir.verify(graphir.parse(text))
    graphir.register_operator("graphir_tests::later(Tensor x) -> Tensor", kernel=twice, fake=like)
    graphir.verify(graphir.parse(text))


def test_a_blob_that_is_not_what_the_fake_gives_is_refused():
    graphir.register_operator("graphir_tests::doubled(Tensor x) -> Tensor", kernel=twice, fake=like)
    text = "net n {\n  input x : f32[2] @gpu:0\n  y : f32[3] @gpu:0 = graphir_tests.doubled.default(x)\n  output y\n}"
    with pytest.raises(VerifyError, match=r"declared f32\[3\] but graphir_tests.doubled.default gives f32\[2\]"):
        graphir.verify(graphir.parse(text))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops": 3}, "flops is 3\n  fix  give a function of a SizedOperator"),
        ({"scratch": "x"}, "scratch is 'x'\n  fix  give a function of a SizedOperator"),
        ({"nondeterministic": 3}, "nondeterministic is 3\n  fix  give the reason, as text"),
        ({"only_elements": "no"}, "only_elements is 'no'\n  fix  give True or False"),
        ({"example": 3}, "example is 3\n  fix  give a list of arguments"),
    ],
)
def test_options_of_other_types_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphirError, match=message):
        graphir.register_operator(
            "refusedlib::other(Tensor x) -> Tensor", kernel=torch.neg, fake=torch.empty_like, **options
        )
    assert not hasattr(torch.ops.refusedlib, "other")


@pytest.mark.parametrize("text", ["lib::é(Tensor x) -> Tensor", "lib::\ud800(Tensor x) -> Tensor", "lib::é"])
def test_names_beyond_ascii_are_refused(text: str) -> None:
    with pytest.raises(GraphirError, match="is neither the name nor the schema of an operator"):
        graphir.register_operator(text, kernel=torch.neg, fake=torch.empty_like)
