"""Copies in Caffe2's nets, against what Caffe2 did.

Where Caffe2's own result computes what its input does, ours is the same, operator for operator, but for copies that
only feed copies and copies that are there already. Where it is wrong, ours is right, and has no copy too many.
"""

import cases
import pytest

import graphir
from graphir import caffe2, passes
from graphir.errors import EquivalenceError, PassError, PlacementError
from graphir.ir.device import KINDS, Device
from graphir.ir.net import Net
from graphir.ir.placement import same_memory
from graphir.ir.program import Program

COPIES = ("Copy", "CopyCPUToGPU", "CopyGPUToCPU")

LARGE = 1000
"""Operators beyond which Caffe2's own result is not certified, to save time."""

TWICE = {"edge_device_id_unset_vs_zero", "edge_random_seed", "random_102", "random_105"}
"""Caffe2 copies a blob twice to one device that is written in two ways."""

PARTICIPANTS_MOVE = {"random_109"}
"""Caffe2 copies each participant of a reduction to the device that has its position's number."""


def described(op):
    return op.type, op.inputs, op.outputs, op.device


def without_copies_for_copies(net):
    """The operators of a net, without injected copies that only feed copies."""
    ops = [described(op) for op in net.ops]
    i = 0
    while i < len(ops):
        kind, inputs, outputs, _ = ops[i]
        if kind in COPIES and outputs[0].startswith(inputs[0] + "_"):
            readers = []
            for j in range(i + 1, len(ops)):
                if outputs[0] in ops[j][1]:
                    readers.append(j)
                if outputs[0] in ops[j][2]:
                    break
            if readers and all(ops[j][0] in COPIES for j in readers):
                for j in readers:
                    reads = tuple(inputs[0] if name == outputs[0] else name for name in ops[j][1])
                    ops[j] = (ops[j][0], reads, *ops[j][2:])
                del ops[i]
                continue
        i += 1
    return ops


def copies(net):
    return sum(op.type in COPIES for op in net.ops)


def sound(before, after):
    """Whether *after* computes the same, everything in its place."""
    try:
        graphir.certify(before, after)
        graphir.verify(after)
    except (EquivalenceError, PlacementError):
        return False
    return True


def superfluous(net, live):
    """The injected copies of what is there already, and those that nobody reads."""
    value = {name: ("external", name) for name in net.external_inputs}
    found, unread = [], {}
    for i, op in enumerate(net.ops):
        for name in op.inputs:
            unread.pop(name, None)
        for name in op.outputs:
            if name in unread:
                found.append(net.ops[unread.pop(name)])
        if op.by != "inject_copies":
            value.update({name: (i, name) for name in op.outputs})
            continue
        (source,), (target,) = op.inputs, op.outputs
        here = net.blobs[target].device
        if any(v == value[source] and same_memory(net.blobs[n].device, here) for n, v in value.items()):
            found.append(op)
        value[target] = value[source]
        unread[target] = i
    return [*found, *(net.ops[i] for name, i in unread.items() if name not in live)]


def check(before, after):
    """What holds of every result: right, in its place, and without a copy too many."""
    graphir.verify(after)
    graphir.certify(before, after)
    assert not superfluous(after.init, {*after.step.external_inputs, *after.init.external_outputs})
    outputs = before.step.external_outputs or before.step.unread
    assert not superfluous(after.step, {*after.step.external_inputs, *outputs})


@pytest.mark.parametrize("case", cases.params("shift", where=lambda case: not case.refused))
def test_shifted_nets(case):
    call, expected = case.record["call"], case.record["expected"]
    program = case.program()
    shifted = passes.shift_activations(program, call["activations"], dict(map(tuple, call["shifts"])), strict=False)
    text = str(shifted)
    ours = passes.inject_copies(shifted)
    assert str(shifted) == text
    check(program, ours)
    if not case.has("after_net"):
        return
    model = case.record["before"]["net"].split("/")[1]
    record = cases.Case(case.root, "model", model).record
    options = {option: record[option] for option in ("devices", "device_prefix", "params")}
    theirs = caffe2.load_program(case.net("after_net"), case.net("after_param_init_net"), **options)
    assert expected["net"]["exception"] is None
    for mine, its in ((ours.init, theirs.init), (ours.step, theirs.step)):
        assert copies(mine) <= copies(its)
    if len(program.step.ops) < LARGE and sound(program, theirs):
        for mine, its in ((ours.init, theirs.init), (ours.step, theirs.step)):
            assert without_copies_for_copies(mine) == without_copies_for_copies(its)


def device(record):
    return Device.parse(f"{KINDS[record['device_type']]}:{record['device_id']}")


def chained(nets, outputs=None):
    """The program of nets that run one after the other; what the last leaves unread are its outputs."""
    step = nets[-1]
    init = nets[0].with_(ops=tuple(op._replace(phase="init") for op in nets[0].ops)) if len(nets) > 1 else None
    written = {name for op in step.ops for name in op.outputs}
    made = set() if init is None else {name for op in init.ops for name in op.outputs} | set(init.external_inputs)
    roles = {name: "state" if name in written | made else "input" for name in step.external_inputs}
    blobs = {name: blob._replace(role=roles.get(name, blob.role)) for name, blob in step.blobs.items()}
    filled = {} if init is None else dict(init.blobs)
    filled.update({name: blobs[name] for name, role in roles.items() if role == "state"})
    given = [name for name, role in roles.items() if role == "state" and name not in made]
    init = Net("init", (), filled, tuple(given)) if init is None else init.with_(
        blobs=filled, external_inputs=(*init.external_inputs, *given)
    )  # fmt: skip
    outputs = outputs or step.external_outputs or tuple(n for n in step.blobs if n in written and n not in step.read)
    return Program("chain", init, step.with_(blobs=blobs, external_outputs=outputs))


REFUSED = {
    "edge_ideep": "nothing copies 'x' from gpu:0 to ideep:0",
    "edge_undefined_input": "blob 'ghost' is read before anybody has made it",
    "edge_user_remap_unknown": "blob_remap has 'nowhere' as the copy of 'x' on gpu:1",
}


def located(net, devices):
    """A net of Caffe2's with its blobs where Caffe2's map has them."""
    blobs = {n: blob.on(device(devices[n])) if n in devices else blob for n, blob in net.blobs.items()}
    return net.with_(blobs=blobs)


def injected(case):
    """The nets of a case, what we and what Caffe2 make of them; each call is given our maps of the one before."""
    before, ours, theirs = [], [], []
    devices = remap = None
    for step in case.record["steps"]:
        net = caffe2.load_net(case.net(step["before"]))
        maps = {}
        if step["blob_to_device_in"] is not None:
            given = {name: device(d) for name, d in step["blob_to_device_in"].items()}
            maps["blob_to_device"] = given if devices is None else devices
        if step["blob_remap_in"]:
            given = {(name, device(d)): copy for name, d, copy in step["blob_remap_in"]}
            maps["blob_remap"] = given if remap is None else remap
        text, placeholders = str(net), step["placeHolderOps"] or ()
        copied = {name: dict(given) for name, given in maps.items()}
        done = passes.inject_copies(net, placeholder_ops=placeholders, **maps)
        assert (str(net), copied) == (text, maps)
        if maps:
            done, devices, remap = done.net, done.blob_to_device, done.blob_remap
        else:
            again = passes.inject_copies(net, placeholder_ops=placeholders, blob_to_device={})
            devices, remap = again.blob_to_device, again.blob_remap
        before.append(net)
        ours.append(done)
        if step["exception"] is None:
            theirs.append(located(caffe2.load_net(case.net(step["after"])), step["blob_to_device_out"]))
    return before, ours, theirs


@pytest.mark.parametrize("case", cases.params("inject"))
def test_injected_nets(case):
    if case.name in REFUSED:
        with pytest.raises(PassError, match=REFUSED[case.name]):
            injected(case)
        return
    before, ours, theirs = injected(case)
    program = chained(before)
    outputs = program.step.external_outputs
    check(program, chained(ours, outputs))
    if len(theirs) < len(ours) or not sound(program, chained(theirs, outputs)):
        return
    assert all(copies(a) <= copies(b) for a, b in zip(ours, theirs, strict=True))
    if case.name not in TWICE | PARTICIPANTS_MOVE:
        for a, b in zip(ours, theirs, strict=True):
            assert without_copies_for_copies(a) == without_copies_for_copies(b)


def net(lines):
    """A net of Caffe2's from its lines."""
    return graphir.parse("net small {\n" + lines + '\n  proto ""\n}')


CHAIN = """
  x : ? @gpu:0 = GaussianFill() {seed=0}
  y : ? @gpu:1 = Relu(x)
  z : ? @gpu:0 = Tanh(x)
"""


def test_the_maps_say_where_everything_is():
    done = passes.inject_copies(net(CHAIN), blob_to_device={"w": "gpu:3"})
    assert [op.outputs for op in done.net.ops] == [("x",), ("x_gpu_1",), ("y",), ("z",)]
    assert done.blob_to_device == {"w": "gpu:3", "x": "gpu:0", "x_gpu_1": "gpu:1", "y": "gpu:1", "z": "gpu:0"}
    assert done.blob_remap == {("x", "gpu:1"): "x_gpu_1"}


def test_maps_take_the_numbers_of_gpus():
    remap = {("x", 1): "x_gpu_1"}
    named = passes.inject_copies(net(CHAIN), blob_to_device={"w": "gpu:3", "x_gpu_1": "gpu:1"}, blob_remap=remap)
    assert passes.inject_copies(net(CHAIN), blob_to_device={"w": 3, "x_gpu_1": 1}, blob_remap=remap) == named


def test_a_copy_of_an_earlier_net_is_read_and_becomes_an_external_input():
    first = passes.inject_copies(net(CHAIN), blob_to_device={})
    later = net("  activation x : ? @cpu:0\n  v : ? @gpu:1 = Relu(x)")
    done = passes.inject_copies(later, blob_to_device=first.blob_to_device, blob_remap=first.blob_remap)
    assert done.net.external_inputs == ("x", "x_gpu_1")
    assert [op.inputs for op in done.net.ops] == [("x_gpu_1",)]


def test_a_copy_of_an_earlier_net_that_nobody_reads_is_handed_on_and_no_input():
    first = passes.inject_caffe2_copies(net(CHAIN), blob_to_device={})
    maps = {"blob_to_device": first.blob_to_device, "blob_remap": first.blob_remap}
    later = net("  activation x : ? @gpu:0\n  v : ? @gpu:0 = Relu(x)")
    done = passes.inject_caffe2_copies(later, **maps)
    assert done.net == later
    assert done.blob_remap == first.blob_remap == {("x", "gpu:1"): "x_gpu_1"}
    assert passes.inject_copies(later, **maps) == done


def test_no_copy_is_taken_over_of_what_the_net_writes():
    first = passes.inject_copies(net(CHAIN), blob_to_device={})
    later = net("  activation x : ? @gpu:0\n  v : ? @gpu:1 = Relu(x)\n  x;1 = Relu(x)")
    done = passes.inject_copies(later, blob_to_device=first.blob_to_device, blob_remap=first.blob_remap)
    assert [(op.type, op.inputs) for op in done.net.ops] == [("Copy", ("x",)), ("Relu", ("x_gpu_1",)), ("Relu", ("x",))]
    assert done.blob_remap == {}


def test_an_update_made_elsewhere_is_brought_home_for_who_reads_it_there():
    text = """
      x : ? @gpu:0 = GaussianFill() {seed=0}
      x;1 = Relu(x) {device=gpu:1}
      y : ? @gpu:1 = Tanh(x;1)
      z : ? @gpu:0 = Tanh(x;1)
      output y
      output z
    """
    done = passes.inject_copies(net(text))
    assert [(op.type, op.inputs, op.outputs) for op in done.ops] == [
        ("GaussianFill", (), ("x",)),
        ("Copy", ("x",), ("x_gpu_1",)),
        ("Relu", ("x_gpu_1",), ("x_gpu_1",)),
        ("Tanh", ("x_gpu_1",), ("y",)),
        ("Copy", ("x_gpu_1",), ("x",)),
        ("Tanh", ("x",), ("z",)),
    ]


def test_an_update_that_nobody_reads_at_home_stays_where_it_is():
    text = """
      x : ? @gpu:0 = GaussianFill() {seed=0}
      x;1 = Relu(x) {device=gpu:1}
      y : ? @gpu:1 = Tanh(x;1)
      output y
    """
    assert [op.type for op in passes.inject_copies(net(text)).ops] == ["GaussianFill", "Copy", "Relu", "Tanh"]


@pytest.mark.parametrize("last", ["forward", "update"])
def test_a_state_comes_home_as_written_before_the_update_if_it_was(last):
    """By that a session tells which states replicas have of their own."""
    text = """
      activation x : ? @gpu:0
      x;1 = Relu(x) {device=gpu:1}
      x;2 = Tanh(x;1) {device=gpu:1}
    """
    step = net(text)
    step = step.with_(ops=tuple(op._replace(phase=p) for op, p in zip(step.ops, ("forward", last), strict=True)))
    home = passes.inject_copies(step).ops[-1]
    assert (home.type, home.outputs, home.phase) == ("Copy", ("x",), "forward")
    late = step.with_(ops=tuple(op._replace(phase="update") for op in step.ops))
    assert passes.inject_copies(late).ops[-1].phase == "update"


def test_the_host_is_one_memory():
    text = "  x : ? @cpu:3 = GaussianFill() {seed=0}\n  y : ? @cpu:1 = Relu(x)\n  z : ? @cpu:3 = Relu(y)"
    before = net(text)
    assert passes.inject_copies(before) == before


def test_an_operand_that_is_needed_on_two_devices_is_copied_for_one_position():
    text = """
      x : ? @gpu:0 = GaussianFill() {seed=0}
      a : ? @gpu:0, b : ? @gpu:0 = Split(x, x)
    """
    done = passes.inject_copies(net(text))
    assert done.ops[-1].inputs == ("x", "x_cpu")


def test_maps_go_with_a_net_of_caffe2s():
    captured = graphir.parse("net small {\n  x : f32[2] @gpu:0 = aten.rand()\n}")
    with pytest.raises(PassError, match="net 'small' is not from Caffe2"):
        passes.inject_copies(captured)
    program = Program("p", Net("init", (), {}), net(CHAIN))
    with pytest.raises(PassError, match="blob_remap goes with a net"):
        passes.inject_copies(program, blob_remap={})
    with pytest.raises(PassError, match="program 'p' is not from Caffe2"):
        passes.inject_copies(program.with_(step=captured), placeholder_ops=["Send"])


def test_a_program_is_told_where_its_inputs_are_fed():
    step = net("  input x : ? @cpu:0\n  y : ? @gpu:1 = Relu(x)\n  output y")
    program = Program("p", Net("init", (), {}), step)
    assert [op.type for op in passes.inject_copies(program).step.ops] == ["CopyCPUToGPU", "Relu"]
    done = passes.inject_copies(program, blob_to_device={"x": "gpu:1"})
    assert done.net == done.program.step
    assert [op.type for op in done.net.ops] == ["Relu"]
    assert done.blob_to_device == {"x": "gpu:1", "y": "gpu:1"}


def chain_of(first, second):
    """Both nets, the maps handed on, as one list of operators."""
    a = passes.inject_copies(net(first), blob_to_device={})
    b = passes.inject_copies(net(second), blob_to_device=a.blob_to_device, blob_remap=a.blob_remap)
    return [(op.type, op.inputs, op.outputs, op.device) for op in b.net.ops]


READ_ON_1 = """
  x : ? @gpu:0 = GaussianFill() {seed=0}
  y : ? @gpu:1 = Relu(x)
"""


def test_a_blob_that_the_net_writes_is_not_taken_for_a_copy():
    later = """
      activation x : ? @gpu:0
      x_gpu_1 : ? @gpu:1 = GaussianFill() {seed=0}
      z : ? @gpu:1 = Tanh(x)
    """
    assert chain_of(READ_ON_1, later)[1:] == [
        ("Copy", ("x",), ("x_gpu_1_1",), "gpu:1"),
        ("Tanh", ("x_gpu_1_1",), ("z",), "gpu:1"),
    ]


def test_copies_on_two_kinds_of_devices_have_two_names():
    later = "  activation x : ? @gpu:0\n  h : ? @hip:1 = Tanh(x)\n  g : ? @gpu:1 = Tanh(x)"
    assert chain_of(READ_ON_1, later) == [
        ("Copy", ("x",), ("x_gpu_1_1",), "hip:1"),
        ("Tanh", ("x_gpu_1_1",), ("h",), "hip:1"),
        ("Tanh", ("x_gpu_1",), ("g",), "gpu:1"),
    ]


def test_a_blob_of_an_earlier_net_is_not_overwritten():
    first = "  x : ? @gpu:0 = GaussianFill() {seed=0}\n  x_gpu_1 : ? @gpu:1 = GaussianFill() {seed=1}"
    assert chain_of(first, "  activation x : ? @gpu:0\n  g : ? @gpu:1 = Tanh(x)")[0][2] == ("x_gpu_1_1",)


def test_three_nets_with_numbered_hosts():
    first = passes.inject_copies(
        net("  x : ? @gpu:0 = GaussianFill() {seed=0}\n  y : ? @cpu:3 = Relu(x)"), blob_to_device={}
    )
    later = net("  activation x : ? @gpu:0\n  z : ? @cpu:3 = Tanh(x)")
    for _ in range(2):
        first = passes.inject_copies(later, blob_to_device=first.blob_to_device, blob_remap=first.blob_remap)
        assert [op.inputs for op in first.net.ops] == [("x_cpu",)]


def test_a_blob_that_nobody_makes_at_home_is_not_declared():
    init = net("  x : ? @gpu:0 = GaussianFill() {seed=0}").with_(name="init")
    init = init.with_(ops=tuple(op._replace(phase="init") for op in init.ops))
    step = net("  x : ? @gpu:0 = GaussianFill() {seed=1, device=gpu:1}\n  y : ? @gpu:1 = Relu(x)\n  output y")
    program = Program("p", init, step)
    placed = passes.inject_copies(program)
    check(program, placed)
    assert list(placed.step.blobs) == ["y", "x_gpu_1"]


NESTED = '{proto="arg { name: \\"then_net\\" n { op { input: \\"x\\" output: \\"w\\" type: \\"Tanh\\" } } }"}'


def test_what_a_nested_net_reads_is_brought_home_before_it():
    text = f"""
      x : ? @gpu:0 = GaussianFill() {{seed=0}}
      x;1 = Relu(x) {{device=gpu:1}}
      y : ? @gpu:0 = If() {NESTED}
    """
    done = passes.inject_copies(net(text))
    assert [op.type for op in done.ops] == ["GaussianFill", "Copy", "Relu", "Copy", "If"]


def test_certify_tells_nested_nets_apart():
    text = f"  x : ? @gpu:0 = GaussianFill() {{seed=0}}\n  y : ? @gpu:0 = If() {NESTED}"
    a, b = (Program("p", Net("init", (), {}), net(t)) for t in (text, text.replace("Tanh", "Relu")))
    with pytest.raises(EquivalenceError, match="'y'"):
        graphir.certify(a, b)


def test_certify_compares_what_a_step_without_outputs_leaves():
    a, b = (Program("p", Net("init", (), {}), net(t)) for t in (READ_ON_1, READ_ON_1.replace("Relu", "Tanh")))
    with pytest.raises(EquivalenceError, match="output 'y'"):
        graphir.certify(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blob_to_device": [1]}, "blob_to_device"),
        ({"blob_to_device": {"x": 3.0}}, r"blob_to_device\.x: 3\.0 is not a device"),
        ({"blob_remap": {("x", "gpu1"): "y"}}, "'gpu1' is not a device"),
        ({"blob_remap": {"x": "y"}}, "blob_remap has 'x'"),
        ({"blob_remap": 3}, "blob_remap has 3"),
        ({"placeholder_ops": "Recv"}, "placeholder_ops"),
        ({"placeholder_ops": 3}, "placeholder_ops"),
    ],
)
def test_other_arguments_are_refused(options, message):
    with pytest.raises(PassError, match=message):
        passes.inject_copies(net(CHAIN), **options)


def test_a_copy_of_several_blobs_is_refused():
    text = "  x : ? @gpu:0 = GaussianFill() {seed=0}\n  y : ? @gpu:0, z : ? @gpu:0 = Copy(x, x)"
    with pytest.raises(PassError, match="a Copy has one input and one output"):
        passes.inject_copies(net(text))


def test_participants_that_a_reduction_overwrites_stay():
    text = """
      a : ? @gpu:0 = GaussianFill() {seed=0}
      b : ? @gpu:1 = GaussianFill() {seed=1}
      b;1 = NCCLReduce(a, b, root=1) {writes=[0:1], device=gpu:1}
    """
    assert [op.type for op in passes.inject_copies(net(text)).ops] == ["GaussianFill", "GaussianFill", "NCCLReduce"]


def test_a_blob_that_a_control_input_names_is_brought_home_before(tmp_path):
    text = """
      x : ? @gpu:1 = GaussianFill() {seed=0}
      z : ? @gpu:1 = Relu(x)
      q : ? @gpu:1 = Tanh(z) {proto="control_input: \\"x\\""}
    """
    done = passes.inject_copies(net(text), blob_to_device={"x": "gpu:0"})
    assert [op.type for op in done.net.ops] == ["GaussianFill", "Relu", "Copy", "Tanh"]
    caffe2.save_net(done.net, tmp_path / "net.pb")
    assert [op.inputs for op in caffe2.load_net(tmp_path / "net.pb").ops] == [op.inputs for op in done.net.ops]


def test_caffe2s_copy_in_place_and_with_arguments_is_an_operator():
    text = """
      x : ? @gpu:0 = GaussianFill() {seed=0}
      x;1 = Copy(x) {writes=[0:0]}
      y : ? @gpu:1 = Copy(x;1, k=3)
    """
    before = net(text)
    graphir.verify(before)
    assert [op.type for op in passes.inject_copies(before).ops] == ["GaussianFill", "Copy", "Copy"]
