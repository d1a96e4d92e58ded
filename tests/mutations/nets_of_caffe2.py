"""Caffe2's nets that are mutated: recorded ones, some written here, and some with nets in their arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from cases import Case, cases
from lowering import op

from graphir import caffe2
from graphir.caffe2.convert import decode, encode
from graphir.caffe2.schema import messages
from graphir.ir.dtype import TORCH_NAME
from graphir.ir.program import Program

__all__ = ["Imported", "imported"]

Shapes = Mapping[str, tuple[tuple[int, ...], str]]

_TRAINED = [
    *[op("FC", "x w b", "y"), op("Tanh", "y", "t"), op("FC", "t v c", "z"), op("Softmax", "z", "p")],
    *[op("LabelCrossEntropy", "p label", "xent"), op("AveragedLoss", "xent", "loss")],
    *[op("ConstantFill", "loss", "loss_grad", value=1.0), op("AveragedLossGradient", "xent loss_grad", "xent_grad")],
    *[op("LabelCrossEntropyGradient", "p label xent_grad", "p_grad"), op("SoftmaxGradient", "p p_grad", "z_grad")],
    *[op("FCGradient", "t v z_grad", "v_grad c_grad t_grad"), op("TanhGradient", "t t_grad", "y_grad")],
    *[op("FCGradient", "x w y_grad", "w_grad b_grad"), op("AtomicIter", "mutex it", "it")],
]
_FILLED = [
    *[op("XavierFill", "", "w", shape=[6, 4]), op("ConstantFill", "", "b", shape=[6], value=0.125)],
    *[op("XavierFill", "", "v", shape=[3, 6]), op("ConstantFill", "", "c", shape=[3])],
    *[op("ConstantFill", "", "it", shape=[1], value=0, dtype=10), op("CreateMutex", "", "mutex")],
    op("ConstantFill", "", "one", shape=[1], value=1.0),
]


def _rate(policy: str, **args: Any) -> Any:
    return op("LearningRate", "it", "lr", base_lr=-0.1, policy=policy, **args)


_PARAMS = ("w", "b", "v", "c")
_SGD = [op("WeightedSum", f"{p} one {p}_grad lr", p) for p in _PARAMS]
_MOMENTUM = [op("MomentumSGDUpdate", f"{p}_grad {p}_m lr {p}", f"{p}_grad {p}_m {p}", momentum=0.9) for p in _PARAMS]
_ADAM = [
    op("Adam", f"{p} {p}_m {p}_n {p}_grad lr it", f"{p} {p}_m {p}_n", beta1=0.9, beta2=0.99, epsilon=1e-5)
    for p in _PARAMS
]
_ADAGRAD = [op("Adagrad", f"{p} {p}_m {p}_grad lr", f"{p} {p}_m", epsilon=1e-4) for p in _PARAMS]
_SHAPES = {"w": [6, 4], "b": [6], "v": [3, 6], "c": [3]}
_MOMENTS = [op("ConstantFill", "", f"{p}_{k}", shape=_SHAPES[p], value=0.25) for p in _PARAMS for k in "mn"]

_FED: Shapes = {"x": ((5, 4), "f32"), "label": ((5,), "i32")}

_IMAGES = [
    *[op("Conv", "x w b", "h", kernel=3, pad=1, stride=1), op("SpatialBN", "h s o m v", "n", epsilon=1e-4, is_test=1)],
    *[
        op("Relu", "n", "n"),
        op("MaxPool", "n", "p", kernel=2, stride=2),
        op("AveragePool", "n", "q", kernel=2, stride=2),
    ],
    *[op("Sum", "p q", "r"), op("Add", "r p", "a"), op("Mul", "a q", "u"), op("Sigmoid", "u", "g")],
    *[op("Flatten", "g", "f"), op("Softmax", "f", "y"), op("Scale", "f", "k", scale=0.5)],
]
_IMAGE_STATE = [
    *[op("XavierFill", "", "w", shape=[4, 2, 3, 3]), op("ConstantFill", "", "b", shape=[4], value=0.1)],
    *[op("ConstantFill", "", "s", shape=[4], value=1.5), op("ConstantFill", "", "o", shape=[4], value=0.25)],
    *[op("ConstantFill", "", "m", shape=[4], value=0.5), op("ConstantFill", "", "v", shape=[4], value=2.0)],
]

_JOINED = [
    *[op("Concat", "x u", "c info", axis=1), op("Split", "c info", "d e", axis=1), op("Mul", "d e", "m")],
    *[op("Tanh", "m", "m"), op("Add", "m shift", "m", broadcast=1), op("Sum", "m x u", "s")],
    *[op("StopGradient", "s", "z"), op("Scale", "z", "k", scale=2.0)],
    *[op("SquaredL2Distance", "k x", "l"), op("AveragedLoss", "l", "loss"), op("Sigmoid", "s", "g")],
    *[op("Concat", "g d", "t more", axis=0), op("Split", "t", "left right", axis=0), op("Add", "left right", "y")],
]
_SHIFT = [op("UniformFill", "", "shift", shape=[3], min=-1.0, max=1.0), op("Scale", "shift", "shift", scale=0.1)]

_LOOKED_UP = [
    *[op("SparseLengthsSum", "table i len", "s"), op("Gather", "table i", "g"), op("FC", "s w b", "y")],
    *[op("Relu", "y", "y"), op("AveragedLoss", "y", "loss"), op("Relu", "g", "r"), op("Scale", "r", "q", scale=3.0)],
    *[op("ConstantFill", "loss", "one_", value=1.0), op("AveragedLossGradient", "y one_", "y_grad")],
    *[op("ReluGradient", "y y_grad", "h_grad"), op("FCGradient", "s w h_grad", "w_grad b_grad s_grad")],
    *[op("SparseLengthsIndicesInGradientSumGradient", "s_grad len i", "t_grad")],
    *[op("SparseAdagrad", "table table_m i t_grad lr", "table table_m", epsilon=1e-4)],
    *[op("WeightedSum", "w one w_grad lr", "w"), op("WeightedSum", "b one b_grad lr", "b")],
]
_TABLES = [
    *[op("UniformFill", "", "table", shape=[8, 4], min=-1.0, max=1.0), op("ConstantFill", "", "table_m", shape=[8, 4])],
    *[op("XavierFill", "", "w", shape=[3, 4]), op("ConstantFill", "", "b", shape=[3], value=0.5)],
    *[op("ConstantFill", "", "one", shape=[1], value=1.0), op("ConstantFill", "", "lr", shape=[1], value=-0.1)],
]


def _on(device: int, ops: Sequence[Any]) -> list[Any]:
    """The operators on another gpu, under another prefix."""
    made = []
    for each in ops:
        message = messages().OperatorDef()
        message.CopyFrom(each)
        for names in (message.input, message.output):
            renamed = [f"gpu_{device}/{name}" for name in names]
            del names[:]
            names.extend(renamed)
        message.device_option.device_type, message.device_option.device_id = 1, device
        made.append(message)
    return made


_DATA = [op("UniformFill", "", "x", shape=[5, 4], min=-1.0, max=1.0), op("FC", "x w b", "y"), op("Tanh", "y", "t")]
_BACK = [op("ConstantFill", "t", "t_grad", value=1.0), op("TanhGradient", "t t_grad", "y_grad")]
_BACK += [op("FCGradient", "x w y_grad", "w_grad b_grad")]
_REPLICATED = [
    *_on(0, [*_DATA, *_BACK]), *_on(1, [*_DATA, *_BACK]),
    *[op("NCCLAllreduce", f"gpu_0/{p}_grad gpu_1/{p}_grad", f"gpu_0/{p}_grad gpu_1/{p}_grad", "gpu:0") for p in "wb"],
    *[each for d in (0, 1) for each in _on(d, [op("WeightedSum", f"{p} one {p}_grad lr", p) for p in "wb"])],
    op("Copy", "gpu_0/w", "w_seen", "gpu:1"), op("Relu", "w_seen", "w_sum", "gpu:1"),
]  # fmt: skip
_REPLICATED_STATE = [
    each
    for d in (0, 1)
    for each in _on(d, [_FILLED[0], _FILLED[1], _FILLED[-1], op("ConstantFill", "", "lr", shape=[1], value=-0.1)])
]

WRITTEN: Mapping[str, tuple[Sequence[Any], Sequence[Any], Shapes]] = {
    "weighted sums": ([*_TRAINED, _rate("exp", gamma=0.5), *_SGD], _FILLED, _FED),
    "momentum": ([*_TRAINED, _rate("inv", gamma=0.1, power=0.5), *_MOMENTUM], [*_FILLED, *_MOMENTS], _FED),
    "adam": ([*_TRAINED, _rate("step", stepsize=2, gamma=0.5), *_ADAM], [*_FILLED, *_MOMENTS], _FED),
    "adagrad": ([*_TRAINED, _rate("fixed"), *_ADAGRAD], [*_FILLED, *_MOMENTS], _FED),
    "images": (_IMAGES, _IMAGE_STATE, {"x": ((2, 2, 6, 6), "f32")}),
    "joined": (_JOINED, _SHIFT, {"x": ((4, 3), "f32"), "u": ((4, 3), "f32")}),
    "looked up": (_LOOKED_UP, _TABLES, {"i": ((6,), "i32"), "len": ((3,), "i32")}),
    "replicated": (_REPLICATED, _REPLICATED_STATE, {}),
}
"""Operators of the step and of init, and what a step is given."""

_NESTED = """
name: "nested"
op {{ output: "x" type: "GaussianFill" arg {{ name: "shape" ints: 2 }}
     device_option {{ device_type: 1 device_id: 0 }} }}
op {{ output: "q" type: "GaussianFill" arg {{ name: "shape" ints: 2 }}
     device_option {{ device_type: 1 device_id: 1 }} }}
op {{ input: "x" input: "q" output: "y" type: "{type}"
     arg {{ name: "note" s: "device_id: 3 control_input: \\"x\\" name: \\"\\"" }}
     arg {{ name: "many" strings: "device_type: 1 device_id: 0" strings: "gpu_0/x" }}
     arg {{ name: "then_net" n {{ name: "inner"
       op {{ input: "x" output: "w" type: "Tanh" device_option {{ device_type: 1 device_id: 2 }} }}
       op {{ input: "w" input: "q" output: "v" type: "Add" name: "adds" }}
       op {{ input: "v" output: "v" type: "Scale" arg {{ name: "scale" f: 0.5 }} }}
       op {{ input: "v" output: "u" type: "Inner"
            arg {{ name: "text" s: "device_option {{ device_id: 1 }}" }}
            arg {{ name: "body" n {{
              op {{ input: "v" output: "k" type: "Relu" }} op {{ input: "k" output: "l" type: "Exp" }} }} }} }}
       external_input: "x" external_output: "u" }} }}
     control_input: "x" }}
op {{ input: "y" output: "z" type: "Relu" control_input: "q" name: "last" engine: "CUDNN" }}
op {{ input: "z" output: "x" type: "Copy" device_option {{ device_type: 1 device_id: 0 }} }}
op {{ input: "x" input: "z" output: "r" type: "Sum" device_option {{ device_type: 1 device_id: 1 }} }}
"""


class Imported(NamedTuple):
    """Two nets as messages, and what a program is made of them with.

    Attributes:
        name: of it.
        step: a ``NetDef``.
        init: another, or None.
        fed: what a step is given; None where it cannot be run, since operators have no translation.
        options: of ``load_program``.
    """

    name: str
    step: Any
    init: Any
    fed: Shapes | None
    options: Mapping[str, Any]

    def program(self, step: Any = None, init: Any = None, more: int = 0) -> Program:
        """The program of these nets, or of mutated ones; what it is fed has so many rows more."""
        nets = [decode(m, self.name) if m is not None else None for m in (step or self.step, init or self.init)]
        assert nets[0] is not None
        rows = {"i": 2 * more}
        shapes = {
            name: ((shape[0] + rows.get(name, more), *shape[1:]), dtype)
            for name, (shape, dtype) in (self.fed or {}).items()
        }
        return caffe2.load_program(nets[0], nets[1], shapes=shapes, **self.options)

    def batch(self, step: int, program: Program) -> dict[str, torch.Tensor]:
        """Random numbers for a step; whole ones are 0, 1 and 2, and lengths 2."""
        generator = torch.Generator().manual_seed(step)
        found = {}
        for name in (feed.blob for feed in program.interface.feeds):
            assert name is not None
            blob = program.step.blobs[name]
            shape = tuple(int(size) for size in blob.shape or ())  # type: ignore[arg-type]
            dtype = getattr(torch, TORCH_NAME[str(blob.dtype)])
            if name == "len":
                found[name] = torch.full(shape, 2, dtype=dtype)
            elif dtype.is_floating_point:
                found[name] = torch.randn(shape, generator=generator, dtype=dtype)
            else:
                found[name] = torch.randint(3, shape, generator=generator).to(dtype)
        return found


def imported() -> Iterator[Imported]:
    """Every net: recorded, written, with nets in it."""
    for name in ("mlp_2dev_sgd", "mlp_weightedsum_1dev"):
        case = next(case for case in cases("model") if case.name == name)
        options = {"devices": case.record["devices"], "params": case.record["params"]}
        options["device_prefix"] = case.record["device_prefix"]
        yield Imported(f"{name}, imported", _read(case, "net"), _read(case, "param_init_net"), {}, options)
    for name, (step, init, fed) in WRITTEN.items():
        yield Imported(f"{name}, imported", _net(step, fed, init), _net(init, {}), fed, {})
    for case in cases("inject"):
        known = case.name.startswith("edge") and case.name != "edge_undefined_input"  # which nobody can load
        if known and case.folder.is_dir() and case.has("before_0"):
            yield Imported(f"{case.name}, imported", _read(case, "before_0"), None, None, {})
    from google.protobuf import text_format

    for kind in ("If", "While", "RecurrentNetwork", "Do"):
        message = text_format.Parse(_NESTED.format(type=kind), messages().NetDef())
        yield Imported(f"{kind} with nets, imported", message, None, None, {})


def _read(case: Case, stem: str) -> Any:
    return encode(caffe2.load_net(case.net(stem)))


def _net(ops: Sequence[Any], fed: Shapes, init: Sequence[Any] = ()) -> Any:
    made = dict.fromkeys(name for each in init for name in each.output)
    return messages().NetDef(name="net", op=ops, external_input=[*fed, *made])
