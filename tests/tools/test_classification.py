"""A classifier through train.py, test.py and infer.py, and on into a segmentor and a detector.

The tools run in this process: each alone would spend its time on importing PyTorch.
"""

import csv
import json
import sys

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

from tests.configs.samples import classification_batch
from tests.datasets.idx import write_idx_files
from tests.scripts import TOOLS, load
from vim_mm.config import config_path
from vim_mm.datasets.fashion import write_classes
from vim_mm.engine import activate
from vim_mm.engine.cli import import_task_library

pytest.importorskip('mmpretrain', reason='classification needs mmpretrain')
pytestmark = pytest.mark.slow

SMALL = """
_base_ = 'vim_mm::cls/vim_fashion_zoh.py'

model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=16, num_layers=2)),
    head=dict(in_channels=16),
)
train_dataloader = dict(batch_size=4, num_workers=0)
val_dataloader = dict(batch_size=4, num_workers=0)
test_dataloader = val_dataloader
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=4))
# MMEngine keeps one of each name for the whole process.
visualizer = dict(name='classification')
custom_hooks = [dict(type='EMAHook', momentum=0.5, priority='ABOVE_NORMAL')]
"""


def run(tool: str, *args) -> None:
    """A tool as its command line runs it; a mistake is a SystemExit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOLS))
        patch.setattr(sys, 'argv', [tool, *map(str, args)])
        patch.setenv('CUDA_VISIBLE_DEVICES', '')
        load(tool, '__main__')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Drawn garments as classes, a config, and a training by foh of four iterations."""
    folder = tmp_path_factory.mktemp('classification')
    with pytest.MonkeyPatch.context() as patch:
        write_idx_files(folder / 'idx', patch)
        write_classes(folder / 'classes', folder / 'idx')
    config = folder / 'small.py'
    config.write_text(SMALL)
    data = ('--cfg-options', f'data_root={folder / "classes"}')
    method = ('--discretization-method', 'foh')
    run('train.py', config, '--work-dir', folder / 'run', *method, *data)
    return folder


@pytest.mark.parametrize(
    'options',
    [dict(cls_token=place) for place in ('head', 'middle', 'tail', 'double')]
    + [dict(cls_token='none', out_type='avg_featmap')],
)
def test_every_pooling_learns(options):
    activate()
    cfg = Config.fromfile(config_path('cls/vim_fashion_zoh.py'))
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    cfg.model.backbone.update(arch=dict(embed_dims=16, num_layers=1), **options)
    cfg.model.head.in_channels = 16
    model = MODELS.build(cfg.model)
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    batch = classification_batch(10)
    losses = [float(model.train_step(batch, optim_wrapper)['loss'].detach()) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_train_logs_and_saves(folder):
    (log,) = folder.glob('run/*/vis_data/scalars.json')
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record['step'] for record in records if 'loss' in record] == [1, 2, 3, 4]
    assert 0 <= records[-1]['accuracy/top1'] <= 100
    checkpoint = torch.load(folder / 'run/iter_4.pth', weights_only=False)
    assert checkpoint['meta']['vim_mm']['backbones']['backbone']['discretization_method'] == 'foh'


def test_test_repeats_the_metric_and_writes_a_table(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(
        'test.py', folder / 'small.py', folder / 'run/iter_4.pth', '--out', 'out',
        '--discretization-method', 'foh', '--cfg-options', f'data_root={folder / "classes"}',
    )  # fmt: skip
    with (tmp_path / 'out/labels.csv').open(newline='') as stream:
        rows = [*csv.DictReader(stream)]
    assert len(rows) == 20
    assert all(row['truth'].replace(' ', '_') in row['image'] for row in rows)
    assert all(0.1 <= float(row['score']) <= 1 for row in rows)
    correct = np.mean([row['truth'] == row['prediction'] for row in rows])
    (log,) = folder.glob('run/*/vis_data/scalars.json')
    accuracy = json.loads(log.read_text().splitlines()[-1])['accuracy/top1']
    assert 100 * correct == pytest.approx(accuracy)


def test_infer_names_the_class_on_a_picture_of_any_size(folder, tmp_path):
    rng = np.random.default_rng(0)
    picture = tmp_path / 'wide.jpg'
    Image.fromarray(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8)).save(picture)
    arguments = (folder / 'small.py', folder / 'run/iter_4.pth', picture)
    run('infer.py', *arguments, '--out', tmp_path / 'o', '--discretization-method', 'foh')
    overlay = np.array(Image.open(tmp_path / 'o/wide.png'))
    assert overlay.shape[:2] == (6 * 60, 6 * 90)  # enlarged, so that the words can be read
    assert (overlay[:20] > 240).any()  # the words are white


def test_report_draws_the_mistakes(folder, capsys):
    run('demo_report.py', folder / 'run', '--images', '1')
    assert 'held-out images; most often' in capsys.readouterr().out
    assert Image.open(folder / 'run/mistakes.png').width > 100


@pytest.mark.parametrize('name', ['seg/upernet_vim_shapes.py', 'det/mask_rcnn_vim_shapes.py'])
def test_its_weights_drop_into_a_dense_model(name, folder, monkeypatch):
    """By init_cfg alone: all of the backbone, but for what only the classifier uses."""
    activate()
    cfg = Config.fromfile(config_path(name))
    import_task_library(cfg)
    init_default_scope(cfg.default_scope)
    dense = name.startswith('seg')
    cfg.model.backbone.update(
        arch=dict(embed_dims=16, num_layers=2),
        out_indices=(0, 1) if dense else (1,),
        discretization_method='foh',
        init_cfg=dict(
            type='Pretrained', checkpoint=str(folder / 'run/iter_4.pth'), prefix='backbone.'
        ),
    )
    said = []
    monkeypatch.setattr(
        'mmengine.runner.checkpoint.print_log', lambda text, **kwargs: said.append(text)
    )
    backbone = MODELS.build(cfg.model.backbone)
    backbone.init_weights()
    trained = torch.load(folder / 'run/iter_4.pth', 'cpu', weights_only=False)['state_dict']
    for key, weight in backbone.state_dict().items():
        if key != 'pos_embed':  # of another grid
            torch.testing.assert_close(weight, trained[f'backbone.{key}'], rtol=0, atol=0)
    report = '\n'.join(said)
    assert 'unexpected key in source state_dict: cls_token, norm_f.weight' in report
    assert 'missing keys' not in report
