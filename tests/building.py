"""Builds the seeded random programs of :mod:`nets`, operator by operator; gradients follow torch's rules."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from emitting import BATCHES, Emitter, Unfit, affine
from torch.utils import _pytree

from graphir.ir.blob import Role
from graphir.ir.device import CPU, gpu
from graphir.ir.net import Net
from graphir.ir.operator import Arg, Operator, Symbol
from graphir.ir.opset import effects_of
from graphir.ir.program import Interface, ParamGroup, Program, Slot
from graphir.ir.size import Polynomial, Shape, Size, bind

_LR = 1e-3
_LIMIT = 1e3  # values that may grow beyond this are first squashed


class ProgramBuilder(Emitter):
    """A program in the making: forward, loss, backward, update, then program."""

    def __init__(self, rng: random.Random, devices: int, spread: float) -> None:
        super().__init__(rng, devices, spread)
        self.gradients: dict[str, str] = {}
        self.param_grads: dict[str, str] = {}
        self.vjps: list[tuple[str, Callable[[str], None]]] = []
        self.pending: dict[str, list[str]] = {}
        self.modules = 0
        self.features = rng.choice((3, 4, 6))
        for name in ("x", "y")[: rng.choice((1, 2))]:
            self.declare(name, "input", gpu(0), [torch.empty(n, self.features, device="meta") for n in BATCHES])
            self.bound[name] = 4.0
            self.depends.add(name)

    # -- forward

    def forward(self, count: int, mutate: bool, views: bool) -> None:
        live = list(self.external)
        kinds = ["mm", "mm", "relu", "add", "mul", "tanh", "cat", "dropout", "scale", "max", "full"]
        kinds += ["batch_norm"] if mutate else []
        kinds += ["t", "view", "slice", "split", "unsafe_view", "expand"] if views else []
        self.linear("x", live)
        attempts = 0
        while len(self.ops) < count and attempts < 20 * count:
            attempts += 1
            before = len(self.ops)
            x = self.rng.choice(live[-6:])
            if self.bound[x] > _LIMIT:
                self.unary("tanh", x, live)
                continue
            try:
                getattr(self, f"_{self.rng.choice(kinds)}")(x, live)
            except Unfit:
                assert len(self.ops) == before or self.ops[-1].outputs[0] in self.blobs

    def unary(self, kind: str, x: str, live: list[str]) -> None:
        (out,) = self.emit(f"aten.{kind}.default", [x], bound=1.0 if kind != "relu" else self.bound[x])
        live.append(out)
        backward = {"relu": "aten.threshold_backward.default", "tanh": "aten.tanh_backward.default"}[kind]
        args: dict[str, Arg] = {"threshold": 0} if kind == "relu" else {}
        self.vjp(out, lambda g: self.give(x, self.emit(backward, [g, out], args, f"{x}_grad", phase="backward")[0]))

    def _relu(self, x: str, live: list[str]) -> None:
        self.unary("relu", x, live)

    def _tanh(self, x: str, live: list[str]) -> None:
        self.unary("tanh", x, live)

    def _mm(self, x: str, live: list[str]) -> None:
        if len(self.meta[x][0].shape) != 2 or isinstance(self.blobs[x].shape[1], Polynomial):  # type: ignore[index]
            raise Unfit
        self.linear(x, live)

    def linear(self, x: str, live: list[str]) -> None:
        self.modules += 1
        module, width = f"fc{self.modules}", self.rng.choice((3, 4, 6))
        inner = self.meta[x][0].shape[1]
        weight = self.hold(f"{module}.weight", "param", self.randn(inner, width))
        bound = self.bound[x] * inner
        if self.rng.random() < 0.5:
            bias = self.hold(f"{module}.bias", "param", self.randn(width))
            (out,) = self.emit("aten.addmm.default", [bias, x, weight], name=module, module=module, bound=bound)
        else:
            bias = ""
            (out,) = self.emit("aten.mm.default", [x, weight], name=module, module=module, bound=bound)
        live.append(out)

        def vjp(g: str) -> None:
            if x in self.depends:
                (wt,) = self.emit("aten.t.default", [weight], name=f"{weight}.t", phase="backward", module=module)
                self.give(x, self.emit("aten.mm.default", [g, wt], name=f"{x}_grad", phase="backward")[0])
            (xt,) = self.emit("aten.t.default", [x], name=f"{x}.t", phase="backward", module=module)
            self.give(weight, self.emit("aten.mm.default", [xt, g], name=f"{weight}_grad", phase="backward")[0])
            if bias:
                self.give(
                    bias, self.emit("aten.sum.dim_IntList", [g], {"dim": (0,)}, f"{bias}_grad", phase="backward")[0]
                )

        self.vjp(out, vjp)

    def _add(self, x: str, live: list[str]) -> None:
        y = self.peer(x, live)
        (out,) = self.emit("aten.add.Tensor", [x, y], name="add", bound=self.bound[x] + self.bound[y])
        live.append(out)

        def vjp(g: str) -> None:
            self.give(x, g)
            self.give(y, g)

        self.vjp(out, vjp)

    def _mul(self, x: str, live: list[str]) -> None:
        y = self.peer(x, live)
        (out,) = self.emit("aten.mul.Tensor", [x, y], name="mul", bound=self.bound[x] * self.bound[y])
        live.append(out)

        def vjp(g: str) -> None:
            for a, b in ((x, y), (y, x)):
                self.give(a, self.emit("aten.mul.Tensor", [g, b], name=f"{a}_grad", phase="backward")[0])

        self.vjp(out, vjp)

    def _scale(self, x: str, live: list[str]) -> None:
        (out,) = self.emit("aten.mul.Tensor", [x], {"other": 0.5}, "scale", bound=self.bound[x])
        live.append(out)
        grad = f"{x}_grad"
        self.vjp(
            out, lambda g: self.give(x, self.emit("aten.mul.Tensor", [g], {"other": 0.5}, grad, phase="backward")[0])
        )

    def _max(self, x: str, live: list[str]) -> None:
        """Two outputs, of which one is integer and one is summed up."""
        values, _ = self.emit(
            "aten.max.dim", [x], {"dim": -1, "keepdim": True}, ("max", "max_indices"), bound=self.bound[x]
        )
        live.append(values)

    def _full(self, x: str, live: list[str]) -> None:
        """A factory whose size depends on the batch."""
        shape = self.blobs[x].shape
        assert shape is not None
        (full,) = self.emit("aten.full.default", [], {"size": shape, "fill_value": 0.25, "dtype": Symbol("f32")})
        (out,) = self.emit("aten.add.Tensor", [x, full], {"alpha": 2}, "shifted", bound=self.bound[x] + 1)
        live.append(out)
        self.vjp(out, lambda g: self.give(x, g))

    def _cat(self, x: str, live: list[str]) -> None:
        y = self.peer(x, live)
        (out,) = self.emit("aten.cat.default", [[x, y]], {"dim": -1}, "cat", bound=max(self.bound[x], self.bound[y]))
        live.append(out)
        width = self.blobs[x].shape[-1]  # type: ignore[index]

        def vjp(g: str) -> None:
            args: dict[str, Arg] = {"split_size": width, "dim": -1}
            parts = self.emit("aten.split.Tensor", [g], args, (f"{x}_grad", f"{y}_grad"), phase="backward")
            self.give(x, parts[0])
            self.give(y, parts[1])

        self.vjp(out, vjp)

    def _dropout(self, x: str, live: list[str]) -> None:
        (mask,) = self.emit("aten.bernoulli.p", [x], {"p": 0.5}, "mask")
        (out,) = self.emit("aten.mul.Tensor", [x, mask], name="dropout", bound=self.bound[x])
        live.append(out)
        grad = f"{x}_grad"
        self.vjp(out, lambda g: self.give(x, self.emit("aten.mul.Tensor", [g, mask], name=grad, phase="backward")[0]))

    def _batch_norm(self, x: str, live: list[str]) -> None:
        if len(self.meta[x][0].shape) != 2 or isinstance(self.blobs[x].shape[1], Polynomial):  # type: ignore[index]
            raise Unfit
        self.modules += 1
        module, width = f"bn{self.modules}", self.meta[x][0].shape[1]
        mean = self.hold(f"{module}.running_mean", "buffer", torch.zeros(width))
        var = self.hold(f"{module}.running_var", "buffer", torch.ones(width))
        count = self.hold(f"{module}.num_batches_tracked", "buffer", torch.tensor(0))
        affine = self.rng.random() < 0.5
        weight = self.hold(f"{module}.weight", "param", 1 + self.randn(width)) if affine else None
        bias = self.hold(f"{module}.bias", "param", self.randn(width)) if affine else None
        self.bump(count, module)
        args: dict[str, Arg] = {"training": True, "momentum": 0.1, "eps": 1e-05}
        names = (module, f"{module}.save_mean", f"{module}.save_invstd")
        out, save_mean, save_invstd = self.emit(
            "aten.native_batch_norm.default", [x, weight, bias, mean, var], args, names, module=module, bound=10.0
        )
        live.append(out)

        def vjp(g: str) -> None:
            back: dict[str, Arg] = {"train": True, "eps": 1e-05, "output_mask": (True, affine, affine)}
            operands = [g, x, weight, mean, var, save_mean, save_invstd]
            grads = [f"{x}_grad"] + ([f"{weight}_grad", f"{bias}_grad"] if affine else [])
            given = self.emit(
                "aten.native_batch_norm_backward.default", operands, back, grads, phase="backward", module=module
            )
            for name, grad in zip([x, weight, bias], given, strict=False):
                assert name is not None
                self.give(name, grad)

        self.vjp(out, vjp)

    def bump(self, count: str, module: str) -> None:
        """``num_batches_tracked.add_(1)``."""
        args: dict[str, Arg] = {"other": 1}
        effects = effects_of("aten.add_.Tensor", args, None, 1, None)
        device = self.blobs[count].device
        self.versions[count] = 1
        self.ops.append(
            Operator("aten.add_.Tensor", (count,), (count,), args, device, "forward", module, effects=effects)._replace(
                output_versions=(1,)
            )
        )

    # -- views

    def _t(self, x: str, live: list[str]) -> None:
        (out,) = self.emit("aten.t.default", [x], name=f"{x}.t", bound=self.bound[x])
        live.append(out)
        grad = f"{x}_grad"
        self.vjp(out, lambda g: self.give(x, self.emit("aten.t.default", [g], name=grad, phase="backward")[0]))

    def _view(self, x: str, live: list[str]) -> None:
        self.reshape("aten.view.default", x, live)

    def _unsafe_view(self, x: str, live: list[str]) -> None:
        self.reshape("aten._unsafe_view.default", x, live)

    def reshape(self, type: str, x: str, live: list[str]) -> None:
        shape = self.blobs[x].shape
        assert shape is not None
        size: Shape = (*shape, 1) if self.rng.random() < 0.5 else (_times(shape),)
        (out,) = self.emit(type, [x], {"size": size}, f"{x}.view", bound=self.bound[x])
        live.append(out)

        def vjp(g: str) -> None:
            if any(not t.is_contiguous() for t in self.meta[g]):
                args: dict[str, Arg] = {"memory_format": Symbol("contiguous_format")}
                (g,) = self.emit("aten.clone.default", [g], args, f"{x}_grad.dense", phase="backward")
            self.give(x, self.emit("aten.view.default", [g], {"size": shape}, f"{x}_grad", phase="backward")[0])

        self.vjp(out, vjp)

    def _slice(self, x: str, live: list[str]) -> None:
        dim, shape = len(self.meta[x][0].shape) - 1, self.blobs[x].shape
        if not shape or shape[-1] == 1:
            raise Unfit
        args: dict[str, Arg] = {"dim": dim, "start": 1}
        (out,) = self.emit("aten.slice.Tensor", [x], args, f"{x}.slice", bound=self.bound[x])
        live.append(out)
        grad = f"{x}_grad"
        back: dict[str, Arg] = {"input_sizes": shape, "dim": dim, "start": 1, "end": 2**63 - 1, "step": 1}
        type = "aten.slice_backward.default"
        self.vjp(out, lambda g: self.give(x, self.emit(type, [g], back, grad, phase="backward")[0]))

    def _split(self, x: str, live: list[str]) -> None:
        shape = self.blobs[x].shape
        if not shape or not isinstance(shape[-1], int) or shape[-1] < 2:
            raise Unfit
        args: dict[str, Arg] = {"split_size": (shape[-1] + 1) // 2, "dim": -1}
        left, right = self.emit("aten.split.Tensor", [x], args, (f"{x}.left", f"{x}.right"), bound=self.bound[x])
        live += [left, right]

    def _expand(self, x: str, live: list[str]) -> None:
        shape = self.blobs[x].shape
        if not shape or len(shape) > 2:
            raise Unfit
        args: dict[str, Arg] = {"size": (2, *shape)}
        (out,) = self.emit("aten.expand.default", [x], args, f"{x}.expand", bound=self.bound[x])
        live.append(out)
        back: dict[str, Arg] = {"dim": (0,)}
        grad = f"{x}_grad"
        self.vjp(out, lambda g: self.give(x, self.emit("aten.sum.dim_IntList", [g], back, grad, phase="backward")[0]))

    def peer(self, x: str, live: list[str]) -> str:
        """A live value of the same shape."""
        same = [n for n in live if self.blobs[n].shape == self.blobs[x].shape]
        return self.rng.choice(same)

    # -- loss, backward, update

    def loss(self) -> None:
        """Sum up whatever nobody reads."""
        read = {i for op in self.ops for i in op.inputs}
        ends = [
            n for n, b in self.blobs.items() if n in self.depends and n not in read and b.dtype == "f32"
            and n not in self.external
        ]  # fmt: skip
        total = ""
        for end in ends:
            shape = self.blobs[end].shape
            assert shape is not None
            (part,) = self.emit("aten.sum.default", [end], name="part", bound=1.0)
            args: dict[str, Arg] = {"size": shape}
            name = f"{end}_grad"
            self.vjp(
                part,
                lambda g, end=end, args=args, name=name: self.give(
                    end, self.emit("aten.expand.default", [g], args, name, phase="backward")[0]
                ),
            )
            if total:
                self.blobs[part] = self.blobs[part]._replace(role="activation")
                old = total
                (total,) = self.emit("aten.add.Tensor", [old, part], name="total")

                def vjp(g: str, old: str = old, part: str = part) -> None:
                    self.give(old, g)
                    self.give(part, g)

                self.vjp(total, vjp)
            else:
                total = part
        (self.loss_blob,) = self.emit("aten.mul.Tensor", [total], {"other": 0.01}, "loss", roles="output")

    def vjp(self, output: str, rule: Callable[[str], None]) -> None:
        if output in self.depends:
            self.vjps.append((output, rule))

    def give(self, name: str, grad: str) -> None:
        self.pending.setdefault(name, []).append(grad)

    def backward(self) -> None:
        (seed,) = self.emit("aten.ones_like.default", [self.loss_blob], name="loss_grad", phase="backward")
        self.gradients[self.loss_blob] = seed
        self.blobs[seed] = self.blobs[seed]._replace(role="gradient")
        total = next(op for op in reversed(self.ops) if op.outputs[0] == self.loss_blob).inputs[0]
        args: dict[str, Arg] = {"other": 0.01}
        self.give(total, self.emit("aten.mul.Tensor", [seed], args, f"{total}_grad", phase="backward")[0])
        for output, rule in reversed(self.vjps):
            grad = self.gathered(output)
            if grad:
                if not self.blobs[output].is_view:
                    self.gradients[output] = grad
                try:
                    rule(grad)
                except Unfit:
                    continue
        for name in self.external:
            if self.blobs[name].role == "param" and self.gathered(name):
                self.param_grads[name] = self.gathered(name)
        for grad in {*self.gradients.values(), *self.param_grads.values()}:
            if self.blobs[grad].role != "output":
                self.set_role(self.blobs[grad].storage, "gradient")

    def set_role(self, storage: str, role: Role) -> None:
        for name, blob in self.blobs.items():
            if blob.storage == storage:
                self.blobs[name] = blob._replace(role=role)

    def gathered(self, name: str) -> str:
        """The one gradient of *name*: what was given, added up."""
        given = self.pending.get(name, [])
        while len(given) > 1:
            a, b = given[0], given[1]
            (added,) = self.emit("aten.add.Tensor", [a, b], name=f"{name}_grad", phase="backward")
            given[:2] = [added]
        return given[0] if given else ""

    def update(self) -> None:
        self.declare("lr", "input", CPU, [torch.empty((), dtype=torch.float64, device="meta")] * len(BATCHES))
        for param, grad in self.param_grads.items():
            buffer = self.hold(f"{param}.momentum_buffer", "state", torch.zeros_like(self.state[param]))
            self.emit("graphir.sgd", [param, grad, buffer, "lr"], {"momentum": 0.9}, phase="update")

    # -- the program

    def program(self, name: str) -> Program:
        kept = {n: self.blobs[n] for n in self.external} | self.blobs
        outputs = (self.loss_blob, *(() if "lr" in kept else dict.fromkeys(self.param_grads.values())))
        step = Net(f"{name}.step", tuple(self.ops), kept, tuple(self.external), outputs, self.gradients)
        held = {n: b for n, b in kept.items() if n in self.state}
        loads = tuple(Operator("graphir.load", (), (n,), {"key": n}, b.device, "init") for n, b in held.items())
        return Program(
            name,
            Net(f"{name}.init", loads, held),
            step,
            {"batch": BATCHES[0]},
            interface=self.interface(),
            state=self.state,
        )

    def interface(self) -> Interface:
        inputs = tuple(n for n in self.external if self.blobs[n].role == "input" and n != "lr")
        params = tuple(n for n in self.external if self.blobs[n].role == "param")
        trained = tuple(n for n in params if n in self.param_grads)
        training = "lr" in self.blobs
        options = {"lr": _LR, "momentum": 0.9, "dampening": 0, "weight_decay": 0, "nesterov": False, "fused": None}
        return Interface(
            arguments=_pytree.treespec_dumps(_pytree.tree_structure((tuple(inputs), {}))),
            feeds=tuple(Slot(n, 0) for n in inputs),
            loss=self.loss_blob,
            module_state={n: n for n in self.external if self.blobs[n].role in ("param", "buffer")},
            optimizers=("SGD",) if training else (),
            optimizer_state={p: {"momentum_buffer": f"{p}.momentum_buffer"} for p in trained} if training else {},
            param_groups=(ParamGroup("lr", trained, options),) if training else (),
        )


def _times(shape: Shape) -> Size:
    """The number of elements, if it is affine."""
    numels = []
    for batch in BATCHES:
        n = 1
        for size in shape:
            n *= bind(size, {"batch": batch})
        numels.append(n)
    return affine(numels)
