"""Programs as graphs of torch.fx and as exported programs: the same bits, under the module's names."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.nn.functional as F
from eager import assert_same_bits
from graphir.runtime import Session
from torch import Tensor, nn

import graphir
from graphir import CaptureError, GraphirError, capture, passes

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
EXAMPLES = {
    "mlp": models.mlp,
    "resnet with dropout": lambda: models.resnet(blocks=2, dropout=0.2),
    "gpt": lambda: models.gpt(layers=1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_a_graph_trains_as_eager_does_at_any_batch(example: str, optimizer: str) -> None:
    made = EXAMPLES[example]()
    model, count = copy.deepcopy(made.model), len(made.inputs)
    theirs = OPTIMIZERS[optimizer](model.parameters())
    program = capture(
        made.model,
        made.inputs,
        targets=made.targets,
        loss=made.loss,
        optimizer=OPTIMIZERS[optimizer](made.model.parameters()),
    )
    graph = graphir.to_fx(program)
    for step in range(3):
        batch = [t if step < 2 else torch.cat([t, t])[:-1] for t in (*made.inputs, *made.targets)]
        with graphir.seeded(step):
            theirs.zero_grad()
            loss = made.loss(model(*batch[:count]), *batch[count:])
            loss.backward()
        theirs.step()
        assert torch.equal(graph(*batch), loss.detach())
    mine = graph.state_dict()
    assert_same_bits({name: mine[name] for name in model.state_dict()}, dict(model.state_dict()), example)


def test_a_shifted_program_is_a_graph_with_copies() -> None:
    made = models.mlp()
    program = capture(made.model, made.inputs, targets=made.targets, loss=made.loss)
    with Session(passes.emit(program), program.state) as session:
        loss = session.step(*made.inputs, *made.targets)
    placed = passes.replicate(program, [0])
    placed = passes.inject_copies(passes.shift_activations(placed, passes.find_activations(placed)[-1:], shifts={0: 1}))
    assert any(op.type == "Copy" for op in placed.step.ops)
    assert torch.equal(graphir.to_fx(placed)(*made.inputs, *made.targets), loss)


def test_nodes_are_called_after_blobs_and_know_their_module_and_source() -> None:
    made = models.mlp()
    program = capture(made.model, made.inputs)
    graph = graphir.to_fx(program).graph
    (node,) = (node for node in graph.nodes if node.meta.get("blob") == "fc1")
    op = next(op for op in program.step.ops if op.outputs == ("fc1",))
    assert node.name == "fc1" and node.target is torch.ops.aten.addmm.default
    assert node.meta["module"] == "fc1" and node.meta["source"] == op.source != ""


class Structured(nn.Module):
    """Nested arguments and results, a constant among each."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, batch: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
        y = self.fc(batch["x"]) * scale
        self.seen.add_(y.detach().mean(0))
        return {"y": y, "mean": [y.view(-1).mean(), None, 3], "rows": y[1:]}


def test_structures_keyword_arguments_and_buffers() -> None:
    model, x = Structured(), torch.randn(4, 3)
    graph = graphir.to_fx(capture(model, ({"x": x, "n": 2},), kwargs={"scale": 2.0}))
    for rows in (4, 6):
        x = torch.randn(rows, 3)
        mine, theirs = graph({"x": x, "n": 2}, scale=2.0), model({"x": x, "n": 2}, scale=2.0)
        assert mine.keys() == theirs.keys() and mine["mean"][1:] == theirs["mean"][1:]
        assert torch.equal(mine["y"], theirs["y"]) and torch.equal(mine["mean"][0], theirs["mean"][0])
        assert torch.equal(mine["rows"], theirs["rows"]) and torch.equal(graph.seen, model.seen)


def test_a_forward_graph_can_be_trained() -> None:
    made = models.mlp()
    graph = graphir.to_fx(capture(made.model, made.inputs))
    made.loss(graph(*made.inputs), *made.targets).backward()
    made.loss(made.model(*made.inputs), *made.targets).backward()
    for name, param in made.model.named_parameters():
        assert torch.equal(graph.get_parameter(name).grad, param.grad)


def test_arguments_that_do_not_fit_are_refused() -> None:
    graph = graphir.to_fx(capture(Structured(), ({"x": torch.randn(4, 3), "n": 2},), kwargs={"scale": 2.0}))
    with pytest.raises(GraphirError, match=r"batch.x has shape \[4, 5\], the program takes \[any, 3\]"):
        graph({"x": torch.randn(4, 5), "n": 2}, scale=2.0)
    with pytest.raises(GraphirError, match=r"was 2\.0 when the program was captured, now 3.0"):
        graph({"x": torch.randn(4, 3), "n": 2}, scale=3.0)


def test_replicas_and_programs_without_state_are_refused() -> None:
    made = models.mlp()
    program = capture(made.model, made.inputs)
    with pytest.raises(GraphirError, match="2 replicas"):
        graphir.to_fx(passes.replicate(program, [0, 1]))
    with pytest.raises(GraphirError, match="no state"):
        graphir.to_fx(program.with_(state={}))


def test_a_forward_is_exported_and_captured_again_with_the_same_bits() -> None:
    made = models.resnet(blocks=2)
    model, (x,) = made.model.eval(), made.inputs
    program = capture(model, (x,))
    exported = graphir.to_exported(program)
    assert exported.state_dict.keys() == dict(model.named_parameters()).keys() | dict(model.named_buffers()).keys()
    again = capture(exported, (x,))
    assert again.name == "exported" and not again.covers.fixed
    with Session(passes.emit(again), again.state) as session, torch.no_grad():
        for rows in (len(x), 3):
            batch = torch.randn(rows, *x.shape[1:])
            expected = model(batch)
            assert torch.equal(exported.module()(batch), expected)
            assert torch.equal(session.step(batch), expected)


def test_what_torch_exports_is_captured_with_its_modules() -> None:
    made = models.gpt(layers=1)
    exported = torch.export.export(made.model.eval(), made.inputs)
    program = capture(exported, made.inputs)
    modules = {op.module for op in program.step.ops}
    assert {"layers.0.attention.qkv", "layers.0.mlp.0"} <= modules
    with Session(passes.emit(program), program.state) as session, torch.no_grad():
        assert torch.equal(session.step(*made.inputs), made.model(*made.inputs))


class Doubled(nn.Module):
    """Sums in double precision; torch.export notes what each tensor is that it converts."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float64).cumsum(1).to(x.dtype)


def test_an_exported_program_that_converts_tensors_is_captured() -> None:
    x = torch.randn(4, 3)
    exported = torch.export.export(Doubled(), (x,))
    assert "_assert_tensor_metadata" in str(exported.graph)
    program = capture(exported, (x,))
    with Session(passes.emit(program), program.state, executor="reference") as session:
        assert torch.equal(session.step(x), Doubled()(x))


def test_training_steps_and_random_forwards_are_not_exported() -> None:
    made = models.resnet(blocks=1, dropout=0.5)
    program = capture(made.model, made.inputs, targets=made.targets, loss=made.loss)
    with pytest.raises(GraphirError, match="is a training step"):
        graphir.to_exported(program)
    with pytest.raises(GraphirError, match="draws random numbers") as error:
        graphir.to_exported(capture(made.model, made.inputs))
    assert error.value.where == "module 'blocks.0.dropout'"


def test_one_tensor_as_two_arguments_is_not_exported() -> None:
    x = torch.randn(4, 3)
    program = capture(nn.Bilinear(3, 3, 2), (x, x))
    with pytest.raises(GraphirError, match="'input1' is one tensor as two arguments"):
        graphir.to_exported(program)


def test_an_optimizer_over_an_exported_program_is_refused() -> None:
    exported = torch.export.export(nn.Linear(3, 2), (torch.randn(4, 3),))
    optimizer = torch.optim.SGD(exported.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="does not belong to the model"):
        capture(exported, (torch.randn(4, 3),), targets=(torch.randn(4, 2),), loss=F.mse_loss, optimizer=optimizer)


def test_deep_copies_are_independent() -> None:
    made = models.mlp()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
    graph = graphir.to_fx(capture(made.model, made.inputs, targets=made.targets, loss=made.loss, optimizer=optimizer))
    other: Any = copy.deepcopy(graph)
    first: Tensor = graph(*made.inputs, *made.targets)
    assert torch.equal(other(*made.inputs, *made.targets), first)
    assert not torch.equal(graph(*made.inputs, *made.targets), first)


@pytest.mark.parametrize("parts", [2, 3])
def test_a_graph_of_micro_batches_follows_the_batch(parts: int) -> None:
    made = models.mlp()
    sgd = OPTIMIZERS["sgd"]
    inputs, targets = [tuple([t[:6] for t in tensors]) for tensors in (made.inputs, made.targets)]
    program = capture(
        made.model,
        inputs,
        targets=targets,
        loss=made.loss,
        optimizer=sgd(made.model.parameters()),
        accumulate=parts,
    )
    graph = graphir.to_fx(program)
    with Session(passes.emit(program), program.state) as session:
        for times in (1, 2, 3):
            batch = [torch.cat([t] * times) for t in (*inputs, *targets)]
            assert torch.equal(graph(*batch), session.step(*batch))
    with pytest.raises(GraphirError, match=f"has size 7, of which {parts} is no divisor"):
        graph(*[torch.cat([t, t])[:7] for t in (*inputs, *targets)])


def test_arguments_have_to_agree_in_their_dimensions_and_types() -> None:
    made = models.mlp()
    graph = graphir.to_fx(capture(made.model, made.inputs, targets=made.targets, loss=made.loss))
    (x,), (y,) = made.inputs, made.targets
    with pytest.raises(GraphirError, match=f"has size 1, but batch is {len(x)} by the other arguments"):
        graph(x, y[:1])
    with pytest.raises(GraphirError, match=r"has dtype torch.float64, the program takes torch.float32"):
        graph(x.double(), y)
    with pytest.raises(GraphirError, match=r"is of type int, not a tensor"):
        graph(x, 3)


class Scaled(nn.Module):
    """Arguments whose names run into each other."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, batch: dict[str, Tensor], batch_x: Tensor, **more: Tensor) -> Tensor:
        return self.fc(batch["x"]) * batch_x + sum(more.values())


def test_arguments_of_one_name_and_one_tensor_twice() -> None:
    model, x, y, z = Scaled(), torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2)
    more = {"argument_0": z}
    assert torch.equal(
        graphir.to_fx(capture(model, ({"x": x}, y), kwargs=more))({"x": y}, z, argument_0=x), model({"x": y}, z, a=x)
    )
    twice = graphir.to_fx(capture(model, ({"x": x}, x)))
    assert torch.equal(twice({"x": y}, y), model({"x": y}, y))
    with pytest.raises(GraphirError, match=r"'batch.x' was given twice"):
        twice({"x": y}, z)
    with pytest.raises(GraphirError, match="can't have a parameter 'a b'"):
        graphir.to_fx(capture(model, ({"x": x}, y), kwargs={"a b": z}))


@pytest.mark.parametrize("name", ["step", "lr", "fc_weight_momentum_buffer", "self", "input"])
def test_a_buffer_is_not_taken_for_what_else_the_graph_holds(name: str) -> None:
    model = _counting(name)
    program = capture(model, (torch.randn(4, 2),), loss=torch.sum, optimizer=OPTIMIZERS["sgd"](model.parameters()))
    graph, theirs = graphir.to_fx(program), OPTIMIZERS["sgd"](model.parameters())
    for step in range(2):
        x = torch.randn(4, 2)
        with graphir.seeded(step):
            theirs.zero_grad()
            loss = model(x).sum()
            loss.backward()
        theirs.step()
        assert torch.equal(graph(x), loss.detach())
    mine = graph.state_dict()
    assert_same_bits({name: mine[name] for name in model.state_dict()}, dict(model.state_dict()), name)


@pytest.mark.parametrize("name", ["graph", "code", "meta", "class"])
def test_a_name_that_a_graph_module_cannot_have_is_refused(name: str) -> None:
    program = capture(_counting(name), (torch.randn(4, 2),))
    with pytest.raises(GraphirError, match=f"a torch.fx.GraphModule can't have '{name}'"):
        graphir.to_fx(program)


ENUMERATION = json.dumps({"__enum__": True, "fqn": "this:s", "name": "x"})


@pytest.mark.parametrize("place", ["arguments", "results"])
@pytest.mark.parametrize("kind", ["builtins.tuple", "builtins.dict", "collections.deque"])
def test_a_file_makes_no_graph_import_a_module(kind: str, place: str, tmp_path: Path) -> None:
    def edit(interface: dict[str, Any]) -> None:
        protocol, root = json.loads(interface[place])
        holder = root["children_spec"][0] if place == "arguments" else root
        interface[place] = json.dumps([protocol, _replaced(holder, root, kind)])

    program = _edited(tmp_path, edit)
    sys.modules.pop("this", None)
    with contextlib.suppress(GraphirError):
        graphir.to_fx(program)
    assert "this" not in sys.modules


def _replaced(holder: Any, root: Any, kind: str) -> Any:
    """The structure *root* with a container of this kind, whose context names an enumeration, in its *holder*."""
    context = f"[{ENUMERATION}]" if kind == "builtins.dict" else ENUMERATION
    hostile = {
        "type": kind,
        "context": context,
        "children_spec": [{"type": None, "context": None, "children_spec": []}],
    }
    if holder is root:
        return hostile
    holder["children_spec"] = [hostile]
    return root


@pytest.mark.parametrize("path", ['a.b", print("ran")) or (self."', "a.b\\", "a.b\nprint(1)", "a.b\r", "a.\u2028b"])
def test_a_file_puts_no_code_into_a_graph(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(interface: dict[str, Any]) -> None:
        interface["module_state"] = {path: next(iter(interface["module_state"].values()))}

    with pytest.raises(GraphirError, match="holds what torch would write into the graph's code as it stands"):
        graphir.to_fx(_edited(tmp_path, edit))
    assert "ran" not in capsys.readouterr().out


def _edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> graphir.Program:
    """A program from a file whose interface was edited."""
    made = models.mlp()
    path = folder / "p.json"
    capture(made.model, made.inputs).save(path, state=True)
    document = json.loads(path.read_text())
    edit(document["program"]["interface"])
    path.write_text(json.dumps(document))
    program = graphir.load(path)
    assert isinstance(program, graphir.Program)
    return program


def test_odd_names_of_children_stay(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a-b c": nn.Linear(2, 2), "größe²": nn.Linear(2, 2)})
    model.forward = lambda x: model["größe²"](model["a-b c"](x))  # type: ignore[method-assign]
    graph = graphir.to_fx(capture(model, (torch.ones(3, 2),)))
    assert torch.equal(graph(torch.ones(3, 2)), model(torch.ones(3, 2)))


def _counting(name: str) -> nn.Module:
    """A layer, dropout, and a buffer of this name that counts."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer(name, torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            counter = self.get_buffer(name)
            counter.add_(1)
            return F.dropout(self.fc(x) * counter, 0.3)

    return Counting()


def test_an_argument_is_laid_out_as_captured() -> None:
    model, x = (
        nn.Sequential(nn.Flatten(1), nn.Linear(12, 3)),
        torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last),
    )
    program = capture(model, (x,))
    for other in (torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)):
        assert torch.equal(graphir.to_fx(program)(other), model(other))


@pytest.mark.parametrize("keep", [pickle.dumps, lambda graph: torch.save(graph, io.BytesIO())], ids=["pickle", "save"])
def test_a_graph_is_not_pickled(keep: Callable[[Any], object]) -> None:
    made = models.mlp()
    graph = graphir.to_fx(capture(made.model, made.inputs))
    with pytest.raises(GraphirError, match=r"can't be pickled.*\n.*fix  save the program with its state"):
        keep(graph)
    for again in (copy.copy(graph), copy.deepcopy(graph)):
        assert torch.equal(again(*made.inputs), graph(*made.inputs))
