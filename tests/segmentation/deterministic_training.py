"""Trains UPerNet Vim-T for some iterations on random pictures, and prints a digest of its weights.

    python -m tests.segmentation.deterministic_training --size 512 --batch 4

With ``--nondeterministic``, without asking for determinism: digests then differ on a GPU. With
``--compile`` as ``tools/train.py --graph --compile`` trains.
"""

import argparse
import hashlib
import os
import warnings

import torch
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import set_random_seed

from vim_mm.config import config_path
from vim_mm.engine import BFloat16OptimWrapper
from vim_mm.engine.mmengine_patches import activate
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.graphed_step import GraphedStep


def digest_of_training(
    size: int,
    batch: int,
    steps: int,
    deterministic: bool,
    img_size: int,
    device: str,
    compiled: bool,
) -> str:
    """SHA-256 of all parameters and buffers after the last step, and the losses."""
    activate()  # MMPretrain is imported by MMSegmentation, and needs it beside transformers 5
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    set_random_seed(0, deterministic)
    init_default_scope('mmseg')
    cfg = Config.fromfile(config_path('seg/upernet_vim_t_zoh.py')).model
    cfg.backbone.img_size = img_size
    cfg.data_preprocessor.size = (size, size)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        model = revert_sync_batchnorm(MODELS.build(cfg)).to(device).train()
    wrapper = BFloat16OptimWrapper(torch.optim.AdamW(model.parameters(), lr=1e-3))
    wrapper.initialize_count_status(model, 0, steps)
    step = model.train_step
    if compiled:
        CompiledParts(model, wrapper)
        step = GraphedStep(model, compiled=True)
    losses = []
    for _ in range(steps):
        labels = torch.randint(0, 150, (batch, 1, size // 8, size // 8))
        labels = labels.repeat_interleave(8, 2).repeat_interleave(8, 3)
        labels[:, :, :4] = 255
        meta = dict(img_shape=(size, size), ori_shape=(size, size))
        data = dict(
            inputs=[torch.randint(0, 256, (3, size, size), dtype=torch.uint8) for _ in labels],
            data_samples=[
                SegDataSample(gt_sem_seg=PixelData(data=label), metainfo=meta) for label in labels
            ],
        )
        losses.append(float(step(data, wrapper)['loss'].detach()))
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return f'{digest.hexdigest()} {" ".join(f"{loss:.9g}" for loss in losses)}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--size', type=int, default=512)
    parser.add_argument('--img-size', type=int, help='of the position embedding; default: --size')
    parser.add_argument('--batch', type=int, default=4)
    parser.add_argument('--steps', type=int, default=6)
    parser.add_argument('--device', default=get_device())
    parser.add_argument('--nondeterministic', action='store_true')
    parser.add_argument('--compile', action='store_true')
    args = parser.parse_args()
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
    print(
        digest_of_training(
            args.size,
            args.batch,
            args.steps,
            not args.nondeterministic,
            args.img_size or args.size,
            args.device,
            args.compile,
        )
    )


if __name__ == '__main__':
    main()
