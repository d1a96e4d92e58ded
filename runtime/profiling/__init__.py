"""What single operators take on the host or on a card: each called by itself, on made-up operands.

Knows operators, not plans. :mod:`.profiling.operands` makes what a call is given, :mod:`.profiling.allocations` reads
off PyTorch's profiler what it allocates, :mod:`.profiling.calls` runs it there, :mod:`.profiling.cards` on a card.
"""
