"""What real Caffe2 did: the recorded cases in this folder's ``data``, and the larger set beside the repository.

Both have one layout (``data/DATA.md``). The larger set is ``shared/caffe2`` in the folder that holds the checkout;
where it is absent, the tests over it are skipped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from graphir import Program, caffe2

OWN = Path(__file__).resolve().parent / "data"
SHARED = OWN.parents[3] / "shared" / "caffe2"

FOLDERS = {
    "model": "models",
    "shift": "cases/shift",
    "inject": "cases/inject",
    "dlrm": "cases/dlrm",
    "memonger": "cases/memonger",
    "numeric": "cases/numeric",
}
"""The folder of each kind of cases."""

DTYPES = {1: "f32", 2: "i32", 3: "u8", 5: "bool", 6: "u8", 7: "i8", 9: "i16", 10: "i64", 12: "f16", 13: "f64"}
"""Element types by their number in Caffe2's ``TensorProto.DataType``; strings and the like have none."""


class Case(NamedTuple):
    """One recorded case.

    Attributes:
        root: the folder of all cases.
        kind: a key of :data:`FOLDERS`.
        name: of its own folder.
    """

    root: Path
    kind: str
    name: str

    @property
    def folder(self) -> Path:
        return self.root / FOLDERS[self.kind] / self.name

    @property
    def record(self) -> dict[str, Any]:
        """What was recorded: ``case.json``, or a model's ``model.json``."""
        return read_json(self.folder / ("model" if self.kind == "model" else "case"))

    def net(self, stem: str) -> Path:
        """The binary file of a net of this case; a *stem* with a slash is a path from the root (``models/…/net``)."""
        found = find_net(self.root / stem if "/" in stem else self.folder / stem)
        assert found is not None, f"{self} has no net {stem}"
        return found

    def has(self, stem: str) -> bool:
        return find_net(self.folder / stem) is not None

    @property
    def refused(self) -> bool:
        """Whether Caffe2 and graphir refuse this shift, for a device that is both a source and a target."""
        return (self.record["expected"]["exception"] or {}).get("type") == "AssertionError"

    @property
    def shapes(self) -> dict[str, tuple[list[int], str]]:
        """The shapes of a memonger case, as ``load_program`` takes them."""
        recorded = read_json(self.folder / "shapes")
        types = recorded["types"]
        return {n: (shape, DTYPES[types[n]]) for n, shape in recorded["shapes"].items() if types.get(n) in DTYPES}

    def program(self, step: str | None = None, **options: Any) -> Program:
        """The step of a case with its ``param_init_net``, replicas and parameters, where it has them.

        Args:
            step: the stem of the step; by default ``net``, ``train``, ``forward`` or ``before``, which is there first.
            options: of ``load_program``, instead of those recorded.
        """
        if self.kind == "shift":
            model = Case(self.root, "model", self.record["before"]["net"].split("/")[1])
            return model.program(step, **options)
        record = self.record
        step = step or next(stem for stem in ("net", "train", "forward", "before") if self.has(stem))
        for option in ("devices", "device_prefix", "params"):
            if option in record:
                options.setdefault(option, record[option])
        init = self.net("param_init_net") if self.has("param_init_net") else None
        return caffe2.load_program(self.net(step), init, **options)


def read_json(path: Path) -> Any:
    """``<path>.json`` or ``<path>.json.gz``."""
    plain = path.with_name(path.name + ".json")
    if plain.is_file():
        return json.loads(plain.read_bytes())
    return json.loads(gzip.decompress(path.with_name(path.name + ".json.gz").read_bytes()))


def find_net(stem: Path) -> Path | None:
    """The binary file of a net."""
    files = (stem.with_name(stem.name + suffix) for suffix in (".pb", ".pb.gz"))
    return next((path for path in files if path.is_file()), None)


def cases(kind: str) -> list[Case]:
    """The cases of a kind by name, each once: the repository's own, then those that are only in the larger set."""
    found: dict[str, Case] = {}
    for root in (OWN, SHARED):
        folder = root / FOLDERS[kind]
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_dir():
                found.setdefault(path.name, Case(root, kind, path.name))
    return list(found.values())


def params(*kinds: str, where: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Pytest parameters for the cases of these kinds, with one that is skipped where the larger set is absent."""
    found = [case for kind in kinds for case in cases(kind) if where(case)]
    return [pytest.param(case, id=f"{case.kind}-{case.name}") for case in found] + _absent()


def folders() -> list[Any]:
    """Pytest parameters for every folder that holds nets, each once, with one that is skipped as in :func:`params`."""
    found: dict[str, Path] = {}
    for root in (OWN, SHARED):
        for path in sorted(root.rglob("*.pb*")):
            found.setdefault(path.parent.relative_to(root).as_posix(), path.parent)
    return [pytest.param(path, id=name) for name, path in found.items()] + _absent()


def nets(folder: Path) -> list[Path]:
    """Every file of a net in a folder."""
    found = sorted(folder.glob("*.pb*"))
    assert found
    return found


def _absent() -> list[Any]:
    if SHARED.is_dir():
        return []
    skip = pytest.mark.skip(reason=f"the larger set of recorded cases is not there: {SHARED}")
    return [pytest.param(None, id="shared", marks=skip)]
