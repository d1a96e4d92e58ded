"""Which operator each operator of a backward belongs to, so that a pass can keep the two together.

Autograd makes and numbers a node for each differentiable call just before the call reaches the dispatcher. While a
node runs, its number therefore leads to the call whose gradients the node computes::

    y = x.relu()          node 7 is made, then aten.relu is recorded
    y.sum().backward()    node 7 runs: aten.threshold_backward is recorded, and belongs to y

Autograd adds gradients up while the node runs that made the last summand. The sum and the additions that lead to it
belong to the value whose gradient the sum is. A checkpoint runs calls of the forward again: a repeated call belongs to
the result of the call that it repeats. The calls of a custom ``Function`` belong to the function's result.
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
    """A call of the backward that may repeat one of the forward: gradients are enabled while *node* runs."""

    call: RecordedCall
    node: Any


class Belonging:
    """Finds the value that each recorded call belongs to, and sets ``RecordedCall.of``."""

    def __init__(self) -> None:
        self._made_for: dict[int, RecordedCall] = {}
        self._without_gradients: dict[int, list[RecordedCall]] = {}
        self._repeats: list[_Repeat] = []

    def of_node(self, node: Any) -> Value | None:
        """The first result of the call that autograd made *node* for."""
        call = self._made_for.get(node._sequence_nr())
        return call.outputs[0] if call is not None and call.outputs else None

    def in_forward(self, call: RecordedCall) -> None:
        """Note a call of the forward. While the forward computes gradients itself, a node's value owns the call."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            call.of = self.of_node(node)
        self._note_node(call)

    def in_backward(self, call: RecordedCall, owner: Value | None) -> None:
        """Note a call of the backward.

        Args:
            call: the call, still without results.
            owner: the value whose gradient is computed; None if unknown.
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
            functions: the result of each custom function, by the number of the function's node.
        """
        for number, result in functions.items():
            calls = self._without_gradients.get(number, [])
            last = next((i for i, call in enumerate(calls) if call is result.call), 0)
            for call in calls[:last]:
                call.of = result

    def end_backward(self, forward: Sequence[RecordedCall], gradients: Sequence[tuple[Value, Value]]) -> None:
        """Find the calls that repeat calls of the *forward*, and the additions that sum up *gradients* of values."""
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
        """Match the calls that a checkpoint makes while one node runs with the calls of the forward that they repeat.

        A checkpoint runs again once a node asks for a kept tensor. The run repeats the forward from the checkpoint's
        beginning to the call of the first node that asks, which is the last call that keeps a tensor. Of the places in
        the forward that match most calls of the run, the one that ends closest to the asking node's call is taken.
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
    """What a call and its repetition have in common. Lines differ: the repetition's is that of torch's checkpoint."""
    return call.type, tuple([v.shape for v in call.outputs])


def _distance(place: Sequence[int], asks: int) -> tuple[int, int, int]:
    """How badly a place fits a run: few matches, then distance of its end from the call that *asks*, then gaps."""
    return -len(place), asks - place[-1], place[-1] - place[0]


def _aligned(run: Sequence[RecordedCall], forward: Sequence[RecordedCall], start: int, asks: int) -> list[int]:
    """The positions in the *forward*, from *start* on, of the calls that a *run* repeats; empty if at most half match.

    Either of the two may lack views that the tape makes again after a write to their memory.
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
