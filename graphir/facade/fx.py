"""Programs as graphs of ``torch.fx``, and forward programs as programs of ``torch.export``.

A graph holds the program's state under the module's names, and its operators as calls: one node an operator, in their
order. It is called as a session's step is. Sizes that follow a dimension are computed from the shapes of the inputs,
so one graph serves any size that the program does.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from graphir.runtime.interface.arguments import Arguments
from graphir.runtime.kernels.invoke import perform
from graphir.runtime.state import State

from ..errors import GraphirError
from ..ir.blob import Blob
from ..ir.calls import arrange, filled
from ..ir.dtype import TORCH_NAME
from ..ir.guard import parse_guard
from ..ir.moved import moved
from ..ir.operator import Arg, Operator, Symbol, map_arg
from ..ir.opset import overload
from ..ir.optypes.own import OWN
from ..ir.program import Program
from ..ir.seeds import mix
from ..ir.size import Polynomial, Size, bind, bind_shape, dimension, size_dims
from ..ir.structure import read_structure, tree_spec
from ..ir.symbols import to_torch

__all__ = ["to_exported", "to_fx"]


def to_fx(program: Program) -> fx.GraphModule:
    """The program's step as a module whose forward is a graph; on the host, with a copy of the program's state.

    Called as a step is (inputs, targets, keyword arguments), it returns what a step returns, and a training step
    updates the module's parameters, buffers and optimizer state, as a session does. Parameters and buffers have the
    names that they have in the module; what else lives from step to step is a buffer too, learning rates (``lr``) and
    ``step`` included, with an underscore behind where the module has that name. Each node's ``meta`` has its operator's
    ``blob``, ``module`` and ``source``.

    Raises:
        GraphirError: the program has several replicas, no state to start from, or names that a graph can't have.
    """
    if len(program.replicas) > 1:
        raise GraphirError(
            f"program {program.name!r} has {len(program.replicas)} replicas", fix="take the program before replicate"
        )
    if not program.state:
        raise GraphirError(
            f"program {program.name!r} has no state, so a graph has no parameters",
            fix="capture the model with its weights, or load the program with its state",
        )
    return _Writer(program).module()


def to_exported(program: Program) -> torch.export.ExportedProgram:
    """A forward program as ``torch.export`` has it; dimensions that sizes follow stay dynamic.

    Raises:
        GraphirError: the program is a training step, draws random numbers, or takes one tensor as two arguments; what
            :func:`to_fx` raises.
    """
    if program.interface.loss is not None or any(op.phase != "forward" for op in program.step.ops):
        raise GraphirError(f"program {program.name!r} is a training step", fix="capture the model without a loss")
    random = next((op for op in program.step.ops if op.seed is not None), None)
    if random is not None:
        where = f"module {random.module!r}" if random.module else ""
        raise GraphirError(
            f"{random.type} draws random numbers, which an exported program would not draw by step",
            where=where,
            fix="capture the model in evaluation mode",
        )
    fed = [feed.blob for feed in program.interface.feeds if feed.blob is not None]
    if twice := next((name for name in fed if fed.count(name) > 1), None):
        raise GraphirError(
            f"{twice!r} is one tensor as two arguments, which an exported program can't ask for",
            fix="capture the model with a tensor for each",
        )
    module = to_fx(program)
    blobs, prefix, auto = program.step.blobs, program.replicas[0], torch.export.Dim.AUTO
    leaves: list[Any] = []
    dynamic: list[Any] = []
    for feed in program.interface.feeds:
        blob = None if feed.blob is None else blobs[prefix + feed.blob]
        leaves.append(feed.value if blob is None else _example(blob, program))
        shape = () if blob is None else blob.shape or ()
        dynamic.append({d: auto for d, size in enumerate(shape) if isinstance(size, Polynomial)} or None)
    structure = _structure(program.interface.arguments)
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    # The shapes of the arguments go by the names of the forward's parameters.
    dims_of_args, dims_of_kwargs = pytree.tree_unflatten(dynamic, structure)
    names = module.graph._codegen.pytree_info.orig_args  # type: ignore[attr-defined]
    shapes = {**dict(zip(names, dims_of_args, strict=False)), **dims_of_kwargs}
    return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)


def _example(blob: Blob, program: Program) -> Tensor:
    assert blob.shape is not None and blob.dtype is not None
    return torch.zeros(bind_shape(blob.shape, program.dims), dtype=getattr(torch, TORCH_NAME[blob.dtype]))


def _structure(text: str) -> pytree.TreeSpec:
    return tree_spec(read_structure(text))


class _Graph(fx.GraphModule):
    """A graph module that is not pickled.

    Torch reads one from a pickle by tracing its code: what depends on no argument would be executed then, once and for
    all, such as what counts steps and draws random numbers.
    """

    def __reduce__(self) -> NoReturn:
        raise GraphirError(
            "a graph of a program can't be pickled: torch would trace it anew, without what it writes and draws",
            fix="save the program with its state and call to_fx where it is loaded; state_dict() has what it trained",
        )


class _Writer:
    """Writes one program's step as a graph.

    Attributes:
        attributes: what the module holds, by path.
        taken: first words of those paths.
        values: the node of each (name, version) so far.
        held: the node of each blob that the module holds.
        dims: the node of each dimension that an argument shows.
        sizes: the node of each size that was computed.
        step: the node that counts steps, where numbers are drawn.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.blobs = program, program.step.blobs
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.taken = {path.split(".")[0] for path in program.interface.module_state}
        self.values: dict[tuple[str, int], fx.Node] = {}
        self.held: dict[str, fx.Node] = {}
        self.dims: dict[str, fx.Node] = {}
        self.sizes: dict[Polynomial, fx.Node] = {}
        self.step: fx.Node | None = None
        self.random = any(op.seed is not None for op in program.step.ops)
        # An as_strided operator counts its offset from the start of the storage.
        self.from_offset_0 = any(op.type.startswith("aten.as_strided") for op in program.step.ops)

    def module(self) -> fx.GraphModule:
        interface = self.program.interface
        Arguments(interface.arguments, interface.feeds)  # refuses what is no structure of arguments
        structure = _structure(interface.arguments)
        self.refuse_names()
        self.arguments()
        self.state()
        for op in self.program.step.ops:
            self.operator(op)
        if self.step is not None:
            self.graph.call_function(torch.ops.aten.add_.Tensor, (self.step, 1))
        result = self.result()
        _, kwargs = pytree.tree_unflatten([0] * structure.num_leaves, structure)
        names = [*_parameter_names(self.program, kwargs), *kwargs]
        self.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, structure, result)))
        module = _Graph(self.attributes, self.graph, _class_name(self.program.name))
        for path, blob in self.program.interface.module_state.items():
            if blob in self.held:
                _tie(module, path, self.held[blob].target)
        return module

    def refuse_names(self) -> None:
        """Names that the module has but a graph module can't."""
        own = fx.GraphModule({}, fx.Graph())
        for path in self.program.interface.module_state:
            words = path.split(".")
            reasons = {
                f"{words[0]!r} is its own": hasattr(own, words[0]),
                "it holds a word of Python's": any(map(keyword.iskeyword, words)),
                "it holds what torch would write into the graph's code as it stands": not _is_inert(path),
            }
            if reason := next((reason for reason, holds in reasons.items() if holds), None):
                raise GraphirError(
                    f"a torch.fx.GraphModule can't have {path!r}: {reason}",
                    where=f"program {self.program.name!r}",
                    fix="rename it in the module",
                )

    def arguments(self) -> None:
        first: dict[str, fx.Node] = {}
        given: set[str] = set()
        for i, feed in enumerate(self.program.interface.feeds):
            node = self.graph.placeholder(_unused(_identifier(feed.blob or f"argument_{i}"), given))
            node.meta["blob"] = feed.blob
            if feed.blob is None:
                self.graph.call_function(checked_constant, (node, feed.value, f"argument {i}"))
            elif feed.blob in first:
                self.graph.call_function(checked_same, (node, first[feed.blob], feed.blob))
            else:
                first[feed.blob] = node
        prefix = self.program.replicas[0]
        read = {prefix + name: node for name, node in first.items() if prefix + name in self.blobs}
        nodes = {name: self.checked(node, self.blobs[name]) for name, node in read.items()}
        self.measure(nodes)
        self.guard()
        for name, node in nodes.items():
            self.values[name, 0] = self.laid_out(node, self.blobs[name])

    def checked(self, node: fx.Node, blob: Blob) -> fx.Node:
        """An argument whose type and fixed sizes are the program's."""
        if blob.shape is None or blob.dtype is None:
            return node
        shape = [size if isinstance(size, int) else None for size in blob.shape]
        dtype = getattr(torch, TORCH_NAME[blob.dtype])
        return self.graph.call_function(checked_tensor, (node, shape, dtype, blob.name))

    def measure(self, nodes: Mapping[str, fx.Node]) -> None:
        """The program's dimensions, from the shapes of the arguments, which must agree."""
        extents = [
            (name, d, size)
            for name in nodes
            for d, size in enumerate(self.blobs[name].shape or ())
            if isinstance(size, Polynomial)
        ]
        for name, d, size in extents:
            extent = self.graph.call_function(torch.ops.aten.sym_size.int, (nodes[name], d))
            dim, *others = size_dims(size)
            if dim not in self.dims and not others:
                constant, coefficient = (bind(size, {dim: value}) for value in (0, 1))
                coefficient -= constant
                exact = size == dimension(dim)
                arguments = (extent, constant, coefficient, f"{name} along dimension {d}")
                self.dims[dim] = extent if exact else self.graph.call_function(measured, arguments)
            else:
                self.graph.call_function(agreed, (extent, self.size(size), f"{name} along dimension {d}", str(size)))

    def guard(self) -> None:
        if self.program.covers.only:
            raise GraphirError(
                f"a graph cannot ask for which sizes it holds: {self.program.covers.only}",
                fix="let Python compute with sizes by sums, products and exact quotients, and compare these",
            )
        for guard in self.program.covers.guards:
            if any(dim in self.dims for dim in guard.dims):
                self.graph.call_function(guarded, (self.size(guard.size), str(guard), guard.reason))

    def laid_out(self, node: fx.Node, blob: Blob) -> fx.Node:
        """An argument in the layout in which it was captured."""
        if self.from_offset_0:
            node = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        if blob.strides is None:
            return self.graph.call_function(torch.ops.aten.contiguous.default, (node,))
        return self.graph.call_function(strided, (node, [self.size(stride) for stride in blob.strides]))

    def state(self) -> None:
        tensors = State(self.program, self.program.state).tensors
        paths: dict[str, str] = {}
        for path, blob in self.program.interface.module_state.items():
            paths.setdefault(blob, path)
        numbers: dict[str, Any] = {}
        for group in self.program.interface.param_groups:
            now = moved(group.options)
            numbers |= {group.lr: group.options["lr"], **{blob: now[name] for name, blob in group.numbers.items()}}
        for name in self.program.step.external_inputs:
            if (name, 0) in self.values:
                continue
            if name in numbers:
                value: Tensor = torch.tensor(numbers[name], dtype=torch.float64)
            elif name in tensors:
                value = tensors[name].clone()
            else:
                raise GraphirError(f"input {name!r} of the step is neither an argument nor state")
            path = paths[name] if name in paths else _unused(_identifier(name), self.taken)
            self.values[name, 0] = self.attribute(path, name, value)
        if self.random:
            done = torch.tensor(int(self.program.state.get("step", 0)))
            self.step = self.attribute(_unused("step", self.taken), "step", done)

    def attribute(self, path: str, name: str, value: Tensor) -> fx.Node:
        role = self.blobs[name].role if name in self.blobs else "state"
        trains = self.program.interface.loss is None and value.is_floating_point()
        held: Any = torch.nn.Parameter(value, requires_grad=trains) if role == "param" else torch.nn.Buffer(value)
        self.attributes[path] = held
        node = self.held[name] = self.graph.create_node("get_attr", path, name=_identifier(path))
        node.meta["blob"] = name
        return node

    def operator(self, op: Operator) -> None:
        call = arrange(op)
        inputs = [self.values[read] for read in op.reads]

        def drawn() -> fx.Node:
            return self.graph.call_function(generator, (self.step, op.seed))

        positional, named = filled(call, inputs, self.constant, torch.device("cpu"), drawn)
        target: Any = overload(op.type) if op.type not in OWN else own_operator
        if op.type in OWN:
            positional = [op.type, *positional]
        name = _identifier(op.outputs[0]) if op.outputs else None
        node = self.graph.create_node("call_function", target, tuple(positional), named, name)
        node.meta.update(blob=op.outputs[0] if op.outputs else "", module=op.module, source=op.source)
        overwritten = dict(op.effects.writes)
        made: dict[int, fx.Node] = {}
        for k, group in enumerate(call.returned):
            item = node if call.single else self.item(node, k)
            for j, position in enumerate(group if isinstance(group, list) else [group]):
                if position is not None and position not in overwritten:
                    made[position] = self.item(item, j) if isinstance(group, list) else item
        for position, (name, version) in enumerate(op.makes):
            if position in overwritten:
                self.values[name, version] = inputs[overwritten[position]]
            elif name in self.held:
                target = self.held[name]
                self.values[name, version] = self.graph.call_function(
                    torch.ops.aten.copy_.default, (target, made[position])
                )
            else:
                self.values[name, version] = made[position]

    def item(self, node: fx.Node, position: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, position))

    def constant(self, arg: Arg) -> Any:
        return map_arg(arg, self.scalar, list)

    def scalar(self, scalar: Any) -> Any:
        if isinstance(scalar, Symbol):
            return to_torch(scalar)
        return self.size(scalar) if isinstance(scalar, Polynomial) else scalar

    def size(self, size: Size) -> Any:
        """A node that computes a size from the dimensions."""
        if isinstance(size, int):
            return size
        if size not in self.sizes:
            terms: list[Any] = []
            for monomial, coefficient in size.terms:
                factors: list[Any] = [self.dim(name) for name in monomial]
                if coefficient != 1 or not factors:
                    factors.append(coefficient)
                terms.append(reduce(lambda a, b: self.graph.call_function(operator.mul, (a, b)), factors))
            self.sizes[size] = reduce(lambda a, b: self.graph.call_function(operator.add, (a, b)), terms)
        return self.sizes[size]

    def dim(self, name: str) -> Any:
        return self.dims.get(name, self.program.dims[name])

    def result(self) -> pytree.TreeSpec:
        """Writes what the step returns; its structure."""
        last: dict[str, int] = {}
        for name, version in self.values:
            last[name] = version
        interface, prefix = self.program.interface, self.program.replicas[0]
        if interface.loss is not None:
            name = prefix + interface.loss
            self.graph.output([self.values[name, last[name]]])
            return pytree.tree_structure(0)
        leaves = [
            fetch.value if fetch.blob is None else self.values[prefix + fetch.blob, last[prefix + fetch.blob]]
            for fetch in interface.fetches
        ]
        self.graph.output(leaves)
        return _structure(interface.results) if interface.results else pytree.tree_structure((0,) * len(leaves))


def _tie(module: fx.GraphModule, path: str, other: Any) -> None:
    """Give what the module has under the path *other* to *path* too."""
    *parents, last = path.split(".")
    owner: torch.nn.Module = module
    for parent in parents:
        if not hasattr(owner, parent):
            owner.add_module(parent, torch.nn.Module())
        owner = getattr(owner, parent)
    if not hasattr(owner, last):
        setattr(owner, last, attrgetter(other)(module))


def _is_inert(path: str) -> bool:
    """Whether a path can stand between double quotes in Python's code: fx writes it there, without escaping it."""
    return path.isprintable() and not {'"', "\\"} & set(path)


def _identifier(name: str) -> str:
    word = re.sub(r"\W", "_", name)
    if not f"_{word}".isidentifier():  # \w has digits that Python's names have not, such as superscripts
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
    return word if word.isidentifier() and word != "self" and not keyword.iskeyword(word) else f"_{word}"


def _unused(name: str, taken: set[str]) -> str:
    """The name, with underscores behind until it is not taken; from then on it is."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"\W+", name)) or "Program"


def _parameter_names(program: Program, kwargs: Iterable[str]) -> list[str]:
    """Names of the positional parameters of the forward: the blob where an argument is one tensor.

    Raises:
        GraphirError: a keyword argument's name is no identifier.
    """
    taken = set(kwargs)
    for name in taken:
        if name != _identifier(name):
            raise GraphirError(
                f"a graph's forward can't have a parameter {name!r}",
                where=f"program {program.name!r}",
                fix="rename the keyword argument",
            )
    found: list[str] = []
    structure = _structure(program.interface.arguments)
    leaves = iter(program.interface.feeds)
    for i, child in enumerate(_children(_children(structure)[0])):
        feeds = [next(leaves) for _ in range(child.num_leaves)]
        blob = feeds[0].blob if child.is_leaf() else None
        found.append(_unused(_identifier(blob or f"argument_{i}"), taken))
    return found


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    found: Any = spec.children() if hasattr(spec, "children") else spec.children_specs  # torch 2.11 has the latter
    return list(found)


# What nodes call that torch has no operator for.


def own_operator(type: str, *positional: Any, **named: Any) -> Any:
    """One of graphir's own types; an optimizer's update overwrites its operands."""
    return perform(type, positional, named, torch.device("cpu"))


def generator(step: Tensor, seed_id: int) -> torch.Generator:
    """A generator that is seeded as the operator with this seed id is, on the one replica that there is."""
    return torch.Generator().manual_seed(mix(int(step), 0, seed_id))


def checked_constant(value: Any, captured: Any, name: str) -> None:
    """Refuses another value than the captured one."""
    if type(value) is not type(captured) or (value != captured and (value == value or captured == captured)):
        raise GraphirError(f"{name} was {captured!r} when the program was captured, now {value!r}")


def checked_same(value: Any, first: Any, name: str) -> None:
    """Refuses two arguments that were one when the program was captured."""
    if value is not first:
        raise GraphirError(f"{name!r} was given twice when the program was captured, now these are two arguments")


def checked_tensor(value: Any, shape: Sequence[int | None], dtype: torch.dtype, name: str) -> Tensor:
    """An argument, which has to be as the program takes it; None stands for a size that may be any."""
    if not isinstance(value, Tensor):
        raise GraphirError(f"{name} is of type {type(value).__name__}, not a tensor")
    if value.dtype != dtype:
        raise GraphirError(f"{name} has dtype {value.dtype}, the program takes {dtype}")
    given = tuple(value.shape)
    fits = len(given) == len(shape)
    if not fits or any(want not in (None, have) for want, have in zip(shape, given, strict=True)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise GraphirError(f"{name} has shape {list(given)}, the program takes [{wanted}]")
    return value


def measured(extent: int, constant: int, coefficient: int, where: str) -> int:
    """The dimension of which an extent is ``coefficient * dimension + constant``."""
    if (extent - constant) % coefficient:
        raise GraphirError(f"{where} has size {extent}, of which {coefficient} is no divisor")
    return (extent - constant) // coefficient


def guarded(size: int, guard: str, reason: str) -> None:
    """Refuses a size for which the step is another one."""
    if not parse_guard(guard, reason).allows(size):
        raise GraphirError(f"the program takes {guard}: {reason}", fix="capture the model at these sizes")


def agreed(extent: int, expected: int, where: str, size: str) -> None:
    """Refuses an extent that differs from what the others say."""
    if extent != expected:
        raise GraphirError(f"{where} has size {extent}, but {size} is {expected} by the other arguments")


def strided(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A tensor with these strides."""
    if value.stride() == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)
