"""Other people's models of about the study's size, to stand beside its methods."""

from collections.abc import Callable

from timm.models.resnet import BasicBlock, ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from studies.discretization.models.arms import Size


def deit(size: Size, drop_path: float) -> nn.Module:
    """A plain vision transformer of the width, depth and tokens of the study's Vim, by timm.

    DeiT's block, heads of 64 channels; the mean over tokens, as the study's models, no class token.
    """
    return VisionTransformer(
        img_size=size.image,
        patch_size=size.patch,
        in_chans=1,
        num_classes=size.outputs,
        embed_dim=size.channels,
        depth=size.layers,
        num_heads=max(1, size.channels // 64),
        class_token=False,
        global_pool='avg',
        drop_path_rate=drop_path,
    )


def resnet18(size: Size, drop_path: float) -> nn.Module:
    """ResNet-18 by timm, with the stem for small images: a convolution of 3 x 3, no pooling."""
    del drop_path  # the published model has none
    net = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=size.outputs, in_chans=1)
    net.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode='fan_out', nonlinearity='relu')
    net.maxpool = nn.Identity()
    return net


PEERS: dict[str, Callable[[Size, float], nn.Module]] = {'deit': deit, 'resnet18': resnet18}
