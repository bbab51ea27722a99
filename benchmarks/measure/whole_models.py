"""Whole models of MMSegmentation, MMDetection and MMPretrain by config: built, fed and run.

What the benchmarks of whole models share. Models get random weights, or those of a checkpoint, and
random pictures with labels of one size; a segmentor or a classifier runs whole, a detector has its
backbone and neck compiled or captured, because its heads decide by values on the device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from mmengine.model import BaseModel, revert_sync_batchnorm
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from torch import Tensor

from vim_mm import accelerate
from vim_mm.engine import BFloat16OptimWrapper
from vim_mm.engine.optimization.compiled_parts import CompiledParts
from vim_mm.engine.optimization.graphed_step import GraphedStep

OBJECTS = 8  # in a picture, boxes of 1/16 to 1/2 of its sides
# Detectors of MMDetection pad pictures to multiples of this; ours to what they are trained with.
_DIVISOR = 32


def forget_pretrained(value: Any) -> None:
    """Take the weights to download out of a config of a model, in place, at any depth."""
    if isinstance(value, dict):
        init = value.get('init_cfg') or []
        init = init if isinstance(init, list) else [init]
        if any(cfg['type'] == 'Pretrained' for cfg in init):
            value['init_cfg'] = [cfg for cfg in init if cfg['type'] != 'Pretrained'] or None
        if 'pretrained' in value:
            value['pretrained'] = None
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list | tuple):
            forget_pretrained(item)


def adapt(
    cfg: Config,
    size: tuple[int, int],
    path: str = 'config',
    heads: str = 'config',
    method: str | None = None,
) -> None:
    """Change the model of a config, in place, for a benchmark.

    Args:
        cfg (Config): Of any of the three libraries.
        size (tuple): (H, W) of the pictures.
        path (str): 'kernel' or 'python' computes the scans by compiled code or by the Python
            reference, in the same plain block; 'config' leaves what the config says.
        heads (str): 'mmseg' or 'fast' gives a segmentor MMSegmentation's heads or ours, 'mmdet' or
            'fast' a two-stage detector; both are the same functions.
        method (str, optional): Discretization; None leaves what the config says.
    """
    model = cfg.model
    forget_pretrained(model)
    if 'size' in (model.get('data_preprocessor') or {}):
        model.data_preprocessor.size = size
    if cfg.default_scope == 'mmdet':
        model.data_preprocessor.pad_size_divisor = _DIVISOR
        model.data_preprocessor.pop('batch_augments', None)  # they change the size
        size = tuple(-(-side // _DIVISOR) * _DIVISOR for side in size)
    if 'img_size' in model.backbone:
        model.backbone.img_size = size
    if path != 'config':
        if not is_vim(cfg):
            raise ValueError(f'{model.backbone.type} has no scan: paths are of VisionMamba')
        ssm_cfg = model.backbone.get('ssm_cfg') or {}
        kernel = False if path == 'python' else None
        model.backbone.ssm_cfg = {**ssm_cfg, 'fused': False, 'use_cuda_kernel': kernel}
    if method is not None:
        if not is_vim(cfg):
            raise ValueError(f'{model.backbone.type} has no discretization methods')
        model.backbone.discretization_method = method
    if heads != 'config' and cfg.default_scope == 'mmseg':
        for name in ('decode_head', 'auxiliary_head'):
            if model.get(name):
                change_head(model[name], heads)
    if heads != 'config' and 'roi_head' in model:
        change_detector(model, heads)
    if cfg.default_scope == 'mmpretrain':  # labels stay whole; the runner would merge the other
        model.pop('train_cfg', None)
        model.setdefault('data_preprocessor', dict(cfg.get('data_preprocessor', {})))
    # One window: sliding over a picture of the crop's size would be the same.
    if cfg.default_scope == 'mmseg':
        model.test_cfg = dict(mode='whole')


def change_head(head: ConfigDict, heads: str) -> None:
    """Make a head of a segmentor MMSegmentation's own ('mmseg') or the fast one of it ('fast')."""
    plain = head.pop('of', None) or head.type.removeprefix('Fast')
    head.type = plain
    if heads == 'fast':
        head.update(type='FastHead', of=plain)


def change_detector(model: ConfigDict, heads: str) -> None:
    """Make a two-stage detector MMDetection's own ('mmdet') or the fast one of it ('fast')."""
    plain = model.pop('of', None) or model.type
    preprocessor = model.data_preprocessor.type.removeprefix('Fast')
    model.type, model.data_preprocessor.type = plain, preprocessor
    if heads == 'fast':
        model.update(type='FastDetector', of=plain)
        model.data_preprocessor.type = f'Fast{preprocessor}'


def is_vim(cfg: Config) -> bool:
    return cfg.model.backbone.type.rpartition('.')[2] == 'VisionMamba'


def build(cfg: Config, device: str) -> BaseModel:
    """The model of a config in training mode, with BN for SyncBN."""
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    # Sizes stay, but for the number of a detector's regions: with those cuDNN would compare its
    # algorithms anew in every step.
    torch.backends.cudnn.benchmark = cfg.default_scope != 'mmdet'
    model = MODELS.build(cfg.model)
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel('WARNING')  # else a line for every weight
    model.init_weights()
    logger.setLevel(level)
    return revert_sync_batchnorm(model).to(device).train()


def make_batch(cfg: Config, size: tuple[int, int], batch: int) -> dict[str, list]:
    """Random pictures and their labels, as a loader hands them over."""
    model = cfg.model
    if cfg.default_scope == 'mmseg':
        make: Callable = partial(_segmentation_sample, *size, model.decode_head.num_classes)
    elif cfg.default_scope == 'mmpretrain':
        make = partial(_classification_sample, model.head.num_classes)
    else:
        heads = model.roi_head.bbox_head if 'roi_head' in model else model.bbox_head
        classes = (heads[0] if isinstance(heads, list) else heads).num_classes
        make = partial(_detection_sample, *size, classes)
    pictures = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for _ in range(batch)]
    pinned = torch.cuda.is_available()  # as the runner's loader does it
    return dict(
        inputs=[picture.pin_memory() if pinned else picture for picture in pictures],
        data_samples=[make() for _ in range(batch)],
    )


def on_device(batch: dict[str, Any], device: str | torch.device) -> dict[str, Any]:
    """A batch on a device, in lists and samples of its own: a preprocessor changes them.

    Tensors that are on the device already are shared.
    """
    return {
        name: values.to(device) if isinstance(values, Tensor) else [x.to(device) for x in values]
        for name, values in batch.items()
    }


def _classification_sample(classes: int) -> Any:
    from mmpretrain.structures import DataSample

    return DataSample().set_gt_label(torch.randint(0, classes, (1,)))


def _segmentation_sample(height: int, width: int, classes: int) -> Any:
    from mmseg.structures import SegDataSample

    labels = torch.randint(0, classes, (1, height, width))
    labels[torch.rand(labels.shape) < 0.05] = 255
    meta = dict(img_shape=(height, width), ori_shape=(height, width))
    return SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=meta)


def _detection_sample(height: int, width: int, classes: int) -> Any:
    from mmdet.structures import DetDataSample
    from mmdet.structures.mask import BitmapMasks

    size = torch.tensor([width, height])
    extent = (torch.rand(OBJECTS, 2) * 7 / 16 + 1 / 16) * size
    corner = torch.rand(OBJECTS, 2) * (size - extent)
    boxes = torch.cat([corner, corner + extent], dim=1)
    masks = np.zeros((OBJECTS, height, width), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    instances = InstanceData(
        bboxes=boxes,
        labels=torch.randint(0, classes, (OBJECTS,)),
        masks=BitmapMasks(masks, height, width),
    )
    meta = dict(
        img_shape=(height, width),
        ori_shape=(height, width),
        pad_shape=(height, width),
        batch_input_shape=(height, width),
        scale_factor=(1.0, 1.0),
    )
    sample = DetDataSample(gt_instances=instances, metainfo=meta)
    sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0).long())
    return sample


def total_loss(model: BaseModel, images: Tensor, samples: list) -> Tensor:
    """The sum of a model's losses, which may be tensors or lists of them."""
    losses = model.loss(images, samples)
    named = (value for name, value in losses.items() if 'loss' in name)
    return sum(v.mean() for value in named for v in (value if isinstance(value, list) else [value]))


def prediction(model: BaseModel, images: Tensor, samples: list) -> Any:
    """What a model predicts: labels of pixels, scores of classes, or boxes and masks."""
    if hasattr(model, 'encode_decode'):
        metas = [sample.metainfo for sample in samples]
        return model.encode_decode(images, metas).argmax(1)
    if hasattr(model, 'roi_head') or hasattr(model, 'bbox_head'):
        return model.predict(images, samples, rescale=False)
    return model(images, mode='tensor')


class Passes:
    """Inference and training steps of a model on one batch that lies on the device.

    Args:
        model (BaseModel): From :func:`build`.
        batch (dict): From :func:`make_batch`; it is normalized here, so no pass contains that.
        dtype (str): 'fp32', or 'bf16' or 'fp16' of autocast.
        training (bool): A pass is a training step: loss, backward and AdamW.
    """

    def __init__(self, model: BaseModel, batch: dict[str, list], dtype: str, training: bool):
        self.model = model.train(training)
        # Before the hooks of mixed precision: detectors hand their parts' outputs over in float32.
        self.device = next(model.parameters()).device
        self.given = on_device(batch, self.device)
        data = model.data_preprocessor(on_device(self.given, self.device), training)
        self.images: Tensor = data['inputs']
        self.samples: list = data['data_samples']
        self.training = training
        cuda = self.images.is_cuda
        kinds = {
            'fp32': OptimWrapper,
            'bf16': BFloat16OptimWrapper,
            'fp16': partial(AmpOptimWrapper, dtype='float16'),
        }
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=6e-5, weight_decay=0.01, capturable=cuda and training
        )
        self.wrapper = kinds[dtype](optimizer=optimizer)
        self.wrapper.initialize_count_status(model, 0, 10**9)
        self.function = total_loss if training else prediction

    @property
    def whole(self) -> bool:
        """Whether the pass can be compiled or captured as a whole."""
        return not (hasattr(self.model, 'roi_head') or hasattr(self.model, 'bbox_head'))

    def eager(self) -> Any:
        """A pass as written."""
        if not self.training:
            with torch.no_grad(), self._context():
                return self.function(self.model, self.images, self.samples)
        with self._context():
            loss = self.function(self.model, self.images, self.samples)
        self.wrapper.backward(loss)
        self.wrapper.step()
        self.wrapper.zero_grad()
        return loss.detach()

    def _context(self) -> AbstractContextManager:
        return self.wrapper.optim_context(self.model)

    def form(self, name: str) -> Callable[[], Any]:
        """The pass in a form: 'eager', 'compiled' by torch.compile, 'graph', a CUDA graph.

        'tools' is what ``--graph --compile`` of the tools runs: of a training step all but the
        loader, of a segmentor's inference its ``predict``.

        Raises:
            ValueError: There is no such form of this pass.
        """
        if name == 'eager':
            return self.eager
        if name == 'compiled':
            torch.compiler.reset()
            if self.whole:
                self.function = torch.compile(self.function)
            else:
                self.model.extract_feat = torch.compile(self.model.extract_feat)
            return self.eager
        if not self.images.is_cuda:
            raise ValueError('CUDA graphs need CUDA')
        if name == 'tools':
            return self._as_the_tools()
        if self.whole:
            return capture(self.eager)
        if self.training:
            raise ValueError("a detector's training step waits for values on the device")
        self._capture_features()
        return self.eager

    def _as_the_tools(self) -> Callable[[], Any]:
        if self.training:
            self.wrapper.optimizer = torch.optim.AdamW(
                self.model.parameters(), lr=6e-5, weight_decay=0.01, fused=True
            )
            CompiledParts(self.model, self.wrapper)
            step = GraphedStep(self.model, compiled=True)

            def train() -> Any:
                return step(on_device(self.given, self.device), self.wrapper)['loss']

            return train
        if not hasattr(self.model, 'small_logits'):
            raise ValueError('the tools predict by one graph for a FastEncoderDecoder alone')
        self.wrapper.keep_bfloat16()  # the hooks of training hand over float32
        accelerate(self.model, amp=True, graph=True, compile=True)

        def predict() -> Any:
            with torch.no_grad():
                return self.model.predict(self.images, self.samples)

        return predict

    def _capture_features(self) -> None:
        """Let a detector replay backbone and neck, with its heads eager."""
        extract = self.model.extract_feat

        def features() -> Any:
            with torch.no_grad(), self._context():
                return extract(self.images)

        replay = capture(features)
        self.model.extract_feat = lambda images: replay()

    def held_bytes(self) -> int:
        """Of parameters, buffers, gradients, the optimizer's state and the batch."""
        tensors = [*self.model.parameters(), *self.model.buffers(), self.images]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        states = self.wrapper.optimizer.state.values()
        tensors += [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)


def capture(function: Callable[[], Any]) -> Callable[[], Any]:
    """A function as a CUDA graph: the call replays it and returns the same tensors each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def count_operations(passes: Passes) -> int:
    """Floating-point operations of a pass by PyTorch's counter, two for each multiply-add."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        passes.eager()
    return counter.get_total_flops()
