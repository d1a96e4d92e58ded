"""Embeddings, and what reads or writes by index."""

from __future__ import annotations

from typing import Final

from ..facts import ADDS, INDEX, admitted, known

__all__ = ["INDEXING"]


INDEXING: Final = (
    admitted(
        """
        bucketize.Tensor count_nonzero count_nonzero.dim_IntList diagonal_backward index.Tensor isin.Tensor_Tensor
        isinf masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter masked_scatter_
        masked_scatter_backward masked_select nonzero nonzero_static repeat_interleave.Tensor scatter.reduce
        scatter.src scatter.value scatter_.reduce scatter_.src scatter_.value scatter_add_ scatter_reduce_.two
        select_backward slice_backward unfold_backward where.self
        """,
        only_elements=True,
    ),
    admitted("embedding", only_elements=True, index_types=("indices", ("i64", "i32")), reads_rows=True),
    admitted("_embedding_bag _embedding_bag_forward_only", alike=("weight", "per_sample_weights"), kept_varies=True),
    admitted("""
        _embedding_bag_backward _embedding_bag_per_sample_weights_backward as_strided_scatter diagonal_scatter
        select_scatter slice_scatter
        """),
    known("_embedding_bag_dense_backward", nondeterministic=ADDS),
    admitted("embedding_dense_backward scatter_add", only_elements=True, nondeterministic=ADDS),
    admitted("gather", only_elements=True, reads_rows=True),
    admitted(
        "index_add",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64", "i32")),
        nondeterministic=ADDS,
    ),
    admitted(
        "index_add_ index_reduce index_reduce_",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64", "i32")),
    ),
    admitted(
        "index_copy index_copy_ put_", only_elements=True, alike=("self", "source"), index_types=("index", ("i64",))
    ),
    admitted(
        "index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar index_fill_.int_Tensor take",
        only_elements=True,
        index_types=("index", ("i64",)),
    ),
    admitted(
        "index_put",
        only_elements=True,
        alike=("self", "values"),
        index_types=("indices", INDEX),
        nondeterministic="adds in no fixed order on CUDA where accumulate is set",
    ),
    admitted("index_put_", only_elements=True, alike=("self", "values"), index_types=("indices", INDEX)),
    known("_index_put_impl _unsafe_index_put", alike=("self", "values"), index_types=("indices", INDEX)),
    admitted("index_select", only_elements=True, index_types=("index", ("i64", "i32")), reads_rows=True),
    admitted("masked_fill.Scalar", only_elements=True, in_place=True),
    admitted(
        "put",
        only_elements=True,
        alike=("self", "source"),
        index_types=("index", ("i64",)),
        nondeterministic="adds in no fixed order on CUDA where accumulate is set",
    ),
    admitted("scatter_reduce.two", only_elements=True, nondeterministic="reduces in no fixed order on CUDA"),
    admitted("searchsorted.Tensor", only_elements=True, index_types=("sorter", ("i64",))),
    known("_segment_reduce_backward _unsafe_masked_index segment_reduce", only_elements=True),
    known(
        "_unsafe_masked_index_put_accumulate",
        only_elements=True,
        alike=("self", "values"),
        index_types=("indices", INDEX),
    ),
)
