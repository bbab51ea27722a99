"""Cascade R-CNN as detectron2 trains and tests it, in MMDetection's classes.

ViTDet's and Vim's published detectors are of this kind. Four things differ from MMDetection's
``CascadeRoIHead``:

====================  ====================================  ===================================
part                  here                                  ``CascadeRoIHead``
====================  ====================================  ===================================
mask head             one, on the samples of stage 1        one for each stage
losses of the stages  summed; their gradients reach the     weighted, such as 1, 0.5, 0.25
                      features divided by the stages
stage 2 and on        takes every box of the stage before   samples anew, drops the true boxes
class scores, test    mean of the stages' probabilities     mean of their logits
====================  ====================================  ===================================
"""

import torch
from mmdet.models.roi_heads import CascadeRoIHead
from mmdet.models.task_modules.samplers import PseudoSampler, SamplingResult
from mmdet.models.utils import empty_instances, unpack_gt_instances
from mmdet.structures import SampleList
from mmdet.structures.bbox import bbox2roi
from mmdet.utils import InstanceList
from mmengine.structures import InstanceData
from torch import Tensor, nn

from vim_mm.errors import UserValueError


class SharedMaskCascadeRoIHead(CascadeRoIHead):
    """RoI head of a cascade with one mask head.

    ``mask_head`` holds the same module for every stage, so that checkpoints and predictions have
    the form of ``CascadeRoIHead``.

    Args:
        num_stages (int): Of the cascade.
        bbox_head (dict | list[dict]): Of each stage; they must regress boxes for all classes alike.
        kwargs: Other arguments of ``CascadeRoIHead``.

    Raises:
        ValueError: A box head has boxes of its own for each class.
    """

    def __init__(self, num_stages: int, **kwargs):
        super().__init__(num_stages, stage_loss_weights=[1.0] * num_stages, **kwargs)
        if not all(head.reg_class_agnostic for head in self.bbox_head):
            raise UserValueError('every bbox_head must have reg_class_agnostic=True')
        self.sample_all = PseudoSampler()

    def init_mask_head(self, mask_roi_extractor, mask_head) -> None:
        """As in CascadeRoIHead, for one head."""
        super().init_mask_head(mask_roi_extractor, mask_head)
        self.mask_head = nn.ModuleList([self.mask_head[0]] * self.num_stages)

    def loss(
        self, x: tuple[Tensor, ...], rpn_results_list: InstanceList, batch_data_samples: SampleList
    ) -> dict:
        """Losses of all stages, and of the masks at the first one's positive samples.

        Args:
            x (tuple[Tensor, ...]): Feature maps of all levels, (B, C, H, W).
            rpn_results_list (InstanceList): Proposals of each image.
            batch_data_samples (SampleList): Images with their ground truth.
        """
        if len(rpn_results_list) != len(batch_data_samples):
            raise UserValueError(
                f'rpn_results_list must have one entry for each of {len(batch_data_samples)} '
                f'samples, got {len(rpn_results_list)}'
            )
        truth, ignored, metas = unpack_gt_instances(batch_data_samples)
        boxes = [result.bboxes for result in rpn_results_list]
        losses = {}
        for stage in range(self.num_stages):
            samples = [self._sample(stage, *of_image, x) for of_image in zip(boxes, truth, ignored)]
            results = self.bbox_loss(stage, x, samples)
            losses.update({f's{stage}.{name}': v for name, v in results['loss_bbox'].items()})
            if stage == 0 and self.with_mask:
                masks = self.mask_loss(stage, x, samples, truth)
                losses.update({f's{stage}.{name}': v for name, v in masks['loss_mask'].items()})
            counts = [len(sample.priors) for sample in samples]
            boxes = self._refine(stage, results['rois'], results['bbox_pred'], counts, metas)
            # In testing they stay: the scores of the stages are averaged box by box.
            boxes = [b[(b[:, 2] > b[:, 0]) & (b[:, 3] > b[:, 1])] for b in boxes]
        return losses

    def _sample(
        self, stage: int, boxes: Tensor, truth: InstanceData, ignored: InstanceData, x
    ) -> SamplingResult:
        priors = InstanceData(priors=boxes)
        assigned = self.bbox_assigner[stage].assign(priors, truth, ignored)
        sampler = self.bbox_sampler[stage] if stage == 0 else self.sample_all
        return sampler.sample(assigned, priors, truth)

    def _bbox_forward(self, stage: int, x: tuple[Tensor, ...], rois: Tensor) -> dict:
        extract, head = self.bbox_roi_extractor[stage], self.bbox_head[stage]
        features = extract(x[: extract.num_inputs], rois)
        if features.requires_grad:
            features.register_hook(lambda grad: grad / self.num_stages)
        scores, deltas = head(features)
        return dict(cls_score=scores, bbox_pred=deltas, bbox_feats=features)

    @torch.no_grad()
    def _refine(
        self, stage: int, rois: Tensor, deltas: Tensor, counts: list[int], metas: list[dict]
    ) -> list[Tensor]:
        """Boxes (n, 4) of each image after a stage, clipped to the image."""
        head = self.bbox_head[stage]
        parts = zip(rois[:, 1:].split(counts), deltas.split(counts), metas, strict=True)
        return [head.regress_by_class(b, None, delta, meta) for b, delta, meta in parts]

    def _refine_roi(
        self,
        x: tuple[Tensor, ...],
        rois: Tensor,
        batch_img_metas: list[dict],
        num_proposals_per_img: tuple[int, ...],
    ) -> tuple:
        """RoIs, class scores and deltas of the last stage, as ``predict_bbox`` wants them.

        The scores are logarithms of the mean probabilities, whose softmax ``predict_bbox`` takes.
        """
        counts = [*num_proposals_per_img]
        results = self._bbox_forward(0, x, rois)
        probabilities = [results['cls_score'].softmax(-1)]
        for stage in range(1, self.num_stages):
            deltas = results['bbox_pred']
            rois = bbox2roi(self._refine(stage - 1, rois, deltas, counts, batch_img_metas))
            results = self._bbox_forward(stage, x, rois)
            probabilities.append(results['cls_score'].softmax(-1))
        scores = torch.stack(probabilities).mean(0).log()
        return rois.split(counts), scores.split(counts), results['bbox_pred'].split(counts)

    def predict_mask(
        self,
        x: tuple[Tensor, ...],
        batch_img_metas: list[dict],
        results_list: InstanceList,
        rescale: bool = False,
    ) -> InstanceList:
        """Masks of the boxes, computed once: CascadeRoIHead averages those of the stages.

        Args:
            x (tuple[Tensor, ...]): Feature maps of all levels, (B, C, H, W).
            batch_img_metas (list[dict]): Of each image.
            results_list (InstanceList): Boxes and labels of each image; get ``masks``, (n, H, W).
            rescale (bool): Whether boxes and masks become those of the original image.
        """
        rois = bbox2roi([result.bboxes for result in results_list])
        if not len(rois):
            return empty_instances(
                batch_img_metas,
                rois.device,
                task_type='mask',
                instance_results=results_list,
                mask_thr_binary=self.test_cfg.mask_thr_binary,
            )
        # As probabilities, which become float32 like the boxes; logits would stay in bfloat16.
        masks = self._mask_forward(0, x, rois)['mask_preds'].sigmoid().detach()
        return self.mask_head[0].predict_by_feat(
            masks.split([len(result) for result in results_list]),
            results_list,
            batch_img_metas,
            self.test_cfg,
            rescale=rescale,
            activate_map=True,
        )
