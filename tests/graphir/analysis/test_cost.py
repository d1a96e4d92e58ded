"""The work of an operator: its arithmetic against torch's own count, its bytes by hand."""

import models
import pytest
import torch
from small import program_of
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode

import graphir
from graphir.analysis.cost import Cost, Rates, Work, operator_costs, work
from graphir.analysis.profiles import Machine, Measured, Profile
from graphir.ir.optypes.record import OperatorType
from graphir.ir.optypes.table import add_registered, registered_types
from graphir.ir.size import bind_shape


def captured(model, inputs, targets=(), loss=None):
    return graphir.capture(model, inputs=inputs, targets=targets, loss=loss)


def flops(op, program):
    return work(op, program.step, program.dims).flops


def work_of(body):
    net = program_of(body).step
    return [work(op, net, {"batch": 4}) for op in net.ops]


# Some versions of torch have no count for the attention kernel that the host runs.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *others, **options: flop_counter.sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *others, **options: flop_counter.sdpa_backward_flop_count(grad, q, k, v)
    ),
}


@pytest.mark.parametrize("make", [models.mlp, models.resnet, models.gpt])
def test_arithmetic_is_what_torch_counts(make):
    example = make()
    program = captured(*example)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        example.loss(example.model(*example.inputs), *example.targets).backward()
    assert sum(flops(op, program) for op in program.step.ops) == counter.get_total_flops() > 0


def test_attention_is_what_torch_counts():
    program = captured(*models.gpt())
    forward, backward = (op for op in program.step.ops if "attention" in op.type and op.module == "layers.0.attention")
    q, k, v, out = (bind_shape(program.step.blob(n).shape, program.dims) for n in (*forward.inputs, forward.outputs[0]))
    assert flops(forward, program) == flop_counter.sdpa_flop_count(q, k, v)
    assert flops(backward, program) == flop_counter.sdpa_backward_flop_count(out, q, k, v)


def test_a_transposed_convolution_sweeps_its_input():
    convolution = torch.nn.ConvTranspose2d(3, 4, 2, stride=2)
    x = torch.randn(2, 3, 5, 5)
    with FlopCounterMode(display=False) as counter:
        convolution(x).sum().backward()
    program = captured(convolution, (x,), loss=torch.sum)
    assert sum(flops(op, program) for op in program.step.ops) == counter.get_total_flops()


def test_bytes_are_those_read_and_written():
    assert work_of(
        """
        input x : f32[batch,3] @gpu:0
        input i : i64[2] @gpu:0
        a : f32[batch,3] @gpu:0 = aten.neg(x)
        b : f32[3,batch] strides [1,3] in a @gpu:0 = aten.t(a) {views=[0:0]}
        c : f32[2,3] @gpu:0 = aten.index_select(x, i, dim=0)
        """
    ) == [Work(0, 96), Work(0, 0), Work(0, 24)]


def test_an_operator_takes_the_longer_of_its_arithmetic_and_its_bytes():
    rates = Rates({"f32": 100.0, "bf16": 400.0}, 10.0, 1.0)
    assert rates.seconds(Work(200, 5)) == 3.0
    assert rates.seconds(Work(200, 50)) == 6.0
    assert rates.seconds(Work(0, 0)) == 1.0
    assert rates.seconds(Work(200, 0, "bf16")) == 1.5
    assert rates.seconds(Work(200, 0, "f16")) == 3.0


def costs_of(body, profile=None):
    net = program_of(body).step
    rates = Rates({"f32": 100.0}, 10.0, 1.0, 0.25)
    return operator_costs(net, {"batch": 4}, lambda device: rates, profile, threads=1)


COSTS = """
    input x : f32[batch,5] @gpu:0
    a : f32[batch,5] @gpu:0 = aten.neg(x)
    b : f32[5,batch] strides [1,5] in a @gpu:0 = aten.t(a) {views=[0:0]}
    c : f32[5,5] @gpu:0 = aten.mm(b, a)
    """


def test_costs_say_where_their_seconds_come_from():
    net = program_of(COSTS).step
    profile = Profile(
        Machine("a", "b", "c"), {Profile.key(net.ops[2], net.blobs, {"batch": 4}, 1): Measured(0, 0, 7.0)}
    )
    assert costs_of(COSTS) == [Cost(17.0, "roofline"), Cost(0.25, "nothing"), Cost(27.0, "roofline")]
    assert costs_of(COSTS, profile)[2] == Cost(7.0, "profile")


@pytest.mark.parametrize(("beside", "slowdown"), [(10.5, 1.5), (6.5, 1.0), (None, None)])
def test_a_measured_call_takes_longer_beside_another_by_what_was_measured(beside, slowdown):
    net = program_of(COSTS).step
    key = Profile.key(net.ops[2], net.blobs, {"batch": 4}, 1)
    profile = Profile(Machine("a", "b", "c"), {key: Measured(0, 0, 7.0, beside=beside)})
    assert costs_of(COSTS, profile)[2] == Cost(7.0, "profile", slowdown)


def test_a_part_of_a_reduction_may_be_measured():
    body = """
        input x : f32[10] @gpu:0
        input y : f32[10] @gpu:1
        [a : f32[10] @gpu:0, b : f32[10] @gpu:1] = AllReduce([x, y])
        """
    net = program_of(body).step
    key = Profile.key(net.ops[0], net.blobs, {}, 1)
    profile = Profile(Machine("a", "b", "c"), {key: Measured(0, 0, 2.0)})
    assert costs_of(body, profile) == [Cost(2.0, "profile")]


def test_a_registered_operator_costs_what_it_says():
    registered = OperatorType("mylib.costly.default", registered=True, flops=lambda op: 1000 * op.result().shape[0])
    before = dict(registered_types())
    add_registered(registered)
    try:
        (found,) = costs_of("input x : f32[batch,5] @gpu:0\na : f32[batch,5] @gpu:0 = mylib.costly.default(x)")
        assert found == Cost(1.0 + 40.0, "registered")
    finally:
        registered_types().pop("mylib.costly.default")
        assert dict(registered_types()) == before


def test_a_part_of_a_collective_reads_all_and_makes_one():
    (found,) = costs_of(
        """
        input x : f32[10] @gpu:0
        input y : f32[10] @gpu:1
        [a : f32[10] @gpu:0, b : f32[10] @gpu:1] = AllReduce([x, y])
        """
    )
    assert found == Cost(1.0 + 12.0, "roofline")


@pytest.mark.parametrize(("participants", "reduction", "passes"), [(2, "mean", 5), (3, "sum", 6), (3, "mean", 8)])
def test_a_part_of_a_reduction_adds_operands_one_after_the_other(participants, reduction, passes):
    """The first two into a sum, each further one to it; a mean is the sum divided in place."""
    inputs = "\n".join(f"input x{i} : f32[10] @gpu:{i}" for i in range(participants))
    made = ", ".join(f"a{i} : f32[10] @gpu:{i}" for i in range(participants))
    read = ", ".join(f"x{i}" for i in range(participants))
    (found,) = costs_of(f'{inputs}\n[{made}] = AllReduce([{read}], reduction="{reduction}")')
    assert found == Cost(1.0 + passes * 40 / 10.0, "roofline")
