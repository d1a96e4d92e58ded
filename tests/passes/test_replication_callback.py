"""passes.replication_callback and replicate's on_replica: who is called, when, with what."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import nets
import pytest
import torch
from normed import Normed, captured
from torch import nn

import graphir
from graphir import passes
from graphir.errors import PassError, VerifyError
from graphir.ir.program import Program
from graphir.replication import CallbackContext


class Plain(nn.Module):
    """Containers, a module that is there twice, and one that the step does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
        self.again = self.layers[1]
        self.unused = nn.Dropout()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.layers(x)) * 2


class Asking(nn.Linear):
    """A module that wants to know of its copies."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        ctx.copies = [*getattr(ctx, "copies", ()), copy_id]
        self.heard = (ctx, copy_id)


def plain(model: nn.Module | None = None) -> Program:
    model = Plain() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return graphir.capture(model, (torch.randn(6, 4),), loss=lambda out: out.sum(), optimizer=optimizer)


class Recording:
    """A callback that notes its calls, and what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []
        self.contexts: dict[str, list[object]] = {}
        self.replicas: dict[tuple[int, str], passes.Replica] = {}

    def __call__(self, ctx: object, copy_id: int, replica: passes.Replica) -> None:
        self.calls.append((copy_id, replica.path))
        self.contexts.setdefault(replica.path, []).append(ctx)
        self.replicas[copy_id, replica.path] = replica


def nothing(ctx: object, copy_id: int, replica: passes.Replica) -> None:
    """Edits nothing."""


def test_all_modules_of_the_master_copy_come_first() -> None:
    """In the order of ``modules()``: containers, what the step does not use, each module once."""
    program, seen = plain(), Recording()
    passes.replicate(program, [0, 1, 2], on_replica=seen)
    assert program.module is not None
    paths = [path for path, _ in program.module.named_modules()]
    assert paths == ["", "layers", "layers.0", "layers.1", "layers.2", "unused"]
    assert seen.calls == [(copy_id, path) for copy_id in range(3) for path in paths]


def test_a_context_is_shared_by_the_copies_of_a_module_and_nothing_else() -> None:
    seen = Recording()
    passes.replication_callback(passes.replicate(plain(), [0, 1]), seen)
    for shared in seen.contexts.values():
        assert len(shared) == 2 and shared[0] is shared[1]
        assert isinstance(shared[0], CallbackContext)
    assert len({id(shared[0]) for shared in seen.contexts.values()}) == len(seen.contexts)


def test_replicas_have_their_module_s_operators_and_blobs() -> None:
    seen = Recording()
    program = passes.replicate(plain(), [0, 3], on_replica=seen)
    second = seen.replicas[1, "layers.2"]
    assert (second.prefix, second.copy_id, second.copies, second.path) == ("gpu_3/", 1, 2, "layers.2")
    assert all(op in program.step.ops and op.module == "layers.2" for op in second.ops)
    assert {op.phase for op in second.ops} == {"forward", "backward", "update"}
    assert {op.outputs[0].partition("/")[0] for op in second.ops} == {"gpu_3"}
    assert "gpu_3/layers.2.weight" in second.blobs and "lr" in second.blobs
    assert not any(name.startswith("gpu_0/") for name in second.blobs)
    own = [op for op in program.step.ops if op.module == "" and op.phase != "reduce" and op.device == "gpu:0"]
    assert list(seen.replicas[0, ""].ops) == own, "a container has what it computes itself"
    assert seen.replicas[0, "layers"].ops == ()
    assert repr(second) == f"<copy 1 of module 'layers.2': {len(second.ops)} operators>"


def test_how_gradients_are_reduced_is_known() -> None:
    seen = Recording()
    passes.replicate(plain(), [0, 1], on_replica=seen)
    reduction = seen.replicas[0, ""].reduction
    assert reduction["reduction"] == "mean" and str(reduction["shares"][1]) == "gpu_1/batch"  # type: ignore[index]
    passes.replicate(plain(), [0, 1], reduction="sum", on_replica=seen)
    assert seen.replicas[0, ""].reduction == {}


def test_each_replica_has_a_shallow_copy_of_the_module() -> None:
    program, seen = plain(), Recording()
    model = program.module
    assert model is not None
    passes.replicate(program, [0, 1], on_replica=seen)
    for path, module in model.named_modules():
        copies = [seen.replicas[r, path].module for r in range(2)]
        assert len({id(module), *map(id, copies)}) == 3
        assert all(type(each) is type(module) for each in copies)
        assert all(
            dict(each.named_parameters(recurse=False)) == dict(module.named_parameters(recurse=False))
            for each in copies
        )
    root, layers = seen.replicas[1, ""].module, seen.replicas[1, "layers"].module
    assert root.get_submodule("layers") is layers
    assert root.again is seen.replicas[1, "layers.1"].module
    assert root.again is layers.get_submodule("1")


def test_copies_keep_what_callbacks_set() -> None:
    """A later callback finds it; the captured module, and the program before, do not."""

    def mark(ctx: object, copy_id: int, replica: passes.Replica) -> None:
        replica.module.mark = getattr(replica.module, "mark", 0) + 1 + copy_id

    program = plain()
    once = passes.replicate(program, [0, 1], on_replica=mark)
    twice = passes.replication_callback(once, mark)
    assert [tree.get_submodule("layers.0").mark for tree in once.module_copies] == [1, 2]
    assert [tree.get_submodule("layers.0").mark for tree in twice.module_copies] == [2, 4]
    assert program.module is not None and not hasattr(program.module.get_submodule("layers.0"), "mark")
    assert not hasattr(program.module, "mark")
    assert pickle.loads(pickle.dumps(twice)).module_copies == ()


def test_a_hook_of_a_copy_is_not_the_model_s() -> None:
    program = plain()

    def listen(ctx: object, copy_id: int, replica: passes.Replica) -> None:
        replica.module.register_forward_hook(lambda module, given, made: None)

    found = passes.replicate(program, [0, 1], on_replica=listen)
    assert program.module is not None
    assert not any(module._forward_hooks for module in program.module.modules())
    assert [len(copied._forward_hooks) for copied in found.module_copies] == [1, 1]


def test_modules_that_ask_are_called_without_asking() -> None:
    model = nn.Sequential(Asking(4, 4), nn.ReLU(), Asking(4, 3))
    program = passes.replicate(plain(model), [0, 1])
    first, second = [tree.get_submodule("0").heard for tree in program.module_copies]
    assert first[0] is second[0] and first[0].copies == [0, 1] and (first[1], second[1]) == (0, 1)
    assert program.module_copies[0].get_submodule("2").heard[0] is not first[0]
    assert not hasattr(model[0], "heard")
    assert program.history == ("replicate{devices=[0, 1]}",)


def test_shard_calls_modules_that_ask_too() -> None:
    program = passes.shard(plain(nn.Sequential(Asking(4, 4), nn.ReLU(), nn.Linear(4, 3))), {"2": 1}, [0, 1])
    first, second = [tree.get_submodule("0").heard for tree in program.module_copies]
    assert first[0] is second[0] and first[0].copies == [0, 1] and (first[1], second[1]) == (0, 1)


def test_modules_that_ask_are_called_before_the_callback() -> None:
    order = []

    def after(ctx: Any, copy_id: int, replica: passes.Replica) -> None:
        order.append((copy_id, replica.path, getattr(ctx, "copies", None)))

    passes.replicate(plain(nn.Sequential(Asking(4, 3))), [0, 1], on_replica=after)
    assert [call for call in order if call[1] == "0"] == [(0, "0", [0]), (1, "0", [0, 1])]


def test_without_callbacks_nothing_is_copied() -> None:
    assert passes.replicate(plain(), [0, 1]).module_copies == ()


def test_the_step_is_the_same_where_nothing_is_edited() -> None:
    program = plain()
    plainly = passes.replicate(program, [0, 1])
    assert passes.replicate(program, [0, 1], on_replica=nothing).step == plainly.step
    assert passes.replication_callback(plainly, nothing).step == plainly.step


# The history


def test_the_history_names_the_callable() -> None:
    program = passes.replicate(plain(), [0, 1], on_replica=nothing)
    name = f"{__name__}.nothing"
    assert program.history == (f"replicate{{devices=[0, 1], on_replica={name}}}",)
    again = passes.replication_callback(program, Recording())
    assert again.history[1] == f"replication_callback{{on_replica={__name__}.Recording}}"


@pytest.mark.parametrize("way", ["replicate", "replication_callback"])
def test_the_history_runs_again_with_the_callable_alone(way: str) -> None:
    program = plain()
    if way == "replicate":
        made = passes.replicate(program, [0, 1], on_replica=lambda ctx, copy_id, replica: None)
        again: Any = passes.build(passes.Replicate, devices=[0, 1], on_replica=nothing)
    else:
        made = passes.replication_callback(passes.replicate(program, [0, 1]), nothing)
        again = passes.build(passes.ReplicationCallback, on_replica=nothing)
    pipeline = passes.Pipeline(" | ".join(made.history))
    with pytest.raises(
        PassError, match=rf"{way} was run with the callable .*, and a text holds its name alone\n  fix  run it"
    ):
        pipeline(program)
    last = passes.Pipeline([*pipeline.passes[:-1], again])(program)
    assert last.step == made.step


def test_files_keep_the_history_and_a_loaded_program_is_refused(tmp_path: Path) -> None:
    program = passes.replicate(plain(), [0, 1], on_replica=nothing)
    program.save(tmp_path / "step.json")
    loaded = graphir.load(tmp_path / "step.json")
    assert loaded == program
    assert isinstance(loaded, Program)
    message = "has no module to call replication_callback for: it was loaded from a file, or copied\n  fix  capture"
    with pytest.raises(PassError, match=message):
        passes.replication_callback(loaded, nothing)
    captured = copy.copy(plain())
    captured.save(tmp_path / "captured.json")
    again = graphir.load(tmp_path / "captured.json")
    assert isinstance(again, Program)
    with pytest.raises(PassError, match="has no module to call replicate for"):
        passes.replicate(again, [0, 1], on_replica=nothing)


# Refusals


@pytest.mark.parametrize("copy_id", [0, 1])
def test_a_callback_that_raises_says_for_which_module_and_copy(copy_id: int) -> None:
    def failing(ctx: object, copy: int, replica: passes.Replica) -> None:
        replica.module.touched = True
        for op in replica.ops:
            if op.type == "aten.relu.default":
                replica.insert_after(op, "aten.neg.default", [op.outputs[0]])
        if (copy, replica.path) == (copy_id, "layers.2"):
            raise KeyError("no such thing")

    program = plain()
    before, text = passes.replicate(program, [0, 1]), str(program)
    for run in (
        lambda: passes.replicate(program, [0, 1], on_replica=failing),
        lambda: passes.replication_callback(before, failing),
    ):
        with pytest.raises(PassError) as caught:
            run()
        assert str(caught.value).splitlines() == [
            f"callback {__name__}.{failing.__qualname__} raised KeyError: 'no such thing'",
            f"  in   module 'layers.2', copy {copy_id}",
            "  fix  nothing was replicated; mend the callback",
        ]
        assert isinstance(caught.value.__cause__, KeyError)
    assert str(program) == text and before == passes.replicate(program, [0, 1])
    assert program.module is not None and not hasattr(program.module, "touched")


def test_a_module_that_asks_and_raises_is_named() -> None:
    class Failing(nn.Linear):
        def __data_parallel_replicate__(self, ctx: object, copy_id: int) -> None:
            raise RuntimeError("not today")

    with pytest.raises(
        PassError, match=r"__data_parallel_replicate__ raised RuntimeError: not today\n  in   module '0', copy 0"
    ):
        passes.replicate(plain(nn.Sequential(Failing(4, 3))), [0, 1])


def test_what_breaks_an_invariant_is_refused() -> None:
    """Verification has the last word, on what an edit alone does not show."""

    def odd(ctx: object, copy_id: int, replica: passes.Replica) -> None:
        if replica.path == "layers.0":
            replica._edits.net = replica._edits.net.with_(external_outputs=("gpu_0/none",))
            replica._edits.changed = True

    with pytest.raises(VerifyError, match="external output 'gpu_0/none' is not declared"):
        passes.replication_callback(passes.replicate(plain(), [0, 1]), odd)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, r"on_replica: 3 is no callback\n  fix  give a callable f\(ctx, copy_id, replica\)"),
        ([nothing], "on_replica: .* is no callback"),
        (None, "on_replica: None is no callback"),
        ("nothing", "replication_callback was run with the callable nothing"),
    ],
)
def test_what_is_no_callable_is_refused(given: Any, message: str) -> None:
    with pytest.raises(PassError, match=message):
        passes.replication_callback(passes.replicate(plain(), [0, 1]), given)


def test_programs_without_replicas_are_refused() -> None:
    with pytest.raises(PassError, match=r"is not replicated: .*\n  fix  run replicate before replication_callback"):
        passes.replication_callback(plain(), nothing)
    with pytest.raises(PassError, match="is not replicated"):
        passes.replication_callback(nets.random_program(1), nothing)


def test_one_replica_has_a_master_copy_alone() -> None:
    seen = Recording()
    passes.replicate(captured(Normed().double()), [2], on_replica=seen)
    assert {copy_id for copy_id, _ in seen.calls} == {0}
