"""The file form of nets, programs and plans: JSON through pydantic, tensors through safetensors."""

from .disk import (
    load,
    load_net,
    load_plan,
    load_program,
    load_stream,
    save,
    save_net,
    save_plan,
    save_program,
    to_json,
)

__all__ = [
    "load",
    "load_net",
    "load_plan",
    "load_program",
    "load_stream",
    "save",
    "save_net",
    "save_plan",
    "save_program",
    "to_json",
]
