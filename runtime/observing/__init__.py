"""What is seen of a step while it runs: probes, and what is made of what they saw.

:mod:`.observing.probes` is what an executor calls. On it stand the measurement, from which come the report and the
trace, and the watch for NaN.

Changes no value, and knows executors by their protocol only. Imports no other room.
"""
