"""``test.py --tta`` against averages by hand."""

import csv
import json
import re

import cv2
import mmcv
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.model import BaseModel
from mmengine.registry import init_default_scope
from PIL import Image

from tests.field.base import coco, train
from tests.field.test_files import classifier
from tests.tools.conftest import run_tool
from vim_mm.engine.cli import load_model
from vim_mm.engine.tta import RATIOS, augment_test, default_views, fit_merging

REST = """
test_pipeline = pipeline
train_cfg = dict(max_iters=1, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1))
"""
OWN = """
tta_model = dict(type='SegTTAModel')
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='TestTimeAug', transforms=[
        [dict(type='Resize', scale_factor=r, keep_ratio=True) for r in (0.75, 1.5)],
        [dict(type='RandomFlip', prob=p) for p in (0.0, 1.0)],
        [dict(type='LoadAnnotations')],
        [dict(type='PackSegInputs')],
    ]),
]
"""
# A head that says something, and a segmentor in windows.
SLIDE = "model['test_cfg'] = dict(mode='slide', crop_size=(48, 48), stride=(32, 32))\n"


def mean_probabilities(model, path, ratios) -> np.ndarray:
    """(C, H, W) of a picture, over sizes and flips."""
    from mmseg.structures import SegDataSample

    image = mmcv.imread(str(path))
    height, width = image.shape[:2]
    total = 0
    for ratio in ratios:
        resized = mmcv.imrescale(image, ratio)
        for flip in (False, True):
            view = np.ascontiguousarray(resized[:, ::-1] if flip else resized)
            inputs = torch.from_numpy(view.transpose(2, 0, 1).copy())
            sample = SegDataSample(metainfo=dict(img_shape=view.shape[:2]))
            batch = model.data_preprocessor(dict(inputs=[inputs], data_samples=[sample]), False)
            with torch.no_grad():
                logits = model.inference(batch['inputs'], [metas(batch['inputs'], view)])
            logits = logits[..., : view.shape[0], : view.shape[1]]
            logits = logits.flip(3) if flip else logits
            logits = F.interpolate(logits, (height, width), mode='bilinear')
            total = total + logits[0].softmax(0)
    return (total / len(ratios) / 2).numpy()


def metas(inputs, view) -> dict:
    return dict(img_shape=view.shape[:2], pad_shape=tuple(inputs.shape[2:]), ori_shape=(0, 0))


def checkpoint(folder) -> str:
    """Of a model whose predictions are not of one class."""
    (path,) = (folder / 'run0').glob('*.pth')
    content = torch.load(path, weights_only=False)
    generator = torch.Generator().manual_seed(0)
    for name, weight in content['state_dict'].items():
        if 'conv_seg.weight' in name:
            weight.copy_(torch.randn(weight.shape, generator=generator))
    torch.save(content, path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(('rest', 'ratios'), [('', RATIOS), (OWN, (0.75, 1.5)), (SLIDE, RATIOS)])
def test_segmentation(rest, ratios, folder):
    train(folder, rest=REST + rest)
    path = checkpoint(folder)
    config = folder / 'config.py'
    out = run_tool('test.py', config, path, '--tta', '--out', folder / 'out', cwd=folder)
    assert 'Test-time augmentation by SegTTAModel' in out and 'mIoU' in out
    model, _ = load_model(Config.fromfile(config), path)
    pictures = sorted((folder / 'data/images/validation').iterdir())
    differ = several = 0
    for picture in pictures:
        expected = mean_probabilities(model.cpu(), picture, ratios).argmax(0)
        found = np.array(Image.open(folder / 'out' / picture.name))
        differ += (found != expected).sum()
        several += len(np.unique(expected))
    assert several > len(pictures) and differ < 4  # of 16,384: equal probabilities
    one_view = run_tool('test.py', config, path, '--out', folder / 'one', cwd=folder)
    assert ('which needs --tta: images have one view' in one_view) == (rest == OWN)
    maps = [np.array(Image.open(folder / 'one' / picture.name)) for picture in pictures]
    merged = [np.array(Image.open(folder / 'out' / picture.name)) for picture in pictures]
    assert not np.array_equal(maps, merged)


@pytest.mark.slow
def test_detection(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    from mmcv.ops import batched_nms

    rest = "model['test_cfg'] = dict(rcnn=dict(score_thr=0))\ntrain_cfg = dict(max_iters=1)\n"
    train(tmp_path, coco(tmp_path) + rest.replace('max_iters=1', 'max_iters=1, val_interval=1'))
    path = str(tmp_path / 'run0/iter_1.pth')
    config = tmp_path / 'config.py'
    out = run_tool('test.py', config, path, '--tta', '--out', tmp_path / 'out', cwd=tmp_path)
    assert 'DetTTAModel merges boxes: masks are left out.' in out
    assert 'bbox_mAP' in out and 'segm_mAP' not in out
    found = json.loads((tmp_path / 'out/predictions.bbox.json').read_text())
    cfg = Config.fromfile(config)
    model, _ = load_model(cfg, path)
    model.cpu()
    init_default_scope('mmdet')
    pipeline = cfg.test_dataloader.dataset.pipeline
    keys = (*pipeline[-1]['meta_keys'], 'flip', 'flip_direction')
    for image_id in range(4):
        boxes, scores, labels = [], [], []
        for flip in (0.0, 1.0):
            steps = [*pipeline[:2], dict(type='RandomFlip', prob=flip)]
            steps = Compose([*steps, dict(pipeline[-1], meta_keys=keys)])
            picture = str(tmp_path / f'data/{image_id}.jpg')
            data = steps(dict(img_path=picture, img_id=image_id))
            batch = dict(inputs=[data['inputs']], data_samples=[data['data_samples']])
            with torch.no_grad():
                instances = model.test_step(batch)[0].pred_instances
            if flip:
                width = cv2.imread(picture).shape[1]
                instances.bboxes[:, [0, 2]] = width - instances.bboxes[:, [2, 0]]
            boxes.append(instances.bboxes)
            scores.append(instances.scores)
            labels.append(instances.labels)
        nms = dict(type='nms', iou_threshold=0.5)
        merged, _ = batched_nms(torch.cat(boxes), torch.cat(scores), torch.cat(labels), nms)
        merged = merged[:100].numpy()
        own = [each for each in found if each['image_id'] == image_id]
        assert len(own) == len(merged) > 20
        merged[:, 2:4] -= merged[:, :2]
        assert np.allclose([each['bbox'] for each in own], merged[:, :4], atol=1e-3)
        assert np.allclose([each['score'] for each in own], merged[:, 4], atol=1e-5)


@pytest.mark.slow
def test_classification(tmp_path):
    pytest.importorskip('mmpretrain')
    random = np.random.default_rng(0)
    for name in ('apple', 'pear'):
        (tmp_path / 'fruit' / name).mkdir(parents=True)
        for i in range(3):
            image = random.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(image).save(tmp_path / 'fruit' / name / f'{i}.png')
    train(tmp_path, classifier(tmp_path))
    (path,) = map(str, (tmp_path / 'run0').glob('*.pth'))
    content = torch.load(path, weights_only=False)
    for weight in content['state_dict'].values():  # scores that differ in four digits
        if weight.is_floating_point():
            weight.add_(torch.randn_like(weight), alpha=0.5)
    torch.save(content, path)
    config = tmp_path / 'config.py'
    out = run_tool('test.py', config, path, '--tta', '--out', tmp_path / 'out', cwd=tmp_path)
    assert 'Test-time augmentation by AverageClsScoreTTA: as it is and mirrored.' in out
    model, _ = load_model(Config.fromfile(config), path)
    rows = [*csv.DictReader((tmp_path / 'out/labels.csv').open())]
    assert len(rows) == 6
    differences = []
    for row in rows:
        image = mmcv.imread(row['image'])
        views = [
            torch.from_numpy(view.transpose(2, 0, 1).copy()) for view in (image, image[:, ::-1])
        ]
        batch = model.cpu().data_preprocessor(dict(inputs=torch.stack(views)), False)
        with torch.no_grad():
            scores = model(batch['inputs'], mode='tensor').softmax(1)
        mean = scores.mean(0)
        assert row['prediction'] == ('apple', 'pear')[int(mean.argmax())]
        assert float(row['score']) == pytest.approx(float(mean.max()), abs=1e-4)
        differences.append(float((scores[0] - mean).abs().max()))
    assert max(differences) > 1e-3, 'the mirrored view counts'


class Answers(BaseModel):
    """What a test-time augmentation wraps."""

    def forward(self, inputs, data_samples=None, mode='tensor'):
        raise NotImplementedError


@pytest.mark.parametrize(
    ('head', 'expected'),
    [({}, [1]), (dict(thr=0.35, topk=None), [1, 2]), (dict(thr=None, topk=2), [1, 2])],
)
def test_labels_are_those_of_the_merged_scores(head, expected):
    """Of one label, of all above a threshold and of the best few; the first view says 0."""
    pytest.importorskip('mmpretrain')
    from mmpretrain.models.tta.score_tta import AverageClsScoreTTA
    from mmpretrain.structures import DataSample

    module = Answers()
    module.head = torch.nn.Module()
    vars(module.head).update(head)
    model = AverageClsScoreTTA(module=module)
    fit_merging(model)
    scores = torch.tensor([[0.6, 0.5, 0.1], [0.0, 0.4, 0.7]])  # mean 0.3, 0.45, 0.4
    seen = [DataSample().set_pred_score(s).set_pred_label(0) for s in scores]
    (merged,) = model.merge_preds([seen])
    assert merged.pred_label.tolist() == expected


def views(pipeline, ratios=(0.5, 2.0)):
    *before, augmented = default_views(pipeline, ratios)
    kinds = [[each['type'] for each in step] for step in augmented['transforms']]
    return [each['type'] for each in before], kinds, augmented['transforms']


def test_views_of_any_pipeline():
    load, labels = dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')
    pack = dict(type='PackSegInputs', meta_keys=('img_path', 'flip'))
    resize = dict(type='Resize', scale=(2048, 512), keep_ratio=True)
    before, kinds, steps = views([load, labels, resize, pack])
    assert before == ['LoadImageFromFile']
    assert kinds == [['Resize'] * 2, ['RandomFlip'] * 2, ['LoadAnnotations'], ['PackSegInputs']]
    assert [each['scale'] for each in steps[0]] == [(1024, 256), (4096, 1024)]
    assert steps[-1][0]['meta_keys'] == ('img_path', 'flip', 'flip_direction')
    assert resize['scale'] == (2048, 512) and pack['meta_keys'] == ('img_path', 'flip')
    _, _, steps = views([load, dict(type='Resize', scale=64), dict(type='Pack')])
    assert [each['scale'] for each in steps[0]] == [32, 128]
    _, _, steps = views([load, dict(type='Resize', scale_factor=(1.0, 2.0)), dict(type='Pack')])
    assert [each['scale_factor'] for each in steps[0]] == [(0.5, 1.0), (2.0, 4.0)]
    _, kinds, steps = views([load, labels, dict(type='Pad'), dict(type='Pack')])
    assert [each['scale_factor'] for each in steps[0]] == [0.5, 2.0] and kinds[1] == ['Pad']
    _, kinds, _ = views([load, resize, labels, pack], ratios=())
    assert kinds[0] == ['Resize'] and kinds[1] == ['RandomFlip'] * 2


def test_every_data_set_within_others_gets_the_views():
    leaf = dict(type='BaseSegDataset', pipeline=[dict(type='LoadImageFromFile'), dict(type='P')])
    several = dict(type='ConcatDataset', datasets=[leaf, dict(type='RepeatDataset', dataset=leaf)])
    model = dict(type='EncoderDecoder', test_cfg=dict(mode='whole'))
    cfg = Config(
        dict(
            default_scope='mmseg',
            model=model,
            data_preprocessor=dict(type='SegDataPreProcessor'),
            test_dataloader=dict(dataset=several),
        )
    )
    (line,) = augment_test(cfg)
    assert line.endswith(
        'SegTTAModel: 6 sizes (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), each as it is and mirrored.'
    )
    first, second = cfg.test_dataloader.dataset.datasets
    assert first.pipeline[-1].type == second.dataset.pipeline[-1].type == 'TestTimeAug'
    assert cfg.model.type == 'SegTTAModel' and 'data_preprocessor' not in cfg
    assert cfg.model.module.data_preprocessor.type == 'SegDataPreProcessor'
    assert cfg.model.module.test_cfg == dict(mode='whole', store_logits=True)


def test_masks_alone_cannot_be_merged():
    cfg = Config(
        dict(
            default_scope='mmdet',
            model=dict(type='MaskRCNN'),
            test_dataloader=dict(),
            test_evaluator=dict(type='CocoMetric', metric='segm'),
        )
    )
    with pytest.raises(ValueError, match=r"merges boxes and no masks, and .*metric is 'segm'"):
        augment_test(cfg)


@pytest.mark.slow
def test_labels_are_checked_in_the_views(folder):
    """As in one view: a label that is none of the classes ends the test."""
    train(folder, rest=REST)
    path = folder / 'data/annotations/validation/003.png'
    Image.fromarray(np.full((64, 64), 9, np.uint8)).save(path)
    args = ('test.py', folder / 'config.py', folder / 'run0/iter_1.pth')
    plain = run_tool(*args, cwd=folder, fails=True).splitlines()[-1]
    views = run_tool(*args, '--tta', cwd=folder, fails=True).splitlines()[-1]
    assert plain == views and re.search(r'003\.png: a label is 9', plain)
