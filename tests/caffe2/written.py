"""Nets written as protobuf text."""

from __future__ import annotations

from typing import Any

from graphir import Net
from graphir.caffe2.convert import decode
from graphir.caffe2.schema import messages


def parsed(text: str) -> Any:
    from google.protobuf import text_format

    return text_format.Parse(text, messages().NetDef())


def net_of(text: str) -> Net:
    return decode(parsed(text), "x.pb")
