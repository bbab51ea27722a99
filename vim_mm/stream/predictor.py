"""Frames in host memory to predictions in host memory, several of them under way at a time.

On a GPU a frame is uploaded, computed and downloaded in three streams, so that the copies of its
neighbours overlap with its computation. On the CPU the same stages run one after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from vim_mm.acceleration import accelerate, predicts_in_chunks
from vim_mm.progress import slow_at_first
from vim_mm.stream.pixels import Preprocessing
from vim_mm.stream.stages import (
    AnyStages,
    GraphedStages,
    SegmentorStages,
    label_dtype,
)


def on_gpu(device: torch.device) -> bool:
    """Whether frames are copied to a device and back, in streams of their own."""
    return device.type == 'cuda'


@dataclass
class Instances:
    """What a detector found in a frame, the best first.

    Attributes:
        boxes (ndarray): (N, 4), x1 y1 x2 y2 in pixels.
        labels (ndarray): (N,), classes.
        scores (ndarray): (N,).
        masks (ndarray | None): (N, H, W), bool.
    """

    boxes: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    masks: np.ndarray | None


_WARM_UP_CALLS = 3
Stages = SegmentorStages | GraphedStages | AnyStages
CPU = torch.device('cpu')
# Labels (H, W) of a segmentor, or what a detector found.
Prediction = np.ndarray | Instances


@dataclass
class Slot:
    """Memory of a frame under way, used again when its size comes again.

    Attributes:
        picture (ndarray): (H, W, 3), uint8, BGR: the frame, in pinned memory where there is a GPU.
        taken (float): When the frame was taken to be predicted, by ``perf_counter``.
        seconds (dict): By stage, of the last frame, where the predictor takes times.
    """

    device: torch.device = CPU
    picture: np.ndarray | None = None
    taken: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _marks: list = field(default_factory=list)
    _result: object = None
    _done: object = None

    def buffer(self, shape: tuple[int, int, int]) -> np.ndarray:
        """An array to decode a frame of this shape into; it becomes :attr:`picture`."""
        if self.picture is None or self.picture.shape != tuple(shape):
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu(self.device))
            self._tensors = {'frame': host}
            if on_gpu(self.device):
                self._tensors['frame on device'] = torch.empty_like(host, device=self.device)
            self.picture = host.numpy()
        return self.picture

    def put(self, picture: np.ndarray) -> None:
        """Take a frame that was decoded elsewhere."""
        if picture is not self.picture:
            self.buffer(picture.shape)[...] = picture


class Predictor:
    """A model for frames of any sizes.

    Args:
        model (nn.Module): Of MMSegmentation or MMDetection, in evaluation mode on its device. One
            that is no ``FastEncoderDecoder`` is accelerated in place.
        transforms (Sequence): See :class:`vim_mm.stream.pixels.Preprocessing`.
        amp, graph, compile (bool): See :func:`vim_mm.accelerate`. A ``FastEncoderDecoder`` is
            compiled stage by stage, and on a GPU makes a graph for each size and stage.
        score (float): Instances of lower scores are left out.
        timed (bool): Whether to fill ``Slot.seconds``.
    """

    def __init__(
        self,
        model: nn.Module,
        transforms: Sequence,
        *,
        amp: bool = False,
        graph: bool = False,
        compile: bool = False,
        score: float = 0.3,
        timed: bool = False,
    ):
        if not predicts_in_chunks(model):
            accelerate(model, amp=amp, graph=graph, compile=compile)
            if compile:
                model.predict = slow_at_first(model.predict, 'compiling the model')
        self.model, self.transforms, self.amp = model, transforms, amp
        self.graph, self.compile, self.score, self.timed = graph, compile, score, timed
        self.device = model.data_preprocessor.device
        self.cuda = on_gpu(self.device)
        self._stages: dict[tuple[int, int], Stages] = {}
        if self.cuda:
            self._upload, self._compute, self._download = (
                torch.cuda.Stream(self.device) for _ in range(3)
            )
            self._pool = torch.cuda.graph_pool_handle()

    def slot(self) -> Slot:
        """Memory for a frame."""
        return Slot(self.device)

    @torch.no_grad()
    def prepare(self, size: tuple[int, int]) -> None:
        """Make the stages for frames of (H, W) pixels, unless there are such."""
        if size in self._stages:
            return
        preprocess = Preprocessing(self.transforms, self.model.data_preprocessor, size)
        stages: Stages
        if predicts_in_chunks(self.model):
            stages = SegmentorStages(self.model, preprocess, self.amp, self.compile)
        else:
            stages = AnyStages(self.model, preprocess)
        if self.cuda:
            torch.cuda.synchronize(self.device)
            with torch.cuda.stream(self._compute):
                blank = torch.zeros(*size, 3, dtype=torch.uint8, device=self.device)
                for _ in range(_WARM_UP_CALLS):  # libraries choose and load their kernels
                    stages.run(blank, lambda name: None)
                if self.graph and isinstance(stages, SegmentorStages):
                    stages = GraphedStages(stages, blank, self._pool)
            torch.cuda.synchronize(self.device)
        self._stages[size] = stages

    @torch.no_grad()
    def submit(self, slot: Slot) -> None:
        """Start to predict the frame in a slot; a segmentor on a GPU is not waited for."""
        size = slot.picture.shape[:2]
        self.prepare(size)
        stages = self._stages[size]
        slot._marks = []
        if self.cuda:
            self._submit_to_gpu(slot, stages)
            return
        self._mark(slot, 'begin')
        result = stages.run(slot._tensors['frame'], lambda name: self._mark(slot, name))
        slot._result = self._to_host(result)
        self._mark(slot, 'download')

    def _submit_to_gpu(self, slot: Slot, stages) -> None:
        frame = slot._tensors['frame on device']
        with torch.cuda.stream(self._upload):
            self._mark(slot, 'begin')
            frame.copy_(slot._tensors['frame'], non_blocking=True)
            self._mark(slot, 'upload')
        self._compute.wait_stream(self._upload)
        with torch.cuda.stream(self._compute):
            self._mark(slot, 'begin')
            result = stages.run(frame, lambda name: self._mark(slot, name))
            if not isinstance(result, Tensor):
                self._mark(slot, 'begin')
                slot._result, slot._done = self._to_host(result), None
                self._mark(slot, 'download')
                return
            labels = self._labels_of(slot, result)
            labels.copy_(result)
        self._download.wait_stream(self._compute)
        with torch.cuda.stream(self._download):
            self._mark(slot, 'begin')
            slot._result.copy_(labels, non_blocking=True)
            self._mark(slot, 'download')
            slot._done = torch.cuda.Event()
            slot._done.record()

    def _labels_of(self, slot: Slot, result: Tensor) -> Tensor:
        """Memory for labels on the device, and in pinned memory as ``slot._result``."""
        key = f'labels {tuple(result.shape)} {result.dtype}'
        if key not in slot._tensors:
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            slot._tensors |= {key: torch.empty_like(result), f'{key} on host': host}
        slot._result = slot._tensors[f'{key} on host']
        return slot._tensors[key]

    def result(self, slot: Slot) -> Prediction:
        """The prediction of a frame that was submitted; it is waited for.

        Labels are overwritten when the slot is used again.
        """
        if slot._done is not None:
            slot._done.synchronize()
        if self.timed:
            slot.seconds = self._durations(slot)
        return slot._result.numpy() if isinstance(slot._result, Tensor) else slot._result

    def _mark(self, slot: Slot, name: str) -> None:
        """Note that a stage ends here, or with 'begin' that one begins."""
        if not self.timed:
            return
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            slot._marks.append((name, event))
        else:
            slot._marks.append((name, perf_counter()))

    def _durations(self, slot: Slot) -> dict[str, float]:
        seconds: dict[str, float] = {}
        if self.cuda:
            slot._marks[-1][1].synchronize()
        for (_, start), (name, end) in zip(slot._marks, slot._marks[1:]):
            if name != 'begin':
                took = 1e-3 * start.elapsed_time(end) if self.cuda else end - start
                seconds[name] = seconds.get(name, 0.0) + took
        return seconds

    def _to_host(self, result) -> Tensor | Instances:
        if isinstance(result, Tensor):
            return result.cpu()
        if 'pred_sem_seg' in result:
            return result.pred_sem_seg.data[0].to(label_dtype(self.model)).cpu()
        found = result.pred_instances
        found = found[found.scores >= self.score]
        found = found[found.scores.argsort(descending=True)]
        masks = found.masks.cpu().numpy() if 'masks' in found else None
        return Instances(
            found.bboxes.cpu().numpy(),
            found.labels.cpu().numpy(),
            found.scores.cpu().numpy(),
            masks,
        )
