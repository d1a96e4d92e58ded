"""Transformers and recurrent nets, built from transformers and torch, and small."""

from __future__ import annotations

from zoo_rows import Row

__all__ = ["TEXT"]

TEXT: dict[str, Row] = {}
