"""passes.shift_activations: label propagation over storages."""

from __future__ import annotations

from collections.abc import Callable

import models
import nets
import pytest
import torch
from runnable import captured
from small import program_of, two_layers
from torch import nn

import graphir
from graphir import capture, passes
from graphir.errors import PassError
from graphir.ir.program import Program
from graphir.ir.verify import verify


def devices(program: Program) -> dict[str, str]:
    """Where each blob lives."""
    return {name: str(blob.device) for name, blob in program.step.blobs.items()}


def test_text_of_a_shifted_program(golden: Callable[[str, str], None]) -> None:
    golden("two_layers.shifted", str(passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1}).step))


def test_parameters_gradients_and_updates_follow() -> None:
    at = devices(passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1}))
    for name in ("fc2", "fc2.weight", "fc2.weight.t", "fc2.weight.momentum_buffer", "loss", "loss_grad", "fc2_grad"):
        assert at[name] == "gpu:1", name
    for name in ("fc1", "fc1.weight", "relu", "fc1_grad", "x"):
        assert at[name] == "gpu:0", name


def test_the_weight_gradient_of_the_first_layer_that_moves_goes_along() -> None:
    # mm(fc2_grad.t, relu) reads relu, which stays: Caffe2's rule, the last activation decides, would leave it behind.
    at = devices(passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1}))
    assert at["fc2.weight_grad"] == "gpu:1"


def test_the_first_layers_weight_gradient_stays_with_its_weight() -> None:
    shifted = passes.shift_activations(two_layers(), ["relu", "fc2", "loss"], shifts={0: 1})
    assert devices(shifted)["fc1.weight_grad"] == "gpu:0"


@pytest.mark.parametrize(("of", "device"), [("lookup", "gpu:0"), ("sum", "gpu:1")])
def test_the_backward_runs_beside_the_operator_that_it_belongs_to(of: str, device: str) -> None:
    # The lookup and the sum share a gradient, so that its name does not tell.
    body = f"""
    param table : f32[5,3] @gpu:0
    param bias : f32[4,3] @gpu:0
    input x : i64[4] @gpu:0
    lookup : f32[4,3] @gpu:0 = aten.embedding(table, x)
    output sum : f32[4,3] @gpu:0 = aten.add.Tensor(lookup, bias)
    sum_grad : f32[4,3] @gpu:0 = aten.ones_like(sum) {{phase=backward, of=sum}}
    table_grad : f32[5,3] @gpu:0 = aten.embedding_dense_backward(sum_grad, x, num_weights=5, padding_idx=-1, scale_grad_by_freq=false) {{phase=backward, of={of}}}
    output sum
    output table_grad
    grad lookup -> sum_grad
    grad sum -> sum_grad
    """  # noqa: E501
    shifted = passes.shift_activations(program_of(body), ["sum"], shifts={0: 1})
    assert devices(shifted)["table_grad"] == device


def test_gradients_are_added_where_both_are_and_else_where_the_activation_is() -> None:
    body = """
    input x : f32[4,3] @gpu:0
    a : f32[4,3] @gpu:0 = aten.relu(x)
    b : f32[4,3] @gpu:0 = aten.exp(a)
    c : f32[4,3] @gpu:0 = aten.tanh(a)
    output loss : f32[4,3] @gpu:0 = aten.mul.Tensor(b, c)
    loss_grad : f32[4,3] @gpu:0 = aten.ones_like(loss) {phase=backward, of=loss}
    b_grad : f32[4,3] @gpu:0 = aten.mul.Tensor(loss_grad, c) {phase=backward, of=loss}
    c_grad : f32[4,3] @gpu:0 = aten.mul.Tensor(loss_grad, b) {phase=backward, of=loss}
    a.one : f32[4,3] @gpu:0 = aten.mul.Tensor(b_grad, b) {phase=backward, of=b}
    a.other : f32[4,3] @gpu:0 = aten.tanh_backward(c_grad, c) {phase=backward, of=c}
    a_grad : f32[4,3] @gpu:0 = aten.add.Tensor(a.one, a.other) {phase=backward, of=a}
    output loss
    output a_grad
    grad a -> a_grad
    grad b -> b_grad
    grad c -> c_grad
    grad loss -> loss_grad
    """
    both = devices(passes.shift_activations(program_of(body), ["b", "c", "loss"], shifts={0: 1}))
    assert (both["a"], both["a_grad"]) == ("gpu:0", "gpu:1")
    one = devices(passes.shift_activations(program_of(body), ["c", "loss"], shifts={0: 1}))
    assert (one["a.one"], one["a.other"], one["a_grad"]) == ("gpu:0", "gpu:1", "gpu:0")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x))


def test_the_backward_of_earlier_layers_stays_whatever_comes_down_a_residual_stream() -> None:
    program = capture(nn.Sequential(*[Residual() for _ in range(6)]), (torch.randn(2, 4),), loss=torch.sum)
    chosen = passes.find_activations(program)
    shifted = passes.shift_activations(program, chosen[chosen.index("3.fc") :], shifts={0: 1})
    products = [op for op in shifted.step.ops if op.phase == "backward" and op.type == "aten.mm.default"]
    assert [op.device for op in products if op.module[0] in "45"] == ["gpu:1"] * 4
    assert [op.device for op in products if op.module[0] in "012"] == ["gpu:0"] * 6
    copies = [op.inputs[0] for op in passes.inject_copies(shifted).step.ops if op.type == "Copy"]
    assert copies == ["3.norm", "2", "3.norm_grad", "3.fc_grad"]


def test_a_view_of_a_parameter_does_not_pin_it() -> None:
    # aten.t(fc2.weight) runs before anything that moves; it must not label the weight.
    program = passes.shift_activations(two_layers(), ["fc2"], shifts={0: 1})
    op = program.step.producer("fc2.weight.t")
    assert op is not None
    assert op.device == "gpu:1"


def test_init_follows_the_parameters() -> None:
    program = passes.shift_activations(two_layers(), ["fc2"], shifts={0: 1})
    loads = {op.outputs[0]: op for op in program.init.ops}
    assert loads["fc2.weight"].device == "gpu:1"
    assert loads["fc2.weight"].by == "shift_activations"
    assert loads["fc1.weight"].device == "gpu:0"


def test_several_shifts_act_on_their_own_replicas() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    at = devices(passes.shift_activations(program, ["fc2"], shifts={0: 2, 1: 3}))
    assert (at["gpu_0/fc2"], at["gpu_1/fc2"]) == ("gpu:2", "gpu:3")
    assert (at["gpu_0/fc2.weight"], at["gpu_1/fc2.weight"]) == ("gpu:2", "gpu:3")
    one = devices(passes.shift_activations(program, ["fc2"], shifts={1: 3}))
    assert (one["gpu_0/fc2"], one["gpu_1/fc2"]) == ("gpu:0", "gpu:3")


def test_shifts_at_once_equal_shifts_one_by_one() -> None:
    for seed in range(10):
        program = passes.replicate(nets.random_program(seed), devices=[0, 1])
        chosen = passes.find_activations(program)[::2]
        at_once = passes.shift_activations(program, chosen, shifts={0: 2, 1: 3})
        one_by_one = passes.shift_activations(passes.shift_activations(program, chosen, {0: 2}), chosen, {1: 3})
        assert at_once.step == one_by_one.step
        assert at_once.init == one_by_one.init


def test_a_second_shift_moves_what_the_first_one_moved() -> None:
    once = passes.shift_activations(two_layers(), ["fc2", "loss"], shifts={0: 1})
    twice = passes.shift_activations(once, ["fc2", "loss"], shifts={1: 2})
    assert devices(twice)["fc2.weight"] == "gpu:2"
    assert "gpu:1" not in devices(twice).values()


def test_the_result_of_an_operator_lives_where_it_runs() -> None:
    # var_mean makes two activations; the last one decides, so "var" stays with "mean" although it was chosen.
    body = """
    input x : f32[6,4] @gpu:0
    var : f32[4] @gpu:0, mean : f32[4] @gpu:0 = aten.var_mean.correction(x, dim=[0])
    output loss : f32[4] @gpu:0 = aten.mul.Tensor(var, mean)
    var_grad : f32[4] @gpu:0 = aten.ones_like(var) {phase=backward}
    temporary end : f32[4] @gpu:0 = aten.relu(var_grad) {phase=backward}
    output loss
    grad var -> var_grad
    grad mean -> var_grad
    """
    shifted = passes.shift_activations(program_of(body), ["var"], shifts={0: 1})
    assert devices(shifted)["var"] == "gpu:0"
    assert devices(passes.shift_activations(program_of(body), ["mean"], shifts={0: 1}))["var"] == "gpu:1"


def test_collectives_follow_their_participants() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    shifted = passes.shift_activations(program, passes.find_activations(program), shifts={0: 2, 1: 3})
    for op in shifted.step.ops:
        if op.type == "AllReduce":
            at = devices(shifted)
            assert [at[name] for name in op.inputs] == [at[name] for name in op.outputs]
            assert op.device == at[op.inputs[0]]


class Tokens(nn.Module):
    """A parameter is one of the rows that a layer reads, so that its gradient is a view of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.out = nn.Parameter(torch.randn(2, 4)), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([x.mean(0, keepdim=True), self.token], 0).tanh())  # type: ignore[no-any-return]


def test_a_parameters_gradient_that_is_a_view_of_what_was_made_elsewhere() -> None:
    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = passes.replicate(
        capture(model, (torch.randn(4, 4),), loss=lambda out: out.sum(), optimizer=optimizer), devices=[0, 1]
    )
    acts = passes.find_activations(program)
    for i in range(len(acts)):
        for chosen in (acts[i:], acts[: i + 1], acts[i : i + 1]):
            shifted = passes.inject_copies(passes.shift_activations(program, chosen, shifts={0: 2, 1: 3}))
            passes.emit(shifted)
            assert graphir.certify(program, shifted).holds


def test_moved_operators_say_so() -> None:
    program = two_layers()
    shifted = passes.shift_activations(program, ["fc2"], shifts={0: 1})
    for old, new in zip(program.step.ops, shifted.step.ops, strict=True):
        assert new.by == ("shift_activations" if new.device != old.device else old.by)


def test_nothing_chosen_moves_nothing() -> None:
    program = two_layers()
    assert passes.shift_activations(program, [], shifts={0: 1}).step == program.step


def test_an_unplaced_result_is_refused_by_emit_with_the_remedy() -> None:
    shifted = passes.shift_activations(two_layers(), ["fc2"], shifts={0: 1})
    with pytest.raises(graphir.PlacementError, match=r"fix +run inject_copies before emit"):
        passes.emit(shifted)


def test_forward_only_programs_shift() -> None:
    body = """
    param w : f32[3] @gpu:0
    input x : f32[3] @gpu:0
    a : f32[3] @gpu:0 = aten.relu(x)
    b : f32[3] @gpu:0 = aten.mul.Tensor(a, w)
    output c : f32[3] @gpu:0 = aten.exp(b)
    output c
    """
    at = devices(passes.shift_activations(program_of(body), ["b"], shifts={0: 1}))
    assert at == {"w": "gpu:1", "x": "gpu:0", "a": "gpu:0", "b": "gpu:1", "c": "gpu:1"}


def test_unknown_activation_names_the_nearest() -> None:
    with pytest.raises(PassError, match="'relu1' is not an activation of program 'small'; did you mean 'relu'"):
        passes.shift_activations(two_layers(), ["relu1"], shifts={0: 1})


def test_a_module_is_moved_by_another_pass() -> None:
    program = captured(models.resnet())
    with pytest.raises(PassError, match="'blocks' is a module of program 'resnet', and no activation") as refused:
        passes.shift_activations(program, ["blocks"], shifts={0: 1})
    assert refused.value.fix == 'move the module: shift_modules(program, {"blocks": "gpu:1"})'


@pytest.mark.parametrize("name", ["gpu_0/relu", "nothing like it"])
def test_activations_are_listed_where_none_is_near(name: str) -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    with pytest.raises(PassError, match=r"without a replica's prefix: fc1, relu, fc2, loss"):
        passes.shift_activations(program, [name], shifts={0: 2})


def test_a_view_stands_for_its_storage() -> None:
    body = """
    input x : f32[6,4] @gpu:0
    a : f32[6,4] @gpu:0 = aten.relu(x)
    a.view : f32[24] in a @gpu:0 = aten.view(a, size=[24])
    output loss : f32[] @gpu:0 = aten.sum(a.view)
    output loss
    """
    assert devices(passes.shift_activations(program_of(body), ["a.view"], shifts={0: 1}))["a"] == "gpu:1"


def test_unknown_names_are_weak_labels_when_not_strict() -> None:
    moved = passes.shift_activations(two_layers(), ["fc2.weight", "nobody"], shifts={0: 1}, strict=False)
    # Every operator that reads the weight also has an activation, which decides; its update has none.
    assert devices(moved)["fc2.weight"] == "gpu:1"
    assert devices(moved)["fc2"] == "gpu:0"


def test_unknown_device_is_refused() -> None:
    with pytest.raises(PassError, match=r"no operator of program 'small' is on gpu:5\n.*sources can be gpu:0"):
        passes.shift_activations(two_layers(), ["relu"], shifts={5: 6})


def test_devices_are_taken_as_they_are_printed() -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    shifted = passes.shift_activations(program, ["relu"], shifts={"gpu:0": "gpu:2", 1: 3})
    assert shifted == passes.shift_activations(program, ["relu"], shifts={0: 2, 1: 3})
    assert shifted.history[-1] == "shift_activations{activations=[relu], shifts={0: 2, 1: 3}}"
    assert passes.Pipeline("shift_activations{activations=[relu], shifts={gpu:0: gpu:2, 1: gpu:3}}")(program) == shifted


@pytest.mark.parametrize(
    ("shifts", "message"),
    [
        ({0: "cpu"}, r"shifts\.0: cpu:0 is not a gpu\n  fix  write 'gpu:0'"),
        ({0: 1, "gpu:0": 2}, "a device is given twice"),
    ],
)
def test_shifts_that_are_not_of_gpus_are_refused(shifts: dict[int | str, int | str], message: str) -> None:
    with pytest.raises(PassError, match=message):
        passes.shift_activations(two_layers(), ["relu"], shifts=shifts)


@pytest.mark.parametrize(
    ("shifts", "message"),
    [({0: 1, 1: 2}, "device 1 is both a source and a target"), ({0: -1}, "-1 is not a device")],
)
def test_bad_shifts_are_refused(shifts: dict[int, int], message: str) -> None:
    program = passes.replicate(two_layers(), devices=[0, 1])
    before = str(program)
    with pytest.raises(PassError, match=message):
        passes.shift_activations(program, ["relu"], shifts=shifts)
    assert str(program) == before


@pytest.mark.parametrize(
    ("activations", "shifts", "message"),
    [
        ("relu", {0: 1}, "activations: expected a list, not 'relu'"),
        (None, {0: 1}, "activations: expected a list, not None"),
        (["relu"], [0, 1], "shifts: expected a dict, not"),
        (["relu"], {0: 2.0}, "shifts.0: 2.0 is not a device"),
        (["relu"], {0: True}, "shifts.0: True is not a device"),
    ],
)
def test_options_of_the_wrong_kind_are_refused(activations: object, shifts: object, message: str) -> None:
    with pytest.raises(PassError, match=message):
        passes.shift_activations(two_layers(), activations, shifts=shifts)  # type: ignore[arg-type]


def test_random_programs_are_well_formed_after_a_shift() -> None:
    for seed in range(20):
        program = nets.random_program(seed)
        chosen = passes.find_activations(program)[seed % 3 :: 2]
        verify(passes.shift_activations(program, chosen, shifts={0: 1}), placed=False)
