"""Sequences of several lengths: CTC losses, whose batch splits, and packed sequences of lengths that are no data."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager import ShareByShare, assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn
from torch.nn.utils import rnn

import graphir
from graphir import passes
from graphir.capturing.capture import capture
from graphir.errors import CaptureError, CoverageError, RunError
from graphir.ir.text import parse

pytestmark = pytest.mark.usefixtures("few_objects")

BATCH, FRAMES, CLASSES, LABELS = 6, 9, 5, 4


class Listener(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).log_softmax(-1).transpose(0, 1)


def heard() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch; its labels, padded by what is no class; how many frames and labels there are. One pair is impossible."""
    frames, labels = torch.tensor([9, 7, 9, 2, 5, 8]), torch.tensor([4, 0, 2, 4, 1, 3])
    targets = torch.randint(1, CLASSES, (BATCH, LABELS)).masked_fill(torch.arange(LABELS) >= labels[:, None], -100)
    return torch.randn(BATCH, FRAMES, 3), targets, frames, labels


def in_integers(frames: Tensor, labels: Tensor) -> Callable[..., Tensor]:
    lengths = frames.tolist(), labels.tolist()

    def loss(out: Tensor, targets: Tensor) -> Tensor:
        return F.ctc_loss(out, targets, *lengths, zero_infinity=True)

    return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("blank", [0, CLASSES - 1])
def test_ctc_has_torchs_bits_in_training_and_its_batch_splits(reduction: str, blank: int) -> None:
    x, targets, frames, labels = heard()
    if blank:
        targets = targets - 1

    def loss(out: Tensor, y: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
        return F.ctc_loss(out, y, frames, labels, blank, reduction, zero_infinity=True).sum()

    model = Listener()

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    given = (targets[:2], frames[:2], labels[:2])
    program = capture(model, (x[:2],), targets=given, loss=loss, optimizer=optimizer(model))
    assert parse(str(program)) == program
    plan = emit(passes.inject_copies(passes.replicate(program, [0, 1])))
    eager = ShareByShare(model, loss, optimizer, 2)
    with Session(plan, program.state) as session:
        for rows in (6, 5):
            batch = [t[:rows] for t in (x, targets, frames, labels)]
            shares = zip(*(t.chunk(2) for t in batch), strict=True)
            expected = eager.step_on([((x,), tuple(rest), {}) for x, *rest in shares])
            assert torch.equal(session.step(*batch), expected)
        assert_same_bits(session.state_dict(), eager.models[0].state_dict(), "state")


def test_infinite_losses_stay_infinite_unless_they_are_to_be_zero() -> None:
    x, targets, frames, labels = heard()
    model = Listener()
    for zero_infinity in (False, True):
        loss = nn.CTCLoss(zero_infinity=zero_infinity)
        program = capture(model, (x,), targets=(targets, frames, labels), loss=loss)
        expected = loss(model(x), targets, frames, labels)
        model.zero_grad()
        expected.backward()
        with Session(emit(program), program.state) as session:
            assert torch.equal(session.step(x, targets, frames, labels), expected.detach())
            assert_same_bits(session.gradients(), {n: p.grad for n, p in model.named_parameters()}, "gradients")
        assert bool(expected.isfinite()) == zero_infinity


def test_targets_may_be_concatenated() -> None:
    x, targets, frames, labels = heard()
    joined = targets[targets > 0]
    loss = nn.CTCLoss(zero_infinity=True)
    model = Listener()
    program = capture(model, (x,), targets=(joined, frames, labels), loss=loss, batch_dims=((0,), {}, (None, 0, 0)))
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x, joined, frames, labels), loss(model(x), joined, frames, labels))
        with pytest.raises(RunError, match="to have size 12 at dimension 0"):
            session.step(x, joined, frames, labels.clamp(max=3).minimum(torch.tensor([3, 0, 2, 4, 1, 3])))


def test_lengths_may_be_integers() -> None:
    x, targets, frames, labels = heard()
    model, loss = Listener(), in_integers(frames, labels)
    program = capture(model, (x,), targets=(targets,), loss=loss)
    assert "takes as many whole numbers as input_lengths" in program.covers.fixed
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x, targets), loss(model(x), targets))


def test_one_sequence_without_a_batch_has_at_least_as_many_frames_as_it_says() -> None:
    model = nn.Sequential(nn.Linear(3, CLASSES), nn.LogSoftmax(-1))
    loss = in_integers(torch.tensor([7]), torch.tensor([2]))
    x, targets = torch.randn(FRAMES, 3), torch.tensor([2, 1])
    program = capture(model, (x,), targets=(targets,), loss=loss)
    with Session(emit(program), program.state) as session:
        for frames in (9, 7):
            assert torch.equal(session.step(x[:frames], targets), loss(model(x[:frames]), targets))
        with pytest.raises(CoverageError, match="the program takes batch>=7"):
            session.step(x[:6], targets)


def test_equal_lengths_that_are_counted_follow_the_batch() -> None:
    def loss(out: Tensor, targets: Tensor) -> Tensor:
        frames, batch, _ = out.shape
        return F.ctc_loss(out, targets, [frames] * batch, (targets.shape[1],) * batch)

    model, x, targets = Listener(), torch.randn(4, FRAMES, 3), torch.randint(1, CLASSES, (4, LABELS))
    program = capture(model, (x,), targets=(targets,), loss=loss)
    assert program.covers.fixed == ""
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x[:3], targets[:3]), loss(model(x[:3]), targets[:3]))


@pytest.mark.parametrize(
    ("frames", "labels", "complaint"),
    [
        ([10, 9], [2, 2], "a sequence has 10 frames, log_probs 9"),
        ([9, 9], [5, 2], "a sequence has 5 labels, targets 4"),
        ([9], [2], "a CTC loss of 2 sequences takes as many whole numbers as input_lengths, not i64[1]"),
    ],
)
def test_lengths_that_no_batch_has_are_refused(frames: list[int], labels: list[int], complaint: str) -> None:
    targets = torch.ones(2, LABELS, dtype=torch.int64)
    with pytest.raises(CaptureError) as error:
        capture(Listener(), (torch.randn(2, FRAMES, 3),), loss=lambda out: F.ctc_loss(out, targets, frames, labels))
    assert complaint in error.value.what


def test_recompute_and_shift_keep_what_ctc_computes() -> None:
    x, targets, frames, labels = heard()
    model = Listener()
    program = capture(model, (x,), targets=(targets, frames, labels), loss=nn.CTCLoss(zero_infinity=True))
    moved = passes.shift_activations(program, ["loss.ctc_loss"], shifts={0: 1})
    moved = passes.inject_copies(passes.recompute(moved, "log_softmax"))
    assert graphir.certify(program, moved).holds
    with Session(emit(moved), program.state) as session, Session(emit(program), program.state) as plain:
        assert torch.equal(session.step(x, targets, frames, labels), plain.step(x, targets, frames, labels))
        assert_same_bits(session.gradients(), plain.gradients(), "gradients")


class Packed(nn.Module):
    """A recurrent module on packed sequences, between layers on padded ones."""

    def __init__(self, kind: Callable[..., nn.Module], lengths: list[int] | None, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(3, 4)
        self.recurrent = kind(4, 5, **options)
        self.batch_first, self.lengths = options.get("batch_first", False), lengths

    def forward(self, x: Tensor, lengths: Any = None) -> tuple[Tensor, Any]:
        lengths = self.lengths if lengths is None else lengths
        in_order = not isinstance(lengths, list) or lengths == sorted(lengths, reverse=True)
        packed = rnn.pack_padded_sequence(
            self.before(x), lengths, batch_first=self.batch_first, enforce_sorted=in_order
        )
        out, state = self.recurrent(packed)
        padded, count = rnn.pad_packed_sequence(out, batch_first=self.batch_first, padding_value=-1.0, total_length=6)
        return padded * count.view((-1, 1, 1) if self.batch_first else (1, -1, 1)), state


KINDS: dict[str, tuple[Callable[..., nn.Module], list[int], dict[str, Any]]] = {
    "gru": (nn.GRU, [4, 2, 1, 1], {"batch_first": True, "bidirectional": True}),
    "lstm": (nn.LSTM, [2, 4, 3, 1], {"num_layers": 2, "proj_size": 3}),
    "rnn": (nn.RNN, [3, 3, 3, 3], {"nonlinearity": "relu", "batch_first": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_have_torchs_bits(kind: str) -> None:
    make, lengths, options = KINDS[kind]
    model = Packed(make, lengths, **options)
    x = torch.randn(4, 5, 3) if model.batch_first else torch.randn(5, 4, 3)

    def loss(out: tuple[Tensor, Any]) -> Tensor:
        return out[0].square().mean()

    program = capture(model, (x,), loss=loss, batch_dims=((None,), {}, ()))
    expected = loss(model(x))
    expected.backward()
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x), expected.detach())
        assert_same_bits(session.gradients(), {n: p.grad for n, p in model.named_parameters()}, "gradients")


def test_gradients_of_packed_data_keep_the_signs_of_zeros() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 2, 4))

        def forward(self, scale: Tensor) -> Tensor:
            return rnn.pack_padded_sequence(self.weight, [3, 1]).data * scale

    model, scale = Scaled(), torch.tensor([[-0.0], [0.0], [-0.0], [1.0]])
    program = capture(model, (scale,), loss=torch.sum, batch_dims=((None,), {}, ()))
    model(scale).sum().backward()
    with Session(emit(program), program.state) as session:
        session.step(scale)
        assert_same_bits(session.gradients(), {"weight": model.weight.grad}, "gradients")


def test_fixed_says_that_lengths_are_of_a_batch() -> None:
    model, x = Packed(nn.GRU, [4, 2, 1, 1], batch_first=True), torch.randn(4, 5, 3)
    program = capture(model, (x,), output=lambda out: out[0])
    assert "there are 4 lengths for 11 sequences" in program.covers.fixed
    with Session(emit(program), program.state) as session:
        assert torch.equal(session.step(x), model(x)[0])


@pytest.mark.filterwarnings("ignore::graphir.errors.RecaptureWarning")
def test_compile_makes_a_plan_for_each_list_of_lengths() -> None:
    model, x = Packed(nn.GRU, None, batch_first=True), torch.randn(4, 5, 3)
    with graphir.compile(model, (x, [4, 2, 1, 1]), output=lambda out: out[0]) as compiled:
        for lengths in ([4, 2, 1, 1], [3, 3, 2, 1], [4, 2, 1, 1]):
            assert torch.equal(compiled.step(x, lengths), model(x, lengths)[0])


@pytest.mark.parametrize("packs", [True, False])
def test_lengths_that_are_data_are_refused_with_what_can_be_done(packs: bool) -> None:
    model, x = Packed(nn.GRU, None, batch_first=True), torch.randn(4, 5, 3)
    lengths = torch.tensor([4, 2, 1, 1])
    given = (x, lengths) if packs else (rnn.pack_padded_sequence(x, lengths, batch_first=True),)
    with pytest.raises(CaptureError) as error:
        capture(model if packs else nn.GRU(3, 5), given)
    assert error.value.what == "the packing of sequences depends on their lengths, which are data here"
    assert all(word in error.value.fix for word in ("Python integers", "buckets", "DataParallel and the loss outside"))


@pytest.mark.parametrize(
    ("lengths", "complaint"),
    [([5, 3], "2 lengths for 4 sequences"), ([6, 5, 3, 3], "are not between 1 and 5"), ([3, 2, 1, 0], "not between 1")],
)
def test_lengths_that_torch_refuses_are_refused(lengths: list[int], complaint: str) -> None:
    model = Packed(nn.GRU, lengths, batch_first=True)
    with pytest.raises(CaptureError, match=complaint):
        capture(model, (torch.randn(4, 5, 3),))


def test_other_threads_pack_sequences_meanwhile() -> None:
    gru, padded, found = nn.GRU(3, 2), torch.randn(4, 2, 3), list[Tensor]()

    def run() -> None:
        found.append(gru(rnn.pack_padded_sequence(padded, torch.tensor([4, 2])))[0].data.detach())

    class Beside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return x * 2

    capture(Beside(), (torch.ones(3),))
    run()
    assert len(found) > 1 and all(torch.equal(data, found[-1]) for data in found)
