"""What is computed of a frame on the device, in stages that can be timed and recorded."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from vim_mm.acceleration import record
from vim_mm.progress import slow_at_first
from vim_mm.stream.pixels import Preprocessing

STAGES = ('preprocess', 'backbone', 'head', 'postprocess')
# Called with the name of a stage when its work has been given to the device.
Mark = Callable[[str], None]
# What of a picture's meta information labels depend on.
_SHAPES = ('ori_shape', 'img_shape', 'pad_shape', 'img_padding_size', 'padding_size')


def label_dtype(model: nn.Module) -> torch.dtype:
    """Of the labels that leave the device: uint8 where the number of classes allows it."""
    return torch.uint8 if model.num_classes <= 256 else torch.int16


class SegmentorStages:
    """A ``FastEncoderDecoder``: labels (H, W) of a frame, in stages of fixed shapes.

    The labels are those of its ``predict``.

    Args:
        model (nn.Module): In evaluation mode, on its device.
        preprocess (Preprocessing): Of the frames.
        amp (bool): Compute backbone, neck and head in bfloat16 autocast.
        compile (bool): Pass all but the preprocessing through ``torch.compile``.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocessing,
        amp: bool = False,
        compile: bool = False,
    ):
        self.model, self.preprocess, self.labels = model, preprocess, model.labels
        backbone, head = self._backbone, self._head
        if amp:
            device = model.data_preprocessor.device.type
            backbone, head = (torch.autocast(device, torch.bfloat16)(f) for f in (backbone, head))
        if compile:
            model.to(memory_format=torch.channels_last)
            backbone, head, self.labels = (
                slow_at_first(torch.compile(part), f'compiling {name}')
                for name, part in dict(backbone=backbone, head=head, labels=model.labels).items()
            )
        self.functions: list[tuple[str, Callable[[Any], Any]]] = [
            ('preprocess', preprocess),
            ('backbone', self._windowed(backbone)),
            ('head', head),
            ('postprocess', self._labels),
        ]

    def _windows(self, size: tuple[int, int]) -> list[tuple[slice, slice]]:
        if self.model.test_cfg.get('mode', 'whole') != 'slide':
            return [(slice(None), slice(None))]
        height, width = self.model.test_cfg.crop_size
        corners = self.model.corners(size)
        return [(slice(top, top + height), slice(left, left + width)) for top, left in corners]

    def _windowed(self, backbone: Callable) -> Callable[[Tensor], list]:
        def features(inputs: Tensor) -> list:
            self.input_size = tuple(inputs.shape[2:])
            windows = self._windows(self.input_size)
            return backbone([inputs[:, :, rows, columns] for rows, columns in windows])

        return features

    def _backbone(self, windows: list[Tensor]) -> list:
        return [self.model.backbone(window) for window in windows]

    def _head(self, features: list) -> list[Tensor]:
        if self.model.with_neck:
            features = [self.model.neck(maps) for maps in features]
        return [self.model.decode_head(maps) for maps in features]

    def _labels(self, logits: list[Tensor]) -> Tensor:
        meta = self.preprocess.sample.metainfo
        meta = {key: meta[key] for key in _SHAPES if key in meta}
        if self.model.test_cfg.get('mode', 'whole') == 'slide':
            size = self.input_size
        else:
            size = self.model.whole_size(meta)
        windows = []
        for part, (rows, columns) in zip(logits, self._windows(size), strict=True):
            (top, bottom, _), (left, right, _) = rows.indices(size[0]), columns.indices(size[1])
            windows.append((part, (bottom - top, right - left), (top, left)))
        return self.labels(windows, size, meta)[0].to(label_dtype(self.model))

    def run(self, frame: Tensor, mark: Mark) -> Tensor:
        """Labels (H, W) of a frame (H, W, 3), on its device."""
        x = frame
        for name, function in self.functions:
            x = function(x)
            mark(name)
        return x


class GraphedStages:
    """Stages of fixed shapes, each recorded as a CUDA graph that reads what the one before wrote.

    Args:
        stages (SegmentorStages): Theirs; they ran before, such that libraries are ready.
        frame (Tensor): (H, W, 3), uint8, on the GPU: one of those to come.
        pool: Memory that all graphs of a stream share; they never run at the same time.
    """

    def __init__(self, stages: SegmentorStages, frame: Tensor, pool: tuple):
        self.frame = frame.clone()
        self.graphs = []
        x = self.frame
        # What a stage wrote stays while another is recorded, so that the pool keeps it apart.
        self.outputs = []
        for name, function in stages.functions:
            graph, x = record(lambda function=function, x=x: function(x), pool)
            self.graphs.append((name, graph))
            self.outputs.append(x)

    def run(self, frame: Tensor, mark: Mark) -> Tensor:
        """As in :class:`SegmentorStages`; the next call overwrites what it returns."""
        self.frame.copy_(frame)
        for name, graph in self.graphs:
            graph.replay()
            mark(name)
        return self.outputs[-1]


class AnyStages:
    """Any other model: its own ``predict``, which may wait for the device.

    Stages are told apart by hooks: backbone, then up to the end of the last head that computes on
    whole pictures, then the rest.

    Args:
        model (nn.Module): As it is, or accelerated.
        preprocess (Preprocessing): Of the frames.
    """

    def __init__(self, model: nn.Module, preprocess: Preprocessing):
        self.model, self.preprocess = model, preprocess
        heads = [n for n in ('rpn_head', 'bbox_head', 'decode_head') if getattr(model, n, None)]
        self.stages = {'backbone': 'backbone'} | dict.fromkeys(heads[:1], 'head')

    def run(self, frame: Tensor, mark: Mark) -> Any:
        """The data sample of a frame (H, W, 3), with the predictions."""
        inputs = self.preprocess(frame)
        mark('preprocess')
        given = self.preprocess.sample
        with ExitStack() as hooks:  # there is an object of this class for each size of frames
            for name, stage in self.stages.items():
                hook = getattr(self.model, name).register_forward_hook(
                    lambda *_, stage=stage: mark(stage)
                )
                hooks.callback(hook.remove)
            (sample,) = self.model.predict(inputs, [type(given)(metainfo=given.metainfo)])
        mark('postprocess')
        return sample
