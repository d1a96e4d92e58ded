"""Names from a file are data: no text of them is in generated code, and texts and files keep them as they are."""

from __future__ import annotations

import json
import keyword

import models
import nets
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.codegen.statements import generate
from runnable import captured, setting_of, sgd

import graphir
from graphir import passes
from graphir.ir.files import disk
from graphir.ir.files.records import OperatorRecord
from graphir.ir.plan import lane_device

HOSTILE = (
    "__import__('os').abort()", 'a"b', "a'b", "a\nb", "a\r\nb", "a\\", "\\'", '\\"', "{}", "{0.__class__}", "%s", "#",
    "a # b", "a;1", "a -> b", "@gpu:0", "gpu:0.compute", "net {", "}", "(", "[a]", "a,b", "a=b", "x ", " x", "\t",
    "\x00", "\x1c", "\x85", "\u2028", "\u2029", "\u202e", "слой", "\u00b2", "none", "true", "input", "1", "-1", "1.5",
    "nan", "...", "/", "\x7f", "🙂", "__class__", "n", "run", "v0", "s0", "i0", "c0", "x", *keyword.kwlist,
)  # fmt: skip


BY_NAME = ("buffers", "gradients", "module_state", "optimizer_state")
"""The fields of a file whose keys are names."""


def renamed(document, names, field=""):
    """The same JSON with some strings replaced."""
    if isinstance(document, dict):
        keys = names if field in BY_NAME else {}
        return {keys.get(key, key): renamed(value, names, key) for key, value in document.items()}
    if isinstance(document, list):
        return [renamed(value, names) for value in document]
    return names.get(document, document) if isinstance(document, str) else document


def hostile(plan, path):
    """The plan with other names for everything that a file can name, as it comes from a file; and the names."""
    document = json.loads(disk.to_json(plan))
    nets_of = [document["program"][net] for net in ("init", "step")]
    given = {blob[0] for net in nets_of for blob in net["blobs"]}
    module = OperatorRecord._fields.index("module")
    given |= {op[module] for net in nets_of for op in net["ops"] if len(op) > module and op[module]}
    endless = (f"{name}{'!' * turn}" for turn in range(1000) for name in HOSTILE)
    names = dict(zip(sorted(given), endless, strict=False))
    document = renamed(document, names)
    document["values"] = {}  # what state holds at first is numbered by its name
    document["program"]["name"] = "import os\n'\"{}"
    for net in ("init", "step"):
        document["program"][net]["name"] = "\u2028'''"
    path.write_text(json.dumps(document))
    return graphir.load(path), names


def sources(plan, state):
    lanes = {lane: list(plan.devices).index(lane_device(lane)) for lane in plan.lanes}
    inputs = [name for name in plan.step.external_inputs if plan.step.blobs[name].role == "input"]
    return [code.source for code in generate(setting_of(plan, *inputs, **state), lanes)]


def blobs_of(plan):
    made = [blob for blob in plan.step.blobs.values() if blob.role in ("param", "buffer", "state", "constant")]
    return {blob.name: torch.zeros([int(size) for size in blob.shape]) for blob in made}


EXAMPLES = {
    "random": lambda: nets.random_program(3),
    "mlp": lambda: captured(example := models.mlp(), sgd(example.model.parameters())),
}


@pytest.fixture(params=EXAMPLES)
def plans(request, tmp_path):
    program = EXAMPLES[request.param]()
    plan = passes.emit(program)
    return plan, *hostile(plan, tmp_path / "plan.json"), program


def test_generated_code_is_the_same_under_any_names(plans):
    plan, other, names, _ = plans
    assert len(names) > 25
    assert sources(plan, blobs_of(plan)) == sources(other, blobs_of(other))


def test_texts_and_files_keep_any_names(plans, tmp_path):
    _, other, names, _ = plans
    assert graphir.parse(str(other)) == other
    assert graphir.parse(str(other.program)) == other.program
    assert graphir.parse(str(other.step)) == other.step
    assert set(other.step.blobs) <= set(names.values())
    other.save(tmp_path / "again.json")
    assert graphir.load(tmp_path / "again.json") == other
    graphir.show(other)


@pytest.mark.parametrize("executor", ["reference", "threads", "adversarial"])
def test_plans_run_under_any_names(plans, executor):
    plan, other, names, program = plans
    feeds = [feed.blob for feed in plan.program.interface.feeds]
    inputs = nets.example_inputs(program) if "random" in plan.name else (*models.mlp().inputs, *models.mlp().targets)
    state = {names.get(name, name): tensor for name, tensor in program.state.items()}
    assert len(feeds) == len(inputs)
    with Session(plan, program.state, threads=1) as a, Session(other, state, executor=executor, threads=1) as b:
        assert torch.equal(a.step(*inputs).nan_to_num(), b.step(*inputs).nan_to_num())
