"""Lowered nets against what real Caffe2 recorded: training, shifted nets, and every type in the recorded models."""

import cases
import numpy as np
import pytest
import torch
from dlrm import dlrm_batch, dlrm_program
from graphir.runtime import Session
from lowering import fed

import graphir
from graphir import caffe2, passes
from graphir.caffe2.lower.evaluate import execute
from graphir.ir.names import base_name

STEPS = 3
SHORT = {"float32": "f32", "int32": "i32", "int64": "i64"}
TOLERANCE = 1e-5
"""Of the largest difference, over the largest magnitude of the tensor."""


def shapes_of(recording):
    names = [key.partition("/")[2] for key in recording.files if key.startswith("input0/")]
    return {n: (recording[f"input0/{n}"].shape, SHORT[str(recording[f"input0/{n}"].dtype)]) for n in names}


def of(recording, stage):
    found = {key.partition("/")[2]: recording[key] for key in recording.files if key.startswith(f"{stage}/")}
    return {name: torch.from_numpy(value) for name, value in found.items()}


def difference(found, wanted):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    magnitude = wanted.abs().max().item()
    return (found.double() - wanted.double()).abs().max().item() / (magnitude or 1.0)


@pytest.mark.parametrize("executor", ["reference", "threads"])
@pytest.mark.parametrize("case", cases.params("numeric"))
def test_training_gives_every_blob_that_caffe2_recorded(case, executor):
    recording = np.load(case.folder / "run.npz")
    imported = case.program(shapes=shapes_of(recording))
    kept = [name for name in of(recording, "step1") if name in imported.step.blobs]
    lowered = caffe2.lower(imported, state=of(recording, "init"), outputs=kept)
    assert {"optimizer_iteration", *case.record["params"]} <= set(kept)
    with Session(passes.emit(lowered), lowered.state, executor=executor) as session:
        for k in range(STEPS):
            found, wanted = session.step(**of(recording, f"input{k}")), of(recording, f"step{k + 1}")
            differences = {name: difference(found[name], wanted[name]) for name in kept}
            assert max(differences.values()) <= TOLERANCE, max(differences.items(), key=lambda item: item[1])


def trained(lowered, steps=2):
    with Session(passes.emit(lowered), lowered.state) as session:
        outputs = [session.step(**fed(lowered, k)) for k in range(steps)]
        return session.state_dict(), outputs


def data_shapes(record):
    prefixes = [f"{record['device_prefix']}_{device}/" for device in record["devices"]]
    return {f"{p}data": ([8, 16], "f32") for p in prefixes} | {f"{p}label": ([8], "i32") for p in prefixes}


def model_program(case, **options):
    record = case.record
    external = "external" in case.name
    return case.program(shapes=data_shapes(record) if external else None, **options)


LARGE = ("resnet50", "resnet20")


@pytest.mark.parametrize("case", cases.params("model"))
def test_every_model_is_lowered_and_runs(case):
    imported = model_program(case)
    lowered = caffe2.lower(passes.inject_copies(imported))
    graphir.verify(lowered)
    if "resnet50" in case.name:
        return
    with Session(passes.emit(lowered), lowered.state) as session:
        found = session.step(**fed(lowered))
    assert found and all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("case", cases.params("shift", where=lambda case: not case.refused))
def test_a_shift_changes_no_bit(case):
    record = case.record
    name = record["before"]["net"].split("/")[1]
    if name.startswith("resnet50"):
        pytest.skip("too large to lower twice here")
    imported, call = model_program(cases.Case(case.root, "model", name)), record["call"]
    shifted = passes.shift_activations(imported, call["activations"], dict(map(tuple, call["shifts"])), strict=False)
    before, after = (caffe2.lower(passes.inject_copies(placed)) for placed in (imported, shifted))
    graphir.certify(before, after)
    if name.startswith("resnet20"):
        return  # its steps take long
    state, outputs = trained(before)
    found_state, found_outputs = trained(passes.share_storage(after))
    assert state.keys() <= found_state.keys()
    assert [name for name in state if not torch.equal(state[name], found_state[name])] == []
    for step, found in zip(outputs, found_outputs, strict=True):
        assert [name for name in step if not torch.equal(step[name], found[name])] == []


def traced(imported, lowered, given, params):
    """The parameters, and the last value of each blob of one step up to its updates, as autograd follows them."""
    start = {**{name: lowered.state[name].clone() for name in lowered.init.blobs}, **given}
    leaves = {name: start[name].requires_grad_() for name in params}
    values, last = {(name, 0): tensor for name, tensor in start.items()}, dict(start)
    stopped = {name for o in imported.step.ops if o.type == "StopGradient" for name in o.outputs}
    for o in lowered.step.ops:
        if o.phase != "update":
            made = execute(o, [values[read] for read in o.reads])
            made = [t.detach() if n in stopped else t for n, t in zip(o.outputs, made, strict=True)]
            values.update(zip(o.makes, made, strict=True))
            last.update(zip(o.outputs, made, strict=True))
    return leaves, last


def gradient_names(case):
    """The gradient of each parameter: a blob, or the blobs of its rows and their values."""
    record = case.record
    found = record["param_to_grad"] if case.kind == "model" else record["expected"].get("gradient_map", {})
    return {name: (g if isinstance(g, str) else (g["indices"], g["values"])) for name, g in found.items()}


def last_name(lowered, name):
    """The blob that holds the last value of *name*: one with a number where the shape has changed."""
    head = len(name) + 1
    return [n for n in lowered.step.blobs if n == name or (n[:head] == f"{name}_" and n[head:].isdigit())][-1]


def has_gradients(case):
    """Whether a case has a backward, and gradients that do not share their memory under other names."""
    if case.kind == "dlrm":
        return case.has("train")
    return case.name not in ("mlp_forward_only_2dev", "lenet_memonger_2dev")


@pytest.mark.parametrize("case", cases.params("model", "dlrm", where=has_gradients))
def test_gradients_are_those_of_autograd(case):
    if case.name.startswith(LARGE):
        pytest.skip("too large to follow by autograd here")
    imported, state = dlrm_program(case, "train") if case.kind == "dlrm" else (model_program(case), {})
    lowered = caffe2.lower(passes.inject_copies(imported), state=state)
    given = dlrm_batch(lowered) if case.kind == "dlrm" else fed(lowered)
    gradients = {name: g for name, g in gradient_names(case).items() if name in lowered.init.blobs}
    leaves, values = traced(imported, lowered, given, gradients)
    total = sum(values[name].sum() for name, *_ in lowered.interface.fetches)
    own = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    assert own
    for name, gradient in gradients.items():
        wanted = own[name]
        if case.kind == "model" or (isinstance(gradient, str) and case.record["inputs"]["sync_dense_params"]):
            wanted = sum(g for n, g in own.items() if base_name(n) == base_name(name))
        if isinstance(gradient, str):
            reduced = [n for n in values if n.startswith(f"{gradient}_reduced")]
            found = values[reduced[-1] if reduced else gradient]
        else:
            rows, updates = (values[last_name(lowered, n)] for n in gradient)
            found = torch.zeros_like(wanted).index_add(0, rows.long(), updates)
        # A bias in front of a normalisation has no gradient but rounding errors.
        assert (found - wanted).abs().max() <= TOLERANCE * max(wanted.abs().max().item(), 1e-2), name
