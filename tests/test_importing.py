"""What ``import graphir`` leaves in the process: modules, and nothing else; and what the first capture adds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SCRIPT = """
import builtins, gc, os, random, signal, sys, threading

hooks = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork = lambda **functions: hooks.append(functions)
import torch
import torch._dynamo, torch._subclasses, torch.testing, torch.utils.checkpoint
import torch.fx.experimental.proxy_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module

torch.manual_seed(0)
random.seed(0)


def dumped():
    operators = [f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in torch._C._jit_get_all_schemas()]
    tables = [torch._C._dispatch_dump(name) for name in sorted({*operators}) if name.startswith("aten::")]
    return [*sorted(operators), *tables]


def state():
    owners = [builtins, torch, torch.random, torch.linalg, torch._subclasses, random, os]
    kinds = [torch.Tensor, torch.nn.Parameter, torch.nn.Module, FakeTensor]
    submodules = set(sys.modules)
    tables = [table for name, table in vars(module).items() if name.startswith("_global") and hasattr(table, "items")]
    return {
        "attributes": [
            {key: id(value) for key, value in vars(owner).items() if f"torch.{key}" not in submodules}
            for owner in (*owners, *kinds)
        ],
        "hooks of modules": [len(table) for table in tables],
        "fork hooks": len(hooks),
        "threads": threading.enumerate(),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "settings": (torch.get_num_threads(), torch.get_default_dtype(), gc.isenabled(), sys.getswitchinterval()),
        "signals": signal.getsignal(signal.SIGINT),
        "library": len(torch.library._impls),
        "dispatcher": dumped(),
    }


before, imported = state(), set(sys.modules)
import graphir
import graphir.passes, graphir.runtime, graphir.facade.cli, graphir.passes.choice.bound

assert callable(graphir.caffe2.load_net)
assert not {"scipy", "google.protobuf"} & (set(sys.modules) - imported), "imported by the first use only"

after = state()
for name, value in before.items():
    new = after[name]
    assert new == value, (name, [x for x in zip(value, new) if x[0] != x[1]][:3] if isinstance(value, list) else new)
print("imported")

model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
before["random"] = state()["random"]
graphir.capture(model, (torch.ones(2, 3),), loss=lambda out: torch.linalg.svdvals(out).sum() + out.mean())
torch.get_rng_state()
final = state()
for name in set(before) - {"fork hooks"}:
    assert final[name] == before[name], name
assert len(hooks) > before["fork hooks"]
print("captured")
"""


def test_an_import_changes_nothing_in_the_process_and_a_capture_installs_a_fork_hook_alone() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr, done.returncode) == (["imported", "captured"], "", 0)
