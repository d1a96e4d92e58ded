"""Which calls plans stand for: by the types of their arguments, and as long as captures pay."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from eager_only import EagerOnly
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir

Pair = namedtuple("Pair", "a b")
pytree._register_namedtuple(Pair, serialized_type_name="pair")


class Registered:
    """A type that pytree knows and torch's scatter does not: each replica is given the object itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, i: int) -> Tensor:
        return self.x


pytree.register_pytree_node(
    Registered, lambda made: ([made.x], None), lambda parts, _: Registered(*parts), serialized_type_name="registered"
)


class Outputs(OrderedDict[str, Tensor | None]):
    """Keeps no entry that is None, as transformers' outputs."""

    def __init__(self, **entries: Tensor | None) -> None:
        super().__init__({name: value for name, value in entries.items() if value is not None})


pytree.register_pytree_node(
    Outputs,
    lambda made: (list(made.values()), list(made)),
    lambda parts, names: Outputs(**dict(zip(names, parts, strict=True))),
    serialized_type_name="outputs",
)


@pytest.fixture(autouse=True)
def _told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", graphir.errors.EagerWarning)
        yield


class Rows(nn.Module):
    """Says how many rows of its second argument a replica has."""

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return x.new_full((len(x),), len(other[0]))


def test_a_container_that_scatter_hands_on_is_handed_on() -> None:
    x = torch.ones(6, 4)
    for other, name in ((Registered(x), "Registered"), (deque([x]), "deque"), (torch.max(x, 1), "max")):
        replicas = graphir.DataParallel(Rows(), [0, 1], binding="cpu")
        with pytest.warns(graphir.errors.EagerWarning, match=f"an argument has a {name} in it"):
            made = replicas(x, other)
        assert torch.equal(made, EagerOnly(Rows(), [0, 1], binding="cpu")(x, other))


def test_sizes_of_a_tensor_are_left_to_eager_replicas() -> None:
    class Sized(nn.Module):
        def forward(self, x: Tensor, sizes: torch.Size) -> Tensor:
            return x.view(-1, sizes[1])

    replicas = graphir.DataParallel(Sized(), [0, 1], binding="cpu")
    with pytest.warns(graphir.errors.EagerWarning, match="an argument has a Size in it"):
        assert replicas(torch.ones(6, 4), torch.Size([6, 2])).shape == (12, 2)


@pytest.mark.parametrize("other", [[torch.ones(6)], (torch.ones(6),), {0: torch.ones(6)}, Pair(torch.ones(6), 1)])
def test_a_container_that_scatter_maps_is_mapped(other: Any) -> None:
    made = graphir.DataParallel(Rows(), [0, 1], binding="cpu")(torch.ones(6, 4), other)
    assert torch.equal(made, torch.full((6,), 3.0))


def test_each_argument_is_a_tensor_of_its_own_where_one_is_given_twice() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            doubled = x * 2
            x.mul_(2)
            return y + (1 if x is y else 0) * doubled

    x = torch.ones(6, 4)
    assert torch.equal(graphir.DataParallel(Doubling(), [0, 1], binding="cpu")(x, x), torch.ones(6, 4))
    assert torch.equal(x, torch.ones(6, 4))


def test_outputs_that_keep_no_none() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Outputs:
            return Outputs(logits=self.fc(x), cache=None, hidden=x * 2)

    model, x = Model(), torch.randn(6, 4)
    made = graphir.DataParallel(model, [0, 1], binding="cpu")(x)
    assert isinstance(made, Outputs) and list(made) == ["logits", "hidden"]
    assert made["logits"].grad_fn.name() == "DifferentiatedBackward"
    made["logits"].backward(torch.ones(6, 3))
    assert torch.equal(made["hidden"], x * 2) and model.fc.weight.grad is not None


def test_an_input_made_in_inference_mode_is_saved_for_the_backward() -> None:
    with torch.inference_mode():
        x = torch.randn(6, 4)
    model = nn.Linear(4, 3)
    graphir.DataParallel(model, [0, 1], binding="cpu")(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, x.clone().sum(0).expand(3, 4))


def test_plans_are_kept_while_an_optimizer_writes_parameters_that_a_list_holds() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.weights = [self.fc.weight]  # as an LSTM has them

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Listed()
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        x = torch.randn(6, 4)
        output = replicas(x)
        torch.testing.assert_close(output, model(x))
        assert output.grad_fn.name() == "DifferentiatedBackward"
        output.sum().backward()
        optimizer.step()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        return self.fc(x) * scale


WHY = "calls are of other kinds again and again, by shapes, numbers among the arguments, or modes"


def planned(output: Tensor) -> bool:
    assert output.grad_fn is not None
    return output.grad_fn.name() == "DifferentiatedBackward"


def test_calls_that_are_all_of_other_kinds_run_eagerly_after_a_few() -> None:
    replicas, x = graphir.DataParallel(Scaled(), [0, 1], binding="cpu"), torch.randn(6, 4)
    with pytest.warns(graphir.errors.EagerWarning, match=WHY) as told:
        ran = [planned(replicas(x, i)) for i in range(12)]
    assert ran == [True] * 8 + [False] * 4 and len(told) == 1
    assert planned(replicas(x, 7))  # one that has plans


def test_calls_of_one_kind_pay_for_another() -> None:
    replicas, x = graphir.DataParallel(Scaled(), [0, 1], binding="cpu"), torch.randn(6, 4)
    for i in range(8):
        replicas(x, i)
    for _ in range(56):
        replicas(x, 7)
    assert planned(replicas(x, 8))
    with pytest.warns(graphir.errors.EagerWarning, match=WHY):
        assert not planned(replicas(x, 9))


def test_a_function_call_runs_eager_replicas() -> None:
    """There is nothing that would keep its plans."""
    x = torch.randn(6, 4)
    output = graphir.data_parallel(Scaled(), x, [0, 1], binding="cpu")
    assert not planned(output)


def test_a_module_of_another_class_is_captured_anew() -> None:
    class Twice(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4)
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    first = replicas(x)
    model[0].__class__ = Twice
    torch.testing.assert_close(replicas(x), first * 2)


def test_a_call_that_fails_overwrites_buffers_once() -> None:
    class Found(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.table = nn.BatchNorm1d(4), nn.Embedding(5, 4)

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return self.norm(x) + self.table(i)

    model, x, i = Found(), torch.randn(6, 4), torch.zeros(6, dtype=torch.int64)
    replicas = graphir.DataParallel(model, [0, 1], binding="cpu")
    replicas(x, i)
    i[5] = 7
    with pytest.raises(IndexError, match="in replica 1"):
        replicas(x, i)
    assert model.norm.num_batches_tracked == 2
