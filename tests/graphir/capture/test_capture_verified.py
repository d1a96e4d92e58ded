"""What capture returns, it has verified."""

from __future__ import annotations

import sys
from typing import Any

import models
import pytest

from graphir.capture import capture
from graphir.errors import VerifyError
from graphir.ir.program import Program


def test_a_broken_program_is_reported_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[capture.__module__]
    build = vars(module)["build_program"]

    def reversed_step(*args: Any, **kwargs: Any) -> Program:
        program: Program = build(*args, **kwargs)
        return program.with_(step=program.step.with_(ops=program.step.ops[::-1]))

    monkeypatch.setattr(module, "build_program", reversed_step)
    example = models.mlp()
    with pytest.raises(VerifyError, match="before"):
        capture(example.model, example.inputs, targets=example.targets, loss=example.loss)
