"""Plans that no pass emits are refused before anything runs."""

import dataclasses

import models
import pytest
from graphir.runtime import Session
from runnable import captured, sgd

from graphir import passes
from graphir.errors import PlanError
from graphir.ir.operator import map_arg
from graphir.ir.plan import Instruction
from graphir.ir.size import Polynomial, dimension, substitute


@pytest.fixture(scope="module")
def program():
    example = models.mlp()
    return passes.replicate(captured(example, sgd(example.model.parameters())), devices=[0, 1])


def with_args(program, type, **args):
    """The first operator of a type with other arguments."""
    ops = list(program.step.ops)
    i = next(i for i, op in enumerate(ops) if op.type == type)
    ops[i] = (
        ops[i]._replace(args={**ops[i].args, **args})
        if hasattr(ops[i], "_replace")
        else dataclasses.replace(ops[i], args={**ops[i].args, **args})
    )
    return program.with_(step=dataclasses.replace(program.step, ops=tuple(ops)))


def refuse(plan, message):
    with pytest.raises(PlanError, match=message):
        Session(plan, {})


@pytest.mark.parametrize("kind", ["wait", "free"])
def test_a_lane_of_an_unused_device_is_refused(program, kind):
    plan = passes.emit(program)
    found = next((i for i in plan.instructions if i.kind == kind), Instruction("free", "", storage="gpu_0/fc1"))
    wrong = found._replace(lane="gpu:7.compute")
    refuse(plan.with_(instructions=(*plan.instructions, wrong)), f"a {kind}, names lane 'gpu:7.compute'")


@pytest.mark.parametrize("dim", [-1, 5])
def test_a_batch_dimension_that_an_input_has_not_is_refused(program, dim):
    interface = program.interface
    feeds = (interface.feeds[0]._replace(batch_dim=dim), *interface.feeds[1:])
    plan = passes.emit(program)
    changed = program.with_(interface=dataclasses.replace(interface, feeds=feeds))
    refuse(plan.with_(program=changed), f"its batch dimension cannot be {dim}")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "learning rate"),
        ({"lr": "x"}, "learning rate"),
        ({"lr": (1,)}, "learning rate"),
        ({"lr": float("nan")}, "learning rate"),
        ({"lr": 0.1}, "momentum"),
        ({"lr": 0.1, "momentum": (0.9,)}, "momentum"),
    ],
    ids=str,
)
def test_a_group_without_its_numbers_is_refused(program, options, name):
    interface, plan = program.interface, passes.emit(program)
    groups = tuple(group._replace(options=options) for group in interface.param_groups)
    changed = program.with_(interface=dataclasses.replace(interface, param_groups=groups))
    refuse(plan.with_(program=changed), f"parameter group 0 has the {name} .*, which is not a number")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"reduction": "max"}, "AllReduce cannot reduce by 'max'"),
        ({"shares": (0, 0)}, r"AllReduce has the shares \(0, 0\)"),
        ({"shares": (-1, 3)}, r"AllReduce has the shares \(-1, 3\)"),
        ({"shares": (Polynomial.of({("gpu_0/batch",): 1, (): -100}), 3)}, "AllReduce has the shares"),
    ],
    ids=str,
)
def test_shares_that_give_no_mean_are_refused(program, args, message):
    plan = passes.emit(program)
    refuse(plan.with_(program=with_args(program, "AllReduce", **args)), message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"form": "evil"}, "graphir.sgd has the form 'evil'; forms: for_loop, foreach, fused"),
        ({"form": 3}, "takes a str for form, not 3"),
        ({"momentum": "x"}, "takes a float for momentum, not 'x'"),
        ({"momentum": None}, "takes a float for momentum, not None"),
        ({"momentum": True}, "takes a float for momentum, not True"),
        ({"nesterov": "yes"}, "takes a bool for nesterov, not 'yes'"),
    ],
    ids=str,
)
def test_an_optimizers_wrong_option_is_refused(program, args, message):
    plan = passes.emit(program)
    refuse(plan.with_(program=with_args(program, "graphir.sgd", **args)), message)


def test_rows_of_a_replica_without_a_batch_are_refused(program):
    """Its rows are as many as were captured, while those of the other replica follow the batch."""
    fixed = {"gpu_1/batch": program.dims["gpu_1/batch"]}

    def bound(size):
        return substitute(size, lambda dim: fixed.get(dim, dimension(dim)))

    def of_arg(arg):
        return map_arg(arg, lambda scalar: bound(scalar) if isinstance(scalar, Polynomial) else scalar)

    def of(blob):
        shape, strides = (sizes and tuple(map(bound, sizes)) for sizes in (blob.shape, blob.strides))
        return blob._replace(shape=shape, strides=strides, offset=bound(blob.offset))

    step = dataclasses.replace(
        program.step,
        blobs={name: of(blob) for name, blob in program.step.blobs.items()},
        ops=tuple(op._replace(args={key: of_arg(arg) for key, arg in op.args.items()}) for op in program.step.ops),
    )
    dims = {dim: value for dim, value in program.dims.items() if dim not in fixed}
    plan = passes.emit(program.with_(step=step, dims=dims))
    assert plan.program.sharing == ("gpu_0/",)
    refuse(plan, "input 'gpu_1/x' has rows, but its replica has no batch dimension")
