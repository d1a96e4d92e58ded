"""Fakes in the place of a module's parameters and buffers while the module runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from ...errors import CaptureError
from ..words.libraries import Outside
from ..words.places import where
from .attributes import TABLES, Attributes, Change
from .tables import Table

__all__ = ["fakes_in_place"]


@contextlib.contextmanager
def fakes_in_place(
    model: torch.nn.Module, fakes: Mapping[int, torch.Tensor], attributes: Attributes
) -> Iterator[list[Change]]:
    """Put a fake in the place of each parameter and buffer, for this thread; afterwards they are as they were.

    Args:
        model: the module.
        fakes: by ``id`` of the tensor that each stands for.
        attributes: of its modules, as they are now.

    Yields:
        A list, empty until the module has run. Then it holds the changes of which a second step shows whether they
        are harmless.

    Raises:
        CaptureError: the model rebound a buffer, or changed an attribute otherwise.
    """
    modules = list(model.named_modules())
    saved = [(dict(m._parameters), dict(m._buffers)) for _, m in modules]
    changes: list[Change] = []
    own = [(module.__dict__, name, module.__dict__[name]) for _, module in modules for name in TABLES]
    tables: list[Table] = []
    try:
        for attributes_of_module, name, table in own:
            tables.append(Table(table, {key: _fake_of(tensor, key, fakes) for key, tensor in table.items()}))
            attributes_of_module[name] = tables[-1]
        yield changes
        for (path, module), before in zip(modules, saved, strict=True):
            _check_tensors(path, module, before, fakes)
        changes += attributes.changed(fakes)
    finally:
        for attributes_of_module, name, table in own:
            attributes_of_module[name] = table
        for stand_in in tables:
            stand_in.release()


def _fake_of(tensor: torch.Tensor | None, key: str, fakes: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    if tensor is not None and id(tensor) not in fakes:
        raise CaptureError(
            f"{key!r} was replaced by another tensor during the capture",
            fix="let no other thread replace parameters or buffers during a capture; other threads may write into them",
        )
    return None if tensor is None else fakes[id(tensor)]


def _check_gradient(path: str, kind: str, key: str, tensor: torch.Tensor, fake: torch.Tensor) -> None:
    if fake.requires_grad == tensor.requires_grad and fake.grad is None and not fake._backward_hooks:
        return
    what = f"{kind} {key!r}"
    for broken, doing, fix in (
        (fake._backward_hooks, "puts a hook on the gradient of", "do what the hook does in the loss"),
        (fake.grad is not None, "computes a gradient of its own for", "call torch.autograd.grad, or extend the loss"),
        (fake.requires_grad != tensor.requires_grad, "sets requires_grad of", Outside("set it before the capture")),
    ):
        if broken:
            raise CaptureError(f"the step {doing} {what}", where=where(path), fix=fix)


def _check_tensors(
    path: str,
    module: torch.nn.Module,
    saved: tuple[Mapping[str, torch.Tensor | None], Mapping[str, torch.Tensor | None]],
    fakes: Mapping[int, torch.Tensor],
) -> None:
    parameters, buffers = saved
    for kind, table, before in (("parameter", module._parameters, parameters), ("buffer", module._buffers, buffers)):
        for key in dict.fromkeys([*before, *table]) if before or table else ():
            old = before.get(key)
            if table.get(key) is not (None if old is None else fakes[id(old)]):
                raise CaptureError(
                    f"the step rebinds {kind} {key!r} to a new tensor instead of writing into the old one",
                    where=where(path),
                    fix=Outside(
                        f"write into the {kind}: self.{key}.copy_(value); "
                        f"if only the first step sets up the {kind}, run one step before the capture"
                    ),
                )
            if old is not None:
                _check_gradient(path, kind, key, old, fakes[id(old)])
