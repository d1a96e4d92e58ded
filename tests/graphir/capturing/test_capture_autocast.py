"""Steps under autocast for CUDA, captured on the host: what is cast, for which target, and what is refused."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asked_casts import Noted, autocast_of_cuda
from direct import matches_eager
from models import Example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphir
from graphir.capturing.capture import capture
from graphir.capturing.isolate.global_state import open_regions
from graphir.errors import CaptureError, TrainingWarning
from graphir.ir.program import Program

pytestmark = pytest.mark.usefixtures("few_objects")

X = torch.linspace(-1, 1, 12).view(3, 4)
TARGET = torch.tensor([0, 1, 3])


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cuda", torch.bfloat16, **options)


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm, self.body = nn.Linear(4, 4), nn.LayerNorm(4), body
        self.lstm, self.gru = nn.LSTM(4, 4), nn.GRU(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def program_of(body: Callable[[Any, Tensor], Any], **options: Any) -> Program:
    return capture(Net(body), (X,), **options)


def made(program: Program, *names: str) -> list[str]:
    """The element types of what operators with these names make."""
    blobs = program.step.blobs
    return [str(blobs[op.outputs[0]].dtype) for op in program.step.ops if op.type.split(".")[1] in names]


def region(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return m.fc(x)


def by_hand(m: Any, x: Tensor) -> Tensor:
    """``whole`` with the casts written out, each weight's once."""
    weight, bias = m.fc.weight.bfloat16(), m.fc.bias.bfloat16()
    hidden = F.gelu(F.linear(x.bfloat16(), weight, bias))
    hidden = F.linear(hidden, weight, bias)
    normal = F.layer_norm(hidden.float(), (4,), m.norm.weight, m.norm.bias)
    scores = F.softmax(normal.bfloat16() @ hidden.t(), -1, dtype=torch.float32)
    mixed = torch.einsum("ij,jk->ik", scores.bfloat16(), hidden)
    return F.linear(mixed, weight, bias) + hidden.sum(0, dtype=torch.float32).exp().cumsum(0).log()


def whole(m: Any, x: Tensor) -> Tensor:
    with bf16():
        hidden = m.fc(F.gelu(m.fc(x)))
        scores = F.softmax(m.norm(hidden) @ hidden.t(), -1)
        return m.fc(torch.einsum("ij,jk->ik", scores, hidden)) + hidden.sum(0).exp().cumsum(0).log()


def loss(out: Tensor, target: Tensor) -> Tensor:
    with bf16():
        return F.cross_entropy(out, target)


def loss_by_hand(out: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(out, -1), target)


@pytest.mark.parametrize("in_regions", [True, False], ids=["in the step", "around the capture"])
def test_losses_gradients_and_updates_have_the_bits_of_the_casts_by_hand(in_regions: bool) -> None:
    def adamw(params: Any, **form: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.1, **form)

    model = Net(whole)
    with contextlib.nullcontext() if in_regions else torch.autocast("cpu", torch.bfloat16):
        optimizer = adamw(model.parameters())
        program = capture(model, (X,), targets=(TARGET,), loss=loss, optimizer=optimizer, target="cuda")
    example = Example(Net(by_hand), (X,), (TARGET,), loss_by_hand)
    matches_eager(program, example, lambda params: adamw(params, foreach=True))
    weights = [op for op in program.step.ops if op.type == "aten._to_copy.default" and "fc.weight" in op.inputs]
    assert len(weights) == 1
    assert set(made(program, "_softmax", "exp", "cumsum")) == {"f32"}


def nested(m: Any, x: Tensor) -> Tensor:
    with bf16():
        low = m.fc(x)
        with bf16(enabled=False):
            full = m.fc(low.float())
        with torch.autocast(x.device.type, enabled=False):  # as rotary embeddings write it
            full = m.fc(full)
        with torch.autocast(x.device.type, torch.bfloat16):
            return m.fc(full)


def other_type(m: Any, x: Tensor) -> Tensor:
    with bf16():
        half = x @ x.t()
        with torch.autocast("cuda", torch.float16):
            return half @ x


def without_cache(m: Any, x: Tensor) -> Tensor:
    with bf16(cache_enabled=False):
        return m.fc(m.fc(x))


def legacy(m: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.cuda.amp.autocast(dtype=torch.bfloat16):
            return m.fc(x)


def checkpointed(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return checkpoint(lambda x: m.fc(m.fc(x)), x, use_reentrant=False)


def decorated(m: Any, x: Tensor) -> Tensor:
    return bf16()(m.fc)(x)


def of_a_device(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda:0", torch.bfloat16):
        return m.fc(x)


def switched(m: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled(device_type="cuda", enabled=True)
    torch.set_autocast_dtype(device_type="cuda", dtype=torch.bfloat16)
    out = m.fc(x)
    torch.set_autocast_enabled(device_type="cuda", enabled=False)
    torch.set_autocast_dtype(device_type="cuda", dtype=torch.float16)
    return out


def without_gradient_first(m: Any, x: Tensor) -> Tensor:
    with bf16():
        with torch.no_grad():
            first = m.fc(x)
        return m.fc(x + first)


class Squared(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad + grad.t()) @ x.float()


def custom(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return Squared.apply(m.fc(x).float())  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize(
    ("body", "products"),
    [
        (region, ["bf16"]),
        (nested, ["bf16", "f32", "f32", "bf16"]),
        (other_type, ["bf16", "f16"]),
        (without_cache, ["bf16"] * 2),
        (legacy, ["bf16"]),
        (checkpointed, ["bf16"] * 2),
        (decorated, ["bf16"]),
        (of_a_device, ["bf16"]),
        (switched, ["bf16"]),
        (without_gradient_first, ["bf16"] * 2),
        (custom, ["bf16"] * 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_regions_are_followed_as_on_cuda(body: Callable[..., Any], products: list[str]) -> None:
    program = program_of(body, target="cuda")
    assert made(program, "addmm", "mm") == products
    assert program == program_of(body)  # the target that it has by itself


def test_autocast_for_the_host_takes_the_element_types_of_cuda_s() -> None:
    def single(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.float32):  # which the host's autocast does not take
            return m.fc(x.bfloat16())

    assert made(program_of(single, target="cuda"), "addmm") == ["f32"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_region_around_the_capture_is_for_the_forward_alone(target: str) -> None:
    def double(m: Any, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return m.fc(x).sum()

    with torch.autocast("cpu", torch.bfloat16):
        program = program_of(double, loss=lambda out: out, target=target)
        joint = program_of(double, backward=True, target=target)
    assert set(made(program, "addmm", "mm", "sum")) == {"f32"}
    assert made(joint, "mm") == ["f32"]


def test_gradients_are_clipped_outside_of_a_region_around_the_capture() -> None:
    model = Net(lambda m, x: m.fc(x)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        program = capture(model, (X.bfloat16(),), loss=lambda out: out.float().sum(), clip_grad_norm=1.0, target="cuda")
    assert set(made(program, "linalg_vector_norm")) == {"bf16"}


def test_a_custom_backward_has_the_autocast_of_its_forward() -> None:
    program = program_of(custom, loss=lambda out: out.float().sum())
    assert made(program, "mm").count("bf16") > 2


def test_a_checkpoint_is_repeated_with_the_casts_of_its_forward() -> None:
    program = program_of(checkpointed, loss=lambda out: out.float().sum())
    assert made(program, "addmm") == ["bf16"] * 3  # the last is not needed again


def test_a_weight_that_was_cast_without_gradients_first_has_its_gradient() -> None:
    program = program_of(without_gradient_first, loss=lambda out: out.float().sum())
    assert {"fc.weight", "fc.bias"} <= program.interface.gradients.keys()


def test_each_region_casts_a_weight_once_again() -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        return region(m, region(m, x) + region(m, x))

    casts = [op for op in program_of(twice).step.ops if op.inputs == ("fc.weight",) and op.type.startswith("aten._to")]
    assert len(casts) == 3


def asks(m: Any, x: Tensor) -> Tensor:
    found = [torch.is_autocast_enabled("cuda"), torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")]
    with bf16():
        found += [not torch.is_autocast_enabled("cuda"), not torch.is_autocast_enabled("cpu")]
        found += [torch.get_autocast_dtype(kind) != torch.bfloat16 for kind in ("cuda", "cpu")]
        found += [not torch.is_autocast_enabled(device_type="cpu")]
        found += [torch.get_autocast_dtype(device_type="cpu") != torch.bfloat16]
    assert not any(found)
    return region(m, x)


def test_the_step_is_told_of_autocast_what_it_is_on_cuda() -> None:
    program_of(asks)


@pytest.mark.parametrize(
    ("module", "said"),
    [(nn.RMSNorm(4), "RMSNorm: "), (nn.GRUCell(4, 4), "cells: "), (nn.GRU(4, 4), "recurrent modules: ")],
)
def test_modules_that_cuda_computes_by_other_kernels_are_a_caveat(module: nn.Module, said: str) -> None:
    program = graphir.capture(module, (torch.randn(2, 4),), target="cuda")
    assert [caveat for caveat in program.caveats if caveat.startswith(said)]
    assert not graphir.capture(module, (torch.randn(2, 4),)).caveats


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_nets_are_cast_as_a_whole(name: str) -> None:
    def recurrent(m: Any, x: Tensor) -> Tensor:
        with bf16():
            out, _ = getattr(m, name)(x[:, None])
        return out  # type: ignore[no-any-return]

    before = torch.backends.mkldnn.enabled
    program = program_of(recurrent)
    assert set(made(program, "addmm", "mm", "sigmoid", "tanh", "stack", "cat")) == {"bf16"}
    assert any(caveat.startswith("recurrent modules:") for caveat in program.caveats)
    assert torch.backends.mkldnn.enabled == before


def test_attention_is_cast_with_its_mask() -> None:
    def attend(m: Any, x: Tensor) -> Tensor:
        with bf16():
            return F.scaled_dot_product_attention(
                x[None, None], m.fc(x)[None, None], x[None, None], attn_mask=x @ x.t()
            )

    program = program_of(attend)
    (op,) = [op for op in program.step.ops if op.type == "graphir.attention"]
    assert {str(program.step.blobs[name].dtype) for name in op.inputs} == {"bf16"}


# The target.


def test_the_default_is_the_host_where_no_autocast_for_cuda_is_entered() -> None:
    def off(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return m.fc(x)

    assert program_of(off) == program_of(lambda m, x: m.fc(x))
    assert program_of(off).caveats == ()


def test_the_host_as_the_target_has_no_casts_for_cuda() -> None:
    with pytest.warns(UserWarning, match="CUDA is not available"):
        assert made(program_of(region, target="cpu"), "addmm") == ["f32"]


def test_autocast_around_the_capture_is_the_target_s() -> None:
    plain: Callable[..., Any] = lambda m, x: m.fc(x)  # noqa: E731
    with autocast_of_cuda(torch.bfloat16):
        around = program_of(plain)
        assert made(program_of(plain, target="cpu"), "addmm") == ["f32"]
    assert made(around, "addmm") == ["bf16"] and around.caveats
    with torch.autocast("cpu", torch.bfloat16):
        assert program_of(plain, target="cuda") == around
        assert torch.stack([X, X.bfloat16()]).dtype == torch.float32
    assert F.linear(X, X).dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    with torch.autocast("cpu", torch.bfloat16):
        assert program_of(plain).caveats == ()


def test_what_is_asked_before_the_first_region_is_cuda_s_too() -> None:
    def asked(m: Any, x: Tensor) -> Tensor:
        return region(m, x.to(torch.get_autocast_dtype(x.device.type)))

    assert program_of(asked) == program_of(asked, target="cuda")
    assert made(program_of(asked), "_to_copy")[0] == "f16"


def test_a_later_recording_is_for_the_same_target() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        program = program_of(lambda m, x: m.norm(m.fc(x)), target="cuda")
    assert program.witness is not None
    program.witness({"batch": 5})
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("is_within", [True, False], ids=["captured within a region", "recorded again within one"])
def test_a_later_recording_keeps_casts_for_as_long(is_within: bool, target: str) -> None:
    """Within a region torch keeps what it has cast of a weight from one inner region to the next."""

    def inner(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            with torch.autocast(x.device.type, torch.bfloat16):
                x = m.fc(x)
        return x

    around = [contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)]
    with around[is_within]:
        program = program_of(inner, target=target)
    assert len([op for op in program.step.ops if op.inputs == ("fc.weight",)]) == (1 if is_within else 2)
    assert program.witness is not None
    with around[not is_within]:
        program.witness({"batch": 5})


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:.*but CUDA is not available")
def test_an_autocast_for_cuda_around_the_capture_that_torch_has_switched_off_is_told() -> None:
    plain: Callable[..., Any] = lambda m, x: m.fc(x)  # noqa: E731
    with bf16():
        with pytest.warns(TrainingWarning, match="within a torch.autocast for CUDA that casts nothing: without a GPU"):
            assert program_of(plain).caveats == ()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            program_of(plain, target="cpu")
            with torch.autocast("cpu", torch.bfloat16):
                program_of(plain, target="cuda")


def test_autocast_of_the_host_is_what_it_was() -> None:
    def stacked(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([m.fc(x), x])

    program = program_of(stacked)
    assert made(program, "stack") == ["f32"] and made(program, "addmm") == ["bf16"] and program.caveats == ()


# Optimizers.


@pytest.mark.parametrize(
    ("options", "form"),
    [({}, "foreach"), ({"foreach": False}, "for_loop"), ({"fused": True}, "fused"), ({"fused": False}, "for_loop")],
    ids=str,
)
def test_an_optimizer_that_names_no_form_has_cuda_s(options: dict[str, bool], form: str) -> None:
    def form_for(target: str) -> set[Any]:
        model = Net(lambda m, x: m.fc(x).sum())
        optimizer = torch.optim.Adam(model.parameters(), **options)
        net = capture(model, (X,), loss=lambda out: out, optimizer=optimizer, target=target).step
        return {op.args.get("form", "for_loop") for op in net.ops if op.phase == "update"}

    assert form_for("cuda") == {form}
    assert form_for("cpu") == {"for_loop" if form == "foreach" else form}


# What is left behind, and who sees the casts.


def test_nothing_is_left_where_a_capture_ends_within_a_region() -> None:
    def interrupted(m: Any, x: Tensor) -> Tensor:
        with bf16():
            m.fc(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program_of(interrupted)
    assert not torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.float16
    assert F.linear(X, X).dtype == torch.float32 and torch.autocast.__init__.__module__ == "torch.amp.autocast_mode"


def test_a_region_that_the_step_leaves_open_is_closed() -> None:
    def opened(m: Any, x: Tensor) -> Tensor:
        bf16().__enter__()
        return m.fc(x)

    before = str(torch._C._dispatch_tls_local_include_set())
    with pytest.raises(CaptureError, match="the step changes autocast on CUDA"):
        program_of(opened)
    assert open_regions() == 0
    assert str(torch._C._dispatch_tls_local_include_set()) == before
    assert F.linear(X, X).dtype == torch.float32 and not torch.is_autocast_enabled("cuda")


def test_a_region_that_the_step_closes_is_opened_again() -> None:
    def closing(m: Any, x: Tensor) -> Tensor:
        torch.autocast_decrement_nesting()
        return m.fc(x)

    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(CaptureError, match="the step changes the number of open autocast regions"):
            program_of(closing)
        assert open_regions() == 1


def test_another_thread_keeps_what_it_has_cast() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    noted = Noted(passed=())
    with torch.autocast("cpu", torch.bfloat16):
        F.linear(X, weight)
        thread = threading.Thread(target=program_of, args=(region,))
        thread.start()
        thread.join()
        with noted:
            F.linear(X, weight)
    assert [name for name, _, _ in noted.operators].count("_to_copy") == 1  # of X


def test_another_thread_has_no_casts() -> None:
    found: list[Any] = []

    def other() -> None:
        found.append((F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype, torch.is_autocast_enabled("cuda")))

    def threaded(m: Any, x: Tensor) -> Tensor:
        with bf16():
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return m.fc(x)

    assert made(program_of(threaded), "addmm") == ["bf16"]
    assert set(found) == {(torch.float32, False)}


# What is refused.


@contextlib.contextmanager
def made_before() -> Iterator[torch.autocast]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield bf16()


def mixed(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        x = m.fc(x)
    return region(m, x)


def mixed_later(m: Any, x: Tensor) -> Tensor:
    x = region(m, x)
    with torch.autocast("cpu"):
        return m.fc(x)


def whole_numbers(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.int32):
        return m.fc(x)


def unsafe(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return F.binary_cross_entropy(m.fc(x).sigmoid(), x)


def inference(m: Any, x: Tensor) -> Tensor:
    with bf16(), torch.inference_mode():
        return m.fc(x)


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2


def casting(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return Cast.apply(m.fc(x))  # type: ignore[no-any-return, no-untyped-call]


@torch.library.custom_op("graphir_casts::product", mutates_args=())
def product(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


product.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
product.register_autocast("cuda", torch.bfloat16)


def casting_itself(m: Any, x: Tensor) -> Tensor:
    with bf16():
        return product(x, x.t())


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    graphir.register_operator(product, example=(X, X.t()))


@pytest.mark.parametrize(
    ("body", "what", "fix"),
    [
        (mixed, "under autocast for CUDA in one place and for the host in another", 'target="cuda"'),
        (mixed_later, "under autocast for CUDA in one place and for the host in another", 'target="cuda"'),
        (whole_numbers, "under autocast with dtype=torch.int32", "dtype=torch.bfloat16"),
        (unsafe, "calls binary_cross_entropy under autocast", "binary_cross_entropy_with_logits"),
        (inference, "enters inference mode under autocast for CUDA", "torch.no_grad()"),
        (casting, "custom_fwd with cast_inputs", "x.float()"),
        (casting_itself, "calls graphir_casts::product under autocast for CUDA", "enabled=False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused(body: Callable[..., Any], what: str, fix: str) -> None:
    with pytest.raises(CaptureError) as caught:
        program_of(body)
    assert what in caught.value.what and "test_capture_autocast.py:" in caught.value.where and fix in caught.value.fix
    assert not torch.is_autocast_enabled("cuda")


def test_both_kinds_of_regions_have_a_target_that_is_said() -> None:
    assert made(program_of(mixed, target="cuda"), "addmm") == ["f16", "bf16"]


def test_an_autocast_that_torch_has_switched_off_before_is_refused() -> None:
    with made_before() as before:

        def entered(m: Any, x: Tensor) -> Tensor:
            with before:
                return m.fc(x)

    with pytest.raises(CaptureError, match=r"a torch\.autocast for CUDA that was made outside of the step") as caught:
        program_of(entered)
    assert "in the forward" in caught.value.fix and "test_capture_autocast.py:" in caught.value.where
    assert made(program_of(entered, target="cpu"), "addmm") == ["f32"]


def test_another_target_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"target='tpu' is neither 'cpu' nor 'cuda'") as caught:
        program_of(region, target="tpu")
    assert 'target="cuda"' in caught.value.fix
