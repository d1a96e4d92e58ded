"""Singular values and eigenvalues have eager PyTorch's bits, or are refused: torch computes them in two ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager import assert_same_bits
from graphir.passes import emit
from graphir.runtime import Session
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import graphir
from graphir.errors import CaptureError

linalg = torch.linalg
svdvals = linalg.svdvals

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "svdvals": lambda x: linalg.svdvals(x),
    "svdvals_by_another_name": svdvals,
    "svd_reduced": lambda x: linalg.svd(x, full_matrices=False).S,
    "torch_svd": lambda x: x.svd().S,
    "svd": lambda x: linalg.svd(x).S,
    "svd_without_vectors": lambda x: torch.svd(x, compute_uv=False).S,
    "eigvalsh": lambda x: linalg.eigvalsh(x),
    "eigvalsh_upper": lambda x: linalg.eigvalsh(x, UPLO="U"),
    "eigh": lambda x: linalg.eigh(x).eigenvalues,
    "eigvals": lambda x: linalg.eigvals(x).abs(),
    "spectral_norm": lambda x: linalg.matrix_norm(x, 2),
    "smallest": lambda x: linalg.matrix_norm(x, -2),
    "nuclear_norm": lambda x: torch.norm(x, "nuc", dim=(-2, -1)),
    "cond": lambda x: linalg.cond(x),
    "pinv": lambda x: linalg.pinv(x),
    "pinv_hermitian": lambda x: linalg.pinv(x + x.mT, hermitian=True),
    "rank": lambda x: linalg.matrix_rank(x).float(),
    "rank_hermitian": lambda x: linalg.matrix_rank(x, hermitian=True).float(),
    "frobenius": lambda x: linalg.matrix_norm(x),
    "norm_of_vectors": lambda x: torch.norm(x, dim=-1),
    "slogdet": lambda x: linalg.slogdet(x).logabsdet,
    "qr": lambda x: linalg.qr(x).R,
}
SVD, EIGH, EIG = "torch.linalg.svd(x)[1]", "torch.linalg.eigh(x)[0]", "torch.linalg.eig(x)[0]"
ALONE: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "svdvals": (SVD, lambda x: linalg.svd(x)[1]),
    "svdvals_by_another_name": (SVD, lambda x: linalg.svd(x)[1]),
    "svd_without_vectors": (SVD, lambda x: linalg.svd(x)[1]),
    "eigvalsh": (EIGH, lambda x: linalg.eigh(x)[0]),
    "eigvalsh_upper": (EIGH, lambda x: linalg.eigh(x, UPLO="U")[0]),
    "eigvals": (EIG, lambda x: linalg.eig(x)[0].abs()),
    "spectral_norm": (SVD, lambda x: linalg.svd(x)[1].amax(-1)),
    "smallest": (SVD, lambda x: linalg.svd(x)[1].amin(-1)),
    "nuclear_norm": (SVD, lambda x: linalg.svd(x)[1].sum(-1)),
    "cond": (SVD, lambda x: linalg.svd(x)[1].amax(-1) / linalg.svd(x)[1].amin(-1)),
    "rank": (SVD, lambda x: (linalg.svd(x)[1] > 1e-5).sum(-1).float()),
    "rank_hermitian": (EIGH, lambda x: (linalg.eigh(x)[0].abs() > 1e-5).sum(-1).float()),
}
"""What is refused without a gradient: the call in the remedy, and the function by it."""


class Factorised(nn.Module):
    """A function of scaled matrices; each has its own scale."""

    def __init__(self, function: Callable[[Tensor], Tensor], needs_gradient: bool) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()), requires_grad=needs_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def matrices(name: str) -> Tensor:
    """Large enough that LAPACK's results with vectors and without differ."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn((1, 150, 150) if name == "eigvals" else (3, 12, 12), generator=generator)


def same_bits(function: Callable[[Tensor], Tensor], name: str) -> None:
    """The program and eager PyTorch compute the same, without a gradient."""
    model, x = Factorised(function, needs_gradient=False), matrices(name)
    program = graphir.capture(model, (x,))
    with Session(emit(program), program.state) as session:
        assert_same_bits({"output": session.step(x)}, {"output": model(x)}, name)


@pytest.mark.parametrize("name", sorted(set(CASES) - set(ALONE)))
def test_without_a_gradient(name: str) -> None:
    same_bits(CASES[name], name)


@pytest.mark.parametrize("name", ALONE)
def test_values_alone_are_refused_and_the_remedy_works(name: str) -> None:
    call, instead = ALONE[name]
    with pytest.raises(
        CaptureError, match=r"of a matrix that needs no gradient: eager PyTorch computes no vect"
    ) as error:
        graphir.capture(Factorised(CASES[name], needs_gradient=False), (matrices(name),))
    assert call in error.value.fix and "test_capture_factorisations.py:" in error.value.where
    same_bits(instead, name)


@pytest.mark.parametrize("name", sorted(set(CASES) - {"rank", "rank_hermitian", "eigvals"}))
def test_with_a_gradient(name: str) -> None:
    model, x = Factorised(CASES[name], needs_gradient=True), matrices(name)
    program = graphir.capture(model, (x,), loss=torch.sum)
    with Session(emit(program), program.state) as session:
        loss = model(x).sum()
        loss.backward()
        assert_same_bits({"loss": session.step(x)}, {"loss": loss.detach()}, name)
        assert_same_bits(session.gradients(), {"scale": model.scale.grad}, name)


class Detached(nn.Module):
    """Singular values of a tensor that would need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.scale
        with torch.no_grad():
            values = linalg.svdvals(scaled)
        return scaled.sum((1, 2))[:, None] * values


def test_where_gradients_are_switched_off() -> None:
    with pytest.raises(CaptureError, match=r"singular values of a matrix that needs no gradient"):
        graphir.capture(Detached(), (matrices("svdvals"),), loss=torch.sum)


def test_a_capture_within_seeded_records_them() -> None:
    with graphir.seeded(0):
        program = graphir.capture(
            Factorised(CASES["svdvals"], needs_gradient=True), (matrices("svdvals"),), loss=torch.sum
        )
    assert any("linalg_svd" in op.type for op in program.step.ops)


@pytest.mark.parametrize(
    "name", ["svdvals", "eigvalsh", "eigvals", "cond", "nuclear_norm", "svd_without_vectors", "svd"]
)
def test_eager_steps_under_seeded(name: str) -> None:
    x, function = matrices(name), CASES[name]
    alone = function(x)
    with graphir.seeded(0):
        assert_same_bits({"seeded": function(x)}, {"seeded": alone}, name)


@pytest.mark.parametrize("name", ["svdvals", "eigvalsh", "eigvals"])
def test_no_kernel_comes_or_goes(name: str) -> None:
    """Torch reads them without a lock: a thread that computes meanwhile would end the process."""

    def kernels() -> str:
        registered: str = torch._C._dispatch_dump(f"aten::linalg_{name}")
        return registered

    before = kernels()
    with graphir.seeded(0):
        assert kernels() == before
    assert kernels() == before

    def function(x: Tensor) -> Tensor:
        assert kernels() == before
        return CASES[name](x)

    graphir.capture(Factorised(function, needs_gradient=True), (matrices(name),))
    assert kernels() == before


def test_modes_of_others_see_what_they_saw() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, seen = torch.ones(2, 2), []
    with pytest.raises(graphir.CaptureError):
        graphir.capture(Factorised(lambda x: x * float(x.sum()), needs_gradient=False), (x,))
    with Seen():
        linalg.svdvals(x)
    assert seen == ["aten._linalg_svd.default"]


def forward_mode(x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(linalg.svdvals(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def reverse_mode(x: Tensor) -> Tensor:
    """Within it torch computes vectors of every tensor."""
    return torch.func.grad(lambda y: (y * linalg.svdvals(x)).sum())(x[..., 0])


@pytest.mark.parametrize("derivative", [forward_mode, reverse_mode])
def test_derivatives_within_a_step(derivative: Callable[[Tensor], Tensor]) -> None:
    model, x = Factorised(derivative, needs_gradient=False), matrices("svdvals")
    program = graphir.capture(model, (x,))
    with Session(emit(program), program.state) as session:
        assert_same_bits({"output": session.step(x)}, {"output": model(x)}, "derivative")
