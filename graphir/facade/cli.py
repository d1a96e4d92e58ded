"""The command line: ``graphir …``."""

from __future__ import annotations

import os
import sys
from enum import Enum
from io import TextIOWrapper
from json import dumps
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
import typer

from graphir.passes import balance as balance_of
from graphir.runtime import check as findings_of

from ..analysis.memory import memory
from ..analysis.topology import Topology
from ..analysis.traffic import traffic as traffic_of
from ..errors import GraphirError
from ..ir.device import DeviceName
from ..ir.files import load, load_stream, save, to_json
from ..ir.net import Net
from ..ir.plan import Plan
from ..ir.program import Program
from ..ir.text import show as text_of
from ..ir.verify import verify
from ..version import __version__
from .estimate import EXECUTORS
from .estimate import estimate as estimate_of
from .profile import profile as measure

__all__ = ["app", "main"]

_TOPOLOGY: Final = "h200x8, a100x8, cpu, or the file of a topology; by default this machine."

app = typer.Typer(
    name="graphir",
    help="A computational-graph IR and device-placement compiler for PyTorch training steps.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Demo(str, Enum):
    """What the demo shows."""

    DIGITS = "digits"
    DLRM = "dlrm"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphir {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """What every command shares."""


@app.command(short_help="Train a small residual net on real digits, checked bit for bit; or a sharded DLRM.")
def demo(
    what: Annotated[Demo, typer.Argument(help="digits, or dlrm: embedding tables spread over devices.")] = Demo.DIGITS,
    out: Annotated[Path, typer.Option(help="The folder for the plan, its text and the trained state.")] = Path(
        "graphir-demo"
    ),
    epochs: Annotated[
        int, typer.Option(min=1, help="How often to go through the 1,500 images; of dlrm, 5 steps each.")
    ] = 6,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the weights, the split and the order of the images.")
    ] = 0,
) -> None:
    """Train a small residual net on real digits: 2 replicas on 4 logical devices, checked bit for bit. Or a DLRM whose
    tables are spread over 4 devices, beside eager PyTorch on the whole batch; it writes nothing."""
    from ..demo.run import run_demo, run_dlrm

    held = run_dlrm(steps=5 * epochs, seed=seed) if what is Demo.DLRM else run_demo(out, epochs=epochs, seed=seed)
    if not held:
        raise typer.Exit(1)


@app.command()
def show(
    file: Annotated[str, typer.Argument(help="The file of a program, a net or a plan; - is standard input.")],
    source: Annotated[
        bool, typer.Option("--source", help="Say which line of code each operator came from, as a comment.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print indented JSON instead of graphir's text.")] = False,
) -> None:
    """Print what a file holds, with the bytes of each blob."""
    shown = _load(file)
    print(to_json(shown) if json else text_of(shown, source=source))


@app.command(short_help="Prove that a plan runs right, or print what can go wrong.")
def check(
    file: Annotated[str, typer.Argument(help="The file of a plan; - is standard input.")],
    json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Prove that a plan runs right however its lanes interleave, or print what can go wrong, and fail."""
    loaded = _load(file)
    if not isinstance(loaded, Plan):
        raise GraphirError(
            f"check takes a plan, not a {type(loaded).__name__.lower()}", where=file, fix="passes.emit makes a plan"
        )
    verify(loaded)
    findings = findings_of(loaded)
    if json:
        print(dumps([finding.to_json() for finding in findings], indent=2))
    else:
        print("\n".join(map(str, findings)) or f"plan {loaded.name!r} is sound")
    if findings:
        raise typer.Exit(1)


@app.command(short_help="Measure what the operators of a step take on this machine.")
def profile(
    file: Annotated[
        str | None, typer.Argument(help="The file of a program or a plan; - is standard input.", show_default=False)
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure the cards, the links and the host anew, without a FILE.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="How many threads one kernel uses; as many as torch does by default.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option(help="The file that keeps what is measured; this machine's by default.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where: cpu, cuda:1; by default cards where there are any, else the host.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print figures as JSON; of the machine, what --topology takes as a file.")
    ] = False,
) -> None:
    """Measure what the operators of a program or plan take on this machine, and predict its memory with that. Or
    measure the machine itself: what its file has of cards and links is written anew."""
    if machine is (file is not None):
        raise GraphirError(
            "profile takes a file or --machine, not both" if machine else "profile has nothing to measure",
            fix="graphir profile plan.json measures its operators, graphir profile --machine the cards and links",
        )
    if file is None:
        if path is not None:
            raise GraphirError(
                "--path is the file of a profile of operators", fix="GRAPHIR_MACHINE names the file of the machine"
            )
        if device is not None:
            raise GraphirError(
                "--device is where a profile of operators is measured; --machine measures all devices",
                fix="leave --device out; CUDA_VISIBLE_DEVICES chooses cards",
            )
        place = Topology.here(threads=threads or torch.get_num_threads(), refresh=True)
        print(place.to_json() if json else place)
        return
    loaded = _load(file)
    if isinstance(loaded, Net):
        raise GraphirError("profile takes a program or a plan, not a net", where=file, fix="save the program")
    found = measure(loaded, threads=threads, path=path, device=device)
    predicted = memory(loaded, threads=threads, profile=found)
    if json:
        failed, sources = dict(found.failed), predicted.sources()
        print(
            dumps({"calls": len(found.calls), "failed": failed, "sources": sources, "peak": predicted.peak}, indent=2)
        )
    else:
        print(found, predicted, sep="\n")


@app.command(short_help="Predict how long a step takes, and what it goes into.")
def estimate(
    file: Annotated[str, typer.Argument(help="The file of a plan; - is standard input.")],
    topology: Annotated[
        str | None,
        typer.Option(help=_TOPOLOGY),
    ] = None,
    executor: Annotated[str, typer.Option(help=f"One of {', '.join(EXECUTORS)}.")] = "auto",
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help="The steps are replayed as CUDA graphs.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, help="How many threads one kernel uses; as many as torch does by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print every figure and the critical path as JSON.")] = False,
) -> None:
    """Predict the seconds of a step, of its lanes and links, and its critical path, without running it."""
    loaded = _load(file)
    if not isinstance(loaded, Plan):
        raise GraphirError(
            f"estimate takes a plan, not a {type(loaded).__name__.lower()}", where=file, fix="passes.emit makes a plan"
        )
    place = _topology(topology)
    found = estimate_of(loaded, place, executor=executor, cuda_graph=cuda_graph, threads=threads)
    print(found.to_json() if json else found)


@app.command(short_help="Place a program so that devices keep within limits, and a step takes least.")
def balance(
    file: Annotated[str, typer.Argument(help="The file of a program without copies; - is standard input.")],
    limit: Annotated[
        list[str],
        typer.Option(
            help="The most that a device may hold, as gpu:0=3.3GiB; once for each device. Or auto: what is free."
        ),
    ],
    topology: Annotated[str | None, typer.Option(help=_TOPOLOGY)] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long to search.")] = 2.0,
    evaluations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many placements to look at instead, at most: equal runs for equal figures (of a host, by"
            " --topology), and no longer steps for larger numbers.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to save the placed program.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all figures and groups as JSON.")] = False,
) -> None:
    """Choose what to move, park and recompute; print what it comes to, and the passes that make it."""
    loaded = _load(file)
    if not isinstance(loaded, Program):
        raise GraphirError(f"balance takes a program, not a {type(loaded).__name__.lower()}", where=file)
    found = balance_of(loaded, _limits(limit), topology=_topology(topology), seconds=seconds, evaluations=evaluations)
    if output is not None:
        save(found.program, output)
    print(found.to_json() if json else found)


def _limits(limit: list[str]) -> dict[DeviceName, int | str] | Literal["auto"]:
    """Limits as the command line has them."""
    if limit == ["auto"]:
        return "auto"
    limits: dict[DeviceName, int | str] = {}
    for given in limit:
        device, equals, nbytes = given.partition("=")
        if not equals:
            raise GraphirError(
                f"--limit {given!r} names no bytes", fix="write --limit gpu:0=3.3GiB, or --limit auto alone"
            )
        if device in limits:
            raise GraphirError(f"--limit names {device} twice", fix="give each device one limit")
        limits[device] = int(nbytes) if nbytes.isdecimal() else nbytes
    return limits


def _topology(given: str | None) -> Topology | None:
    """The topology of a file, or of a name where there is no such file; None: this machine."""
    if given is None:
        return None
    return Topology.load(given) if Path(given).suffix or Path(given).exists() else Topology.named(given)


@app.command(short_help="Print what a step copies between devices, and why.")
def traffic(
    file: Annotated[
        str, typer.Argument(help="The file of a program with its copies, a net or a plan; - is standard input.")
    ],
    json: Annotated[
        bool, typer.Option("--json", help="Print every copy, the totals and the warnings as JSON.")
    ] = False,
) -> None:
    """Print what a step copies between devices, which move made it necessary, and what crosses for nothing."""
    found = traffic_of(_load(file))
    print(found.to_json() if json else found)


def _load(file: str) -> Net | Program | Plan:
    if file != "-":
        return load(file)
    if sys.stdin is None:
        raise GraphirError("standard input is closed", fix="give the path of a file, or redirect one: < plan.json")
    return load_stream(sys.stdin.buffer, "standard input")


def main() -> None:
    """Run the command line; an error that graphir or the file system raises is printed, not traced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for what it lacks
    try:
        app()
    except BrokenPipeError:  # whoever read it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (GraphirError, OSError) as e:
        text = ": ".join(map(str, filter(None, (e.strerror, e.filename)))) if isinstance(e, OSError) else ""
        print(f"graphir: {text or e}", file=sys.stderr)
        sys.exit(1)
