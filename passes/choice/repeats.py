"""What can be computed again with its group, and from what."""

from __future__ import annotations

import numpy as np

from graphir.ir.touches import Flags, Numbers

from .step import Step

__all__ = ["Again"]


class Again:
    """What can be computed again with its group.

    Args:
        step: the columns.
        group_of: by operator, its group; -1 of those on the host.
        groups: how many.

    Attributes:
        storages: by group, the numbers of the storages.
        of: by number of a storage, its group.
        ops: by group, the operators that are repeated.
        rebuilds: by number of a storage that is read by these, the groups of them.
    """

    def __init__(self, step: Step, group_of: Numbers, groups: int) -> None:
        self.step, self.group_of = step, group_of.tolist()
        self.storages: list[list[int]] = [[] for _ in range(groups)]
        self.ops: list[list[int]] = [[] for _ in range(groups)]
        self.rebuilds: dict[int, list[int]] = {}
        made = step.made
        fine = step.spared & ~self.read_elsewhere(group_of)
        fine &= (group_of >= 0)[made] & step.forward[made] & step.repeatable[made]
        blobs = step.net.blobs  # what an input is cut into is one, too, which callers hold
        found = np.array([k for k in np.flatnonzero(fine).tolist() if blobs[step.names[k]].role != "input"], np.int64)
        self.of = dict(zip(found.tolist(), group_of[made[found]].tolist(), strict=True))
        self.chains()

    def read_elsewhere(self, group_of: Numbers) -> Flags:
        """By storage, whether another group's operator reads it than makes it."""
        step = self.step
        found = np.zeros(len(step.names), np.bool_)
        storage, op = step.storage[~step.makes], step.op[~step.makes]
        made = step.made[storage]
        found[storage[(made >= 0) & (group_of[made] != group_of[op])]] = True
        return found

    def chains(self) -> None:
        """Find the operators that are repeated, from what is kept on; what depends on others is kept itself."""
        step, made_by, group_of, repeatable = self.step, self.step.makers, self.group_of, self.step.repeatable.tolist()
        late = step.late.tolist()
        needed: dict[int, None] = {}
        sound: dict[int, bool] = {}
        for storage in list(self.of):
            group = self.of[storage]
            left, chain = [made_by[storage]], dict[int, None]()
            fine = True
            while left and fine:
                made = left.pop()
                if made in chain or made in needed:
                    continue
                if sound.get(made) is False or not repeatable[made] or group_of[made] != group:
                    fine = False
                    break
                chain[made] = None
                for source in step.read(made):
                    if made_by[source] >= 0 and (late[source] < 0 or source in self.of):
                        left.append(made_by[source])
            if fine:
                needed.update(chain)
            else:
                sound[made_by[storage]] = False
                del self.of[storage]
        for storage, group in self.of.items():
            self.storages[group].append(storage)
        for made in sorted(needed):
            group = group_of[made]
            self.ops[group].append(made)
            for source in step.read(made):
                if source not in self.of:
                    found = self.rebuilds.setdefault(source, [])
                    if group not in found:
                        found.append(group)
