"""MMSegmentation's EncoderDecoder, predicting labels without the logits of whole pictures."""

from collections.abc import Iterator

import torch
from mmengine.structures import PixelData
from mmseg.models import EncoderDecoder
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.utils import resize
from mmseg.structures import SegDataSample
from torch import Tensor

from vim_mm.acceleration import hand_over_float32
from vim_mm.ops.upsampled import has_kernel, upsampled_labels
from vim_mm.segmentation.guards import check_logits, check_windows, checked_metas

# Bytes that the logits of a chunk of classes take at most, unless those of one class take more.
CHUNK_BYTES = 256 * 2**20
# Logits of a window (B, C, h, w), the size that they are upsampled to, and its top left corner.
Window = tuple[Tensor, tuple[int, int], tuple[int, int]]


class FastEncoderDecoder(EncoderDecoder):
    """An ``EncoderDecoder`` with the same ``pred_sem_seg`` in a fraction of memory.

    Where the labels follow from one resize, on a GPU with Triton one kernel makes them; they differ
    where the two largest logits differ by rounding. Else, and bit for bit, logits are upsampled,
    put together from windows and resized to the original picture for a few classes at a time, and
    only the largest so far is kept, with its class.

    Predictions hold no ``seg_logits``: at ADE20K's 150 classes they take 600 bytes a pixel. With
    ``test_cfg=dict(store_logits=True)`` everything is MMSegmentation's, logits included, as its
    test-time augmentation (``SegTTAModel``) needs it. So it is with one output channel, and with
    heads that predict in a way of their own.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.test_cfg is not None:
            check_windows('model.test_cfg', self.test_cfg)

    def predict(self, inputs: Tensor, data_samples: list | None = None) -> list:
        """As in ``EncoderDecoder``, without ``seg_logits``."""
        # The GPU idles until input_labels: what comes before it adds to the latency.
        check_windows('model.test_cfg', self.test_cfg)  # which may have changed
        metas = None if data_samples is None else checked_metas(data_samples, inputs)
        if not self.predicts_in_chunks():
            return super().predict(inputs, data_samples)
        slides = self.test_cfg.get('mode', 'whole') == 'slide'
        size = tuple(inputs.shape[2:]) if slides or metas is None else self.whole_size(metas[0])
        if data_samples is None:
            data_samples = [SegDataSample() for _ in inputs]
        if self._is_one_resize(inputs, size, slides, metas):
            for sample, labels in zip(data_samples, self.input_labels(inputs), strict=True):
                labels = labels[None, None]
                labels = labels if metas is None else self._cut(labels, sample.metainfo)
                sample.set_data({'pred_sem_seg': PixelData(data=labels[0])})
            return data_samples
        if slides:
            windows = list(self._slide(inputs))
        else:
            windows = [(self.small_logits(inputs), size, (0, 0))]
        for i, sample in enumerate(data_samples):
            own = [(logits[i : i + 1], enlarged, at) for logits, enlarged, at in windows]
            labels = self.labels(own, size, None if metas is None else metas[i])
            sample.set_data({'pred_sem_seg': PixelData(data=labels)})
        return data_samples

    def small_logits(self, inputs: Tensor) -> Tensor:
        """Logits (B, C, h, w) as the decode head gives them: what :func:`vim_mm.accelerate` takes.

        They may be in 16 bits.
        """
        logits = self.decode_head(self.extract_feat(inputs))
        check_logits(logits, len(inputs))
        return logits

    def input_labels(self, inputs: Tensor) -> Tensor:
        """Labels (B, H, W) of the size of the inputs: what :func:`vim_mm.accelerate` takes, too."""
        return upsampled_labels(self.small_logits(inputs), inputs.shape[2:], self.align_corners)

    def _is_one_resize(
        self, inputs: Tensor, size: tuple[int, int], slides: bool, metas: list[dict] | None
    ) -> bool:
        """Whether :meth:`input_labels` are those of the images, cut out."""
        return (
            size == inputs.shape[2:]
            and (not slides or len(self.corners(size)) == 1)
            and has_kernel(inputs, self.out_channels)
            and all(self._is_original(size, meta) for meta in metas or ())
        )

    @classmethod
    def _is_original(cls, size: tuple[int, int], meta: dict) -> bool:
        """Whether an image has its original size, once the padding is cut off."""
        rows, columns = cls._inside(size, meta)
        kept = len(range(size[0])[rows]), len(range(size[1])[columns])
        return kept == tuple(meta['ori_shape'][:2])

    def predicts_in_chunks(self) -> bool:
        """Whether predictions are made here, and not by MMSegmentation."""
        head = type(self._modules['decode_head'])  # an attribute of a module is slow to find
        plain = (
            head.predict is BaseDecodeHead.predict
            and head.predict_by_feat is BaseDecodeHead.predict_by_feat
        )
        return plain and self.out_channels > 1 and not self.test_cfg.get('store_logits', False)

    @staticmethod
    def whole_size(meta: dict) -> tuple[int, int]:
        """What MMSegmentation enlarges the logits of a batch to: the size of its first picture."""
        return tuple(meta.get('pad_shape', meta['img_shape'])[:2])

    def corners(self, size: tuple[int, int]) -> list[tuple[int, int]]:
        """Top left corners of the windows of a picture, in the order of ``slide_inference``."""
        # Starts of the windows by rows and by columns; the last ones end where the picture does.
        tops, lefts = (
            [
                max(min(k * step + length, n) - length, 0)
                for k in range(max(n - length + step - 1, 0) // step + 1)
            ]
            for n, length, step in zip(
                size, self.test_cfg.crop_size, self.test_cfg.stride, strict=True
            )
        )
        return [(top, left) for top in tops for left in lefts]

    def _slide(self, inputs: Tensor) -> Iterator[Window]:
        crop = self.test_cfg.crop_size
        for top, left in self.corners(inputs.shape[2:]):
            window = inputs[:, :, top : top + crop[0], left : left + crop[1]]
            logits = self.decode_head(self.extract_feat(window))
            check_logits(logits, len(inputs), self.out_channels)
            yield logits, tuple(window.shape[2:]), (top, left)

    def labels(self, windows: list[Window], size: tuple[int, int], meta: dict | None) -> Tensor:
        """Labels (1, H, W) of one picture at its original size, without the padding.

        Args:
            windows: Of one picture; in mode 'whole' one that is all of it.
            size: Of the padded picture.
            meta: Of the picture as its pipeline gives it; None: its original size is ``size``.
        """
        labels = self._labels_by_kernel(windows, size, meta)
        if labels is not None:
            return labels
        windows = [(hand_over_float32(logits), *where) for logits, *where in windows]
        classes = windows[0][0].shape[1]
        height, width = size if meta is None else meta['ori_shape'][:2]
        pixels = max(height * width, size[0] * size[1])
        chunk = max(1, CHUNK_BYTES // (pixels * windows[0][0].element_size()))
        largest = labels = None
        for start in range(0, classes, chunk):
            logits = self._assemble(windows, size, slice(start, start + chunk))
            if meta is not None:
                logits = self._to_original(logits, meta)
            value, index = logits[0].max(dim=0, keepdim=True)
            if largest is None:
                largest, labels = value, index
            else:
                # Of equal logits the first class wins, as with argmax.
                better = value > largest
                labels = torch.where(better, index + start, labels)
                largest = torch.where(better, value, largest)
        return labels

    def _labels_by_kernel(
        self, windows: list[Window], size: tuple[int, int], meta: dict | None
    ) -> Tensor | None:
        """The labels where they follow from one resize, None where they do not."""
        (logits, to, _), *others = windows
        if others or to != size or not has_kernel(logits, logits.shape[1]):
            return None
        if meta is not None and not self._is_original(size, meta):
            return None
        labels = upsampled_labels(logits, size, self.align_corners)
        return labels if meta is None else self._cut(labels[None], meta)[0]

    def _assemble(self, windows: list[Window], size: tuple[int, int], classes: slice) -> Tensor:
        """Logits (1, c, *size) of some classes: the mean over windows, added up in their order."""

        def enlarge(logits: Tensor, to: tuple[int, int]) -> Tensor:
            return resize(logits[:, classes], to, None, 'bilinear', self.align_corners, False)

        if self.test_cfg.get('mode', 'whole') != 'slide':
            ((logits, to, _),) = windows
            return enlarge(logits, to)
        total = counts = None
        for logits, to, (top, left) in windows:
            part = enlarge(logits, to)
            if total is None:
                # In float32, as MMSegmentation, whose sum has the dtype of the picture.
                total = part.new_zeros((1, part.shape[1], *size), dtype=torch.float32)
                counts = total.new_zeros((1, 1, *size))
            at = (..., slice(top, top + to[0]), slice(left, left + to[1]))
            total[at] += part
            counts[at] += 1
        return total / counts

    def _to_original(self, logits: Tensor, meta: dict) -> Tensor:
        """Logits (1, c, ...) without padding, flipped back, at the size of the original picture."""
        logits = self._cut(logits, meta)
        shape = tuple(meta['ori_shape'][:2])
        if tuple(logits.shape[2:]) == shape:  # resizing would copy them
            return logits
        return resize(logits, shape, None, 'bilinear', self.align_corners, False)

    @classmethod
    def _cut(cls, logits: Tensor, meta: dict) -> Tensor:
        """Without padding, and flipped back."""
        logits = logits[(..., *cls._inside(tuple(logits.shape[2:]), meta))]
        if meta.get('flip'):
            axis = {'horizontal': 3, 'vertical': 2}[meta['flip_direction']]
            logits = logits.flip(dims=(axis,))
        return logits

    @staticmethod
    def _inside(size: tuple[int, int], meta: dict) -> tuple[slice, slice]:
        """Rows and columns of a padded picture that are not padding."""
        height, width = size
        padding = meta.get('img_padding_size', meta.get('padding_size', [0] * 4))
        left, right, top, bottom = padding
        return slice(top, height - bottom), slice(left, width - right)
