"""What the system says of a core's caches."""

import pytest
from graphir.runtime.machine import caches as machine_caches
from graphir.runtime.machine.caches import Caches, caches


@pytest.fixture
def listed(tmp_path, monkeypatch):
    def write(*indices):
        for number, found in enumerate(indices):
            folder = tmp_path / f"index{number}"
            folder.mkdir()
            for name, text in zip(("type", "size", "shared_cpu_list"), found, strict=True):
                (folder / name).write_text(text + "\n")
        monkeypatch.setattr(machine_caches, "_FOLDER", tmp_path)
        return caches.__wrapped__()

    return write


def test_a_core_has_its_own_caches_and_a_share_of_the_last(listed):
    found = listed(
        ("Data", "32K", "0"), ("Instruction", "64K", "0"), ("Unified", "1024K", "0"), ("Unified", "32768K", "0-2,8")
    )
    assert found == Caches(own=1 << 20, shared=1 << 23)


def test_threads_of_a_core_share_what_it_has(listed):
    assert listed(("Unified", "2048K", "0-1")) == Caches(own=1 << 20, shared=1 << 20)


def test_a_system_that_says_nothing_has_usual_ones(listed):
    assert listed() == Caches(1 << 20, 1 << 23)
    assert listed(("Unified", "much", "0")) == Caches()
