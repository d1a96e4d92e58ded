"""What users of ``torch.nn.DataParallel`` rely on: each behaviour is observed of torch's own code and of ours.

A behaviour is a function that is given how to wrap a module, and returns what it saw: tensors, structures, numbers, or
the exception. Both must be equal, tensors bit for bit.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eager_only import EagerOnly
from torch import Tensor, nn
from torch.nn.utils import parametrizations, rnn
from torch_on_host import on_host
from torch_on_host import wrap as wrap_torchs

import graphir

Wrap = Callable[..., nn.DataParallel[Any]]
BEHAVIOURS: dict[str, Callable[[Wrap], Any]] = {}
Pair = namedtuple("Pair", "a b")


def behaviour(function: Callable[[Wrap], Any]) -> Callable[[Wrap], Any]:
    BEHAVIOURS[function.__name__] = function
    return function


class Of(nn.Module):
    """A module whose forward is a function of the module and the arguments, with a few parameters and a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(2))
        self.count = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def rows(n: int = 5, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def seen_by(module: Any, *args: Any, **kwargs: Any) -> Any:
    """The exception that a call raises, or what it returns."""
    try:
        return module(*args, **kwargs)
    except Exception as e:
        return e


# Arguments


@behaviour
def one_tensor(wrap: Wrap) -> Any:
    return wrap(net())(rows())


@behaviour
def two_tensors(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, y: m.fc(x) + y))(rows(), rows(5, 3))


@behaviour
def a_keyword_tensor(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x: m.fc(x)))(x=rows())


@behaviour
def positional_and_keyword_tensors(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, y=None: m.fc(x) * y))(rows(), y=rows(5, 3))


@behaviour
def a_tuple(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, xs: (type(xs) is tuple, m.fc(xs[0]) + xs[1])[1]))((rows(), rows(5, 3)))


@behaviour
def a_list(wrap: Wrap) -> Any:
    types = []
    found = wrap(Of(lambda m, xs: (types.append(type(xs)), m.fc(xs[0]) + xs[1])[1]))([rows(), rows(5, 3)])
    return found, types


@behaviour
def a_dict(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, xs: m.fc(xs["x"]) + xs["y"]))({"x": rows(), "y": rows(5, 3)})


@behaviour
def an_ordered_dict_keeps_its_type(wrap: Wrap) -> Any:
    types = []
    found = wrap(Of(lambda m, xs: (types.append(type(xs)), m.fc(xs["x"]))[1]))(OrderedDict(x=rows()))
    return found, types


@behaviour
def a_named_tuple(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, xs: m.fc(xs.a) + xs.b))(Pair(rows(), rows(5, 3)))


@behaviour
def nested_arguments(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, xs: m.fc(xs["x"][0].a) + xs["y"][1]))({"x": [Pair(rows(), 1)], "y": (2, rows(5, 3))})


@behaviour
def a_number_goes_to_each(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, k: m.fc(x) * k))(rows(), 3)


@behaviour
def an_object_goes_to_each_as_it_is(wrap: Wrap) -> Any:
    found: list[object] = []
    token = object()
    wrap(Of(lambda m, x, o: (found.append(o), m.fc(x))[1]))(rows(), token)
    return [o is token for o in found]


@behaviour
def none_and_text(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, y, mode=None: m.fc(x) if y is None and mode == "sum" else x))(rows(), None, mode="sum")


@behaviour
def empty_structures(wrap: Wrap) -> Any:
    found = []
    wrap(Of(lambda m, x, *others: (found.append(others), m.fc(x))[1]))(rows(), (), [], {})
    return found


@behaviour
def fewer_rows_than_devices(wrap: Wrap) -> Any:
    calls = []
    found = wrap(Of(lambda m, x: (calls.append(len(x)), m.fc(x))[1]), [0, 1, 2])(rows(2))
    return found, sorted(calls)


@behaviour
def one_row(wrap: Wrap) -> Any:
    return wrap(net())(rows(1))


@behaviour
def chunks_that_leave_a_device_without_rows(wrap: Wrap) -> Any:
    calls = []
    found = wrap(Of(lambda m, x: (calls.append(len(x)), m.fc(x))[1]), [0, 1, 2, 3])(rows(5))
    return found, sorted(calls)


@behaviour
def uneven_shares(wrap: Wrap) -> Any:
    calls = []
    found = wrap(Of(lambda m, x: (calls.append(len(x)), m.fc(x))[1]), [0, 1, 2])(rows(7))
    return found, sorted(calls)


@behaviour
def no_rows(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x: m.fc(x)))(rows(0))


@behaviour
def no_arguments(wrap: Wrap) -> Any:
    return wrap(Of(lambda m: m.fc.weight * 2))()


@behaviour
def arguments_without_tensors(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, k: m.fc.weight * k))(2)


@behaviour
def another_dimension(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x: m.fc(x.t()).t()), dim=1)(rows(4, 5))


@behaviour
def a_negative_dimension(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x: m.fc(x.t()).t()), dim=-1)(rows(4, 5))


@behaviour
def integers_booleans_and_complex_numbers(wrap: Wrap) -> Any:
    x = torch.arange(6)
    return wrap(Of(lambda m, i, b, c: (i + 1, ~b, c * 1j)))(x, x > 2, torch.complex(x.float(), x.float()))


@behaviour
def a_packed_sequence_is_a_named_tuple(wrap: Wrap) -> Any:
    packed = rnn.pack_sequence([rows(3), rows(3)])
    found: list[Any] = []
    seen_by(wrap(Of(lambda m, p: (found.append((len(p.data), p.batch_sizes.tolist())), p.data)[1])), packed)
    return sorted(found)


@behaviour
def packing_within_the_module(wrap: Wrap) -> Any:
    """As torch's FAQ has it: batch first, and padded to the whole batch's length."""

    def forward(module: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(module.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    module = Of(forward)
    module.rnn = nn.GRU(4, 3, batch_first=True)
    return wrap(module)(rows(20).view(4, 5, 4), torch.tensor([5, 2, 3, 1]))


@behaviour
def a_tensor_without_dimensions(wrap: Wrap) -> Any:
    return seen_by(wrap(Of(lambda m, x, s: m.fc(x) * s)), rows(), torch.tensor(2.0))


@behaviour
def a_tensor_without_the_dimension(wrap: Wrap) -> Any:
    return seen_by(wrap(net(), dim=2), rows())


@behaviour
def a_shorter_positional_tensor(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, y: m.fc(x) + y))(rows(), rows(1, 3))


@behaviour
def a_shorter_keyword_tensor(wrap: Wrap) -> Any:
    return seen_by(wrap(Of(lambda m, x, y=0: m.fc(x) + y)), rows(), y=rows(1, 3))


@behaviour
def a_shorter_keyword_tensor_beside_two_others(wrap: Wrap) -> Any:
    return wrap(Of(lambda m, x, z, y=0: m.fc(x) + z + y))(rows(), rows(5, 3), y=rows(1, 3))


@behaviour
def a_shorter_positional_tensor_beside_a_keyword(wrap: Wrap) -> Any:
    return seen_by(wrap(Of(lambda m, x=1, y=0: y * x)), rows(1, 3), y=rows(5, 3))


# Outputs


def output(name: str, make: Callable[[nn.Module, Tensor], Any], n: int = 5) -> None:
    BEHAVIOURS[f"output: {name}"] = lambda wrap: seen_by(wrap(Of(lambda m, x: make(m, m.fc(x)))), rows(n))


output("a tuple", lambda m, y: (y, y * 2))
output("a list", lambda m, y: [y, y * 2])
output("a dict", lambda m, y: {"y": y, "z": y * 2})
output("an ordered dict", lambda m, y: OrderedDict(y=y, z=y * 2))
output("a named tuple", lambda m, y: Pair(y, y * 2))
output("nested", lambda m, y: {"y": [y, (y, Pair(y, None))]})
output("none", lambda m, y: None)
output("none in a tuple", lambda m, y: (y, None))
output("a scalar", lambda m, y: y.sum())
output("a scalar in a dict", lambda m, y: {"loss": y.sum(), "y": y})
output("detached", lambda m, y: y.detach())
output("complex", lambda m, y: torch.complex(y, y))
output("integers", lambda m, y: y.argmax(1))
output("a number", lambda m, y: 3)
output("a number in a tuple", lambda m, y: (y, 3))
output("an object", lambda m, y: object())
output("shapes that differ", lambda m, y: y[:, : len(y)])
output("tuples that differ", lambda m, y: (y,) * len(y))
output("dicts that differ", lambda m, y: dict.fromkeys(range(len(y)), y))
output("an argument", lambda m, y: y)
output("a parameter", lambda m, y: m.fc.weight)
output("an empty tuple", lambda m, y: ())


@behaviour
def scalars_along_another_dimension(wrap: Wrap) -> Any:
    return seen_by(wrap(Of(lambda m, x: x.sum()), dim=1), rows())


@behaviour
def scalars_warn(wrap: Wrap) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrap(Of(lambda m, x: m.fc(x).sum()))(rows())
    return [" ".join(str(w.message).split()) for w in caught if "gather" in str(w.message)]


# Gradients


@behaviour
def gradients_of_parameters(wrap: Wrap) -> Any:
    module = net()
    wrap(module)(rows()).square().sum().backward()
    return gradients(module)


@behaviour
def gradients_of_three_replicas(wrap: Wrap) -> Any:
    module = net()
    wrap(module, [2, 0, 1])(rows(8)).square().sum().backward()
    return gradients(module)


@behaviour
def gradients_of_inputs(wrap: Wrap) -> Any:
    x, y = rows().requires_grad_(), rows(5, 3).requires_grad_()
    wrap(Of(lambda m, x, y: m.fc(x) * y))(x, y=y).square().sum().backward()
    return x.grad, y.grad


@behaviour
def gradients_of_inputs_along_another_dimension(wrap: Wrap) -> Any:
    x = rows(4, 5).requires_grad_()
    wrap(Of(lambda m, x: m.fc(x.t()).t()), dim=1)(x).square().sum().backward()
    return x.grad


@behaviour
def one_forward_used_twice(wrap: Wrap) -> Any:
    module = net()
    y = wrap(module)(rows())
    y.sum().backward(retain_graph=True)
    y.square().sum().backward()
    return gradients(module)


@behaviour
def two_forwards_before_one_backward(wrap: Wrap) -> Any:
    module = net()
    wrapped = wrap(module)
    (wrapped(rows()).sum() * wrapped(rows(6)).square().sum()).backward()
    return gradients(module)


@behaviour
def gradients_of_gradients(wrap: Wrap) -> Any:
    module, x = net(), rows().requires_grad_()
    (slope,) = torch.autograd.grad(wrap(module)(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return x.grad, gradients(module)


@behaviour
def gradients_of_gradients_of_parameters(wrap: Wrap) -> Any:
    module = net()
    slopes = torch.autograd.grad(wrap(module)(rows()).square().sum(), list(module.parameters()), create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()
    return gradients(module)


@behaviour
def gradients_are_added_to_those_that_are_there(wrap: Wrap) -> Any:
    module = net()
    for _ in range(2):
        wrap(module)(rows()).sum().backward()
    return gradients(module)


@behaviour
def a_parameter_that_no_replica_uses(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.fc(x))
    module.unused = nn.Parameter(torch.ones(2))
    wrap(module)(rows()).sum().backward()
    return gradients(module)


@behaviour
def a_parameter_that_one_replica_uses(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.fc(x) if len(x) == 3 else x[:, :3] * 1)
    wrap(module)(rows()).sum().backward()
    return gradients(module)


@behaviour
def frozen_parameters(wrap: Wrap) -> Any:
    module = net()
    module[0].requires_grad_(False)
    wrap(module)(rows()).sum().backward()
    return gradients(module)


@behaviour
def only_frozen_parameters(wrap: Wrap) -> Any:
    return wrap(net().requires_grad_(False))(rows()).requires_grad


@behaviour
def tied_parameters(wrap: Wrap) -> Any:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    wrap(module)(rows()).square().sum().backward()
    return gradients(module)


@behaviour
def hooks_of_parameters_get_the_sum_once(wrap: Wrap) -> Any:
    module, calls = net(), []
    module[0].weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    wrap(module)(rows()).square().sum().backward()
    return calls


@behaviour
def hooks_after_accumulation(wrap: Wrap) -> Any:
    module, calls = net(), []
    module[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
    wrap(module)(rows()).square().sum().backward()
    return calls


@behaviour
def the_loss_within_the_module(wrap: Wrap) -> Any:
    module = Of(lambda m, x, y: F.cross_entropy(m.fc(x), y))
    loss = wrap(module)(rows(6), torch.tensor([0, 1, 2, 0, 1, 2])).mean()
    loss.backward()
    return loss, gradients(module)


@behaviour
def a_buffer_with_gradients(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.fc(x) * m.scale)
    scale = torch.ones(3, requires_grad=True)
    module.register_buffer("scale", scale)
    wrap(module)(rows()).sum().backward()
    return scale.grad


@behaviour
def optimizer_steps(wrap: Wrap) -> Any:
    module = net()
    wrapped = wrap(module)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    for n in (5, 6, 1):
        optimizer.zero_grad()
        wrapped(rows(n)).square().sum().backward()
        optimizer.step()
    return list(module.parameters())


@behaviour
def without_gradients(wrap: Wrap) -> Any:
    with torch.no_grad():
        y = wrap(net())(rows())
    return y, y.requires_grad


@behaviour
def the_grad_mode_within_replicas(wrap: Wrap) -> Any:
    found = []
    wrapped = wrap(Of(lambda m, x: (found.append(torch.is_grad_enabled()), m.fc(x))[1]))
    wrapped(rows())
    with torch.no_grad():
        wrapped(rows())
    return found


@behaviour
def gradients_switched_on_within_the_module(wrap: Wrap) -> Any:
    module = Of(lambda m, x: torch.enable_grad()(m.fc)(x))
    with torch.no_grad():
        return wrap(module)(rows()).requires_grad


# Modules


@behaviour
def a_replica_has_no_parameters(wrap: Wrap) -> Any:
    found = []
    wrap(Of(lambda m, x: (found.append((list(m.parameters()), list(m.fc.parameters()))), m.fc(x))[1]))(rows())
    return found


@behaviour
def former_parameters_of_a_replica(wrap: Wrap) -> Any:
    found = []
    wrap(Of(lambda m, x: (found.append(list(m.fc._former_parameters)), m.fc(x))[1]))(rows())
    return found


@behaviour
def what_a_replica_is(wrap: Wrap) -> Any:
    found = []

    def forward(module: Any, x: Tensor) -> Tensor:
        kinds = type(module).__name__, type(module.fc).__name__, type(module.fc.weight).__name__
        found.append((*kinds, module.fc.weight.is_leaf, module._is_replica, [n for n, _ in module.named_buffers()]))
        return module.fc(x)

    wrap(Of(forward))(rows())
    return found


@behaviour
def the_first_replica_shares_storage(wrap: Wrap) -> Any:
    shared = []
    module = Of(lambda m, x: (shared.append((len(x), m.fc.weight.data_ptr(), m.seen.data_ptr())), m.fc(x))[1])
    wrap(module)(rows())
    wanted = (module.fc.weight.data_ptr(), module.seen.data_ptr())
    return [found[1:] == wanted for found in sorted(shared, reverse=True)]


@behaviour
def buffers_written_in_place_by_the_first_replica_stay(wrap: Wrap) -> Any:
    module = Of(lambda m, x: (m.seen.add_(len(x)), m.fc(x))[1])
    wrap(module)(rows())
    return module.seen


@behaviour
def buffers_assigned_anew_are_lost(wrap: Wrap) -> Any:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.seen = module.seen + 1
        return module.fc(x)

    module = Of(forward)
    wrap(module)(rows())
    return module.seen


@behaviour
def attributes_set_by_replicas_are_lost(wrap: Wrap) -> Any:
    def forward(module: Any, x: Tensor) -> Tensor:
        module.count += 1
        return module.fc(x)

    module = Of(forward)
    wrap(module)(rows())
    return module.count


@behaviour
def running_statistics_are_the_first_share_s(wrap: Wrap) -> Any:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    y = wrap(module)(rows())
    return y, list(module.buffers())


@behaviour
def evaluation(wrap: Wrap) -> Any:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
    return wrap(module)(rows()), list(module.buffers())


@behaviour
def train_and_eval_of_the_wrapper(wrap: Wrap) -> Any:
    found = []
    wrapped = wrap(Of(lambda m, x: (found.append(m.training), m.fc(x))[1]))
    for mode in (True, False):
        wrapped.train(mode)(rows())
    return found


@behaviour
def hooks_run_once_a_replica(wrap: Wrap) -> Any:
    module, calls = net(), []
    module[0].register_forward_pre_hook(lambda m, args: calls.append(("before", len(args[0]))))
    module[0].register_forward_hook(lambda m, args, y: calls.append(("after", len(y))))
    wrap(module)(rows())
    return sorted(calls)


@behaviour
def hooks_change_results(wrap: Wrap) -> Any:
    module = net()
    module[0].register_forward_hook(lambda m, args, y: y * 2)
    return wrap(module)(rows())


@behaviour
def hooks_of_the_backward(wrap: Wrap) -> Any:
    module, calls = net(), []
    module[2].register_full_backward_hook(lambda m, of_inputs, of_outputs: calls.append(of_outputs[0].clone()))
    wrap(module)(rows()).square().sum().backward()
    return sorted(calls, key=len)


@behaviour
def hooks_of_the_wrapper_run_once(wrap: Wrap) -> Any:
    calls = []
    wrapped = wrap(net())
    wrapped.register_forward_hook(lambda m, args, y: calls.append(len(y)))
    wrapped(rows())
    return calls


@behaviour
def a_module_used_twice(wrap: Wrap) -> Any:
    fc = nn.Linear(4, 4)
    module = nn.Sequential(fc, nn.Tanh(), fc)
    wrap(module)(rows()).square().sum().backward()
    return gradients(module)


@behaviour
def children_and_parameters_that_are_none(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.fc(x) if m.child is None and m.nothing is None and m.no_buffer is None else x)
    module.add_module("child", None)
    module.register_parameter("nothing", None)
    module.register_buffer("no_buffer", None)
    module.fc = nn.Linear(4, 3, bias=False)
    return wrap(module)(rows())


@behaviour
def lists_and_dicts_of_modules_and_parameters(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.modules_["a"](m.list[1](m.list[0](x))) * m.scales[0] + m.named["b"])
    module.list = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
    module.modules_ = nn.ModuleDict({"a": nn.Linear(4, 3)})
    module.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])
    module.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(3))})
    y = wrap(module)(rows())
    y.square().sum().backward()
    return y, gradients(module)


@behaviour
def recurrent_modules(wrap: Wrap) -> Any:
    module = nn.LSTM(4, 3, num_layers=2, batch_first=True)
    y, _ = wrap(Recurrent(module))(rows(10).view(5, 2, 4))
    y.square().sum().backward()
    return y, gradients(module)


class Recurrent(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (h, _) = self.rnn(x)
        return y, h.transpose(0, 1).contiguous()


@behaviour
def parametrized_weights(wrap: Wrap) -> Any:
    module = parametrizations.weight_norm(nn.Linear(4, 3))
    wrap(module)(rows()).square().sum().backward()
    return gradients(module)


@behaviour
def weights_made_by_hooks(wrap: Wrap) -> Any:
    module = nn.utils.spectral_norm(nn.Linear(4, 3))
    wrap(module)(rows()).square().sum().backward()
    return gradients(module), list(module.buffers())


@behaviour
def attention(wrap: Wrap) -> Any:
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    y = wrap(module)(rows(10, 8).view(5, 2, 8))
    y.square().sum().backward()
    return y, gradients(module)


@behaviour
def an_embedding_with_sparse_gradients(wrap: Wrap) -> Any:
    module = nn.Embedding(7, 3, sparse=True)
    wrap(module)(torch.tensor([[1, 2], [2, 3], [6, 1]])).square().sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad.is_sparse, module.weight.grad.to_dense()


# Errors


@behaviour
def an_exception_of_a_replica(wrap: Wrap) -> Any:
    def forward(module: Any, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise LookupError("no such row")
        return module.fc(x)

    e = seen_by(wrap(Of(forward)), rows())
    return e, "Caught LookupError in replica 1 on device" in str(e), "no such row" in str(e), "def forward" in str(e)


@behaviour
def an_exception_of_every_replica_is_the_first_one_s(wrap: Wrap) -> Any:
    e = seen_by(wrap(Of(lambda m, x: m.fc(x.t()))), rows())
    return e, "in replica 0" in str(e)


@behaviour
def a_key_error(wrap: Wrap) -> Any:
    return type(seen_by(wrap(Of(lambda m, x: {}["missing"])), rows()))


@behaviour
def parameters_on_another_device(wrap: Wrap) -> Any:
    e = seen_by(wrap(net().to("meta")), rows())
    return e, "on device cpu (device_ids[0]) but found one of them on device: meta" in str(e)


@behaviour
def buffers_on_another_device(wrap: Wrap) -> Any:
    module = Of(lambda m, x: m.fc(x))
    module.seen = torch.zeros(2, device="meta")
    return seen_by(wrap(module), rows())


@behaviour
def the_wrong_number_of_arguments(wrap: Wrap) -> Any:
    return seen_by(wrap(nn.Linear(4, 3)), rows(), rows())


# The wrapper


@behaviour
def names_of_parameters_have_a_prefix(wrap: Wrap) -> Any:
    wrapped = wrap(net())
    return [name for name, _ in wrapped.named_parameters()], list(wrapped.state_dict())


@behaviour
def a_state_is_loaded(wrap: Wrap) -> Any:
    wrapped, other = wrap(net()), wrap(net())
    other.load_state_dict(wrapped.state_dict())
    return other(rows())


@behaviour
def what_the_wrapper_is(wrap: Wrap) -> Any:
    wrapped = wrap(net())
    return isinstance(wrapped, nn.DataParallel), wrapped.device_ids, wrapped.output_device, wrapped.dim


@behaviour
def a_copy(wrap: Wrap) -> Any:
    return copy.deepcopy(wrap(net()))(rows())


@behaviour
def pickled(wrap: Wrap) -> Any:
    return pickle.loads(pickle.dumps(wrap(net())))(rows())


@behaviour
def one_device(wrap: Wrap) -> Any:
    found = []
    module = Of(lambda m, x: (found.append(m is module), m.fc(x))[1])
    return wrap(module, [1])(rows()), found


@behaviour
def one_device_splits_arguments_too(wrap: Wrap) -> Any:
    return seen_by(wrap(Of(lambda m, x, s: m.fc(x) * s), [0]), rows(), torch.tensor(2.0))


@behaviour
def a_subclass_overrides_every_step(wrap: Wrap) -> Any:
    steps = []
    wrapped = wrap(net())

    class Own(type(wrapped)):  # type: ignore[misc]
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            steps.append(("scatter", len(inputs), sorted(kwargs), list(device_ids)))
            return super().scatter(inputs, kwargs, device_ids)

        def replicate(self, module: Any, device_ids: Any) -> Any:
            steps.append(("replicate", list(device_ids)))
            return super().replicate(module, device_ids)

        def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
            steps.append(("parallel_apply", len(replicas), len(inputs), kwargs))
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs: Any, output_device: Any) -> Any:
            steps.append(("gather", len(outputs), output_device))
            return super().gather(outputs, output_device) * 2

    wrapped.__class__ = Own
    return wrapped(rows()), steps


@behaviour
def inputs_scattered_beforehand(wrap: Wrap) -> Any:
    """As a subclass that gets a list of shares has it."""
    wrapped = wrap(net())

    class Own(type(wrapped)):  # type: ignore[misc]
        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return tuple((share,) for share in inputs[0]), tuple({} for _ in inputs[0])

    wrapped.__class__ = Own
    return wrapped([rows(3), rows(2)])


@behaviour
def a_wrapper_within_a_module(wrap: Wrap) -> Any:
    inner = net()
    module = nn.Sequential(nn.Linear(4, 4), wrap(inner))
    y = module(rows())
    y.sum().backward()
    return y, gradients(inner)


@behaviour
def a_wrapper_within_a_wrapper(wrap: Wrap) -> Any:
    module = net()
    y = wrap(nn.Sequential(nn.Linear(4, 4), wrap(module)))(rows(6))
    y.sum().backward()
    return y, gradients(module)


def wrap_ours(module: nn.Module, device_ids: Any = (0, 1), **options: Any) -> nn.DataParallel[Any]:
    return graphir.DataParallel(module, device_ids, **options)


def assert_same(ours: Any, theirs: Any, equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> None:
    if isinstance(theirs, Exception):
        kinds = [kind for kind in type(theirs).__mro__ if kind.__module__ == "builtins"]
        assert isinstance(ours, kinds[0]), (ours, theirs)
        return
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.device == theirs.device
        assert ours.requires_grad == theirs.requires_grad
        assert equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert_same(ours[key], value, equal)
    elif isinstance(theirs, (tuple, list)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other, equal)
    else:
        assert ours == theirs


FROM_WITHIN = {
    "a_list",
    "a_replica_has_no_parameters",
    "an_ordered_dict_keeps_its_type",
    "empty_structures",
    "the_grad_mode_within_replicas",
    "train_and_eval_of_the_wrapper",
    "uneven_shares",
}
"""Behaviours that are noted by Python code in a forward: a plan calls none."""


ADDED_OTHERWISE = {"gradients_of_gradients", "gradients_of_gradients_of_parameters"}
"""Behaviours for which a plan's node runs replicas once more: autograd adds the parts up in another order."""


def compare(name: str, wrap: Wrap, equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> None:
    torch.manual_seed(0)
    ours = BEHAVIOURS[name](wrap)
    torch.manual_seed(0)
    with on_host():
        theirs = BEHAVIOURS[name](wrap_torchs)
    assert_same(ours, theirs, equal)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_eager_replicas_are_torch_s(name: str, one_thread: None) -> None:
    compare(name, lambda module, device_ids=(0, 1), **options: EagerOnly(module, device_ids, **options))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", [name for name in BEHAVIOURS if name not in FROM_WITHIN])
def test_it_is_torch_s(name: str, one_thread: None) -> None:
    """With plans where they can stand for a call."""
    close = partial(torch.allclose, rtol=1e-5, atol=1e-6)
    compare(name, wrap_ours, close if name in ADDED_OTHERWISE else torch.equal)


def test_there_are_enough() -> None:
    assert len(BEHAVIOURS) - len(FROM_WITHIN) >= 60
