"""A placed model stays what it is: its class, its tensors, its files and its copies."""

from __future__ import annotations

import ast
import copy
import gc
import inspect
import io
import math
import pickle
import re
import weakref

import pytest
import torch
from placed_nets import MAP, Net, deep, same, tight, trained
from runnable import short_searches
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import graphir
from graphir.errors import CaptureError, PassError


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    short_searches(monkeypatch, 100)


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Sized(nn.Module):
    """A class that cannot have a subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def __init_subclass__(cls) -> None:
        raise TypeError("final")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def net() -> nn.Module:
    torch.manual_seed(0)
    return graphir.place(Net(), (X,), device_map=MAP)


def test_the_model_itself_is_returned() -> None:
    model = Net()
    tensors, names = list(model.parameters()), list(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert graphir.place(model, (X,), device_map=MAP) is model
    assert isinstance(model, Net) and type(model).__name__ == "Net" and type(model) is not Net
    assert list(model.parameters()) == tensors and list(model.state_dict()) == names
    assert optimizer.param_groups[0]["params"] == tensors
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert model.hf_device_map == {"first": 0, "norm": 0, "second": 1, "last": 1}


def test_one_device_on_the_host_is_no_map_of_devices() -> None:
    model = graphir.place(deep(), (X,))
    assert not hasattr(model, "hf_device_map") and model.placement.device_map == {"": 0}


def test_files_have_the_plain_class() -> None:
    model = net()
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert type(loaded) is Net and same(loaded, model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is Net
    assert b"graphir" not in pickle.dumps(model)


def test_a_copy_is_placed_and_has_captured_nothing() -> None:
    model = net()
    other = copy.deepcopy(model)
    assert other.placement is not model.placement and not other.placement.plans
    assert next(other.parameters()) is not next(model.parameters())
    found, expected = other(X), model(X)
    assert torch.equal(found["out"], expected["out"]) and other.placement.plans


def test_undo() -> None:
    model = net()
    model.placement.undo()
    assert type(model) is Net and not hasattr(model, "placement") and not hasattr(model, "hf_device_map")
    graphir.place(model, (X,))


def test_the_model_is_let_go() -> None:
    model = net()
    tensor = weakref.ref(model.first.weight)
    placement = model.placement
    del model
    gc.collect()
    assert tensor() is None
    with pytest.raises(graphir.GraphirError):
        placement.memory()


def test_to_another_device_moves_nothing_and_says_so_once() -> None:
    model = net()
    with pytest.warns(graphir.EagerWarning, match="its tensors stay on their devices") as said:
        model._apply(lambda tensor: tensor.to("cpu"))
        nn.Sequential(model)._apply(_elsewhere)
        model._apply(_elsewhere)
    assert len(said) == 1
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def _elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that says that it is on a card, which is not here."""

    class Elsewhere(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

    return tensor.detach().as_subclass(Elsewhere)


def test_hooks_on_the_model_are_called_and_a_set_forward_stays_around() -> None:
    model, called = net(), []
    model.register_forward_hook(lambda *_: called.append("hook"))
    forward = model.forward

    def around(*args: object, **kwargs: object) -> object:
        called.append("around")
        return forward(*args, **kwargs)

    model.forward = around  # type: ignore[method-assign]
    model(X)
    model(X)
    assert called == ["around", "hook"] * 2 and len(model.placement.plans) == 2


def test_hooks_inside_run_the_models_own_code() -> None:
    model, called = net(), []
    model.second.register_forward_hook(lambda *_: called.append(1))
    with pytest.warns(graphir.EagerWarning, match="a module inside of it has hooks") as said:
        model(X)
        model(X)
    assert len(said) == 1 and called == [1, 1]


def test_hooks_of_all_modules_run_the_models_own_code() -> None:
    model = net()
    eager = model(X)["out"]
    handle = register_module_forward_hook(lambda module, _, out: out * 2 if isinstance(module, nn.Linear) else None)
    try:
        with pytest.warns(graphir.EagerWarning, match="hooks are set for all modules"):
            assert not torch.equal(model(X)["out"], eager)
        with pytest.raises(graphir.CaptureError, match="place: hooks are set for all modules"):
            graphir.place(deep(), (X,))
    finally:
        handle.remove()
    assert torch.equal(model(X)["out"], eager)


def test_an_optimizer_made_before() -> None:
    torch.manual_seed(0)
    eager = deep()
    model = copy.deepcopy(eager)
    optimizer = torch.optim.AdamW(model.parameters())
    graphir.place(model, (X,), optimizer=optimizer)
    assert "optimizer's step" in str(model.placement.memory())
    assert trained(model) == trained(eager)


def test_memory_says_what_is_not_counted() -> None:
    model = graphir.place(deep(), (X,))
    held = model.placement.memory()
    assert list(held.phases) == ["forward", "backward"]
    assert str(held).endswith("your optimizer: not counted\n  your loss: not counted")


def test_a_step_with_its_loss() -> None:
    torch.manual_seed(0)
    eager, y = deep(), torch.randint(5, (16,))
    model = copy.deepcopy(eager)
    options = {"loss": nn.functional.cross_entropy, "targets": (y,), "optimizer": "AdamW"}
    alone = graphir.place(copy.deepcopy(eager), (X,), **options)
    limits = {device: int(0.7 * alone.placement.memory().peak["gpu:0"]) for device in range(2)}
    graphir.place(model, (X,), limits=limits, topology="h200x8", **options)
    held = model.placement.memory()
    assert list(held.phases) == ["forward", "backward", "whole step", "optimizer's step"] and not held.notes
    assert trained(model) == trained(eager)


@pytest.mark.parametrize("reserve", ["5%", "12.5 %", 0, 3000, "2 KiB"])
def test_what_is_reserved_stays_free(reserve: int | str) -> None:
    limits = tight(deep(), (X,), optimizer="AdamW", share=0.75)
    model = graphir.place(deep(), (X,), limits=limits, topology="cpu", optimizer="AdamW", reserve=reserve)
    held = model.placement.memory()
    assert held.limits == limits and ("of this, reserve" in str(held)) == (reserve != 0)
    free = {"5%": 0.05 * limits["gpu:0"], "12.5 %": limits["gpu:0"] / 8, "2 KiB": 2048}.get(reserve, reserve)
    assert held.reserve["gpu:0"] == math.ceil(free)
    assert all(nbytes <= limits[device] - held.reserve[device] for device, nbytes in held.peak.items())


@pytest.mark.parametrize("reserve", [0, "20%"])
def test_limits_of_a_refusal_work(reserve: int | str) -> None:
    options = {"topology": "cpu", "optimizer": "AdamW", "reserve": reserve}
    model = graphir.place(deep(), (X,), optimizer="AdamW")
    alone = max(model.placement.memory().peak.values())
    with pytest.raises(PassError) as told:
        graphir.place(deep(), (X,), limits={"gpu:0": alone // 4, "gpu:1": alone // 4}, **options)
    assert told.value.where == ("place, which leaves 20% of each limit free (reserve)" if reserve else "")
    found = re.match(r"limits=(\{.*?\}) works; or name more devices", told.value.fix)
    assert found is not None
    limits = ast.literal_eval(found[1])
    model = graphir.place(deep(), (X,), limits=limits, **options)
    held = model.placement.memory()
    assert all(nbytes <= limits[device] - held.reserve[device] for device, nbytes in held.peak.items())


def test_a_placed_model_is_captured_as_the_plain_one(recwarn: pytest.WarningsRecorder) -> None:
    model, plain = net(), copy.deepcopy(Net())
    program, other = graphir.capture(model, (X,)), graphir.capture(plain, (X,))
    assert [op.type for op in program.step.ops] == [op.type for op in other.step.ops] and not recwarn.list


def test_bad_input_leaves_the_model_as_it_was() -> None:
    cases = [
        (Net(), {"device_map": MAP, "limits": {"gpu:0": "1 GiB"}}, PassError, "both given"),
        (Net(), {"device_map": {"firts": 0}}, PassError, "did you mean 'first'"),
        (Net(), {"device_map": {"first": "disk"}}, PassError, "on disk"),
        (Net(), {"device_map": 3}, PassError, "not a dict"),
        (Net(), {"limits": {"gpu:0": 1000}}, PassError, "no placement within the limits"),
        (Net(), {"limits": {0: "1 GiB"}, "reserve": "all"}, PassError, "neither a part of limits nor bytes"),
        (Net(), {"limits": {0: "1 GiB"}, "reserve": "100%"}, PassError, "neither a part of limits nor bytes"),
        (Net(), {"limits": {0: "1 GiB"}, "reserve": -1}, PassError, "neither a part of limits nor bytes"),
        (Net(), {"limits": {0: "1 GiB"}, "reserve": "1 GiB"}, PassError, "leaves nothing of the limit of gpu:0"),
        (Net(), {"limits": "auto", "reserve": "10%"}, PassError, "leaves 5 % of what is free"),
        (Net(), {"device_map": MAP, "reserve": 0}, PassError, "within limits"),
        (Net(), {"optimizer": "Adamw2"}, CaptureError, "is no optimizer"),
        (Sized(), {}, CaptureError, "cannot be that of a placed model"),
        (nn.Sequential(nn.LazyLinear(4)), {}, CaptureError, "no shape yet"),
        (torch.jit.trace(nn.Linear(8, 8), X), {}, CaptureError, ""),
    ]
    for model, options, error, text in cases:
        before = type(model)
        with pytest.raises(error, match=text):
            graphir.place(model, (X,), **options)
        assert type(model) is before
    for arguments in [(X,), ((X,), [1]), ((torch.randn(16, 3),),)]:
        with pytest.raises(CaptureError):
            graphir.place(Net(), *arguments)
    with pytest.raises(CaptureError, match="is placed already"):
        graphir.place(net(), (X,))
