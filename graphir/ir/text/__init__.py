"""The text form of nets, programs and plans: printing it, reading it, and showing it to people."""

from .parse import parse
from .printer import nbytes_text, quoted, type_name
from .show import instruction_text, operator_text, print_net, print_plan, print_program, show

__all__ = [
    "instruction_text",
    "nbytes_text",
    "operator_text",
    "parse",
    "print_net",
    "print_plan",
    "print_program",
    "quoted",
    "show",
    "type_name",
]
