"""What runs a plan on CUDA streams: the executor, the code that it generates, steps as CUDA graphs.

Only :mod:`.cuda.streams` calls torch's streams, events and graphs; tests put a machine in its place that notes the
calls.

Builds on ``codegen`` and on ``executors.generated``, and imports of the other rooms what ``executors`` does.
"""
