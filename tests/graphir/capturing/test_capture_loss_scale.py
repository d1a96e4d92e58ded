"""``loss_scale``: a number, or the scale, growth and skipped steps of ``torch.amp.GradScaler``, bit for bit."""

import models
import pytest
import torch
from eager import assert_same_bits
from idioms import Idioms, captured, runs_as_eager, scaler_of
from torch import nn

import graphir
from graphir import passes, runtime
from graphir.errors import CaptureError, SessionError

pytestmark = pytest.mark.usefixtures("few_objects")

GROWING = {"init_scale": 2.0**10, "growth_interval": 2}
OVERFLOWING = {"init_scale": 2.0**127, "backoff_factor": 2.0**-60, "growth_factor": 2.0**20, "growth_interval": 2}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)


def batches(sizes):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 10, generator=generator), torch.randint(0, 5, (n,), generator=generator)) for n in sizes]


class Autocast(nn.Module):
    """The model in bfloat16 where autocast says so."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)


@pytest.mark.parametrize("optimizer", [sgd, None], ids=["sgd", "gradients"])
@pytest.mark.parametrize("scale", [1024, 3.7])
def test_a_number(scale, optimizer):
    example = models.mlp()
    program = captured(example, optimizer, loss_scale=scale)
    assert not program.covers.fixed
    runs_as_eager(program, Idioms(example, optimizer, 1, loss_scale=scale), batches((6, 4)), "reference")


@pytest.mark.parametrize(
    ("optimizer", "autocast"), [(sgd, False), (adam, True), (fused, False)], ids=["sgd-f32", "adam-bf16", "fused-f32"]
)
def test_a_scaler_grows(optimizer, autocast):
    example = models.mlp()
    if autocast:
        example = example._replace(model=Autocast(example.model))
    program = captured(example, optimizer, loss_scale=GROWING)
    eager = Idioms(example, optimizer, 1, loss_scale=GROWING)
    assert runs_as_eager(program, eager, batches((6, 6, 4)), "reference") == {
        "scale": 2.0**11,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2,
        "_growth_tracker": 1,
    }


@pytest.mark.parametrize("executor", ["reference", "threads"])
@pytest.mark.parametrize("optimizer", [sgd, adam, fused])
def test_an_overflow_skips_the_update_and_lowers_the_scale(optimizer, executor):
    example = models.mlp()
    before = {name: tensor.clone() for name, tensor in example.model.state_dict().items()}
    program = captured(example, optimizer, loss_scale=OVERFLOWING)
    x, y = batches((6,))[0]
    with runtime.Session(passes.emit(program), program.state, executor=executor) as session:
        session.step(x * 1e4, y)
        assert_same_bits(session.state_dict(), before, "skipped")
        assert session.loss_scaler_state_dict()["scale"] == 2.0**67
    given = [(x * 1e4, y), *batches((6, 6, 4))]
    last = runs_as_eager(program, Idioms(example, optimizer, 1, loss_scale=OVERFLOWING), given, executor)
    assert last["scale"] == 2.0**87 and last["_growth_tracker"] == 1


def test_one_replicas_overflow_makes_all_skip():
    example = models.mlp()
    program = passes.replicate(captured(example, fused, loss_scale=OVERFLOWING), devices=[0, 1])
    (x, y), *more = batches((6, 6, 7))
    x[4:] *= 1e4  # the second replica's share
    eager = Idioms(example, fused, 2, loss_scale=OVERFLOWING)
    last = runs_as_eager(program, eager, [(x, y), *more])
    assert last["scale"] == 2.0**87


def test_training_goes_on_from_the_scalers_state():
    example, optimizer = models.mlp(), adam
    eager = Idioms(example, optimizer, 1, loss_scale=GROWING)
    first, *later = batches((6, 6, 6))
    eager.step(*first)
    program = graphir.capture(
        eager.models[0],
        example.inputs,
        targets=example.targets,
        loss=example.loss,
        optimizer=eager.optimizers[0],
        loss_scale=eager.scalers[0],
    )
    assert program.state["loss_scale.growth_tracker"] == 1
    with runtime.Session(passes.emit(program), program.state) as session:
        session.step(*later[0])
        state = session.state()
    with runtime.Session(passes.emit(program), state) as session:
        ours = session.step(*later[1])
        scaler = scaler_of({})
        scaler.load_state_dict(session.loss_scaler_state_dict())
    eager.step(*later[0])
    assert torch.equal(ours, eager.step(*later[1]))
    assert scaler.state_dict() == eager.scalers[0].state_dict() and scaler.get_scale() == 2.0**11


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (fused, {"clip_grad_norm": 0.1}),
        (adam, {"clip_grad_norm": 0.1}),
        (sgd, {"clip_grad_value": 0.01}),
    ],
    ids=["fused", "for_loop", "value"],
)
def test_all_options_together_in_uneven_shifted_replicas(optimizer, options, tmp_path):
    options = {**options, "accumulate": 3, "loss_scale": OVERFLOWING}
    example = models.mlp(batch=9)
    program = passes.replicate(captured(example, optimizer, **options), devices=[0, 1])
    acts = passes.find_activations(program)
    placed = passes.inject_copies(passes.shift_activations(program, acts[len(acts) // 2 :], shifts={0: 2, 1: 3}))
    assert graphir.certify(program, placed).holds
    graphir.verify(placed)
    assert graphir.diff(program, placed).to_json()
    placed.save(tmp_path / "all.json", state=True)
    loaded = graphir.load(tmp_path / "all.json")
    assert loaded == placed and str(loaded) == str(placed)
    (x, y), *more = batches((18, 15, 9, 18))
    eager = Idioms(example, optimizer, 2, **options)
    last = runs_as_eager(passes.share_storage(loaded), eager, [(x * 1e4, y), *more])
    assert last["scale"] == 2.0**87


def test_a_shift_leaves_each_update_where_its_parameter_is():
    program = captured(models.mlp(), adam, loss_scale=GROWING, clip_grad_norm=1.0)
    plain = captured(models.mlp(), adam)

    def copied(program):
        shifted = passes.shift_activations(program, ["fc2", "loss.log_softmax", "loss"], shifts={0: 1})
        placed = passes.inject_copies(shifted)
        blobs = placed.step.blobs
        assert {op.device.index for op in placed.step.ops if op.type == "graphir.adam"} == {0, 1}
        return [blobs[op.outputs[0]].shape for op in placed.step.ops if op.type == "Copy" and op.phase == "update"]

    assert [shape for shape in copied(program) if shape != ()] == copied(plain)


def test_a_disabled_scaler_is_refused():
    """Torch disables one for CUDA in silence where there is no GPU."""
    with pytest.raises(CaptureError, match=r'disabled(.|\n)*torch.amp.GradScaler\("cpu"(.|\n)*leave loss_scale out'):
        captured(models.mlp(), adam, loss_scale={"enabled": False})


def test_what_is_no_scale_is_refused():
    with pytest.raises(CaptureError, match="loss_scale is a str"):
        captured(models.mlp(), sgd, loss_scale="dynamic")


def test_a_scaler_without_optimizer_is_refused():
    with pytest.raises(CaptureError, match="loss_scale is a GradScaler, but there is no optimizer"):
        captured(models.mlp(), loss_scale={})


def test_half_precision_gradients_are_refused_as_torch_refuses_them():
    example = models.mlp()
    half = example._replace(model=example.model.half(), inputs=(example.inputs[0].half(),))
    with pytest.raises(CaptureError, match=r"the gradient of 'fc1.weight' is torch.float16"):
        captured(half, sgd, loss_scale=GROWING)


def test_a_session_without_scaler_has_no_state_of_one():
    program = captured(models.mlp(), sgd)
    with (
        runtime.Session(passes.emit(program), program.state) as session,
        pytest.raises(SessionError, match="the program has no loss scaler"),
    ):
        session.loss_scaler_state_dict()
