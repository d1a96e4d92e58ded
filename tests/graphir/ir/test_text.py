"""The text form: it loses nothing, reads well, and refuses what it cannot read."""

import math
import time

import nets
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphir.errors import GraphirError, ParseError
from graphir.ir.blob import ROLES, Blob
from graphir.ir.covers import Covers
from graphir.ir.device import CPU, Device, gpu
from graphir.ir.net import Net
from graphir.ir.operator import SYMBOLS, Effects, Operator, Symbol
from graphir.ir.plan import Event, Instruction, Plan
from graphir.ir.program import Interface, ParamGroup, Program, Slot
from graphir.ir.size import Polynomial, dimension
from graphir.ir.text import nbytes_text, operator_text, parse, quoted, show

ODD_NAMES = [
    "a b",
    'a"b',
    "a\\b",
    "a\nb",
    "a;1",
    "a#b",
    "# a",
    "\u2028",
    "\x85",
    "\ud800",
    " ",
    "a ",
    "'a'",
    "слой",
    "層/1",
    "é",
]
ODD_NAMES += ["_", "-", "->", "a->b", "a <- b", "=", "a=b", "(", "[a]", "{", "gpu:0", "gpu:0.compute", "@gpu:0", "0:0"]
ODD_NAMES += ["1", "1.5", "-1", "inf", "none", "true", "f32", "f32[2]", "1*batch", "0.weight", "a-b", "\U0001f642"]
ODD_NAMES += ["in", "of", "op", "net", "plan", "init", "output", "grad", "blob", "param", "input", "external", "run"]

ARGS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from(sorted(SYMBOLS)).map(Symbol)
    | st.dictionaries(
        st.lists(st.sampled_from(["batch", "gpu_0/batch", "true", "f32", "inf"]), max_size=3).map(sorted).map(tuple),
        st.integers(-99, 99),
    ).map(Polynomial.of),
    lambda args: st.lists(args, max_size=3).map(tuple),
    max_leaves=8,
)


def blob(name, shape=(2,), dtype="f32", device="gpu:0", role="activation", storage=None, **geometry):
    return Blob(name, shape, dtype, Device.parse(device), role, storage or name, **geometry)


def net_of(*ops, inputs=(), **fields):
    """A net around some operators, with a blob for each name."""
    names = dict.fromkeys([*inputs, *(n for op in ops for n in (*op.inputs, *op.outputs))])
    return Net("n", tuple(ops), {n: blob(n) for n in names}, tuple(inputs), **fields)


def relu(x="x", y="y", **fields):
    return Operator("aten.relu.default", (x,), (y,), {}, gpu(0))._replace(**fields)


def round_trip(x):
    again = parse(str(x))
    assert again == x
    assert str(again) == str(x)


# What comes back


@pytest.mark.parametrize("seed", range(30))
def test_random_programs_come_back(seed):
    round_trip(nets.random_program(seed, mutate=seed % 3 > 0, views=seed % 2 > 0, spread=0.3 * (seed % 4 == 0)))


@pytest.mark.parametrize("seed", range(60, 85))
def test_random_nets_come_back(seed):
    program = nets.random_program(seed, ops=60)
    round_trip(program.step)
    round_trip(program.init)


@pytest.mark.parametrize("seed", range(20))
def test_random_plans_come_back(seed):
    round_trip(nets.random_plan(seed))


def test_argument_types_come_back_as_they_were():
    args = {"a": 1, "b": 1.0, "c": True, "d": "1", "e": None, "f": (1, (2.0, "x"), ()), "g": Symbol("f32"), "h": "f32"}
    round_trip(net_of(relu(args=args)))
    again = parse(str(net_of(relu(args=args)))).ops[0].args
    assert {k: type(v) for k, v in again.items()} == {k: type(v) for k, v in args.items()}


@given(st.dictionaries(st.text(min_size=1), ARGS, max_size=4))
@settings(max_examples=150, deadline=None)
@example({"a": Polynomial.of({("inf",): -1})})  # the size, not the number
def test_any_arguments_come_back(args):
    net = net_of(relu(args=args))
    assert repr(parse(str(net)).ops[0].args) == repr(args)


def test_numbers_that_are_not_finite_come_back():
    args = parse(str(net_of(relu(args={"a": math.inf, "b": -math.inf, "c": math.nan, "d": -0.0})))).ops[0].args
    assert (args["a"], args["b"], math.isnan(args["c"]), math.copysign(1, args["d"])) == (math.inf, -math.inf, True, -1)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_come_back(name):
    op = relu(name, name + "y", module=name, by=name, args={name: name}, input_versions=(3,))
    net = net_of(op, inputs=[name], external_outputs=(name,), gradients={name: name})
    round_trip(net.with_(name=name, blobs={**net.blobs, "v": blob("v", storage=name), name + "u": blob(name + "u")}))
    plan = Plan(
        Program(name, Net(name, (), {}), net, {}, Covers(fixed=name), (name, name), Interface(), (name, name)),
        {},
        (
            Instruction("run", "gpu:0.compute", 0),
            Instruction("wait", "gpu:0.compute", event=Event(name, 1, "gpu:1.copy_in")),
            Instruction("free", "gpu:0.compute", storage=name),
        ),
        {name: "0123456789abcdef"},
    )
    round_trip(plan)


@given(st.text(min_size=1))
@settings(max_examples=150, deadline=None)
def test_any_name_comes_back(name):
    round_trip(net_of(relu(name, name + "'", args={name: 1}), inputs=[name]).with_(name=name))


@pytest.mark.parametrize("operands", [None, "t_t", "[tt]", "_[t_t]", "tt", "[]tt", "[tt]_[]"])
@pytest.mark.parametrize("results", [None, "t_t", "[tt]", "_t_", "tt", "[t]_", "t", "[]"])
def test_patterns_come_back(operands, results):
    op = Operator("FC", ("a", "b"), ("c", "d"), {}, gpu(0), operands=operands, results=results)
    round_trip(net_of(op, inputs=["a", "b"]))
    overwriting = op._replace(outputs=("c", "a"), output_versions=(0, 1), effects=Effects(writes=((1, 0),)))
    round_trip(net_of(overwriting, inputs=["a", "b"]))


@pytest.mark.parametrize("versions", [None, (0, 0), (0, 2), (2, 0), (1, 1)])
def test_versions_come_back(versions):
    op = Operator("FC", ("a", "b"), ("c", "d"), {}, gpu(0), input_versions=versions, output_versions=versions)
    round_trip(net_of(op, inputs=["a", "b"]))


@pytest.mark.parametrize(
    "effects",
    [Effects(((0, 0),)), Effects((), ((0, 0), (1, 0))), Effects(random=True), Effects(((0, 1),), ((1, 0),), True)],
)
def test_effects_come_back(effects):
    round_trip(net_of(relu(effects=effects)))


@pytest.mark.parametrize("phase", ["init", "forward", "backward", "reduce", "update"])
@pytest.mark.parametrize("role", ROLES)
def test_roles_and_phases_come_back(phase, role):
    net = net_of(relu(phase=phase), relu("y", "z", phase="forward"), inputs=["x"])
    blobs = {"x": blob("x", role=role), "y": blob("y", role=role), "z": blob("z", role=role, storage="x")}
    round_trip(net.with_(blobs=blobs))


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": None, "dtype": None},
        {"shape": None},
        {"dtype": None},
        {"shape": ()},
        {"shape": (0, Polynomial.of({("batch",): 2, (): 1})), "strides": (dimension("gpu_0/batch"), 1), "offset": 7},
        {"offset": Polynomial.of({("batch",): -1, (): 3}), "device": CPU},
    ],
)
def test_geometry_comes_back(fields):
    net = net_of(relu(), inputs=["x"])
    round_trip(net.with_(blobs={"x": blob("x", **fields), "y": blob("y", **fields), "w": blob("w", **fields)}))


def test_operators_without_outputs_or_inputs_come_back():
    round_trip(net_of(Operator("Print", (), (), {}, gpu(1)), Operator("Iter", ("x",), (), {"n": 1}, CPU), inputs=["x"]))


@pytest.mark.parametrize("type", ["aten.relu.default", "aten.add.Tensor", "graphir.sgd", "Relu", "a b", "foo.bar.baz"])
def test_types_come_back(type):
    round_trip(net_of(relu(type=type)))


def test_a_broken_net_can_still_be_printed():
    """Errors show operators of nets that verify refuses."""
    net = Net("n", (relu(), relu(device=gpu(1))), {}, ("x",), ("nowhere",))
    round_trip(net)


def test_interfaces_come_back():
    interface = Interface(
        arguments='[1, {"type": null, "#": "#"}]',
        feeds=(Slot("x", 0), Slot("_"), Slot(None, None, 3), Slot(None, None, "a # b"), Slot(None), Slot("y", 1, 2.0)),
        loss="loss",
        fetches=(Slot("a", 0), Slot("b"), Slot(None, None, 3), Slot(None), Slot(None, None, "a # b")),
        results="not\njson",
        module_state={"fc.weight": "fc.weight", "tied.weight": "fc.weight"},
        optimizers=("AdamW",),
        optimizer_state={"fc.weight": {"exp_avg": "fc.weight.exp_avg", "step": "steps"}, "fc.bias": {}},
        param_groups=(
            ParamGroup("lr", ("fc.weight",), {"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "name": "a, b}"}),
            ParamGroup("lr_1", (), {}),
        ),
    )  # fmt: skip
    program = Program(
        "p", Net("p.init", (), {}), Net("p.step", (), {}), interface=interface, covers=Covers(fixed='why "not"')
    )
    round_trip(program.with_(ahead=0, reduction="sum"))
    round_trip(program.with_(replicas=("gpu_0/", "gpu_1/"), shares=(3, 1)))
    round_trip(program.with_(history=("a{b=[\"|\", 'c']}", "a | b", "", "x # y", " z", '"q"'), replicas=()))


def test_collectives_and_copies_come_back():
    net = net_of(
        Operator("Copy", ("x",), ("x_gpu_1",), {}, gpu(1), by="inject_copies"),
        Operator("AllReduce", ("x", "x_gpu_1"), ("r", "s"), {}, gpu(0), "reduce", operands="[tt]", results="[tt]"),
        Operator("Copy", ("x",), ("y", "z"), {"odd": 1}, gpu(1)),
        Operator("Copy", ("x",), ("x_gpu_2",), {}, gpu(2), issue="placed"),
        Operator("Copy", ("x",), ("x_gpu_3",), {}, gpu(3), by="park", issue="placed", received="fresh", seed=1),
        inputs=["x"],
    )  # fmt: skip
    instructions = (
        Instruction("copy", "gpu:1.copy_in", 0),
        Instruction("collective", "gpu:0.compute", 1, 1),
        Instruction("collective", "gpu:1.compute", 1, 0),
        Instruction("copy", "gpu:0.copy_out", 2),
        Instruction("copy", "gpu:2.copy_in", 3),
        Instruction("copy", "gpu:3.copy_in", 4),
    )
    net = net.with_(blobs=net.blobs | {"x_gpu_1": blob("x_gpu_1", device="gpu:1", role="temporary")})
    plan = Plan(Program("p", Net("i", (), {}), net), {}, instructions)
    round_trip(plan)
    assert "gpu:1.copy_in: copy x_gpu_1 : f32[2] @gpu:1 <- x {by=inject_copies}" in str(plan)
    assert "gpu:1.compute: collective 0 of r" in str(plan)


def test_operators_that_no_instruction_runs_come_back():
    program = Program("p", Net("i", (), {}), net_of(relu(), relu("y", "z"), Operator("Print", (), (), {}, gpu(0))))
    round_trip(Plan(program, {}, (Instruction("run", "gpu:0.compute", 1), Instruction("run", "gpu:0.compute", 2))))


# How it reads


def test_a_program_reads_as_the_golden_one(golden):
    golden("text.program", str(nets.random_program(29, ops=16)))


def test_a_program_with_figures_reads_as_the_golden_one(golden):
    golden("text.figures", show(nets.random_program(4, ops=14), attributes=False))


def test_a_plan_reads_as_the_golden_one(golden):
    golden("text.plan", str(nets.random_plan(4, ops=14)))


def test_a_plans_tables_stand_last_and_are_read_anywhere():
    plan = nets.random_plan(4, ops=14)
    plan = plan.with_(buffers={next(iter(plan.step.blobs)): 0})
    head, *body, end = str(plan).splitlines()
    tables = body[-len(plan.values) - 1 :]
    assert [line.split()[0] for line in tables] == ["buffer", *["value"] * len(plan.values)]
    assert parse("\n".join([head, *tables, *body[: -len(tables)], end])) == plan


def test_figures_are_comments():
    program = nets.random_program(3)
    assert "# " in show(program)
    assert parse(show(program)) == program


def test_figures_need_sizes():
    net = Net("n", (), {"x": blob("x", (dimension("batch"),), role="input")}, ("x",))
    assert "#" not in show(net)


def test_folded_text_can_still_be_read():
    text = show(nets.random_plan(3), attributes=False)
    assert "phase=" not in text
    assert isinstance(parse(text), Plan)


def test_an_operator_is_shown_with_its_types():
    text = "add : f32[2] @gpu:0 = aten.add.Tensor(x, x, alpha=2) {module=m}"
    op = Operator("aten.add.Tensor", ("x", "x"), ("add",), {"alpha": 2}, gpu(0), module="m")
    assert operator_text(op, net_of(op)) == text


def test_a_module_is_left_out_where_the_output_says_it():
    assert "{" not in operator_text(relu(y="gpu_0/fc1", module="fc1"), net_of(relu(y="gpu_0/fc1"))).split("=")[1]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (16 << 20, "16.0 MiB"), (3 << 42, "12.0 TiB")]
)
def test_bytes_read_well(nbytes, text):
    assert nbytes_text(nbytes) == text


def test_names_are_quoted_only_where_they_must_be():
    plain = ("gpu_0/fc1.weight", "0.weight", "a-b", "层")
    assert [quoted(n) for n in plain] == list(plain)
    assert [quoted(n) for n in ("a b", "_", "param", "")] == ['"a b"', '"_"', '"param"', '""']


def test_an_unknown_symbol_is_not_printed():
    with pytest.raises(GraphirError, match="'f31' names no torch constant"):
        str(net_of(relu(args={"dtype": Symbol("f31")})))


# Refusals

HEAD = "net n {\n  input x : f32[2] @gpu:0\n"


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("", "the text ends where a net, a program or a plan is expected", 1),
        ("graph n {\n}", "expected a net, a program or a plan, found 'graph'", 1),
        ("net n", "expected '{', found the end of the line", 1),
        ("net n {", "the text ends where } of net 'n' is expected", 1),
        ("net n {\n}\nx", "text after the end", 3),
        ("net n { x\n}", "expected the end of the line, found 'x'", 1),
        (HEAD + "  input x : f32[2] @gpu:0\n}", "blob 'x' is declared twice", 3),
        (HEAD + "  y = aten.relu(x)\n}", "the operator's device is not known", 3),
        (HEAD + "  y : f33[2] @gpu:0 = aten.relu(x)\n}", "'f33' is not an element type; did you mean 'f32'?", 3),
        (HEAD + "  y : f32[2 @gpu:0 = aten.relu(x)\n}", "expected a type, found 'f32'", 3),
        (HEAD + "  y : f32[a**b] @gpu:0 = aten.relu(x)\n}", "'a**b' is not a size", 3),
        (HEAD + "  y : f32[2] @tpu:0 = aten.relu(x)\n}", "'tpu:0' is not a device", 3),
        (HEAD + "  y : f32[2] gpu:0 = aten.relu(x)\n}", "expected @DEVICE, found 'gpu:0'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu x\n}", "expected '(', found 'x'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x\n}", "expected ',' or ')', found the end of the line", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu([x)\n}", "expected ',' or ')', found ')'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x, )\n}", "expected a name, found ')'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(a=1, x)\n}", "expected name=value, found 'x'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(a=1, a=2)\n}", "argument a is given twice", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x, a=)\n}", "expected a value, found ')'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x, a=[1 2])\n}", "expected ',', found '2'", 3),
        (HEAD + '  y : f32[2] @gpu:0 = aten.relu(x, a="b)\n}', "a string that does not end in its line", 3),
        (HEAD + '  y : f32[2] @gpu:0 = aten.relu(x, a="\\q")\n}', '"\\q" is not a string', 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x, a=" + "[" * 65 + "\n}", "lists in lists more than 64 deep", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x, a=" + "9" * 5000 + ")\n}", "is too long", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {fase=forward}\n}", "unknown attribute 'fase'; did you mean", 3),
        (HEAD + "  y : f32[2] @gpu:0 = Copy(x) {issue=place}\n}", "'place' is not a way to issue; did you mean", 3),
        (HEAD + "  y : f32[2] @gpu:0 = Copy(x) {received=x}\n}", "'x' is not a way to receive", 3),
        ("program p {\n  reduction sums\n}", "'sums' is not a reduction; did you mean 'sum'?", 2),
        ("program p {\n  shares 3 1\n}", "expected ',', found '1'", 2),
        ("program p {\n  shares 3, x\n}", "expected an integer, found 'x'", 2),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {phase=forwards}\n}", "'forwards' is not a phase; did you mean", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {seed=x}\n}", "expected an integer, found 'x'", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {seed=1, seed=1}\n}", "attribute seed is given twice", 3),
        (HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {views=[1]}\n}", "expected a pair of positions", 3),
        (HEAD + '  y : f32[2] @gpu:0 = aten.relu(x) {operands="x"}\n}', '"x" is not a pattern', 3),
        (HEAD + "  blob thing y : f32[2] @gpu:0\n}", "'thing' is not a role", 3),
        (HEAD + "  grad x y\n}", "expected '->', found 'y'", 3),
        ("program p {\n}", "'p' has 0 nets", 2),
        ("program p {\n  net a {\n  }\n  net b {\n  }\n  net c {\n  }\n}", "a third net", 6),
        ("program p {\n  dims batch\n}", "expected '=', found the end of the line", 2),
        ("program p {\n  dims batch=1, batch=2\n}", "batch is given twice", 2),
        ("program p {\n  dimms batch=1\n}", "unknown statement 'dimms'", 2),
        ("program p {\n  passes a | | b\n}", "the passes cannot be read", 2),
        ("program p {\n  interface {\n    feeed x\n  }\n}", "unknown statement 'feeed'", 3),
        ("program p {\n  interface {\n    differentiable 0, x\n  }\n}", "a position is no whole number", 3),
        ("plan p {\n  gpu:0.compute: free x\n}", "an instruction before the plan's nets", 2),
    ],
)  # fmt: skip
def test_bad_text_is_refused(text, what, line):
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert what in caught.value.what
    assert caught.value.where == f"line {line}"
    assert caught.value.fix


@pytest.mark.parametrize(
    ("instruction", "what"),
    [
        ("gpu:0.compute: jump x", "'jump' is not an instruction"),
        ("gpu:0.compute: fee x", "did you mean 'free'"),
        ("gpu:0.kompute: free x", "'gpu:0.kompute' is not a lane"),
        ("gpu:0.compute: wait x", "expected 'by', found the end of the line"),
        ("value x = 12", "'12' is not a value number"),
        ("value x 0123456789abcdef", "expected '=', found '0123456789abcdef'"),
        ("gpu:0.compute: run of x", "no operator makes 'x' so far"),
        ("gpu:0.compute: run of op 7", "there is no operator 7"),
        ("gpu:0.compute free x", "expected ':', found 'free'"),
        ("hpu:0.compute: free x", "unknown statement 'hpu'"),
    ],
)
def test_bad_instructions_are_refused(instruction, what):
    with pytest.raises(ParseError) as caught:
        parse(f"plan p {{\n  net a {{\n  }}\n  net b {{\n  }}\n  {instruction}\n}}")
    assert what in str(caught.value)
    assert caught.value.where == "line 6"


def test_an_error_shows_what_where_and_how_to_fix_it():
    with pytest.raises(ParseError) as caught:
        parse(HEAD + "  y : f32[2] @gpu:0 = aten.relu(x) {phase=reduced}  # a comment\n}")
    assert str(caught.value) == (
        "'reduced' is not a phase; did you mean 'reduce'?\n"
        "  at   y : f32[2] @gpu:0 = aten.relu(x) {phase=reduced}  # a comment\n"
        "  in   line 3\n"
        "  fix  phases: init, forward, backward, reduce, update"
    )


@given(st.integers(0, 30), st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_text_never_ends_in_another_error(seed, data):
    text = str(nets.random_plan(seed, ops=8))
    start = data.draw(st.integers(0, len(text)))
    damaged = (
        text[:start]
        + data.draw(st.text('"[]{}()=,:;#-> a1_@.\n', max_size=3))
        + text[start + data.draw(st.integers(0, 3)) :]
    )
    try:
        parse(damaged)
    except ParseError as e:
        assert e.where.startswith("line ")


def test_large_nets_are_fast():
    """Measured: 0.8 s to print 100,000 operators, 2.3 s to parse them."""
    net = nets.synthetic_net(20_000)
    start = time.process_time()
    text = str(net)
    printed = time.process_time()
    parse(text)
    assert printed - start < 0.2 * 4
    assert time.process_time() - printed < 0.6 * 4
