"""What is public: the names, that each is explained, and that tests use nothing else."""

import ast
import importlib
import inspect
import re
from functools import cached_property
from types import FunctionType

import pytest
from sources import FOLDERS, Source, sources

from graphir import Plan, Program

PUBLIC = {
    "graphir": """
        Blob Certificate Compiled DataParallel Device Diff Estimate LargestBatch Memory Net Operator Overlap
        PlacedModules Plan Profile Program ReplicationCallbackDataParallel Topology Traffic
        CaptureError CoverageError EagerWarning EquivalenceError FileError GraphirError ParseError PassError
        PassWarning PipelineWarning PlacementError PlanError ProfileWarning RecaptureWarning ReplicationError RunError
        SessionError TrainingWarning VerifyError
        allow_operators capture certify compile data_parallel diff estimate exec_data_parallel_replication_callback
        largest_batch load memory overlap parse patch_replication_callback place placed profile register_operator save
        seeded show to_exported to_fx traffic verify
    """,
    "graphir.parallel": """
        CallbackContext CompiledReplicas DataParallel ReplicationAssertionError ReplicationCallbackDataParallel
        ReplicationIndexError ReplicationRuntimeError ReplicationTypeError ReplicationValueError SynchronizedBatchNorm1d
        SynchronizedBatchNorm2d SynchronizedBatchNorm3d UserScattered all_gather convert_sync_batch_norm data_parallel
        exec_data_parallel_replication_callback gather parallel_apply patch_replication_callback replicate scatter
        scatter_kwargs
    """,
    "graphir.passes": """
        Balance Balanced Gpu Halves InjectCopies Park Pass Pipeline PipelineSchedule Recompute Replica Replicate
        ReplicationCallback Run Shard ShareStorage ShiftActivations ShiftModules SplitGradients SyncBatchNorm Timing
        balance build emit find_activations inject_caffe2_copies inject_copies park pipeline recompute register
        replicate replication_callback shard share_storage shift_activations shift_modules split_backward
        split_gradients sync_batch_norm
    """,
    "graphir.runtime": """
        Finding Function Report Session check python
    """,
}
"""The names that users write. A change here is a change of the interface: say it in docs/changelog.md."""

ALL = [source for folder in FOLDERS for source in sources(folder) if source.path.name != "__main__.py"]


def declared(source: Source) -> list[str] | None:
    """The module's ``__all__``, if it has one."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


def unexplained(source: Source) -> list[str]:
    """Public functions and classes of a module that have no docstring."""
    names = declared(source) or []
    return [
        f"{source}:{node.lineno} {node.name}"
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names and not ast.get_docstring(node)
        if not any(isinstance(made, ast.Name) and made.id == "overload" for made in node.decorator_list)
    ]


def unexplained_methods(owner: type) -> list[str]:
    """Public methods and properties of a class that have no docstring, nor do those that they override."""
    own = [base for base in owner.__mro__ if base.__module__.startswith("graphir.")]
    names = {
        name: None
        for base in own
        for name, value in vars(base).items()
        if not name.startswith("_") and isinstance(value, FunctionType | property | cached_property | staticmethod)
    }
    return [
        name for name in names if not any(inspect.getdoc(vars(base).get(name)) for base in own if name in vars(base))
    ]


def private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in dotted.split("."))


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_those_listed(package):
    assert sorted(importlib.import_module(package).__all__) == sorted(PUBLIC[package].split())


def missing(source: Source) -> list[str]:
    """Names of ``__all__`` that the module does not have."""
    module = importlib.import_module(source.module)
    return [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]


# All modules are one test: a test for each would take longer than what it asks.


def test_every_public_name_is_there():
    assert {str(source): names for source in ALL if (names := missing(source))} == {}


def test_every_module_says_what_it_is_about():
    assert [str(source) for source in ALL if not ast.get_docstring(source.tree)] == []


def test_every_module_declares_its_public_names():
    assert [str(source) for source in ALL if not source.is_package and declared(source) is None] == []


def test_every_public_function_and_class_is_explained():
    assert [fault for source in ALL for fault in unexplained(source)] == []


@pytest.mark.parametrize("package", PUBLIC)
def test_every_method_that_users_call_is_explained(package):
    module = importlib.import_module(package)
    classes = [thing for name in PUBLIC[package].split() if isinstance(thing := getattr(module, name, None), type)]
    assert {owner.__name__: found for owner in classes if (found := unexplained_methods(owner))} == {}


def test_tests_import_public_names_only():
    names, modules = r"from graphir[\w.]* import (?:\([^)]*|[^\n(]*)", r"(?:from|import) graphir[\w.]*\."
    underscored = re.compile(rf"^\s*(?:{names}|{modules})\b_", re.M)
    suspects = [source for source in sources("tests") if underscored.search(source.text)]
    ours = [(str(s), i) for s in suspects for i in s.imports if i.module.partition(".")[0] == "graphir"]
    assert [f"{path}:{i.line}" for path, i in ours if private(f"{i.module}.{i.name}")] == []


@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (Program, "to_fx", "graphir.to_fx(program)"),
        (Program, "to_exported", "graphir.to_exported(program)"),
        (Plan, "python", "graphir.runtime.python(plan, lane)"),
    ],
)
def test_a_method_that_is_gone_names_the_function_to_call(owner, name, call):
    with pytest.raises(AttributeError, match=rf"^{owner.__name__}\.{name} is gone: call {re.escape(call)}$"):
        getattr(owner.__new__(owner), name)
    module, _, function = call.partition("(")[0].rpartition(".")
    assert function in PUBLIC[module].split()


NAMED_ALIKE = {"Crossing", "Link"}
"""Classes of the analyses of traffic and of schedules: a file imports one of them."""


def test_public_classes_of_graphir_have_names_of_their_own() -> None:
    found = [
        node.name
        for source in sources("graphir")
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in found if found.count(name) > 1} == NAMED_ALIKE
