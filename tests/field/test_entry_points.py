"""Other people's entry points give on our configs and checkpoints what our tools give."""

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from PIL import Image

from tests.field.base import CONFIG, coco, train
from tests.field.test_files import classifier
from vim_mm.config import config_names, config_path
from vim_mm.engine import activate
from vim_mm.engine.cli import load_model
from vim_mm.engine.reader import leaf_dataset, prediction_pipeline, same_transforms

OWN_PIPELINE = 'test_pipeline = pipeline'


def trained(folder, text=None, rest='') -> tuple[str, str]:
    """A config and the checkpoint of its run."""
    train(folder, text, rest)
    (checkpoint,) = (folder / 'run0').glob('*.pth')
    return str(folder / 'config.py'), str(checkpoint)


def photograph(folder) -> str:
    image = np.random.default_rng(1).integers(0, 256, (48, 80, 3), np.uint8)
    Image.fromarray(image).save(folder / 'photograph.png')
    return str(folder / 'photograph.png')


def own_prediction(config: str, checkpoint: str, picture: str):
    """By what infer.py calls."""
    cfg = Config.fromfile(config)
    data = prediction_pipeline(cfg)(dict(img_path=picture, img_id=0))
    model, _ = load_model(cfg, checkpoint)
    with torch.no_grad():
        return model.cpu().test_step(pseudo_collate([data]))[0]


@pytest.mark.parametrize('name', config_names())
def test_test_pipeline_is_that_of_the_test_data(name):
    activate()
    cfg = Config.fromfile(config_path(name))
    assert same_transforms(cfg.test_pipeline, leaf_dataset(cfg).pipeline)


@pytest.mark.slow
def test_mmsegmentation(folder):
    from mmseg.apis import MMSegInferencer, inference_model, init_model

    files = trained(folder, rest=OWN_PIPELINE)
    picture = photograph(folder)
    labels = own_prediction(*files, picture).pred_sem_seg.data[0].numpy()
    model = init_model(*files, device='cpu')
    found = inference_model(model, picture)
    assert np.array_equal(found.pred_sem_seg.data[0], labels)
    assert 'seg_logits' not in found
    several = inference_model(model, [picture, picture])
    assert all(np.array_equal(each.pred_sem_seg.data[0], labels) for each in several)

    asked = {'model.test_cfg.store_logits': True}
    model = init_model(*files, device='cpu', cfg_options=asked)
    found = inference_model(model, picture)
    probabilities = found.seg_logits.data.softmax(0)
    assert probabilities.shape == (3, *labels.shape)
    assert np.array_equal(probabilities.argmax(0), labels)

    inferencer = MMSegInferencer(*files, device='cpu')
    assert np.array_equal(inferencer(picture)['predictions'], labels)
    inferencer.model.test_cfg.store_logits = True
    assert inferencer(picture, return_datasamples=True).seg_logits.data.shape[0] == 3


@pytest.mark.slow
def test_mmdetection(tmp_path):
    pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    from mmdet.apis import DetInferencer, inference_detector, init_detector

    files = trained(tmp_path, coco(tmp_path) + "model['test_cfg'] = dict(rcnn=dict(score_thr=0))\n")
    picture = photograph(tmp_path)
    boxes = own_prediction(*files, picture).pred_instances.bboxes
    assert len(boxes)
    model = init_detector(*files, device='cpu')
    assert torch.equal(inference_detector(model, picture).pred_instances.bboxes, boxes)
    found = DetInferencer(*files, device='cpu')(picture)['predictions'][0]
    assert torch.equal(torch.tensor(found['bboxes']), boxes)
    assert len(found['masks']) == len(boxes)


@pytest.mark.slow
def test_mmpretrain(tmp_path):
    pytest.importorskip('mmpretrain')
    for name in ('apple', 'pear'):
        (tmp_path / 'fruit' / name).mkdir(parents=True)
        for i in range(2):
            Image.new('RGB', (32, 32)).save(tmp_path / 'fruit' / name / f'{i}.png')
    from mmpretrain import ImageClassificationInferencer

    config, checkpoint = trained(tmp_path, classifier(tmp_path))
    picture = photograph(tmp_path)
    scores = own_prediction(config, checkpoint, picture).pred_score
    (found,) = ImageClassificationInferencer(config, pretrained=checkpoint, device='cpu')(picture)
    assert np.array_equal(found['pred_scores'], scores)
    assert found['pred_class'] == ('apple', 'pear')[int(scores.argmax())]


def test_a_config_that_changes_the_transforms_of_its_data(folder, monkeypatch):
    """The config of the run has one pipeline."""
    lines = []
    monkeypatch.setattr('vim_mm.engine.reader.print_log', lambda line, *_: lines.append(line))
    train(folder, CONFIG.format(root=str(folder / 'data'), rest=''), test=True)
    (line,) = lines
    assert 'config.py: test_pipeline is not the pipeline of test_dataloader.dataset' in line
    written = folder / 'run0/config.py'
    cfg = Config.fromfile(written)
    assert same_transforms(cfg.test_pipeline, leaf_dataset(cfg).pipeline)
    assert [each['type'] for each in cfg.test_pipeline] == [
        'LoadImageFromFile', 'LoadAnnotations', 'PackSegInputs'
    ]  # fmt: skip
