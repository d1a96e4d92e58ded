"""Translations of losses and of the accuracy, against torch's own functions and its autograd."""

import pytest
import torch
import torch.nn.functional as F
from lowering import close, generator, op, run

from graphir import GraphirError


def scores(seed, *shape):
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("shape, axis", [((4, 5), 1), ((2, 3, 4), 2), ((2, 3, 4), 1)], ids=str)
def test_softmax_and_its_gradient(shape, axis):
    x, dy = scores(1, *shape), scores(2, *shape)
    ops = [op("Softmax", "x", "y", axis=axis), op("SoftmaxGradient", "y dy", "dx", axis=axis)]
    y, dx = run(ops, {"x": x, "dy": dy}, "y dx")
    leaf = x.clone().requires_grad_()
    wanted = leaf.flatten(axis).softmax(-1).view(shape)
    wanted.backward(dy)
    close(y, wanted.detach())
    close(dx, leaf.grad)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6, 4), (6, 2, 2)], ids=str)
def test_softmax_with_loss_and_its_gradient(scale, weighted, shape):
    x, labels = scores(1, *shape), torch.tensor([0, 3, 1, 1, 2, 0], dtype=torch.int32)
    weights, dy = torch.rand(6, generator=generator(3)), torch.tensor(0.7)
    args = {} if scale is None else {"scale": scale}
    given = "x l w" if weighted else "x l"
    ops = [op("SoftmaxWithLoss", given, "p loss", **args), op("SoftmaxWithLossGradient", f"{given} p dy", "dx", **args)]
    inputs = {"x": x, "l": labels, "dy": dy, **({"w": weights} if weighted else {})}
    p, loss, dx = run(ops, inputs, "p loss dx")
    leaf = x.clone().requires_grad_()
    each = F.cross_entropy(leaf.flatten(1), labels.long(), reduction="none")
    wanted = (each * weights).sum() / weights.sum() if weighted else each.mean()
    wanted = wanted * (scale or 1.0)
    wanted.backward(dy)
    close(p, x.flatten(1).softmax(1).view(shape))
    close(loss, wanted.detach())
    close(dx, leaf.grad)


def test_labels_may_be_probabilities():
    x, target, dy = scores(1, 3, 4), scores(2, 3, 4).softmax(1), torch.tensor(1.0)
    ops = [
        op("SoftmaxWithLoss", "x t", "p loss", label_prob=1),
        op("SoftmaxWithLossGradient", "x t p dy", "dx", label_prob=1),
    ]
    p, loss, dx = run(ops, {"x": x, "t": target, "dy": dy}, "p loss dx")
    leaf = x.clone().requires_grad_()
    wanted = F.cross_entropy(leaf, target)
    wanted.backward()
    close(p, x.softmax(1))
    close(loss, wanted.detach())
    close(dx, leaf.grad)


def test_a_loss_of_which_every_row_weighs_nothing_is_zero():
    inputs = {"x": scores(1, 2, 3), "l": torch.tensor([0, 1], dtype=torch.int32), "w": torch.zeros(2)}
    inputs["dy"] = torch.tensor(1.0)
    ops = [op("SoftmaxWithLoss", "x l w", "p loss"), op("SoftmaxWithLossGradient", "x l w p dy", "dx")]
    loss, dx = run(ops, inputs, "loss dx")
    assert loss == 0 and not dx.any()


def test_no_loss_is_a_positive_zero():
    inputs = {"x": torch.tensor([[200.0, 0.0]]), "l": torch.tensor([0], dtype=torch.int32)}
    (loss,) = run([op("SoftmaxWithLoss", "x l", "p loss")], inputs, "loss")
    assert loss == 0 and not loss.signbit()


@pytest.mark.parametrize("column", [False, True])
def test_label_cross_entropy_and_its_gradient(column):
    x, labels = scores(1, 4, 3).softmax(1), torch.tensor([0, 2, 1, 1], dtype=torch.int32)
    x[1, 2] = 0.0
    dy = scores(2, 4)
    ops = [op("LabelCrossEntropy", "x l", "y"), op("LabelCrossEntropyGradient", "x l dy", "dx")]
    y, dx = run(ops, {"x": x, "l": labels.view(4, 1) if column else labels, "dy": dy}, "y dx")
    picked = x[torch.arange(4), labels.long()].clamp_min(1e-20)
    close(y, -picked.log())
    wanted = torch.zeros(4, 3)
    wanted[torch.arange(4), labels.long()] = -dy / picked
    close(dx, wanted)


@pytest.mark.parametrize("shape", [(4,), (4, 1)], ids=str)
def test_two_classes_of_a_probability(shape):
    x, dy = torch.rand(shape, generator=generator(1)), scores(2, *shape, 2)
    ops = [op("MakeTwoClass", "x", "y"), op("MakeTwoClassGradient", "dy", "dx")]
    y, dx = run(ops, {"x": x, "dy": dy}, "y dx")
    close(y, torch.stack([1 - x, x], -1))
    close(dx, dy[..., 1] - dy[..., 0])


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_averaged_loss_and_its_gradient(shape):
    x, dy = scores(1, *shape), torch.tensor(0.3)
    y, dx = run([op("AveragedLoss", "x", "y"), op("AveragedLossGradient", "x dy", "dx")], {"x": x, "dy": dy}, "y dx")
    close(y, x.mean())
    close(dx, torch.full(shape, 0.3 / x.numel()))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3)], ids=str)
def test_squared_distance_and_its_gradient(shape):
    x, y, dz = scores(1, *shape), scores(2, *shape), scores(3, 4)
    ops = [op("SquaredL2Distance", "x y", "z"), op("SquaredL2DistanceGradient", "x y dz", "dx dy")]
    z, dx, dy = run(ops, {"x": x, "y": y, "dz": dz}, "z dx dy")
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    wanted = (leaves[0] - leaves[1]).square().reshape(4, -1).sum(1) / 2
    wanted.backward(dz)
    close(z, wanted.detach())
    close(dx, leaves[0].grad)
    close(dy, leaves[1].grad)


@pytest.mark.parametrize("top", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_accuracy_counts_equal_scores_in_their_order(top, seed):
    x = torch.randint(0, 3, (20, 4), generator=generator(seed)).float()
    labels = torch.randint(0, 4, (20,), generator=generator(seed + 10), dtype=torch.int32)
    (y,) = run([op("Accuracy", "x l", "y", top_k=top)], {"x": x, "l": labels}, "y")
    order = x.sort(dim=1, descending=True, stable=True).indices[:, :top]
    close(y, (order == labels.view(20, 1)).any(1).float().mean())


@pytest.mark.parametrize("weights", [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0], [-1.0, -2.0, 1.0], [1.0, -1.0, 0.0]], ids=str)
@pytest.mark.parametrize("by_rows", [0, 1])
def test_what_a_weighted_loss_is_divided_by(weights, by_rows):
    x, labels, weights = scores(1, 3, 4), torch.tensor([0, 3, 1]), torch.tensor(weights)
    args = {"average_by_batch_size": by_rows}
    ops = [op("SoftmaxWithLoss", "x l w", "p loss", **args), op("SoftmaxWithLossGradient", "x l w p dy", "dx", **args)]
    dy = torch.tensor(0.7)
    loss, dx = run(ops, {"x": x, "l": labels.int(), "w": weights, "dy": dy}, "loss dx")
    leaf, total = x.clone().requires_grad_(), weights.sum()
    each = (F.cross_entropy(leaf, labels, reduction="none") * weights).sum()
    each.backward()
    divisor = 3.0 if by_rows else total
    close(loss, each.detach() / divisor if total else torch.tensor(0.0))
    close(dx, leaf.grad * 0.7 / divisor if total > 0 else leaf.grad)


def test_what_has_no_rows_has_no_distances_and_no_gradient():
    inputs = {"x": torch.ones(0, 3), "y": torch.ones(0, 3), "e": torch.ones(0), "dz": torch.tensor(1.0)}
    ops = [op("SquaredL2Distance", "x y", "z"), op("AveragedLossGradient", "e dz", "de")]
    z, de = run(ops, inputs, "z de")
    assert z.shape == de.shape == (0,)


@pytest.mark.parametrize(
    "shapes, reason",
    [
        ([(8, 1), (8,), (8,)], r"'y' is f32\[8\], but 'x' is f32\[8,1\]"),
        ([(8, 2), (8, 2), (1,)], r"'dz' is f32\[1\], but 'x' is f32\[8,2\]"),
    ],
    ids=str,
)
def test_distances_of_tensors_of_other_shapes_are_refused(shapes, reason):
    inputs = {name: torch.ones(shape) for name, shape in zip(("x", "y", "dz"), shapes, strict=True)}
    with pytest.raises(GraphirError, match=reason):
        run([op("SquaredL2DistanceGradient", "x y dz", "dx dy")], inputs, "dx")
