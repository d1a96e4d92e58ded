"""The listing of generated code."""

import ast
import re

import models
import nets
import pytest
import torch
from runnable import forward_plan, spread

from graphir import passes, runtime
from graphir.capturing.capture import capture
from graphir.errors import PlanError

BODY = """
    param w : f32[3,2] @gpu:0
    input x : f32[batch,3] @gpu:0
    "odd\\n name" : f32[batch,2] @gpu:0 = aten.mm(x, w)
    b : f32[batch,2] @gpu:1 = Copy("odd\\n name")
    c : f32[batch,2] @gpu:1 = aten.neg(b)
"""


def test_names_and_instructions_are_told():
    plan = forward_plan(BODY, "x", output="c", state={"w": nets.torch.ones(3, 2)}, dims={"batch": 4})
    assert runtime.python(plan, "gpu:0.compute").splitlines() == [
        "# gpu:0 of plan small",
        "# n: the number of steps done",
        "# i0: input x",
        "# s0: state w",
        "# c0: aten.mm.default",
        "# x1: the values that threads hand to each other",
        "# e2: gives hand-off 0",
        "# e3: takes hand-off 1",
        "def run(n, i0, s0, c0, x1, e2, e3):",
        ' v0 = c0(i0, s0); x1[0] = v0  # run "odd\\n name" = aten.mm.default',
        ' e2()  # record "odd\\n name" by gpu:0.compute',
        " e3()  # wait b by gpu:1.copy_in",
        ' x1[0] = None; del v0  # free "odd\\n name"',
        " return ()",
    ]
    assert runtime.python(plan, "gpu:1.copy_in") == runtime.python(plan, "gpu:1.compute")


@pytest.mark.parametrize("seed", range(6))
def test_listings_of_random_plans_are_python(seed):
    plan = passes.emit(spread(nets.random_program(seed)))
    for lane in plan.lanes:
        (function,) = ast.parse(runtime.python(plan, lane)).body
        assert isinstance(function, ast.FunctionDef)


@pytest.mark.parametrize(
    ("optimizer", "options", "told"),
    [
        (torch.optim.SGD, {}, "graphir.sgd()"),
        (torch.optim.SGD, {"momentum": 0.9}, "graphir.sgd()"),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True}, "graphir.sgd(form='fused')"),
        (torch.optim.AdamW, {"fused": True}, "graphir.adamw(form='fused')"),
        (torch.optim.RMSprop, {}, "graphir.rmsprop()"),
    ],
)
def test_every_callable_is_named_as_in_the_program(optimizer, options, told):
    given = models.mlp()
    program = capture(
        given.model,
        given.inputs,
        targets=given.targets,
        loss=given.loss,
        optimizer=optimizer(given.model.parameters(), lr=0.1, **options),
    )
    listing = runtime.python(passes.emit(program), "gpu:0.compute")
    assert f": {told}" in listing
    called = {line.split(": ", 1)[1] for line in listing.splitlines() if line.startswith("# c")}
    types = {op.type for op in program.step.ops}
    assert all(name in types or name.split("(")[0] in types for name in called)


@pytest.mark.parametrize("lane", ["gpu:0.copy_in", 3, None, ["gpu:0.compute"]])
def test_a_lane_that_is_not_there_is_refused(lane):
    plan = forward_plan(BODY, "x", output="c", state={"w": nets.torch.ones(3, 2)}, dims={"batch": 4})
    said = re.escape(f"plan 'small' has no lane {lane!r}")
    with pytest.raises(PlanError, match=rf"{said}.*\n.*fix  its lanes: gpu:0.compute"):
        runtime.python(plan, lane)


def test_what_is_bound_is_told_in_words_that_stay_the_same():
    given = models.gpt(layers=1)
    program = capture(given.model.train(), given.inputs, targets=given.targets, loss=given.loss)
    dropped = capture(torch.nn.Dropout(0.5), (torch.randn(4, 3),))
    plans = [passes.emit(passes.replicate(program, [0, 1])), passes.emit(dropped)]
    listings = [runtime.python(plan, "gpu:0.compute") for plan in plans]
    told = re.findall(r"^# \w+: (.*)$", "".join(listings), re.MULTILINE)
    assert not [text for text in told if "0x" in text or "device(" in text or "follows" in text]
    for text in (
        "the real gpu:0",
        "the generator of gpu:0",
        "seeds the generator of gpu:0",
        "AllReduce",
        "divisor and weights at the sizes of the step",
    ):
        assert text in told
    assert any(text.endswith("] at the sizes of the step") and "gpu_0/batch" in text for text in told)
    assert listings == [runtime.python(plan, "gpu:0.compute") for plan in plans]
