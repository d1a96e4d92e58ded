"""One training step of 14 operators, written out by hand, with everything that an invariant can be about."""

from __future__ import annotations

import json
from typing import Any

import torch

from graphir.ir.blob import Blob, Role
from graphir.ir.device import CPU, Device, gpu
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator, Phase
from graphir.ir.plan import Event, Instruction, Plan, issued_as, issued_on, lane
from graphir.ir.program import Interface, ParamGroup, Program, Slot
from graphir.ir.size import Shape, dimension

BATCH = dimension("batch")
GPU0, GPU1 = gpu(0), gpu(1)
VIEW = Effects(views=((0, 0),))


def program() -> Program:
    """``relu(x @ w)`` with dropout, summed; SGD with momentum; and a counter that is increased in place."""
    blobs = {
        b.name: b
        for b in (
            _blob("x", (BATCH, 4), "input"),
            _blob("w", (4, 4), "param"),
            _blob("count", (), "buffer", dtype="i64"),
            _blob("m", (4, 4), "state"),
            _blob("lr", (), "input", dtype="f64", device=CPU),
            _blob("h", (BATCH, 4)),
            _blob("r", (BATCH, 4)),
            _blob("mask", (BATCH, 4)),
            _blob("d", (BATCH, 4)),
            Blob("d.t", (4, BATCH), "f32", GPU0, "activation", "d", (1, 4)),
            _blob("loss", (), "output"),
            _blob("loss_grad", (), "gradient"),
            Blob("d_grad", (BATCH, 4), "f32", GPU0, "gradient", "loss_grad", (0, 0)),
            _blob("r_grad", (BATCH, 4), "gradient"),
            _blob("h_grad", (BATCH, 4), "gradient"),
            Blob("x.t", (4, BATCH), "f32", GPU0, "input", "x", (1, 4)),
            _blob("w_grad", (4, 4), "gradient"),
        )
    }
    ops = (
        _op("aten.mm.default", ["x", "w"], ["h"]),
        _op("aten.relu.default", ["h"], ["r"]),
        _op("aten.bernoulli.p", ["r"], ["mask"], p=0.5)._replace(seed=0, effects=Effects(random=True)),
        _op("aten.mul.Tensor", ["r", "mask"], ["d"]),
        _op("aten.t.default", ["d"], ["d.t"])._replace(effects=VIEW),
        _op("aten.add_.Tensor", ["count"], ["count"], other=1)._replace(
            effects=Effects(writes=((0, 0),)), output_versions=(1,)
        ),
        _op("aten.sum.default", ["d.t"], ["loss"]),
        _op("aten.ones_like.default", ["loss"], ["loss_grad"], "backward"),
        _op("aten.expand.default", ["loss_grad"], ["d_grad"], "backward", size=(BATCH, 4))._replace(effects=VIEW),
        _op("aten.mul.Tensor", ["d_grad", "mask"], ["r_grad"], "backward"),
        _op("aten.threshold_backward.default", ["r_grad", "r"], ["h_grad"], "backward", threshold=0),
        _op("aten.t.default", ["x"], ["x.t"], "backward")._replace(effects=VIEW),
        _op("aten.mm.default", ["x.t", "h_grad"], ["w_grad"], "backward"),
        _op("graphir.sgd", ["w", "w_grad", "m", "lr"], ["w", "m"], "update", momentum=0.9)._replace(
            effects=Effects(writes=((0, 0), (1, 2))), output_versions=(1, 1)
        ),
    )
    inputs = ("x", "w", "count", "m", "lr")
    gradients = {"loss": "loss_grad", "d": "d_grad", "r": "r_grad", "h": "h_grad"}
    held = {name: blobs[name] for name in ("w", "count", "m")}
    loads = tuple(_op("graphir.load", [], [name], "init", key=name) for name in held)
    return Program(
        "tiny",
        Net("tiny.init", loads, held),
        Net("tiny.step", ops, blobs, inputs, ("loss",), gradients),
        {"batch": 6},
        interface=Interface(
            arguments=json.dumps(None),
            feeds=(Slot("x", 0),),
            loss="loss",
            module_state={"w": "w", "count": "count"},
            optimizers=("SGD",),
            optimizer_state={"w": {"momentum_buffer": "m"}},
            param_groups=(ParamGroup("lr", ("w",), {"lr": 0.1}),),
        ),
        state={
            "w": torch.ones(4, 4),
            "count": torch.tensor(0),
            "m": torch.zeros(4, 4),
            "step": torch.tensor(0),
        },
    )


def moved() -> Program:
    """The same with its relu on gpu:1, and the copies that this needs."""
    p = edited(program(), 1, inputs=("h_gpu_1",), device=GPU1, by="shift_activations")
    for position in (2, 3, 10):
        p = edited(p, position, inputs=tuple("r_gpu_0" if i == "r" else i for i in p.step.ops[position].inputs))
    p = inserted(p, 2, _op("Copy", ["r"], ["r_gpu_0"]), _blob("r_gpu_0", (BATCH, 4)))
    p = inserted(p, 1, _op("Copy", ["h"], ["h_gpu_1"], device=GPU1), _blob("h_gpu_1", (BATCH, 4), device=GPU1))
    return reblobbed(p, "r", device=GPU1).with_(history=("shift_activations", "inject_copies"))


def plan(p: Program) -> Plan:
    """A plan that records whatever is made, waits for whatever another lane made, and frees after the last use."""
    net, blobs = p.step, p.step.blobs
    kept = {blobs[n].storage for n in (*net.external_inputs, *net.external_outputs)}
    last = {blobs[n].storage: i for i, op in enumerate(net.ops) for n in (*op.inputs, *op.outputs)}
    made: dict[tuple[str, int], str] = {}
    issued: list[Instruction] = []
    for i, op in enumerate(net.ops):
        kind, makes = issued_as(op), list(op.makes)
        for part, own in enumerate([[output] for output in makes] if kind == "collective" else [makes]):
            at = issued_on(op, blobs, part)
            for name, version in op.reads:
                by = made.get((name, version), at)
                if by != at:
                    issued.append(Instruction("wait", at, event=Event(name, version, by)))
            issued.append(Instruction(kind, at, i, part))
            for name, version in own:
                made[name, version] = at
                issued.append(Instruction("record", at, event=Event(name, version, at)))
        for storage in dict.fromkeys(blobs[n].storage for n in (*op.inputs, *op.outputs)):
            if last[storage] == i and storage not in kept:
                issued.append(Instruction("free", lane(blobs[storage].device, "compute"), storage=storage))
    return Plan(p.with_(state={}), p.dims, tuple(issued))


def edited(p: Program, position: int, **changes: Any) -> Program:
    """With another operator at *position* of the step."""
    ops = list(p.step.ops)
    ops[position] = ops[position]._replace(**changes)
    return p.with_(step=p.step.with_(ops=tuple(ops)))


def inserted(p: Program, position: int, op: Operator, *blobs: Blob) -> Program:
    """With one more operator before *position* of the step."""
    ops = [*p.step.ops[:position], op, *p.step.ops[position:]]
    declared = {**p.step.blobs, **{b.name: b for b in blobs}}
    return p.with_(step=p.step.with_(ops=tuple(ops), blobs=declared))


def dropped(p: Program, position: int) -> Program:
    """Without the operator at *position* of the step."""
    return p.with_(step=p.step.with_(ops=p.step.ops[:position] + p.step.ops[position + 1 :]))


def reblobbed(p: Program, name: str, **changes: Any) -> Program:
    """With another declaration of a blob of the step."""
    return p.with_(step=p.step.with_(blobs={**p.step.blobs, name: p.step.blobs[name]._replace(**changes)}))


def position(p: Program, output: str) -> int:
    """Of the first operator of the step that makes *output*."""
    return next(i for i, op in enumerate(p.step.ops) if output in op.outputs)


def op(type: str, inputs: tuple[str, ...], outputs: tuple[str, ...], **changes: Any) -> Operator:
    """An operator on gpu:0 without arguments."""
    return Operator(type, inputs, outputs, {}, GPU0)._replace(**changes)


def _blob(name: str, shape: Shape, role: Role = "activation", *, dtype: str = "f32", device: Device = GPU0) -> Blob:
    return Blob(name, shape, dtype, device, role, name)


def _op(
    type: str, inputs: list[str], outputs: list[str], phase: Phase = "forward", *, device: Device = GPU0, **args: Any
) -> Operator:
    return Operator(type, tuple(inputs), tuple(outputs), args, device, phase)
