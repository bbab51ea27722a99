"""A ViT of timm in which one block is a Vim block: one training step on random images.

python examples/timm_vit_with_a_vim_block.py --block 5 --method foh
"""

import argparse

import timm
import torch
from torch import Tensor, nn

from vim_mm import Mamba
from vim_mm.ops import METHODS


class VimBlock(nn.Module):
    """A mixer in both directions where a block of ViT has attention and MLP."""

    def __init__(self, dim: int, method: str):
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.mixer = Mamba(dim, discretization_method=method)

    def forward(self, x: Tensor, **_) -> Tensor:
        """Tokens (B, L, C), class token first, to the same shape."""
        return x + self.mixer(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--model', default='vit_tiny_patch16_224', help='(default: %(default)s)')
    parser.add_argument('--block', type=int, default=5, help='its number (default: %(default)s)')
    parser.add_argument('--method', default='zoh', choices=METHODS)
    args = parser.parse_args()

    model = timm.create_model(args.model, num_classes=10)
    model.blocks[args.block] = VimBlock(model.embed_dim, args.method)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    logits = model(torch.randn(2, 3, 224, 224))
    loss = nn.functional.cross_entropy(logits, torch.tensor([3, 7]))
    loss.backward()
    optimizer.step()
    print(f'loss {loss:.3f}')


if __name__ == '__main__':
    main()
