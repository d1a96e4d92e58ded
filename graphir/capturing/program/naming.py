"""Names that users know: a module's output is called after the module, the rest after the module and the operator.

::

    layer1.0.conv1                     output of the module layer1.0.conv1
    blocks.0.mlp.view                  that output in another shape, where the module reshapes what it computed
    layer1.0.bn1.save_mean             its second result
    layer1.0.add                       an addition in the forward of layer1.0
    fc.weight.t                        a view of a parameter
    layer1.0.add_grad                  the gradient of a forward value
    layer1.0.bn1.backward_mul          another value of the backward of layer1.0.bn1
    layer1.0.bn1.backward_mul.sum      one more, made of that; so is layer1.0.bn1_grad.mul of the gradient
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

from ...ir.names import Names
from ..record.values import Value
from ..step.recorded_step import Recording

__all__ = ["name_values"]

_RESULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_norm": ("", "save_mean", "save_invstd"),
    "layer_norm": ("", "mean", "rstd"),
    "group_norm": ("", "mean", "rstd"),
    "max_pool2d": ("", "indices"),
    "dropout": ("", "mask"),
    "var_mean": ("", "mean"),
    "nll_loss": ("", "total_weight"),
    "scaled_dot_product_attention": ("", "logsumexp"),
}
"""Names of an operator's results after the first, where torch's schema has none."""


def name_values(recording: Recording, names: Names, modules: frozenset[str]) -> list[str]:
    """A name for each value, at its index; versions of one blob share a name.

    Args:
        recording: of the step.
        names: hands out names; state and the words that programs reserve are already taken.
        modules: paths of the model's modules, kept for their outputs.
    """
    modules = frozenset(prefix + path for prefix in {value.prefix for value in recording.values} for path in modules)
    found: dict[int, str] = {}
    if recording.loss is not None:
        found[recording.loss.index] = "loss"
    for name, value in recording.state.items():
        found[value.index] = name
    forward = [v for v in recording.values if v.phase == "forward"]
    for value in forward:
        if value.kind and not value.version and value.index not in found:
            found[value.index] = names.take(_join(value.scope, value.label))
    called: set[str] = set()
    for value in forward:
        if value.claim is not None and (bearer := _bearer(value, value.claim)).index not in found:
            base = value.prefix + value.claim
            found[bearer.index] = names.take(base, modules if base in called else frozenset())
            called.add(base)
    live = {value.index for call in recording.calls for value in call.outputs}
    for value in sorted(forward, key=lambda value: value.index not in live):  # a dead value takes no number
        if value.index not in found:
            found[value.index] = (
                found[value.root.index] if value.version else _forward_name(value, found, names, modules)
            )
    for _, value, gradient in recording.given:
        found[gradient.index] = names.take(found[value.index] + "_grad", modules)
    for value, gradient in recording.gradients:
        if gradient.index not in found:
            found[gradient.index] = names.take(_prefixed(gradient, found[value.index] + "_grad"), modules)
    for param, gradient in recording.parts:
        if gradient.index not in found:
            word = "_grad.sum" if gradient.label == "sum" else "_grad"
            found[gradient.index] = names.take(_prefixed(gradient, found[param.index] + word), modules)
    for index, (indices, values) in recording.sparse_gradients.items():
        found[indices.index] = names.take(f"{found[index]}_grad.indices", modules)
        found[values.index] = names.take(f"{found[index]}_grad.values", modules)
    for value in recording.values:
        if value.index not in found:
            later = _update_name if value.phase == "update" else _backward_name
            found[value.index] = found[value.root.index] if value.version else later(value, found, names, modules)
    return [found[i] for i in range(len(recording.values))]


def _bearer(value: Value, module: str) -> Value:
    """The value that is named after *module*, whose output is *value*.

    If the output is only another shape of the whole value that the module computed (as of a linear layer on three
    dimensions), the computed value gets the name: it is the activation that has the gradient and that people want to
    move.
    """
    root = value.root
    own = root.scope == module or root.scope.startswith(f"{module}.")
    computed = value.is_view and not root.kind and root.phase == "forward" and root.claim is None and own
    return root if computed and prod(root.shape) == prod(value.shape) else value


def _prefixed(value: Value, name: str) -> str:
    """*name* with the prefix of the micro-batch that *value* belongs to."""
    return name if name.startswith(value.prefix) else value.prefix + name


def _forward_name(value: Value, found: Mapping[int, str], names: Names, modules: frozenset[str]) -> str:
    base = _viewed(value, found) or _result_of(value, found) or _join(value.scope, value.label)
    return names.take(_prefixed(value, base), modules)


def _backward_name(value: Value, found: Mapping[int, str], names: Names, modules: frozenset[str]) -> str:
    base = _viewed(value, found) if value.root.kind or value.root.index in found else ""
    if not base:
        if value.source is not None:
            base = f"{found[value.source.index]}.backward_{value.label}"
            if _prefixed(value, base) in names:
                base = _made_of(value, found) or base
        elif value.claim is not None:
            base = f"{value.claim}.recomputed"
        else:
            base = _join(value.scope, f"recomputed_{value.label}")
    return names.take(_prefixed(value, base), modules)


def _made_of(value: Value, found: Mapping[int, str]) -> str:
    """The name of a backward value after its operand: the gradient, or another value of the same backward; else empty.

    Without such names numbers would follow numbers: ``div_1.backward_div_1``. No further names are derived from such a
    name, so that names stay short.
    """
    if value.source is None or value.call is None:
        return ""
    owner = found[value.source.index]
    for v in value.call.inputs:
        root = found.get(v.root.index, "")
        if v.phase == "backward" and (root.endswith("_grad") or root == f"{owner}.backward_{v.root.label}"):
            return f"{found[v.index]}.{value.label}"
    return ""


def _update_name(value: Value, found: Mapping[int, str], names: Names, modules: frozenset[str]) -> str:
    """The name of a value of the update: after the gradient that it is made of; if it is made of all, its own."""
    base = value.claim
    of = value.source or next(iter(value.call.inputs if value.call is not None else ()), None)
    if base is None and of is not None:
        base = f"{found[of.index]}.{value.label}"
    return names.take(base or value.label, modules)


def _viewed(value: Value, found: Mapping[int, str]) -> str:
    """The name of a view of state, of an input or of a gradient, after the viewed value; empty for other values."""
    if not value.is_view or value.call is None:
        return ""
    seen = next((v for v in value.call.inputs if v.root is value.root), value.root)
    if value.phase == "forward" and not value.root.kind:
        return ""
    return f"{found[seen.index]}.{value.label}" if seen.index in found else ""


def _result_of(value: Value, found: Mapping[int, str]) -> str:
    """The name of a result after the first, which is named after the first; empty for other values."""
    call = value.call
    if call is None or (call.results is not None and "[" in call.results):
        return ""
    position = next(i for i, v in enumerate(call.outputs) if v is value)
    words = _RESULTS.get(value.label, ())
    if position == 0 or call.outputs[0].index not in found:
        return ""
    word = words[position] if position < len(words) else f"result{position}"
    return f"{found[call.outputs[0].index]}.{word}"


def _join(scope: str, label: str) -> str:
    return f"{scope}.{label}" if scope else label
