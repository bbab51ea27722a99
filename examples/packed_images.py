"""A classifier trained on images of mixed sizes that are packed into common rows, not padded.

python examples/packed_images.py --images 8 --rows 2
"""

import argparse
import random

import torch
from torch import nn

from vim_mm.timm_models import VisionMambaClassifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=8, help='(default: %(default)s)')
    parser.add_argument('--rows', type=int, default=1, help='(default: %(default)s)')
    parser.add_argument('--depth', type=int, default=4, help='layers (default: %(default)s)')
    parser.add_argument('--device', default='cpu')
    args = parser.parse_args()

    sizes = [(random.randrange(64, 257), random.randrange(64, 257)) for _ in range(args.images)]
    images = [torch.randn(3, *size, device=args.device) for size in sizes]
    labels = torch.randint(10, (args.images,), device=args.device)
    model = VisionMambaClassifier(depth=args.depth, num_classes=10).to(args.device)

    largest = max(h for h, _ in sizes), max(w for _, w in sizes)
    patches = [model.patch_embed.grid(size) for size in sizes]
    padded = len(images) * model.patch_embed.grid(largest)[0] * model.patch_embed.grid(largest)[1]
    print(f'{sum(h * w for h, w in patches)} patches, of a padded batch {padded}')

    model.eval()
    with torch.no_grad():
        packed = torch.cat(model.forward_packed(images, args.rows))
        alone = torch.cat([model(image[None]) for image in images])
    print(f'largest difference from each image alone: {(packed - alone).abs().max():.1e}')

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        logits = torch.cat(model.forward_packed(images, args.rows))
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f'step {step}: loss {loss:.3f}')


if __name__ == '__main__':
    main()
