"""A user's operators all the way, from capture to sessions, with the bits of eager PyTorch."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import graphir
from graphir import passes, runtime
from graphir.analysis.cost import work
from graphir.errors import CaptureError

# An activation with a gradient that is an operator, too.


@torch.library.custom_op("graphir_own::swish", mutates_args=())
def swish(x: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)


@swish.register_fake
def _(x, beta=1.0):
    return torch.empty_like(x)


def swish_backward(grad, x, beta=1.0):
    s = torch.sigmoid(beta * x)
    return grad * (s + beta * x * s * (1 - s))


def save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]


def differentiate(ctx, grad):
    return torch.ops.graphir_own.swish_backward(grad, *ctx.saved_tensors, ctx.beta), None


swish.register_autograd(differentiate, setup_context=save)


@torch.library.custom_op("graphir_own::tally", mutates_args=("seen",))
def tally(x: torch.Tensor, seen: torch.Tensor) -> None:
    seen.add_((x.detach() > 0).sum())


def scratch(op):
    return 2 * op.operand(0).nbytes


def flops(op):
    return 10 * op.operand(0).shape[0] * op.operand(0).shape[1]


@pytest.fixture(scope="module", autouse=True)
def registered():
    x = torch.randn(3, 4)
    graphir.register_operator(swish, example=(x, 1.5), scratch=scratch, flops=flops)
    graphir.register_operator(
        "graphir_own::swish_backward(Tensor grad, Tensor x, float beta=1.0) -> Tensor",
        kernel={"cpu": swish_backward, "cuda": swish_backward},
        fake=lambda grad, x, beta=1.0: torch.empty_like(grad),
        nondeterministic="is said to add in no fixed order",
        example=(x, x, 1.5),
    )
    graphir.register_operator(torch.ops.graphir_own.tally, example=(x, torch.zeros(())))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        hidden = self.a(x)
        torch.ops.graphir_own.tally(hidden, self.seen)
        return self.b(torch.ops.graphir_own.swish(hidden, 1.5))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model()


BATCH = torch.linspace(-2, 2, 48).reshape(6, 8), torch.arange(6) % 4


@pytest.fixture(scope="module")
def program(model, registered):
    x, y = BATCH
    return graphir.capture(model, inputs=(x,), targets=(y,), loss=F.cross_entropy, optimizer=sgd(model))


def same_as_eager(model, plan, state, executor):
    """Assert that three steps have the bits of eager PyTorch."""
    (x, y), eager = BATCH, copy.deepcopy(model)
    optimizer = sgd(eager)
    with runtime.Session(plan, state, executor=executor) as session:
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(eager(x), y)
            loss.backward()
            optimizer.step()
            assert torch.equal(session.step(x, y), loss)
        found = session.state_dict()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_the_operators_are_in_the_program(program):
    ops = {op.type: op for op in program.step.ops if op.type.startswith("graphir_own.")}
    assert sorted(ops) == [
        "graphir_own.swish.default",
        "graphir_own.swish_backward.default",
        "graphir_own.tally.default",
    ]
    assert ops["graphir_own.swish.default"].args == {"beta": 1.5}
    assert ops["graphir_own.tally.default"].effects.writes == ((0, 1),)
    graphir.verify(program)


@pytest.mark.parametrize("executor", ["reference", "serial", "threads"])
def test_a_training_step_has_the_bits_of_eager_pytorch(model, program, executor):
    same_as_eager(model, passes.emit(program), program.state, executor)


def test_it_is_moved_and_proved_to_compute_the_same(model, program):
    moved = passes.inject_copies(passes.shift_activations(program, ["swish"], {0: 1}))
    assert any(op.type == "graphir_own.swish.default" and op.device == "gpu:1" for op in moved.step.ops)
    certificate = graphir.certify(program, moved)
    assert certificate.assumptions[-1] == (
        "registered operators do what their schemas say, and nothing else: graphir_own.swish.default, "
        "graphir_own.swish_backward.default, graphir_own.tally.default"
    )
    assert certificate.caveats == ("graphir_own.swish_backward.default (1 operators) is said to add in no fixed order",)
    same_as_eager(model, passes.emit(moved), program.state, "threads")


def test_text_and_files_hold_it(program, tmp_path: Path):
    assert graphir.parse(str(program)).step == program.step
    path = tmp_path / "step.json"
    program.save(path, state=True)
    loaded = graphir.load(path)
    assert loaded.step == program.step
    graphir.verify(loaded)


def test_its_scratch_and_its_work_are_counted(program):
    op = next(op for op in program.step.ops if op.type == "graphir_own.swish.default")
    assert work(op, program.step, program.dims).flops == 10 * 6 * 16
    with_it = next(line for line in str(graphir.memory(program)).splitlines() if "graphir_own" in line)
    assert "swish.default" not in with_it and "tally.default" in with_it


def test_it_is_a_graph_of_torch_fx(model, program):
    x, y = BATCH
    assert torch.equal(graphir.to_fx(program)(x, y), F.cross_entropy(copy.deepcopy(model)(x), y))


def test_a_forward_without_a_gradient_is_captured():
    graphir.register_operator(
        "graphir_own::thirds(Tensor x) -> Tensor[]",
        kernel=lambda x: [part.clone() for part in x.chunk(3)],
        fake=lambda x: [torch.empty_like(part) for part in x.chunk(3)],
        example=(torch.randn(6, 4),),
    )

    class Split(torch.nn.Module):
        def forward(self, x):
            return torch.ops.graphir_own.thirds(x)[1] + 1

    x = BATCH[0]
    program = graphir.capture(Split(), inputs=(x,), batch_dims=((None,), {}, ()))
    with runtime.Session(passes.emit(program), program.state) as session:
        assert torch.equal(session.step(x), x[2:4] + 1)


def test_one_that_is_not_registered_is_refused_with_what_registers_it():
    @torch.library.custom_op("graphir_own::unknown", mutates_args=())
    def unknown(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    unknown.register_fake(lambda x: torch.empty_like(x))

    class Foreign(torch.nn.Module):
        def forward(self, x):
            return torch.ops.graphir_own.unknown(x)

    with pytest.raises(CaptureError, match=r"graphir_own\.unknown\.default is not one of torch's own") as raised:
        graphir.capture(Foreign(), inputs=(BATCH[0],))
    assert raised.value.fix.startswith(
        "call graphir.register_operator(torch.ops.graphir_own.unknown) once before the capture"
    )


def test_an_in_place_operator_on_an_activation_needs_a_functional_form():
    graphir.register_operator(
        "graphir_own::bump_(Tensor(a!) x) -> Tensor(a!)", kernel=lambda x: x.add_(1), fake=lambda x: x
    )

    class InPlace(torch.nn.Module):
        def forward(self, x):
            return torch.ops.graphir_own.bump_(x * 2)

    with pytest.raises(CaptureError, match=r"graphir_own\.bump_\.default overwrites a tensor and has no functional"):
        graphir.capture(InPlace(), inputs=(BATCH[0],))
    graphir.register_operator(
        "graphir_own::bump(Tensor x) -> Tensor", kernel=lambda x: x + 1, fake=lambda x: torch.empty_like(x)
    )
    program = graphir.capture(InPlace(), inputs=(BATCH[0],))
    with runtime.Session(passes.emit(program), program.state) as session:
        assert torch.equal(session.step(BATCH[0]), BATCH[0] * 2 + 1)


def test_random_numbers_are_those_of_the_seeded_step():
    library = torch.library.Library("graphir_own", "FRAGMENT")
    tags = (torch.Tag.nondeterministic_seeded,)
    library.define("noise(Tensor x, *, Generator? generator=None) -> Tensor", tags=tags)
    library.impl(
        "noise", lambda x, *, generator=None: torch.rand(x.shape, generator=generator), "CompositeExplicitAutograd"
    )
    graphir.register_operator("graphir_own::noise", fake=lambda x, *, generator=None: torch.empty_like(x))

    class Noisy(torch.nn.Module):
        def forward(self, x):
            return x * torch.ops.graphir_own.noise(x)

    program = graphir.capture(Noisy(), inputs=(BATCH[0],))
    with runtime.Session(passes.emit(program), program.state) as session:
        for step in range(2):
            found = session.step(BATCH[0])
            with graphir.seeded(step):
                assert torch.equal(found, Noisy()(BATCH[0]))


PART = """
net part {{
  input x : f32[8] @gpu:0
  h : f32[8] @gpu:0 = aten.relu(x)
  half : f32[4] in h @gpu:0 = aten.slice.Tensor(h, start=0, end=4)
  y : f32[4] @gpu:1 = graphir_own.{}.default(half)
  output y
}}
"""


@pytest.mark.parametrize(("name", "only_elements", "crosses"), [("reaching", False, 8), ("plain", True, 4)])
def test_the_part_that_it_reads_is_brought_to_another_device(name, only_elements, crosses):
    graphir.register_operator(
        f"graphir_own::{name}(Tensor x) -> Tensor",
        kernel=lambda x: x * 2,
        fake=lambda x: torch.empty_like(x),
        only_elements=only_elements,
    )
    net = graphir.parse(PART.format(name))
    program = graphir.Program("part", graphir.Net("init", (), {}), net)
    copied = passes.inject_copies(program)
    assert [copied.step.blobs[op.outputs[0]].shape for op in copied.step.ops if op.type == "Copy"] == [(crosses,)]
