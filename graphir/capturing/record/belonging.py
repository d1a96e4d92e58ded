"""Which operator each operator of a backward belongs to, so that a pass can keep the two together.

Autograd makes a node for each differentiable call, and numbers it, just before the call reaches the dispatcher. While
a node runs, its number so leads to the call whose gradients it computes::

    y = x.relu()          node 7 is made, then aten.relu is recorded
    y.sum().backward()    node 7 runs: aten.threshold_backward is recorded, and belongs to y

Autograd adds gradients up while the node runs that made the last one: a sum belongs to the value whose gradient it is,
and so do the additions that lead to it. A checkpoint runs calls of the forward again: these belong to what they repeat.
The calls of a custom ``Function`` belong to its result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

from ...ir.opset import ACCUMULATES
from .values import RecordedCall, Value

__all__ = ["Belonging"]

_Kind: TypeAlias = tuple[str, tuple[tuple[int, ...], ...]]


class _Repeat(NamedTuple):
    """A call that runs with gradients enabled in the backward, while *node* runs for the first time or again."""

    call: RecordedCall
    node: Any


class Belonging:
    """The value that each recorded call belongs to, as :attr:`.Call.of`."""

    def __init__(self) -> None:
        self._made_for: dict[int, RecordedCall] = {}
        self._without_gradients: dict[int, list[RecordedCall]] = {}
        self._repeats: list[_Repeat] = []

    def of_node(self, node: Any) -> Value | None:
        """The first result of the call that autograd made *node* for."""
        call = self._made_for.get(node._sequence_nr())
        return call.outputs[0] if call is not None and call.outputs else None

    def in_forward(self, call: RecordedCall) -> None:
        """Note a call of the forward; where the forward computes gradients itself, it may be one of a backward too."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            call.of = self.of_node(node)
        self._note_node(call)

    def in_backward(self, call: RecordedCall, owner: Value | None) -> None:
        """Note a call of the backward.

        Args:
            call: without its results yet.
            owner: the value whose gradient is computed, where it is known.
        """
        node: Any = torch._C._current_autograd_node()
        call.of = owner or (None if node is None else self.of_node(node))
        if torch.is_grad_enabled():
            self._note_node(call)
            if node is not None:
                self._repeats.append(_Repeat(call, node))

    def _note_node(self, call: RecordedCall) -> None:
        number = _get_sequence_nr() - 1
        self._made_for.setdefault(number, call)
        if not torch.is_grad_enabled():
            self._without_gradients.setdefault(number, []).append(call)

    def unite(self, functions: Mapping[int, Value]) -> None:
        """Let the calls of a custom ``Function``'s forward belong to its result.

        Args:
            functions: the results, by the numbers of the nodes that stand for whole functions.
        """
        for number, result in functions.items():
            calls = self._without_gradients.get(number, [])
            last = next((i for i, call in enumerate(calls) if call is result.call), 0)
            for call in calls[:last]:
                call.of = result

    def end_backward(self, forward: Sequence[RecordedCall], gradients: Sequence[tuple[Value, Value]]) -> None:
        """Find what repeats the *forward*, and what adds up the *gradients* of which values."""
        self._match_repeats(forward)
        makers = {id(gradient.call): value for value, gradient in gradients}
        for value, gradient in gradients:
            calls = [gradient.call]
            while calls:
                call = calls.pop()
                if call is None or call.type != ACCUMULATES or call.phase != "backward":
                    continue
                if makers.get(id(call), value) is value:
                    call.of = value
                    calls += [v.call for v in call.inputs]

    def _match_repeats(self, forward: Sequence[RecordedCall]) -> None:
        """Let the calls that a checkpoint makes while one node runs belong to those of the forward that they repeat.

        A checkpoint runs again what lies between its beginning and the call of the node that asks first, the last one
        that keeps anything. Of the places where most of it fits, the right one is that which ends next to this call.
        """
        places: dict[_Kind, list[int]] = {}
        positions: dict[int, int] = {}
        for i, call in enumerate(forward):
            places.setdefault(_kind(call), []).append(i)
            positions[id(call)] = i
        runs: dict[int, list[RecordedCall]] = {}
        for call, node in self._repeats:
            runs.setdefault(node._sequence_nr(), []).append(call)
        for number, run in runs.items():
            asks = positions.get(id(self._made_for.get(number)))
            if asks is None:
                continue
            found = [_aligned(run, forward, start, asks) for start in places.get(_kind(run[0]), ()) if start <= asks]
            best = min(filter(None, found), key=partial(_distance, asks=asks), default=None)
            for call, i in zip(run, best or (), strict=False):
                if forward[i].outputs:
                    call.of = forward[i].outputs[0]
        self._repeats.clear()


def _kind(call: RecordedCall) -> _Kind:
    """What a call has in common with its repetition, whose line is that of torch's own checkpoint."""
    return call.type, tuple([v.shape for v in call.outputs])


def _distance(place: Sequence[int], asks: int) -> tuple[int, int, int]:
    """How badly a place fits a run: by what is missing, by how far it ends from the call that *asks*, by its gaps."""
    return -len(place), asks - place[-1], place[-1] - place[0]


def _aligned(run: Sequence[RecordedCall], forward: Sequence[RecordedCall], start: int, asks: int) -> list[int]:
    """The position in the *forward* of what each call of a *run* repeats, from *start* on; empty where they differ.

    Views that are made again where their memory has changed may be missing in one of the two.
    """
    found: list[int] = []
    i = start
    for call in run:
        kind = _kind(call)
        while i <= asks and _kind(forward[i]) != kind:
            i += 1
        if i > asks:
            break
        found.append(i)
        i += 1
    return found if 2 * len(found) > len(run) else []
