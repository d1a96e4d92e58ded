"""The seed of a random operator: one number from the step, the replica and the operator's seed id.

A mask then depends on neither the device nor the order of execution, so that moving an operator changes no bit.
The mixing function is splitmix64 (Steele, Lea and Flood, *Fast splittable pseudorandom number generators*, 2014).
"""

from __future__ import annotations

from typing import Final

__all__ = ["mix"]

_MASK: Final = 2**64 - 1
_GAMMA: Final = 0x9E3779B97F4A7C15


def _splitmix64(state: int) -> int:
    z = (state + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def mix(step: int, replica: int, seed_id: int) -> int:
    """The 64-bit seed of a random operator.

    Every bit depends on all three numbers. The low 32 bits do too: torch's CPU generator uses only those.

    Args:
        step: steps done before this one, from 0.
        replica: position of the replica, from 0.
        seed_id: of the operator within the step.
    """
    return _splitmix64(_splitmix64(_splitmix64(step & _MASK) ^ (replica & _MASK)) ^ (seed_id & _MASK))
