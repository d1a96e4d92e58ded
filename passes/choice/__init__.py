"""How a placement is chosen: what :func:`graphir.passes.balance` is made of.

asked.py     what a caller asks, and whether program and machine have what the caller names
balancing.py all of what follows ──▶ the placement; refusals.py says why there is none
step.py      program ──▶ its operators and storages as columns, read once
units.py     program ──▶ what moves as a whole; tails.py cuts off what has no parameters and saves much
merging.py   what moves as a whole ──▶ few groups
tasks.py     groups ──▶ what they compute and hand on; repeats.py says what can be computed again
groups.py    all of that ──▶ Problem
problem.py   Problem, and Choice: a device for each group, and what becomes of what it saves
outcome.py   Problem and Choice ──▶ seconds of a step, and the peak of each device; flow.py where micro-batches flow
search.py    Problem ──▶ the best choice that is found; attempts.py searches among groups of several sizes
bound.py     Problem ──▶ what no choice can beat, by a linear program: linear.py solves it, relaxed/ says what it is
facts.py     Problem ──▶ what holds whatever is chosen
moves.py     Choice ──▶ the program, placed; naming.py says how its passes name modules
plans.py     Choice ──▶ its plan: what devices hold, and how long a step takes
levels.py    program ──▶ what a person recomputes, parks or cuts at
holding.py   Step, and where parts are ──▶ what devices hold; reductions.py says when replicas reduce gradients
chains.py    devices ──▶ the orders in which parts of a model are on them, alike in each replica
drafts.py    a plan as a person writes it ──▶ the program, placed; reckoning.py says what it should hold and take
few.py       every placement of a few modules, reckoned at once
cuts.py      level ──▶ its cheapest cut; intervals.py reckons what neighbours come to that are one part
by_hand.py   levels ──▶ the plans that a person would try, and the fastest that keeps within limits
proven.py    program and limits ──▶ what holds of every placement, whatever its groups
places.py    Choice ──▶ where each group is, and why
figures.py   Choice or plan ──▶ report; report.py says what is printed
batches.py   program ──▶ the batches that it takes; largest.py finds the largest for which there is a placement
"""
