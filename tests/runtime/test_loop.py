"""Steps over the batches of a loader."""

import contextlib
import os
import pty
import signal
import threading

import models
import pytest
import torch
from graphir.runtime import Session
from runnable import captured, forward_plan, sgd
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import graphir
from graphir import passes
from graphir.errors import SessionError

SUM = """
    input x : f32[2] @gpu:0
    input y : f32[2] @gpu:0
    c : f32[2] @gpu:0 = aten.add.Tensor(x, y)
"""
NEG = "input x : f32[2] @gpu:0\nc : f32[2] @gpu:0 = aten.neg(x)"


@pytest.fixture
def total():
    with Session(forward_plan(SUM, "x", "y", output="c"), {}) as session:
        yield session


@pytest.fixture
def negate():
    with Session(forward_plan(NEG, "x", output="c"), {}) as session:
        yield session


def pair(value):
    return torch.full((2,), float(value)), torch.zeros(2)


def values(results):
    return [result[0].item() for result in results]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_data_loader_trains_as_steps_do(replicas):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(passes.replicate(program, devices=list(range(replicas))))
    x, y = example.inputs[0], example.targets[0]
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x) - len(x) // 3)  # the last batch is smaller
    with Session(plan, program.state) as ours, Session(plan, program.state) as theirs:
        losses = ours.run(loader)
        assert [loss.item() for loss in losses] == [theirs.step(*batch).item() for batch in loader]
        assert len(losses) == 2
        assert ours.steps_done == 2
        assert all(torch.equal(value, theirs.state()[name]) for name, value in ours.state().items())


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuples_and_lists_are_arguments(total, kind):
    assert values(total.run([kind(pair(1)), kind(pair(2))])) == [1, 2]


def test_a_tensor_is_the_one_argument(negate):
    assert values(negate.run(iter([torch.ones(2)]))) == [-1]


def test_a_mapping_is_keyword_arguments():
    x, y = torch.ones(1, 2), torch.ones(1, 2)
    program = graphir.capture(Sum(), inputs=(), kwargs={"first": x, "second": y})
    with Session(passes.emit(program), program.state) as session:
        (found,) = session.run([{"first": x, "second": 2 * y}])
        assert found.tolist() == [[3, 3]]


class Sum(torch.nn.Module):
    def forward(self, first, second):
        return first + second


def test_no_batch_is_taken_that_is_not_used(total):
    batches = iter([pair(i) for i in range(5)])
    assert values(total.run(batches, steps=2)) == [0, 1]
    assert values(total.run(batches, steps=0)) == []
    assert values(total.run(batches)) == [2, 3, 4]


def test_a_loader_that_ends_before_the_steps_ends_the_run(total):
    assert values(total.run([pair(1)], steps=9)) == [1]


def test_a_generator_goes_on_in_the_next_run(total):
    batches = (pair(i) for i in range(6))
    assert values(total.run(batches, steps=2)) == [0, 1]
    with pytest.raises(SessionError, match="argument"):
        total.run(batch[:1] for batch in batches)
    assert values(total.run(batches)) == [3, 4, 5]


def test_a_run_within_a_run_has_results_of_its_own(total):
    def batches():
        yield pair(1)
        assert values(total.run([pair(2)])) == [2]
        yield pair(3)

    assert values(total.run(batches())) == [1, 3]


def failing():
    yield pair(1)
    yield pair(2)
    raise ValueError("no such file")


def test_a_loader_that_fails_leaves_the_session_whole(total):
    with pytest.raises(SessionError) as caught:
        total.run(failing())
    assert str(caught.value).splitlines() == [
        "the loader failed after 2 steps: ValueError: no such file",
        "  in   plan 'small'",
        "  fix  the session is whole: session.results has what the steps returned, and step() and run() go on",
    ]
    assert isinstance(caught.value.__cause__, ValueError)
    assert values(total.results) == [1, 2]
    assert total.steps_done == 2
    assert values(total.run([pair(3)])) == [3]


def test_a_traceback_that_a_worker_process_sends_stays_out_of_the_message(total):
    def loader():
        raise ValueError("Caught ValueError in DataLoader worker process 0.\nTraceback:\n  here\nValueError: no file\n")
        yield

    with pytest.raises(SessionError, match=r"0 steps: ValueError: Caught .* process 0\. … ValueError: no file\n  in  "):
        total.run(loader())


def test_a_step_that_fails_raises_its_own_error(total):
    with pytest.raises(SessionError, match="argument"):
        total.run([pair(1), (torch.ones(3),)])
    assert values(total.results) == [1]


def test_a_batch_whose_names_are_none_is_refused(total):
    with pytest.raises(SessionError, match=r"a batch gives an argument under 1, which is no name\n  in   plan 'small'"):
        total.run([{1: torch.ones(2)}])
    assert total.usable


@pytest.mark.parametrize("steps", [-1, 1.5, True, "3"])
def test_numbers_of_steps_that_are_none_are_refused(total, steps):
    with pytest.raises(SessionError, match="is no number of steps"):
        total.run([pair(1)], steps=steps)


@pytest.mark.parametrize("loader", [3, None, object(), pair])
def test_a_loader_that_is_none_is_refused(total, loader):
    with pytest.raises(SessionError, match=f"the loader is a {type(loader).__name__}, which has no batches"):
        total.run(loader)


class NoIterator:
    def __iter__(self):
        return 3


def test_a_loader_may_fail_without_a_word(total):
    def silent():
        raise NotImplementedError
        yield

    with pytest.raises(SessionError, match=r"the loader failed after 0 steps: NotImplementedError\n"):
        total.run(silent())


def test_a_loader_without_an_iterator_has_failed(total):
    with pytest.raises(SessionError, match="the loader failed after 0 steps: TypeError: iter"):
        total.run(NoIterator())


def test_a_closed_session_runs_nothing(total):
    total.close()
    with pytest.raises(SessionError, match="closed"):
        total.run([pair(1)])


def interrupting(session, times=1):
    """Steps of *session* with Ctrl-C in the middle of the second one, as often as this."""
    inner = session._executor.run

    def run(*args):
        if session.steps_done == 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return inner(*args)

    session._executor.run = run


def test_ctrl_c_strikes_between_steps(total):
    interrupting(total)
    with pytest.raises(KeyboardInterrupt, match=r"stopped after 2 steps, which session.results has"):
        total.run([pair(i) for i in range(5)])
    assert values(total.results) == [0, 1]
    assert total.steps_done == 2
    assert total.usable
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_strikes_at_once(total):
    interrupting(total, times=2)
    with pytest.raises(KeyboardInterrupt):
        total.run([pair(i) for i in range(5)])
    assert values(total.results) == [0]
    assert not total.usable


def test_ctrl_c_stops_a_loader_that_waits(total):
    def slow():
        yield pair(1)
        signal.raise_signal(signal.SIGINT)
        yield pair(2)

    with pytest.raises(KeyboardInterrupt, match="stopped after 1 step,"):
        total.run(slow())
    assert total.usable


def test_a_programs_own_handler_stays(total):
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        interrupting(total)
        assert values(total.run([pair(i) for i in range(3)])) == [0, 1, 2]
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_runs_in_other_threads(total):
    found = []
    thread = threading.Thread(target=lambda: found.extend(total.run([pair(1)])))
    thread.start()
    thread.join()
    assert values(found) == [1]


@pytest.fixture
def screen(monkeypatch):
    """Within it, the error stream is a terminal; what was shown there is in the list afterwards."""

    @contextlib.contextmanager
    def shown():
        main, side = pty.openpty()
        found = [b""]
        with os.fdopen(side, "w") as stream, monkeypatch.context() as patch:
            patch.setattr("sys.stderr", stream)
            yield found
        with os.fdopen(main, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # its end is an error
            while more := terminal.read(1 << 16):
                found[0] += more

    return shown


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False)])
def test_progress_is_shown_on_a_terminal(total, screen, progress, shown):
    with screen() as found:
        total.run([pair(i) for i in range(3)], progress=progress)
    assert (b"3/3" in found[0]) is shown
    assert bool(found[0]) is shown


def test_the_loss_that_stays_on_a_terminal_is_the_last(screen):
    step = Session(forward_plan("input x : f32[] @gpu:0\nc : f32[] @gpu:0 = aten.neg(x)", "x", output="c"), {})
    with step, screen() as found:
        step.run([torch.tensor(float(i)) for i in range(9)])
    assert b"loss -8" in found[0]


class Stream(IterableDataset):
    """Its loader has ``__len__``, which raises."""

    def __iter__(self):
        return map(pair, range(3))


def test_a_loader_that_does_not_know_its_length_is_run_on_a_terminal(total, screen):
    with screen() as found:
        assert len(total.run(DataLoader(Stream(), batch_size=None))) == 3
    assert b"3/?" in found[0]


def test_a_compiled_model_shows_the_bar_of_its_own_steps_alone(screen):
    with graphir.compile(torch.nn.ReLU(), (torch.ones(2),)) as step, screen() as found:
        step.run([torch.ones(2)] * 3)
    assert b"3/3" in found[0] and b"0/0" not in found[0]


@pytest.mark.parametrize("stream", [None, object()])
def test_an_error_stream_may_be_anything(total, monkeypatch, stream):
    monkeypatch.setattr("sys.stderr", stream)
    assert len(total.run([pair(1)])) == 1


def test_nothing_is_shown_elsewhere(total, capfd):
    total.run([pair(1)])
    assert capfd.readouterr() == ("", "")
