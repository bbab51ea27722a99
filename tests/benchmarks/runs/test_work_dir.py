"""Reading runs: logs of resumed runs, and the demo's report on a tiny run of either task."""

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmengine.config import Config

from benchmarks.pictures.plots import Region, Sample
from benchmarks.runs.work_dir import find_checkpoint, find_config, read_history
from tests.scripts import TOOLS, load
from vim_mm.config import config_path, merge_options
from vim_mm.datasets.shapes import ShapesConfig, write_dataset
from vim_mm.engine import VimRunner
from vim_mm.engine.screen import close_screen

TINY = {
    'model.backbone.arch': {'embed_dims': 16, 'num_layers': 4},
    'train_cfg.max_iters': 2,
    'train_cfg.val_interval': 2,
    'train_dataloader.batch_size': 2,
    'train_dataloader.num_workers': 0,
    'train_dataloader.persistent_workers': False,
    'val_dataloader.num_workers': 0,
    'val_dataloader.persistent_workers': False,
    'default_hooks.logger.interval': 1,
}
TASKS = {
    'seg/upernet_vim_shapes.py': {
        'model.neck.embed_dim': 16,
        'model.decode_head.in_channels': [16] * 4,
        'model.auxiliary_head.in_channels': 16,
    },
    'det/mask_rcnn_vim_shapes.py': {'model.neck.in_channels': 16},
}


def _log(work_dir, run, records):
    folder = work_dir / run / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text('\n'.join(map(json.dumps, records)) + '\n')


def test_history_of_a_resumed_run(tmp_path):
    _log(tmp_path, '20260101_000000', [{'loss': 3.0, 'step': 10}, {'mIoU': 20.0, 'step': 20}])
    later = [{'loss': 1.0, 'step': 30}, {'mIoU': 21.0, 'step': 20}, {'mIoU': 40.0, 'step': 40}]
    _log(tmp_path, '20260101_010000', later)
    losses, metrics = read_history(tmp_path)
    assert losses == [(10, 3.0), (30, 1.0)]
    assert metrics == {'mIoU': [(20, 21.0), (40, 40.0)]}


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path):
    _log(tmp_path, 'run', [{'loss': 3.0, 'step': 10}])
    with (tmp_path / 'run/vis_data/scalars.json').open('a') as log:
        log.write('{"loss": 2.0, "st')
    assert read_history(tmp_path)[0] == [(10, 3.0)]


def test_detection_metrics_become_percent(tmp_path):
    validation = {'coco/bbox_mAP': 0.25, 'coco/segm_mAP': 0.5, 'step': 10}
    _log(tmp_path, 'run', [{'loss': 3.0, 'step': 10}, validation])
    assert read_history(tmp_path)[1] == {'box AP': [(10, 25.0)], 'mask AP': [(10, 50.0)]}


def test_a_run_that_logged_no_loss_has_its_metrics(tmp_path, monkeypatch, capsys):
    """It was shorter than the logger's interval."""
    _log(tmp_path / 'short', 'run', [{'mIoU': 20.0, 'step': 4}])
    _log(tmp_path / 'long', 'run', [{'loss': 2.0, 'step': 50}, {'mIoU': 30.0, 'step': 100}])
    runs = [str(tmp_path / name) for name in ('short', 'long')]
    picture = tmp_path / 'losses.png'
    monkeypatch.setattr(sys, 'argv', ['compare_runs.py', *runs, '--picture', str(picture)])
    load('compare_runs.py', '__main__')
    rows = [line.split('|')[1:-1] for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert ['short', '4', '', '20.00'] in cells and ['long', '100', '2', '30.00'] in cells
    assert picture.exists()
    with pytest.raises(FileNotFoundError, match='holds no log of training'):
        read_history(tmp_path)


def test_runs_are_compared_before_they_validate(tmp_path, monkeypatch, capsys):
    _log(tmp_path / 'zoh', 'run', [{'loss': 3.0, 'step': 10}, {'loss': 2.5, 'step': 20}])
    _log(tmp_path / 'foh', 'run', [{'loss': 2.0, 'step': 10}, {'mIoU': 20.0, 'step': 10}])
    picture = tmp_path / 'losses.png'
    runs = [str(tmp_path / name) for name in ('zoh', 'foh')]
    monkeypatch.setattr(sys, 'argv', ['compare_runs.py', *runs, '--picture', str(picture)])
    load('compare_runs.py', '__main__')
    cells = [line.replace(' ', '') for line in capsys.readouterr().out.splitlines()]
    assert '|run|iterations|loss|' in cells and '|zoh|20|2.5|' in cells
    assert '|run|iterations|loss|mIoU|' in cells and '|foh|10|2|20.00|' in cells
    assert cv2.imread(str(picture)).shape[1] > 400


@pytest.mark.parametrize('find', [find_config, find_checkpoint, read_history])
def test_what_is_missing_is_said(tmp_path, find):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        find(tmp_path)


@pytest.fixture(scope='module')
def data_root(tmp_path_factory):
    root = tmp_path_factory.mktemp('data') / 'shapes'
    write_dataset(root, ShapesConfig(train=4, val=3, size=64, seed=1))
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    'config',
    [pytest.param(t, marks=pytest.mark.slow if t.startswith('det') else ()) for t in TASKS],
)
def test_report_on_a_tiny_run(config, data_root, tmp_path, monkeypatch, capsys):
    cfg = Config.fromfile(config_path(config))
    merge_options(cfg, {**TINY, **TASKS[config], 'data_root': str(data_root)})
    cfg.work_dir = str(tmp_path / 'before')
    VimRunner.from_cfg(cfg).train()
    work_dir = (tmp_path / 'before').rename(tmp_path / 'moved')
    monkeypatch.setattr(sys, 'argv', ['demo_report.py', str(work_dir), '--images', '2'])
    try:
        load('demo_report.py', '__main__')
    finally:
        close_screen()  # else later tests print to it
    said = capsys.readouterr().out
    assert 'on held-out images after 2 iterations' in said
    for name in ('curves.png', 'predictions.png'):
        assert cv2.imread(str(work_dir / name)).shape[1] > 500
        assert str(work_dir / name) in said
    assert ('objects in 3 held-out images are found' in said) == config.startswith('det')
    checkpoint = work_dir / 'iter_2.pth'
    *_, first, second, third = said.splitlines()
    for command, tool in ((first, 'infer'), (second, 'visualize'), (third, 'train')):
        assert command.startswith(f'  python tools/{tool}.py ')
        named = [Path(word) for word in command.partition('#')[0].split() if '/' in word][1:]
        assert all(path.is_file() for path in named)
        assert (checkpoint in named) == (tool != 'train')


def test_found_objects_are_counted_once(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    count_found = import_module('demo_report').count_found
    mask, image = np.zeros((50, 50), bool), np.zeros((50, 50, 3), np.uint8)
    truth = [Region(mask, 1, (0, 0, 10, 10)), Region(mask, 2, (20, 20, 40, 40))]
    good = Region(mask, 1, (1, 0, 10, 10), 0.9)
    again = Region(mask, 1, (0, 0, 10, 9), 0.8)
    of_another_class = Region(mask, 1, (20, 20, 40, 40), 0.7)
    elsewhere = Region(mask, 2, (0, 0, 20, 20), 0.95)
    samples = [
        Sample(image, truth, [again, good, of_another_class, elsewhere]),
        Sample(image, [], [good]),
        Sample(image, truth, []),
    ]
    assert count_found(samples) == (1, 4, 4)
