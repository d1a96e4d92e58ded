"""What devices hold beside plans: gradients between steps, an optimizer's state, and what its step takes."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...errors import CaptureError, nearest
from ...ir.program import Program

__all__ = ["Held", "Optimizing", "read_optimizer_of", "weighed"]

_GRADIENT: Final = "_held_grad"
_STATE: Final = "_held_state"
"""What the names of a parameter's gradient and of its optimizer state have behind the parameter's."""

_ANY_RATE: Final = 1e-3


class Held(NamedTuple):
    """Bytes that are held of each parameter from step to step.

    Attributes:
        gradients: by the parameter's name, those of its gradient.
        state: likewise, those of its optimizer state.
        unknown: why the latter are not known; empty where they are.
    """

    gradients: Mapping[str, int]
    state: Mapping[str, int]
    unknown: str = ""

    def of(self, name: str) -> int:
        """Bytes beside a parameter."""
        return self.gradients.get(name, 0) + self.state.get(name, 0)


class Optimizing(NamedTuple):
    """An optimizer: one of these parameters, or a class that makes one."""

    make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]

    def figures(self, params: Mapping[str, torch.Tensor]) -> tuple[dict[str, int], int]:
        """By parameter, the bytes of its state after a step; and the most bytes that the step takes beside all state,
        and gives back.

        Raises:
            CaptureError: the step cannot be made on fake tensors.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = {name: torch.empty_strided(p.shape, p.stride(), dtype=p.dtype) for name, p in params.items()}
            for fake in fakes.values():
                fake.requires_grad_()
                fake.grad = torch.empty_like(fake)
            try:
                optimizer = self.make(list(fakes.values()))
                optimizer.step()  # makes the state
                with _Peak() as peak:
                    optimizer.step()
            except Exception as e:
                raise CaptureError(
                    f"place: a step of the optimizer cannot be made without data: {e}",
                    fix="leave optimizer out, and leave room for its state and its step",
                ) from e
        found = {}
        for name, fake in fakes.items():
            tensors = tree_leaves(dict(optimizer.state.get(fake, {})))
            found[name] = sum(
                [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor) and t.dim()]
            )
        return found, peak.most


class _Peak(TorchDispatchMode):
    """Counts the bytes that operators make, as long as somebody has them.

    Attributes:
        most: the most at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key in self.known or key in given:
                continue
            self.known.add(key)
            self.now += nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key, nbytes)
        return made

    def gone(self, key: int, nbytes: int) -> None:
        self.known.discard(key)
        self.now -= nbytes


def read_optimizer_of(given: object, params: Iterable[torch.Tensor]) -> Optimizing | None:
    """The optimizer that *given* is or names.

    Raises:
        CaptureError: it is neither.
    """
    if given is None:
        return None
    if isinstance(given, torch.optim.Optimizer):
        own = list(params)
        known = set(map(id, own))
        if not any(id(param) in known for group in given.param_groups for param in group["params"]):
            raise CaptureError("place: the optimizer has none of the model's parameters", fix="give the model's")
        return Optimizing(lambda fakes: _like(given, own, fakes))
    classes = {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return Optimizing(partial(given, lr=_ANY_RATE))  # type: ignore[call-arg]
    if isinstance(given, str) and given.lower() in classes:
        return Optimizing(partial(classes[given.lower()], lr=_ANY_RATE))  # type: ignore[call-arg]
    raise CaptureError(
        f"place: {given!r} is no optimizer{nearest(str(given).lower(), classes)}",
        fix="give an optimizer of the model's parameters, or a name such as 'AdamW'",
    )


def _like(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], fakes: list[torch.Tensor]
) -> torch.optim.Optimizer:
    """A copy of the optimizer without state, of other parameters."""
    memo: dict[int, Any] = {id(param): fake for param, fake in zip(params, fakes, strict=False)}
    memo[id(optimizer.state)] = defaultdict(dict)
    known = {id(param) for param in params}
    made = copy.copy(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [memo[id(param)] for param in group["params"] if id(param) in known and id(param) in memo],
        }
        for group in optimizer.param_groups
    ]
    return made


def weighed(program: Program, held: Held) -> Program:
    """A program whose parameters have beside them what is held: nothing reads it, and it moves with its parameter."""
    step, init = program.step, program.init
    loads = {op.outputs[0]: op for op in init.ops}
    blobs, made, ops = {}, {}, []
    for name, blob in step.blobs.items():
        if blob.role != "param" or blob.is_view or name not in loads:
            continue
        for kind, nbytes in ((_GRADIENT, held.gradients.get(name, 0)), (_STATE, held.state.get(name, 0))):
            if nbytes:
                beside = f"{name}{kind}"
                blobs[beside] = blob._replace(
                    name=beside, shape=(nbytes,), dtype="u8", role="state", storage=beside, strides=None, offset=0
                )
                ops.append(loads[name]._replace(outputs=(beside,), args={"key": beside}))
                made[beside] = blobs[beside]
    return program.with_(
        state={},
        init=init.with_(ops=(*init.ops, *ops), blobs={**init.blobs, **made}),
        step=step.with_(blobs={**blobs, **step.blobs}, external_inputs=(*blobs, *step.external_inputs)),
    )
