"""Embeddings, and what reads or writes by index."""

from __future__ import annotations

from typing import Final

from ..facts import known

__all__ = ["INDEXING"]

INDEXING: Final = (
    known(
        """
        diagonal_backward isinf masked_scatter_backward masked_select nonzero nonzero_static select_backward
        slice_backward unfold_backward
        """,
        admitted=".default",
        only_elements=True,
    ),
    known(
        """
        _embedding_bag_backward _embedding_bag_per_sample_weights_backward as_strided_scatter diagonal_scatter
        select_scatter slice_scatter
        """,
        admitted=".default",
    ),
    known("_segment_reduce_backward _unsafe_masked_index segment_reduce", only_elements=True),
    known("bucketize index repeat_interleave", admitted=".Tensor", only_elements=True),
    known(
        "_embedding_bag _embedding_bag_forward_only",
        admitted=".default",
        alike=("weight", "per_sample_weights"),
        kept_varies=True,
    ),
    known(
        "_index_put_impl _unsafe_index_put",
        alike=("self", "values"),
        index_types=("indices", ("i64", "i32", "u8", "bool")),
    ),
    known("_embedding_bag_dense_backward", nondeterministic="adds in no fixed order on CUDA"),
    known(
        "_unsafe_masked_index_put_accumulate",
        only_elements=True,
        alike=("self", "values"),
        index_types=("indices", ("i64", "i32", "u8", "bool")),
    ),
    known("count_nonzero", admitted=".default .dim_IntList", only_elements=True),
    known(
        "embedding", admitted=".default", only_elements=True, index_types=("indices", ("i64", "i32")), reads_rows=True
    ),
    known(
        "embedding_dense_backward",
        admitted=".default",
        only_elements=True,
        nondeterministic="adds in no fixed order on CUDA",
    ),
    known("gather", admitted=".default", only_elements=True, reads_rows=True),
    known(
        "index_add",
        admitted=".default _.default",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64", "i32")),
        nondeterministic="adds in no fixed order on CUDA",
    ),
    known(
        "index_copy",
        admitted=".default _.default",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64",)),
    ),
    known(
        "index_fill",
        admitted=".int_Scalar .int_Tensor _.int_Scalar _.int_Tensor",
        only_elements=True,
        index_types=("index", ("i64",)),
    ),
    known(
        "index_put",
        admitted=".default _.default",
        only_elements=True,
        alike=("self", "values"),
        index_types=("indices", ("i64", "i32", "u8", "bool")),
        nondeterministic="adds in no fixed order on CUDA where accumulate is set",
    ),
    known(
        "index_reduce",
        admitted=".default _.default",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64", "i32")),
    ),
    known(
        "index_select", admitted=".default", only_elements=True, index_types=("index", ("i64", "i32")), reads_rows=True
    ),
    known("isin", admitted=".Tensor_Tensor", only_elements=True),
    known(
        "masked_fill",
        admitted=".Scalar .Tensor _.Scalar _.Tensor",
        only_elements=True,
        of={".Scalar": {"in_place": True}},
    ),
    known("masked_scatter", admitted=".default _.default", only_elements=True),
    known(
        "put",
        admitted=".default _.default",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64",)),
        nondeterministic="adds in no fixed order on CUDA where accumulate is set",
    ),
    known("scatter", admitted=".reduce .src .value _.reduce _.src _.value", only_elements=True),
    known(
        "scatter_add",
        admitted=".default _.default",
        only_elements=True,
        nondeterministic="adds in no fixed order on CUDA",
    ),
    known(
        "scatter_reduce",
        admitted=".two _.two",
        only_elements=True,
        of={".two": {"nondeterministic": "reduces in no fixed order on CUDA"}},
    ),
    known("searchsorted", admitted=".Tensor", only_elements=True, index_types=("sorter", ("i64",))),
    known("take", admitted=".default", only_elements=True, index_types=("index", ("i64",))),
    known("where", admitted=".self", only_elements=True),
)
