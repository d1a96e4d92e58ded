"""CompiledReplicas: outputs, gradients and buffers are those of the shares in eager PyTorch, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import models
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import graphir
from graphir.parallel import CompiledReplicas, SynchronizedBatchNorm1d

pytestmark = [
    pytest.mark.usefixtures("one_thread", "few_objects"),
    pytest.mark.filterwarnings("error::graphir.errors.EagerWarning"),  # where no test asks for eager replicas
]


class Expected(NamedTuple):
    """What the shares of a batch give in eager PyTorch."""

    outputs: list[Tensor]
    params: list[Tensor | None]
    inputs: list[Tensor | None]
    buffers: list[Tensor]


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def drawn(seed: int) -> int:
    """The number that a call draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    return int(torch.randint(2**62, ()))


def in_turn(
    model: nn.Module, inputs: tuple[Tensor, ...], grads: list[Tensor | None], replicas: int = 2, step: int = 0
) -> Expected:
    """Run a copy of the model on each share, and sum the gradients in their order."""
    model = copy.deepcopy(model)
    before = [buffer.clone() for buffer in model.buffers()]
    shares = list(zip(*(x.detach().chunk(replicas) for x in inputs), strict=True))
    cut = [grad.chunk(replicas) if grad is not None else [None] * replicas for grad in grads]
    outputs, of_params, of_inputs, buffers = [], [], [], []
    for replica, share in enumerate(shares):
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.data.copy_(value)
        given = [x.clone().requires_grad_(whole.requires_grad) for x, whole in zip(share, inputs, strict=True)]
        with graphir.seeded(step, replica):
            made = tensors(model(*given))
        outputs.append([out.detach() for out in made])
        wanted = [*model.parameters(), *(x for x in given if x.requires_grad)]
        pairs = [(out, part[replica]) for out, part in zip(made, cut, strict=True) if part[replica] is not None]
        asked = iter(
            torch.autograd.grad(
                [out for out, _ in pairs],
                [w for w in wanted if w.requires_grad],
                [grad.reshape(out.shape) for out, grad in pairs],
                allow_unused=True,
            )
        )
        gradients = [next(asked) if w.requires_grad else None for w in wanted]
        count = len(list(model.parameters()))
        of_params.append(gradients[:count])
        of_inputs.append(gradients[count:])
        if not replica:
            buffers = [buffer.clone() for buffer in model.buffers()]
    return Expected(
        [torch.cat(parts) if parts[0].dim() else torch.stack(parts) for parts in zip(*outputs, strict=True)],
        [None if parts[0] is None else sum(parts[1:], parts[0]) for parts in zip(*of_params, strict=True)],
        [None if parts[0] is None else torch.cat(parts) for parts in zip(*of_inputs, strict=True)],
        buffers,
    )


def check(model: nn.Module, *inputs: Tensor, replicas: int = 2, seed: int = 7, times: int = 2) -> CompiledReplicas:
    """Compare some calls, one after the other, on one module."""
    compiled = CompiledReplicas(model, range(replicas), binding="cpu")
    for turn in range(times):
        step = drawn(seed + turn)
        with torch.no_grad():
            like = tensors(copy.deepcopy(model)(*(x.detach() for x in inputs)))
        generator = torch.Generator().manual_seed(turn)
        grads: list[Tensor | None] = [torch.randn(out.shape or (replicas,), generator=generator) for out in like]
        wanted = in_turn(model, inputs, grads, replicas, step)
        for tensor in (*model.parameters(), *inputs):
            tensor.grad = None
        torch.manual_seed(seed + turn)
        made = tensors(compiled(inputs))
        torch.autograd.backward(made, grads)
        same(made, wanted.outputs)
        same([p.grad for p in model.parameters()], wanted.params)
        same([x.grad for x in inputs if x.requires_grad], wanted.inputs)
        same(list(model.buffers()), wanted.buffers)
    return compiled


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def net(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers)


def batch(rows: int = 6, features: int = 4, requires_grad: bool = False) -> Tensor:
    return torch.randn(rows, features, generator=torch.Generator().manual_seed(5)).requires_grad_(requires_grad)


# Bits.


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_net_with_batch_norm_dropout_and_a_gradient_of_its_input(replicas: int) -> None:
    check(net(0.5), batch(8, requires_grad=True), replicas=replicas)


def test_a_gpt_whose_head_shares_the_embedding() -> None:
    model, (tokens,), *_ = models.gpt(4, dropout=0.1)
    check(model, tokens)


def test_a_residual_net_of_convolutions() -> None:
    model, (images,), *_ = models.resnet(4)
    check(model, images)


class Two(nn.Module):
    """Two outputs that share a layer, of which one needs no gradient; and one input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.shared(x).tanh()
        return {"left": self.left(hidden), "pair": (self.right(hidden), hidden.detach()), "none": None}


def outputs_of(made: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    return made["left"], *made["pair"]


def test_nested_outputs_some_of_which_need_no_gradient() -> None:
    model, x = Two(), batch()
    made = CompiledReplicas(model, [0, 1])((x,))
    assert list(made) == ["left", "pair", "none"]
    assert made["none"] is None
    left, right, hidden = outputs_of(made)
    assert (left.requires_grad, right.requires_grad, hidden.requires_grad) == (True, True, False)
    grads = [torch.randn_like(left), torch.randn_like(right)]
    wanted = in_turn_of(model, x, [*grads, None])
    torch.autograd.backward([left, right], grads)
    same([left, right, hidden], wanted.outputs)
    same([p.grad for p in model.parameters()], wanted.params)


def in_turn_of(model: nn.Module, x: Tensor, grads: list[Tensor | None]) -> Expected:
    return in_turn(model, (x,), grads)


def test_an_output_without_gradient_gives_its_parameters_zeros() -> None:
    """As ``torch.nn.DataParallel`` does, whose broadcast makes zeros of what no replica has used."""
    model, x = Two(), batch()
    compiled = CompiledReplicas(model, [0, 1])
    for _ in range(3):  # by eager replicas at first, then by plans for this output alone
        for param in model.parameters():
            param.grad = None
        left, *_ = outputs_of(compiled((x,)))
        grad = torch.randn_like(left)
        wanted = in_turn_of(model, x, [grad, None, None])
        left.backward(grad)
        zeros = [torch.zeros_like(p) for p in model.parameters()]
        same(
            [p.grad for p in model.parameters()],
            [w if w is not None else z for w, z in zip(wanted.params, zeros, strict=True)],
        )
        assert model.right.weight.grad is not None and not model.right.weight.grad.any()


def test_outputs_without_dimensions_become_a_vector() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).square().mean()

    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were scalars"):
        check(Mean(), batch(5), times=1)


def test_keyword_arguments_and_what_is_no_tensor() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
            made = self.fc(x) * scale
            return made if mask is None else made * mask

    model, x, mask = Scaled(), batch(), batch(6, 3).relu()
    compiled = CompiledReplicas(model, [0, 1])
    for scale, given in ((2.0, None), (3.0, mask), (2.0, None)):
        wanted = torch.cat(
            [
                model(part, scale=scale, mask=None if given is None else m)
                for part, m in zip(x.chunk(2), mask.chunk(2), strict=True)
            ]
        )
        assert torch.equal(compiled((x,), {"scale": scale, "mask": given}), wanted)


def test_a_tensor_that_is_given_twice() -> None:
    class Product(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a * b.tanh()

    x = batch(requires_grad=True)
    made = CompiledReplicas(Product(), [0, 1])((x, x))
    made.backward(grad := torch.randn_like(made))
    (wanted,) = torch.autograd.grad(x * x.tanh(), x, grad)
    assert torch.equal(x.grad, wanted)


def test_another_dimension_than_the_first() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x.transpose(0, 1)).transpose(0, 1)

    model, x = Last(), batch(4, 6).requires_grad_()
    made = CompiledReplicas(model, [0, 1], dim=1)((x,))
    parts = [part.contiguous() for part in x.detach().chunk(2, 1)]
    assert torch.equal(made, torch.cat([model(part) for part in parts], 1))
    made.sum().backward()
    assert x.grad.shape == x.shape


def test_batches_of_other_sizes_take_the_same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    compiled = CompiledReplicas(model, [0, 1])
    for rows in (6, 9, 4, 20):
        x = batch(rows)
        wanted = in_turn(model, (x,), [torch.ones(rows, 3)])
        same([compiled((x,))], wanted.outputs)
        monkeypatch.setattr("graphir.parallel.plans.capture", None)  # which no later call asks for


def test_a_size_that_the_plans_do_not_cover_is_left_to_eager_replicas() -> None:
    """A share of one row has no variance: eager PyTorch refuses it."""
    compiled = CompiledReplicas(net(), [0, 1])
    compiled((batch(6),))
    with pytest.warns(graphir.errors.EagerWarning, match="batch is 1 in a replica's share, the program takes batch>=2"):
        assert compiled((batch(3),)) is None


def test_a_module_of_fixed_sizes_has_plans_for_each() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.pdist(x).sum() * x

    compiled = CompiledReplicas(Pairs(), [0, 1])
    for rows in (4, 6, 8, 4):
        x = batch(rows)
        assert torch.equal(compiled((x,)), torch.cat([torch.pdist(part).sum() * part for part in x.chunk(2)]))


# Autograd.


def test_training_with_an_optimizer_of_the_users_equals_eager_shares() -> None:
    ours, theirs, x = net(), net(), batch(8)
    target = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    steps = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, theirs)]
    compiled = CompiledReplicas(ours, [0, 1])
    for _ in range(4):
        F.cross_entropy(compiled((x,)), target).backward()
        with torch.no_grad():
            before = [b.clone() for b in theirs.buffers()]
        first = theirs(x[:4])
        kept = [b.clone() for b in theirs.buffers()]
        for buffer, value in zip(theirs.buffers(), before, strict=True):
            buffer.data.copy_(value)
        second = theirs(x[4:])
        for buffer, value in zip(theirs.buffers(), kept, strict=True):
            buffer.data.copy_(value)
        whole = torch.cat([first, second]).detach().requires_grad_()
        F.cross_entropy(whole, target).backward()
        torch.autograd.backward([first], [whole.grad[:4]])
        torch.autograd.backward([second], [whole.grad[4:]])
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad()
    same(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_two_forwards_before_one_backward_keep_saved_values_apart() -> None:
    model, x, other = net(), batch(), batch().flip(0) * 2
    compiled = CompiledReplicas(model, [0, 1])
    grad = torch.randn(6, 3)
    alone = in_turn(model, (x,), [grad]).params
    first = compiled((x,))
    second = compiled((other,))
    first.backward(grad)
    same([p.grad for p in model.parameters()], alone)
    assert second.requires_grad


def test_one_forward_is_used_twice() -> None:
    model = net()
    made = CompiledReplicas(model, [0, 1])((batch(),))
    grad = torch.randn(6, 3)
    made.backward(grad, retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    made.backward(grad)
    same([p.grad for p in model.parameters()], [g + g for g in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        made.backward(grad)


def test_parameters_that_were_updated_before_the_backward_are_refused_as_torch_does() -> None:
    model = net()
    made = CompiledReplicas(model, [0, 1])((batch(),))
    with torch.no_grad():
        model[4].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()


def test_gradients_of_gradients_are_those_of_eager_shares() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1))
    x = batch(requires_grad=True)
    compiled = CompiledReplicas(model, [0, 1])
    step = drawn(3)

    def penalty(made: Tensor) -> list[Tensor]:
        (slope,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), [*model.parameters()], allow_unused=True))

    torch.manual_seed(3)
    ours = penalty(compiled((x,)))
    parts = []
    for replica, part in enumerate(x.chunk(2)):
        with graphir.seeded(step, replica):
            parts.append(model(part))
    theirs = penalty(torch.cat(parts))
    assert any(bool(g.any()) for g in ours)
    same(ours, [torch.zeros_like(mine) if other is None else other for mine, other in zip(ours, theirs, strict=True)])


class Counted(nn.Module):
    """A forward that overwrites a buffer and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.fc(x) ** 2 * self.calls.clone(), self.fc(x)


@pytest.mark.parametrize("create_graph", [True, False])
def test_replicas_that_run_once_more_begin_with_the_buffers_of_the_call(create_graph: bool) -> None:
    """Without a graph, since a gradient comes for one output of two."""
    model, x = Counted(), batch(requires_grad=True)
    plain, compiled = copy.deepcopy(model), CompiledReplicas(model, [0, 1])
    for _ in range(3):
        (slope,) = torch.autograd.grad(compiled((x,))[0].sum(), x, create_graph=create_graph)
        (wanted,) = torch.autograd.grad(plain(x)[0].sum(), x, create_graph=create_graph)
        torch.testing.assert_close(slope, wanted)
        same(list(model.buffers()), list(plain.buffers()))


def test_replicas_that_run_once_more_have_the_modes_of_the_call() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Tanh()), batch(requires_grad=True)
    torch.manual_seed(2)
    made = CompiledReplicas(model, [0, 1])((x,))
    model.eval()
    (slope,) = torch.autograd.grad(made.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    torch.testing.assert_close(again, slope)


def test_replicas_that_run_once_more_meet() -> None:
    model, x = SynchronizedBatchNorm1d(4), batch(requires_grad=True)
    made = CompiledReplicas(model, [0, 1])((x,))
    (slope,) = torch.autograd.grad(made.pow(3).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(nn.BatchNorm1d(4)(x).pow(3).sum(), x)
    torch.testing.assert_close(slope, wanted, rtol=1e-4, atol=1e-4)


def test_a_parameter_that_was_overwritten_is_told_where_replicas_run_once_more() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh()), batch(requires_grad=True)
    made = CompiledReplicas(model, [0, 1])((x,))
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation: a parameter"):
        torch.autograd.grad(made.sum(), x, create_graph=True)


def test_a_recomputed_forward_leaves_buffers_as_they_were() -> None:
    model, x = net(), batch(requires_grad=True)
    made = CompiledReplicas(model, [0, 1])((x,))
    kept = [b.clone() for b in model.buffers()]
    torch.autograd.grad(made.sum(), x, create_graph=True)
    same(list(model.buffers()), kept)


def test_batches_of_gradients_are_differentiated_eagerly() -> None:
    model, x = net(), batch(requires_grad=True)
    made = CompiledReplicas(model, [0, 1])((x,))
    grads = torch.eye(3).repeat(1, 1)[:, None, :].expand(3, 6, 3)
    (ours,) = torch.autograd.grad(made, x, grads, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        (one,) = torch.autograd.grad(made, x, grads[i].contiguous(), retain_graph=True)
        torch.testing.assert_close(ours[i], one)


def test_gradients_are_handed_over_without_a_copy() -> None:
    """autograd takes a gradient that nobody else holds as ``param.grad``."""
    model = net()
    CompiledReplicas(model, [0, 1])((batch(),)).sum().backward()
    assert all(p.grad._base is None and not p.grad.is_inference() for p in model.parameters())
    for param in model.parameters():
        param.grad.zero_()


def test_no_copy_of_a_parameter_is_kept() -> None:
    model = nn.Linear(17, 23)
    made = CompiledReplicas(model, [0, 1])((torch.randn(6, 17),))
    gc.collect()
    alive = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"]
    assert made.requires_grad
    found = {t.untyped_storage().data_ptr() for t in alive if set(t.shape) == {17, 23}}
    assert found == {model.weight.data_ptr()}, found


def test_frozen_parameters_have_no_gradient() -> None:
    model = net()
    compiled = CompiledReplicas(model, [0, 1])
    for frozen in (True, False, True):
        model[0].requires_grad_(not frozen)
        for param in model.parameters():
            param.grad = None
        compiled((batch(),)).sum().backward()
        assert (model[0].weight.grad is None) == frozen
        assert model[4].weight.grad is not None


# Modes.


def test_evaluation_without_gradients_leaves_buffers_alone() -> None:
    model, x = net(0.5), batch()
    compiled = CompiledReplicas(model, [0, 1])
    compiled((x,))
    model.eval()
    kept = [b.clone() for b in model.buffers()]
    with torch.no_grad():
        made = compiled((x,))
        wanted = torch.cat([model(part) for part in x.chunk(2)])
    assert torch.equal(made, wanted)
    assert not made.requires_grad
    same(list(model.buffers()), kept)
    with torch.inference_mode():
        inferred = compiled((x,))
    assert torch.equal(inferred, wanted)
    assert inferred.is_inference()


def test_autocast_holds_in_every_replica() -> None:
    model, x = nn.Linear(4, 3), batch()
    compiled = CompiledReplicas(model, [0, 1])
    with torch.autocast("cpu", torch.bfloat16):
        made, wanted = compiled((x,)), torch.cat([model(part) for part in x.chunk(2)])
    assert made.dtype == torch.bfloat16
    assert torch.equal(made, wanted)
    assert compiled((x,)).dtype == torch.float32


def read_twice(m: Any, x: Tensor) -> Tensor:
    return m.fc(m.fc(x).tanh())


def in_part(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        x = m.fc(x)
    return m.fc(x)


@pytest.mark.parametrize("body", [read_twice, in_part])
def test_gradients_under_autocast_are_those_of_eager_replicas(body: Callable[[Any, Tensor], Tensor]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return body(self, x)

    def gradients(eagerly: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(6, 4)
        replicas = graphir.DataParallel(model, [0, 1])
        with contextlib.ExitStack() as entered:
            if eagerly:
                entered.enter_context(graphir.seeded(0))
            with torch.autocast("cpu", torch.bfloat16):
                out = replicas(x)
            out.float().square().sum().backward()
        return [param.grad for param in model.parameters()]

    same(gradients(eagerly=False), gradients(eagerly=True))


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_autocast_for_cuda_does_on_the_host_what_it_does_in_eager_pytorch() -> None:
    class Region(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return super().forward(x)

    model, x = Region(4, 3), batch()
    assert torch.equal(CompiledReplicas(model, [0, 1])((x,)), torch.cat([model(part) for part in x.chunk(2)]))


def test_masks_follow_the_seed_and_differ_from_call_to_call() -> None:
    model, x = nn.Dropout(0.5), torch.ones(64, 8)
    compiled = CompiledReplicas(model, [0, 1])
    runs = []
    for _ in range(2):
        torch.manual_seed(11)
        runs.append([compiled((x,)), compiled((x,))])
    same(*runs)
    first, second = runs[0]
    assert not torch.equal(first, second)
    assert not torch.equal(*first.chunk(2))


def test_a_module_that_draws_nothing_leaves_the_generator_alone() -> None:
    compiled = CompiledReplicas(net(), [0, 1])
    compiled((batch(),))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    compiled((batch(),))
    assert torch.equal(torch.get_rng_state(), before)


def test_threads_may_call_at_a_time() -> None:
    model = net().eval()
    compiled = CompiledReplicas(model, [0, 1])
    inputs = [batch(rows) for rows in (4, 6, 8, 10)]
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        made = list(pool.map(lambda x: compiled((x,)), inputs))
    for x, ours in zip(inputs, made, strict=True):
        assert torch.equal(ours, torch.cat([model(part) for part in x.chunk(2)]))
    assert threading.active_count() < 50


def test_it_is_copied_and_pickled_without_its_plans() -> None:
    compiled = CompiledReplicas(net(), [0, 1])
    wanted = compiled((batch(),))
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert torch.equal(other((batch(),)), wanted)


# What is left to eager replicas.


def test_too_few_rows_for_all_replicas_are_no_reason_to_warn() -> None:
    assert CompiledReplicas(net(), [0, 1])((batch(1),)) is None
    assert CompiledReplicas(net(), [0, 1, 2])((batch(4),)) is None  # chunks of 2


def hooked(model: nn.Module) -> None:
    model[0].register_forward_hook(lambda *_: None)


def hooked_backward(model: nn.Module) -> None:
    model[0].register_full_backward_hook(lambda *_: None)


def called_back(model: nn.Module) -> None:
    model[0].__data_parallel_replicate__ = lambda context, copy_id: None


def reading(model: nn.Module) -> None:
    model.append(models.Applied(lambda x: x * float(x.sum())))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hooked, "a module has hooks, which are called once for each replica"),
        (hooked_backward, "a module has hooks, which are called once for each replica"),
        (called_back, "a module has a callback, which is called for each replica"),
        (reading, "it cannot be captured: aten._local_scalar_dense.default reads a number out of a tensor"),
    ],
)
def test_a_module_that_plans_cannot_stand_for(change: Callable[[nn.Module], None], why: str) -> None:
    model = net()
    change(model)
    compiled = CompiledReplicas(model, [0, 1])
    with pytest.warns(graphir.errors.EagerWarning, match=f"the replicas of Sequential run eagerly: {why}"):
        assert compiled((batch(),)) is None
    assert compiled((batch(),)) is None  # told once


def test_hooks_that_come_later_are_called_by_eager_replicas() -> None:
    model = net()
    compiled = CompiledReplicas(model, [0, 1])
    assert compiled((batch(),)) is not None
    handle = model[2].register_forward_hook(lambda *_: None)
    with pytest.warns(graphir.errors.EagerWarning, match="has hooks"):
        assert compiled((batch(),)) is None
    handle.remove()
    assert compiled((batch(),)) is not None


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ((3,), "no argument is a tensor"),
        ((torch.ones(4, 4), torch.ones(5, 4)), "arguments have 4 and 5 rows"),
        ((torch.ones(()),), "an argument has no dimension 0, or is not on cpu"),
        ((torch.ones(4, 4), object()), "an argument has a object in it"),
        ((torch.ones(4, 4).to_sparse(),), "an argument is a Tensor of layout torch.sparse_coo"),
    ],
)
def test_arguments_that_plans_cannot_take(args: tuple[Any, ...], why: str) -> None:
    with pytest.warns(graphir.errors.EagerWarning, match=why):
        assert CompiledReplicas(net(), [0, 1])(args) is None


def test_modes_that_watch_operators_see_eager_ones() -> None:
    compiled = CompiledReplicas(net(), [0, 1])
    with graphir.seeded(0), pytest.warns(graphir.errors.EagerWarning, match="a mode of torch watches the operators"):
        assert compiled((batch(),)) is None
    with pytest.warns(graphir.errors.EagerWarning, match=r"a transform of torch.func"):
        torch.func.vmap(lambda x: x if compiled((x,)) is None else 1 / 0)(batch(4)[None])


def test_an_operator_that_fails_is_left_to_eager_replicas() -> None:
    table = nn.Embedding(3, 2)
    compiled = CompiledReplicas(table, [0, 1])
    assert compiled((torch.tensor([0, 1, 2, 0]),)) is not None
    assert compiled((torch.tensor([0, 1, 9, 0]),)) is None
    assert compiled((torch.tensor([0, 1, 2, 0]),)) is not None


# The guard.


class Noted(nn.Module):
    """A module whose forward depends on what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale, self.names, self.table, self.tables = 2.0, ["relu"], torch.ones(4), [torch.ones(4)]
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        made = self.fc(x) * self.scale * self.table * self.tables[0] + self.shift
        for name in self.names:
            made = getattr(torch, name)(made)
        return made


def rescaled(model: Noted) -> None:
    model.scale = 3.0


def renamed(model: Noted) -> None:
    model.names.append("tanh")


def tabled(model: Noted) -> None:
    model.table[1] = 5


def listed(model: Noted) -> None:
    model.tables[0][1] = 5


def replaced(model: Noted) -> None:
    model.fc = nn.Linear(4, 4, bias=False)


def repointed(model: Noted) -> None:
    model.fc.weight.data = torch.randn(4, 4)


def reset(model: Noted) -> None:
    model.fc.weight = nn.Parameter(torch.randn(4, 4))


def shifted(model: Noted) -> None:
    model.shift = torch.ones(4)


def filled(model: Noted) -> None:
    with torch.no_grad():
        model.fc.weight.fill_(0.5)
        model.shift.fill_(2)


@pytest.mark.parametrize("change", [rescaled, renamed, tabled, listed, replaced, repointed, reset, shifted, filled])
def test_a_module_that_has_changed_is_what_runs(change: Callable[[Noted], None]) -> None:
    model, x = Noted(), batch()
    compiled = CompiledReplicas(model, [0, 1])
    for _ in range(2):
        assert torch.equal(compiled((x,)), torch.cat([model(part) for part in x.chunk(2)]))
        change(model)
    assert torch.equal(compiled((x,)), torch.cat([model(part) for part in x.chunk(2)]))


class Attributes(dict[str, float]):
    """A dict of a type of its own, as configurations are."""


def test_a_container_of_another_type_is_the_same_as_long_as_it_holds_the_same() -> None:
    model, x = Noted(), batch()
    model.configuration = Attributes(a=1.0)
    compiled = CompiledReplicas(model, [0, 1])
    for _ in range(7):
        assert compiled((x,)) is not None


def test_an_inference_tensor_is_read_where_it_is() -> None:
    model, x = Noted(), batch()
    with torch.inference_mode():
        model.table = torch.ones(4)
    compiled = CompiledReplicas(model, [0, 1])
    for value in (1.0, 3.0):
        with torch.inference_mode():
            model.table.fill_(value)
        with torch.no_grad():
            assert torch.equal(compiled((x,)), torch.cat([model(part) for part in x.chunk(2)]))


def test_a_negative_dimension_is_left_to_eager_replicas() -> None:
    with pytest.warns(graphir.errors.EagerWarning, match="dim is -2, counted from the last dimension"):
        assert CompiledReplicas(net(), [0, 1], dim=-2)((batch(),)) is None


def test_outputs_go_to_the_output_device() -> None:
    binding = {"gpu:0": "cpu", "gpu:1": "meta"}
    made = CompiledReplicas(nn.Linear(4, 3), [0, 1], output_device=1, binding=binding)((batch(),))
    assert made.device.type == "meta"


def test_a_module_that_changes_again_and_again_is_left_to_eager_replicas() -> None:
    model, x = Noted(), batch()
    compiled = CompiledReplicas(model, [0, 1])
    why = "the module's 'scale' has changed again and again"
    with pytest.warns(graphir.errors.EagerWarning, match=why):
        for i in range(9):
            model.scale = float(i)
            made = compiled((x,))
    assert made is None
    model.scale = 7.0
    assert compiled((x,)) is not None  # what was captured last


def test_every_replica_starts_from_the_modules_buffers() -> None:
    """Also where a call overwrites them: the copies of further replicas are filled before each call."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x * self.calls.clone()

    model, x = Counting(), torch.ones(4, 2)
    compiled = CompiledReplicas(model, [0, 1])
    for start in (0.0, 5.0, 2.0):
        model.calls.fill_(start)
        assert torch.equal(compiled((x,)), x * (start + 1))
        assert model.calls.item() == start + 1


def test_values_that_are_set_anew_and_equal_change_nothing() -> None:
    model = Noted()
    compiled = CompiledReplicas(model, [0, 1])
    for _ in range(8):
        model.scale = float("2.0")
        assert compiled((batch(),)) is not None
