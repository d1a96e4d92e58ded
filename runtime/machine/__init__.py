"""What a session runs on: real devices, the settings of thread and process, the heap, the speed of the host.

Knows nothing of plans, and imports no other room.
"""
