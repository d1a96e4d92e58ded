"""Straight-line Python for the threads of a plan: what writes the code that executors run.

Each thread's instructions become one function, a line an instruction, so that the line of a traceback is the
instruction that failed::

    def run(n, i0, i1, c0, c1, k0, s0, s1):
        v0 = c0(s1, i0, s0)          # run fc1 = aten.addmm(fc1.bias, x, fc1.weight.t)
        v1 = c1(v0)                  # run relu = aten.relu(fc1)
        del v0                       # free fc1
        return (v1,)

``n`` is the number of steps done, ``i`` are inputs, ``v`` values. What does not change from step to step (state ``s``,
callables ``c``, constants ``k``, generators ``g``) is bound as the function's defaults, which makes it local and lets
one code object serve any size: only the constants that depend on dimensions are computed again. Views of state whose
geometry depends on no dimension stay the same too; they are taken once, and bound like state. Values that another
thread reads are also kept in the list ``x``. Optimizer updates alike that follow each other share a line.

Where a step is observed, the functions are generated once more, with the methods of a probe as further arguments, which
each line calls before and after what it does (:mod:`.observing.probes`).

Nothing of a plan's text is in the code: names are numbered, and of its arguments only numbers, booleans and None are
written as literals.

The executors bind this code and run it. Of the other rooms it imports ``kernels``, and ``proof``, by which
:mod:`.codegen.listing` refuses what no executor would run.
"""
