"""What goes into a step and what comes out: the caller's arguments and results, and each replica's share of them.

Runs on the caller's thread before and after a step, whatever executes it. Of the other rooms it imports ``kernels`` and
``machine``.
"""
