"""What no program can express is refused: with the module, the line and a remedy; and everything is as it was."""

from __future__ import annotations

import copy
import inspect
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from refusing import GLOBAL, READS, SHAPE, Cases, Net, Subclass, foreign, nothing_left_behind
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

pytestmark = pytest.mark.usefixtures("few_objects")

HERE = Path(__file__).name
SPARSE = torch.eye(6).to_sparse()
QUANTIZED = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).eval().requires_grad_(False)
CASES = Cases()
refused = CASES.refused


# Numbers of tensors


@refused(READS)
def item(m: Any, h: Tensor) -> Tensor:
    return h * h.sum().item()  # here


@refused(READS)
def as_float(m: Any, h: Tensor) -> Tensor:
    return h * float(h.sum())  # here


@refused(READS)
def as_int(m: Any, h: Tensor) -> Tensor:
    return h[: int(h.sum())]  # here


@refused(READS)
def as_bool(m: Any, h: Tensor) -> Tensor:
    return h * bool(h.sum() > 0)  # here


@refused(READS)
def branch(m: Any, h: Tensor) -> Tensor:
    h = h * 2
    if h.sum() > 0:  # here
        return h
    return -h


@refused(READS)
def as_list(m: Any, h: Tensor) -> Tensor:
    return h * h.sum(0).tolist()[0]  # here


@refused(".tolist() reads numbers out of a tensor, so the step depends on data")
def list_of_what_holds_data(m: Any, h: Tensor) -> Tensor:
    return h * m.tables[0].tolist()[0]  # here


@refused(".numpy() reads numbers out of a tensor, so the step depends on data")
def as_numpy(m: Any, h: Tensor) -> Tensor:
    return h * float(h.detach().numpy().sum())  # here


@refused(".__array__() reads numbers out of a tensor, so the step depends on data")
def numpy_of_what_holds_data(m: Any, h: Tensor) -> Tensor:
    return h * float(numpy.asarray(GLOBAL)[0])  # here


@refused(".__format__() reads numbers out of a tensor, so the step depends on data")
def formatted(m: Any, h: Tensor) -> Tensor:
    return h * float(f"{h.sum():.3f}")  # here


@refused("aten.equal.default reads a number out of a tensor")
def equal(m: Any, h: Tensor) -> Tensor:
    return h if torch.equal(h, h + 1) else -h  # here


@refused("use torch.fft.irfft and F.fold")
def inverse_of_a_spectrogram(m: Any, h: Tensor) -> Tensor:
    window = torch.hann_window(4)
    spectrum = torch.stft(h.flatten(), 4, 1, window=window, return_complex=True)
    return torch.istft(spectrum, 4, 1, window=window * m.scale).view(6, 4)  # here


@refused(READS)
def caught(m: Any, h: Tensor) -> Tensor:
    try:
        return h * h.sum().item()  # here
    except Exception:
        return h


# Shapes and branches that depend on data


@refused(f"the shape of aten.nonzero.default's {SHAPE}")
def nonzero(m: Any, h: Tensor) -> Tensor:
    return h[h.nonzero()[:, 0]]  # here


@refused(f"the shape of aten.masked_select.default's {SHAPE}")
def masked_select(m: Any, h: Tensor) -> Tensor:
    return h * h.masked_select(h > 0).sum()  # here


@refused("a boolean mask selects an unknown number of elements")
def mask(m: Any, h: Tensor) -> Tensor:
    return h * h[h > 0].sum()  # here


@refused(SHAPE)
def unique(m: Any, h: Tensor) -> Tensor:
    return h * len(torch.unique(h))  # here


@refused("run the padded sequences, and mask the padding")
def packed(m: Any, h: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pack_padded_sequence(h[:, None], h[:1, 0].long()).data  # here


@refused(f"the shape of aten.repeat_interleave.Tensor's {SHAPE}")
def repeat_interleave(m: Any, h: Tensor) -> Tensor:
    return h * torch.repeat_interleave(h, torch.arange(6), dim=0).sum()  # here


@refused("PyTorch computes the gradient of prod in two ways, depending on whether the data contain zeros")
def product(m: Any, h: Tensor) -> Tensor:
    return h * h.prod(1, keepdim=True)  # here


@refused("cond can't be captured: which branch runs depends on data")
def cond(m: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, torch.sin, torch.cos, (h,))  # here


@refused("can't be captured: which branch runs depends on data")
def loop(m: Any, h: Tensor) -> Tensor:
    (h,) = while_loop(lambda x: x.sum() < 9, lambda x: (x + 1,), (h,))  # here
    return h


@refused("map_impl is a higher-order operator, and programs have no operators that take functions")
def mapped(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return map_rows(torch.tanh, h)  # here


@refused("reentrant checkpointing runs a backward of its own inside the backward\n")
def reentrant(m: Any, h: Tensor) -> Tensor:
    return checkpoint(torch.sin, h, use_reentrant=True)  # here


# Random numbers that are not torch's


@refused("the step draws from Python's random", module="")
def layer_drop(m: Any, h: Tensor) -> Tensor:
    for _ in range(2):
        if random.uniform(0, 1) < 0.5:
            h = h * 2
    return h


@refused("the step draws from numpy.random", module="")
def drawn_by_numpy(m: Any, h: Tensor) -> Tensor:
    return h * numpy.random.rand()


@refused("the step differs when it is run again: argument other of aten.mul.Tensor was")
def drawn_by_a_generator_of_pythons(m: Any, h: Tensor) -> Tensor:
    return h * m.python.random()  # here


@refused("the step differs when it is run again: argument other of aten.mul.Tensor was")
def drawn_by_a_generator_of_numpys(m: Any, h: Tensor) -> Tensor:
    return h * float(m.numpy.random())  # here


@refused("the step calls torch.manual_seed")
def seeded_inside(m: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return F.dropout(h)


# Kinds of tensors and operators


@refused("aten._to_sparse.default makes a sparse_coo tensor")
def sparse(m: Any, h: Tensor) -> Tensor:
    return torch.sparse.mm(h.to_sparse(), h.t())[:, :1] + h  # here


@refused("the first step of a per-channel fake quantization resizes the statistics")
def fake_quantized(m: Any, h: Tensor) -> Tensor:
    lowest, highest, scale, zero = torch.empty(0), torch.empty(0), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    on = torch.ones(1, dtype=torch.int64)
    observed = (h, on, on, lowest, highest, scale, zero)
    return torch.fused_moving_avg_obs_fake_quant(*observed, 0.01, -128, 127, 0, True)  # here


@refused("the step reads a sparse_coo tensor of shape [6, 6]")
def sparse_from_elsewhere(m: Any, h: Tensor) -> Tensor:
    return torch.sparse.mm(SPARSE, h)  # here


@refused("a tensor of type torch.qint8 is not supported")
def quantized_from_elsewhere(m: Any, h: Tensor) -> Tensor:
    return h + QUANTIZED.dequantize()  # here


@refused("torch.qint8 is not supported")
def quantized(m: Any, h: Tensor) -> Tensor:
    return h + torch.quantize_per_tensor(h.detach(), 0.1, 0, torch.qint8).dequantize()  # here


@refused("torch can't tell the shape of aten._nested_tensor_from_tensor_list.default's result")
def nested(m: Any, h: Tensor) -> Tensor:
    return h + torch.nested.nested_tensor([h.detach()]).to_padded_tensor(0.0)[0]  # here


@refused("nn.TransformerEncoder makes nested tensors of the positions that a mask keeps")
def nested_by_a_mask(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        return h + ENCODER(h[None], src_key_padding_mask=torch.zeros(1, 6, dtype=torch.bool))[0]  # here


@refused("zero tangents of forward-mode AD are tensors without memory")
def zero_tangent(m: Any, h: Tensor) -> Tensor:
    derivative: Tensor = torch.func.jvp(lambda y: torch.cat([y, m.fc.bias.detach()[None]]), (h,), (h,))[1]  # here
    return derivative


@refused("a tensor of type Subclass is not supported")
def subclassed(m: Any, h: Tensor) -> Tensor:
    return h + m.subclass  # here


@refused("a tensor of type Subclass is not supported")
def made_a_subclass(m: Any, h: Tensor) -> Tensor:
    return h.as_subclass(Subclass) * 2  # here


@refused("a tensor of type CausalBias is not supported")
def causal_bias(m: Any, h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, attn_mask=causal_lower_right(6, 6))  # here


@refused("the step moves a tensor into shared memory")
def shared(m: Any, h: Tensor) -> Tensor:
    return h.share_memory_()  # here


@refused("operator graphir_tests.foreign.default is not one of torch's own")
def foreign_operator(m: Any, h: Tensor) -> Tensor:
    return h + foreign(h)  # here


# Traces


TRACED = "the step traces a function, as make_fx, torch.func.linearize and operators such as cond and scan do"


@refused(TRACED)
def linearized(m: Any, h: Tensor) -> Tensor:
    _, derivative = torch.func.linearize(torch.tanh, h)  # here
    return derivative(torch.ones(h.shape))


@refused(TRACED)
def traced(m: Any, h: Tensor) -> Tensor:
    return make_fx(torch.tanh)(h * 2)(h)  # here


@refused("a tensor of shape [4] whose origin capture has not seen")
def scanned(m: Any, h: Tensor) -> Tensor:
    _, products = scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), h)  # here
    return products


# Settings and failures


@refused("the step changes the default dtype for everything that runs after the step", module="")
def other_default_dtype(m: Any, h: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return h * 2


@refused("the step changes the grad mode for everything that runs after the step", module="")
def no_gradients_from_here(m: Any, h: Tensor) -> Tensor:
    h = h * 2
    torch.set_grad_enabled(False)
    return h


@refused("the step switches oneDNN for aten.gelu.default, which then rounds differently")
def another_kernel(m: Any, h: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        return F.gelu(h)  # here


@refused("the step switches oneDNN for aten.mm.default, which then rounds differently")
def another_product(m: Any, h: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=not torch.backends.mkldnn.enabled):
        return h + (h @ h.mT).bfloat16() @ h.bfloat16()  # here


@refused("the step failed while it was recorded: KeyError: 'missing'")
def failed(m: Any, h: Tensor) -> Tensor:
    m.cache["h"] = h
    torch.set_default_dtype(torch.float64)
    raise KeyError("missing")  # here


@refused("the step copies a tensor with Python's copy module, which a program does not repeat")
def copied_deeply(m: Any, h: Tensor) -> Tensor:
    return copy.deepcopy(m.fc)(h)  # here


@refused("a and b must have same reduction dim")
def wrong_shapes(m: Any, h: Tensor) -> Tensor:
    return h @ torch.zeros(3, 3)  # here


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:.*quantiz:UserWarning")
def test_refused_with_module_line_and_remedy(case: str) -> None:
    CASES[case].check()


def test_an_interrupted_capture_leaves_nothing_behind() -> None:
    def interrupt(m: Any, h: Tensor) -> Tensor:
        m.seen.append(h)
        m.counter.add_(1)
        torch.set_grad_enabled(False)
        raise KeyboardInterrupt

    net = Net(interrupt)
    with nothing_left_behind(net), pytest.raises(KeyboardInterrupt):
        capture(net, (torch.ones(6, 4),), loss=lambda out: out.sum())


def test_a_capture_leaves_nothing_behind() -> None:
    net = Net(lambda m, h: F.dropout(h) + m.counter.add_(1))
    with nothing_left_behind(net):
        capture(net, (torch.ones(6, 4),), loss=lambda out: out.sum())


def test_the_backward_of_a_user_and_the_loss_are_refused_with_their_lines() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * gradient.sum().item()

    def loss(out: Tensor) -> Tensor:
        return out.sum() * out.max().item()

    line = inspect.getsourcelines(Scaled.backward)[1] + 2
    with pytest.raises(CaptureError) as error:
        capture(Net(lambda m, h: Scaled.apply(h)), (torch.ones(6, 4),), loss=lambda out: out.sum())
    assert error.value.where == f"module 'inner', at {HERE}:{line}"
    line = inspect.getsourcelines(loss)[1] + 1
    with pytest.raises(CaptureError) as error:
        capture(Net(lambda m, h: h), (torch.ones(6, 4),), loss=loss)
    assert error.value.where == f"the loss function, at {HERE}:{line}"


def test_printing_is_no_reading(capsys: pytest.CaptureFixture[str]) -> None:
    def show(m: Any, h: Tensor) -> Tensor:
        print(h, m.fc.weight, m.scale, h.sum())
        return h

    program = capture(Net(show), (torch.ones(6, 4),), loss=lambda out: out.sum())
    assert not any(blob.role == "constant" for blob in program.step.blobs.values())
    assert "FakeTensor" in capsys.readouterr().out


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        raise RuntimeError


def test_a_backward_that_fails_without_a_word_is_refused() -> None:
    net = Net(lambda m, h: Fails.apply(h))
    with nothing_left_behind(net), pytest.raises(CaptureError, match=r"^the backward failed .*: RuntimeError\n  in "):
        capture(net, (torch.ones(6, 4),), loss=torch.sum)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_an_encoder_that_packs_what_a_mask_leaves_is_refused_with_a_remedy() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder, inputs = nn.TransformerEncoder(layer, 1).eval(), (torch.ones(2, 6, 4),)
    mask = {"src_key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}
    with pytest.raises(
        CaptureError, match=r"nested tensors of the positions that a mask .*\n.*\n.* use_nested_tensor "
    ):
        capture(encoder, inputs, kwargs=mask)
    encoder.use_nested_tensor = False
    assert capture(encoder, inputs, kwargs=mask)
