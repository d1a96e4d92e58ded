"""Changes of state and of attributes that a program would not make are refused: with the module and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from refusing import GLOBAL, Cases
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

pytestmark = pytest.mark.usefixtures("few_objects")

CASES = Cases()
refused = CASES.refused


# State that is not overwritten in place


@refused("aten._foreach_addcdiv_.Tensor reads its numbers from a tensor")
def foreach(m: Any, h: Tensor) -> Tensor:
    torch._foreach_addcdiv_([m.counter], [m.counter], [m.counter], torch.ones(1))  # here
    return h


@refused("operator 'aten.is_set_to.default' is not allowed in a program")
def no_operator_of_programs(m: Any, h: Tensor) -> Tensor:
    return h * 2 if h.is_set_to(m.counter) else h  # here


@refused("the step rebinds buffer 'counter'")
def rebound_buffer(m: Any, h: Tensor) -> Tensor:
    m.counter = m.counter + 1
    return h


@refused("the step rebinds parameter 'weight'", module="inner.fc")
def rebound_parameter(m: Any, h: Tensor) -> Tensor:
    m.fc.weight = nn.Parameter(m.fc.weight * 2)
    return h * 2


@refused("the step gives param 'inner.fc.weight' other memory (.data = …)")
def exchanged_memory(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.data = m.fc.weight.data * 2  # here
    h = h + 1
    return h @ m.fc.weight


@refused("aten.native_batch_norm.default overwrites 2 tensors at once, not all of them parameters or buffers")
def strided_statistics(m: Any, h: Tensor) -> Tensor:
    both = torch.ones(h.shape[1], 2)
    return F.batch_norm(h, both[:, 0], both[:, 1], training=True)  # here


@refused("aten.resize_.default changes the size or the storage of a tensor")
def resized(m: Any, h: Tensor) -> Tensor:
    return h + torch.zeros(2).resize_(4)  # here


@refused("aten.resize_as_.default changes the size or the storage of a tensor")
def resized_like_another(m: Any, h: Tensor) -> Tensor:
    return h + torch.zeros(2).resize_as_(h)  # here


@refused("aten.set_.source_Tensor changes the size or the storage of a tensor")
def pointed_elsewhere(m: Any, h: Tensor) -> Tensor:
    other = h.detach().clone()
    other.set_(h.detach())  # here
    return h + other


@refused("aten.mul.out overwrites a tensor and has no functional form")
def written_out(m: Any, h: Tensor) -> Tensor:
    return h + torch.mul(h.detach(), 2, out=torch.empty(6, 4))  # here


@refused("the step draws random numbers into a tensor with strides [8, 2]")
def drawn_with_gaps(m: Any, h: Tensor) -> Tensor:
    return h * torch.empty(6, 8)[:, ::2].bernoulli_()  # here


@refused("a tensor of shape [6, 4] whose origin capture has not seen")
def computed_behind_the_dispatcher(m: Any, h: Tensor) -> Tensor:
    with _disable_current_modes():
        unseen = h.detach() * 2
    return h + unseen  # here


@refused("aten.mul_.Tensor overwrites 'inner.scale', which is neither parameter nor buffer")
def overwritten_attribute(m: Any, h: Tensor) -> Tensor:
    m.scale.mul_(2)  # here
    return h * m.scale


@refused("aten.add_.Tensor overwrites 'inner.tables.0', which is neither parameter nor buffer")
def overwritten_item(m: Any, h: Tensor) -> Tensor:
    return h * m.tables[0].add_(1)  # here


@refused("aten.add_.Tensor overwrites 'constant', which is neither parameter nor buffer")
def overwritten_global(m: Any, h: Tensor) -> Tensor:
    GLOBAL.add_(1)  # here
    return h * GLOBAL


@refused("the step puts a hook on the gradient of parameter 'weight'", module="inner.fc")
def hooked_parameter(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.register_hook(lambda gradient: gradient * 2)
    return h


@refused("a backward runs inside of the forward")
def backward_inside(m: Any, h: Tensor) -> Tensor:
    h.sum().backward(retain_graph=True)  # here
    return h


@refused("the step sets requires_grad of parameter 'weight'", module="inner.fc")
def frozen_late(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.requires_grad_(False)
    return h


# Attributes that change


@refused("the step changes the attribute 'calls'")
def counted(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


@refused("the step changes the attribute 'hidden'")
def kept(m: Any, h: Tensor) -> Tensor:
    before = 1 if m.hidden is None else m.hidden
    m.hidden = h.detach()
    return h * before


@refused("the step changes the attribute 'training'")
def switched(m: Any, h: Tensor) -> Tensor:
    m.training = False
    return h


@refused("the step changes the contents of the attribute 'seen'")
def appended(m: Any, h: Tensor) -> Tensor:
    m.seen.append(h)
    return h


@refused("the step changes the contents of the attribute 'seen'")
def appended_inside(m: Any, h: Tensor) -> Tensor:
    def note() -> None:
        m.seen[1].append(3)

    note()
    return h


@refused("the step changes the attribute 'seen'")
def new_list(m: Any, h: Tensor) -> Tensor:
    m.seen = [*m.seen, h]
    return h


@refused("the step changes the contents of the attribute 'cache'")
def cached(m: Any, h: Tensor) -> Tensor:
    m.cache["h"] = h.detach()
    return h


@refused("the step changes the contents of the attribute 'cache'")
def counted_in_a_dict(m: Any, h: Tensor) -> Tensor:
    m.cache["kept"]["inner"] += 1
    return h


@refused("the step changes the contents of the attribute 'nested'")
def counted_within_a_tuple(m: Any, h: Tensor) -> Tensor:
    m.nested[0].append(1)
    return h


@refused("the step changes the contents of the attribute 'shapes'")
def added_to_a_set(m: Any, h: Tensor) -> Tensor:
    m.shapes.add(tuple(h.shape))
    return h


@refused("the step changes the contents of the attribute 'recent'")
def put_into_a_deque(m: Any, h: Tensor) -> Tensor:
    m.recent.append(2)
    return h


@refused("the step changes the contents of the attribute 'book'")
def counted_in_an_object(m: Any, h: Tensor) -> Tensor:
    m.book.calls += 1
    return h * m.book.calls


@pytest.mark.parametrize("case", CASES)
def test_refused_with_module_and_remedy(case: str) -> None:
    CASES[case].check()
