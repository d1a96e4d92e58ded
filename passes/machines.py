"""The machine that a pass reckons with, as an option: a topology, its name, or what a pipeline's text has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from graphir.analysis.topology import Topology

from .base import OptionError, read_option

__all__ = ["Machine"]


def _topology(given: Any) -> Any:
    if given is None or isinstance(given, Topology):
        return given
    if isinstance(given, Mapping):
        return read_option(lambda fields: Topology(**{str(key): value for key, value in fields.items()}), given)
    if not isinstance(given, str):
        raise OptionError(f"{given!r:.40} is no topology", fix="give a topology, or the name of one, such as 'h200x8'")
    return read_option(Topology.named, given)


Machine: TypeAlias = Annotated[Topology | None, BeforeValidator(_topology)]
"""An option that is a topology; None: the machine at hand, as :meth:`~graphir.Topology.here` has it."""
