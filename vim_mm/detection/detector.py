"""MMDetection's two-stage detectors with the same losses, without waits for the device.

MMDetection makes targets image by image and level by level, and asks the device for a count at
each step. Here the targets, samples, proposals and losses of all images are computed at once, in
tensors of fixed size: :mod:`vim_mm.detection.rpn`, :mod:`vim_mm.detection.roi`. So a step waits for
nothing, and can be a CUDA graph.

A fast detector is its original, a subclass of it, with the same parameters, names and arguments,
and it predicts by the original's methods. A head that is not known here is trained by its own
methods, which the log says once with the reason.
"""

import logging
from functools import cache, cached_property

import torch
from mmdet.models.detectors import TwoStageDetector
from mmdet.registry import MODELS
from mmdet.structures import SampleList
from mmengine.config import ConfigDict
from mmengine.logging import print_log
from mmengine.structures import InstanceData
from torch import Tensor

from vim_mm.acceleration import hand_over_float32
from vim_mm.detection import roi, rpn
from vim_mm.detection.assign import needs_ignored
from vim_mm.detection.truth import GroundTruth, pack, why_not_packed
from vim_mm.errors import UserTypeError, UserValueError

_HEADS = ('rpn_head', 'roi_head')


class FastTwoStage(TwoStageDetector):
    """A ``TwoStageDetector`` with the losses of this package.

    To be inherited from in front of a detector, see :func:`fast_detector_class`.
    """

    @cached_property
    def _why_slow(self) -> dict[str, str | None]:
        """By head, why its own methods train it; None if those of this package do."""
        detector = type(self).of
        if detector.loss is not TwoStageDetector.loss:
            return dict.fromkeys(_HEADS, f'{detector.__name__} has a loss of its own')
        reasons: dict[str, str | None] = {
            'rpn_head': 'there is none, proposals come from the data',
            'roi_head': 'there is none',
        }
        if self.with_rpn:
            reasons['rpn_head'] = rpn.why_not_fast(self.rpn_head, self._proposal_cfg)
        if self.with_roi_head:
            reasons['roi_head'] = roi.why_not_fast(self.roi_head)
        return reasons

    @property
    def _proposal_cfg(self) -> ConfigDict:
        return self.train_cfg.get('rpn_proposal', self.test_cfg.rpn)

    def _obstacles(self, samples: SampleList) -> dict[str, str | None]:
        """:attr:`_why_slow` for a batch."""
        reasons = dict(self._why_slow)
        if reasons['roi_head'] is None:
            reasons['roi_head'] = why_not_packed(samples, self.roi_head.with_mask)
        return reasons

    def why_shapes_vary(self) -> str | None:
        """Why a training step has no fixed shapes, as a CUDA graph demands it; None if it has."""
        return next((_own_path(*reason) for reason in self._why_slow.items() if reason[1]), None)

    def with_fixed_shapes(self, batch: dict) -> dict:
        """A batch for ``loss`` as a CUDA graph takes it: with :class:`GroundTruth` for samples.

        Args:
            batch: ``inputs`` and ``data_samples``, from the data preprocessor.

        Raises:
            ValueError: This batch has no fixed shapes.
        """
        samples = batch['data_samples']
        for name, reason in self._obstacles(samples).items():
            if reason is not None:
                raise UserValueError(_own_path(name, reason))
        return {**batch, 'data_samples': self._pack(samples, batch['inputs'].device)}

    def _pack(self, samples: SampleList, device: torch.device) -> GroundTruth:
        why = self._why_slow
        if why['rpn_head'] is None:
            rpn.check_borders(self.rpn_head, [sample.metainfo for sample in samples])
        assigners = [] if why['rpn_head'] else [self.rpn_head.assigner]
        with_masks = False
        if why['roi_head'] is None:
            assigner = self.roi_head.bbox_assigner
            assigners += assigner if isinstance(assigner, list) else [assigner]
            with_masks = self.roi_head.with_mask and why_not_packed(samples, True) is None
        return pack(samples, device, any(map(needs_ignored, assigners)), with_masks)

    def loss(
        self, batch_inputs: Tensor, batch_data_samples: SampleList | GroundTruth
    ) -> dict[str, Tensor | list[Tensor]]:
        """As in ``TwoStageDetector``; takes what :meth:`with_fixed_shapes` makes, too."""
        if isinstance(batch_data_samples, GroundTruth):
            truth, reasons = batch_data_samples, self._why_slow
        else:
            reasons = self._obstacles(batch_data_samples)
            for name, reason in reasons.items():
                if reason is not None:
                    _say_once(_own_path(name, reason))
            if all(reasons.values()):
                return super().loss(batch_inputs, batch_data_samples)
            truth = self._pack(batch_data_samples, batch_inputs.device)
        x = self.extract_feat(batch_inputs)
        if reasons['rpn_head'] is None:
            predicted = rpn.predict(self.rpn_head, x)
            losses = rpn.losses(self.rpn_head, predicted, truth)
            proposals = rpn.propose(self.rpn_head, predicted, truth, self._proposal_cfg)
        else:
            losses, proposals = self._own_rpn(x, batch_data_samples)
        if reasons['roi_head'] is None:
            found = roi.losses(self.roi_head, x, proposals.boxes, proposals.valid, truth)
        else:
            x = hand_over_float32(x)
            found = self.roi_head.loss(x, _unpacked(proposals), batch_data_samples)
        return {**losses, **found}

    def _own_rpn(self, x: tuple[Tensor, ...], samples: SampleList) -> tuple[dict, rpn.Proposals]:
        """Losses and proposals by the head's methods, or the proposals of the samples."""
        if not self.with_rpn:
            return {}, _packed([sample.proposals for sample in samples])
        classless = []
        for sample in samples:
            # MMDetection copies everything, the masks included.
            own = sample.new()
            own.gt_instances = InstanceData(
                bboxes=sample.gt_instances.bboxes,
                labels=torch.zeros_like(sample.gt_instances.labels),
            )
            classless.append(own)
        losses, results = self.rpn_head.loss_and_predict(
            x, classless, proposal_cfg=self._proposal_cfg
        )
        named = {
            name if 'loss' not in name or 'rpn' in name else f'rpn_{name}': value
            for name, value in losses.items()
        }
        return named, _packed(results)


def _packed(results: list[InstanceData]) -> rpn.Proposals:
    boxes = torch.nn.utils.rnn.pad_sequence([each.bboxes for each in results], True)
    given = torch.tensor([len(each.bboxes) for each in results], device=boxes.device)
    valid = torch.arange(boxes.shape[1], device=boxes.device) < given[:, None]
    return rpn.Proposals(boxes, torch.zeros_like(boxes[..., 0]), valid)


def _unpacked(proposals: rpn.Proposals) -> list[InstanceData]:
    results = []
    for boxes, scores, valid in zip(*proposals, strict=True):
        labels = torch.zeros_like(scores, dtype=torch.int64)
        results.append(InstanceData(bboxes=boxes, scores=scores, labels=labels)[valid])
    return results


@cache
def fast_detector_class(name: str) -> type[FastTwoStage]:
    """The fast form of a detector, named Fast and the name of the original.

    Args:
        name: A detector in MMDetection's registry.

    Raises:
        TypeError: It is no subclass of ``TwoStageDetector``.
    """
    detector = MODELS.get(name)
    if not (isinstance(detector, type) and issubclass(detector, TwoStageDetector)):
        raise UserTypeError(f'{name!r} must name a subclass of TwoStageDetector, got {detector}')

    class Fast(FastTwoStage, detector):
        of = detector

    Fast.__name__ = Fast.__qualname__ = f'Fast{detector.__name__}'
    Fast.__doc__ = f"""MMDetection's ``{name}`` with the losses of :class:`FastTwoStage`."""
    return Fast


def _own_path(head: str, reason: str) -> str:
    return f"{head} is trained by MMDetection's own methods: {reason}"


@cache
def _say_once(message: str) -> None:
    print_log(message, logger='current', level=logging.INFO)
