"""What the tools print: some lines of a run, and every warning, error and reason of a fallback."""

import logging
import os
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import mmseg
import pytest
import torch
from mmcv.transforms import RandomApply
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.hooks import logger_hook
from mmengine.logging import MMLogger, print_log
from mmengine.logging import logger as mmengine_logger
from mmengine.runner.checkpoint import load_state_dict
from mmseg.models.losses import CrossEntropyLoss
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.configs.data_on_disk import write_ade20k
from tests.datasets.idx import write_idx_files
from tests.tools.conftest import SHRUNK, environment, run_tool
from vim_mm.datasets.fashion import write_classes
from vim_mm.engine import screen as screen_module
from vim_mm.engine.screen import (
    FALSE_ALARMS,
    WIDTH,
    close_screen,
    expect_no_loss,
    open_screen,
    opened,
)
from vim_mm.models import VisionMamba

MOST = 40
LIBRARY = mmengine_logger.__file__.replace('logging/logger', 'runner/runner')
SEGMENTOR = (
    'neck=dict(embed_dim=8), decode_head=dict(in_channels=[8] * 4, channels=8), '
    'auxiliary_head=dict(in_channels=8, channels=8)'
)
# Of every kind that is shipped beside those of tests/tools/conftest.py.
KINDS = {
    'ade20k': ('vim_mm::seg/upernet_vim_t_zoh.py', SEGMENTOR),
    'cls': ('vim_mm::cls/vim_fashion_zoh.py', 'head=dict(in_channels=8)'),
}
# What a run is told to say, and where: the first two by MMEngine's logger, others by their own way.
PLANTED = """
import logging
import warnings

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.registry import HOOKS

from vim_mm.ops import library

warnings.filterwarnings('always', 'planted')
library.MISSING = 'the extension is planted to be missing'


@HOOKS.register_module()
class Planted(Hook):
    def before_train(self, runner):
        print_log('planted message', logger='current')
        runner.logger.warning('planted warning')
        runner.logger.error('planted error')
        print_log('planted print of a warning', level=logging.WARNING)
        warnings.warn('planted warning of Python')
"""


@pytest.fixture(scope='module')
def runs(configs, data_root, tmp_path_factory):
    """Config and data of a short training of each kind."""
    folder = tmp_path_factory.mktemp('kinds')
    write_ade20k(folder / 'ade20k')
    with pytest.MonkeyPatch.context() as patch:
        write_idx_files(folder / 'idx', patch)
        write_classes(folder / 'cls', folder / 'idx')
    found = {name: (config, data_root) for name, config in configs.items()}
    for name, (base, model) in KINDS.items():
        text = f'_base_ = {base!r}\n' + SHRUNK.replace('{model}', model)
        if name == 'ade20k':  # whose feature maps come from layers up to the last one
            text = text.replace('num_layers=4', 'num_layers=24')
        (folder / f'tiny_{name}.py').write_text(text)
        found[name] = folder / f'tiny_{name}.py', folder / name
    return found


def lines_of(log: str) -> list[str]:
    return log.rstrip('\n').splitlines()


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['seg', 'det', *KINDS])
def test_a_run_is_told_in_a_few_lines(kind, runs, tmp_path):
    if kind == 'cls':
        pytest.importorskip('mmpretrain', reason='classification needs mmpretrain')
    config, root = runs[kind]
    data = ('--cfg-options', f'data_root={root}')
    log = run_tool('train.py', config, '--work-dir', 'run', *data, cwd=tmp_path)
    before, _, during = log.partition('Iter(train) [1/4]')
    assert 8 <= len(lines_of(before)) <= MOST, log
    for title in ('Model', 'Parameters', 'Data', 'Classes', 'Method', 'Device', 'Directory'):
        assert re.search(rf'^{title}: +\S', before, re.MULTILINE), title
    assert re.search(r'^Batch: ', before, re.MULTILINE)
    assert lines_of(before)[-1].endswith('] ') or 'Training started: 4 iterations.' in before
    assert re.search(r'^Method: .*\(.*cpu', before, re.MULTILINE)
    assert re.search(r'First iteration after \S+ s; .* takes \d+:\d\d:\d\d more', during)
    intervals = [line for line in lines_of(log) if 'Iter(train)' in line]
    assert len(intervals) == 4 and max(map(len, intervals)) <= WIDTH
    assert all(re.search(r'lr: \S+ .*eta: .*loss: \d', line) for line in intervals)
    assert re.search(rf'^Last checkpoint: {tmp_path}/run/iter_4.pth$', during, re.MULTILINE)
    assert 'OneDL' not in log and 'CUDA' not in log and 'GPU' not in log
    (whole,) = (tmp_path / 'run').glob('*/*.log')
    for text in ('System environment', 'Config:\n', 'Hooks will be executed', *intervals[0:0]):
        assert text in whole.read_text() and text not in log
    _check_test(config, data, tmp_path)


def _check_test(config: Path, data: tuple, folder: Path) -> None:
    log = run_tool('test.py', config, 'run/iter_4.pth', *data, '--work-dir', 't', cwd=folder)
    assert len(lines_of(log)) <= MOST, log
    metrics = re.search(r'Iter\(test\) \[\d+/\d+\]  ([\s\S]*)', log)[1]
    assert re.search(r'mIoU: \d|bbox_mAP: |accuracy/top1: \d', metrics)
    for text in ('Could not', 'OneDL', 'avg_non_ignore'):
        assert text not in log
    assert ('+--' in log) == ('accuracy' not in metrics)  # a table of classes


@pytest.mark.slow
def test_warnings_errors_and_reasons_come_through(configs, data_root, tmp_path):
    (tmp_path / 'planted.py').write_text(PLANTED)
    (tmp_path / 'config.py').write_text(
        f'_base_ = {str(configs["seg"])!r}\n'
        "custom_imports = dict(imports=['vim_mm', 'planted'])\n"
        "custom_hooks = [dict(type='Planted')]\n"
        "load_from = 'weights.pth'\n"
        "default_hooks = dict(checkpoint=dict(save_best='mIoU'))\n"
    )
    backbone = VisionMamba(dict(embed_dims=8, num_layers=4), img_size=64, patch_size=4)
    weights = {f'backbone.{name}': x for name, x in backbone.state_dict().items()}
    torch.save(dict(state_dict=weights), tmp_path / 'weights.pth')
    options = ('--work-dir', 'run', '--cfg-options', f'data_root={data_root}')
    path = dict(PYTHONPATH=os.pathsep.join([environment()['PYTHONPATH'], str(tmp_path)]))
    log = run_tool('train.py', 'config.py', *options, cwd=tmp_path, **path)
    before, _, during = log.partition('Iter(train) [1/4]')
    assert len(lines_of(before)) <= MOST, log
    (whole,) = (tmp_path / 'run').glob('*/*.log')
    for text in (
        'WARNING - planted warning',
        'ERROR - planted error',
        'planted print of a warning',
        'WARNING - UserWarning: planted warning of Python',
        'missing keys in source state_dict: neck.upsample_2x.0.weight',
        ', decode_head.conv_seg.weight, ',
        'method unknown',
        'because the extension is planted to be missing',
    ):
        assert text in log, text
        assert text.partition(' - ')[2] or text in whole.read_text()
    assert re.search(r'^Method: .*torch scan \(the extension is planted', before, re.MULTILINE)
    assert 'planted message' in before and 'Exp name' in whole.read_text()
    assert 'Exp name' not in log
    assert 'planted warning of Python' in whole.read_text()
    assert re.search(r'The best checkpoint with \S+ mIoU .* is saved to best_mIoU', during)
    assert re.search(r'^Best checkpoint: .*/run/best_mIoU_iter_4.pth', during, re.MULTILINE)


@pytest.mark.slow
def test_verbose_brings_everything_back(configs, data_root, tmp_path):
    options = ('--work-dir', 'run', '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', configs['seg'], '--verbose', *options, cwd=tmp_path)
    (whole,) = (tmp_path / 'run').glob('*/*.log')
    for text in ('System environment', 'Config:', 'Hooks will be executed', 'paramwise_options'):
        assert text in log and text in whole.read_text()
    assert 'GPU number' in log and 'Training started' not in log
    assert len(lines_of(log)) > 400


class _Stdout:
    """Whatever the standard output is at the time: pytest has one for each phase of a test."""

    def __getattr__(self, name: str):
        return getattr(sys.stdout, name)


@pytest.fixture
def logger(request):
    """A logger as a runner makes it, and a console that the test captures."""
    logger = MMLogger.get_instance(request.node.name)
    logger.handlers[0].setStream(_Stdout())
    yield logger
    close_screen()
    MMLogger._instance_dict.pop(request.node.name)


CONCERNED = {
    'Could not import OneDL': dict(train_dataloader=dict(dataset=dict(type='OneDLDataset'))),
    'Line NMS is not compiled': dict(model=dict(bbox_head=dict(type='CLRHead'))),
    'faster_coco_eval is not installed': dict(val_evaluator=dict(type='FasterCocoMetric')),
    'The prefix is not set in metric class': dict(val_evaluator=[dict(type='A'), dict(type='B')]),
    '"FileClient" will be deprecated': dict(a=[dict(file_client_args=dict(backend='disk'))]),
    'The draw is False, it means that the hook for visualization': dict(
        default_hooks=dict(visualization=dict(draw=True))
    ),
    'TensorFloat32 tensor cores for float32 matrix multiplication available': dict(
        optim_wrapper=dict(type='OptimWrapper')
    ),
}


@pytest.mark.parametrize('message', CONCERNED)
def test_a_false_alarm_is_shown_where_it_is_none(message, logger, capsys):
    assert len(CONCERNED) == len(FALSE_ALARMS) - 1  # the next test has the other
    mixed = dict(optim_wrapper=dict(type='BFloat16OptimWrapper'))
    for cfg, shown in ((mixed, False), (CONCERNED[message], True)):
        screen = open_screen(Config(cfg))  # as the tools have it
        record = logger.makeRecord('', logging.WARNING, LIBRARY, 1, message, (), None)
        assert (screen.text(record) is not None) == shown
        print_log(message)
        assert (message in capsys.readouterr().out) == shown


def test_how_a_loss_averages_matters_where_one_is_computed(logger, capsys):
    open_screen({}).attach(logger)
    CrossEntropyLoss()
    assert 'WARNING - UserWarning: Default ``avg_non_ignore`` is False' in capsys.readouterr().out
    expect_no_loss()
    CrossEntropyLoss()
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize('amp', [False, True])
def test_the_hint_at_tf32_is_true_of_predictions_in_float32(amp, logger, capsys):
    """Whatever the training was in."""
    open_screen(Config(dict(optim_wrapper=dict(type='BFloat16OptimWrapper'))), amp).attach(logger)
    expect_no_loss()
    warnings.showwarning(
        'TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.',
        UserWarning,
        torch.__file__,
        7,
    )
    assert ('TensorFloat32' in capsys.readouterr().out) == (not amp)


@pytest.mark.parametrize(
    ('file', 'shown'),
    [
        (mmseg.__file__, False),
        (str(Path(mmseg.__file__).parent / 'models' / 'backbones' / 'vit.py'), False),
        ('/home/me/project/transforms.py', True),
        ('/home/me/project/mmseg.py', True),
        ('/home/me/mmseg/my_transform.py', True),
        ('/home/me/mmdet/projects/mine.py', True),
        ('mmseg/my_transform.py', True),
    ],
)
@pytest.mark.parametrize(
    'text', ["invalid escape sequence '\\d'", '"\\d" is an invalid escape sequence. Such']
)
def test_the_syntax_of_libraries_is_theirs(file, text, shown, logger, capsys):
    """Python 3.12 warns of it once, before there are compiled files; in 3.14 in other words."""
    open_screen({}).attach(logger)
    warnings.showwarning(text, SyntaxWarning, file, 7)
    assert ('invalid escape sequence' in capsys.readouterr().out) == shown


@pytest.mark.parametrize(
    ('message', 'cfg', 'shown'),
    [
        ('The draw is False, it means that the hook for visualization',
         dict(default_hooks=dict(visualization=dict(draw=False, show=True))), True),
        ('The draw is False, it means that the hook for visualization',
         dict(default_hooks=dict(visualization=dict(draw=False, show=False))), False),
        ('The prefix is not set in metric class A.',
         dict(val_evaluator=dict(type='E', metrics=[dict(type='A'), dict(type='B')])), True),
        ('The prefix is not set in metric class A.',
         dict(val_evaluator=dict(type='E', metrics=[dict(type='A')])), False),
        ('The prefix is not set in metric class A.',
         dict(test_evaluator=[dict(type='A'), dict(type='LabelMaps', folder='out')]), False),
    ],
)  # fmt: skip
def test_relatives_of_false_alarms(message, cfg, shown, logger):
    record = logger.makeRecord('', logging.WARNING, LIBRARY, 1, message, (), None)
    assert (open_screen(Config(cfg)).text(record) is not None) == shown


@pytest.mark.parametrize('size', [1, 2])
def test_warnings_that_no_handler_takes_go_to_stderr(size, logger, capsys, monkeypatch):
    """As with log_level='ERROR', and in processes but the first, which say which they are."""
    monkeypatch.setattr(screen_module, 'get_world_size', lambda: size)
    monkeypatch.setattr(screen_module, 'get_rank', lambda: size - 1)
    open_screen({}).attach(logger)
    logger.handlers[0].setLevel(logging.ERROR)
    for text in ('odd', 'Could not import OneDL'):
        warnings.showwarning(text, UserWarning, '/x/site-packages/mm/a.py', 7)
    logging.getLogger('vim_mm.ops').warning('native is missing')
    logging.getLogger('vim_mm.ops').error('broken')
    out, err = capsys.readouterr()
    assert out == 'ERROR - broken\n'
    assert err.splitlines() == [
        f'{"rank 1: " * (size > 1)}WARNING - {text}'
        for text in ('UserWarning: odd (mm/a.py, line 7)', 'native is missing')
    ]


@pytest.mark.parametrize('rank', [0, 1])
def test_what_libraries_warn_of_is_said_by_the_first_process(rank, logger, capsys, monkeypatch):
    """Each process has the same config; a user's own code may have other data."""
    monkeypatch.setattr(screen_module, 'get_world_size', lambda: 2)
    monkeypatch.setattr(screen_module, 'get_rank', lambda: rank)
    open_screen({}).attach(logger)
    logger.handlers[0].setLevel(logging.ERROR)
    for file in (mmseg.__file__, torch.__file__, '/home/me/project/transforms.py'):
        warnings.showwarning('odd', UserWarning, file, 7)
    assert capsys.readouterr().err.count('odd') == 3 - 2 * rank


def _warn_of_a_file(results: dict) -> dict:
    warnings.warn('odd file of rank 1', stacklevel=2)
    return results


class _Data(BaseDataset):
    def load_data_list(self):
        return [dict(img_path='a.png')]


class _Direct(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        warnings.warn('odd file of rank 1', stacklevel=2)
        return index


class _Head(nn.Module):
    def forward(self, x):
        warnings.warn('odd file of rank 1', stacklevel=2)
        return x


READ = {
    'mmengine/dataset': lambda: _Data(pipeline=[_warn_of_a_file])[0],
    'mmcv/transforms': lambda: RandomApply([_warn_of_a_file], prob=1.0)({}),
    'torch/utils/data': lambda: next(iter(DataLoader(_Direct()))),
    'torch/nn/modules/module': lambda: _Head()(1),
}


@pytest.mark.parametrize('caller', READ)
def test_what_a_process_alone_reads_is_said_by_it(caller, logger, capsys, monkeypatch):
    """A user's transform warns of a file in the name of its caller, which is a library."""
    monkeypatch.setattr(screen_module, 'get_world_size', lambda: 2)
    monkeypatch.setattr(screen_module, 'get_rank', lambda: 1)
    open_screen({}).attach(logger)
    logger.handlers[0].setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning = screen_module._log_warning
        READ[caller]()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if 'odd file' in line]
    assert caller in line, 'the library calls it by other code'


def test_a_line_of_stderr_is_written_at_one_go(logger, monkeypatch):
    written = []
    monkeypatch.setattr(sys, 'stderr', SimpleNamespace(write=written.append, flush=lambda: None))
    open_screen({}).attach(logger)
    logger.handlers[0].setLevel(logging.ERROR)
    logging.getLogger('vim_mm.ops').warning('odd')
    assert written == ['WARNING - odd\n']


@pytest.mark.parametrize('level', ['INFO', 'WARNING', 'ERROR'])
def test_no_level_hides_what_is_printed(level, logger, capsys):
    open_screen({}).attach(logger)
    logger.handlers[0].setLevel(level)
    load_state_dict(torch.nn.Linear(1, 1), {'weight': torch.zeros(1, 1)}, strict=False)
    print_log('Loads checkpoint by local backend from path: a.pth')
    out = capsys.readouterr().out
    assert out.count('missing keys in source state_dict: bias') == 1 and 'Loads' not in out


MATRIX = 'confusion_matrix/result: \ntensor([[3, 1],\n        [0, 4]])\n  data_time: 0.1  time: 0.2'


@pytest.mark.parametrize(
    'message',
    [
        '[my run] step 10 of 100 loss 0.5',
        'Epoch(train) [1][10/20] loss=0.5',
        f'Epoch(test) [5/5]    {MATRIX}',
        f'Epoch(test) [5/5]    accuracy/top1: 87.5  {MATRIX}',
    ],
)
def test_other_lines_of_the_logger_hook_are_shown_whole(message, logger):
    record = logger.makeRecord('', logging.INFO, logger_hook.__file__, 1, message, (), None)
    assert open_screen({}).text(record) == message


def test_python_warnings_and_prints_have_their_level(logger, capsys):
    screen = open_screen({})
    screen.attach(logger)
    with warnings.catch_warnings():
        warnings.simplefilter('always')
        warnings.showwarning('odd\nnews', UserWarning, '/x/site-packages/mm/a.py', 7)
    print_log('Loads checkpoint by local backend from path: a.pth')
    print_log('Could not safely load weights', level=logging.WARNING)
    logger.handle(logger.makeRecord('', logging.INFO, LIBRARY, 1, 'Exp name: run', (), None))
    logging.getLogger('vim_mm.ops').warning('native is missing')
    out = capsys.readouterr().out
    assert out.splitlines() == [
        'WARNING - UserWarning: odd news (mm/a.py, line 7)',
        'Could not safely load weights',
        'WARNING - native is missing',
    ]


def test_an_interval_fits_its_line(logger):
    screen = open_screen({})
    message = (
        'Iter(train) [  50/160000]  base_lr: 4.0e-05 lr: 4.0e-05  eta: 1 day, 2:03:04  '
        'time: 0.1118  data_time: 0.0080  memory: 4096  grad_norm: 0.8488  loss: 2.1458  '
        + '  '.join(f'd{i}.loss_ce: 1.5301' for i in range(20))
    )
    record = logger.makeRecord('', logging.INFO, LIBRARY, 1, message, (), None)
    text = screen.text(record)
    assert len(text) <= WIDTH and 'base_lr' not in text
    assert '  lr: 4.0e-05  eta: 1 day, 2:03:04  time: 0.1118  memory: 4096  loss: 2.1458' in text


def test_a_long_validation_is_a_few_lines(logger):
    screen = open_screen({})
    shown = 0
    for second in range(3600):
        message = f'Iter(test) [{second}/3600]    eta: 0:10:00  time: 0.1  data_time: 0.0  '
        record = logger.makeRecord('', logging.INFO, LIBRARY, 1, message, (), None)
        record.created = float(second)
        shown += screen.text(record) is not None
    assert 5 <= shown <= 10


@pytest.mark.parametrize(('title', 'columns'), [('Class', 'IoU'), ('category', 'mAP')])
def test_a_long_table_has_its_ends(title, columns, logger):
    screen = open_screen({})
    rule = '+----+----+'
    rows = [f'| c{i} | {float("nan") if i == 5 else i:.1f} |' for i in range(150)]
    message = '\n' + '\n'.join([rule, f'| {title} | {columns} |', rule, *rows, rule])
    record = logger.makeRecord('', logging.INFO, LIBRARY, 1, message, (), None)
    lines = screen.text(record).splitlines()
    assert len(lines) <= 21 and lines[3] == '| c0 | 0.0 |' and lines[-2] == '| c5 | nan |'
    assert any('of 150 rows are in the log file alone' in line for line in lines)


def test_closing_leaves_no_trace(logger, capsys):
    show = warnings.showwarning
    open_screen({}).attach(logger)
    close_screen()
    assert opened() is None and warnings.showwarning is show
    assert 'print' not in vars(mmengine_logger)
    logger.info('chatter')
    assert 'chatter' in capsys.readouterr().out
