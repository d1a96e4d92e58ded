"""What one operator computes: how it becomes a call, and what is called.

:mod:`graphir.ir.calls` arranges an operator over its type's parameters, :mod:`.kernels.invoke` executes it. Torch's own
kernels are called by way of :mod:`.kernels.bindings`; graphir's are attention, the optimizers, sparse gradients,
batch norms over several replicas, and what moves and sums between devices.

Knows operators, not the order in which a plan has them: nothing here sees an instruction or a lane. Of the other
rooms it imports ``machine``, for kernels that compute in one thread.
"""
