"""A problem as a linear program, in which groups may be taken apart: its optimum is what no choice can beat.

parts.py    how much of each group is where, and what becomes there of what it saves
times.py    what a step takes: chains of tasks, what devices compute, what lanes copy
bytes.py    what devices hold

Devices that are alike are one *class*, as large as all of them: where they have equal parts of everything the program
says no more than it says of the class, and since they can be exchanged, it has an optimum at which they do.
"""
