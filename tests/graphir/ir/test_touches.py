"""A net as columns: which operator touches which blob."""

from graphir.ir.blob import Blob
from graphir.ir.device import gpu
from graphir.ir.net import Net
from graphir.ir.operator import Effects, Operator


def test_columns_say_which_operator_touches_which_blob():
    ops = (
        Operator("Add", ("x", "w"), ("a",), {}, gpu(0)),
        Operator("View", ("a",), ("v",), {}, gpu(0), effects=Effects(views=((0, 0),))),
        Operator("Make", (), ("b", "c"), {}, gpu(0)),
        Operator("Free", ("v",), (), {}, gpu(0)),
    )
    shapes = {"w": (2,), "x": (2, 3), "a": (2, 3), "v": (6,), "b": (2, 3), "c": (2, 3)}
    blobs = {name: Blob(name, shape, "f32", gpu(0), "activation", name) for name, shape in shapes.items()}
    blobs["v"] = blobs["v"]._replace(storage="a")
    blobs["c"] = blobs["c"]._replace(strides=(1, 2))
    touches = Net("net", ops, blobs, ("w", "x")).touches

    assert touches.names == list("wxavbc")
    assert [touches.names[i] for i in touches.blob] == list("xwaavbcv")
    assert touches.op.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert touches.makes.tolist() == [False, False, True, False, True, True, True, False]
    assert touches.inputs.tolist() == [2, 1, 0, 1]
    assert touches.begin.tolist() == [0, 3, 5, 7]
    assert touches.end.tolist() == [3, 5, 7, 8]
    assert [touches.names[i] for i in touches.storage] == list("wxaabc")
    assert [touches.names[i] for i in touches.stored] == list("xwaaabca")
    assert touches.geometry.tolist() == [0, 1, 1, 2, 1, 3]
