"""The tasks: data as tensors on the device, the plan of augmentation, the loss and the metric."""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from studies.discretization.cues import CLASSES as CUE_CLASSES
from studies.discretization.cues import PATCH as CUE_PATCH
from studies.discretization.cues import SIDE as CUE_SIDE
from studies.discretization.cues import UNLABELED, draw_cues
from studies.discretization.models.arms import (
    AGAIN,
    ARMS,
    PUBLISHED,
    ROUND_ONE,
    SPACED,
    Net,
    Size,
    at_spacing,
    width_at,
)
from studies.discretization.models.other_models import PEERS
from vim_mm.datasets.garments import GARMENTS, load_garments
from vim_mm.datasets.scenes import SCENE_CLASSES, Garments, scene
from vim_mm.ops import METHODS
from vim_mm.progress import progress
from vim_mm.whole_file import whole_file

MEAN, STD = 0.3, 0.35  # of grey levels in 0 to 1, roughly those of Fashion-MNIST
RESOLUTION_SCENES = 500
HELD_OUT = 10_000  # of the training images, for choosing settings
ARMS_AND_PEERS = (*ARMS, *PEERS)
# What primary tasks have beyond round one.
SECOND = (*(f'{name}_published' for name in PUBLISHED), *AGAIN)


@dataclass(frozen=True)
class Task:
    """What is learned, how long, and from how much.

    Attributes:
        name (str): Folder of its results.
        metric (str): What is reported, in percent.
        size (Size): Of the model.
        classes (int): Number of classes.
        dense (bool): Whether pixels have labels, 255 for those that do not count.
        steps (int): Of training.
        batch (int): Images of a step.
        counts (tuple): Training and test images.
        test_batch (int): Images of a batch of the test.
        shift (int): Greatest shift of augmentation in pixels, along each axis.
        flip (bool): Whether augmentation flips half of the images.
        factors (tuple): Of enlargement, for the test at other resolutions.
        spacings (tuple): Horizontal distances of patches in pixels, for the test at these; the
            first is the greatest.
        erase (tuple): Least and greatest side in pixels of the rectangle that augmentation greys in
            half of the images; empty for none.
        arms (tuple): Names in ``ARMS`` and ``PEERS`` of what runs.
        seeds (int): Of each arm; the first ones.
        peer_seeds (int): Of each of ``PEERS``.
        first_seed (int): Of those.
        held_out (bool): Whether settings are chosen by it: the test images are the last
            ``HELD_OUT`` training images, and training has the others alone.
    """

    name: str
    metric: str
    size: Size
    classes: int
    dense: bool
    steps: int
    batch: int
    counts: tuple[int, int]
    test_batch: int
    shift: int = 0
    flip: bool = True
    factors: tuple[float, ...] = ()
    spacings: tuple[int, ...] = ()
    erase: tuple[int, ...] = ()
    arms: tuple[str, ...] = (*ROUND_ONE,)
    seeds: int = 12
    peer_seeds: int = 3
    first_seed: int = 0
    held_out: bool = False

    def planned_seeds(self, arm: str) -> range:
        """The seeds of the protocol."""
        count = self.peer_seeds if arm in PEERS else self.seeds
        return range(self.first_seed, self.first_seed + count)


TASKS = {
    task.name: task
    for task in (
        Task('fashion', 'accuracy', Size(28, 2, len(GARMENTS)), len(GARMENTS), False,
             steps=2340, batch=256, counts=(60_000, 10_000), test_batch=1000, shift=2,
             arms=(*ROUND_ONE, *SECOND, *PEERS)),
        Task('long', 'accuracy', Size(28, 2, len(GARMENTS), layers=7), len(GARMENTS), False,
             steps=23_400, batch=256, counts=(60_000, 10_000), test_batch=1000, shift=2,
             erase=(4, 14), arms=('zoh',), seeds=1),
        Task('scenes', 'mIoU', Size(128, 4, 16 * len(SCENE_CLASSES)), len(SCENE_CLASSES), True,
             steps=4000, batch=32, counts=(8_000, 2_000), test_batch=100, factors=(1.5, 2.0),
             arms=(*ROUND_ONE, *SECOND)),
        Task('spacing', 'mIoU', Size(128, 4, 16 * len(SCENE_CLASSES)), len(SCENE_CLASSES), True,
             steps=4000, batch=32, counts=(8_000, 2_000), test_batch=100, spacings=(8, 4, 2),
             arms=(*SPACED, 'exp_trapezoidal_channel', 'exp_trapezoidal_token'), seeds=16),
        # Two seeds choose the best setting of each method; they enter no comparison.
        Task('select-fashion', 'accuracy', Size(28, 2, len(GARMENTS)), len(GARMENTS), False,
             steps=2340, batch=256, counts=(50_000, HELD_OUT), test_batch=1000, shift=2,
             arms=(*METHODS,), seeds=2, first_seed=100, held_out=True),
        Task('select-scenes', 'mIoU', Size(128, 4, 16 * len(SCENE_CLASSES)), len(SCENE_CLASSES),
             True, steps=4000, batch=32, counts=(8_000, 2_000), test_batch=100,
             arms=(*METHODS,), seeds=2, first_seed=100, held_out=True),
        Task('recall', 'accuracy',
             Size(CUE_SIDE, CUE_PATCH, CUE_PATCH**2 * CUE_CLASSES, channels=64, layers=2),
             CUE_CLASSES, True,
             steps=4000, batch=64, counts=(32_000, 2_000), test_batch=500,
             flip=False, arms=(*METHODS, 'foh_matched')),
    )
}  # fmt: skip


@dataclass
class Split:
    """Images (N, H, W) uint8 and labels, (N,) or per pixel (N, H, W), uint8."""

    images: np.ndarray
    labels: np.ndarray

    def digest(self) -> str:
        """Names the data in a result."""
        content = self.images.tobytes() + self.labels.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]


def load_splits(task: Task, source: Path, cache: Path) -> list[Split]:
    """Training and test data of a task.

    Args:
        task (Task): The task.
        source (Path): Folder of Fashion-MNIST's files.
        cache (Path): Folder in which scenes are kept; drawn where they are missing.
    """
    splits = []
    for split, count in zip(('train', 'test'), task.counts):
        if task.name == 'recall':
            splits.append(Split(*draw_cues(split, count)))
            continue
        if not task.dense:
            images, labels = load_part(task, source, split)
            splits.append(Split(images[:count], labels[:count]))
            continue
        # Scenes of the same garments are the same, whatever the task does with them.
        name = 'select-scenes' if task.held_out else 'scenes'
        file = cache / f'{name}_{split}_{count}_{task.size.image}.npz'
        if not file.exists():
            _draw_scenes(file, task, source, split, count)
        with np.load(file) as arrays:
            splits.append(Split(arrays['images'], arrays['labels']))
    return splits


def load_part(task: Task, source: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Garments for the training or the test of a task, (N, 28, 28) and (N,).

    Of a task that chooses settings both are training images of the data set.
    """
    images, labels = load_garments(source, 'train' if task.held_out else split)
    if task.held_out:
        kept = slice(None, -HELD_OUT) if split == 'train' else slice(-HELD_OUT, None)
        images, labels = images[kept], labels[kept]
    return images, labels


def _draw_scenes(file: Path, task: Task, source: Path, split: str, count: int) -> None:
    garments, side = Garments(*load_part(task, source, split)), task.size.image
    draw = partial(_scene_arrays, split=split, garments=garments, side=side)
    chunks = np.array_split(np.arange(count), min(count, 4 * (os.cpu_count() or 1)))
    with ProcessPoolExecutor() as pool:
        drawn = progress(pool.map(draw, chunks), f'{split} scenes', len(chunks))
        images, labels = zip(*drawn)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as part, part.open('wb') as arrays:  # savez adds .npz to a name
        np.savez(arrays, images=np.concatenate(images), labels=np.concatenate(labels))


def _scene_arrays(indices, split, garments, side):
    scenes = [scene(0, split, int(i), garments, (side, side)) for i in indices]
    images = np.stack([s.image[..., 0] for s in scenes])
    return images, np.stack([s.seg_map - 1 for s in scenes])


class Data:
    """A task's splits on a device."""

    def __init__(self, task: Task, splits: list[Split], device: torch.device):
        train, test = splits
        self.task = task
        self.digest = {'train': train.digest(), 'test': test.digest()}
        shift = task.shift
        padded = np.pad(train.images, ((0, 0), (shift, shift), (shift, shift)))
        self.images = torch.from_numpy(padded).to(device)
        self.labels = torch.from_numpy(train.labels.copy()).to(device)
        self.test_images = torch.from_numpy(test.images.copy()).to(device)
        self.test_labels = torch.from_numpy(test.labels.copy()).to(device)
        self.pixels = torch.arange(task.size.image, device=device)

    def plan(self, seed: int, steps: int) -> Tensor:
        """What every step takes: (steps, batch, 4) of index, flip, and shift along both axes.

        Of a task that erases, (steps, batch, 8): also the first row of a rectangle and that behind
        its last, and its columns likewise.

        Follows from the seed alone, drawn on the CPU so that every card has the same.
        """
        generator = torch.Generator().manual_seed(seed)
        task, count = self.task, len(self.images)
        per_epoch = count // task.batch
        epochs = -(-steps // per_epoch)
        order = torch.cat(
            [
                torch.randperm(count, generator=generator)[: per_epoch * task.batch]
                for _ in range(epochs)
            ]
        )
        order = order[: steps * task.batch]
        flips = torch.randint(2, order.shape, generator=generator) * task.flip
        shifts = torch.randint(2 * task.shift + 1, (*order.shape, 2), generator=generator)
        columns = [torch.stack([order, flips], 1), shifts]
        if task.erase:
            low, high = task.erase
            sides = torch.randint(low, high + 1, (*order.shape, 2), generator=generator)
            sides *= torch.randint(2, (*order.shape, 1), generator=generator)
            room = task.size.image - sides + 1
            first = (torch.rand(room.shape, generator=generator) * room).long()
            columns += [torch.stack([first, first + sides], 2).flatten(1)]
        plan = torch.cat(columns, dim=1)
        return plan.view(steps, task.batch, -1).to(self.pixels.device)

    def take(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Images (B, 1, H, W) float32 and labels of one row (B, 4 or 8) of the plan."""
        index, flip, down, right = step[:, :4].unbind(1)
        last = self.task.size.image - 1
        columns = torch.where(flip[:, None] > 0, last - self.pixels, self.pixels)
        rows = self.pixels.expand(len(step), -1)
        index = index[:, None, None]
        at = (rows + down[:, None])[:, :, None], (columns + right[:, None])[:, None, :]
        images = normalize(self.images[(index, *at)])
        if self.task.erase:
            top, bottom, left, end = step[:, 4:, None].unbind(1)
            in_rows = (self.pixels >= top) & (self.pixels < bottom)
            in_columns = (self.pixels >= left) & (self.pixels < end)
            erased = in_rows[:, None, :, None] & in_columns[:, None, None, :]
            images = images.masked_fill(erased, 0.0)
        if not self.task.dense:
            return images, self.labels[index[:, 0, 0]].long()
        return images, self.labels[index, rows[:, :, None], columns[:, None, :]].long()


def normalize(images: Tensor) -> Tensor:
    """(B, H, W) grey levels of 0 to 255 to (B, 1, H, W) float32."""
    return ((images.float() / 255 - MEAN) / STD).unsqueeze(1)


def by_token(labels: Tensor, patch: int) -> Tensor:
    """Labels (B, H, W) as (B, L, patch²), the pixels of each token."""
    blocks = labels.unflatten(2, (-1, patch)).unflatten(1, (-1, patch)).transpose(2, 3)
    return blocks.flatten(3).flatten(1, 2)


def loss_of(task: Task, outputs: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy, the mean over images or pixels, in float32."""
    if task.dense:
        labels = by_token(labels, task.size.patch)
    outputs = outputs.float().reshape(-1, task.classes)
    return F.cross_entropy(outputs, labels.reshape(-1), ignore_index=UNLABELED)


def mean_iou(confusion: Tensor) -> float:
    """Mean over classes of intersection over union, in percent, of counts (truth, prediction).

    A class that neither is there nor is predicted does not count.
    """
    hits = confusion.diag()
    union = confusion.sum(0) + confusion.sum(1) - hits
    return 100 * (hits / union)[union > 0].mean().item()


@torch.no_grad()
def test(
    task: Task,
    net: Net,
    images: Tensor,
    labels: Tensor,
    autocast: torch.autocast,
    columns: range | None = None,
) -> float:
    """The metric in percent, of uint8 images (N, H, W) with labels; leaves the net in training.

    With ``columns``, of these columns of patches alone, as they are numbered in training. The net
    may have more or fewer columns, in which these are evenly spread from the first on.
    """
    net.eval()
    confusion = torch.zeros(task.classes**2, dtype=torch.float64, device=images.device)
    for some, truth in zip(images.split(task.test_batch), labels.split(task.test_batch)):
        with autocast:
            outputs = net(normalize(some)).float()
        if task.dense:
            truth = by_token(truth, task.size.patch)
            outputs = outputs.unflatten(2, (-1, task.classes))
        if columns is not None:
            rows, across = task.size.image // task.size.patch, len(columns)
            shape = (rows, outputs.shape[1] // rows)
            outputs = outputs.unflatten(1, shape)[:, :, :: shape[1] // across].flatten(1, 2)
            truth = truth.unflatten(1, (rows, -1))[:, :, columns].flatten(1, 2)
        pairs = (truth.long() * task.classes + outputs.argmax(-1))[truth != UNLABELED]
        confusion += torch.bincount(pairs, minlength=task.classes**2)
    net.train()
    confusion = confusion.view(task.classes, task.classes)
    if task.metric == 'mIoU':
        return mean_iou(confusion)
    return 100 * (confusion.diag().sum() / confusion.sum()).item()


def test_resolutions(
    task: Task, net: Net, data: Data, autocast: torch.autocast
) -> dict[str, float]:
    """The metric at other sizes, with dt as trained and divided. The net is of no use afterwards.

    Returns:
        dict: By '1', '1.5', '2' (dt as trained) and '1.5/dt', '2/dt' (divided), the metric.
    """
    images = data.test_images[:RESOLUTION_SCENES]
    labels = data.test_labels[:RESOLUTION_SCENES]
    net.use_study_mixers()
    results = {'1': test(task, net, images, labels, autocast)}
    for factor in task.factors:
        size = 2 * [round(task.size.image * factor)]
        larger = F.interpolate(images[:, None].float(), size, mode='bilinear')
        larger = larger[:, 0].round().to(torch.uint8)
        truth = F.interpolate(labels[:, None].float(), size, mode='nearest-exact')
        truth = truth[:, 0].to(torch.uint8)
        for name, divisor in ((f'{factor:g}', 1.0), (f'{factor:g}/dt', factor)):
            net.use_study_mixers(dt_divisor=divisor)
            results[name] = test(task, net, larger, truth, autocast)
    return results


def test_spacings(task: Task, net: Net, data: Data, autocast: torch.autocast) -> dict[str, float]:
    """The metric at other horizontal distances of patches. The net is of no use afterwards.

    All are of the same patches, those that each distance has: patches and labels are the same, and
    only the tokens between them differ. An image is cropped or, by repeating its last columns,
    widened by less than a patch, so that a row of patches always takes the same time.

    Returns:
        dict: The metric by the distance in pixels, such as '2', as trained; '2, dt' has the step
        sizes multiplied by the ratio of the distances, and '2, dt, dilated' also the convolution's
        taps as far apart in pixels as in training (finer ones alone).
    """
    patch, widest = task.size.patch, task.spacings[0]
    columns = range(0, task.size.image // patch, widest // patch)
    net.use_study_mixers()
    results = {}
    for spacing in task.spacings:
        width = width_at(task.size, spacing)
        images = data.test_images[:, :, :width]
        missing = width - images.shape[2]
        if missing > 0:
            images = torch.cat([images, images[:, :, -1:].expand(-1, -1, missing)], 2)

        def score(other: Net, images: Tensor = images) -> float:
            return test(task, other, images, data.test_labels, autocast, columns)

        results[f'{spacing}'] = score(at_spacing(net, spacing))
        if spacing == patch:
            continue
        other = at_spacing(net, spacing)
        other.use_study_mixers(dt_divisor=patch / spacing)
        results[f'{spacing}, dt'] = score(other)
        if spacing < patch:
            for mixer in other.mixers():
                mixer.dilate(patch // spacing)
            results[f'{spacing}, dt, dilated'] = score(other)
    return results
