"""torchvision's Mask R-CNN on Vim-T: one training step, and a prediction, on random images.

python examples/torchvision_mask_rcnn.py --arch tiny --size 224
"""

import argparse
from collections import OrderedDict

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import vim_mm  # noqa: F401  registers vim_* with timm


class Pyramid(nn.Module):
    """Named maps of strides 4, 8, 16 and 32, as torchvision's detectors expect them."""

    out_channels = 256

    def __init__(self, size: str, **arguments):
        super().__init__()
        name = f'vim_{size}_patch16_224_pyramid'
        self.vim = timm.create_model(
            name, features_only=True, pyramid_channels=self.out_channels, **arguments
        )

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        """Images (B, 3, H, W) to a map for each stride."""
        return OrderedDict(zip(map(str, self.vim.feature_info.reduction()), self.vim(images)))


def mask_rcnn(size: str, num_classes: int, pixels: int, **arguments) -> MaskRCNN:
    """Mask R-CNN; class 0 of ``num_classes`` is the background."""
    backbone = Pyramid(size, **arguments)
    strides = [str(stride) for stride in backbone.vim.feature_info.reduction()]
    return MaskRCNN(
        backbone,
        num_classes,
        min_size=pixels,
        max_size=2 * pixels,
        rpn_anchor_generator=AnchorGenerator(
            sizes=((32,), (64,), (128,), (256,)), aspect_ratios=((0.5, 1.0, 2.0),) * 4
        ),
        box_roi_pool=MultiScaleRoIAlign(strides, output_size=7, sampling_ratio=2),
        mask_roi_pool=MultiScaleRoIAlign(strides, output_size=14, sampling_ratio=2),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='tiny', choices=['tiny', 'small', 'base'])
    parser.add_argument('--method', default='zoh', help='discretization (default: %(default)s)')
    parser.add_argument('--size', type=int, default=224, help='pixels (default: %(default)s)')
    args = parser.parse_args()

    model = mask_rcnn(args.arch, 3, args.size, discretization_method=args.method)
    images = [torch.rand(3, args.size, args.size) for _ in range(2)]
    mask = torch.zeros(1, args.size, args.size, dtype=torch.uint8)
    mask[:, 20:100, 30:90] = 1
    target = dict(boxes=torch.tensor([[30.0, 20, 90, 100]]), labels=torch.tensor([1]), masks=mask)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = model(images, [target, target])
    sum(losses.values()).backward()
    optimizer.step()
    print(*(f'{name} {value:.3f}' for name, value in losses.items()))

    with torch.no_grad():
        prediction = model.eval()(images[:1])[0]
    print(f'{len(prediction["boxes"])} objects')


if __name__ == '__main__':
    main()
