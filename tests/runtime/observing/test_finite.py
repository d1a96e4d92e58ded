"""The watch for NaN and infinities."""

import models
import pytest
import torch
from graphir.runtime import Session
from graphir.runtime.kernels.bindings import FAST, fastest
from runnable import captured, forward_plan, sgd, spread

import graphir
from graphir import passes
from graphir.errors import RunError

NAN = float("nan")

CHAIN = """
    input x : f32[4] @gpu:0
    a : f32[4] @gpu:0 = aten.sub.Scalar(x, other=1) {module=net.shift}
    b : f32[4] @gpu:0 = aten.log(a) {module=net.log}
    c : f32[4] @gpu:0 = aten.mul.Scalar(b, other=2)
"""

TWO_DEVICES = """
    input x : f32[4] @gpu:0
    a : f32[4] @gpu:0 = aten.neg(x)
    a_gpu_1 : f32[4] @gpu:1 = Copy(a)
    b : f32[4] @gpu:1 = aten.sqrt(a_gpu_1)
    b_gpu_0 : f32[4] @gpu:0 = Copy(b)
    c : f32[4] @gpu:0 = aten.add.Tensor(b_gpu_0, a)
"""


@pytest.fixture(params=["reference", "threads"])
def executor(request):
    return request.param


def step(body, *args, executor="threads"):
    names = [line.split()[1] for line in body.splitlines() if line.split()[:1] == ["input"]]
    with Session(forward_plan(body, *names, output="c"), {}, executor=executor, check_finite=True) as session:
        return session.step(*args)


def test_the_first_operator_is_named_with_its_operands(executor):
    with pytest.raises(RunError) as caught:
        step(CHAIN, torch.tensor([1.0, 0, 3, 1]), executor=executor)
    assert str(caught.value).splitlines() == [
        "aten.log.default made 1 NaN and 2 infinities among the 4 elements of 'b'; its operands: 'a' from -1 to 2",
        "  at   b : f32[4] @gpu:0 = aten.log(a) {module=net.log}",
        "  in   module 'net.log', plan 'small', step 0, lane gpu:0.compute",
        "  fix  no state was written: the session can go on with other arguments",
    ]


def test_a_session_goes_on_after_a_forward_that_was_stopped(executor):
    plan = forward_plan(CHAIN, "x", output="c")
    with Session(plan, {}, executor=executor, check_finite=True) as session:
        for _ in range(2):
            with pytest.raises(RunError, match="log"):
                session.step(torch.zeros(4))
            assert session.step(torch.full((4,), 2.0)).tolist() == [0, 0, 0, 0]


def test_another_device_is_named_with_its_lane(executor):
    with pytest.raises(RunError, match=r"aten.sqrt.default made 3 NaN among the 4 elements of 'b'") as caught:
        step(TWO_DEVICES, torch.tensor([1.0, 2, 3, -4]), executor=executor)
    assert caught.value.where.endswith("lane gpu:1.compute")


def test_finite_steps_have_the_same_bits(executor):
    example = models.mlp()
    program = captured(example, sgd(example.model.parameters()))
    plan = passes.emit(spread(program))
    x, y = example.inputs[0], example.targets[0]
    with (
        Session(plan, program.state, executor=executor) as plain,
        Session(plan, program.state, executor=executor, check_finite=True) as watched,
    ):
        for rows in (len(x), len(x) - 1):
            assert torch.equal(plain.step(x[:rows], y[:rows]), watched.step(x[:rows], y[:rows]))
        assert all(torch.equal(value, watched.state()[name]) for name, value in plain.state().items())


def test_a_sum_that_overflows_is_no_infinity(executor):
    body = "input x : f32[4] @gpu:0\nc : f32[4] @gpu:0 = aten.mul.Scalar(x, other=3e38)"
    assert torch.equal(step(body, torch.ones(4), executor=executor), torch.full((4,), 3e38))


MASKED = """
    input x : f32[2,2] @gpu:0
    input m : bool[2,2] @gpu:0
    a : f32[2,2] @gpu:0 = aten.masked_fill.Scalar(x, m, value=-inf)
    b : f32[2,2] @gpu:0 = aten.mul.Scalar(a, other=2)
    c : f32[2,2] @gpu:0 = aten._softmax(b, dim=1, half_to_float=false)
"""


def test_infinities_that_are_asked_for_may_go_on():
    found = step(MASKED, torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))
    assert found.tolist() == [[0, 1], [0.5, 0.5]]


def test_nan_of_infinities_that_were_asked_for_is_found():
    with pytest.raises(RunError, match=r"_softmax.default made 2 NaN .* 'b' from 0 to 0 and 2 not finite"):
        step(MASKED, torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))


def test_an_infinity_that_was_given_is_named_with_the_nan_that_it_becomes(executor):
    with pytest.raises(RunError) as caught:
        step(TWO_DEVICES, torch.tensor([1.0, 2, 3, float("inf")]), executor=executor)
    assert caught.value.what == (
        "aten.sqrt.default made 4 NaN among the 4 elements of 'b'; its operands: 'a_gpu_1' from -3 to -1"
        " and 1 not finite; an infinity came from outside: 'x' was given with it"
    )


def test_uninitialised_memory_is_nobodys_fault(monkeypatch):
    body = """
        input x : f32[4] @gpu:0
        a : f32[4] @gpu:0 = aten.empty_like(x)
        c : f32[4] @gpu:0 = aten.add.Tensor(a, x)
    """
    monkeypatch.setitem(FAST, "aten.empty_like.default", lambda x, **options: torch.full_like(x, NAN))
    fastest.cache_clear()
    assert step(body, torch.zeros(4)).isnan().all()
    fastest.cache_clear()


def test_nan_that_is_given_is_named_where_it_reaches_a_result():
    with pytest.raises(RunError) as caught:
        step(CHAIN, torch.tensor([NAN, 2, 2, 2]))
    assert caught.value.what == ("aten.mul.Scalar made 1 NaN among the 4 elements of 'c', and 'x' was given with it")


def test_nan_that_is_given_and_replaced_is_fine():
    body = """
        input x : f32[4] @gpu:0
        a : f32[4] @gpu:0 = aten.mul.Scalar(x, other=2)
        c : f32[4] @gpu:0 = aten.nan_to_num(a)
    """
    assert step(body, torch.tensor([NAN, 2, 2, 2])).tolist() == [0, 4, 4, 4]


INPLACE = """
    buffer s : f32[2] @gpu:0
    input x : f32[2] @gpu:0
    s;1 = aten.div_.Tensor(s, x) {writes=[0:0]}
    c : f32[2] @gpu:0 = aten.neg(s;1)
"""


def test_state_that_is_overwritten_is_watched(executor):
    plan, state = forward_plan(INPLACE, "x", output="c", state={"s": torch.ones(2)}), {"s": torch.ones(2)}
    with Session(plan, state, executor=executor, check_finite=True) as session:
        session.step(torch.ones(2))
        with pytest.raises(RunError, match=r"'s'; its operands: 's' overwritten, 'x' from 0 to 1"):
            session.step(torch.tensor([0.0, 1]))
        assert not session.usable


def test_state_that_was_not_finite_before_is_named():
    plan = forward_plan(INPLACE, "x", output="c", state={"s": torch.ones(2)})
    with (
        Session(plan, {"s": torch.tensor([NAN, 1])}, check_finite=True) as session,
        pytest.raises(RunError, match=r"1 NaN .* of 's', and 's' held it before the step"),
    ):
        session.step(torch.ones(2))


def test_the_gradient_that_overflows_first_is_named():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 1.0)
    program = graphir.capture(
        model,
        inputs=(torch.ones(2, 2),),
        targets=(torch.ones(2, 1),),
        loss=lambda out, y: (out.clamp(min=0) ** 0.5 * y).sum(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    plan = passes.emit(passes.replicate(program, devices=[0, 1]))
    x = torch.tensor([[1.0, 1], [1, 1], [-9, -9]])
    with Session(plan, program.state, check_finite=True) as session:
        with pytest.raises(RunError) as caught:
            session.step(x, torch.ones(3, 1))
        assert "gpu_1/" in caught.value.what
        assert "test_finite.py" in caught.value.where


def test_a_loss_scaler_may_overflow_backward():
    example = models.mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)
    program = graphir.capture(
        example.model,
        inputs=example.inputs,
        targets=example.targets,
        loss=lambda out, y: 100 * example.loss(out, y),
        optimizer=sgd(example.model.parameters()),
        loss_scale=scaler,
    )
    with Session(passes.emit(program), program.state, check_finite=True) as session:
        for _ in range(2):
            session.step(*example.inputs, *example.targets)
        assert session.loss_scaler_state_dict()["scale"] < 2e38


def test_half_precision_and_complex_values_are_watched():
    for dtype in ("f16", "bf16", "f64", "c64"):
        body = f"input x : {dtype}[2] @gpu:0\nc : {dtype}[2] @gpu:0 = aten.reciprocal(x)"
        tensor = torch.zeros(2).to(
            {"f16": torch.float16, "bf16": torch.bfloat16, "f64": torch.float64, "c64": torch.complex64}[dtype]
        )
        with pytest.raises(RunError, match=r"reciprocal.default made 2"):
            step(body, tensor)


def test_what_was_overwritten_is_no_excuse():
    body = """
        buffer s : f32[2] @gpu:0
        input x : f32[2] @gpu:0
        s;1 = aten.copy_(s, x) {writes=[0:0]}
        c : f32[2] @gpu:0 = aten.reciprocal(s;1)
    """
    state = {"s": torch.full((2,), float("inf"))}
    with (
        Session(forward_plan(body, "x", output="c", state=state), state, check_finite=True) as session,
        pytest.raises(RunError, match=r"reciprocal.default made 2 infinities"),
    ):
        session.step(torch.zeros(2))


def test_what_an_earlier_step_was_given_is_no_excuse():
    body = "input x : f32[2] @gpu:0\nc : f32[2] @gpu:0 = aten.mul.Scalar(x, other=2)"
    with Session(forward_plan(body, "x", output="c"), {}, check_finite=True) as session:
        assert session.step(torch.full((2,), float("inf"))).isinf().all()
        with pytest.raises(RunError, match="made 2 infinities"):
            session.step(torch.full((2,), 3e38))
