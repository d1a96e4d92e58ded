"""Formulas of a call's cost from its sizes, by operator type: arithmetic, launches, and memory beside the operands.

:mod:`.scratch` has what kernels on the host allocate inside, :mod:`.flops` the arithmetic, :mod:`.launches` the kernels
on a card, :mod:`.kept` the memory that results keep beyond their elements. Formulas of a user's type are in its record
(:mod:`graphir.ir.optypes`).
"""
