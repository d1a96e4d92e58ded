"""What a step copies between devices: bytes, kinds, first readers, the moves that made copies necessary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.executors.reference import Reference
from runnable import batch_of, captured, setting_of, spread, trained
from small import program_of, two_layers

import graphir
from graphir import passes
from graphir.analysis.traffic import Copied, Traffic, traffic
from graphir.errors import GraphirError, PlacementError
from graphir.ir.program import Program

SHIFT = "shift_activations{activations=[relu], shifts={0: 1}}"


def shifted() -> Program:
    """Two layers with the second on gpu:1."""
    return passes.shift_activations(two_layers(), ["relu", "fc2", "loss"], shifts={0: 1})


def by_blob(found: Traffic) -> dict[str, Copied]:
    return {copied.blob: copied for copied in found.copies}


def test_text(golden: Callable[[str, str], None]) -> None:
    golden("two_layers.traffic", str(traffic(passes.inject_copies(shifted()))))


def test_text_of_a_residual_net(golden: Callable[[str, str], None]) -> None:
    program = passes.replicate(trained(models.resnet50, batch=8, image=64), devices=[0, 1])
    moved = passes.shift_modules(program, {"layer4": {0: 2, 1: 3}, "fc": {0: 2, 1: 3}})
    golden("traffic.resnet50", str(traffic(passes.inject_copies(moved))))


def test_text_of_a_language_model(golden: Callable[[str, str], None]) -> None:
    """Cut after its second layer; the head shares the weight of the embedding."""
    moved = passes.shift_modules(trained(models.gpt, layers=4), {"layers[2:4]": 1, "norm": 1, "head": 1})
    golden("traffic.gpt", str(traffic(passes.inject_copies(moved))))


def test_nothing_is_copied_on_one_device() -> None:
    found = traffic(two_layers())
    assert not found.copies and not found.links and found.nbytes == found.unknown == 0
    assert str(found) == "traffic of 'small':\n  nothing is copied between devices"


def test_each_copy_has_its_bytes_ends_and_first_reader() -> None:
    copied = by_blob(traffic(passes.inject_copies(shifted())))["fc1"]
    assert (copied.copy, copied.source, copied.destination) == ("fc1_gpu_1", "gpu:0", "gpu:1")
    assert (copied.nbytes, copied.kind, copied.phase) == (6 * 4 * 4, "activation", "forward")
    assert (copied.reader, copied.operator) == ("relu", "aten.relu.default")


def test_totals_by_link_and_kind_are_sums_of_the_copies() -> None:
    found = traffic(spread(trained(models.gpt)))
    links: Counter[tuple[str, str]] = Counter()
    kinds: Counter[str] = Counter()
    for copied in found.copies:
        links[copied.source, copied.destination] += copied.nbytes or 0
        kinds[copied.kind] += copied.nbytes or 0
    assert {(link.source, link.destination): link.nbytes for link in found.links} == links
    assert found.kinds == kinds and found.nbytes == kinds.total() > 0
    assert all(sum(link.kinds.values()) == link.nbytes for link in found.links)
    assert sum(link.copies for link in found.links) == len(found.copies)


def test_a_value_keeps_its_kind_through_copies_updates_and_views() -> None:
    found = traffic(
        program_of("""
    param w : f32[4,4] @gpu:0
    input x : f32[4,4] @gpu:1
    w_gpu_1 : f32[4,4] @gpu:1 = Copy(w)
    w_gpu_1.t : f32[4,4] strides [1,4] in w_gpu_1 @gpu:1 = aten.t(w_gpu_1)
    output y : f32[4,4] @gpu:1 = aten.mm(x, w_gpu_1.t)
    w_gpu_1;1 = aten.add_.Tensor(w_gpu_1, x) {writes=[0:0], phase=update}
    w;1 = Copy(w_gpu_1;1) {phase=update}
    output y
    """)
    )
    assert [(c.blob, c.copy, c.kind) for c in found.copies] == [
        ("w", "w_gpu_1", "parameter"),
        ("w_gpu_1;1", "w;1", "parameter"),
    ]
    assert [c.reader for c in found.copies] == ["y", ""]  # a view reads nothing; the last value is the next step's


def test_the_first_reader_is_behind_further_copies() -> None:
    found = traffic(
        program_of("""
    input x : f32[4] @gpu:0
    x_cpu : f32[4] @cpu:0 = Copy(x)
    x_gpu_1 : f32[4] @gpu:1 = Copy(x_cpu)
    output y : f32[4] @gpu:1 = aten.neg(x_gpu_1)
    output y
    """)
    )
    assert [(c.source, c.destination, c.reader, c.kind) for c in found.copies] == [
        ("gpu:0", "cpu:0", "y", "input"),
        ("cpu:0", "gpu:1", "y", "input"),
    ]


def test_a_copy_within_a_memory_is_no_traffic() -> None:
    body = "input x : f32[4] @cpu:0\n y : f32[4] @cpu:1 = Copy(x)\n output z : f32[4] @cpu:1 = aten.neg(y)\n output z"
    assert not traffic(program_of(body)).copies


def test_bytes_are_those_of_the_elements_at_the_sizes_given() -> None:
    program = passes.inject_copies(passes.shift_activations(captured(models.mlp(batch=6)), ["relu"], shifts={0: 1}))
    assert by_blob(traffic(program))["fc1"].nbytes == 6 * 16 * 4
    assert by_blob(traffic(program, {"batch": 24}))["fc1"].nbytes == 24 * 16 * 4
    plan = passes.emit(program, {"batch": 3})
    assert traffic(plan).dims == {"batch": 3} and by_blob(traffic(plan))["fc1"].nbytes == 3 * 16 * 4


def test_sizes_that_are_not_known_are_not_counted() -> None:
    found = traffic(
        program_of("""
    input x : ? @gpu:0
    input y : f32[4] @gpu:0
    x_gpu_1 : ? @gpu:1 = Copy(x)
    y_gpu_1 : f32[4] @gpu:1 = Copy(y)
    z : ? @gpu:1 = Sum(x_gpu_1, y_gpu_1)
    """)
    )
    assert [c.nbytes for c in found.copies] == [None, 16] and (found.nbytes, found.unknown) == (16, 1)
    assert "16 B+" in str(found) and "without 1 copy whose size is not known" in str(found)
    alone = str(traffic(program_of("input x : ? @gpu:0\n y : ? @gpu:1 = Copy(x)\n z : ? @gpu:1 = Relu(y)")))
    assert "unknown" in alone and "0 B" not in alone


def test_what_several_devices_reduce_is_listed_apart() -> None:
    program = passes.replicate(trained(models.mlp), devices=[0, 1])
    found = traffic(program)
    reduced = sum(p.numel() * 4 for p in models.mlp().model.parameters())
    assert not found.copies
    assert [(r.devices, r.nbytes, r.kind) for r in found.reduced] == [(("gpu:0", "gpu:1"), reduced, "gradient")]
    assert f"reduced over gpu:0, gpu:1: {reduced / 1024:.1f} KiB of gradients" in str(found)
    assert not traffic(passes.replicate(trained(models.mlp), devices=[0])).reduced


def test_json_round_trip() -> None:
    found = traffic(spread(trained(models.gpt)))
    assert found.warnings
    assert Traffic.model_validate_json(found.to_json()) == found
    assert json.loads(found.to_json())["copies"][0]["kind"] == found.copies[0].kind


def test_a_plan_and_its_program_have_the_same_traffic() -> None:
    program = spread(trained(models.resnet))
    assert traffic(passes.emit(program)) == traffic(program)


def test_operands_without_copies_are_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"^2 operands of 'small' are elsewhere .* no copies yet\n  at .*aten.relu"
    ):
        traffic(shifted())


def test_a_program_that_is_none_is_refused() -> None:
    program = passes.inject_copies(shifted())
    blobs = {name: blob for name, blob in program.step.blobs.items() if name != "fc1"}
    with pytest.raises(GraphirError, match=r"^the traffic of 'small' cannot be computed: KeyError: 'fc1'"):
        traffic(program.with_(step=program.step.with_(blobs=blobs)))


# What a session really copies


def links_of(found: Traffic) -> dict[tuple[str, str], float]:
    return {(link.source, link.destination): link.nbytes for link in found.links}


@pytest.mark.parametrize("make", [models.mlp, models.resnet, models.gpt], ids=lambda make: make.__name__)
def test_a_report_has_the_bytes_that_are_listed(make: Callable[[], models.Example]) -> None:
    example, program = make(), spread(trained(make))
    batch = [torch.cat([tensor, tensor]) for tensor in batch_of(example)]  # a share for each replica
    with Session(passes.emit(program), program.state) as session, session.measured():
        session.step(*batch)
        reported = {(use.source, use.destination): use.nbytes for use in session.report().copies}
    assert reported == links_of(traffic(program)) != {}


class Moved:
    """A probe that adds up the bytes of the tensors that copies make, by link."""

    def __init__(self, plan: graphir.Plan) -> None:
        self.plan = plan
        self.nbytes: Counter[tuple[str, str]] = Counter()

    def begin(self, position: int) -> None:
        """Nothing has been made."""

    def end(self, position: int, reads: Sequence[torch.Tensor], makes: Sequence[torch.Tensor]) -> None:
        instruction, blobs = self.plan.instructions[position], self.plan.step.blobs
        if instruction.kind == "copy":
            op = self.plan.step.ops[instruction.op]
            link = blobs[op.inputs[0]].device, blobs[op.outputs[0]].device
            self.nbytes[link] += makes[0].numel() * makes[0].element_size()


@pytest.mark.parametrize("seed", range(8))
def test_an_executor_moves_what_is_listed(seed: int) -> None:
    program = passes.inject_copies(nets.random_program(seed, ops=50, devices=3, spread=0.4))
    plan, inputs = passes.emit(program), [str(feed.blob) for feed in program.interface.feeds]
    given = {name: tensor for name, tensor in program.state.items() if name in plan.step.external_inputs}
    other = [name for name in plan.step.external_inputs if name not in given and name not in inputs]
    moved = Moved(plan)
    values = [*nets.example_inputs(program), *(torch.tensor(0.1, dtype=torch.float64) for _ in other)]
    executor = Reference(setting_of(plan, *inputs, *other, **given))
    executor.run_observed(program.dims, values, 0, moved)
    executor.close()
    assert moved.nbytes == links_of(traffic(program)) != {}


# How it is printed


@pytest.mark.parametrize("seed", range(4))
def test_text_fits_eighty_columns_and_a_page(seed: int) -> None:
    program = nets.random_program(seed, ops=90, devices=8, spread=0.7)
    lines = str(traffic(passes.inject_copies(program))).splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) <= 80


def test_long_names_fit_eighty_columns() -> None:
    name = "module." * 30
    body = f"""
    param {name}weight : f32[4] @gpu:0
    input x : f32[4] @gpu:1
    {name}weight_gpu_1 : f32[4] @gpu:1 = Copy({name}weight)
    output {name}y : f32[4] @gpu:1 = aten.add.Tensor(x, {name}weight_gpu_1) {{module={name}y, by=mine}}
    output {name}y
    """
    found = traffic(program_of(body, name=name, history=(f"mine{{a={name * 9}}}",)))
    lines = str(found).splitlines()
    assert found.warnings and max(map(len, lines)) <= 80 and len(lines) < 20


def test_equal_copies_of_replicas_and_layers_are_one_entry() -> None:
    program = trained(models.gpt, layers=6)
    program = passes.replicate(program, devices=[0, 1])
    moved = [f"layers.{i}.mlp.1" for i in range(6)]
    program = passes.inject_copies(passes.shift_activations(program, moved, shifts={0: 2, 1: 3}))
    text = str(traffic(program))
    assert "12 x 6.0 KiB  gpu:0 -> gpu:2, …  activation layers.0.mlp.0" in text


# Which move made a copy necessary


def reasons(program: Program, blob: str) -> list[str]:
    return [str(reason) for reason in by_blob(traffic(program))[blob].reasons]


def test_a_shift_that_names_an_activation_is_the_reason() -> None:
    program = passes.inject_copies(shifted())
    assert reasons(program, "fc1") == ["shift_activations relu: gpu:0 -> gpu:1"]
    assert reasons(program, "fc1_grad") == ["shift_activations relu: gpu:0 -> gpu:1"]


def test_of_two_shifts_the_one_that_names_it_is_the_reason() -> None:
    program = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    program = passes.inject_copies(passes.shift_activations(program, ["relu"], shifts={0: 1}))
    found = by_blob(traffic(program))["fc1"].reasons
    assert [(reason.position, reason.what) for reason in found] == [(1, "relu")]


ELSEWHERE = """
    input x : f32[4] @gpu:0
    a : f32[4] @gpu:0 = aten.neg(x) {module=stem.act}
    a_gpu_1 : f32[4] @gpu:1 = Copy(a)
    output b : f32[4] @gpu:1 = aten.exp(a_gpu_1) {module=layer.4.act, by=BY}
    output b
"""


def elsewhere(*history: str, by: str) -> Program:
    return program_of(ELSEWHERE.replace("BY", by or '""'), history=history)


@pytest.mark.parametrize(
    ("history", "by", "expected"),
    [
        ((), "", []),
        (("inject_copies",), "", []),
        (
            ("shift_activations{activations=[c], shifts={0: 1}}", "shift_activations{activations=[d], shifts={0: 1}}"),
            "shift_activations",
            ["shift_activations gpu:0 -> gpu:1", "shift_activations gpu:0 -> gpu:1"],
        ),
        (
            ("shift_activations{activations=[b], shifts={0: 2}}", "shift_activations{activations=[c], shifts={0: 1}}"),
            "shift_activations",
            ["shift_activations gpu:0 -> gpu:1"],
        ),
        (
            ("shift_activations{activations=[b], shifts={0: 1}}",),
            "share_storage",
            ["shift_activations b: gpu:0 -> gpu:1"],
        ),
        (
            ("shift_modules{modules={layer.4: gpu:1, lay: gpu:1}}",),
            "shift_modules",
            ["shift_modules layer.4: gpu:1"],
        ),
        (("shift_modules{modules={layer.4: gpu:2, layer: gpu:1}}",), "shift_modules", ["shift_modules layer: gpu:1"]),
        (
            ('shift_modules{modules={"layer[3:5]": gpu:1, "*.1": gpu:1}}',),
            "shift_modules",
            ["shift_modules layer[3:5]: gpu:1"],
        ),
        (('shift_modules{modules={"layer[": gpu:1}}',), "shift_modules", ["shift_modules layer[: gpu:1"]),
        (("shift_modules{modules={layer.4: {gpu:0: gpu:1}}}",), "shift_modules", ["shift_modules layer.4: gpu:1"]),
        (("mine{n=1}",), "mine", ["mine n=1"]),
        (("mine{{{", "yours"), "mine", ["mine"]),
        (("yours",), "mine", []),
        (
            ("shift_activations{activations=3, shifts=[1]}",),
            "shift_activations",
            ["shift_activations activations=3, shifts=[1]"],
        ),
    ],
)
def test_reasons(history: tuple[str, ...], by: str, expected: list[str]) -> None:
    assert reasons(elsewhere(*history, by=by), "a") == expected


def test_where_two_replicas_meet_replicate_is_the_reason() -> None:
    program = program_of(
        """
    input gpu_0/x : f32[4] @gpu:0
    gpu_0/x_gpu_1 : f32[4] @gpu:1 = Copy(gpu_0/x)
    output gpu_1/y : f32[4] @gpu:1 = aten.neg(gpu_0/x_gpu_1)
    output gpu_1/y
    """,
        replicas=("gpu_0/", "gpu_1/"),
        history=("replicate{devices=[0, 1]}",),
    )
    assert reasons(program, "gpu_0/x") == ["replicate gpu_0/ and gpu_1/"]
