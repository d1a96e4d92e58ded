"""Proofs of what our own passes make of the zoo, and how long they take."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from minimum_cut import cuts
from mutations.subjects import zoo_names, zoo_program

import graphir
from graphir import passes
from graphir.errors import GraphirError
from graphir.ir.program import Program

__all__ = ["pass_rows", "results"]

CUTS = (0.25, 0.5, 0.75)


def results(program: Program) -> Iterator[tuple[str, Program, Program]]:
    """What our passes make of a program that has to compute the same: their name, and before and after."""
    activations = passes.find_activations(program)
    for cut in CUTS:
        moved = activations[int(len(activations) * cut) :]
        if moved:
            shifted = passes.shift_activations(program, moved, shifts={0: 1})
            yield f"shift at {cut}", program, shifted
            copied = passes.inject_copies(shifted)
            yield f"shift at {cut}, copies", program, copied
            yield f"shift at {cut}, copies, storage", program, passes.share_storage(copied)
    for modules in cuts(program, CUTS):
        moved_modules = passes.shift_modules(program, dict.fromkeys(modules, 1))
        yield "modules moved, copies", program, passes.inject_copies(moved_modules)
    yield "storage", program, passes.share_storage(program)
    yield "printed and parsed", program, graphir.parse(str(program))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.json"
        program.save(path, state=True)
        loaded = graphir.load(path)
        assert isinstance(loaded, Program)
        yield "saved and loaded", program, loaded
    if "batch" in program.dims or not program.covers.fixed:
        replicated = passes.replicate(program, [0, 1])
        chosen = passes.find_activations(replicated)
        pipeline = passes.Pipeline([
            passes.ShiftActivations(activations=tuple(chosen[len(chosen) // 2 :]), shifts={0: 2, 1: 3}),
            passes.InjectCopies(),
            passes.ShareStorage(),
        ])  # fmt: skip
        yield "pipeline on replicas", replicated, pipeline.run(replicated).program


def pass_rows() -> Iterator[str]:
    """The table: proofs of each sort of result over the zoo, those that are refused, and seconds of this process."""
    taken: dict[str, list[float]] = {}
    refused: dict[str, list[str]] = {}
    names = zoo_names()
    for name in names:
        try:
            program = zoo_program(name)
        except GraphirError as e:
            yield f"{name} is not captured: {e.what}"
            continue
        for what, before, after in results(program):
            start = time.process_time()
            try:
                graphir.certify(before, after)
            except GraphirError as e:
                refused.setdefault(what, []).append(f"{name}: {e.what}")
            taken.setdefault(what, []).append(time.process_time() - start)
    yield f"{len(names)} programs"
    yield ""
    yield "| result | proofs | refused | median seconds | longest |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for what, times in taken.items():
        yield f"| {what} | {len(times)} | {len(refused.get(what, ()))} | {median(times):.3f} | {max(times):.3f} |"
    for what, why in refused.items():
        for line in why[:5]:
            yield f"\n{what} of {line}"
