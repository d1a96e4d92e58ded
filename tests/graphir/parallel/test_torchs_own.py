"""What PyTorch's own tests of ``torch.nn.DataParallel`` ask for (test/distributed/test_data_parallel.py), on the host.

Left out are those that need two real devices: a module on the wrong one, and tensors that are moved between them.
"""

from __future__ import annotations

import copy
import gc
import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphir
from graphir import parallel

HOST = torch.device("cpu")
PLACES = [HOST, HOST]
wrapped = partial(graphir.DataParallel, binding="cpu")
called = partial(graphir.data_parallel, binding="cpu")
close = partial(torch.allclose, rtol=1e-5, atol=1e-6)


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def by_shares(module: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([module(share) for share in x.chunk(2)])


def gradients(output: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output.sum(), inputs))


def test_buffers_that_require_gradients() -> None:
    class Affine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(5, dtype=torch.float64, requires_grad=True))
            self.register_buffer("shift", torch.randn(5, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift

    module: Any = Affine()
    model, x = wrapped(module, [0, 1]), torch.randn(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda scale: model(x), (module.scale,))


@pytest.mark.filterwarnings("ignore::graphir.EagerWarning")
def test_recurrent_modules_train_after_a_call_without_gradients() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(3, 4, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor) -> Any:
            self.rnn.flatten_parameters()
            return self.rnn(x)

    module = Recurrent()
    other = copy.deepcopy(module)
    model = wrapped(other, [0, 1])
    with torch.no_grad():
        model(torch.rand(2, 4, 3))
    for net in (module, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=10)
        output, _ = net(torch.ones(4, 4, 3))
        output.square().mean().backward()
        optimizer.step()
    assert all(map(close, module.parameters(), other.parameters()))


@pytest.mark.parametrize("autocast", [False, True])
def test_modules_are_called_with_tuples_or_with_their_only_argument(autocast: bool) -> None:
    modules = [nn.Linear(4, 3), nn.Linear(4, 3)]
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = [module(given) for module, given in zip(modules, (x, y), strict=True)]
        for inputs in ([(x,), (y,)], [x, y]):
            outputs = parallel.parallel_apply(modules, inputs, None)
            assert all(map(torch.equal, outputs, expected))
    assert (expected[0].dtype is torch.bfloat16) == autocast


def test_exceptions_are_passed_on() -> None:
    failing = Of(lambda *args: {}["wonderful"])
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 0 on device (.|\n)*Original Trace(.|\n)*wonderful"):
        parallel.parallel_apply([failing, failing], [None, None])


@pytest.mark.parametrize("ids", [[0, 1], [1, 0], [0]])
@pytest.mark.parametrize("third", [False, True])
def test_several_inputs_numbers_and_keywords(ids: list[int], third: bool) -> None:
    def forward(a: Tensor, b: Tensor, by: float, c: Tensor | None = None) -> Tensor:
        return by * (a * b if c is None else a * b + c)

    a, b, c = (torch.randn(5, 5, requires_grad=k < 2) for k in range(3))
    keywords = {"c": c} if third else {}
    expected = forward(a, b, 0.7, **keywords)
    wanted = gradients(expected, (a, b))
    outputs = [wrapped(Of(forward), ids)(a, b, 0.7, **keywords)]
    outputs.append(called(Of(forward), (a, b, 0.7), ids, module_kwargs=keywords))
    for output in outputs:
        assert torch.equal(output, expected)
        assert all(map(torch.equal, gradients(output, (a, b)), wanted))


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.Embedding(9, 3, sparse=True)], ids=["dense", "sparse"])
@pytest.mark.parametrize("ids", [(0, 1), (1, 0)])
def test_the_function_has_the_modules_output_and_gradients(module: Any, ids: tuple[int, ...]) -> None:
    x = torch.randint(9, (20, 5)) if isinstance(module, nn.Embedding) else torch.randn(20, 4)
    found = []
    for run in (module, lambda x: called(module, x, ids)):
        module.zero_grad()
        output = run(x)
        output.sum().backward()
        found.append([output, *(p.grad.to_dense() for p in module.parameters())])
    assert all(map(close, *found))


def test_no_cycle_holds_tensors_or_modules(collected: list[Any]) -> None:
    x = torch.randn(2, 1)
    for model in (wrapped(nn.Linear(1, 1), [0, 1]), partial(called, nn.Linear(1, 1), device_ids=[0, 1])):
        model(x)  # which captures
        gc.collect()
        collected.clear()
        model(x)
        gc.collect()
        assert not [found for found in collected if isinstance(found, (Tensor, nn.Module))]


@pytest.fixture
def collected() -> Iterator[list[Any]]:
    """What the collector finds in cycles."""
    gc.collect()
    gc.freeze()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()


def test_replicas_see_whether_gradients_are_computed() -> None:
    def forward(x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return x

    x = torch.randn(4, 3)
    with torch.no_grad():
        called(Of(forward), x, [0, 1])
    with pytest.raises(AssertionError):
        called(Of(forward), x, [0, 1])


def test_nested_outputs_keep_their_types() -> None:
    def forward(x: Tensor) -> Any:
        return [x, (x.sin(), x.cos(), [x + 1]), x, OrderedDict(a=x, b=[x.sin()])]

    x = torch.randn(2, 2)
    for output in (called(Of(forward), x, [0, 1]), wrapped(Of(forward), [0, 1])(x)):
        whole, (sin, cos, [more]), again, mapping = output
        assert type(output) is list and type(output[1]) is tuple and type(mapping) is OrderedDict
        found, expected = [whole, sin, cos, more, again, mapping["a"], *mapping["b"]], forward(x)
        assert all(map(torch.equal, found, [x, x.sin(), x.cos(), x + 1, x, x, x.sin()])) and len(expected) == 4


def test_nested_inputs() -> None:
    x = torch.randn(20, 3)
    given = (x.cos(), (x.sin(), x), x.sin())
    assert torch.equal(called(Of(lambda *args: args[1][0]), given, [0, 1]), x.sin())


class Reading(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input: dict[str, Any]) -> Any:
        return self.layer(input["data"])


@pytest.mark.parametrize("unused", [[], {}, ()], ids=repr)
def test_empty_structures_beside_tensors(unused: Any) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(20, 4)
    assert torch.equal(wrapped(Reading(layer), [0, 1])(input={"data": x, "unused": unused}), by_shares(layer, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_keywords_alone(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(4, 3).to(dtype), torch.randn(20, 4).to(dtype)
    assert torch.equal(wrapped(layer, [0, 1])(input=x), by_shares(layer, x))
    assert torch.equal(wrapped(layer, [0, 1])(x), by_shares(layer, x))


@pytest.mark.parametrize("ids", [(0, 1), (torch.device("cuda:0"), torch.device("cuda:1"))], ids=["numbers", "devices"])
def test_devices_may_be_objects(ids: tuple[Any, ...]) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(20, 4, requires_grad=True)
    assert torch.equal(called(layer, x, ids, output_device=torch.device("cuda:0")), by_shares(layer, x))


def test_gradients_of_gradients_of_inputs() -> None:
    net = nn.Linear(4, 1)
    model, x = wrapped(net, [0, 1]), torch.ones(2, 4, requires_grad=True)
    output = model(x)
    (penalty,) = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
    penalty.mean().backward()
    assert net.weight.grad is not None and torch.equal(net.weight.grad, torch.full((1, 4), 0.25))
    assert net.bias.grad is not None and torch.equal(net.bias.grad, torch.zeros(1))


def test_scattered_tensors_have_gradients() -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    first, second = parallel.scatter(x, PLACES)
    assert torch.equal(first, x[:2]) and torch.equal(second, x[2:])
    first.backward(torch.full_like(first, 2.0))
    assert x.grad is not None and torch.equal(x.grad[:2], torch.full_like(first, 2.0)) and not x.grad[2:].any()
    assert torch.autograd.gradcheck(lambda x: tuple(parallel.scatter(x, PLACES)), (x,))
    assert torch.autograd.gradgradcheck(lambda x: tuple(parallel.scatter(x, PLACES)), (x,))


@pytest.mark.filterwarnings("ignore:Was asked to gather:UserWarning")
@pytest.mark.parametrize("shape", [(2, 4), ()], ids=["rows", "scalars"])
def test_gathered_tensors_have_gradients(shape: tuple[int, ...]) -> None:
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    result = parallel.gather(parts, HOST)
    grad = torch.randn_like(result)
    result.backward(grad)
    assert torch.equal(result, torch.cat([part.view(-1, *shape[1:]) for part in parts]))
    found = [part.grad for part in parts]
    assert all(map(torch.equal, found, [g.view(shape) for g in grad.chunk(2)]))  # type: ignore[arg-type]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *given: parallel.gather(given, HOST), tuple(parts))


def test_dicts_of_other_lengths_are_refused() -> None:
    x = torch.randn(1, 2)
    with pytest.raises(ValueError, match="all dicts must have the same keys"):
        parallel.gather([{"a": x}, {"b": x, "a": x}], HOST)


def test_replicas_compute_what_the_module_does() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    x = torch.randn(2, 4)
    replicas: Any = parallel.replicate(module, PLACES)
    assert len(replicas) == 2 and all(torch.equal(replica(x), module(x)) for replica in replicas)
    for name, buffer in module[1].named_buffers():
        assert all(torch.equal(getattr(replica[1], name), buffer) for replica in replicas)


def test_zero_grad_within_a_forward_warns() -> None:
    class Zeroing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with pytest.warns(
                UserWarning, match=r"Calling \.zero_grad\(\) from a module created with nn\.DataParallel"
            ):
                self.zero_grad()
            return x

    called(Zeroing(), torch.rand(4, 3), [0, 1])


def test_autocast_within_a_forward() -> None:
    class Half(nn.Linear):
        @torch.autocast("cpu", torch.bfloat16)  # type: ignore[untyped-decorator]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    assert wrapped(Half(8, 8), [0, 1])(torch.randn(8, 8)).dtype is torch.bfloat16


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(detach: bool) -> None:
    torch.save(parallel.replicate(nn.Linear(8, 8), PLACES, detach), io.BytesIO())


@pytest.mark.parametrize("last", [0, 2, 4])
def test_gradients_keep_the_layout_of_their_parameters(last: int) -> None:
    formats = [torch.channels_last] * last + [torch.contiguous_format] * (4 - last)
    sizes = [(2, 4), (4, 6), (6, 4), (4, 2)]
    convolutions = [
        nn.Conv2d(*size, 2).to(memory_format=layout)  # type: ignore[call-overload]
        for size, layout in zip(sizes, formats, strict=True)
    ]
    module = nn.Sequential(*convolutions)
    other = copy.deepcopy(module)
    x, target = torch.randn(4, 2, 8, 8), torch.randn(4, 2, 4, 4)
    nets = [module, wrapped(other, [0, 1])]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for _ in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            F.mse_loss(net(x), target).backward()
        for mine, theirs, layout in zip(module, other, formats, strict=True):
            assert mine.weight.grad is not None and theirs.weight.grad is not None
            assert mine.weight.grad.is_contiguous(memory_format=layout)
            assert theirs.weight.grad.is_contiguous(memory_format=layout)
            assert torch.allclose(mine.weight.grad, theirs.weight.grad, rtol=1e-5, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
