"""Nets and programs: who writes, who reads, and the graph of both."""

import pickle

import nets
import networkx
import pytest
import tiny
import torch

import graphir
from graphir.errors import GraphirError
from graphir.ir.blob import Blob
from graphir.ir.covers import Covers
from graphir.ir.device import CPU, gpu
from graphir.ir.net import Net
from graphir.ir.operator import Operator, groups, leaves
from graphir.ir.program import Program


def chain():
    """x -> a, a -> b, x overwritten, x -> c on another device."""
    ops = (
        Operator("R", ("x",), ("a",), {}, gpu(0)),
        Operator("R", ("a", "a"), ("b",), {}, gpu(0)),
        Operator("Add_", ("x",), ("x",), {}, gpu(0), output_versions=(1,)),
        Operator("R", ("x",), ("c",), {}, gpu(2), input_versions=(1,)),
    )
    blobs = {n: Blob(n, (2,), "f32", gpu(2) if n == "c" else gpu(0), "activation", n) for n in "xabc"}
    blobs["lr"] = Blob("lr", (), "f64", CPU, "input", "lr")
    return Net("chain", ops, blobs, ("x", "lr"), ("c",))


def test_producers_are_the_last_writers():
    net = chain()
    assert net.producer("a") is net.ops[0]
    assert net.producer("x") is net.ops[2]
    assert net.producer("x", before=2) is None
    assert net.producer("x", before=3) is net.ops[2]
    assert net.producer("lr") is None


def test_consumers_are_in_program_order_and_named_once():
    net = chain()
    assert net.consumers("x") == [net.ops[0], net.ops[2], net.ops[3]]
    assert net.consumers("a") == [net.ops[1]]
    assert net.consumers("c") == []


@pytest.mark.parametrize("query", [Net.blob, Net.producer, Net.consumers])
def test_unknown_blobs_are_refused(query):
    net = chain().with_(blobs={**chain().blobs, "conv1": chain().blobs["a"]})
    with pytest.raises(GraphirError, match=r"no blob 'conv2' in net 'chain'; did you mean 'conv1'\?"):
        query(net, "conv2")


def test_devices_are_those_of_operators_and_blobs():
    assert chain().devices == ("gpu:0", "gpu:2", "cpu:0")
    assert Program("p", chain(), Net("s", (), {})).devices == ("gpu:0", "gpu:2", "cpu:0")


def test_operators_read_and_make_versions():
    net = chain()
    assert list(net.ops[3].reads) == [("x", 1)]
    assert list(net.ops[2].makes) == [("x", 1)]
    assert list(net.ops[1].reads) == [("a", 0), ("a", 0)]


def test_a_changed_net_leaves_the_old_one():
    net = chain()
    assert net.with_(name="other").name == "other"
    assert net.name == "chain"


def test_what_was_found_out_about_a_net_is_not_pickled_with_it():
    net = chain()
    fresh = pickle.dumps(net)
    assert net.touches.makes.any() and net.producer("x") and net.devices
    assert pickle.dumps(net) == fresh
    assert pickle.loads(fresh) == net


def test_a_net_is_a_graph_of_operators_and_values():
    net = chain()
    graph = net.to_networkx()
    assert graph.nodes["op", 1]["op"] is net.ops[1]
    assert graph.nodes["x", 1]["blob"] is net.blobs["x"]
    assert list(graph.successors(("x", 0))) == [("op", 0), ("op", 2)]
    assert list(graph.predecessors(("op", 3))) == [("x", 1)]
    assert ("lr", 0) in graph


@pytest.mark.parametrize("seed", range(10))
def test_the_graph_of_a_step_has_no_cycles(seed):
    net = nets.random_program(seed).step
    graph = net.to_networkx()
    assert networkx.is_directed_acyclic_graph(graph)
    made = [value for op in net.ops for value in op.makes]
    assert all(graph.in_degree(value) == 1 for value in made)


@pytest.mark.parametrize(
    ("pattern", "count", "arranged"),
    [
        (None, 3, [0, 1, 2]),
        ("t_[t_]", 2, [0, None, [1, None]]),
        ("", 2, []),
        ("[]t", 1, [[], 0]),
        ("tt", 5, [0, 1]),
    ],
)
def test_patterns_arrange_positions(pattern, count, arranged):
    assert groups(pattern, count) == arranged


def test_leaves_are_the_scalars_of_an_argument():
    assert list(leaves((1, (2.0, ("x", None)), ()))) == [1, 2.0, "x", None]
    assert list(leaves(True)) == [True]


def test_parameters_of_a_program_are_those_of_its_step():
    program = nets.random_program(1)
    assert program.params == tuple(n for n, b in program.step.blobs.items() if b.role == "param")
    assert program.params


def test_state_and_module_are_not_part_of_equality():
    program = nets.random_program(1)
    assert program.with_(state={}, module=None) == program
    assert program.with_(covers=Covers(fixed="why")) != program


def test_values_have_a_short_representation_and_a_hash():
    program = tiny.program()
    plan = tiny.plan(program)
    ops = len(program.step.ops)
    assert repr(program.step) == f"<net {program.step.name!r}: {ops} operators>"
    assert repr(program).startswith(f"<program {program.name!r}: {len(program.init.ops)} + {ops} operators on gpu:0")
    assert repr(plan).startswith(f"<plan {plan.name!r}: {len(plan.instructions)} instructions on gpu:0")
    reordered = program.step.with_(blobs=dict(reversed(program.step.blobs.items())))
    for value, again in (
        *((value, graphir.parse(str(value))) for value in (program.step, program, plan)),
        (program.step, reordered),
    ):
        assert {value: 1}[again] == 1


def test_a_pickled_program_leaves_its_module():
    model = torch.nn.Linear(3, 2)
    model.local = lambda: None  # nobody can pickle it
    program = graphir.capture(model, (torch.randn(4, 3),))
    again = pickle.loads(pickle.dumps(program))
    assert again == program and again.module is None and program.module is model
    assert again.state.keys() == program.state.keys()
