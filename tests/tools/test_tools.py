"""train.py, test.py and infer.py as a user runs them, from a directory of no importance."""

import json
import os
import re
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from tests.graphs import assert_same_bits
from tests.scripts import TOOLS, load
from tests.tools.conftest import environment, run_tool
from vim_mm.engine.saving.written import last_checkpoint
from vim_mm.ops import METHODS

# Trainings in processes of their own.
pytestmark = pytest.mark.slow

FIRST_METRIC = {'seg': 'mIoU', 'det': 'coco/bbox_mAP'}


def iterations(log: str) -> list[int]:
    """Numbers of the iterations of training that a log reports."""
    return [int(i) for i in re.findall(r'Iter\(train\) \[ *(\d+)/', log)]


def metrics(log: str, stage: str) -> str:
    """The last metrics of a stage, 'val' or 'test', without times."""
    found = re.findall(rf'Iter\({stage}\) \[\d+/\d+\]((?:\s+\S+: \S+)+?)\s+time: ', log)
    return ' '.join(found[-1].split())


@pytest.fixture(scope='module', params=['seg', 'det'])
def trained(request, configs, data_root, tmp_path_factory):
    """Config, work directory and log of a finished training of either task in mixed precision."""
    if request.param == 'det':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
    config = configs[request.param]
    cwd = tmp_path_factory.mktemp('elsewhere')
    options = ('--amp', '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', config, *options, cwd=cwd)
    return request.param, config, cwd / 'work_dirs' / config.stem, log


def test_train_reports_and_saves(trained):
    task, _, work_dir, log = trained
    assert iterations(log) == [1, 2, 3, 4]
    (whole,) = work_dir.glob('*/*.log')
    assert "type='BFloat16OptimWrapper'" in whole.read_text()
    assert re.search(r'eta: \d+:\d\d:\d\d', log)
    assert FIRST_METRIC[task] in metrics(log, 'val')
    assert {p.name for p in work_dir.glob('*.pth')} == {'iter_2.pth', 'iter_4.pth'}


def test_test_repeats_the_metrics_and_saves_predictions(trained, data_root, tmp_path):
    task, config, work_dir, trained_log = trained
    log = run_tool(
        'test.py', config, work_dir / 'iter_4.pth', '--out', 'out',
        '--cfg-options', f'data_root={data_root}', cwd=tmp_path,
    )  # fmt: skip
    assert metrics(log, 'test') == metrics(trained_log, 'val')
    images = sorted((data_root / 'images' / 'validation').iterdir())
    if task == 'seg':
        for image in images:
            labels = Image.open(tmp_path / 'out' / f'{image.stem}.png')
            assert labels.size == Image.open(image).size
            assert set(np.unique(labels)) <= set(range(1, 8))
        run_tool(
            'test.py', config, work_dir / 'iter_4.pth', '--out', 'amp', '--amp',
            '--cfg-options', f'data_root={data_root}', cwd=tmp_path,
        )  # fmt: skip
        plain, amp = (
            np.concatenate([np.ravel(Image.open(tmp_path / out / f'{i.stem}.png')) for i in images])
            for out in ('out', 'amp')
        )
        assert (plain == amp).mean() > 0.9
    else:
        for kind in ('bbox', 'segm'):
            results = json.loads((tmp_path / 'out' / f'predictions.{kind}.json').read_text())
            assert {result['image_id'] for result in results} <= set(range(len(images) + 1))
            assert results and all(
                kind.replace('segm', 'segmentation') in result for result in results
            )


def test_infer_draws_over_every_picture(trained, data_root, tmp_path):
    task, config, work_dir, _ = trained
    folder = tmp_path / 'pictures'
    folder.mkdir()
    (folder / 'notes.txt').write_text('not a picture')
    (folder / 'broken.png').write_text('neither')
    Image.new('RGB', (1, 1)).save(folder / 'dot.png')
    Image.new('RGB', (300, 1)).save(folder / 'thin.png')
    # More pixels than OpenCV takes, by its header; Pillow calls it a bomb.
    header = b'IHDR' + struct.pack('>IIBBBBB', 40_000, 40_000, 1, 0, 0, 0, 0)
    chunks = (
        struct.pack('>I', len(part) - 4) + part + struct.pack('>I', zlib.crc32(part))
        for part in (header, b'IDAT' + zlib.compress(bytes(100)))
    )
    (folder / 'huge.png').write_bytes(b'\x89PNG\r\n\x1a\n' + b''.join(chunks))
    sizes = {'wide': (96, 40), 'tall': (64, 80)}
    rng = np.random.default_rng(0)
    for name, (width, height) in sizes.items():
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'{name}.jpg')
    checkpoint = work_dir / 'iter_4.pth'
    arguments = ('infer.py', config, checkpoint, 'pictures', '--out', 'overlays', '--amp')
    log = run_tool(*arguments, cwd=tmp_path, fails=True)
    assert 'pictures/broken.png: not a picture that can be read' in log
    failed = ['broken.png', 'huge.png', 'thin.png']
    *_, listed = log.splitlines()
    assert listed == (
        'infer.py: error: 3 of 6 pictures could not be drawn: '
        'pictures/broken.png, pictures/huge.png, pictures/thin.png.'
    )
    assert 'pictures/thin.png: an image of 1 x 300 pixels cannot be resized by' in log
    for name, line in zip(failed, log.splitlines()[-1 - len(failed) :], strict=False):
        assert f'pictures/{name}: ' in line
    drawn = {'wide.png', 'tall.png', 'dot.png'}
    assert {p.name for p in (tmp_path / 'overlays').iterdir()} == drawn
    for name, size in sizes.items():
        overlay = Image.open(tmp_path / 'overlays' / f'{name}.png')
        factor = -(-512 // max(size))  # for an image that can be read, and its legend
        assert overlay.width == factor * size[0] and overlay.height >= factor * size[1]
        # A detector after four iterations finds nothing that is worth drawing.
        if task == 'seg':
            assert overlay.height > factor * size[1]
            picture = Image.open(folder / f'{name}.jpg').resize([factor * n for n in size])
            drawn = np.array(overlay)[: factor * size[1]]
            assert np.abs(drawn.astype(int) - np.array(picture)).mean() > 5


WHAT = ('predictions', 'methods', 'features', 'receptive-field', 'directions')


def test_visualize_draws_every_picture(trained, data_root, tmp_path, monkeypatch, capsys):
    """In this process, which has imported everything."""
    _, config, work_dir, _ = trained
    monkeypatch.syspath_prepend(TOOLS)  # as for a script that is run
    monkeypatch.setattr(sys, 'excepthook', sys.excepthook)  # which the tool replaces
    options = ('--images', '2', '--layers', '2', '--score', '0', '--out', tmp_path)
    data = ('--cfg-options', f'data_root={data_root}')
    sizes = {}
    for what in WHAT:
        arguments = ('visualize.py', what, config, work_dir / 'iter_4.pth', *options, *data)
        monkeypatch.setattr(sys, 'argv', [*map(str, arguments)])
        load('visualize.py', '__main__')
        printed = capsys.readouterr().out
        assert printed.splitlines()[-1] == str(tmp_path / f'{what}.png')
        assert ('Every method runs with the weights of' in printed) == (what == 'methods')
        picture = np.array(Image.open(tmp_path / f'{what}.png').convert('RGB'))
        assert picture.std() > 20
        sizes[what] = picture.shape[:2]
    # Two rows of an image, the ground truth and a column for each method.
    height, width = sizes['methods']
    assert width / height == pytest.approx((2 + len(METHODS)) / 2.4, rel=0.1)


@pytest.mark.parametrize('tool', ['test', 'infer', 'visualize'])
def test_another_method_is_refused(tool, trained, data_root, tmp_path):
    _, config, work_dir, _ = trained
    options = ('--cfg-options', f'data_root={data_root}')
    other = 'model.backbone.discretization_method=rk4'
    what = ['features'] if tool == 'visualize' else []
    pictures = [data_root / 'images' / 'validation'] if tool == 'infer' else []
    arguments = (f'{tool}.py', *what, config, work_dir / 'iter_4.pth', *pictures, *options, other)
    log = run_tool(*arguments, cwd=tmp_path, fails=True)
    assert "iter_4.pth was trained with discretization_method 'bilinear', here 'rk4'" in log
    assert '--allow-mismatch' in log


def test_resume_finds_the_last_checkpoint_or_starts(configs, data_root, tmp_path):
    """Twice the same command, but for the number of iterations; and TensorBoard by one line."""
    config = tmp_path / 'board.py'
    backends = "[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]"
    config.write_text(
        f'_base_ = {str(configs["seg"])!r}\nvisualizer = dict(vis_backends={backends})\n'
    )
    options = (config, '--work-dir', 'run', '--resume', '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', *options, 'train_cfg.max_iters=2', cwd=tmp_path)
    assert iterations(log) == [1, 2]
    log = run_tool('train.py', *options, 'train_cfg.max_iters=3', cwd=tmp_path)
    assert iterations(log) == [3]
    for name in ('scalars.json', 'events.out.tfevents.*'):
        assert len(list(tmp_path.glob(f'run/*/vis_data/{name}'))) == 2


ON_A_GPU = (
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
)


@pytest.mark.parametrize(
    ('visible', 'graph'),
    [
        ('', ()),
        pytest.param('0', (), marks=ON_A_GPU),
        pytest.param('0', ('--graph',), marks=ON_A_GPU),
    ],
    ids=['cpu', 'cuda', 'cuda-graph'],
)
def test_a_deterministic_training_repeats(visible, graph, configs, data_root, tmp_path):
    """A segmentor as the tools train it, in workers, by a mixed precision."""
    states = []
    for name in ('first', 'second'):
        run_tool(
            'train.py', configs['seg'], '--amp', *graph, '--work-dir', name, '--cfg-options',
            f'data_root={data_root}', 'randomness.seed=0', 'randomness.deterministic=True',
            'train_cfg.max_iters=12', 'train_cfg.val_interval=100',
            cwd=tmp_path, CUDA_VISIBLE_DEVICES=visible,
        )  # fmt: skip
        path = last_checkpoint(tmp_path / name)
        states.append(torch.load(path, 'cpu', weights_only=False)['state_dict'])
    assert_same_bits(*states)


ABSENT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name.partition('.')[0] in ('mmdet', 'mmseg'):
            raise ModuleNotFoundError(f'No module named {name!r}')

sys.meta_path.insert(0, Absent)
"""


@pytest.mark.parametrize(
    ('task', 'message'),
    [
        (
            'seg',
            'needs onedl-mmsegmentation or mmsegmentation, which cannot be imported: '
            "No module named 'mmseg",
        ),
        (
            'det',
            "needs onedl-mmdetection or mmdet, which is not installed: No module named 'mmdet'",
        ),
    ],
)
def test_a_missing_library_is_named_in_one_sentence(task, message, configs, tmp_path):
    (tmp_path / 'sitecustomize.py').write_text(ABSENT)
    path = os.pathsep.join([str(tmp_path), environment()['PYTHONPATH']])
    log = run_tool('train.py', configs[task], cwd=tmp_path, fails=True, fresh=True, PYTHONPATH=path)
    assert message in log.splitlines()[-1]
    assert 'Traceback' not in log
