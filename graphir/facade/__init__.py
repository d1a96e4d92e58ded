"""Functions that stand on passes and runtime, such as ``compile`` and ``estimate``, and the command line."""
