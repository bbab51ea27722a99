"""Small models of both tasks, and videos whose frames tell their number."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from tests.tools.conftest import configs  # noqa: F401  fixture

WIDTH, HEIGHT = 96, 64
BITS = 6  # of the number that a frame shows


@dataclass
class Task:
    """A config, its model with weights that tell pictures apart, and these weights as a file."""

    config: Path
    cfg: object
    model: nn.Module
    transforms: list
    checkpoint: Path


def make_task(name: str, config: Path, folder: Path) -> Task:
    from mmengine.dataset import Compose
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import MODELS, init_default_scope
    from mmengine.runner import save_checkpoint

    from vim_mm.engine.cli import read_config
    from vim_mm.stream.models import for_stream

    cfg = read_config(Namespace(config=str(config), cfg_options={}))
    for_stream(cfg)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = revert_sync_batchnorm(MODELS.build(cfg.model)).eval()
    if name == 'seg':
        nn.init.normal_(model.decode_head.conv_seg.weight, std=1.0)
    checkpoint = folder / f'{name}.pth'
    save_checkpoint({'state_dict': model.state_dict(), 'meta': {}}, str(checkpoint))
    pipeline = cfg.test_dataloader.dataset.pipeline
    transforms = Compose([t for t in pipeline if 'LoadAnnotations' not in t.type]).transforms
    return Task(config, cfg, model, transforms, checkpoint)


@pytest.fixture(scope='session')
def seg(configs, tmp_path_factory) -> Task:  # noqa: F811
    pytest.importorskip('mmseg')
    return make_task('seg', configs['seg'], tmp_path_factory.mktemp('seg'))


@pytest.fixture(scope='session')
def det(configs, tmp_path_factory) -> Task:  # noqa: F811
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    return make_task('det', configs['det'], tmp_path_factory.mktemp('det'))


def draw(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A disc that moves, over a gradient; the upper edge has the bits of the frame's number."""
    column = np.linspace(40, 160, width, dtype=np.uint8)
    picture = np.repeat(np.repeat(column[None], height, 0)[..., None], 3, 2).copy()
    centre = (10 + 2 * number % (width - 20), height * 2 // 3)
    cv2.circle(picture, centre, height // 6, (40, 200, 250), cv2.FILLED)
    for bit in range(BITS):
        value = 255 if number >> bit & 1 else 0
        picture[: height // 4, bit * width // BITS : (bit + 1) * width // BITS] = value
    return picture


def number_of(picture: np.ndarray) -> int:
    """The number that a frame shows, encoded or not."""
    height, width = picture.shape[:2]
    places = [(2 * bit + 1) * width // (2 * BITS) for bit in range(BITS)]
    return sum(int(picture[height // 8, x].mean() > 127) << bit for bit, x in enumerate(places))


def write_video(path: Path, frames: int, rate: float = 12.0, codec: str = 'MJPG') -> Path:
    fourcc = cv2.VideoWriter_fourcc(*codec)
    writer = cv2.VideoWriter(str(path), cv2.CAP_FFMPEG, fourcc, rate, (WIDTH, HEIGHT))
    assert writer.isOpened()
    for number in range(frames):
        writer.write(draw(number))
    writer.release()
    return path


def damage(path: Path) -> Path:
    """Overwrite a tenth of a file, in its middle."""
    data = bytearray(path.read_bytes())
    middle, length = len(data) // 2, len(data) // 10
    data[middle : middle + length] = np.random.default_rng(0).bytes(length)
    path.write_bytes(data)
    return path


def read_video(path: Path) -> tuple[list[np.ndarray], float]:
    """All frames of a file and its rate."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (read := capture.read())[0]:
        frames.append(read[1])
    return frames, capture.get(cv2.CAP_PROP_FPS)
