"""The file form of nets, programs and plans: JSON through pydantic, tensors through safetensors."""

from .disk import load, load_stream, save, to_json

__all__ = ["load", "load_stream", "save", "to_json"]
