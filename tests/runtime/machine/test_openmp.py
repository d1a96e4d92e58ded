"""The number of threads that kernels use is the calling thread's, and nobody else's."""

import sys
import threading

import pytest
import torch
from graphir.runtime.machine import openmp
from graphir.runtime.machine.openmp import in_threads, set_threads


def in_a_new_thread(run):
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(20)
    return found[0]


needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not torch.backends.openmp.is_available(),
    reason="torch's OpenMP is found through the process on Linux only",
)


@needs_openmp
def test_both_libraries_are_within_reach():
    assert openmp.openmp_setter() is not None
    assert openmp._mkl_setter() is not None


def test_it_holds_within_and_ends_with_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), in_threads(before + 2):
        assert torch.get_num_threads() == before + 2
        raise KeyError
    assert torch.get_num_threads() == before


@needs_openmp
def test_threads_to_come_have_the_programs_number():
    """``torch.set_num_threads`` would give them this one, for good."""
    usual = in_a_new_thread(torch.get_num_threads)
    with in_threads(torch.get_num_threads() + 3):
        assert in_a_new_thread(torch.get_num_threads) == usual
    assert in_a_new_thread(torch.get_num_threads) == usual


@needs_openmp
def test_a_new_thread_keeps_what_it_is_given():
    def run():
        set_threads(3)
        return torch.get_num_threads(), torch.ones(2).sum().item(), torch.get_num_threads()

    assert in_a_new_thread(run) == (3, 2.0, 3)


@needs_openmp
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL")
def test_mkl_is_told_too():
    most = openmp._torch_cpu().MKL_Get_Max_Threads
    for threads in (1, 2, torch.get_num_threads() + 3, 1):
        with in_threads(threads):
            assert most() == torch.get_num_threads() == threads


@pytest.mark.parametrize("library", ["openmp_setter", "_mkl_setter"])
def test_where_a_library_is_out_of_reach_torch_sets_it(library, monkeypatch):
    asked = []
    monkeypatch.setattr(openmp, library, lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    before = torch.get_num_threads()
    with in_threads(before + 1):
        pass
    assert asked == [before + 1, before]
