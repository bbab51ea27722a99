"""Assigning, sampling and suppression of a batch against MMDetection's and MMCV's, one by one."""

import pytest
import torch
from mmengine.structures import InstanceData

pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
from mmcv.ops import nms
from mmdet.models.task_modules import AssignResult, MaxIoUAssigner, RandomSampler

from vim_mm.detection import assign as assigning
from vim_mm.detection import truth as packing
from vim_mm.detection.assign import assign
from vim_mm.detection.sample import sample
from vim_mm.detection.suppression import suppress


def boxes(number: int, side: float = 40, spread: float = 60) -> torch.Tensor:
    corner = torch.rand(number, 2) * spread
    return torch.cat([corner, corner + torch.rand(number, 2) * side], 1)


def ground_truth(objects: list[torch.Tensor], ignored: list[torch.Tensor]):
    from mmdet.structures import DetDataSample

    samples = []
    for own, other in zip(objects, ignored, strict=True):
        sample = DetDataSample(metainfo=dict(img_shape=(90, 95), pad_shape=(96, 96)))
        labels = torch.arange(len(own)) % 4
        sample.gt_instances = InstanceData(bboxes=own, labels=labels)
        sample.ignored_instances = InstanceData(bboxes=other)
        samples.append(sample)
    return samples, packing.pack(samples, torch.device('cpu'), True, False)


RULES = {
    'rpn': dict(pos_iou_thr=0.7, neg_iou_thr=0.3, min_pos_iou=0.3),
    'roi': dict(pos_iou_thr=0.5, neg_iou_thr=0.5, min_pos_iou=0.5, match_low_quality=False),
    'any best': dict(pos_iou_thr=0.7, neg_iou_thr=0.3, min_pos_iou=0.0),
    'one best': dict(pos_iou_thr=0.6, neg_iou_thr=(0.05, 0.3), gt_max_assign_all=False),
    'nothing negative': dict(pos_iou_thr=0.6, neg_iou_thr=0),
    'ignoring': dict(pos_iou_thr=0.5, neg_iou_thr=0.4, ignore_iof_thr=0.4),
    'ignoring by the other': dict(
        pos_iou_thr=0.5, neg_iou_thr=0.4, ignore_iof_thr=0.4, ignore_wrt_candidates=False
    ),
    'many on the CPU': dict(pos_iou_thr=0.5, neg_iou_thr=0.4, gpu_assign_thr=2),
}


@pytest.mark.parametrize('chunk', [assigning.CHUNK, 1], ids=['at once', 'one by one'])
@pytest.mark.parametrize('name', RULES)
def test_assigning(name, chunk, monkeypatch):
    monkeypatch.setattr(assigning, 'CHUNK', chunk)
    rule = MaxIoUAssigner(**RULES[name])
    objects = [boxes(n) for n in (5, 0, 37)]
    samples, truth = ground_truth(objects, [boxes(n) for n in (3, 2, 0)])
    assert truth.boxes.shape[1] == 64
    priors = boxes(300)
    priors[:5], priors[5:8] = objects[0], objects[0][:3]  # a perfect fit, and the same fit twice
    usable = torch.rand(3, 300) < 0.9
    found = assign(rule, priors, truth, usable)
    for own, mask, sample_ in zip(found, usable, samples, strict=True):
        given = InstanceData(priors=priors[mask])
        expected = rule.assign(given, sample_.gt_instances, sample_.ignored_instances)
        assert torch.equal(own[mask], expected.gt_inds)
        assert (own[~mask] == -1).all()
    everything = assign(rule, priors, truth)
    assert torch.equal(everything, assign(rule, priors, truth, torch.ones_like(usable)))


@pytest.mark.parametrize(
    ('options', 'positive', 'negative'),
    [
        (dict(num=8, pos_fraction=0.5), 10, 30),
        (dict(num=8, pos_fraction=0.5), 2, 30),
        (dict(num=8, pos_fraction=0.5), 10, 3),
        (dict(num=8, pos_fraction=0.5), 0, 5),
        (dict(num=8, pos_fraction=0.25), 0, 0),
        (dict(num=20, pos_fraction=0.25, neg_pos_ub=1.5), 3, 30),
        (dict(num=20, pos_fraction=0.25, neg_pos_ub=2), 0, 30),
        (dict(num=100, pos_fraction=0.5), 60, 3),
        (dict(num=8, pos_fraction=0.0), 10, 30),
        (dict(num=8, pos_fraction=1.0), 10, 30),
    ],
)
def test_the_numbers_of_samples(options, positive, negative):
    rule = RandomSampler(add_gt_as_proposals=False, **options)
    kinds = torch.cat([torch.full((n,), k) for n, k in ((positive, 3), (negative, 0), (7, -1))])
    assigned = torch.stack([kinds[torch.randperm(len(kinds))] for _ in range(4)])
    index, is_positive, valid = sample(rule, assigned)
    priors = torch.rand(len(kinds), 4)
    for own, place, first, real in zip(assigned, index, is_positive, valid, strict=True):
        labels = torch.where(own > 0, 0, -1)
        result = AssignResult(1, own.clone(), torch.zeros(len(own)), labels)
        truth = InstanceData(bboxes=torch.rand(3, 4), labels=torch.zeros(3).long())
        expected = rule.sample(result, InstanceData(priors=priors), truth)
        assert first.sum() == len(expected.pos_inds)
        assert real.sum() == len(expected.pos_inds) + len(expected.neg_inds)
        assert (own[place[first]] == 3).all() and (own[place[real & ~first]] == 0).all()
        assert len(place[real].unique()) == real.sum(), 'without replacement'
        # Positive ones first, padding last.
        assert torch.equal(first, first.sort(descending=True, stable=True).values)
        assert torch.equal(real, real.sort(descending=True, stable=True).values)


def test_every_box_is_as_likely():
    """Of 6 positive boxes 2 are drawn and of 9 negative ones 4: each pair as often as any other."""
    rule = RandomSampler(num=6, pos_fraction=0.34, add_gt_as_proposals=False)
    draws = 30000
    assigned = torch.tensor([1, 0, 2, 0, 0, -1, 3, 1, 0, 0, 2, 1, 0, 0, 0, 0, -1])
    index, first, valid = sample(rule, assigned.expand(draws, -1))
    assert first.sum(1).eq(2).all() and valid.sum(1).eq(6).all()
    counts = torch.zeros(draws, len(assigned)).scatter(1, index, 1.0)
    together = counts.T @ counts / draws
    for kind, number, total in ((assigned > 0, 2, 6), (assigned == 0, 4, 9)):
        own = together[kind][:, kind]
        single, pair = number / total, number * (number - 1) / (total * (total - 1))
        expected = torch.full((total, total), pair).fill_diagonal_(single)
        deviation = (expected * (1 - expected) / draws).sqrt()
        assert ((own - expected).abs() < 5 * deviation).all()
    assert together[assigned == -1].sum() == 0


def check_suppression(number: int, threshold: float, device: str) -> None:
    given = torch.stack([boxes(number, 60) for _ in range(4)])
    valid = torch.rand(4, number) < 0.9
    valid[3] = False
    kept = suppress(given.to(device), valid.to(device), threshold).cpu()
    assert kept.shape == valid.shape and not (kept & ~valid).any()
    order = torch.arange(number, 0, -1).float()
    for own, real, mask in zip(given, valid, kept, strict=True):
        if real.any():
            expected = nms(own[real], order[real], threshold)[1].sort().values
            assert torch.equal(mask[real].nonzero()[:, 0], expected)


@pytest.mark.parametrize('threshold', [0.1, 0.5, 0.7])
@pytest.mark.parametrize('number', [1, 40, 150])
def test_suppression(number, threshold):
    check_suppression(number, threshold, 'cpu')


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('number', [1, 150, 2000])
def test_suppression_on_a_gpu(number):
    check_suppression(number, 0.7, 'cuda')
