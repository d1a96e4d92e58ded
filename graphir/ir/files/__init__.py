"""The file form of nets, programs and plans: JSON through pydantic, tensors through safetensors."""

from .disk import load, load_net, load_plan, load_program, save_net, save_plan, save_program

__all__ = ["load", "load_net", "load_plan", "load_program", "save_net", "save_plan", "save_program"]
