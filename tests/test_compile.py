"""The whole way in one call: a step at any sequence of sizes equals eager PyTorch, however many plans that takes."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits
from graphir.runtime import Session
from idioms import Idioms, loss_of
from models import Example
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trace_events import imported

import graphir
from graphir import passes
from graphir.errors import CaptureError, RunError, SessionError


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Halves(nn.Module):
    """Sizes are fixed, as a root is no polynomial; with state in parameters, buffers and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        first, second = self.dropout(self.norm(self.fc1(x))).chunk(2)
        return self.fc2(torch.cat([first.relu(), second.sin()])) * (scale / len(x) ** 0.5)


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.randn(count, 3)


def compiled(model: nn.Module, count: int = 6, **options: Any) -> graphir.Compiled:
    x, y = rows(count)
    return graphir.compile(model, (x,), targets=(y,), loss=F.mse_loss, **{"optimizer": sgd(model), **options})


@pytest.fixture(autouse=True)
def _warnings_are_expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphir.RecaptureWarning)
        yield


def trains_as_eager(step: graphir.Compiled, model: nn.Module, counts: Sequence[int], replicas: int = 1) -> None:
    eager = ShareByShare(model, F.mse_loss, sgd, replicas)
    for count in counts:
        x, y = rows(count)
        assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, f"step {step.steps_done}")
    for replica, trained in enumerate(eager.models):
        assert_same_bits(step.state_dict(replica), trained.state_dict(), f"replica {replica}")
    assert step.steps_done == len(counts)
    back = sgd(model)
    back.load_state_dict(step.optimizer_state_dict())
    ours, theirs = back.state_dict()["state"], eager.optimizers[0].state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, entries in theirs.items():
        assert_same_bits(ours[index], entries, f"parameter {index}")


def test_sizes_that_follow_need_one_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with warnings.catch_warnings(), compiled(model) as step:
        warnings.simplefilter("error")
        trains_as_eager(step, model, [6, 5, 9, 1])
        assert len(step.plans) == 1 and step.plan.program.covers.fixed == ""


def test_named_dimensions_need_one_plan() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).sum(1)

    model = Sums()
    named = (({0: "batch", 1: "length"},), {}, 0)
    with graphir.compile(
        model, (torch.randn(6, 9, 4),), targets=(torch.randn(6, 3),), loss=F.mse_loss, batch_dims=named, devices=[0, 1]
    ) as step:
        eager = ShareByShare(model, F.mse_loss, sgd, 2)
        for batch, length in [(6, 9), (5, 3), (4, 12)]:
            x, y = torch.randn(batch, length, 4), torch.randn(batch, 3)
            with graphir.seeded(0):
                expected = eager.step(x, y)
            step.load_state_dict(model.state_dict())
            eager.models = [copy.deepcopy(model) for _ in range(2)]
            assert step.step(x, y).shape == expected.shape == ()
            assert step.gradients(0).keys() == {"fc.weight", "fc.bias"}
        assert len(step.plans) == 1


@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_fixed_sizes_share_their_state_through_changing_plans(devices: list[int]) -> None:
    model = Halves()
    with compiled(model, count=6 * len(devices), devices=devices) as step:
        counts = [n * len(devices) for n in (6, 4, 6, 3, 4, 6)]
        trains_as_eager(step, model, counts, len(devices))
        assert "aten.split.Tensor" in step.plan.program.covers.fixed
        assert len(step.plans) == 3


SCALER = {"init_scale": 8.0, "growth_interval": 1}


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"loss_scale": SCALER, "clip_grad_norm": 0.1}], ids=str)
def test_micro_batches_and_a_loss_scaler_share_their_state_too(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Halves()
    eager = Idioms(Example(model, (), (), F.mse_loss), sgd, 2, **options)
    scaler = {"loss_scale": torch.amp.GradScaler("cpu", **SCALER)} if "loss_scale" in options else {}
    with compiled(model, 20, devices=[0, 1], **{**options, **scaler}) as step:
        for count in (20, 16, 20):
            x, y = rows(count)
            assert_same_bits({"loss": loss_of(step.step(x, y))}, {"loss": eager.step(x, y)}, f"step {step.steps_done}")
            assert_same_bits(step.state_dict(1), dict(eager.models[1].state_dict()), f"step {step.steps_done}")
            if scaler:
                assert step.loss_scaler_state_dict() == eager.scalers[0].state_dict()


def test_shares_of_a_first_batch_are_whole_micro_batches() -> None:
    model = nn.Linear(4, 3)
    with compiled(model, 10, devices=[0, 1], accumulate=2) as step:
        eager = Idioms(Example(model, (), (), F.mse_loss), sgd, 2, accumulate=2)
        x, y = rows(10)  # 6 and 4
        assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, "6 and 4 rows")


@pytest.mark.parametrize("accumulate", [0, 1.5, "2"])
def test_what_is_no_number_of_micro_batches(accumulate: Any) -> None:
    with pytest.raises(CaptureError, match="is not a number of micro-batches"):
        compiled(nn.Linear(4, 3), devices=[0, 1], accumulate=accumulate)


def test_a_new_plan_is_told_once() -> None:
    with compiled(Halves()) as step:
        with pytest.warns(graphir.RecaptureWarning) as caught:
            for count in (6, 4, 6, 4):
                step.step(*rows(count))
        assert [w.filename for w in caught] == [__file__]
        text = str(caught[0].message)
    assert text.startswith(
        "the step of 'halves' was captured anew: argument 0 ('x') has shape [4, 4], the program takes"
    )
    assert "[6, 4] (its sizes are fixed: a size of the value made by aten.split.Tensor" in text


def test_the_plan_that_was_not_used_for_longest_makes_room() -> None:
    model = Halves()
    with compiled(model, most_plans=2) as step:
        trains_as_eager(step, model, [6, 4, 3, 6, 4])
        assert len(step.plans) == 2
        with pytest.warns(graphir.RecaptureWarning, match="2 plans are kept, the one not used for longest was dropped"):
            step.step(*rows(2))


class Either(nn.Module):
    """A layer for many rows, and another one for few."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.few = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.many(x) if x.shape[0] > 5 else self.few(x)


def test_an_optimizers_state_outlives_the_plan_that_trained_it() -> None:
    model = Either()
    with compiled(model, most_plans=1) as step:
        trains_as_eager(step, model, [6, 4, 8])


def test_other_values_that_are_no_tensors_are_captured() -> None:
    model = Halves().eval()
    x, _ = rows(6)
    with graphir.compile(model, (x,), kwargs={"scale": 1.0}) as step:
        for scale in (1.0, 2.0, 1.0, 3.0):
            assert torch.equal(step.step(x, scale=scale), model(x, scale=scale))
        assert len(step.plans) == 3


def test_a_structure_in_the_place_of_a_value_is_refused() -> None:
    model = Halves().eval()
    x, _ = rows(6)
    with graphir.compile(model, (x,), kwargs={"scale": 1.0}) as step:
        with pytest.raises(SessionError, match=r"argument 'scale' was 1\.0 .* now \[2\.0\]"):
            step.step(x, scale=[2.0])
        assert torch.equal(step.step(x, scale=1.0), model(x))
        assert len(step.plans) == 1


def test_an_argument_may_come_and_go() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return x * 2 if mask is None else x * mask

    x, mask = torch.randn(4, 4), torch.rand(4)
    with graphir.compile(Masked(), (x, None)) as step:
        for given in (None, mask, None):
            expected = x * 2 if given is None else x * given
            assert torch.equal(step.step(x, given), expected)
        assert len(step.plans) == 2


def test_what_is_whole_stays_whole_in_later_captures() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return torch.cat((x * scale).chunk(2))

    scale = torch.randn(4)
    with graphir.compile(Scaled(), (torch.randn(6, 4), scale), devices=["gpu:0", 1]) as step:
        for count in (6, 4, 8):
            x = torch.randn(count, 4)
            assert torch.equal(step.step(x, scale), x * scale)


@pytest.mark.parametrize("make", [Halves, Either])
@pytest.mark.parametrize("devices", [[0], [0, 1]])
def test_training_goes_on_from_a_state(make: Callable[[], nn.Module], devices: list[int]) -> None:
    model, fresh = make(), make()
    eager = ShareByShare(model, F.mse_loss, sgd, len(devices))
    batches = [rows(count) for count in (12, 8, 12, 8, 12)]
    with compiled(model, 12, devices=devices, most_plans=1) as step:
        for batch in batches[:3]:
            assert torch.equal(step.step(*batch), eager.step(*batch))
        state = step.state()
    with compiled(fresh, 12, devices=devices, state=state) as step:
        for batch in batches[3:]:
            assert torch.equal(step.step(*batch), eager.step(*batch))
        for replica, trained in enumerate(eager.models):
            assert_same_bits(step.state_dict(replica), trained.state_dict(), f"replica {replica}")
        assert step.steps_done == 5


def test_a_state_is_a_mapping_that_fits() -> None:
    with pytest.raises(SessionError, match="state is a list, not a mapping"):
        compiled(Halves(), state=[])
    state = dict(Halves().state_dict())
    with pytest.raises(SessionError, match=r"'fc1\.bias' in the state has shape \[2\]"):
        compiled(Halves(), state={**state, "fc1.bias": torch.ones(2)})


def test_a_state_of_another_model_is_refused() -> None:
    state = {f"module.{name}": tensor for name, tensor in Halves().state_dict().items()}
    with pytest.raises(SessionError, match=r"the state has no 'fc1\.weight'; did you mean 'module\.fc1\.weight'"):
        compiled(Halves(), state=state)


def test_later_captures_are_in_the_mode_of_the_first() -> None:
    model = Halves()
    with compiled(model) as step:
        eager = ShareByShare(model, F.mse_loss, sgd, 1)
        model.eval()
        x, y = rows(4)
        assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, "in training mode")
        assert not model.training and not model.norm.training


def test_learning_rates_hold_for_every_plan() -> None:
    model = Halves()
    optimizer = sgd(model)
    followed = ShareByShare(model, F.mse_loss, sgd, 1)
    with compiled(model, optimizer=optimizer) as step:
        for i, count in enumerate((6, 4, 6, 4, 3)):
            if i == 3:
                step.follow(optimizer)
            if i < 3:
                step.param_groups[0]["lr"] = 0.1 / (i + 1)
            else:
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
            followed.optimizers[0].param_groups[0]["lr"] = 0.1 / (i + 1)
            x, y = rows(count)
            assert_same_bits({"loss": step.step(x, y)}, {"loss": followed.step(x, y)}, f"step {i}")
        assert_same_bits(step.state_dict(), followed.models[0].state_dict(), "state")


def test_loaded_state_holds_for_every_plan() -> None:
    model = Halves()
    with compiled(model) as step:
        for count in (6, 4):
            step.step(*rows(count))
        step.load_state_dict(model.state_dict())
        for _ in step.plans:
            assert_same_bits(step.state_dict(), dict(model.state_dict()), "loaded")
        saved = step.state()
        assert int(saved["step"]) == 2


@pytest.mark.parametrize(
    "given", ["shift_activations{activations=[relu], shifts={0: 1}} | inject_copies | share_storage", "function"]
)
def test_passes_run_on_the_replicated_program(given: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))

    def shifted(program: graphir.Program) -> graphir.Program:
        return passes.shift_activations(program, passes.find_activations(program)[1:], shifts={0: 1})

    text = given.replace("[relu]", "['1']").replace("'", '"')
    with compiled(model, passes=shifted if given == "function" else text) as step:
        assert [str(device) for device in step.plan.devices] == ["gpu:0", "gpu:1", "cpu:0"]
        assert any(op.type == "Copy" for op in step.plan.step.ops)
        trains_as_eager(step, model, [6, 5])


# What is refused


def test_arguments_that_no_capture_takes_change_nothing() -> None:
    model = Halves()
    with compiled(model) as step:
        with pytest.raises(CaptureError, match="the step failed while it was recorded: RuntimeError"):
            step.step(torch.randn(6, 5), torch.randn(6, 3))
        with pytest.raises(SessionError, match=r"has dtype torch\.float64"):
            step.step(torch.randn(6, 4).double(), torch.randn(6, 3))
        with pytest.raises(SessionError, match="a step takes 2 positional arguments, 1 given"):
            step.step(torch.randn(6, 4))
        assert len(step.plans) == 1
        trains_as_eager(step, model, [6, 4])


def test_shares_that_differ_where_sizes_are_fixed() -> None:
    with compiled(Halves(), count=8, devices=[0, 1]) as step, pytest.warns(graphir.RecaptureWarning):
        step.step(*rows(5))
        assert len(step.plans) == 2 and step.plan.program.dims == {"gpu_0/batch": 5}


def test_an_optimizer_is_followed() -> None:
    """By every plan, until a number is set in the compiled step; then those of the optimizer stay as they were."""
    model = Halves()
    optimizer, eager = sgd(model), ShareByShare(model, F.mse_loss, sgd, 1)
    scheduler, theirs = (
        torch.optim.lr_scheduler.OneCycleLR(each, 0.2, total_steps=9) for each in (optimizer, eager.optimizers[0])
    )
    with compiled(model, optimizer=optimizer) as step, warnings.catch_warnings():
        warnings.simplefilter("error", graphir.TrainingWarning)
        for count in (6, 4, 6, 3):
            x, y = rows(count)
            assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, "followed")
            scheduler.step()
            theirs.step()
        step.param_groups[0]["lr"] = eager.optimizers[0].param_groups[0]["lr"] = 0.3
        for count in (6, 5):
            x, y = rows(count)
            assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, "not followed")
        optimizer.param_groups[0]["momentum"] = 0.2
        with pytest.warns(graphir.TrainingWarning, match=r"momentum of parameter group 0 .* is 0\.2 now"):
            step.step(*rows(6))


def test_other_options_of_the_optimizer_capture_anew() -> None:
    model = Halves()
    optimizer, eager = sgd(model), ShareByShare(model, F.mse_loss, sgd, 1)
    changes: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}, {"nesterov": True}, {"weight_decay": 0.0}, {}]
    with compiled(model, optimizer=optimizer) as step:
        for change in changes:
            optimizer.param_groups[0].update(change)
            eager.optimizers[0].param_groups[0].update(change)
            x, y = rows(6)
            assert_same_bits({"loss": step.step(x, y)}, {"loss": eager.step(x, y)}, str(change))
        assert_same_bits(step.state_dict(), eager.models[0].state_dict(), "state")
        assert len(step.plans) == 3 and step.steps_done == len(changes)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), {"momentum": 0.9}),
        (lambda model: torch.optim.Adam(model.parameters(), amsgrad=True), {"amsgrad": False}),
    ],
)
def test_an_option_that_makes_or_drops_state_is_refused(
    make: Callable[[nn.Module], torch.optim.Optimizer], change: dict[str, Any]
) -> None:
    model = Halves()
    optimizer = make(model)
    with compiled(model, optimizer=optimizer) as step:
        step.step(*rows(6))
        before = dict(optimizer.param_groups[0])
        optimizer.param_groups[0].update(change)
        with pytest.raises(SessionError, match=r"would (make|drop) state(.|\n)*before the first program"):
            step.step(*rows(6))
        optimizer.param_groups[0].update(before)
        step.step(*rows(6))
        assert len(step.plans) == 1 and step.steps_done == 2


def test_a_failed_step_ends_every_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled(Halves()) as step:
        for count in (6, 4):
            step.step(*rows(count))

        def fails(*args: Any) -> None:
            raise RunError("out of memory")

        monkeypatch.setattr(step._sessions[0]._executor, "run", fails)
        with pytest.raises(RunError):
            step.step(*rows(4))
        for count in (4, 6, 3):
            with pytest.raises(SessionError, match="the session is unusable: step 2 failed"):
                step.step(*rows(count))


class Tokens(nn.Module):
    """An embedding whose halves are set apart, so sizes are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        first, second = self.table(tokens).chunk(2)
        return torch.cat([first.relu(), second.sin()])


@pytest.mark.parametrize("count", [6, 8])
def test_a_step_that_fails_before_it_wrote_state_changes_nothing(count: int) -> None:
    with graphir.compile(
        model := Tokens(), (torch.arange(6) % 5,), targets=(torch.randn(6, 3),), loss=F.mse_loss, optimizer=sgd(model)
    ) as step:
        before = step.state()
        with pytest.raises(RunError, match="no state was written") as caught:
            step.step(torch.full((count,), 9), torch.randn(count, 3))
        assert caught.value.usable and step.usable and len(step.plans) == 1
        assert_same_bits(step.state(), before, "after the failure")
        step.step(torch.arange(count) % 5, torch.randn(count, 3))
        assert step.steps_done == 1
    assert not step.usable


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_compiled_model_cannot_be_copied_or_pickled(copied: Callable[[object], object]) -> None:
    with compiled(nn.Linear(4, 3)) as step, pytest.raises(SessionError, match="cannot be copied or pickled"):
        copied(step)


def test_what_is_closed_refuses_steps() -> None:
    step = compiled(Halves())
    step.close()
    with pytest.raises(SessionError, match="the session is closed"):
        step.step(*rows(6))


@pytest.mark.parametrize("device", ["gpu0", "cpu", -1])
def test_what_is_no_gpu_is_refused(device):
    with pytest.raises(graphir.PassError, match=r"is not a (device|gpu)\n  fix  write 'gpu:0', 'cuda:0' or 0$"):
        compiled(nn.Linear(4, 3), devices=[0, device])


@pytest.mark.parametrize("most_plans", [0, 1.5, "2", True])
def test_there_is_at_least_one_plan(most_plans: Any) -> None:
    with pytest.raises(SessionError, match=f"most_plans={most_plans!r}: there is at least one plan"):
        compiled(Halves(), most_plans=most_plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": []}, "replicate: devices: no devices\n  fix  give at least one"),
        ({"devices": 2}, "replicate: devices: expected a list, not 2"),
        ({"inputs": torch.ones(1, 4)}, r"inputs is a Tensor, not a tuple\n  fix  write inputs=\(x,\)"),
        ({"targets": torch.ones(1, 3)}, "targets is a Tensor, not a tuple"),
        ({"kwargs": ["scale"]}, "kwargs is no mapping of names to arguments"),
    ],
    ids=["no device", "a number", "a tensor", "targets", "kwargs"],
)
def test_arguments_are_refused_as_where_they_are_captured(arguments: dict[str, Any], message: str) -> None:
    x, y = rows(6)
    with pytest.raises(graphir.GraphirError, match=message):
        graphir.compile(Halves(), **{"inputs": (x,), "targets": (y,), "loss": F.mse_loss, **arguments})


# -- what a session can do beside steps


def public(owner: type) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_it_has_what_a_session_has() -> None:
    assert public(Session) <= public(graphir.Compiled)


def test_a_loader_is_run_through_changing_plans() -> None:
    model = Halves()
    batches = [rows(count) for count in (6, 4, 6)]
    with compiled(model) as step, pytest.warns(graphir.RecaptureWarning) as caught:
        eager = ShareByShare(model, F.mse_loss, sgd, 1)
        losses = step.run(iter(batches), steps=2, progress=False)
        assert_same_bits(
            dict(enumerate(losses)), dict(enumerate(eager.step(*batch) for batch in batches[:2])), "losses"
        )
        assert losses is step.results and (step.steps_done, len(step.plans)) == (2, 2)
        assert len(step.run(DataLoader(batches, batch_size=None))) == 3
    assert [w.filename for w in caught] == [__file__]


def test_a_loader_that_fails_leaves_it_whole() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield rows(6)
        raise OSError("no such file")

    with compiled(Halves()) as step:
        with pytest.raises(SessionError, match="the loader failed after 1 step: OSError: no such file"):
            step.run(batches())
        assert len(step.results) == 1 and step.usable
    taken = batches()
    with pytest.raises(SessionError, match="the session is closed"):
        step.run(taken)
    assert len(next(taken)) == 2


def test_reports_and_traces_are_of_one_plan(tmp_path: Path) -> None:
    def traced(**which: Any) -> Any:
        step.trace(tmp_path / "step.json", **which)
        found = imported(json.loads((tmp_path / "step.json").read_text()))
        return next(s.event["args"]["operator"] for s in found.slices if "fc1" in s.event["args"].get("operator", ""))

    with compiled(Halves(), session={"executor": "serial"}) as step:
        with pytest.raises(SessionError, match="no step was measured"):
            step.report()
        with step.measured():
            for count in (6, 4, 4, 4, 6, 6):
                step.step(*rows(count))
            # The first one of each counted bytes.
            assert [step.report(plan).steps for plan in step.plans] == [2, 2]
            assert step.report() == step.report(step.plan)
        with pytest.raises(SessionError, match="measured already"), step.measured(), step.measured():
            pass
        sixes, fours = step.plans
        with step.measured():
            for count in (6, 6, 4):
                step.step(*rows(count))
        step.step(*rows(6))
        assert step.plan is sixes and step.report() == step.report(fours)
        assert [step.report(plan).steps for plan in (sixes, fours)] == [1, 1]
        assert [step.report(plan).devices[0].predicted_peak for plan in (sixes, fours)] == [
            graphir.memory(plan).peak_of_storages("gpu:0") for plan in (sixes, fours)
        ]
        assert traced() == traced(plan=fours) != traced(plan=sixes)
        with step.measured():
            step.step(*rows(6))
        with pytest.raises(SessionError, match="no step was measured"):
            step.report(fours)
        with pytest.raises(SessionError, match="none of the plans that are kept"):
            step.trace(tmp_path / "step.json", plan=passes.emit(sixes.program))


def test_options_of_the_session_hold_for_every_plan() -> None:
    options = {"executor": "reference", "check_finite": True, "deadline": 5.0, "threads": 1}
    model = Halves()
    nn.init.constant_(model.fc1.weight, 10.0)
    with compiled(model, session=options) as step:
        for count in (6, 4):
            x, y = rows(count)
            step.step(x, y)
            assert step.executor == "reference" and step.caveats == ()
            with pytest.raises(RunError, match=f"aten.addmm.default made {6 * count} infinities"):
                step.step(torch.full_like(x, 1e38), y)
            assert step.usable


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ({"executr": "serial"}, "a session has no option 'executr'; did you mean 'executor'"),
        ({"beside": None}, "a session has no option 'beside'"),
        ({1: 2}, "a session has no option 1\n  fix  options: binding, executor, threads, "),
        ([("threads", 1)], "session is a list, not a mapping"),
    ],
)
def test_other_options_of_the_session_are_refused(session: Any, message: str) -> None:
    with pytest.raises(SessionError, match=message):
        compiled(Halves(), session=session)
