"""What a tensor holds or hides is no number or text of Python's: refused, unless it is only printed, or known."""

from __future__ import annotations

import builtins
import copy
import io
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from eager import assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn

from graphir.capturing.capture import capture
from graphir.errors import CaptureError

pytestmark = pytest.mark.usefixtures("few_objects")

PRINT = builtins.print
ELSEWHERE = torch.ones(3)
TEXT = "formatting a tensor as text reads numbers out of a tensor, so the step depends on data"
DATA = "reads numbers out of a tensor, so the step depends on data"
COPY = "the step copies a tensor with Python's copy module, which a program does not repeat"
Way = Callable[[Tensor], Any]

WAYS: dict[str, tuple[Way, str]] = {
    "str": (lambda t: len(str(t.sum())), TEXT),
    "repr": (lambda t: len(repr(t)), TEXT),
    "a look into the text": (lambda t: "nan" in str(t), TEXT),
    "format": (lambda t: len(format(t)), TEXT),
    "an f-string": (lambda t: len(f"{t}"), TEXT),
    "a part of an f-string": (lambda t: len(f"a {t} b"), TEXT),
    "the repr in an f-string": (lambda t: len(f"{t!r}"), TEXT),
    "a format": (lambda t: len(f"{t.sum():.3f}"), rf"\.__format__\(\) {DATA}"),
    "str.format": (lambda t: len("{} {}".format("a", t)), TEXT),
    "percent": (lambda t: len("%s" % t), TEXT),  # noqa: UP031
    "a list's text": (lambda t: len(str([t])), TEXT),
    "joined text": (lambda t: len("".join(map(str, (t, t)))), TEXT),
    "text, though it is printed as well": (lambda t: (print(text := str(t)), len(text))[1], TEXT),
    "a length that is printed": (lambda t: print(end="" if len(str(t)) else " ") or 1, TEXT),
    "text for a function of the step": (lambda t: print(f"{t}".upper(), end="") or 1, TEXT),
    "an f-string that is printed": (lambda t: print(f"{t}", end="") or 1, TEXT),
    "a format that is printed": (lambda t: print(f"{t.sum():.3f}", end="") or 1, rf"\.__format__\(\) {DATA}"),
    "str that is printed": (lambda t: print(str(t), end="") or 1, TEXT),
    "an f-string that is logged": (lambda t: logging.info(f"{t}") or 1, TEXT),
    "an object that looks at text as it is printed": (lambda t: print(Looks(t), end="") or 1, TEXT),
    "text that is printed and stored": (lambda t: print(text := f"{t}") or len(text), TEXT),
    "tolist": (lambda t: t.detach().tolist()[0], "out of a tensor, so the step depends on data"),
    "numpy": (lambda t: t.detach().numpy().sum(), rf"\.numpy\(\) {DATA}"),
    "numpy's asarray": (lambda t: numpy.asarray(t.detach()).sum(), rf"\.__array__\(\) {DATA}"),
    "numpy's from_dlpack": (lambda t: numpy.from_dlpack(t.detach()).sum(), rf"\.__dlpack__\(\) {DATA}"),
    "pickle": (lambda t: len(pickle.dumps(t.detach())), rf"\.__reduce_ex__\(\) {DATA}"),
    "torch.save": (lambda t: torch.save(t.detach(), io.BytesIO()) or 1, DATA),
    "a copy": (copy.copy, COPY),
    "a deep copy": (lambda t: copy.deepcopy(t.detach()), COPY),
    "a copy of what holds it": (lambda t: copy.deepcopy([t.detach()])[0], COPY),
    "the version": (lambda t: t._version, "the step asks how often a tensor was overwritten"),
    "shared memory": (lambda t: t.is_shared(), "the step asks whether a tensor is in shared memory"),
    "a storage's shared memory": (lambda t: t.untyped_storage().is_shared(), "asks whether a tensor is in shared mem"),
    "an address": (lambda t: t.data_ptr() % 64, "the step asks for the address of a tensor's data"),
    "a storage's address": (lambda t: t.untyped_storage().data_ptr() % 64, "asks for the address of a tensor's data"),
}  # fmt: skip


class Looks:
    """Something whose text depends on that of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __str__(self) -> str:
        return "nan" if "nan" in str(self.tensor) else ""


class Net(nn.Module):
    """Scales by what *way* makes of the tensor that *chosen* chooses."""

    def __init__(self, chosen: str, way: Way) -> None:
        super().__init__()
        self.fc, self.way, self.chosen = nn.Linear(3, 3), way, chosen
        self.register_buffer("mean", torch.ones(3))
        self.kept = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        tensors = {
            "activation": h,
            "input": x,
            "parameter": self.fc.weight,
            "buffer": self.mean,
            "attribute": self.kept,
            "tensor elsewhere": ELSEWHERE,
            "known": torch.arange(3.0),
        }
        return h * self.way(tensors[self.chosen])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("chosen", ["activation", "tensor elsewhere"])
def test_it_is_refused_with_module_line_and_remedy(chosen: str, name: str) -> None:
    way, text = WAYS[name]
    with pytest.raises(CaptureError, match=text) as error:
        capture(nn.Sequential(Net(chosen, way)), (torch.randn(4, 3),))
    assert error.value.where.startswith(f"module '0', at {Path(__file__).name}:") and error.value.fix
    assert len(repr(ELSEWHERE)) > 0 and ELSEWHERE.tolist() and ELSEWHERE._version == 0  # torch's own again


@pytest.mark.parametrize("chosen", ["input", "parameter", "buffer", "attribute"])
def test_of_whatever_tensor_it_is(chosen: str) -> None:
    for way, text in (WAYS["an f-string"], WAYS["the version"], WAYS["tolist"]):
        with pytest.raises(CaptureError, match=text):
            capture(Net(chosen, way), (torch.randn(4, 3),))


@pytest.mark.parametrize(
    "name", ["str", "repr", "an f-string", "a part of an f-string", "a format", "percent", "tolist"]
)
def test_what_is_known_has_its_own_text(name: str) -> None:
    model = Net("known", WAYS[name][0])
    program = capture(model, (torch.randn(4, 3),))
    assert not program.covers.fixed
    x = torch.randn(7, 3)
    with Session(emit(program), program.state) as session:
        assert_same_bits({"out": session.step(x)}, {"out": model(x).detach()}, name)


def test_printing_and_logging_are_harmless(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("step")
    handler = logging.StreamHandler(logged := io.StringIO())
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)  # pytest's handlers keep what they are given

    def written(t: Tensor) -> int:
        print(t)
        print("t", t, [t], {"t": t.sum()}, t.mean(), sep="\n", end="\n")
        log.warning("%s", t)
        return 2

    for chosen in ("activation", "buffer", "attribute", "known"):
        program = capture(Net(chosen, written), (torch.randn(4, 3),))
        assert not program.covers.fixed and [op.args for op in program.step.ops if op.type == "aten.mul.Tensor"] == [
            {"other": 2}
        ]
    assert builtins.print is PRINT
    out = capsys.readouterr().out
    assert "size=(4, 3)" in out and "tensor([0., 1., 2.])" in out and "size=(4, 3)" in logged.getvalue()


@pytest.mark.parametrize("chosen", ["activation", "buffer", "tensor elsewhere"])
def test_what_a_refused_copy_is_to_be_instead(chosen: str) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Net(chosen, WAYS["a copy"][0]), (torch.randn(4, 3),))
    assert error.value.fix.startswith("write tensor.clone() instead")
    assert not capture(Net(chosen, torch.clone), (torch.randn(4, 3),)).covers.fixed


def test_a_size_may_be_copied() -> None:
    model = Net("activation", lambda t: copy.copy(t.shape)[1])
    assert not capture(model, (torch.randn(4, 3),)).covers.fixed


def test_dimensions_that_a_tensor_elsewhere_holds_are_numbers_of_it() -> None:
    dims = torch.tensor([[0], [0]])
    with pytest.raises(CaptureError, match=f"tensordot {DATA}") as error:
        capture(Net("buffer", lambda t: torch.tensordot(t, t, dims=dims)), (torch.randn(4, 3),))
    assert error.value.fix == "pass dims= as Python integers"
    program = capture(Net("buffer", lambda t: torch.tensordot(t, t, dims=([0], [0]))), (torch.randn(4, 3),))
    assert not program.covers.fixed
