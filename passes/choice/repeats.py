"""What can be computed again with its group, and from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..recompute import repeated_alone
from ..saved import Use
from .units import Units

__all__ = ["Again"]


class Again:
    """What can be computed again with its group.

    Attributes:
        storages: by group.
        of: by storage, its group.
        ops: by group, the operators that are repeated.
        rebuilds: by storage that is read by these, the groups of them.
    """

    def __init__(self, units: Units, group_of: Sequence[int], groups: int, lasting: set[str]) -> None:
        self.units, self.net, self.group_of = units, units.net, group_of
        self.storages: list[list[str]] = [[] for _ in range(groups)]
        self.of: dict[str, int] = {}
        self.ops: list[list[int]] = [[] for _ in range(groups)]
        self.rebuilds: dict[str, list[int]] = {}
        uses = units.uses
        elsewhere = self.read_elsewhere()
        repeatable = repeated_alone(units.program, uses)
        for storage, use in uses.items():
            if use.made < 0 or use.late < 0 or use.written >= 0 or storage in lasting or storage in elsewhere:
                continue
            group = group_of[use.made]
            if group >= 0 and self.net.ops[use.made].phase == "forward" and use.made in repeatable:
                self.of[storage] = group
        self.chains(uses, repeatable)

    def read_elsewhere(self) -> set[str]:
        """Storages that another group's operator reads than makes."""
        blobs, uses, group_of = self.net.blobs, self.units.uses, self.group_of
        found = set()
        for i, op in enumerate(self.net.ops):
            for name in op.inputs:
                storage = blobs[name].storage
                made = uses[storage].made
                if made >= 0 and group_of[made] != group_of[i]:
                    found.add(storage)
        return found

    def chains(self, uses: Mapping[str, Use], repeatable: Mapping[int, None]) -> None:
        """Find the operators that are repeated, from what is kept on; what depends on others is kept itself."""
        blobs, ops, group_of = self.net.blobs, self.net.ops, self.group_of
        needed: dict[int, None] = {}
        sound: dict[int, bool] = {}
        for storage in list(self.of):
            group = self.of[storage]
            left, chain = [uses[storage].made], dict[int, None]()
            fine = True
            while left and fine:
                made = left.pop()
                if made in chain or made in needed:
                    continue
                if sound.get(made) is False or made not in repeatable or group_of[made] != group:
                    fine = False
                    break
                chain[made] = None
                for name in ops[made].inputs:
                    source = blobs[name].storage
                    use = uses[source]
                    if use.made < 0 or (use.late >= 0 and source not in self.of):
                        continue
                    left.append(use.made)
            if fine:
                needed.update(chain)
            else:
                sound[uses[storage].made] = False
                del self.of[storage]
        for storage, group in self.of.items():
            self.storages[group].append(storage)
        for made in sorted(needed):
            group = group_of[made]
            self.ops[group].append(made)
            for name in ops[made].inputs:
                source = blobs[name].storage
                if source not in self.of:
                    found = self.rebuilds.setdefault(source, [])
                    if group not in found:
                        found.append(group)
