"""``Copy`` and ``AllReduce``."""

import pytest
import torch
from graphir.runtime.kernels.buffers import buffer_on
from graphir.runtime.kernels.communication import all_reduce, all_reduce_each, copy, reduction

from graphir.errors import PlanError
from graphir.ir.device import gpu
from graphir.ir.operator import Operator
from graphir.ir.size import dimension

BASE = torch.arange(120.0)


@pytest.mark.parametrize(
    "source",
    [
        BASE.view(10, 12),
        BASE.view(10, 12).t(),
        BASE.view(10, 12)[:, 2:5],
        BASE.view(10, 12)[3:, ::4],
        BASE[:3].expand(4, 3),
        BASE[:3, None].expand(3, 4),
        BASE.as_strided((5, 4), (2, 1), 7),
        BASE[7],
        BASE[:0].view(0, 4),
        BASE.view(10, 12)[:, :0].expand(4, 10, 0),
        BASE.view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["dense", "transposed", "rows", "gaps", "expanded", "last", "windows", "scalar", "empty", "none", "channels"],
)
def test_a_copy_has_the_values_and_strides_in_a_storage_of_its_own(source):
    result = copy(source)
    assert torch.equal(result, source)
    assert result.stride() == source.stride()
    assert result.storage_offset() == 0
    assert result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr() or not source.numel()


def test_the_sum_is_formed_in_participant_order():
    a, b, one = torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])
    assert all_reduce([a, b, one], None).item() == 1
    assert all_reduce([a, one, b], None).item() == 0
    assert all_reduce([one * 0, a, b, one], None).item() == 1
    assert all_reduce([one * 0, a, one, b], None).item() == 0


def test_equal_shares_give_the_sum_divided():
    a, b, c = (torch.randn(50) for _ in range(3))
    assert torch.equal(all_reduce([a, b, c], 3), (a + b + c).div(3))


def test_unequal_shares_weigh_each_input_before_the_sum():
    a, b = torch.randn(50), torch.randn(50)
    assert torch.equal(all_reduce([a, b], 2, (4 * 2 / 7, 3 * 2 / 7)), (a.mul(4 * 2 / 7) + b.mul(3 * 2 / 7)).div(2))


def test_one_participant_gets_a_storage_of_its_own():
    a = torch.randn(5)
    result = all_reduce([a], 1)
    assert torch.equal(result, a)
    assert result.data_ptr() != a.data_ptr()


def mean(*shares):
    names = tuple(f"g{i}" for i in range(len(shares)))
    return Operator("AllReduce", names, names, {"reduction": "mean", "shares": shares}, gpu(0))


@pytest.mark.parametrize("weights", [None, (8 / 7, 6 / 7, 7 / 7)])
@pytest.mark.parametrize("divisor", [None, 3])
@pytest.mark.parametrize("participants", [1, 2, 3])
def test_several_reductions_have_the_bits_of_each(participants, divisor, weights):
    torch.manual_seed(0)
    inputs = [(torch.randn(7), torch.randn(3, 5).t(), torch.randn(())) for _ in range(participants)]
    weights = weights and weights[:participants]
    found = all_reduce_each(inputs, divisor, weights)
    for tensor, each in zip(found, zip(*inputs, strict=True), strict=True):
        expected = all_reduce(each, divisor, weights)
        assert torch.equal(tensor, expected)
        assert tensor.stride() == expected.stride()


def test_shares_follow_the_dimensions():
    first, second = (dimension(f"gpu_{i}/batch") for i in range(2))
    assert reduction(mean(first, second), {"gpu_0/batch": 4, "gpu_1/batch": 4}) == (2, None)
    assert reduction(mean(first, second), {"gpu_0/batch": 4, "gpu_1/batch": 3}) == (2, (4 * 2 / 7, 3 * 2 / 7))


def test_an_unknown_reduction_is_refused():
    with pytest.raises(PlanError, match="AllReduce cannot reduce by 'max'"):
        reduction(mean(1, 1)._replace(args={"reduction": "max"}), {})


@pytest.mark.parametrize(
    "mark",
    [
        lambda z: z.conj(),
        lambda z: z.conj().T,
        lambda z: z.conj().imag,
        lambda z: torch._neg_view(z.conj()),
        lambda z: z.conj()[1:, ::2].expand(2, 2, 2),
    ],
)
def test_copies_keep_the_bits_by_which_torch_conjugates_and_negates(mark):
    source = mark(torch.randn(3, 4, dtype=torch.complex64))
    for copied in (copy(source), buffer_on(torch.device("cpu")).receive(source)):
        assert torch.equal(copied, source) and copied.stride() == source.stride()
        assert (copied.is_conj(), copied.is_neg()) == (source.is_conj(), source.is_neg())
        assert copied.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
