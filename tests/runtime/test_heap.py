"""The memory of a step stays in the process between steps."""

import os
import subprocess
import sys

import pytest
from graphir.runtime.heap import keep_heap

STEPS = """
import resource
import torch
from graphir.runtime.heap import keep_heap

held = keep_heap(100 * 2**20)

def step():
    made = torch.ones(2**18)
    kept = []
    for _ in range(24):
        kept.append(made * 2)
        made = kept[-1] + 1
    while kept:
        made = made + kept.pop()

for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(keep_heap(0) is None, reason="the C library is not glibc")
def test_page_faults_stop():
    environment = [name for name in os.environ if name.startswith("MALLOC_") or name == "GLIBC_TUNABLES"]
    if environment:
        pytest.skip(f"{', '.join(environment)} set how the heap shrinks")
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=True)
    # A step makes 49 MiB. Ten steps have tens of thousands of faults without the kept memory, unless chance pins it.
    assert int(done.stdout) < 1000
