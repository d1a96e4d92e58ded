"""Direct evaluation of a captured program, operator by operator: what capture's tests hold against eager PyTorch.

It shares nothing with the runtime, and trusts nothing but the order of ``program.step.ops``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from models import Example
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from graphir.capturing.seeded import seeded
from graphir.ir.blob import STATE_ROLES, contiguous_strides
from graphir.ir.moved import NOW, moved
from graphir.ir.operator import Operator, Symbol, groups
from graphir.ir.opset import overload, signature
from graphir.ir.program import Program
from graphir.ir.seeds import mix
from graphir.ir.size import Dims, Polynomial, bind, bind_shape
from graphir.ir.symbols import to_torch

ATTENTION = {
    "graphir.attention": "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "graphir.attention_backward": "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
}
"""What these types are on the CPU."""


def evaluate(
    program: Program, state: dict[str, Tensor], arguments: Mapping[str, Tensor], step: int = 0, replica: int = 0
) -> dict[str, Tensor]:
    """Run ``program.step`` once: overwrites *state*, returns every blob's last value.

    Args:
        program: as captured.
        state: blobs that live from step to step, by name.
        arguments: inputs by blob name; numbers are taken from the parameter groups where they are missing.
        step: steps done before.
        replica: its position.
    """
    blobs = program.step.blobs
    dims = dict(program.dims)
    for feed in program.interface.feeds:
        if feed.blob is not None and feed.batch_dim is not None and "batch" in dims:
            dims["batch"] = arguments[feed.blob].shape[feed.batch_dim]
    values: dict[str, Tensor] = {n: state[n] for n in program.step.external_inputs if blobs[n].role in STATE_ROLES}
    values.update(arguments)
    for group in program.interface.param_groups:
        numbers = {group.lr: group.options["lr"]}
        numbers |= {blob: moved(group.options)[name] for name, blob in group.numbers.items()}
        for name, number in numbers.items():
            values.setdefault(name, torch.tensor(number, dtype=torch.float64))
    with torch.no_grad():
        for op in program.step.ops:
            if op.type.startswith("graphir.") and op.type not in ATTENTION:
                _update(op, values)
            else:
                _run(op, values, dims, step, replica)
                for name in op.outputs:
                    shape = bind_shape(blobs[name].shape, dims)
                    assert tuple(values[name].shape) == shape, f"{name} is {tuple(values[name].shape)}, not {shape}"
                    strides = bind_shape(blobs[name].strides or contiguous_strides(shape), dims)
                    _laid_out(op, name, values[name], strides)
                    if blobs[name].is_view:
                        storage = values[blobs[name].storage]
                        assert values[name].untyped_storage()._cdata == storage.untyped_storage()._cdata, name
    return values


def _laid_out(op: Operator, name: str, tensor: Tensor, declared: Sequence[int]) -> None:
    """Assert that each element is where its blob says."""
    for size, stride, said in zip(tensor.shape, tensor.stride(), declared, strict=True):
        if size > 1 and tensor.numel():
            assert stride == said, f"{name} of {op.type} has strides {tensor.stride()}, not {tuple(declared)}"


def _value(arg: Any, dims: Dims) -> Any:
    if isinstance(arg, Polynomial):
        return bind(arg, dims)
    if isinstance(arg, tuple):
        return [_value(item, dims) for item in arg]
    return to_torch(arg) if isinstance(arg, Symbol) else arg


def _run(op: Operator, values: dict[str, Tensor], dims: Dims, step: int, replica: int) -> None:
    sig = signature(op.type)
    named: dict[str, Any] = {name: _value(arg, dims) for name, arg in op.args.items()}
    for param, group in zip(sig.tensors, groups(op.operands, len(op.inputs)), strict=False):
        if param.name not in named and group is not None:
            found = [
                None if i is None else values[op.inputs[i]] for i in (group if isinstance(group, list) else [group])
            ]
            named[param.name] = found if isinstance(group, list) else found[0]
    for param in sig.tensors:
        if param.required and param.name not in named:
            named[param.name] = None
    if op.seed is not None:
        named["generator"] = torch.Generator().manual_seed(mix(step, replica, op.seed))
    if op.type in ATTENTION:
        out = overload(ATTENTION[op.type])(**{"dropout_p": 0.0, "is_causal": False, **named})
    else:
        positional = [named.pop(p.name) if p.name in named else p.default for p in sig.params if not p.keyword]
        out = overload(op.type)(*positional, **named)
    returned = out if isinstance(out, (tuple, list)) and len(sig.results) > 1 else (out,)
    for group, thing in zip(groups(op.results, len(sig.results)), returned, strict=False):
        positions, tensors = (group, thing) if isinstance(group, list) else ([group], [thing])
        for i, tensor in zip(positions, tensors, strict=True):
            if i is not None:
                values[op.outputs[i]] = tensor


def _update(op: Operator, values: dict[str, Tensor]) -> None:
    """The optimizers by torch's own functions."""
    names = [p.name for p in signature(op.type).tensors]
    bound = {
        name: values[op.inputs[i]]
        for name, i in zip(names, groups(op.operands, len(op.inputs)), strict=False)
        if i is not None
    }
    args = {p.name: p.default for p in signature(op.type).params if p.kind == "value"} | dict(op.args)
    args |= {name.removesuffix(NOW): number.item() for name, number in bound.items() if name.endswith(NOW)}
    options: dict[str, Any] = {"foreach": False, "lr": bound["lr"].item()}
    if "form" in args:
        form = args.pop("form")
        options["foreach"] = form == "foreach"
        if form == "fused":
            options["fused"] = True
    listed = {name: [tensor] for name, tensor in bound.items()}
    if op.type in ("graphir.sgd", "graphir.dampened_sgd"):
        first = "next_dampening" in bound and bound["next_dampening"] == 0.0
        buffers: list[Tensor | None] = [None] if first else [bound.get("momentum_buffer")]
        sgd(listed["param"], listed["grad"], buffers, **options, **{"dampening": 0.0, **args})
        if "next_dampening" in bound and buffers[0] is not None:
            bound["momentum_buffer"].copy_(buffers[0])
            bound["next_dampening"].fill_(args["dampening"])
    elif op.type == "graphir.adagrad":
        adagrad(listed["param"], listed["grad"], listed["sum"], listed["step"], **options, **args)
    elif op.type == "graphir.rmsprop":
        averages, buffers_ = listed.get("grad_avg", []), listed.get("momentum_buffer", [])
        state = (listed["square_avg"], averages, buffers_, listed["step"])
        rmsprop(listed["param"], listed["grad"], *state, centered="grad_avg" in bound, **options, **args)
    else:
        decoupled, maxima = op.type == "graphir.adamw", listed.get("max_exp_avg_sq", [])
        moments = (listed["exp_avg"], listed["exp_avg_sq"], maxima, listed["step"])
        adam(
            listed["param"], listed["grad"], *moments, amsgrad=bool(maxima), decoupled_weight_decay=decoupled,
            **options, **args,
        )  # fmt: skip


def matches_eager(
    program: Program,
    example: Example,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    batches: Sequence[int] = (),
    steps: int = 2,
) -> None:
    """Assert that the program and eager PyTorch have the same bits: loss, gradients, parameters, buffers, state.

    Args:
        program: captured from the example.
        example: its model is copied.
        make_optimizer: the captured optimizer, given parameters.
        batches: other batch sizes to run at.
        steps: how many, for each size.
    """
    for batch in (None, *batches):
        tensors = [_resized(t, batch) for t in (*example.inputs, *example.targets)]
        inputs, targets = tensors[: len(example.inputs)], tensors[len(example.inputs) :]
        model = copy.deepcopy(example.model)
        optimizer = make_optimizer(model.parameters()) if make_optimizer else None
        state = _loaded(program)
        feeds = [feed.blob for feed in program.interface.feeds]
        arguments = {name: t.clone() for name, t in zip(feeds, tensors, strict=True) if name is not None}
        for step in range(steps):
            model.zero_grad()
            with seeded(step), torch.enable_grad():
                loss = example.loss(model(*[t.clone() for t in inputs]), *targets)
                loss.backward()
            values = evaluate(program, state, arguments, step)
            _same("loss", values["loss"], loss)
            _same_gradients(program, values, model)
            if optimizer is not None:
                optimizer.step()
            _same_state(program, state, model, optimizer)


def _resized(tensor: Tensor, batch: int | None) -> Tensor:
    if batch is None or tensor.dim() == 0:
        return tensor
    times = -(-batch // len(tensor))
    return torch.cat([tensor.roll(i, -1) for i in range(times)])[:batch]


def _same(name: str, mine: Tensor, theirs: Tensor) -> None:
    assert mine.dtype == theirs.dtype, f"{name} is {mine.dtype}, not {theirs.dtype}"
    difference = (mine.double() - theirs.double()).abs().max() if mine.shape == theirs.shape and mine.numel() else None
    assert torch.equal(mine, theirs), f"{name} differs by {difference}"


def _same_gradients(program: Program, values: dict[str, Tensor], model: torch.nn.Module) -> None:
    blobs = program.interface.module_state
    for name, param in model.named_parameters():
        gradient = values.get(f"{blobs[name]}_grad")
        if param.grad is None:
            assert gradient is None, f"{name} has a gradient that eager PyTorch doesn't have"
        else:
            assert gradient is not None, f"{name} has no gradient"
            _same(f"gradient of {name}", gradient, param.grad)
            assert gradient.stride() == param.grad.stride(), f"gradient of {name} has other strides"


def _loaded(program: Program) -> dict[str, Tensor]:
    """The program's state, each tensor laid out as its blob is."""
    state = {name: tensor.clone() for name, tensor in program.state.items()}
    for name, blob in program.init.blobs.items():
        if blob.strides is not None:
            like, strides = state[name], bind_shape(blob.strides, {})
            state[name] = torch.empty_strided(like.shape, strides, dtype=like.dtype).copy_(like)
    return state


def _same_state(
    program: Program, state: dict[str, Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    for key, tensor in model.state_dict().items():
        _same(key, state[program.interface.module_state[key]], tensor)
    params = dict(model.named_parameters())
    for name, entries in program.interface.optimizer_state.items():
        assert optimizer is not None
        for key, blob in entries.items():
            if key != "next_dampening":  # torch has no such state
                _same(f"{name}.{key}", state[blob], optimizer.state[params[name]][key])
