"""The text form of nets, programs and plans: printing it, reading it, and showing it to people."""

from .nbytes import nbytes_of, nbytes_text
from .parse import parse
from .printer import quoted, type_name
from .show import canonical_text, instruction_text, operator_text, show

__all__ = [
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
