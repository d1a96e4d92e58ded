"""Sequences of several lengths: CTC losses, and packed sequences.

Lengths that are Python integers are no data. Torch's C++ reads the lengths of packed sequences from a tensor's memory.
A fake tensor has no memory: if its values are known, a real tensor is read in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...ir.meta import rule_of
from ...ir.opset import without_defaults
from ..isolate.functions import Handlers
from ..words.libraries import Outside
from ..words.places import where
from .extents import plain
from .scopes import Scopes
from .tape import Tape

__all__ = ["CTC", "record_ctc", "refuse_packed", "sequences"]

_aten: Final = torch.ops.aten
_CTC: Final = _aten._ctc_loss.Tensor
CTC: Final = (_CTC, _aten._ctc_loss_backward.Tensor)
"""What :func:`record_ctc` records."""
_READERS: Final = frozenset(module.forward.__code__ for module in (torch.nn.GRU, torch.nn.LSTM, torch.nn.RNN))
_RECURRENT: Final = ("gru", "lstm", "rnn_relu", "rnn_tanh")

Known = Callable[[torch.Tensor], "torch.Tensor | None"]


def record_ctc(tape: Tape, func: Any, args: Sequence[Any]) -> Any:
    """Record a CTC loss, or its backward, as graphir's own type; returns the results of *func*.

    Args:
        tape: the tape that records the call.
        func: the operator.
        args: its arguments, with fake tensors of the recording.
    """
    if func is _CTC:
        losses = _recorded(tape, "graphir.ctc_loss", args[:4], args[4:])
        return losses, tape.fake((0,), (1,), losses.dtype)  # the table, which the backward fills again
    return _recorded(tape, "graphir.ctc_loss_backward", args[:5], args[7:])


def _recorded(tape: Tape, type: str, tensors: Sequence[torch.Tensor], options: Sequence[Any]) -> torch.Tensor:
    named = dict(zip(("blank", "zero_infinity"), options, strict=False))
    made = rule_of(type)(*tensors, **named)
    inputs = tuple([tape.read(tensor) for tensor in tensors])
    (value,) = tape.emit_own(type, inputs, None, without_defaults(type, named), [made])
    return tape.window(value)


def sequences(scopes: Scopes, known: Known) -> Handlers:
    """Handlers of torch's functions that take lengths. Integers and tensors with known values are no data.

    Args:
        scopes: knows which module runs.
        known: returns a real tensor with the numbers of a fake one; None if they are unknown.

    Raises:
        CaptureError: by a handler, if the lengths of packed sequences are data.
    """

    def numbers(lengths: torch.Tensor) -> torch.Tensor:
        found = known(lengths) if isinstance(lengths, FakeTensor) else lengths
        if found is None:
            raise _lengths_are_data(scopes.current)
        return found

    def integers(lengths: torch.Tensor) -> list[int]:
        with _disable_current_modes():
            return [int(length) for length in numbers(lengths)]

    def pack(
        _: Any, input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frames, batch = input.shape[:2][:: -1 if batch_first else 1]
        blocks = _blocks(integers(lengths), batch, frames)
        data: torch.Tensor = _Pack.apply(input, blocks, batch_first)  # type: ignore[no-untyped-call]
        return data, torch.tensor([block.rows for block in blocks for _ in range(block.frames)])

    def pad(
        _: Any, data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: float, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _padded(data, integers(batch_sizes), batch_first, padding_value, total)

    def recurrent(function: Callable[..., Any], input: Any, second: Any, third: Any, fourth: Any, *args: Any) -> Any:
        packed = not isinstance(fourth, bool)  # the second argument is then the batch sizes
        return function(input, numbers(second) if packed else second, third, fourth, *args)

    torchs: Any = torch._C._VariableFunctions
    return {
        **{getattr(torchs, name): recurrent for name in _RECURRENT},
        torchs._pack_padded_sequence: pack,
        torchs._pad_packed_sequence: pad,
        torch.ctc_loss: _ctc_loss,
        torch.nn.functional.ctc_loss: _ctc_loss,
    }


def refuse_packed(frame: FrameType, scope: str) -> None:
    """Refuse to let a recurrent module of torch read how many sequences a packed sequence holds.

    Raises:
        CaptureError: the code that runs in *frame*, which reads a number out of a tensor, is such a module's.
    """
    if frame.f_code in _READERS:
        raise _lengths_are_data(scope)


def _lengths_are_data(scope: str) -> CaptureError:
    return CaptureError(
        "the packing of sequences depends on their lengths, which are data here",
        where=where(scope),
        fix=Outside(
            "pass the lengths to pack_padded_sequence as Python integers, [7, 5, 3]: each list of lengths has a "
            "program of its own, so sort sequences into buckets of few lengths; or run the padded sequences, and mask "
            "the padding; or train with graphir.DataParallel and the loss outside of the model: a model that can't be "
            "captured runs eagerly there"
        ),
    )


def _ctc_loss(
    function: Callable[..., torch.Tensor],
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """A CTC loss whose lengths are tensors; if all lengths are equal, the tensor's size follows the batch.

    Torch divides by the lengths of targets, which as integers become numbers of the loss's type.
    """
    if not isinstance(input_lengths, torch.Tensor) and not isinstance(target_lengths, torch.Tensor):
        _check_lengths(log_probs, targets, input_lengths, target_lengths)
        input_lengths, target_lengths = _lengths(input_lengths), _lengths(target_lengths)
    return function(log_probs, targets, input_lengths, target_lengths, *options, **named)


def _check_lengths(
    log_probs: torch.Tensor, targets: torch.Tensor, frames: Sequence[int], labels: Sequence[int]
) -> None:
    """Check lengths as torch's kernel does; the comparisons with sizes become guards of the program.

    Raises:
        ValueError: torch would refuse the lengths.
    """
    if max(frames, default=0) > log_probs.shape[0]:
        raise ValueError(f"a sequence has {max(frames)} frames, log_probs {log_probs.shape[0]}")
    if targets.dim() == 1 and sum(labels) != targets.shape[0]:
        raise ValueError(f"the sequences have {sum(labels)} labels, targets {targets.shape[0]}")
    if max(labels, default=0) > targets.shape[-1]:
        raise ValueError(f"a sequence has {max(labels)} labels, targets {targets.shape[-1]}")


def _lengths(given: Sequence[int]) -> torch.Tensor:
    lengths = [int(plain(length)) for length in given]
    alike = len(set(lengths)) == 1
    return torch.full((len(lengths),), lengths[0], dtype=torch.int64) if alike else torch.tensor(lengths)


class _Block(NamedTuple):
    """Consecutive frames with equally many sequences: the first *rows*, which are the longest."""

    first: int
    frames: int
    rows: int


def _blocks(lengths: list[int], batch: int, longest: int) -> list[_Block]:
    """The blocks of sequences of these lengths, as torch's ``_pack_padded_sequence`` finds them.

    Raises:
        ValueError: torch would refuse the lengths.
    """
    if len(lengths) != batch:
        raise ValueError(f"there are {len(lengths)} lengths for {batch} sequences")
    if sorted(lengths, reverse=True) != lengths:
        raise ValueError(f"lengths {lengths} do not descend, and enforce_sorted is true")
    if not lengths or lengths[-1] <= 0 or lengths[0] > longest:
        raise ValueError(f"lengths {lengths} are not between 1 and {longest}, the number of frames")
    found: list[_Block] = []
    done = 0
    for shorter, length in enumerate(reversed(lengths)):
        if length > done:
            found.append(_Block(done, length - done, batch - shorter))
            done = length
    return found


class _Pack(torch.autograd.Function):
    """The frames of sequences without their padding, by the same copies as in torch."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, blocks: list[_Block], batch_first: bool) -> torch.Tensor:
        frames_first = input.transpose(0, 1) if batch_first else input
        ctx.blocks, ctx.batch_first, ctx.shape = blocks, batch_first, frames_first.shape
        shape = (-1, *frames_first.shape[2:])
        shown = [frames_first.narrow(0, b.first, b.frames).narrow(1, 0, b.rows) for b in blocks]
        return torch.cat([block.contiguous().view(shape) for block in shown])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Torch copies each frame into zeros; here each block is padded, which copies no frame twice."""
        longest, batch, *rest = ctx.shape
        parts, done = [], 0
        for block in ctx.blocks:
            part = grad.narrow(0, done, block.frames * block.rows).reshape(block.frames, block.rows, *rest)
            parts.append(torch.constant_pad_nd(part, [*[0, 0] * len(rest), 0, batch - block.rows]))
            done += block.frames * block.rows
        missing = longest - sum(block.frames for block in ctx.blocks)
        padded = torch.cat([*parts, grad.new_zeros((missing, batch, *rest))] if missing else parts)
        return padded.transpose(0, 1) if ctx.batch_first else padded, None, None


def _padded(
    data: torch.Tensor, batch_sizes: list[int], batch_first: bool, padding_value: float, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded sequences and their lengths, by the operators of torch's ``_pad_packed_sequence``."""
    frames = total_length if total_length > 0 else len(batch_sizes)
    output = torch.full((frames, batch_sizes[0], *data.shape[1:]), padding_value, dtype=data.dtype)
    done, first, lengths = 0, 0, list[int]()
    for last, rows in enumerate([*batch_sizes[1:], 0], start=1):
        before = batch_sizes[last - 1]
        if rows == before:
            continue
        block = data.narrow(0, done, (last - first) * before).view(last - first, before, *data.shape[1:])
        _aten.slice(_aten.slice(output, 0, first, last), 1, 0, before).copy_(block)
        done, first = done + (last - first) * before, last
        lengths += [last] * (before - rows)
    return output.transpose(0, 1) if batch_first else output, torch.tensor(lengths[::-1])
