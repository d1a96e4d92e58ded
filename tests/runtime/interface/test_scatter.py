"""How a step's arguments are split over replicas, and what is refused."""

import json

import pytest
import torch
from graphir.runtime.interface.scatter import Scatter, SmallShares
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

from graphir.errors import CoverageError, SessionError
from graphir.ir.blob import Blob
from graphir.ir.covers import Covers
from graphir.ir.device import CPU, gpu
from graphir.ir.guard import Guard
from graphir.ir.net import Net
from graphir.ir.program import Interface, Program, Slot
from graphir.ir.size import Polynomial, parse_size, rename_dims, size_dims


def batch(prefix="", times=1, plus=0):
    return Polynomial.of({(f"{prefix}batch",): times, (): plus})


ROWS_OF_X = Slot("x", 0)


def program_of(replicas=1, *, args=(0,), kwargs=None, feeds=(ROWS_OF_X,), fixed="", **shapes):
    """A program whose inputs have these shapes, each a function of the replica's prefix."""
    prefixes = tuple(f"gpu_{i}/" for i in range(replicas)) if replicas > 1 else ("",)
    shapes = shapes or {"x": lambda p: (batch(p), 3)}
    blobs = {
        p + name: Blob(p + name, shape(p), "i64" if name == "y" else "f32", gpu(i), "input", p + name)
        for i, p in enumerate(prefixes)
        for name, shape in shapes.items()
    }
    step = Net("net.step", (), blobs, tuple(blobs))
    structure = _pytree.treespec_dumps(_pytree.tree_structure((args, kwargs or {})))
    interface = Interface(structure, tuple(feeds))
    dims = {dim: 4 for shape in shapes.values() for p in prefixes for size in shape(p) for dim in size_dims(size)}
    return Program("net", Net("net.init", (), {}), step, dims, Covers(fixed=fixed), prefixes, interface)


def split(program, *args, **kwargs):
    return Scatter(program).split(args, kwargs)


X = torch.arange(36.0).view(12, 3)


class Mine(torch.Tensor):
    """A tensor of a user's own class."""


@pytest.mark.parametrize(("rows", "replicas"), [(6, 2), (7, 2), (7, 3), (8, 3), (12, 4)])
def test_shares_are_those_of_torch_chunk(rows, replicas):
    expected = X[:rows].chunk(replicas)
    dims, shares = split(program_of(replicas), X[:rows])
    assert [share.tolist() for share in shares] == [part.tolist() for part in expected]
    assert list(dims.values()) == [len(part) for part in expected]


def test_one_replica_takes_the_tensor_itself():
    dims, (share,) = split(program_of(), X)
    assert share is X
    assert dims == {"batch": 12}


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 9])
def test_a_batch_that_gives_fewer_shares_than_replicas_is_refused(rows):
    with pytest.raises(SessionError, match=rf"argument 0 \('x'\) has {rows} rows? along dimension 0, too few for 4"):
        split(program_of(4), X[:rows])


def test_no_rows_are_too_few_for_one_replica():
    with pytest.raises(SessionError) as refused:
        split(program_of(), X[:0])
    assert "has 0 rows along dimension 0, too few for 1 replica: " in str(refused.value)
    assert refused.value.fix == "give at least 1 row"


def test_replicas_get_whole_micro_batches():
    program = program_of(3, x=lambda p: (batch(p, 3), 3))
    with pytest.raises(
        CoverageError, match=r"12 rows .*, in shares of 4, 4, 4, and the program cuts a share into 3 equal"
    ):
        split(program, X)
    named = Blob("micro_2/x", (), "f32", CPU, "activation", "micro_2/x")
    program = program.with_(step=program.step.with_(blobs={**program.step.blobs, named.name: named}))
    with pytest.raises(SessionError, match="12 rows along dimension 0, too few for 3 replicas") as refused:
        split(program, X)  # 4 thirds: 2 and 2
    assert refused.value.fix == "give at least 9 rows, and such that ceil(rows / 9) leaves some for the last"


def test_arguments_have_as_many_shares_each():
    program = program_of(
        4,
        args=(0, 0),
        feeds=(Slot("x", 0), Slot("z", 0)),
        x=lambda p: (batch(p), 3),
        z=lambda p: (Polynomial.of({(f"{p}length",): 1}), 3),
    )
    with pytest.raises(SmallShares) as small:
        split(program, X[:2], X)
    assert small.value.fewer == 2
    with pytest.raises(SmallShares) as small:
        split(program, X, X[:2])
    assert small.value.fewer == 0  # rows of other dimensions than the batch are never missing
    names = "gpu_0/x", "gpu_1/x", "gpu_0/z", "gpu_1/z"
    blobs = {name: program.step.blobs[name] for name in names}
    dims = {"gpu_0/batch": 4, "gpu_1/batch": 4, "gpu_0/length": 4, "gpu_1/length": 4}
    two = program.with_(step=program.step.with_(blobs=blobs, external_inputs=names), dims=dims)
    assert two.sharing == ("gpu_0/", "gpu_1/")
    assert [len(share) for share in split(two, X[:2], X[2:4])[1]] == [1, 1, 1, 1]
    assert [len(share) for share in split(two, X[:2], X)[1]] == [1, 1, 6, 6]


def test_there_may_be_no_lookups():
    program = program_of(
        args=(0, 0),
        feeds=(Slot("x", 0), Slot("i", None)),
        x=lambda p: (batch(p), 3),
        i=lambda p: (Polynomial.of({("lookups",): 1}),),
    )
    assert split(program, X, X[:0, 0])[0] == {"batch": 12, "lookups": 0}


def test_what_has_no_batch_dimension_goes_whole_to_each():
    program = program_of(
        2,
        args=(0, 0),
        feeds=(Slot("x", 0), Slot("w", None)),
        x=lambda p: (batch(p), 3),
        w=lambda p: (3,),
    )
    w = torch.randn(3)
    _, shares = split(program, X, w)
    assert shares[2] is w
    assert shares[3] is w


def test_a_batch_dimension_other_than_the_first_is_split_and_laid_out_as_captured():
    program = program_of(2, feeds=(Slot("x", 1),), x=lambda p: (3, batch(p)))
    _, shares = split(program, X.t())
    assert [s.shape for s in shares] == [(3, 6), (3, 6)]
    assert all(s.is_contiguous() for s in shares)
    assert torch.equal(torch.cat(shares, 1), X.t())


def test_another_layout_is_copied_to_the_captured_one():
    strided = torch.empty_strided((12, 3), (1, 12)).copy_(X)
    _, (share,) = split(program_of(), strided)
    assert share.stride() == (3, 1)
    assert torch.equal(share, X)


def test_dimensions_are_solved_from_sizes():
    program = program_of(x=lambda p: (batch(p, 2, 1), 3))
    assert split(program, X[:7])[0] == {"batch": 3}
    with pytest.raises(
        SessionError, match=r"argument 0 \('x'\) has shape \[8, 3\], the program takes \[2\*batch\+1, 3\]"
    ):
        split(program, X[:8])


def test_sizes_that_do_not_agree_are_refused():
    program = program_of(
        args=(0, 0), feeds=(Slot("x", 0), Slot("y", 0)), x=lambda p: (batch(p), 3), y=lambda p: (batch(p),)
    )
    with pytest.raises(SessionError, match=r"argument 0 \('x'\) has 12 rows, argument 1 \('y'\) 4"):
        split(program, X, torch.zeros(4, dtype=torch.int64))


def sequences(replicas=1, fixed="", **lengths):
    """Programs of tokens ``x`` and ``y``, whose second dimension is the length, or what *lengths* make of it."""
    sizes = {"x": "length", "y": "length", **lengths}
    return program_of(
        replicas,
        args=(0, 0),
        feeds=(Slot("x", 0), Slot("y", 0)),
        fixed=fixed,
        **{
            name: lambda p, second=second: (batch(p), rename_dims(parse_size(second), p.__add__))
            for name, second in sizes.items()
        },
    )


def tokens(rows, length):
    return torch.zeros(rows, length), torch.zeros(rows, length, dtype=torch.int64)


def test_other_dimensions_are_passed_whole_to_each_replica():
    dims, shares = split(sequences(2), *tokens(5, 7))
    assert dims == {"gpu_0/batch": 3, "gpu_1/batch": 2, "gpu_0/length": 7, "gpu_1/length": 7}
    assert [tuple(share.shape) for share in shares] == [(3, 7), (2, 7)] * 2


def test_a_size_of_several_dimensions_is_checked():
    program = sequences(y="batch*length+1")
    x, _ = tokens(3, 4)
    assert split(program, x, torch.zeros(3, 13, dtype=torch.int64))[0] == {"batch": 3, "length": 4}
    with pytest.raises(SessionError, match=r"argument 1 .* has shape \[3, 12\], .* takes \[batch, batch\*length\+1\]"):
        split(program, x, torch.zeros(3, 12, dtype=torch.int64))


def test_a_dimension_is_solved_from_a_product():
    program = program_of(x=lambda p: (batch(p), parse_size(f"{p}batch*{p}length")))
    assert split(program, torch.zeros(3, 12))[0] == {"batch": 3, "length": 4}
    with pytest.raises(SessionError, match=r"has shape \[3, 13\], the program takes \[batch, batch\*length\]"):
        split(program, torch.zeros(3, 13))


@pytest.mark.parametrize("replicas", [1, 2])
def test_inputs_of_two_lengths_are_refused(replicas):
    (x, _), (_, y) = tokens(4, 7), tokens(4, 6)
    with pytest.raises(SessionError) as caught:
        split(sequences(replicas), x, y)
    each = f" for each of {replicas} replicas" if replicas > 1 else ""
    assert caught.value.what == f"argument 1 ('y') has shape [4, 6], the program takes [batch, length]{each}"
    assert "length is 7 by argument 0 ('x')" in caught.value.fix


def test_a_dimension_of_fixed_size_says_why():
    program = sequences(fixed="length is fixed at 8: 4, 3, 3, 2 at length 8, 7, 6, 5", x="8", y="8")
    assert split(program, *tokens(3, 8))[0] == {"batch": 3}
    with pytest.raises(
        SessionError, match=r"\[3, 7\], the program takes \[batch, 8\](.|\n)*length is fixed at 8: 4, 3"
    ):
        split(program, *tokens(3, 7))


def test_a_program_of_fixed_sizes_says_why():
    program = program_of(fixed="view at 'fc' depends on the batch", x=lambda p: (4, 3))
    assert split(program, X[:4])[0] == {}
    with pytest.raises(SessionError, match=r"takes \[4, 3\](.|\n)*its sizes are fixed: view at 'fc' depends on the"):
        split(program, X[:5])


def test_a_share_that_a_guard_refuses_is_told_from_the_batch():
    guards = tuple(Guard(batch(f"gpu_{i}/"), ">=", 2, reason="it is contiguous") for i in range(2))
    with pytest.raises(SessionError, match=r"batch is 1 in a replica's share, the program takes batch>=2: it is cont"):
        split(program_of(2).with_(covers=Covers(guards)), X[:3])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "a step takes 1 positional argument, 0 given"),
        ((X, X), "a step takes 1 positional argument, 2 given"),
        ((3,), r"argument 0 \('x'\) is of type int, not a tensor"),
        ((X.double(),), r"argument 0 \('x'\) has dtype torch.float64, the program takes torch.float32"),
        ((X.view(12, 3, 1),), r"argument 0 \('x'\) has shape \[12, 3, 1\], the program takes \[batch, 3\]"),
        ((X.view(9, 4),), r"argument 0 \('x'\) has shape \[9, 4\], the program takes \[batch, 3\]"),
        ((X.view(9, 4),), "fix  dimension 1 has to be 3"),
        ((X.to_sparse(),), r"argument 0 \('x'\) is a torch.sparse_coo tensor"),
        ((X.to_mkldnn(),), r"argument 0 \('x'\) is a torch._mkldnn tensor"),
        ((X.to("meta"),), r"argument 0 \('x'\) is on meta, so it has no data"),
        ((FakeTensorMode().from_tensor(X),), r"argument 0 \('x'\) is a fake tensor, so it has no data"),
        ((torch.nested.nested_tensor([X]),), r"argument 0 \('x'\) is a nested tensor"),
        ((torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),), r"argument 0 \('x'\) is a quantized tensor"),
        ((X.as_subclass(Mine),), r"argument 0 \('x'\) is a Mine, a subclass of Tensor"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(args, message):
    with pytest.raises(SessionError, match=message):
        split(program_of(), *args)


def test_keyword_arguments_match_by_name():
    program = program_of(
        args=(),
        kwargs={"a": 0, "b": 0},
        feeds=(Slot("x", 0), Slot("y", 0)),
        x=lambda p: (batch(p), 3),
        y=lambda p: (batch(p),),
    )
    y = torch.zeros(12, dtype=torch.int64)
    assert [t.dtype for t in split(program, b=y, a=X)[1]] == [torch.float32, torch.int64]
    with pytest.raises(SessionError, match=r"takes 0 positional arguments and 'a', 'b', 0 and 'a', 'c' given"):
        split(program, a=X, c=y)
    with pytest.raises(SessionError, match=r"argument 'b' \('y'\) has dtype"):
        split(program, a=X, b=X)


def test_a_changed_constant_is_refused():
    program = program_of(args=(0, 0), feeds=(Slot("x", 0), Slot(None, None, 2)))
    assert split(program, X, 2)
    for other in (3, 2.0, True, "2"):
        with pytest.raises(SessionError, match=f"argument 1 was 2 when the program was captured, now {other!r}"):
            split(program, X, other)


def test_one_tensor_passed_twice_has_to_stay_one():
    program = program_of(args=(0, 0), feeds=(Slot("x", 0), Slot("x", 0)))
    assert len(split(program, X, X)[1]) == 1
    with pytest.raises(SessionError, match="were one tensor when the program was captured, now they are two"):
        split(program, X, X.clone())


def test_sizes_may_alternate():
    scatter = Scatter(program_of(2))
    for rows in (6, 8, 6, 7, 8):
        dims, shares = scatter.split((X[:rows],), {})
        assert torch.equal(torch.cat(shares), X[:rows])
        assert sum(dims.values()) == rows


def test_a_parameter_is_taken_as_a_plain_tensor():
    _, (share,) = split(program_of(), torch.nn.Parameter(X))
    assert type(share) is torch.Tensor
    assert not share.requires_grad


def test_a_damaged_structure_is_refused():
    program = program_of()
    with pytest.raises(SessionError, match="has 1 leaves, the program 2 feeds"):
        Scatter(program.with_(interface=Interface(program.interface.arguments, (Slot("x", 0), Slot("y", 0)))))
    with pytest.raises(SessionError, match="cannot be read"):
        Scatter(program.with_(interface=Interface(json.dumps(3), ())))
