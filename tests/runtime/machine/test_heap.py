"""The memory of a step stays in the process between steps."""

import ctypes
import subprocess
import sys

import pytest
from graphir.runtime.machine.heap import keep_heap

FREE = """
import ctypes
from graphir.runtime.machine.heap import keep_heap

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
held = keep_heap(200 * 2**20)
print(mallinfo2().fordblks // 2**20)
"""


@pytest.mark.skipif(
    keep_heap(0) is None or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="the C library is not glibc 2.33 or newer",
)
def test_free_memory_stays_in_the_heap():
    done = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True)
    # Without what holds it the heap shrinks to a MiB, unless chance leaves something else on top.
    assert int(done.stdout) >= 190
