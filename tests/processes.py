"""Processes of their own, for what a test's process cannot stand: signals, exits, threads that nobody ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["output_of", "started"]

_TESTS = Path(__file__).parent
_PREPARED = f"""
import atexit, gc, os, random, signal, sys, threading, time
sys.path[:0] = {[str(_TESTS.parent), str(_TESTS)]}
import torch
from graphir.runtime import Session, session
from graphir.runtime.codegen import statements
from graphir.runtime.executors import threads
from graphir.runtime.kernels.buffers import Buffer
from runnable import forward_plan, threads_of_sessions

STATE = {{"s": torch.zeros(2)}}
PLAN = forward_plan('''
    buffer s : f32[2] @gpu:0
    input x : f32[2] @gpu:1
    y : f32[2] @gpu:0 = Copy(x)
    s;1 = aten.add_.Tensor(s, y) {{writes=[0:0]}}
''', "x", output="y", state=STATE)
X, MAIN = torch.ones(2), threading.main_thread().ident

def session_of(**options):
    return Session(PLAN, STATE, **{{"executor": "threads", **options}})

def copy_by(copy):
    statements.copy = copy
    Buffer.receive = lambda buffer, source: copy(source, source.device)
"""


def started(code: str) -> subprocess.Popen[str]:
    """A Python process that runs *code*. There, ``session_of(**options)`` is a session whose steps on ``X`` copy it
    from one device to another, ``copy_by(function)`` has *function* copy, and ``MAIN`` is the main thread's number."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", _PREPARED + code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def output_of(code: str) -> list[str]:
    """The lines that such a process prints, which says nothing of errors and ends well."""
    with started(code) as process:
        output, errors = process.communicate(timeout=120)
    assert (errors, process.returncode) == ("", 0)
    return output.splitlines()
