"""Arguments and results of any nesting: a captured step takes and returns what the module takes and returns."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from graphir.runtime import Session
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir
from graphir import CaptureError, SessionError, capture, passes


@dataclasses.dataclass
class Batch:
    """A dataclass that torch knows, as an argument and as a result."""

    x: Tensor
    scale: float
    mask: Tensor | None = None


torch.export.register_dataclass(Batch, serialized_type_name="test_capture_structures.Batch")

Point = namedtuple("Point", ["a", "b"])
pytree._register_namedtuple(Point, serialized_type_name="test_capture_structures.Point")


class Returns(nn.Module):
    """Whatever its body makes of its arguments."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(3, 2), body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def nested(model: Returns, batch: dict[str, Any], pair: list[Tensor], *, flag: bool, other: Any = None) -> Any:
    y = model.fc(batch["a"][0]) * batch["n"] + (pair[1] if flag else 0)
    return {"y": y, "list": [y, None, 3], "tuple": (pair[0], 2.5, "text", True), "other": other}


X, Y = torch.randn(4, 3), torch.randn(4, 2)

CASES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "nested dicts, lists and tuples": (nested, ({"a": (X,), "n": 2}, [Y, Y * 2]), {"flag": True}),
    "an argument as it came": (lambda m, x: x, (X,), {}),
    "a parameter": (lambda m, x: (m.fc.weight, m.fc(x)), (X,), {}),
    "one tensor twice": (lambda m, x, z: (m.fc(x), m.fc(z), x + z), (X, X), {}),
    "one result twice": (lambda m, x: [m.fc(x)] * 2, (X,), {}),
    "a view of a result": (lambda m, x: (lambda y: (y, y[:, 0], y.t()))(m.fc(x)), (X,), {}),
    "a dataclass": (lambda m, b: Batch(m.fc(b.x) * b.scale, b.scale), (Batch(X, 0.5),), {}),
    "a dataclass with a tensor more": (lambda m, b: Batch(m.fc(b.x) * b.mask, 1.0, b.mask), (Batch(X, 0.5, Y),), {}),
    "a namedtuple": (lambda m, p: Point(m.fc(p.a), p.b), (Point(X, Y),), {}),
    "an ordered dict": (lambda m, d: OrderedDict(z=m.fc(d["x"]), a=d["x"]), (OrderedDict(x=X, b=1),), {}),
    "nothing": (lambda m, x: (m.fc(x), None, (), {}), (X,), {}),
    "keywords only": (lambda m, *, x, scale=2.0: m.fc(x) * scale, (), {"x": X, "scale": 3.0}),
    "a scalar tensor": (lambda m, x, t: m.fc(x) * t, (X, torch.tensor(2.0)), {}),
    "no tensor": (lambda m, x: (m.fc(x), 7), (X,), {}),
}


def same(ours: Any, theirs: Any) -> None:
    """Equal structures, equal leaves, equal bits."""
    assert pytree.tree_structure(ours) == pytree.tree_structure(theirs)
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert type(a) is type(b) or (isinstance(a, Tensor) and isinstance(b, Tensor))
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_a_forward_returns_what_the_module_returns(case: str, executor: str, tmp_path: Any) -> None:
    body, args, kwargs = CASES[case]
    model = Returns(body)
    program = capture(model, args, kwargs=kwargs)
    assert graphir.parse(str(program)) == program
    program.save(tmp_path / "p.json")
    assert graphir.load(tmp_path / "p.json") == program
    with torch.no_grad():
        expected = model(*args, **kwargs)
    with Session(passes.emit(program), program.state, executor=executor) as session:
        same(session.step(*args, **kwargs), expected)


@pytest.mark.parametrize("case", CASES)
def test_replicas_gather_what_follows_the_batch(case: str) -> None:
    body, args, kwargs = CASES[case]
    model = Returns(body)
    program = passes.replicate(capture(model, args, kwargs=kwargs), devices=[0, 1])
    with torch.no_grad():
        expected = model(*args, **kwargs)
    with Session(passes.emit(program), program.state) as session:
        found = session.step(*args, **kwargs)
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b


def test_a_size_among_the_results_fixes_the_sizes() -> None:
    program = capture(Returns(lambda m, x: (m.fc(x), x.shape[0])), (X,))
    assert program.covers.fixed == "the model returns 4 at batch 4, but 11 at batch 11"
    with Session(passes.emit(program), program.state) as session:
        assert session.step(X)[1] == 4
        with pytest.raises(SessionError, match="sizes are fixed"):
            session.step(torch.randn(5, 3))


def test_classes_that_no_file_can_name_are_refused() -> None:
    class Odd:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    pytree.register_pytree_node(Odd, lambda odd: ([odd.x], None), lambda leaves, _: Odd(leaves[0]))
    for body, args, whose in (
        (lambda m, x: Odd(x), (X,), "what the model returns"),
        (lambda m, odd: odd.x * 2, (Odd(X),), "the arguments"),
    ):
        with pytest.raises(CaptureError, match=f"the structure of {whose} can't be serialized") as error:
            capture(Returns(body), args)
        assert "serialized_type_name" in error.value.fix


def test_a_dataclass_that_torch_does_not_know_is_refused() -> None:
    @dataclasses.dataclass
    class Unknown:
        x: Tensor

    with pytest.raises(CaptureError, match="returns a Unknown among its outputs") as error:
        capture(Returns(lambda m, x: Unknown(x)), (X,))
    assert "register_dataclass" in error.value.fix and "use_cache=False" in error.value.fix
    assert "output=lambda out: out.logits" in error.value.fix


def test_a_step_returns_what_is_made_of_what_the_model_returns() -> None:
    class Unknown:
        def __init__(self, *parts: Tensor) -> None:
            self.parts = parts

    model = Returns(lambda m, x: Unknown(m.fc(x), x * 2))
    program = capture(model, (X,), output=lambda unknown: {"y": unknown.parts[0].tanh()})
    with Session(passes.emit(program), program.state) as session:
        for x in (X, torch.randn(7, 3)):
            found = session.step(x)
            assert list(found) == ["y"] and torch.equal(found["y"], model.fc(x).tanh())


def test_what_makes_no_output_is_refused() -> None:
    with pytest.raises(CaptureError, match="output is a str, not a function") as error:
        capture(nn.Linear(3, 2), (X,), output="logits")  # type: ignore[arg-type]
    assert "output=lambda out: out.logits" in error.value.fix
    with pytest.raises(
        CaptureError, match="output and loss are both given, but a step with a loss returns the loss"
    ) as error:
        capture(nn.Linear(3, 2), (X,), targets=(Y,), loss=nn.functional.mse_loss, output=lambda out: out)
    assert error.value.fix == "leave output out, and let the loss choose from the results of the model"
