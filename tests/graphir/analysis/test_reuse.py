"""How far back a step has touched what operators read."""

from small import program_of

from graphir.analysis.reuse import reuse_distances

NET = """
    input w : f32[4] @gpu:0
    input x : f32[2] @gpu:0
    input y : f32[3] @gpu:1
    a : f32[2] @gpu:0 = aten.neg(x)
    v : f32[1,2] in a @gpu:0 = aten.unsqueeze(a, dim=0) {views=[0:0]}
    b : f32[3] @gpu:1 = aten.neg(y)
    c : f32[4] @gpu:0 = aten.neg(w)
    d : f32[1,2] @gpu:0 = aten.mul.Tensor(v, v)
    output b
    output c
    output d
"""


def test_bytes_are_counted_by_device_since_the_storage_was_touched():
    net = program_of(NET).step
    a, v, b, c, d = reuse_distances(net, {}, {})
    # A step touches 16 bytes for a, 32 for c and 16 for d on gpu:0, and 24 for b on gpu:1.
    assert (a, v, b) == ((64,), (), (24,)), "what the step before has touched"
    assert c == (64,)
    assert d == (16 + 32, 16 + 32), "a view is where its storage is"


def test_what_no_operator_touched_before_has_no_distance():
    net = program_of("input x : f32[2] @gpu:0\na : f32[2] @gpu:0 = aten.neg(x)\noutput a").step
    assert reuse_distances(net, {}, {}) == [(16,)]
    assert reuse_distances(program_of("a : f32[2] @gpu:0 = aten.ones(size=[2])\noutput a").step, {}, {}) == [()]


def test_memory_that_is_freed_is_used_again():
    net = program_of(NET).step
    a, _, b, c, d = reuse_distances(net, {}, {"gpu:0": 40})
    assert (a, b, c, d) == ((40,), (24,), (40,), (40, 40))
