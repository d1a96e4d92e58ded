"""How a placement is chosen: what :func:`graphir.passes.balance` is made of.

groups.py    program ──▶ Problem: groups of modules, the tasks and values of a step
problem.py   Problem, and Choice: a device for each group, and what becomes of what it saves
outcome.py   Problem and Choice ──▶ seconds of a step, and the peak of each device
search.py    Problem ──▶ the best choice that is found
bound.py     Problem ──▶ what no choice can beat
exact.py     Problem ──▶ the best choice there is, by a constraint solver
moves.py     Choice ──▶ passes
"""
