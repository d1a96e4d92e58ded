"""Views and their copies."""

from __future__ import annotations

from typing import Final

from .. import rules
from ..facts import known

__all__ = ["VIEWS"]

VIEWS: Final = (
    known(
        """
        alias alias_copy detach diagonal_copy expand expand_copy narrow_copy permute permute_copy split_with_sizes
        split_with_sizes_copy t_copy unfold_copy unsqueeze_copy view_as_complex view_as_real view_copy
        """,
        admitted=".default",
        only_elements=True,
    ),
    known("select transpose_copy unbind unbind_copy", admitted=".int", only_elements=True),
    known("_chunk_cat as_strided_copy", admitted=".default"),
    known("diagonal unfold", admitted=".default", only_elements=True, shaped_in_pieces=True),
    known("lift unsafe_split_with_sizes", hidden_views=True),
    known("slice split", admitted=".Tensor", only_elements=True, of={".Tensor": {"shaped_in_pieces": True}}),
    known("t unsqueeze", admitted=".default _.default", only_elements=True),
    known("_conj", admitted=".default", only_elements=True, conjugates=True),
    known("_neg_view", admitted=".default", conjugates=True),
    known("_unsafe_view", admitted=".default", only_elements=True, label="view", hidden_views=True, rule=rules.viewed),
    known("as_strided", admitted=".default _.default"),
    known("lift_fresh", admitted=".default", only_elements=True, label="constant"),
    known("squeeze", admitted=".default .dim .dims _.default _.dim _.dims", only_elements=True),
    known("squeeze_copy", admitted=".default .dim", only_elements=True),
    known(
        "transpose", admitted=".int _.default", only_elements=True, of={"_.default": {"functional": "transpose.int"}}
    ),
    known("unsafe_chunk", composite=True, hidden_views=True),
    known(
        "unsafe_split",
        admitted=".Tensor",
        only_elements=True,
        label="split",
        of={".Tensor": {"hidden_views": True, "shaped_in_pieces": True}},
    ),
    known("view", admitted=".default", only_elements=True, rule=rules.viewed),
)
