"""The files of profiles: whole, merged, and refused where they are not what they say."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
from small import program_of

import graphir
from graphir.analysis import profile_files
from graphir.analysis.profile_files import add, cached, default_path
from graphir.analysis.profiles import Machine, Measured, Profile, machine
from graphir.errors import FileError, ProfileWarning

ONE = {"1 thread: aten.relu.default(f32[4])": Measured(0, 0, 1e-6)}
TWO = {"1 thread: aten.mse_loss.default(f32[4], f32[4])": Measured(32, 12, 2e-6, True, 3e-6)}


def here(calls: dict[str, Measured]) -> Profile:
    return Profile(machine(), calls)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "p.json"
    assert add(path, here(ONE)).calls == ONE
    assert add(path, here(TWO)).calls == ONE | TWO
    found = Profile.load(path)
    assert (found.machine, found.calls) == (machine(), ONE | TWO)
    assert str(found).startswith("profile of 2 calls on ") and machine().torch in str(found)


def test_what_was_measured_again_replaces_what_was_there(tmp_path: Path) -> None:
    (key,) = ONE
    add(tmp_path / "p", here(ONE))
    again = {key: Measured(8, 0, 3e-6)}
    assert add(tmp_path / "p", here(again)).calls == again


def damage(path: Path, **changes: object) -> None:
    """Change what the file has of its one call."""
    held = json.loads(path.read_text())
    (call,) = held["calls"].values()
    call.update(changes)
    path.write_text(json.dumps(held))


HOSTILE = {
    "negative bytes": {"scratch": -1},
    "absurd bytes": {"scratch": 1 << 60},
    "bytes that are text": {"scratch": "8"},
    "fractions of bytes": {"scratch": 1.5},
    "no number of seconds": {"seconds": "NaN"},
    "negative seconds": {"seconds": -1.0},
    "negative seconds beside another": {"beside": -1.0},
    "what nobody knows": {"code": "import os"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_and_stays(tmp_path: Path, case: str) -> None:
    path = tmp_path / "p.json"
    add(path, here(ONE))
    damage(path, **HOSTILE[case])
    before = path.read_bytes()
    with pytest.raises(FileError, match="the file is damaged: ") as e:
        add(path, here(TWO))
    assert e.value.fix == "remove it, and profile again"
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"format": "graphir.plan", "version": 1}', "the file holds a 'graphir.plan', not a profile"),
        ('{"format": "graphir.profile", "version": 2}', "version 2 of its format, this graphir reads version 1"),
        ('{"format": "graphir.profile", "version": 1}', "damaged"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(FileError, match=what) as e:
        Profile.load(path)
    assert e.value.fix


def test_what_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(tmp_path / "p", here(ONE))
    monkeypatch.setattr(profile_files, "MOST_BYTES", 100)
    with pytest.raises(FileError, match=r"the file has \d+ bytes; more than 100 are not read"):
        Profile.load(tmp_path / "p")
    with pytest.raises(FileError, match=r"the profile would have \d+ bytes"):
        add(tmp_path / "q", here(ONE))
    assert not (tmp_path / "q").exists()


def test_a_file_of_another_machine_is_refused(tmp_path: Path) -> None:
    elsewhere = Profile(Machine("abacus", "1.0", "0.1"), ONE)
    add(tmp_path / "p", elsewhere)
    with pytest.raises(FileError, match=r"another machine or version: abacus, torch 1\.0, graphir 0\.1; this is ") as e:
        add(tmp_path / "p", here(TWO))
    assert e.value.fix == "name another file, or remove this one"
    assert Profile.load(tmp_path / "p").calls == ONE, "which predicts for that machine"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="the file cannot be written") as e:
        add(tmp_path / "file" / "p", here(ONE))
    assert e.value.fix == "check the path, or name another"


@pytest.mark.parametrize("path", ["~/p.json", "~nosuchuser/deeper/p.json"])
def test_no_folder_is_made_that_is_called_like_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As ``torch.save``, which takes ``~`` for a folder's name, and makes none."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=r"there is no folder '~.*' here, and only a shell takes ~ for a home") as e:
        graphir.profile(PROGRAM, path=path)
    assert e.value.where == path and e.value.fix == "write the path out: Path(...).expanduser()"
    monkeypatch.setenv("GRAPHIR_PROFILE", path)
    with pytest.raises(FileError, match="there is no folder"):
        graphir.profile(PROGRAM)
    assert predicted() == 32 and not any(tmp_path.iterdir())
    Path(path).parent.mkdir(parents=True)
    assert graphir.profile(PROGRAM, path=path).calls and Path(path).is_file()


def adding(path: str, number: int) -> None:
    for i in range(10):
        add(Path(path), here({f"1 thread: {number}.{i}()": Measured(number, 0, 0.0)}))


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=adding, args=(str(tmp_path / "p"), number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(Profile.load(tmp_path / "p").calls) == 40
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "p.lock"], "nothing half written is left"


def test_a_file_that_another_process_holds_is_waited_for_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_files, "_PATIENCE", 0.05)
    with profile_files.alone(tmp_path / "p"), pytest.raises(FileError, match="another process has been writing"):
        add(tmp_path / "p", here(ONE))
    assert add(tmp_path / "p", here(ONE)).calls == ONE


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("GRAPHIR_PROFILE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path()
    assert path is not None and path.parent == tmp_path / "graphir" and path.name.startswith("profile-")
    monkeypatch.setattr(profile_files, "machine", lambda: Machine("abacus", "1.0", "0.1"))
    assert default_path() != path, "another machine has another file"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = default_path()
    assert found is not None and found.parent == tmp_path / "home" / ".cache" / "graphir"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user without a home
    assert default_path() is None and cached() is None
    monkeypatch.setenv("GRAPHIR_PROFILE", str(tmp_path / "mine.json"))
    assert default_path() == tmp_path / "mine.json"
    monkeypatch.setenv("GRAPHIR_PROFILE", "")
    assert default_path() is None and cached() is None


PROGRAM = program_of("input x : f32[4] @gpu:0\n a : f32[4] @gpu:0 = aten.relu(x)\n output a")
SAID = {"1 thread: aten.relu.default(f32[4])": Measured(4096, 0, 1e-6)}


def predicted() -> int:
    return graphir.memory(PROGRAM, threads=1).peak["gpu:0"]


def test_memory_uses_the_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    monkeypatch.setenv("GRAPHIR_PROFILE", str(path))
    assert predicted() == 32
    add(path, here(SAID))
    assert predicted() == 32 + 4096, "and sees that it has changed"
    assert graphir.memory(PROGRAM, threads=1, profile=None).peak["gpu:0"] == 32
    assert graphir.memory(PROGRAM, threads=2).peak["gpu:0"] == 32, "threads are part of the key"


@pytest.mark.parametrize("stale", [True, False])
def test_a_file_that_memory_cannot_use_is_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    path = tmp_path / "p.json"
    monkeypatch.setenv("GRAPHIR_PROFILE", str(path))
    if stale:
        add(path, Profile(Machine("abacus", "1.0", "0.1"), SAID))
    else:
        path.write_text("{")
    what = "another machine or version: abacus" if stale else "the file is damaged"
    with pytest.warns(ProfileWarning, match=what) as caught:
        assert predicted() == 32
    assert str(path) in str(caught[0].message) and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predicted() == 32, "it is said once"
