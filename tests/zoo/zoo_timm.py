"""One small model of many families of timm: names as timm knows them, with few and narrow layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor, nn
from zoo_rows import Row, images, library

__all__ = ["TIMM"]

_NARROW: Final[Mapping[str, tuple[int, Mapping[str, Any]]]] = {
    "beit_base_patch16_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "drop_path_rate": 0.2}),
    "cait_xxs24_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "depth_token_only": 1}),
    "davit_tiny": (32, {"depths": [1, 1], "embed_dims": [8, 16], "num_heads": [1, 2], "window_size": 2}),
    "deit_tiny_distilled_patch16_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}),
    "densenet121": (32, {"block_config": (2, 2), "growth_rate": 8}),
    "eva02_tiny_patch14_224": (28, {"img_size": 28, "embed_dim": 24, "depth": 2, "num_heads": 2}),
    "fasternet_t0": (64, {"depths": (1, 1, 1, 1), "embed_dim": 8}),
    "hiera_tiny_224": (64, {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": [1, 1, 1, 1]}),
    "inception_next_atto": (64, {"depths": [1, 1, 1, 1], "dims": [16, 16, 32, 32]}),
    "lcnet_035": (32, {}),
    "levit_128s": (
        64,
        {"img_size": 64, "embed_dim": [16, 16, 32], "key_dim": 8, "num_heads": [2, 2, 2], "depth": [1, 1, 1]},
    ),
    "mobilenetv4_conv_small_035": (32, {}),
    "pvt_v2_b0": (64, {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 2)}),
    "repvit_m0_9": (64, {"embed_dim": (8, 16, 24, 32), "depth": (1, 1, 1, 1)}),
    "resnest14d": (32, {"layers": [1, 1, 1, 1], "base_width": 8, "channels": (16, 32, 64, 64)}),
    "resnetv2_18": (32, {"layers": [1, 1, 1, 1], "channels": (16, 32, 64, 64)}),
    "samvit_base_patch16": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2, "window_size": 2}),
    "starnet_s050": (32, {}),
    "swin_tiny_patch4_window7_224": (
        32,
        {
            "img_size": 32,
            "embed_dim": 8,
            "depths": (2, 2),
            "num_heads": (2, 2),
            "window_size": 4,
            "drop_path_rate": 0.2,
        },
    ),
    "swinv2_cr_tiny_224": (
        32,
        {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "window_size": 4},
    ),
    "test_byobnet": (32, {}),
    "test_coatnet": (32, {"img_size": 32}),
    "test_efficientnet_evos": (32, {}),
    "test_mambaout": (32, {}),
    "test_nfnet": (32, {}),
    "test_vit3": (32, {"img_size": 32}),
    "test_vit_relpos": (32, {"img_size": 32}),
    "tnt_s_patch16_224": (
        32,
        {"img_size": 32, "embed_dim": 16, "inner_dim": 8, "depth": 1, "num_heads_outer": 2, "num_heads_inner": 2},
    ),
    "tresnet_m": (64, {"layers": [1, 1, 1, 1], "width_factor": 0.25}),
    "twins_svt_small": (
        64,
        {
            "img_size": 64,
            "embed_dims": (8, 16, 16, 32),
            "depths": (1, 1, 1, 1),
            "num_heads": (1, 2, 2, 2),
            "wss": (2, 2, 2, 2),
        },
    ),
    "visformer_tiny": (64, {"img_size": 64, "embed_dim": 32, "depth": (1, 1, 1), "num_heads": 2, "init_channels": 8}),
    "xcit_nano_12_p16_224": (32, {"img_size": 32, "embed_dim": 16, "depth": 2, "num_heads": 2}),
}
"""Models by name: pixels, and what is smaller than in the model of that name."""


def create(name: str, options: Mapping[str, Any]) -> nn.Module:
    return library("timm").create_model(name, num_classes=10, **options)  # type: ignore[no-any-return]


def models(file: str) -> Any:
    library("timm")
    return importlib.import_module(f"timm.models.{file}")


def mixer(kind: str) -> nn.Module:
    file = models("mlp_mixer")
    options: dict[str, dict[str, Any]] = {
        "mixer": {},
        "gmlp": {"block_layer": file.SpatialGatingBlock, "mlp_layer": file.GatedMlp, "mlp_ratio": 4},
        "resmlp": {"block_layer": file.ResBlock, "norm_layer": file.Affine, "mlp_ratio": 4},
    }
    return file.MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=16, **options[kind])  # type: ignore[no-any-return]


def written_out() -> dict[str, tuple[int, Callable[[], nn.Module]]]:
    """Families whose constructors timm's names don't let through: pixels, and the model."""
    return {
        "mixer": (32, partial(mixer, "mixer")),
        "gmlp": (32, partial(mixer, "gmlp")),
        "resmlp": (32, partial(mixer, "resmlp")),
        "convmixer": (28, lambda: models("convmixer").ConvMixer(16, 2, kernel_size=5, num_classes=10)),
        "crossvit": (32, lambda: models("crossvit").CrossVit(
            img_size=32, img_scale=(1.0, 1.0), patch_size=(8, 16), embed_dim=(16, 16), depth=((1, 1, 0),),
            num_heads=(2, 2), mlp_ratio=(2.0, 2.0, 1.0), num_classes=10)),
        "focalnet": (32, lambda: models("focalnet").FocalNet(num_classes=10, embed_dim=8, depths=(1, 1))),
        "nest": (32, lambda: models("nest").Nest(
            img_size=32, num_levels=2, embed_dims=(8, 16), num_heads=(1, 2), depths=(1, 1), num_classes=10)),
        "pit": (32, lambda: models("pit").PoolingVisionTransformer(
            img_size=32, patch_size=8, stride=4, stem_type="overlap", base_dims=(8, 8), depth=(1, 1), heads=(2, 2),
            mlp_ratio=2, num_classes=10)),
        "poolformer": (32, lambda: models("metaformer").MetaFormer(
            depths=(1, 1), dims=(8, 16), token_mixers=models("metaformer").Pooling, num_classes=10)),
        "volo": (32, lambda: models("volo").VOLO(
            (1, 1), img_size=32, patch_size=4, stem_hidden_dim=8, embed_dims=(16, 16), num_heads=(2, 2),
            downsamples=(True, False), outlook_attention=(True, False), num_classes=10)),
    }  # fmt: skip


def every_output(output: Tensor | tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Cross entropy of a classifier, or of one with a distilled head."""
    return F.cross_entropy(output if isinstance(output, Tensor) else sum(output[1:], output[0]), target)


TIMM: dict[str, Row] = {
    **{
        f"timm {name}": Row(partial(create, name, options), images(pixels), every_output)
        for name, (pixels, options) in _NARROW.items()
    },
    **{f"timm {name}": Row(make, images(pixels), every_output) for name, (pixels, make) in written_out().items()},
}
