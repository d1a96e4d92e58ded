"""How long shift and inject take on Caffe2's nets, against what real Caffe2 took for them."""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import nets
from limits import limited
from timing import seconds

from graphir import passes
from graphir.ir.device import Device, gpu
from graphir.ir.dialect import dialect_called
from graphir.ir.net import Net
from graphir.ir.operator import Operator
from graphir.ir.program import Program

sys.path.append(str(Path(__file__).resolve().parents[1] / "caffe2"))
import cases

__all__ = ["rows"]

RECORDED = 4
"""Devices of the largest recorded ResNet-50."""

CAFFE2 = {4: 0.703, 8: 1.631}
"""Seconds that ``ShiftActivationDevices`` took for ResNet-50 on so many devices: recorded, one run on a shared core."""

CAFFE2_INJECT = 3.883
"""Seconds that ``InjectCrossDeviceCopies`` took for 100,000 operators on 4 devices, a tenth of the reads remote."""

LIMITS = {8: 0.065}
SYNTHETIC, SYNTHETIC_LIMIT = 100_000, 0.4


def rows(runs: int = 41) -> Iterator[str]:
    """The table of seconds."""
    yield "| net | operators of init, step | copies | seconds | fastest run | at most | Caffe2 |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    found = [case for case in cases.cases("model") if case.name == "resnet50_4dev"]
    if not found:
        yield "| ResNet-50 | the recorded nets are not beside this checkout | | | | | |"
    for case in found:
        recorded = case.program()
        for devices, program in ((RECORDED, recorded), (2 * RECORDED, _doubled(recorded))):
            yield _shift_and_inject(program, devices, runs)
    yield _inject(runs)


def _shift_and_inject(program: Program, devices: int, runs: int) -> str:
    chosen = passes.find_activations(program)
    shift = passes.ShiftActivations(
        activations=tuple(chosen[len(chosen) // 2 :]), shifts={d: d + devices for d in range(devices)}
    )
    inject = passes.InjectCopies()
    placed = inject.recorded(shift.recorded(program))
    taken = [seconds(lambda: inject.recorded(shift.recorded(program))) for _ in range(runs)]
    before, after = _operators(program), _operators(placed)
    limit = LIMITS.get(devices)
    return (
        f"| ResNet-50, {devices} devices, half of the activations shifted | {before[0]:,}, {before[1]:,} "
        f"| {sum(after) - sum(before):,} | {statistics.median(taken):.3f} "
        f"| {limited(f'{min(taken):.3f}', at_most=limit)} | {limit or ''} | {CAFFE2[devices]} |"
    )


def _inject(runs: int) -> str:
    net = nets.synthetic_net(SYNTHETIC, devices=4, cross=0.1)
    net = net.with_(ops=tuple(op._replace(type="Add") for op in net.ops), dialect=dialect_called("caffe2"))
    program = Program("synthetic", Net("init", (), {}, dialect=dialect_called("caffe2")), net, replicas=("gpu_0/",))
    inject = passes.InjectCopies()
    placed = inject.recorded(program)
    taken = [seconds(lambda: inject.recorded(program)) for _ in range(runs)]
    fastest = limited(f"{min(taken):.3f}", at_most=SYNTHETIC_LIMIT)
    return (
        f"| synthetic, 4 devices, injection alone | 0, {SYNTHETIC:,} | {len(placed.step.ops) - SYNTHETIC:,} "
        f"| {statistics.median(taken):.3f} | {fastest} | {SYNTHETIC_LIMIT} | {CAFFE2_INJECT} |"
    )


def _operators(program: Program) -> tuple[int, int]:
    return len(program.init.ops), len(program.step.ops)


def _doubled(program: Program) -> Program:
    """The program with a second set of devices, which does the same: no net on more than four is recorded."""

    def name(blob: str) -> str:
        return re.sub(r"gpu(_?)(\d)", lambda found: f"gpu{found[1]}{int(found[2]) + RECORDED}", blob)

    def device(old: Device) -> Device:
        return gpu(old.index + RECORDED) if old.kind == "gpu" else old

    def operators(net: Net) -> Iterator[Operator]:
        yield from net.ops
        for op in net.ops:
            if all(name(output) != output for output in op.outputs):
                outputs = tuple(map(name, op.outputs))
                yield op._replace(inputs=tuple(map(name, op.inputs)), outputs=outputs, device=device(op.device))

    def doubled(net: Net) -> Net:
        twins = [
            b._replace(name=name(n), storage=name(n), device=device(b.device))
            for n, b in net.blobs.items()
            if name(n) != n
        ]
        return net.with_(
            ops=tuple(operators(net)),
            blobs={**net.blobs, **{blob.name: blob for blob in twins}},
            external_inputs=tuple(dict.fromkeys([*net.external_inputs, *map(name, net.external_inputs)])),
        )

    replicas = tuple(f"gpu_{d}/" for d in range(2 * RECORDED))
    return program.with_(init=doubled(program.init), step=doubled(program.step), replicas=replicas)
