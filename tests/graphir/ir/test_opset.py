"""Effects: what the table says an operator overwrites and aliases, against what torch does."""

import pytest
import torch

from graphir.errors import GraphirError
from graphir.ir.device import gpu
from graphir.ir.operator import PURE, Effects, Operator, Symbol, groups
from graphir.ir.opset import effects_of, overload, signature
from graphir.ir.optypes.own import OWN
from graphir.ir.symbols import to_symbol, to_torch

V4, M34, M33 = (4,), (3, 4), (3, 3)
IMAGE = (2, 3, 6, 6)
CHANNELS = (3,)
NORMED = [IMAGE, CHANNELS, CHANNELS, CHANNELS, CHANNELS]
TRAINING = {"training": True, "momentum": 0.1, "eps": 1e-5}

CASES = [
    ("relu.default", [M34], {}),
    ("relu_.default", [M34], {}),
    ("add.Tensor", [M34, M34], {}),
    ("add.Tensor", [M34], {"other": 2}),
    ("add_.Tensor", [M34, M34], {}),
    ("add_.Tensor", [M34], {"other": 2}),
    ("mul_.Scalar", [M34], {"other": 3}),
    ("copy_.default", [M34, M34], {}),
    ("zero_.default", [M34], {}),
    ("addcdiv_.default", [M34, M34, M34], {}),
    ("mm.default", [M34, (4, 2)], {}),
    ("addmm.default", [(2,), M34, (4, 2)], {}),
    ("t.default", [M34], {}),
    ("view.default", [M34], {"size": (12,)}),
    ("_unsafe_view.default", [M34], {"size": (2, 6)}),
    ("transpose.int", [M34], {"dim0": 0, "dim1": 1}),
    ("permute.default", [M34], {"dims": (1, 0)}),
    ("expand.default", [V4], {"size": (3, 4)}),
    ("slice.Tensor", [M34], {"dim": 1, "start": 1}),
    ("select.int", [M34], {"dim": 0, "index": 1}),
    ("unsqueeze.default", [V4], {"dim": 0}),
    ("squeeze.dim", [(1, 4)], {"dim": 0}),
    ("detach.default", [V4], {}),
    ("alias.default", [V4], {}),
    ("diagonal.default", [M33], {}),
    ("as_strided.default", [M34], {"size": (2, 2), "stride": (1, 2)}),
    ("split.Tensor", [M34], {"split_size": 2, "dim": 1}),
    ("split_with_sizes.default", [M34], {"split_sizes": (1, 3), "dim": 1}),
    ("unsafe_split.Tensor", [M34], {"split_size": 2, "dim": 1}),
    ("unbind.int", [M34], {}),
    ("cat.default", [[M34, M33]], {"dim": 1}),
    ("stack.default", [[M34, M34]], {}),
    ("clone.default", [M34], {}),
    ("sum.dim_IntList", [M34], {"dim": (0,)}),
    ("max.dim", [M34], {"dim": 0}),
    ("_softmax.default", [M34], {"dim": 1, "half_to_float": False}),
    ("native_layer_norm.default", [M34, V4, V4], {"normalized_shape": (4,), "eps": 1e-5}),
    ("native_batch_norm.default", NORMED, TRAINING),
    ("native_batch_norm.default", [IMAGE, None, None, CHANNELS, CHANNELS], TRAINING),
    ("native_batch_norm.default", [IMAGE, CHANNELS, CHANNELS, None, None], TRAINING),
    ("native_batch_norm.default", NORMED, TRAINING | {"training": False}),
    ("_native_batch_norm_legit.default", NORMED, TRAINING),
    ("_native_batch_norm_legit_functional.default", NORMED, TRAINING),
    ("max_pool2d_with_indices.default", [IMAGE], {"kernel_size": (2, 2)}),
    ("bernoulli.p", [M34], {"p": 0.5}),
    ("bernoulli_.float", [M34], {"p": 0.5}),
    ("native_dropout.default", [M34], {"p": 0.5, "train": True}),
    ("where.self", [M34, M34, M34], {}),
    ("full.default", [], {"size": (2, 3), "fill_value": 1.0}),
]  # fmt: skip


def tensors_of(returned):
    """What a call returned, flat, and its pattern."""
    items = returned if isinstance(returned, tuple) else (returned,)
    pattern = "".join("[" + "t" * len(i) + "]" if isinstance(i, list) else "t" if i is not None else "_" for i in items)
    return [t for i in items for t in (i if isinstance(i, list) else [i]) if t is not None], pattern


def observed(type, operands, args):
    """The effects of a real call: which operands changed, and whose memory each result is."""
    torch.manual_seed(0)
    made = [
        [torch.randn(s) for s in o] if isinstance(o, list) else None if o is None else torch.randn(o) for o in operands
    ]
    if type == "aten.where.self":
        made[0] = made[0] > 0
    flat = [t for m in made for t in (m if isinstance(m, list) else [m]) if t is not None]
    before = [t.clone() for t in flat]
    names = [p.name for p in signature(type).tensors]
    given = dict(zip([n for n in names if n not in args], made, strict=False))
    results, pattern = tensors_of(overload(type)(**given, **args))
    changed = [i for i, (t, b) in enumerate(zip(flat, before, strict=True)) if not torch.equal(t, b)]
    owner = {t.untyped_storage().data_ptr(): i for i, t in enumerate(flat)}
    aliases = [(o, owner[p]) for o, r in enumerate(results) if (p := r.untyped_storage().data_ptr()) in owner]
    returned = {source for _, source in aliases}
    writes = [pair for pair in aliases if pair[1] in changed]
    writes += list(enumerate([i for i in changed if i not in returned], start=len(results)))
    views = [pair for pair in aliases if pair[1] not in changed]
    operands_pattern = "".join(
        "[" + "t" * len(o) + "]" if isinstance(o, list) else "_" if o is None else "t" for o in operands
    )
    return Effects(tuple(writes), tuple(views)), operands_pattern, len(flat), pattern


@pytest.mark.parametrize(("name", "operands", "args"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_effects_are_what_torch_does(name, operands, args):
    type = f"aten.{name}"
    seen, operand_pattern, inputs, results = observed(type, operands, args)
    said = effects_of(type, args, operand_pattern, inputs, results)
    assert said._replace(random=False) == seen
    flat = "[" not in operand_pattern + results and "_" not in operand_pattern + results
    if flat:
        assert effects_of(type, args, None, inputs, None) == said


@pytest.mark.parametrize(
    ("type", "args", "random"),
    [
        ("aten.bernoulli.p", {"p": 0.5}, True),
        ("aten.native_dropout.default", {"p": 0.5, "train": True}, True),
        ("aten.randn.default", {"size": (2,)}, True),
        ("aten.relu.default", {}, False),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", {}, False),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", {"dropout_p": 0.1}, True),
        ("graphir.sgd", {}, False),
    ],
)
def test_random_operators_are_known(type, args, random):
    assert effects_of(type, args, "", 0, "").random is random


@pytest.mark.parametrize(
    ("type", "operands", "inputs", "writes"),
    [
        ("graphir.sgd", None, 4, ((0, 0), (1, 2))),
        ("graphir.sgd", "tt_t", 3, ((0, 0),)),
        ("graphir.adam", "tttt_tt", 6, ((0, 0), (1, 2), (2, 3), (3, 4))),
        ("graphir.adamw", None, 7, ((0, 0), (1, 2), (2, 3), (3, 4), (4, 5))),
    ],
)
def test_optimizers_overwrite_parameter_and_state(type, operands, inputs, writes):
    assert effects_of(type, {}, operands, inputs, None) == Effects(writes)


@pytest.mark.parametrize(
    ("type", "operands", "inputs"), [("Copy", None, 1), ("AllReduce", "[tt]", 2), ("graphir.load", None, 0)]
)
def test_own_types_that_move_values_are_pure(type, operands, inputs):
    assert effects_of(type, {}, operands, inputs, "[tt]" if type == "AllReduce" else None) == PURE


@pytest.mark.parametrize("type", OWN)
def test_own_types_have_signatures(type):
    assert groups(None, len(signature(type).tensors)) is not None
    assert all(p.name for p in signature(type).params)


def test_signatures_say_what_operators_take():
    found = signature("aten.addmm.default")
    assert [p.name for p in found.tensors] == ["self", "mat1", "mat2"]
    assert [(p.name, p.default, p.keyword) for p in found.params if p.kind == "value"] == [
        ("beta", 1, True),
        ("alpha", 1, True),
    ]
    assert [p.kind for p in signature("aten.cat.default").params] == ["tensors", "value"]
    assert signature("graphir.sgd").params[2].written


@pytest.mark.parametrize(
    ("type", "what"),
    [
        ("aten.frobnicate.default", f"torch {torch.__version__} has no operator 'aten.frobnicate.default'"),
        ("aten.relu.nope", f"torch {torch.__version__} has no operator 'aten.relu.nope'"),
        ("aten.relu", f"torch {torch.__version__} has no operator 'aten.relu'"),
        ("aten.__class__.default", f"torch {torch.__version__} has no operator 'aten.__class__.default'"),
        ("os.system.default", "unknown operator type 'os.system.default'"),
        ("FC", "unknown operator type 'FC'"),
        ("", "unknown operator type ''"),
    ],
)
def test_unknown_types_are_refused(type, what):
    with pytest.raises(GraphirError) as caught:
        signature(type)
    assert caught.value.what == what


@pytest.mark.parametrize(
    "constant", [torch.float32, torch.bool, torch.strided, torch.channels_last, torch.preserve_format]
)
def test_constants_have_symbols(constant):
    symbol = to_symbol(constant)
    assert isinstance(symbol, Symbol)
    assert to_torch(symbol) is constant


def test_constants_without_a_name_are_refused():
    with pytest.raises(GraphirError, match=r"torch\.sparse_coo is not supported\n  fix  supported: bf16, "):
        to_symbol(torch.sparse_coo)


@pytest.mark.parametrize(
    "type",
    [
        "aten.from_file.default",
        "aten.set_.source_Storage",
        "aten.set_.source_Tensor",
        "aten.resize_.default",
        "aten.item.default",
        "aten.save.default",
        "aten.record_stream.default",
        "aten._print.default",
    ],
)
def test_operators_that_reach_beyond_tensors_are_refused(type):
    with pytest.raises(GraphirError, match=r"is not allowed in a program|has no operator"):
        overload(type)


def test_composite_operators_that_a_program_may_name_make_new_memory():
    x = torch.randn(3, 3)
    calls = {
        "linalg_eigvals": (x,),
        "linalg_eigvalsh": (x,),
        "linalg_svdvals": (x,),
        "linear": (x, x),
        "matmul": (x, x),
        "outer": (x[0], x[0]),
    }
    for name, args in calls.items():
        result = overload(f"aten.{name}.default")(*args)
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name


@pytest.mark.parametrize("type", ["aten.reshape.default", "aten.contiguous.default", "aten.conj_physical.default"])
def test_composite_operators_are_refused(type):
    with pytest.raises(GraphirError, match="torch decides what it consists of when it runs"):
        overload(type)


def test_operators_say_whether_they_copy_or_reduce():
    kinds = [Operator(type, (), (), {}, gpu(0)).kind for type in ("Copy", "AllReduce", "graphir.sparse_sum", "FC")]
    assert kinds == ["copy", "reduce", "", ""]
