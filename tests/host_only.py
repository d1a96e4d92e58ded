"""Torch's operators that run on the CPU alone: no captured program may have one.

The list was made by :func:`host_only` on CUDA builds of torch 2.11 and 2.15; tests hold it against any CUDA build that
they run on, with or without a GPU. Only variants that a program could name are in it.
"""

from __future__ import annotations

import torch

__all__ = ["HOST_ONLY", "host_only"]

_NAMES = """
    _add_relu.Scalar _add_relu.Tensor _add_relu_.Scalar _add_relu_.Tensor
    _convert_weight_to_int4pack_for_cpu.default _dyn_quant_matmul_4bit.default
    _dyn_quant_pack_4bit_weight.default _empty_affine_quantized.default
    _empty_per_channel_affine_quantized.default _foobar.default _functional_assert_async.msg
    _histogramdd_bin_edges.default _histogramdd_from_bin_cts.default _histogramdd_from_bin_tensors.default
    _make_dep_token.default _scaled_dot_product_flash_attention_for_cpu.default
    _scaled_dot_product_flash_attention_for_cpu_backward.default _spdiags.default
    _test_functorch_fallback.default _test_optional_filled_intlist.default _test_optional_floatlist.default
    _test_optional_intlist.default _upsample_lanczos2d_aa_backward.grad_input
    _weight_int4pack_mm_for_cpu.default from_file.default histogram.bin_ct histogram.bins_tensor
    mkldnn_rnn_layer.default mkldnn_rnn_layer_backward.default quantize_per_tensor.tensors quantized_gru.data
    quantized_gru.data_legacy quantized_gru.input quantized_gru.input_legacy quantized_lstm.data
    quantized_lstm.data_legacy quantized_lstm.input quantized_lstm.input_legacy slow_conv3d_forward.default
    slow_conv3d_forward.output to_mkldnn.default
"""

HOST_ONLY = frozenset(f"aten.{name}" for name in _NAMES.split())


def host_only() -> frozenset[str]:
    """What :data:`HOST_ONLY` has to be on this build of torch, which has to be one for CUDA."""
    everywhere = (
        "CUDA",
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if (
            namespace == "aten"
            and not name.endswith("out")
            and _has(full, "CPU")
            and not any(_has(full, k) for k in everywhere)
        ):
            found.append(f"aten.{name}" if "." in name else f"aten.{name}.default")
    return frozenset(found)


def _has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
