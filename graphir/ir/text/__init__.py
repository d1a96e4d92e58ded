"""The text form of nets, programs and plans: printing it, reading it, and showing it to people."""

from .parse import parse
from .printer import NBYTES_UNITS, nbytes_of, nbytes_text, quoted, type_name
from .show import canonical_text, instruction_text, operator_text, show

__all__ = [
    "NBYTES_UNITS",
    "canonical_text",
    "instruction_text",
    "nbytes_of",
    "nbytes_text",
    "operator_text",
    "parse",
    "quoted",
    "show",
    "type_name",
]
