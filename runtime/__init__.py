"""How a plan is executed: sessions, and what they are made of.

A :class:`Session` takes a plan and the state that it starts from, splits each batch over the replicas, and lets an
executor run the step. Beside it stand its :mod:`.options`, what it keeps from step to step (:mod:`.state`,
:mod:`.param_groups`), its way over a loader (:mod:`.loop`), and what it and every executor agree on
(:mod:`.executor`). A :class:`Function` is a plan without all that: it runs on tensors that it is handed. The rest has
rooms:

============= =========================================================================================
``proof``     what must hold of a plan before it runs: :func:`check`
``interface`` a step's arguments and results, split over the replicas and gathered from them
``executors`` what runs a plan on the host: the reference, one thread, one a device
``cuda``      what runs it on CUDA streams, and as CUDA graphs
``codegen``   the Python that executors run, and its listing
``kernels``   what one operator computes
``observing`` probes, measurement, report, trace, the watch for NaN
``failures``  what is said when a step fails, and the watch over its threads
``machine``   real devices, settings of threads and process, the heap, the speed of the host
============= =========================================================================================

``tests/test_imports.py`` says which room may import which.
"""

from .codegen.listing import python
from .function import Function
from .observing.report import Report
from .proof.check import check
from .proof.findings import Finding
from .session import Session

__all__ = ["Finding", "Function", "Report", "Session", "check", "python"]
