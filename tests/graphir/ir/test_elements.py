"""Types that are listed as reading only the elements of their operands do, as far as torch's samples show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gapped import Gaps, observe

from graphir.ir.optypes.table import operator_type

SAMPLES = """
from gapped import Gaps, observe, torch_samples
from graphir.ir.optypes.table import operator_type

gaps = Gaps(most=1)
observe(torch_samples(every=61, most=1), gaps)
listed = lambda type: operator_type(type).only_elements
print(sum(map(listed, gaps.free)), sum(gaps.failed.values()), *filter(listed, gaps.reaching))
"""


def test_what_is_listed_reads_no_gaps() -> None:
    """A part of torch's operators, in a process of its own: torch's samples import what other tests may have replaced.
    ``python tests/bench elements`` runs all of them."""
    tests = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(tests.parent), str(tests)])
    ran = subprocess.run(
        [sys.executable, "-c", SAMPLES],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    count, failed, *wrong = ran.stdout.splitlines()[-1].split()
    assert int(count) > 20 > int(failed)
    assert not wrong


def test_what_reads_gaps_is_seen_to() -> None:
    gaps = Gaps()
    x, weight = torch.randn(3, 4, 8), torch.randn(8)
    out, mean, deviation = torch.native_layer_norm(x, (8,), weight, weight, 1e-5)
    calls = (
        lambda: torch.as_strided_copy(x, (5,), (3,), 1),
        lambda: x.slice_scatter(torch.zeros(3, 4, 2), 2, 0, 2),
        lambda: torch.ops.aten.native_layer_norm_backward(
            out, x, [8], mean, deviation, weight, weight, [True, True, True]
        ),
        lambda: x.relu(),
    )
    observe(calls, gaps)
    assert not gaps.failed
    reaching = {type.split(".")[1] for type in gaps.reaching}
    assert reaching >= {"as_strided_copy", "slice_scatter", "native_layer_norm_backward"}
    assert not any(operator_type(type).only_elements for type in gaps.reaching)
    assert gaps.free["aten.relu.default"] == 1


def test_a_call_that_fails_is_counted() -> None:
    gaps = Gaps()
    observe([lambda: torch.ones(2) @ torch.ones(3)], gaps)
    assert gaps.failed == {"RuntimeError": 1}


@pytest.mark.parametrize(
    ("type", "listed"),
    [
        ("aten.relu_.default", True),
        ("aten.add.Tensor", True),
        ("graphir.sgd", True),
        ("Copy", True),
        ("FC", True),
        ("aten.as_strided.default", False),
        ("aten._reshape_alias.default", False),
        ("aten.native_group_norm_backward.default", False),
        ("graphir.attention", False),
        ("mine.operator.default", False),
        ("prims.convert_element_type.default", False),
    ],
)
def test_types(type: str, listed: bool) -> None:
    assert operator_type(type).only_elements is listed
