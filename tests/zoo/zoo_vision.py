"""Models of images and videos, built from torchvision and timm, and small: little images, few and narrow layers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from zoo_rows import Batch, Row, images, library

__all__ = ["VISION"]


# torchvision


def models(file: str = "") -> Any:
    """torchvision's models, or one of the files that define them."""
    found = library("torchvision").models
    return importlib.import_module(f"torchvision.models.{file}") if file else found


def resnet() -> nn.Module:
    return models("resnet").ResNet(models("resnet").BasicBlock, [1, 1, 1, 1], num_classes=10)


def resnext() -> nn.Module:
    block = models("resnet").Bottleneck
    return models("resnet").ResNet(block, [1, 1, 1, 1], num_classes=10, groups=2, width_per_group=4)


def densenet() -> nn.Module:
    return models().DenseNet(4, (2, 2, 2), num_init_features=8, bn_size=2, drop_rate=0.1, num_classes=10)


def checkpointed_densenet() -> nn.Module:
    return models().DenseNet(4, (2, 2), num_init_features=8, bn_size=2, num_classes=10, memory_efficient=True)


def efficientnet(fused: bool) -> nn.Module:
    efficientnet = models("efficientnet")
    first = efficientnet.FusedMBConvConfig if fused else efficientnet.MBConvConfig
    settings = [first(4, 3, 1, 8, 8, 1), efficientnet.MBConvConfig(4, 5, 2, 8, 16, 2)]
    return efficientnet.EfficientNet(settings, dropout=0.2, num_classes=10, last_channel=32)


def convnext() -> nn.Module:
    settings = [models("convnext").CNBlockConfig(8, 16, 2), models("convnext").CNBlockConfig(16, None, 1)]
    return models().ConvNeXt(settings, stochastic_depth_prob=0.2, num_classes=10)


def mobilenet_v2() -> nn.Module:
    settings = [[1, 8, 1, 1], [6, 16, 2, 2]]
    return models().MobileNetV2(num_classes=10, width_mult=0.25, inverted_residual_setting=settings)


def mobilenet_v3() -> nn.Module:
    layer = partial(models("mobilenetv3").InvertedResidualConfig, width_mult=1.0, dilation=1)
    settings = [
        layer(8, 3, 8, 8, True, "RE", 2),
        layer(8, 3, 16, 16, False, "HS", 2),
        layer(16, 5, 32, 16, True, "HS", 1),
    ]
    return models().MobileNetV3(settings, last_channel=32, num_classes=10)


def thin(conv: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Convolutions with an eighth of the channels."""
    return lambda n, m, **options: conv(n if n == 3 else n // 8, m // 8, **options)


def inception_v3() -> nn.Module:
    """Without blocks that repeat the one before, and with an auxiliary head for smaller images."""
    inception = models("inception")
    conv = thin(inception.BasicConv2d)
    blocks = [inception.InceptionA, inception.InceptionB, inception.InceptionC, inception.InceptionD]
    blocks = [partial(block, conv_block=conv) for block in [*blocks, inception.InceptionE, inception.InceptionAux]]
    model = models().Inception3(num_classes=10, init_weights=False, inception_blocks=[conv, *blocks])
    model.Mixed_5d = model.Mixed_6c = model.Mixed_6d = model.Mixed_6e = model.Mixed_7c = nn.Identity()
    model.AuxLogits.conv1 = conv(128, 768, kernel_size=1)
    model.fc, model.AuxLogits.fc = nn.Linear(256, 10), nn.Linear(96, 10)
    return model


def googlenet() -> nn.Module:
    """Without blocks that repeat the one before."""
    googlenet = models("googlenet")
    conv = thin(googlenet.BasicConv2d)
    auxiliary = googlenet.InceptionAux

    def block(*channels: int) -> nn.Module:
        return googlenet.Inception(*channels, conv_block=conv)

    def aux(channels: int, classes: int, dropout: float) -> nn.Module:
        made = auxiliary(channels, classes, conv, dropout)
        made.fc1, made.fc2 = nn.Linear(256, 32), nn.Linear(32, classes)
        return made

    model = models().GoogLeNet(num_classes=10, init_weights=False, blocks=[conv, block, aux])
    model.inception4b = model.inception4c = model.inception5a = nn.Identity()
    model.fc = nn.Linear(128, 10)
    return model


def shufflenet() -> nn.Module:
    return models().ShuffleNetV2([2, 2, 2], [8, 16, 32, 32, 64], num_classes=10)


def mnasnet() -> nn.Module:
    """With two blocks a stack."""
    model = models().MNASNet(0.1, num_classes=10)
    for stack in range(8, 14):
        model.layers[stack] = model.layers[stack][:2]
    return model


def regnet() -> nn.Module:
    params = models("regnet").BlockParams([1, 2], [8, 16], [4, 8], [1.0, 1.0], [2, 2], se_ratio=0.25)
    return models().RegNet(params, num_classes=10, stem_width=8)


def headed(features: list[int | str]) -> nn.Module:
    """A narrow VGG."""
    model = models().VGG(models("vgg").make_layers(features, batch_norm=True), init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    width = next(n for n in reversed(features) if isinstance(n, int))
    model.classifier = nn.Sequential(nn.Linear(4 * width, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 10))
    return model


def alexnet() -> nn.Module:
    model = models().AlexNet(num_classes=10)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Dropout(), nn.Linear(256, 16), nn.ReLU(inplace=True), nn.Linear(16, 10))
    return model


def vit() -> nn.Module:
    return models().VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, dropout=0.1, num_classes=10
    )


def swin(version: int) -> nn.Module:
    swin = models("swin_transformer")
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if version == 2 else {}
    return swin.SwinTransformer(
        [2, 2], 8, [2, 2], [2, 2], [4, 4], dropout=0.1, stochastic_depth_prob=0.2, num_classes=10, **second
    )


def maxvit() -> nn.Module:
    return models().MaxVit((32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.2, num_classes=10)


def backbone(stages: Mapping[str, str]) -> nn.Module:
    return models("_utils").IntermediateLayerGetter(mobilenet_v2().features, stages)


def segmentation(kind: str) -> nn.Module:
    module = models("segmentation")
    if kind == "lraspp":
        return module.LRASPP(backbone({"1": "low", "3": "high"}), 8, 8, num_classes=5, inter_channels=16)
    stages, aux = backbone({"1": "aux", "3": "out"}), module.fcn.FCNHead(8, 5)
    if kind == "fcn":
        return module.FCN(stages, module.fcn.FCNHead(8, 5), aux)
    return module.DeepLabV3(stages, module.deeplabv3.DeepLabHead(8, 5, atrous_rates=(2, 4)), aux)


def labelled_pixels(n: int) -> Batch:
    return Batch((torch.randn(n, 3, 32, 32),), (torch.randint(5, (n, 32, 32)),))


def segmentation_loss(output: Mapping[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    return {name: F.cross_entropy(logits, target) for name, logits in output.items()}


def video_resnet(factorized: bool) -> nn.Module:
    resnet = models("video.resnet")
    convs = [resnet.Conv2Plus1D if factorized else resnet.Conv3DSimple] * 4
    model = resnet.VideoResNet(resnet.BasicBlock, convs, [1, 1, 1, 1], resnet.BasicStem, num_classes=10)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, 10)
    return model


def swin3d() -> nn.Module:
    return models("video.swin_transformer").SwinTransformer3d(
        [2, 4, 4], 8, [2, 2], [2, 2], [2, 4, 4], stochastic_depth_prob=0.2, num_classes=10
    )


def mvit() -> nn.Module:
    mvit = models("video.mvit")
    config = mvit.MSBlockConfig
    blocks = [
        config(2, 8, 16, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3], stride_q=[1, 2, 2], stride_kv=[1, 2, 2]),
        config(2, 16, 16, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3], stride_q=[1, 1, 1], stride_kv=[1, 2, 2]),
    ]
    return mvit.MViT((16, 16), 4, blocks, residual_pool=True, residual_with_cls_embed=False, rel_pos_embed=True,
                     proj_after_attn=True, stochastic_depth_prob=0.2, num_classes=10)  # fmt: skip


def clips(n: int) -> Batch:
    return Batch((torch.randn(n, 3, 4, 16, 16),), (torch.randint(10, (n,)),))


def every_head(output: Any, target: Tensor) -> dict[str, Tensor]:
    """The classifiers' losses, the auxiliary ones less."""
    logits, *auxiliary = pytree.tree_leaves(output)
    return {"main": F.cross_entropy(logits, target)} | {
        f"aux{i}": 0.3 * F.cross_entropy(aux, target) for i, aux in enumerate(auxiliary)
    }


def classifier(model: Callable[[], nn.Module], pixels: int, size: int = 2, fixed: str = "") -> Row:
    return Row(model, images(pixels), F.cross_entropy, size, fixed)


TORCHVISION: dict[str, Row] = {
    "alexnet": classifier(alexnet, 64),
    "convnext": classifier(convnext, 32),
    "densenet": classifier(densenet, 32),
    "densenet, checkpointed": classifier(checkpointed_densenet, 32),
    "efficientnet": classifier(partial(efficientnet, False), 32),
    "efficientnet v2": classifier(partial(efficientnet, True), 32),
    "googlenet": Row(googlenet, images(64), every_head),
    "inception v3": Row(inception_v3, images(107), every_head),
    "maxvit": classifier(maxvit, 32),
    "mnasnet": classifier(mnasnet, 32),
    "mobilenet v2": classifier(mobilenet_v2, 32),
    "mobilenet v3": classifier(mobilenet_v3, 32),
    "regnet": classifier(regnet, 32),
    "resnet": classifier(resnet, 32),
    "resnext": classifier(resnext, 32),
    "shufflenet": classifier(shufflenet, 32),
    "squeezenet": classifier(lambda: models().SqueezeNet("1_1", num_classes=10), 32),
    "swin": classifier(partial(swin, 1), 16),
    "swin v2": classifier(partial(swin, 2), 16),
    "vgg": classifier(partial(headed, [8, "M", 16, 16, "M"]), 16),
    "vision transformer": classifier(vit, 16),
    "deeplab v3": Row(partial(segmentation, "deeplab"), labelled_pixels, segmentation_loss),
    "fcn": Row(partial(segmentation, "fcn"), labelled_pixels, segmentation_loss),
    "lraspp": Row(partial(segmentation, "lraspp"), labelled_pixels, segmentation_loss),
    "mvit": Row(mvit, clips, F.cross_entropy),
    "r3d": Row(partial(video_resnet, False), clips, F.cross_entropy),
    "r(2+1)d": Row(partial(video_resnet, True), clips, F.cross_entropy),
    "swin3d": Row(swin3d, clips, F.cross_entropy),
}


VISION: dict[str, Row] = {**TORCHVISION}
