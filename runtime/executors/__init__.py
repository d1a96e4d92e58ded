"""What runs a plan on the host, one executor a file, and the choice among them.

:mod:`.executors.reference` is the oracle, and interprets; :mod:`.executors.adversarial` does so in bad interleavings.
:mod:`.executors.serial` and :mod:`.executors.threads` run generated code.

Each is an :class:`.executor.Executor`: no executor asks another one, nor the session. Of the other rooms they import
``kernels``, ``codegen``, ``failures``, ``observing`` and ``machine``.
"""
