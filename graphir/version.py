"""The version of graphir, in a module of its own, which everything may import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
