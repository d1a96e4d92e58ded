"""Lowered programs as a whole: state, inputs and outputs, devices, names, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from graphir.runtime import Session
from lowering import generator, net, op, program, run

import graphir
from graphir import GraphirError, caffe2, passes
from graphir.caffe2.lower.registry import TRANSLATIONS
from graphir.ir.program import Slot

SGD = [op("FC", "x w b", "y"), op("AveragedLoss", "y", "loss"), op("ConstantFill", "loss", "loss_grad", value=1.0)]
SGD += [op("AveragedLossGradient", "y loss_grad", "y_grad"), op("FCGradient", "x w y_grad", "w_grad b_grad")]
SGD += [op("AtomicIter", "mutex it", "it"), op("LearningRate", "it", "lr", base_lr=-0.5, policy="exp", gamma=0.5)]
SGD += [op("WeightedSum", "w one w_grad lr", "w"), op("WeightedSum", "b one b_grad lr", "b")]

INIT = [op("XavierFill", "", "w", shape=[3, 4]), op("ConstantFill", "", "b", shape=[3])]
INIT += [op("ConstantFill", "", "it", shape=[1], value=0, dtype=10), op("CreateMutex", "", "mutex")]
INIT += [op("ConstantFill", "", "one", shape=[1], value=1.0)]

X = torch.randn(5, 4, generator=generator(1))


def trained():
    return program(SGD, {"x": X}, INIT)


def test_a_step_takes_and_gives_blobs_by_name():
    lowered = caffe2.lower(trained())
    with Session(passes.emit(lowered), lowered.state) as session:
        found = session.step(x=X)
    assert list(found) == ["loss"]
    w, b = lowered.state["w"], lowered.state["b"]
    torch.testing.assert_close(found["loss"], torch.nn.functional.linear(X, w, b).mean())


def test_state_is_trained_and_can_be_taken_up_again():
    lowered = caffe2.lower(trained())
    plan = passes.emit(lowered)
    with Session(plan, lowered.state) as session:
        for _ in range(2):
            session.step(x=X)
        half = session.state()
        for _ in range(2):
            session.step(x=X)
        whole = session.state_dict()
    with Session(plan, half) as session:
        for _ in range(2):
            session.step(x=X)
        again = session.state_dict()
    assert whole["it"].tolist() == [4] and not torch.equal(whole["w"], lowered.state["w"])
    assert whole.keys() == again.keys() == {"w", "b", "it", "one"}
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_given_state_comes_before_what_init_fills():
    w = torch.ones(3, 4)
    lowered = caffe2.lower(trained(), state={"w": w})
    assert torch.equal(lowered.state["w"], w)
    with Session(passes.emit(lowered), lowered.state) as session:
        torch.testing.assert_close(session.step(x=X)["loss"], X.sum(1).mean())


def test_an_input_with_a_value_is_kept():
    lowered = caffe2.lower(trained(), state={"x": X})
    assert lowered.interface.feeds == () and lowered.step.blobs["x"].role == "state"


def test_the_program_is_sound_prints_and_saves(tmp_path):
    lowered = caffe2.lower(trained())
    graphir.verify(lowered)
    assert graphir.parse(str(lowered)) == lowered.with_(state={})
    lowered.save(tmp_path / "net.json", state=True)
    loaded = graphir.load(tmp_path / "net.json")
    assert loaded == lowered and all(torch.equal(loaded.state[n], t) for n, t in lowered.state.items())


def test_operators_keep_their_device_and_phase_and_blobs_their_names():
    step = caffe2.lower(trained()).step
    of = {name: o for o in step.ops for name in o.outputs}
    assert (of["y"].phase, of["w_grad"].phase, of["w"].phase) == ("forward", "backward", "update")
    assert {"x", "w", "b", "y", "loss", "loss_grad", "y_grad", "w_grad", "b_grad", "it", "lr"} <= step.blobs.keys()
    assert "mutex" not in step.blobs
    assert step.gradients == {name: f"{name}_grad" for name in ("y", "loss", "w", "b")}
    assert all("." in o.type or o.type in ("Copy", "AllReduce") for o in step.ops)


def test_the_imported_program_is_not_changed():
    made = trained()
    text = str(made)
    caffe2.lower(made)
    assert str(made) == text


@pytest.mark.parametrize(
    "ops, outputs, wanted",
    [
        (SGD, (), ["loss"]),
        (SGD, ("y", "w_grad"), ["y", "w_grad"]),
        ([op("FC", "x w b", "y"), op("Relu", "y", "z"), op("Concat", "y y", "c info", axis=0)], (), ["z", "c"]),
    ],
)
def test_outputs_are_the_nets_or_what_backward_starts_from_or_what_nobody_reads(ops, outputs, wanted):
    lowered = caffe2.lower(program(ops, {"x": X}, INIT, outputs))
    assert list(lowered.step.external_outputs) == wanted
    chosen = caffe2.lower(program(ops, {"x": X}, INIT, outputs), outputs=["y"])
    assert chosen.interface.fetches == (Slot("y"),)


def test_a_name_may_hold_tensors_of_several_shapes():
    """Caffe2 resizes a blob that is written again."""
    ops = [op("Scale", "x", "y"), op("Concat", "y y", "c info", axis=0), op("Copy", "c", "y"), op("Relu", "y", "z")]
    (z,) = run(ops, {"x": X}, "z")
    assert torch.equal(z, torch.cat([X, X]).relu())
    lowered = caffe2.lower(program(ops, {"x": X}), outputs=["y"])
    assert lowered.step.blobs["y"].shape == (5, 4)
    assert lowered.step.blobs[lowered.interface.fetches[0].blob].shape == (
        10,
        4,
    )


def test_state_keeps_its_shape():
    ops = [op("Concat", "w w", "c info", axis=0), op("Copy", "c", "w")]
    with pytest.raises(GraphirError, match=r"state 'w' is f32\[3,4\] before the step and f32\[6,4\] after it"):
        caffe2.lower(program(ops, {}, INIT))


def test_copies_go_where_their_blobs_live():
    ops = [
        op("CopyCPUToGPU", "x", "a", "gpu:0"),
        op("Relu", "a", "b", "gpu:0"),
        op("Copy", "b", "c", "gpu:1"),
        op("CopyOnDeviceLike", "c b", "d", "gpu:1"),
        op("CopyGPUToCPU", "c", "e", "gpu:1"),
        op("EnsureCPUOutput", "c", "f", "gpu:1"),
    ]
    made = program(ops, {"x": X})
    lowered = caffe2.lower(made, outputs=["c", "d", "e", "f"])
    homes = {name: lowered.step.blobs[name].device for name in "abcdef"}
    assert homes == {name: made.step.blobs[name].device for name in "abcdef"}
    assert {o.type for o in lowered.step.ops} == {"Copy", "aten.relu.default"}
    for found in run(ops, {"x": X}, "c d e f", executor="threads"):
        assert torch.equal(found, X.relu())


COLLECTIVE = [op("CopyCPUToGPU", f"x{i}", f"g{i}", f"gpu:{i}") for i in range(3)]


@pytest.mark.parametrize("executor", ["reference", "threads"])
def test_collectives(executor):
    values = {f"x{i}": torch.randn(4, generator=generator(i)) for i in range(3)}
    total = values["x0"] + values["x1"] + values["x2"]
    reduced = run(
        [*COLLECTIVE, op("NCCLAllreduce", "g0 g1 g2", "g0 g1 g2", "gpu:0")], values, "g0 g1 g2", executor=executor
    )
    assert all(torch.equal(found, total) for found in reduced)
    ops = [*COLLECTIVE, op("NCCLBroadcast", "g0 g1 g2", "g0 g1 g2", "gpu:0", root=1)]
    assert all(torch.equal(found, values["x1"]) for found in run(ops, values, "g0 g1 g2", executor=executor))
    (found,) = run([*COLLECTIVE, op("NCCLReduce", "g0 g1 g2", "g1", "gpu:1", root=1)], values, "g1", executor=executor)
    assert torch.equal(found, total)


def test_every_participant_of_a_collective_stays_where_its_blob_lives():
    values = {f"x{i}": torch.randn(4) for i in range(3)}
    ops = [*COLLECTIVE, op("NCCLAllreduce", "g2 g0 g1", "g2 g0 g1", "gpu:0"), op("Relu", "g2", "y", "gpu:2")]
    lowered = caffe2.lower(program(ops, values))
    reduce = next(o for o in lowered.step.ops if o.type == "AllReduce")
    assert [lowered.step.blobs[name].device for name in reduce.outputs] == ["gpu:2", "gpu:0", "gpu:1"]


def test_freeing_is_left_to_the_plan():
    ops = [op("Relu", "x", "y"), op("Scale", "y", "z"), op("Free", "y", "y")]
    assert torch.equal(run(ops, {"x": X}, "z")[0], X.relu())


def test_every_operator_without_a_translation_is_named():
    ops = [op("Relu", "x", "y"), op("Relou", "y", "z"), op("BeamSearch", "z", "z"), op("Relou", "z", "q")]
    with pytest.raises(GraphirError) as caught:
        caffe2.lower(program(ops, {"x": X}, [*INIT, op("MagicFill", "", "m", shape=[1])]))
    text = str(caught.value)
    assert text.startswith("4 operators of 3 types have no translation\n")
    assert "\n  Relou; did you mean 'Relu'" in text and " at step[1], step[3]\n" in text
    assert "\n  BeamSearch" in text and " at step[2]\n" in text
    assert "\n  MagicFill; did you mean" in text and " at init[5]\n" in text
    assert "fix  take these operators out" in text


def test_an_operator_that_does_not_fit_is_named_with_its_place():
    with pytest.raises(GraphirError) as caught:
        caffe2.lower(program([op("Relu", "x", "y"), op("FC", "y w b", "z")], {"x": torch.ones(5, 7)}, INIT))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("FC cannot be translated: aten.addmm.default refuses its operands: ")
    assert "FC(y, w, b" in lines[1] and lines[2] == "  in   net 'step', operator 1"


def test_an_input_of_unknown_shape_is_named():
    step = net([op("FC", "x w b", "y"), op("Relu", "u", "v")], ["x", "u", "w", "b"], name="step")
    with pytest.raises(GraphirError) as caught:
        caffe2.lower(caffe2.load_program(step, net(INIT, name="init")))
    assert "the shape of 2 external inputs is not known: 'x', 'u'" in str(caught.value)
    assert 'shapes={"x": ([8, 16], "f32")}' in str(caught.value)


def test_state_without_a_value_is_named():
    with pytest.raises(GraphirError, match="2 blobs live from step to step, and have no value: 'w', 'b'"):
        caffe2.lower(program(SGD, {"x": X, "w": torch.ones(3, 4), "b": torch.ones(3)}, INIT[2:]))


def test_a_value_that_contradicts_the_declared_shape_is_refused():
    with pytest.raises(GraphirError, match=r"blob 'x' is declared f32\[5,4\], but its value is f32\[2\]"):
        caffe2.lower(trained(), state={"x": torch.ones(2)})


def test_state_and_outputs_of_other_kinds_are_refused():
    with pytest.raises(GraphirError, match="state has 'ww', which is no blob of program 'step'; did you mean 'w'"):
        caffe2.lower(trained(), state={"ww": X})
    with pytest.raises(GraphirError, match="'w' in the state is of type ndarray, not a tensor"):
        caffe2.lower(trained(), state={"w": X.numpy()})
    with pytest.raises(GraphirError, match="outputs is 'loss', not a list of names"):
        caffe2.lower(trained(), outputs="loss")


@pytest.mark.parametrize(
    "name, reason",
    [("why", "is not made; did you mean 'y'"), ("mutex", "is no tensor"), ("u", "has a size that depends on values")],
)
def test_outputs_that_cannot_be_handed_back_are_refused(name, reason):
    made = program([*SGD, op("Unique", "i", "u")], {"x": X, "i": torch.tensor([1, 1])}, INIT)
    with pytest.raises(GraphirError, match=f"output '{name}' {reason}"):
        caffe2.lower(made, outputs=[name])


def test_a_tensor_is_needed_where_there_is_a_mutex():
    with pytest.raises(GraphirError, match="blob 'mutex' is no tensor, but Relu reads it"):
        caffe2.lower(program([op("Relu", "mutex", "y")], {}, INIT))


def test_only_programs_can_be_lowered():
    with pytest.raises(GraphirError, match="lower takes a Program, not Net"):
        caffe2.lower(trained().step)


RESIZED = [op("ConstantFill", "", "lr", shape=[1], value=1.0), op("ConstantFill", "", "s", shape=[2], value=1.0)]


def stepped(ops, init, names, steps=2):
    """What blobs hold after each step, and the state in the end."""
    lowered = caffe2.lower(program(ops, {}, init), outputs=names)
    graphir.verify(lowered)
    with Session(passes.emit(lowered), lowered.state) as session:
        found = [{name: value.tolist() for name, value in session.step().items()} for _ in range(steps)]
        return found, {name: value.tolist() for name, value in session.state_dict().items()}


FILL = op("GivenTensorFill", "", "s", shape=[2], values=[5.0, 6.0])


@pytest.mark.parametrize(
    "update",
    [[FILL], [op("GivenTensorFill", "", "t", shape=[2], values=[5.0, 6.0]), op("Copy", "t", "s")]],
    ids=["filled", "copied"],
)
def test_state_that_is_given_known_numbers_keeps_them(update):
    found, state = stepped([op("Relu", "s", "y"), *update], RESIZED[1:], ["y", "s"])
    assert found == [{"y": [1, 1], "s": [5, 6]}, {"y": [5, 6], "s": [5, 6]}] and state == {"s": [5, 6]}


def test_the_sizes_that_a_concat_tells_may_be_state():
    init = [op("ConstantFill", "", "n", shape=[2], value=0, dtype=2), RESIZED[1]]
    ops = [op("Copy", "n", "before"), op("Concat", "s s", "c n", axis=0)]
    found, state = stepped(ops, init, ["before"])
    assert found == [{"before": [0, 0]}, {"before": [2, 2]}] and state["n"] == [2, 2]


def test_what_a_step_makes_before_it_reads_it_may_have_another_shape_in_init():
    ops = [op("LearningRate", "it", "lr", base_lr=0.5, policy="fixed"), op("WeightedSum", "s lr", "s")]
    init = [*RESIZED, op("ConstantFill", "", "it", shape=[1], value=0, dtype=10)]
    found, state = stepped(ops, init, ["lr", "s"])
    assert found == [{"lr": 0.5, "s": [0.5, 0.5]}, {"lr": 0.5, "s": [0.25, 0.25]}] and "lr" not in state


def test_state_may_have_another_shape_within_a_step():
    ops = [op("Scale", "s", "half", scale=0.5), op("Concat", "s s", "c info", axis=0), op("Copy", "c", "s")]
    ops += [op("Relu", "s", "y"), op("Copy", "half", "s")]
    found, state = stepped(ops, RESIZED[1:], ["y"])
    assert found == [{"y": [1, 1, 1, 1]}, {"y": [0.5] * 4}] and state == {"s": [0.25, 0.25]}


def test_state_whose_size_depends_on_values_is_refused():
    init = [op("ConstantFill", "", "i", shape=[2], value=1, dtype=10)]
    with pytest.raises(GraphirError, match="'i' lives from step to step, but its size depends on values"):
        caffe2.lower(program([op("Unique", "i", "i")], {}, init))


def test_state_and_outputs_that_are_no_mapping_and_no_names_are_refused():
    with pytest.raises(GraphirError, match="state is of type list, not a mapping"):
        caffe2.lower(trained(), state=[1])
    with pytest.raises(GraphirError, match="outputs is 5, not a list of names"):
        caffe2.lower(trained(), outputs=5)
    with pytest.raises(GraphirError, match="outputs has 3, which is no name"):
        caffe2.lower(trained(), outputs=[3])


@pytest.mark.parametrize(
    "each", [op("Flatten", "x", ""), op("Accuracy", "v i", "y"), op("StopGradient", "", "y")], ids=str
)
def test_whatever_a_translation_trips_over_is_named_with_its_place(each):
    inputs = {"x": X, "v": torch.ones(3), "i": torch.ones(3).int()}
    with pytest.raises(GraphirError, match=rf"{each.type} cannot be translated: (.|\n)*net 'step', operator 0"):
        caffe2.lower(program([each], inputs))


@pytest.mark.parametrize("joined", ["Sum", "NCCLReduce", "NCCLAllreduce"])
def test_participants_of_other_shapes_are_refused(joined):
    outputs = "a b" if joined == "NCCLAllreduce" else "a"
    with pytest.raises(GraphirError, match=r"'b' is f32\[4,3\], but 'a' is f32\[3\]"):
        caffe2.lower(program([op(joined, "a b", outputs)], {"a": torch.ones(3), "b": torch.ones(4, 3)}))


def test_only_an_axis_that_is_given_can_be_added():
    inputs = {"a": torch.randn(3, 4), "b": torch.randn(3, 4)}
    ops = [op("Concat", "a b", "c info", add_axis=1), op("Split", "c info", "d e", add_axis=1)]
    c, d, e = run(ops, inputs, "c d e")
    assert torch.equal(c, torch.cat([inputs["a"], inputs["b"]], 1))
    assert torch.equal(d, inputs["a"]) and torch.equal(e, inputs["b"])


def test_the_documentation_lists_every_type_that_is_translated():
    page = (Path(__file__).resolve().parents[2] / "docs" / "caffe2.md").read_text(encoding="utf-8")
    table = page.partition("<!-- translated -->")[2].partition("<!-- end translated -->")[0]
    listed = set(re.findall(r"`(\w+)`", table))
    assert listed <= TRANSLATIONS.keys()
    assert [type for type in TRANSLATIONS if not {type, type.removesuffix("Gradient")} & listed] == []
