"""What an installation holds, and that ``passes`` and ``runtime`` are found in each of the three ways to have graphir.

Each way has a copy of the checkout and a fresh environment, in which the dependencies of the running one are visible
through a ``.pth`` file; so nothing is downloaded, and nothing is written to the checkout.
"""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pip")

ROOT = Path(__file__).parent.parent
FOLDERS = {"graphir": "graphir", "passes": "graphir/passes", "runtime": "graphir/runtime"}
"""Where each folder of the repository is in an installation."""

IMPORT_ALL = """
import sys, graphir, graphir.passes, graphir.runtime, graphir.demo.digits
print(graphir.__file__, *sorted(name for name in sys.modules if name in ("passes", "runtime")))
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout") / "graphir-source"
    leave = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


def fresh(folder: Path) -> Path:
    """The interpreter of a fresh environment without graphir."""
    venv.EnvBuilder(with_pip=False, symlinks=os.name != "nt").create(folder / "environment")
    python = folder / "environment" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    # A folder that a .pth file adds comes after the environment's own, and its own .pth files are not read: an
    # editable graphir of the running environment stays out of sight.
    (site_packages(python) / "dependencies.pth").write_text(
        "\n".join(p for p in sys.path if p.endswith(("site-packages", "dist-packages")))
    )
    return python


def site_packages(python: Path) -> Path:
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=python.parent).strip())


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    target = checkout.parent / "wheels"
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", target, checkout, cwd=checkout.parent)
    (path,) = target.glob("graphir-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel."""
    python = fresh(tmp_path_factory.mktemp("installed"))
    pip("--python", python, "install", "--no-deps", "--no-index", wheel, cwd=wheel.parent)
    return python


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the checkout itself."""
    python = fresh(tmp_path_factory.mktemp("editable"))
    options = ("--no-deps", "--no-index", "--no-build-isolation")
    pip("--python", python, "install", *options, "--editable", checkout, cwd=checkout.parent)
    return python


def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_module_of_the_three_folders(wheel):
    modules = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert modules <= wheel_names(wheel)


@pytest.mark.parametrize("name", ["py.typed", "demo/digits.npz", "demo/DIGITS.md"])
def test_the_wheel_has_files_that_are_not_modules(wheel, name):
    assert f"graphir/{name}" in wheel_names(wheel)


def test_the_wheel_takes_no_top_level_name_but_graphir(wheel):
    names = {name.partition("/")[0] for name in wheel_names(wheel)}
    assert {name for name in names if not name.endswith(".dist-info")} == {"graphir"}


def test_the_wheel_carries_the_licence(wheel):
    assert any(name.endswith("licenses/LICENSE") for name in wheel_names(wheel))


def test_an_installed_wheel_imports_whole(installed, tmp_path):
    assert Path(run(installed, "-c", IMPORT_ALL, cwd=tmp_path).strip()) == (
        site_packages(installed) / "graphir/__init__.py"
    )


def test_an_installed_wheel_has_the_command(installed, tmp_path):
    assert "demo" in run(installed.parent / "graphir", "--help", cwd=tmp_path)


def test_an_editable_install_imports_the_checkout_and_adds_no_module_called_passes_or_runtime(
    checkout, editable, tmp_path
):
    find = "; from importlib.util import find_spec; print(find_spec('passes'), find_spec('runtime'))"
    imported, found = run(editable, "-c", IMPORT_ALL.strip() + find, cwd=tmp_path).splitlines()
    assert Path(imported) == checkout / "graphir/__init__.py"
    assert found.split() == ["None", "None"]


def test_a_bare_checkout_imports_from_its_root(checkout, tmp_path):
    assert Path(run(fresh(tmp_path), "-c", IMPORT_ALL, cwd=checkout).strip()) == checkout / "graphir/__init__.py"
