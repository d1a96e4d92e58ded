"""graphir demo dlrm: tables spread over devices, as a user runs it."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from graphir.facade.cli import app


@pytest.fixture(scope="module")
def printed() -> str:
    done = CliRunner().invoke(app, ["demo", "dlrm", "--epochs", "1"])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_shows_where_tables_go_and_what_crosses(printed: str) -> None:
    assert "placed modules of 'dlrm': 26 on 4 devices, the fullest has 1.00 of the mean" in printed
    assert re.search(r"together +156 +2\.4 MiB +1\.2 MiB +1\.2 MiB", printed)
    assert all(len(line) <= 100 for line in printed.splitlines())


def test_it_trains_as_on_one_device(printed: str) -> None:
    losses = re.findall(r"loss (\d\.\d+), of eager PyTorch (\d\.\d+)", printed)
    assert losses and all(ours == theirs for ours, theirs in losses)
    assert "every check held" in printed


def test_an_unknown_demo() -> None:
    done = CliRunner().invoke(app, ["demo", "vision"])
    assert done.exit_code == 2
    assert "'vision' is not one of 'digits', 'dlrm'" in done.output
