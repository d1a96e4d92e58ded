"""Translations of operators that arrange rows, against Caffe2's loops written out in Python."""

import random

import pytest
import torch
from lowering import close, generator, op, program, run

from graphir import GraphirError, caffe2


def table(seed, rows=6, width=3):
    return torch.randn(rows, width, generator=generator(seed))


def named(seed, count, rows, dtype):
    rng = random.Random(seed)
    return torch.tensor([rng.randrange(rows) for _ in range(count)], dtype=dtype)


INDICES = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


@pytest.mark.parametrize("axis", [0, 1])
def test_concat_and_the_split_of_its_gradient(axis):
    parts = [torch.randn(*(2 + i * (d == axis) for d in range(3)), generator=generator(i)) for i in range(3)]
    inputs = {f"x{i}": part for i, part in enumerate(parts)}
    ops = [op("Concat", "x0 x1 x2", "y info", axis=axis), op("Split", "y info", "a b c", axis=axis)]
    y, info, *found = run(ops, inputs, "y info a b c")
    assert torch.equal(y, torch.cat(parts, axis))
    assert info.dtype == torch.int32 and info.tolist() == [2, 3, 4]
    assert all(torch.equal(mine, part) for mine, part in zip(found, parts, strict=True))


def test_concat_along_a_new_axis_and_its_split():
    parts = {f"x{i}": table(i) for i in range(3)}
    ops = [op("Concat", "x0 x1 x2", "y info", axis=1, add_axis=1), op("Split", "y info", "a b c", axis=1, add_axis=1)]
    y, info, *found = run(ops, parts, "y info a b c")
    assert torch.equal(y, torch.stack(list(parts.values()), 1)) and info.tolist() == [1, 1, 1]
    assert all(torch.equal(mine, part) for mine, part in zip(found, parts.values(), strict=True))


@pytest.mark.parametrize(
    "args", [{"axis": 0}, {"axis": 0, "split": [1, 5]}, {"order": "NCHW", "split": [1, 2]}], ids=str
)
def test_split_by_arguments(args):
    x = table(1)
    a, b = run([op("Split", "x", "a b", **args)], {"x": x}, "a b")
    wanted = x.split(args.get("split", 3), args.get("axis", 1))
    assert torch.equal(a, wanted[0]) and torch.equal(b, wanted[1])


@pytest.mark.parametrize(
    "args, reason", [({"axis": 1}, "3 rows cannot be split"), ({"axis": 0, "split": [2, 2]}, "do not split 6")]
)
def test_a_split_that_does_not_fit_is_refused(args, reason):
    with pytest.raises(GraphirError, match=reason):
        run([op("Split", "x", "a b", **args)], {"x": table(1)}, "a b")


def test_a_split_by_sizes_that_are_given_each_step_is_refused():
    with pytest.raises(GraphirError, match="the value of 's', which is not known before the step runs"):
        run([op("Split", "x s", "a b", axis=0)], {"x": table(1), "s": torch.tensor([2, 4], dtype=torch.int32)}, "a b")


def test_shapes_change_in_copies():
    x, like = torch.randn(2, 3, 4), torch.zeros(4, 6)
    ops = [
        op("Flatten", "x", "flat", axis=2),
        op("ResizeLike", "x like", "sized"),
        op("StopGradient", "x", "same"),
        op("Scale", "x", "x", scale=2.0),
    ]
    flat, sized, same = run(ops, {"x": x, "like": like}, "flat sized same", executor="threads")
    assert torch.equal(flat, x.view(6, 4)) and torch.equal(sized, x.view(4, 6)) and torch.equal(same, x)


@INDICES
@pytest.mark.parametrize("shape", [(4,), (2, 3)], ids=str)
def test_gather_by_rows(dtype, shape):
    data, index = table(1), named(1, 4 if shape == (4,) else 6, 6, dtype).view(shape)
    assert torch.equal(run([op("Gather", "data i", "y")], {"data": data, "i": index}, "y")[0], data[index.long()])


@INDICES
def test_gather_in_each_batch_and_its_gradient(dtype):
    data, index = torch.randn(3, 6, 2, generator=generator(1)), named(2, 5, 6, dtype)
    dy = torch.randn(3, 5, 2, generator=generator(3))
    ops = [op("BatchGather", "data i", "y"), op("BatchGatherGradient", "data i dy", "dx")]
    y, dx = run(ops, {"data": data, "i": index, "dy": dy}, "y dx")
    leaf = data.clone().requires_grad_()
    wanted = leaf[:, index.long()]
    wanted.backward(dy)
    assert torch.equal(y, wanted)
    close(dx, leaf.grad)


@INDICES
@pytest.mark.parametrize("lengths", [[2, 3], [0, 5, 0], [1, 1, 1, 1, 1]], ids=str)
def test_sums_of_segments_and_their_gradient(dtype, lengths):
    data, index = table(1), named(3, 5, 6, dtype)
    counts, dy = torch.tensor(lengths, dtype=torch.int32), table(4, len(lengths))
    ops = [
        op("SparseLengthsSum", "data i l", "y"),
        op("SparseLengthsIndicesInGradientSumGradient", "dy l i", "dx"),
    ]
    y, dx = run(ops, {"data": data, "i": index, "l": counts, "dy": dy}, "y dx")
    rows, start = [], 0
    for length in lengths:
        rows.append(data[index[start : start + length].long()].sum(0))
        start += length
    close(y, torch.stack(rows))
    assert torch.equal(dx, dy.repeat_interleave(counts.long(), 0))


def test_lengths_that_do_not_add_up_fail_while_the_step_runs():
    inputs = {"data": table(1), "i": torch.tensor([0, 1]), "l": torch.tensor([1, 3], dtype=torch.int32)}
    with pytest.raises(GraphirError, match="repeat_interleave"):
        run([op("SparseLengthsSum", "data i l", "y")], inputs, "y")


@INDICES
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_scattered_sums_count_every_occurrence(dtype, factor):
    data, index, update = table(1), torch.tensor([4, 1, 4, 4], dtype=dtype), table(2, 4)
    inputs = {"w0": torch.tensor([factor]), "i": index, "x": update, "w1": torch.tensor([-0.1])}
    ops = [op("ScatterWeightedSum", "data w0 i x w1", "data")]
    (found,) = run(ops, inputs, "data", state={"data": data})
    wanted = data.clone()
    for row in index.tolist():
        wanted[row] *= factor
    for row, values in zip(index.tolist(), update, strict=True):
        wanted[row] -= 0.1 * values
    close(found, wanted)


@INDICES
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["Sum", "Mean"])
def test_duplicates_that_were_joined_are_scattered_once(dtype, seed, factor, kind):
    """Row 0 is multiplied only where it is named, though empty slots stand for it."""
    data, index, grads = table(seed), named(seed, 7, 4, dtype) + seed % 2, table(seed + 20, 7)
    inputs = {"w0": torch.tensor([factor]), "i": index, "g": grads, "lr": torch.tensor(-0.1)}
    ops = [
        op("Unique", "i", "u r"),
        op(f"UnsortedSegment{kind}", "g r", "s"),
        op("ScatterWeightedSum", "data w0 u s lr", "data"),
    ]
    (found,) = run(ops, inputs, "data", state={"data": data})
    wanted = data.clone()
    for row in index.unique().tolist():
        rows = grads[index == row]
        wanted[row] = wanted[row] * factor - 0.1 * (rows.sum(0) if kind == "Sum" else rows.mean(0))
    close(found, wanted)


def test_several_tables_are_scattered_in_turn():
    data, index, first, second = table(1), torch.tensor([2, 0]), table(2, 2), table(3, 2)
    inputs = {"i": index, "a": first, "b": second, "one": torch.ones(1), "w": torch.tensor([0.5])}
    (found,) = run([op("ScatterWeightedSum", "data one i a w b one", "data")], inputs, "data", state={"data": data})
    close(found, data.index_add(0, index, 0.5 * first + second))


@pytest.mark.parametrize("inputs", ["data one i", "data one i a", "data one i a one b"])
def test_scattered_sums_without_pairs_are_refused(inputs):
    given = {"one": torch.ones(1), "i": torch.tensor([1]), "a": table(1, 1), "b": table(2, 1)}
    each = op("ScatterWeightedSum", inputs, "data")
    state = {"data": table(1)}
    with pytest.raises(GraphirError, match="inputs are not a table, its weight, indices, and pairs"):
        caffe2.lower(program([each], {**{n: given[n] for n in given if n in inputs.split()}, **state}), state=state)


def test_means_of_segments_that_are_counted():
    inputs = {"x": table(1, 4), "s": torch.tensor([0, 2, 0, 1])}
    (y,) = run([op("UnsortedSegmentMean", "x s", "y", num_segments=4)], inputs, "y")
    x = inputs["x"]
    close(y, torch.stack([x[[0, 2]].mean(0), x[3], x[1], torch.zeros(3)]))


def adagrad(param, moment, indices, grads, lr, epsilon):
    """Caffe2's SparseAdagrad: one occurrence after the other."""
    param, moment = param.clone(), moment.clone()
    for row, grad in zip(indices.tolist(), grads, strict=True):
        moment[row] += grad * grad
        param[row] += lr * grad / (moment[row].sqrt() + epsilon)
    return param, moment


@INDICES
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("epsilon", [1e-5, 0.0])
def test_duplicates_are_summed_before_adagrad(dtype, seed, epsilon):
    index, grads = named(seed, 7, 6, dtype), table(seed + 20, 7)
    ops = [
        op("Unique", "i", "u r"),
        op("UnsortedSegmentSum", "g r", "s"),
        op("SparseAdagrad", "w h u s lr", "w h", epsilon=epsilon),
    ]
    state = {"w": table(seed), "h": torch.zeros(6, 3)}
    w, h, remapping = run(ops, {"i": index, "g": grads, "lr": torch.tensor([-0.1])}, "w h r", state=state)
    unique, inverse = index.unique(return_inverse=True)
    assert remapping.tolist() == inverse.tolist() and remapping.dtype == torch.int32
    summed = torch.zeros(len(unique), 3).index_add(0, inverse, grads)
    for mine, theirs in zip((w, h), adagrad(state["w"], state["h"], unique, summed, -0.1, epsilon), strict=True):
        close(mine, theirs)


@INDICES
@pytest.mark.parametrize("seed", range(5))
def test_adagrad_on_duplicates_goes_one_after_the_other(dtype, seed):
    index, grads = named(seed, 9, 4, dtype), table(seed + 20, 9)
    state = {"w": table(seed), "h": torch.rand(6, 3, generator=generator(seed))}
    inputs = {"i": index, "g": grads, "lr": torch.tensor(-0.1)}
    found = run([op("SparseAdagrad", "w h i g lr", "w h", epsilon=1e-4)], inputs, "w h", state=state)
    for mine, theirs in zip(found, adagrad(state["w"], state["h"], index, grads, -0.1, 1e-4), strict=True):
        close(mine, theirs)


@INDICES
@pytest.mark.parametrize("seed", range(5))
def test_row_wise_adagrad_goes_one_after_the_other(dtype, seed):
    index, grads = named(seed, 9, 4, dtype), table(seed + 20, 9)
    state = {"w": table(seed), "h": torch.rand(6, generator=generator(seed))}
    inputs = {"i": index, "g": grads, "lr": torch.tensor(-0.1)}
    w, h = run([op("RowWiseSparseAdagrad", "w h i g lr", "w h", epsilon=1e-4)], inputs, "w h", state=state)
    theirs, moment = state["w"].clone(), state["h"].clone()
    for row, grad in zip(index.tolist(), grads, strict=True):
        moment[row] += grad.pow(2).mean()
        theirs[row] += -0.1 * grad / (moment[row].sqrt() + 1e-4)
    close(w, theirs)
    close(h, moment)


def test_a_single_index_is_unique():
    inputs = {"i": torch.tensor([3]), "g": table(1, 1), "lr": torch.tensor([-0.1])}
    ops = [
        op("Unique", "i", "u r"),
        op("UnsortedSegmentSum", "g r", "s"),
        op("SparseAdagrad", "w h u s lr", "w h", epsilon=1e-5),
    ]
    state = {"w": table(2), "h": torch.zeros(6, 3)}
    w, _ = run(ops, inputs, "w h", state=state)
    close(w, adagrad(state["w"], state["h"], inputs["i"], inputs["g"], -0.1, 1e-5)[0])


@pytest.mark.parametrize("reader", [op("Scale", "u", "y"), op("Scale", "s", "y"), op("Gather", "g u", "y")], ids=str)
def test_nobody_else_reads_what_depends_on_values(reader):
    ops = [op("Unique", "i", "u r"), op("UnsortedSegmentSum", "g r", "s"), reader]
    with pytest.raises(GraphirError, match=r"how many rows '[us]' has depends on values"):
        caffe2.lower(program(ops, {"i": torch.tensor([1, 1]), "g": table(1, 2)}))


def test_segments_need_a_number():
    inputs = {"x": table(1, 4), "s": torch.tensor([0, 2, 0, 1])}
    with pytest.raises(GraphirError, match="the number of segments is the largest number in 's'"):
        run([op("UnsortedSegmentSum", "x s", "y")], inputs, "y")
    (y,) = run([op("UnsortedSegmentSum", "x s", "y", num_segments=5)], inputs, "y")
    close(y, torch.zeros(5, 3).index_add(0, inputs["s"], inputs["x"]))


@pytest.mark.parametrize(
    "each, name",
    [
        (op("Gather", "x f", "y"), "f"),
        (op("BatchGather", "x f", "y"), "f"),
        (op("SparseLengthsSum", "x i f", "y"), "f"),
        (op("SparseLengthsIndicesInGradientSumGradient", "x f i", "y"), "f"),
        (op("SparseLengthsIndicesInGradientSumGradient", "x ii i", "y"), "ii"),
        (op("UnsortedSegmentSum", "x f", "y", num_segments=3), "f"),
    ],
    ids=lambda o: getattr(o, "type", o),
)
def test_indices_and_lengths_of_other_kinds_are_refused(each, name):
    inputs = {"x": torch.ones(2, 3), "f": torch.ones(2), "i": torch.ones(2).long(), "ii": torch.ones(2, 1).int()}
    with pytest.raises(GraphirError, match=rf"{each.type} cannot be translated: '{name}' is \w+\[2.*, not "):
        caffe2.lower(program([each], {n: inputs[n] for n in each.input}))
