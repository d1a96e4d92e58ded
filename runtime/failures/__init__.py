"""What is said when a step fails, and what notices that it would never end.

Called by executors, and calls none. Of the other rooms it imports ``codegen``, whose lines say where a thread is, and
``machine``, to count how long it stays there.
"""
