"""The results of operators on fake tensors.

PyTorch is asked once for each operator and geometry. A repeated layer's results are made from the answer that
:mod:`graphir.ir.infer` keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...errors import CaptureError
from ...ir.geometry import Geometry
from ...ir.infer import MadeResult, Result, Returned, described, keep, kept
from ...ir.meta import fresh_fake_mode, rule_of
from ..isolate.cuda_casts import opens_cells
from ..words.places import where
from .forms import BoundArguments, Form

__all__ = ["Results", "in_sequence"]

_CPU: Final = torch.device("cpu")
_META: Final = torch.device("meta")


def in_sequence(returned: Any) -> Sequence[Any]:
    """The results of an operator as a sequence, also if it returned a single one."""
    return returned if isinstance(returned, (tuple, list)) else (returned,)


class Results:
    """Calls operators on the fake tensors of one mode.

    Args:
        fake_mode: the mode.
        here: returns the path of the running module.
    """

    def __init__(self, fake_mode: FakeTensorMode, here: Callable[[], str]) -> None:
        self._here = here
        self._attributes = {**_attributes_of_a_fake(), "fake_mode": fake_mode}
        # Convolutions choose their backend, and with it the layout of their results, by these settings.
        self._surroundings = torch.get_num_threads(), torch.backends.mkldnn.enabled

    def of(
        self,
        form: Form,
        bound: BoundArguments,
        geometries: Iterable[Geometry],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """What ``form.func(*args, **kwargs)`` returns.

        Args:
            form: the operator's form.
            bound: its arguments in place.
            geometries: the geometries of the tensors in ``bound``.
            args, kwargs: its arguments; a device among them is the host.

        Raises:
            CaptureError: the step has switched oneDNN, so the operator has other kernels than outside of the step.
        """
        if (
            form.by_onednn
            and bound.tensors[0].dtype in form.by_onednn
            and torch.backends.mkldnn.enabled != self._surroundings[1]
            and not opens_cells()
        ):
            raise CaptureError(
                f"the step switches oneDNN for {form.type}, which then rounds differently; a program would not "
                "switch oneDNN",
                where=where(self._here()),
                fix="switch oneDNN off outside of the step, for the capture and the session; within the step switch it "
                "off only around an LSTM in single precision",
            )
        if not form.repeats:
            return rule_of(form.type)(*args, **kwargs)
        setting = torch.get_default_dtype(), *self._surroundings
        # The text of the arguments tells 1, 1.0 and True apart, and 0.0 and -0.0.
        key = (form.func, bound.operands, repr(bound.args), setting, *geometries)
        known: Returned | None = kept(key)
        if known is None:
            out = rule_of(form.type)(*args, **kwargs)
            known = described(out, bound.tensors)
            if known is not None:
                keep(key, known)
            return out
        kind, results = known
        if kind is None:
            return self._made(results[0], bound.tensors)
        return kind([self._made(result, bound.tensors) for result in results])

    def empty(self, geometry: Geometry) -> torch.Tensor:
        """A fake tensor with memory of its own."""
        return self._made(MadeResult(geometry, None), ())  # type: ignore[return-value]

    def _made(self, result: Result, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
        if type(result) is not MadeResult:
            return None if result is None else operands[result]  # type: ignore[index]
        (shape, strides, offset, dtype, _, _), source = result
        with torch._C._DisableTorchDispatch():
            if source is not None:
                elem = torch.as_strided(operands[source], shape, strides, offset)
            else:
                elem = torch.empty_strided(shape, strides, dtype=dtype, device=_META)
            fake = torch.Tensor._make_subclass(
                FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=_CPU
            )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self._attributes)
        return fake


@cache
def _attributes_of_a_fake() -> dict[str, Any]:
    """The attributes that torch gives a new fake tensor, except its mode."""
    sample = FakeTensor(fresh_fake_mode(), torch.empty(0, device=_META), _CPU)
    return {name: value for name, value in vars(sample).items() if name != "fake_mode"}
