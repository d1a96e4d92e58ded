"""Caffe2's optimizers of rows, against its loops over slots written out in numpy."""

import definitions
import numpy as np
import pytest
import torch
from lowering import close, generator, op, program, run

import graphir
from graphir import GraphirError, caffe2, passes

ROWS, SLOTS = 6, 9
SEEDS = pytest.mark.parametrize("seed", range(4))
INDICES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=generator(seed))


def named(seed, dtype, count=SLOTS):
    """Rows of a table, most of them several times."""
    return torch.randint(ROWS - 2, (count,), generator=generator(seed)).to(dtype)


def arrays(state, *names):
    return [state[name].numpy().copy() for name in names]


def equal(found, wanted):
    """Bit for bit."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.dtype == torch.float32 and np.array_equal(mine.numpy(), theirs)


def near(found, wanted, rtol=2e-6):
    """Within a few roundings: torch's square root is not the nearest number in all cases."""
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, torch.from_numpy(theirs), rtol)


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"epsilon": 1e-3, "weight_decay": 0.1}], ids=str)
def test_adagrad(seed, dtype, args):
    index, grads, lr = named(seed, dtype), drawn(seed + 9, SLOTS, 3), -0.1
    state = {"w": drawn(seed, ROWS, 3), "h": drawn(seed + 1, ROWS, 3).abs()}
    inputs = {"i": index, "g": grads, "lr": torch.tensor([lr])}
    found = run([op("SparseAdagrad", "w h i g lr", "w h", **args)], inputs, "w h", state=state)
    wanted = arrays(state, "w", "h")
    definitions.slot_by_slot(definitions.adagrad, wanted, index, grads.numpy(), lr, **args)
    near(found, wanted)


@SEEDS
@INDICES
@pytest.mark.parametrize("width", [1, 5])
def test_adagrad_by_rows(seed, dtype, width):
    index, grads, lr, args = named(seed, dtype), drawn(seed + 9, SLOTS, width), -0.1, {"epsilon": 1e-4}
    state = {"w": drawn(seed, ROWS, width), "h": drawn(seed + 1, ROWS).abs()}
    inputs = {"i": index, "g": grads, "lr": torch.tensor(lr)}
    found = run([op("RowWiseSparseAdagrad", "w h i g lr", "w h", **args)], inputs, "w h", state=state)
    wanted = arrays(state, "w", "h")
    definitions.slot_by_slot(definitions.adagrad_by_rows, wanted, index, grads.numpy(), lr, **args)
    near(found, wanted)


@SEEDS
@INDICES
@pytest.mark.parametrize("outputs", ["w m v", "w m v a"])
@pytest.mark.parametrize("args", [{}, {"beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3}], ids=str)
@pytest.mark.parametrize("by_rows", [False, True])
def test_adam(seed, dtype, outputs, args, by_rows):
    index, grads, lr, adapted = named(seed, dtype), drawn(seed + 9, SLOTS, 3), -0.1, outputs.endswith("a")
    second = drawn(seed + 2, ROWS).abs() if by_rows else drawn(seed + 2, ROWS, 3).abs()
    state = {"w": drawn(seed, ROWS, 3), "m": drawn(seed + 1, ROWS, 3), "v": second, "it": torch.tensor([4])}
    inputs = {"i": index, "g": grads, "lr": torch.tensor([lr])}
    kind = "RowWiseSparseAdam" if by_rows else "SparseAdam"
    found = run([op(kind, "w m v i g lr it", outputs, **args)], inputs, outputs, state=state)
    wanted = arrays(state, "w", "m", "v")
    options = {**args, "adapted": adapted, "by_rows": by_rows}
    given = definitions.slot_by_slot(definitions.adam, wanted, index, grads.numpy(), lr, 4, **options)
    near(found, wanted + [given] * adapted)


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": 1}], ids=str)
def test_momentum_sgd(seed, dtype, args):
    index, grads, lr = named(seed, dtype), drawn(seed + 9, SLOTS, 3), 0.1
    state = {"w": drawn(seed, ROWS, 3), "m": drawn(seed + 1, ROWS, 3)}
    update = op("SparseMomentumSGDUpdate", "g m lr w i", "g2 m w", **args)
    found = run([update], {"i": index, "g": grads, "lr": torch.tensor(lr)}, "w m g2", state=state)
    wanted = arrays(state, "w", "m")
    steps = definitions.slot_by_slot(definitions.momentum_sgd, wanted, index, grads.numpy(), lr, **args)
    equal(found, [*wanted, steps])


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"alpha": 0.1, "beta": 0.5, "lambda1": 3.0, "lambda2": 0.1}], ids=str)
def test_ftrl(seed, dtype, args):
    index, grads = named(seed, dtype), drawn(seed + 9, SLOTS, 3)
    state = {"w": drawn(seed, ROWS, 3), "nz": drawn(seed + 1, ROWS, 3, 2).abs()}
    found = run([op("SparseFtrl", "w nz i g", "w nz", **args)], {"i": index, "g": grads}, "w nz", state=state)
    wanted = arrays(state, "w", "nz")
    definitions.slot_by_slot(definitions.ftrl, wanted, index, grads.numpy(), **args)
    near(found, wanted, 2e-5)  # 1 by alpha, which is small, multiplies what rounding makes of roots
    assert not args or (found[0] == 0).any(), "some weight is small"


@SEEDS
def test_ftrl_with_its_rate_as_an_input(seed):
    index, grads, alpha = named(seed, torch.int64), drawn(seed + 9, SLOTS, 3), torch.tensor([0.03])
    state = {"w": drawn(seed, ROWS, 3), "nz": drawn(seed + 1, ROWS, 3, 2).abs()}
    given = {"i": index, "g": grads, "a": alpha}
    found = run([op("SparseFtrl", "w nz i g a", "w nz")], given, "w nz", state=state)
    wanted = arrays(state, "w", "nz")
    definitions.slot_by_slot(definitions.ftrl, wanted, index, grads.numpy(), alpha=0.03)
    near(found, wanted, 2e-5)  # 1 by alpha, which is small, multiplies what rounding makes of roots


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"decay": 0.8, "epsilon": 1e-3}], ids=str)
def test_adadelta(seed, dtype, args):
    index, grads, lr = named(seed, dtype), drawn(seed + 9, SLOTS, 3), -0.5
    state = {"w": drawn(seed, ROWS, 3), "h": drawn(seed + 1, ROWS, 3).abs(), "d": drawn(seed + 2, ROWS, 3).abs()}
    given = {"i": index, "g": grads, "lr": torch.tensor(lr)}
    found = run([op("SparseAdadelta", "w h d i g lr", "w h d", **args)], given, "w h d", state=state)
    wanted = arrays(state, "w", "h", "d")
    definitions.slot_by_slot(definitions.adadelta, wanted, index, grads.numpy(), lr, **args)
    near(found, wanted)


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"momentum": 2.0, "beta": 0.5}], ids=str)
def test_storm(seed, dtype, args):
    index, grads, lr = named(seed, dtype), drawn(seed + 9, SLOTS, 3), -0.1
    state = {"w": drawn(seed, ROWS, 3), "m": drawn(seed + 1, ROWS, 3), "s": torch.tensor([0.5])}
    given = {"i": index, "g": grads, "lr": torch.tensor(lr)}
    found = run([op("SparseStorm", "w m s g i lr", "w m s", **args)], given, "w m s", state=state)
    w, m, s = arrays(state, "w", "m", "s")
    rates = definitions.storm_rates(s, grads.numpy(), lr, **args)
    definitions.slot_by_slot(definitions.storm, [w, m], index, grads.numpy(), *rates)
    near(found, [w, m, s])


@SEEDS
@INDICES
@pytest.mark.parametrize("args", [{}, {"epsilon": 0.5}], ids=str)
def test_wngrad(seed, dtype, args):
    index, grads, lr = named(seed, dtype), drawn(seed + 9, SLOTS, 3), -0.1
    state = {"w": drawn(seed, ROWS, 3), "b": torch.tensor([1.5])}
    given = {"i": index, "g": grads, "lr": torch.tensor(lr)}
    found = run([op("SparseWngrad", "w b i g lr", "w b", **args)], given, "w b", state=state)
    w, b = arrays(state, "w", "b")
    shifted = b.item() + np.float32(args.get("epsilon", 1e-5))
    for row, grad in zip(index.tolist(), grads.numpy(), strict=True):
        w[row] += np.float32(lr) * grad / shifted
    near(found, [w, b + np.sum(grads.numpy() ** 2) / b])


ALL = {
    "SparseAdagrad": ("w h i g lr", "w h", {"w": 3, "h": 3}),
    "RowWiseSparseAdagrad": ("w r i g lr", "w r", {"w": 3, "r": 0}),
    "SparseAdam": ("w m h i g lr it", "w m h", {"w": 3, "m": 3, "h": 3}),
    "RowWiseSparseAdam": ("w m r i g lr it", "w m r", {"w": 3, "m": 3, "r": 0}),
    "SparseMomentumSGDUpdate": ("g m lr w i", "g2 m w", {"w": 3, "m": 3}),
    "SparseFtrl": ("w nz i g", "w nz", {"w": 3, "nz": -1}),
    "SparseAdadelta": ("w h d i g lr", "w h d", {"w": 3, "h": 3, "d": 3}),
    "SparseStorm": ("w m s g i lr", "w m s", {"w": 3, "m": 3, "s": -2}),
    "SparseWngrad": ("w s i g lr", "w s", {"w": 3, "s": -2}),
}
"""For each type its inputs, outputs and state, by width: 0 a number for each row, -1 pairs, -2 a number."""


def state_of(type, seed=0):
    shapes = {0: (ROWS,), 3: (ROWS, 3), -1: (ROWS, 3, 2), -2: (1,)}
    found = {name: drawn(seed + i, *shapes[width]).abs() for i, (name, width) in enumerate(ALL[type][2].items())}
    return found | ({"it": torch.tensor([3])} if "it" in ALL[type][0].split() else {})


def prepared(type, index="i", grad="g"):
    swap = {"i": index, "g": grad}
    return op(type, " ".join(swap.get(name, name) for name in ALL[type][0].split()), ALL[type][1])


@pytest.mark.parametrize("type", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_duplicates_that_were_summed_update_their_rows_once(type, seed):
    """What ``Unique`` leaves empty changes nothing: neither parameters nor decaying moments."""
    index, grads = named(seed, torch.int64), drawn(seed + 9, SLOTS, 3)
    state = state_of(type, seed)
    once = [op("Unique", "i", "u r_"), op("UnsortedSegmentSum", "g r_", "sum"), prepared(type, "u", "sum")]
    kept = " ".join(ALL[type][2])
    inputs = {"i": index, "g": grads, "lr": torch.tensor(-0.1)}
    inputs = {name: inputs[name] for name in inputs if name != "lr" or "lr" in ALL[type][0].split()}
    if type == "SparseMomentumSGDUpdate":
        once[-1].output[0] = "sum"  # in place
    found = run(once, inputs, kept, state=state)
    unique, inverse = index.unique(return_inverse=True)
    summed = torch.zeros(len(unique), 3).index_add(0, inverse, grads)
    wanted = run([prepared(type)], {**inputs, "i": unique, "g": summed}, kept, state=state)
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs, 1e-6)


@pytest.mark.parametrize("type", ALL)
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_executors_and_steps_agree(type, executor):
    inputs = {"i": named(1, torch.int32), "g": drawn(2, SLOTS, 3), "lr": torch.tensor(-0.1)}
    inputs = {name: inputs[name] for name in inputs if name in ALL[type][0].split()}
    kept, state = " ".join(ALL[type][2]), state_of(type)
    found, wanted = [
        run([prepared(type)], inputs, kept, state=state, steps=3, executor=each) for each in (executor, "reference")
    ]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    assert not torch.equal(found[0], state["w"])


@pytest.mark.parametrize("type", ALL)
def test_a_gpu_updates_rows_by_a_counter_on_the_host(type):
    inputs = {"i": named(1, torch.int32), "g": drawn(2, SLOTS, 3), "lr": torch.tensor(-0.1)}
    inputs = {name: inputs[name] for name in inputs if name in ALL[type][0].split()}
    update = prepared(type)
    update.device_option.device_type, update.device_option.device_id = 1, 1
    state, kept = state_of(type), " ".join(ALL[type][2])
    imported = passes.inject_copies(program([update], {**inputs, **state}))
    lowered = caffe2.lower(imported, state=state, outputs=kept.split())
    graphir.verify(lowered)
    assert {o.device for o in lowered.step.ops if o.type.startswith("graphir.caffe2")} <= {"gpu:1"}
    with graphir.runtime.Session(passes.emit(lowered), lowered.state, binding="cpu") as session:
        found = session.step(**inputs)
    wanted = run([prepared(type)], inputs, kept, state=state)
    for name, value in zip(kept.split(), wanted, strict=True):
        assert torch.equal(found[name], value)


@pytest.mark.parametrize("type", sorted(ALL.keys() - {"SparseWngrad"}))
@pytest.mark.parametrize("index", [ROWS, -2])
def test_an_index_of_no_row_is_refused_while_the_step_runs(type, index):
    inputs = {"i": torch.tensor([0, index]), "g": drawn(2, 2, 3), "lr": torch.tensor(-0.1)}
    inputs = {name: inputs[name] for name in inputs if name in ALL[type][0].split()}
    with pytest.raises(GraphirError, match=f"the sparse index {index} is out of bounds for {ROWS} rows"):
        run([prepared(type)], inputs, "w", state=state_of(type))


@pytest.mark.parametrize("index", [ROWS, -1, -2])
def test_torch_refuses_an_index_of_no_row_of_what_it_adds_to(index):
    inputs = {"i": torch.tensor([0, index]), "g": drawn(2, 2, 3), "lr": torch.tensor(-0.1)}
    with pytest.raises(GraphirError, match=r"out of (range|bounds)"):
        run([prepared("SparseWngrad")], inputs, "w", state=state_of("SparseWngrad"))


@pytest.mark.parametrize(
    "each, reason",
    [
        (op("SparseAdagrad", "w h i g lr", "w h", decay=0.5), "decay is not translated"),
        (op("SparseAdagrad", "w s i g lr", "w s"), r"'s' is f32\[1\], the parameter f32\[6,3\]"),
        (op("RowWiseSparseAdagrad", "w h i g lr", "w h"), r"'h' is f32\[6,3\], the parameter"),
        (op("SparseAdam", "w h r i g lr it", "w h r"), r"'r' is f32\[6\], the parameter"),
        (op("SparseAdam", "w h m i g lr it", "w h m", enableRAdam=1), "enableRAdam is not translated"),
        (op("SparseAdam", "w h m g i lr it", "w h m"), "not indices"),
        (op("SparseFtrl", "w h i g", "w h"), r"n and z are f32\[6,3\], the parameter"),
        (op("SparseFtrl", "w nz i g lr", "w nz", alpha=0.1), "alpha is an input and an argument"),
        (op("SparseAdadelta", "w h m i g lr", "w h m", decay=1.0), "argument 'decay' is 1.0"),
        (op("SparseStorm", "w m h g i lr", "w m h"), "'h' should have one element"),
        (op("SparseMomentumSGDUpdate", "g2 m lr w i", "g2 m w"), "cannot be seen as"),
    ],
    ids=lambda o: getattr(o, "type", o),
)
def test_what_does_not_fit_is_refused(each, reason):
    shapes = {"w": (6, 3), "h": (6, 3), "m": (6, 3), "r": (6,), "s": (1,), "nz": (6, 3, 2)}
    state = {name: torch.ones(shape) for name, shape in shapes.items() if name in each.input}
    inputs = {"i": torch.tensor([0, 1]), "g": torch.ones(2, 3), "g2": torch.ones(2, 4), "lr": torch.tensor(0.1)}
    inputs["it"] = torch.tensor([1])
    given = {**{name: inputs[name] for name in each.input if name in inputs}, **state}
    with pytest.raises(GraphirError, match=rf"{each.type} cannot be translated: .*({reason})"):
        caffe2.lower(program([each], given), state=state)
