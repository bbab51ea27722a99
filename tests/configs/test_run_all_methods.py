"""run_all_methods.sh on a small segmentor: all methods alike, skipping, resuming, refusing."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.config import Config

from tests.configs.data_on_disk import write_ade20k
from tests.forked import forked_python
from tests.scripts import load
from vim_mm.engine.watching.nonfinite import NonFiniteLossError
from vim_mm.engine.watching.run_record import note_divergence
from vim_mm.ops import METHODS
from vim_mm.ops.library import has_kernel

ROOT = Path(__file__).parents[2]
SMALL = """
_base_ = 'vim_mm::seg/upernet_vim_t_zoh.py'

model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=16, num_layers=4), img_size=64, out_indices=(0, 1, 2, 3)
    ),
    neck=dict(embed_dim=16),
    decode_head=dict(in_channels=[16] * 4, channels=8),
    auxiliary_head=dict(in_channels=16, channels=8),
    test_cfg=dict(crop_size=(64, 64), stride=(42, 42)),
)
loading = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True)]
cropping = [dict(type='RandomCrop', crop_size=(48, 48))]
train_dataloader = dict(
    num_workers=0, dataset=dict(pipeline=[*loading, *cropping, dict(type='PackSegInputs')])
)
val_dataloader = dict(num_workers=0, dataset=dict(pipeline=[*loading, dict(type='PackSegInputs')]))
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
"""


def environment(**variables: str) -> dict[str, str]:
    """Of a machine without a GPU, with this vim_mm."""
    ours = {
        'CONFIG': 'small.py',
        'METHODS': 'zoh rk4',
        'PYTHON': forked_python(),
        'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]),
        'CUDA_VISIBLE_DEVICES': '',
    }
    return {**os.environ, **ours, **variables}


OPTIONS = ('--seeds', '0..1', '--jobs-per-gpu', '2', '--cfg-options', 'data_root=data')


def command(task: str = 'seg', options: tuple[str, ...] = OPTIONS) -> list[str]:
    return ['bash', str(ROOT / task / 'run_all_methods.sh'), *options]


def run_all_methods(
    cwd: Path, *options: str, task: str = 'seg', **variables: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(task, options or OPTIONS), cwd=cwd, env=environment(**variables),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip


COMPARED = [name for name, method in METHODS.items() if not method.control]
VIM_T = {'seg': 'upernet_vim_t_{}', 'det': 'cascade_mask_rcnn_vim_t_{}'}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('task', 'options', 'variables', 'methods'),
    [
        pytest.param('seg', (), {}, COMPARED, id='default'),
        pytest.param('det', ('--seeds', '3'), {'GPUS': '2'}, [*METHODS], id='seeds'),
    ],
)
def test_trains_the_shipped_config_of_each_method(task, options, variables, methods, tmp_path):
    config = str(ROOT / 'configs' / task / f'{VIM_T[task].format("{method}")}.py')
    done = run_all_methods(
        tmp_path, '--dry-run', '--amp', *options, task=task, METHODS='', CONFIG=config, **variables
    )
    assert done.returncode == 0, done.stdout
    commands = [line for line in done.stdout.splitlines() if '--record' in line]
    for line, method in zip(commands, methods, strict=True):
        config = re.search(rf'(\S+{VIM_T[task].format(method)}\.py)', line)[1]
        assert Config.fromfile(config).model.backbone.discretization_method == method
        folder = f'work_dirs/{Path(config).stem}' + ('_seed3' if options else '')
        assert f' --resume --work-dir {folder} --record {folder}/run.json' in line
        assert f'--amp --cfg-options model.backbone.discretization_method={method}' in line
        assert ('randomness.seed=3' in line) == bool(options)
        assert ('dist_train.sh' in line) == ('GPUS' in variables)


def test_a_missing_config_is_found_before_anything_is_trained(tmp_path):
    for method in COMPARED[:-1]:
        (tmp_path / f'{method}.py').touch()
    done = run_all_methods(tmp_path, '--amp', METHODS='', CONFIG='{method}.py')
    assert done.returncode == 1
    last = COMPARED[-1]
    message = f'run_all_methods.py: error: no config {last}.py for the method {last}\n'
    assert done.stdout.endswith(message)
    assert not (tmp_path / 'work_dirs').exists()


@pytest.fixture
def tool(monkeypatch) -> dict[str, Any]:
    """The functions of run_all_methods.py."""
    monkeypatch.syspath_prepend(ROOT / 'tools')
    return load('run_all_methods.py')


@pytest.mark.parametrize(
    ('gpus', 'processes', 'jobs', 'expected'),
    [
        ([], 1, 3, [None] * 3),
        (['0', '1'], 1, 2, ['0', '1', '0', '1']),
        (['0', '1', '4', '5'], 2, 1, ['0,1', '4,5']),
    ],
)
def test_places(gpus, processes, jobs, expected, tool):
    assert tool['places'](gpus, processes, jobs) == expected
    assert tool['numbers']('0..2,7,1') == [0, 1, 2, 7]
    # None at all would be the seed of the config, and the GPUs of nobody.
    for text in ('11..0', '-1', '-1..2', 'two', ''):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f'got {text!r}')):
            tool['numbers'](text)


def test_the_gpus_that_are_asked_for(tool, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    visible = tool['visible_gpus']
    assert visible(None, 2) == ['0', '1']
    assert visible('1..2', 1) == ['1', '2'] and visible('all', 1) == ['0', '1', '2', '3']
    with pytest.raises(SystemExit, match='this machine has 4 GPUs, from 0 on'):
        visible('4', 1)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '6,7,8,9')
    assert visible('1..2', 1) == ['7', '8']


def a_run(tool, folder: Path, method: str = 'zoh', **identity) -> Any:
    """A run of run_all_methods.py whose training is not started."""
    same = {'config_sha256': 'a', 'arguments': [], 'processes': 1, 'commit': 'c',
            'VIM_USE_CUDA_KERNEL': None, 'VIM_MM_BACKEND': None}  # fmt: skip
    return tool['Run'](folder, ['a.py'], same | identity, {'method': method})


class Ended:
    """A process that ended well."""

    returncode = 0

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def trained(tool, monkeypatch) -> list[tuple[str, str | None]]:
    """Folder and CUDA_VISIBLE_DEVICES of each training that begins; each ends at once, well."""
    found = []

    def start(command, env, **options):
        place = env.get('CUDA_VISIBLE_DEVICES')
        found.append((Path(command[command.index('--work-dir') + 1]).name, place))
        return Ended()

    monkeypatch.setattr(tool['subprocess'], 'Popen', start)
    return found


def train(tool, runs: list, slots: list) -> None:
    tool['train_all'](runs, slots, argparse.Namespace(processes=1))


def test_runs_go_to_the_gpus_of_their_places(tool, trained, tmp_path):
    runs = [a_run(tool, tmp_path / name) for name in 'abc']
    train(tool, runs, ['2', '3'])
    assert trained == [('a', '2'), ('b', '3'), ('c', '2')]
    assert [run.status() for run in runs] == ['finished'] * 3


def test_a_run_that_another_process_trains_is_left_alone(tool, trained, tmp_path, capsys):
    mine, theirs = a_run(tool, tmp_path / 'a'), a_run(tool, tmp_path / 'a')
    assert theirs.acquire()
    train(tool, [mine], [None])
    assert trained == [] and 'is being trained by another process' in capsys.readouterr().out
    theirs.release()
    train(tool, [mine], [None])
    assert [name for name, _ in trained] == ['a']


def test_a_run_that_another_process_has_trained_is_not_repeated(tool, trained, tmp_path, capsys):
    """Between the start of this one and the run's turn: its record is read under the lock."""
    runs = [a_run(tool, tmp_path / name) for name in 'ab']
    runs[1].folder.mkdir()
    runs[1].record.write_text(json.dumps(runs[1].identity | {'status': 'finished', 'note': 1}))
    train(tool, runs, [None])
    assert [name for name, _ in trained] == ['a'] and runs[1].read()['note'] == 1
    other = a_run(tool, tmp_path / 'b', config_sha256='of another learning rate')
    last = a_run(tool, tmp_path / 'c')
    train(tool, [other, last], [None])
    said = capsys.readouterr().out
    assert f"b is left alone: {tool['IDENTITY']['config_sha256']} ('a', now 'of another" in said
    assert [name for name, _ in trained] == ['a', 'c'], 'the others go on'
    assert runs[1].acquire(), 'the lock is let go'


def test_what_another_process_trained_otherwise_is_not_reported(tool, tmp_path, monkeypatch):
    runs = [a_run(tool, tmp_path / name) for name in 'ab']

    def end_both(runs, slots, args):
        for run, commit in zip(runs, ('c', 'another'), strict=True):
            run.folder.mkdir()
            record = run.identity | {'commit': commit, 'status': 'finished'}
            run.record.write_text(json.dumps(record))

    reported = []
    ours = tool['main'].__globals__
    monkeypatch.setitem(ours, 'make_runs', lambda args, extra: runs)
    monkeypatch.setitem(ours, 'train_all', end_both)
    monkeypatch.setitem(ours, 'report', lambda runs, seeds: reported.extend(runs) or 0)
    args = argparse.Namespace(
        methods=['zoh'], seeds=[0], dry_run=False, gpus=None, processes=1, jobs_per_gpu=1
    )
    with pytest.raises(SystemExit, match=f'not finished: {tmp_path / "b"}'):
        tool['main'](args, [])
    assert reported == runs[:1]


@pytest.mark.parametrize('name', ['config_sha256', 'arguments', 'processes', 'commit',
                                  'VIM_USE_CUDA_KERNEL', 'VIM_MM_BACKEND'])  # fmt: skip
def test_what_two_starts_must_have_in_common(tool, name, tmp_path):
    run = a_run(tool, tmp_path)
    run.record.write_text(json.dumps(run.identity))
    run.check()
    words = tool['IDENTITY'].get(name, name)
    with pytest.raises(SystemExit, match=rf"differs in {words} \(.*, now 'other'\)"):
        a_run(tool, tmp_path, **{name: 'other'}).check()


def test_what_a_run_is_known_by(tool, tmp_path, monkeypatch):
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '0')
    config = str(ROOT / 'configs/seg/upernet_vim_shapes.py')
    asked = dict(config=config, methods=['foh'], seeds=[3], processes=2, work_dir=tmp_path)
    (run,) = tool['make_runs'](argparse.Namespace(**asked), ['--amp'])
    run.folder.mkdir()
    run.record.write_text(json.dumps(run.identity | {'commit': 'another'}))
    with pytest.raises(SystemExit, match='holds the run of other arguments'):
        tool['make_runs'](argparse.Namespace(**asked), ['--amp'])
    assert run.identity.keys() == {*tool['IDENTITY'], *tool['VARIABLES']}
    known = {name: run.identity[name] for name in ('processes', 'arguments', 'VIM_USE_CUDA_KERNEL')}
    assert known == {'processes': 2, 'arguments': ['--amp'], 'VIM_USE_CUDA_KERNEL': '0'}
    assert run.folder == tmp_path / 'upernet_vim_shapes_foh_seed3'
    assert {name: run.facts[name] for name in ('method', 'seed')} == {'method': 'foh', 'seed': 3}


def test_weights_without_a_record_are_refused(tool, tmp_path):
    (tmp_path / 'iter_2.pth').touch()
    with pytest.raises(SystemExit, match='holds weights and no record of what trained them'):
        a_run(tool, tmp_path).check()


def test_a_diverged_run_stays_diverged(tool, trained, tmp_path):
    """train.py has noted it; also where this process was gone by then."""
    run = a_run(tool, tmp_path / 'a')
    run.folder.mkdir()
    run.record.write_text(json.dumps(run.identity | {'status': 'interrupted'}))
    note_divergence(run.record, NonFiniteLossError('The loss of iteration 3 is nan.'))
    train(tool, [run], [None])
    assert trained == [] and run.status() == 'diverged'
    assert tool['finish'](run, 1) == 'diverged' == run.read()['status']
    failed = a_run(tool, tmp_path / 'b')
    failed.folder.mkdir()
    assert tool['finish'](failed, 1) == 'failed' == failed.status()


@pytest.mark.parametrize(
    ('extra', 'words'),
    [
        (['--discretization-method', 'foh'], '--discretization-method is set for each run'),
        (['--disc', 'foh'], '--discretization-method is set for each run'),
        (['--resume', 'a.pth'], '--resume is set for each run'),
        (['--resume'], '--resume is set for each run'),
        (['--overwrite'], '--overwrite is set for each run'),
        (['--record', 'a.json'], '--record is set for each run'),
    ],
)
def test_arguments_that_would_undo_the_comparison_are_refused(tool, extra, words):
    config = str(ROOT / 'configs/seg/upernet_vim_shapes.py')
    with pytest.raises(SystemExit, match=words):
        tool['resolve'](config, 'zoh', 0, extra)
    # The script's own options come last.
    options = ['--cfg-options', 'model.backbone.discretization_method=foh']
    found = [tool['resolve'](config, method, 0, options)[1] for method in ('zoh', 'foh')]
    assert found[0]['config_sha256'] != found[1]['config_sha256']


def test_work_directories_by_method_are_no_difference(tool, tmp_path):
    base = ROOT / 'configs/seg/upernet_vim_shapes.py'
    for method in ('zoh', 'foh'):
        text = f'_base_ = {str(base)!r}\nwork_dir = "runs/{method}"\n'
        (tmp_path / f'{method}.py').write_text(text)
    found = [tool['resolve'](str(tmp_path / f'{m}.py'), m, 0, [])[1] for m in ('zoh', 'foh')]
    assert found[0]['shared_sha256'] == found[1]['shared_sha256']


@pytest.mark.parametrize('pattern', [
    'configs/seg/upernet_vim_t_{method}.py', 'configs/det/cascade_mask_rcnn_vim_t_{method}.py',
    'configs/det/mask_rcnn_vim_t_{method}.py', 'configs/cls/vim_fashion_zoh.py',
    'studies/discretization/configs/seg/upernet_vim_fashion.py',
    'studies/discretization/configs/det/mask_rcnn_vim_fashion.py',
])  # fmt: skip
def test_shipped_configs_differ_in_the_method_only(tool, pattern):
    found = [
        tool['resolve'](str(ROOT / pattern.format(method=method)), method, 3, [])[1]
        for method in METHODS
    ]
    assert {said['seed'] for said in found} == {3}
    assert len({said['shared_sha256'] for said in found}) == 1
    assert len({said['config_sha256'] for said in found}) == len(METHODS)


@pytest.mark.parametrize(
    ('codes', 'expected', 'begun'),
    [((0, 0), 0, 2), ((1, 0), 1, 2), ((0, 3), 3, 2), ((130, 0), 130, 1)],
)
def test_a_failure_of_segmentation_leaves_detection(codes, expected, begun, tmp_path):
    for task, code in zip(('seg', 'det'), codes, strict=True):
        (tmp_path / task).mkdir()
        script = tmp_path / task / 'run_all_methods.sh'
        script.write_text(f'echo begun "$@"\nexit {code}\n')
    (tmp_path / 'tools').mkdir()
    name = 'run-all-discretization-experiments.sh'
    script = shutil.copy(ROOT / 'tools' / name, tmp_path / 'tools')
    bare = {k: v for k, v in os.environ.items() if k != 'CONFIG'}
    done = subprocess.run(
        ['bash', script, '--seeds', '0'], env=bare, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (expected, 'begun --seeds 0\n' * begun)
    (tmp_path / 'tools/run_all_methods.sh').write_text('echo "$@"\n')
    for option in (['--config', 'a.py'], ['--config=a.py']):
        done = subprocess.run(['bash', script, *option], env=bare, capture_output=True, text=True)
        assert done.stdout == ' '.join(option) + '\n'


def test_a_run_alone_has_told_its_failure_to_the_terminal(tmp_path, tool):
    describe = tool['describe']
    # Cut off within a character.
    (tmp_path / 'output.txt').write_bytes('a\nof another start: CUDA out of memory ä'.encode()[:-1])
    run = SimpleNamespace(folder=tmp_path)
    assert describe(run, 'failed', 1) == 'failed.'
    assert describe(run, 'failed', 2) == 'failed: of another start: CUDA out of memory \ufffd'


def test_a_table_that_cannot_be_made_is_said_once(tmp_path, tool, capfd, monkeypatch):
    """By the tool that makes it; its command and its exit code tell the user nothing."""
    monkeypatch.setattr('sys.executable', forked_python())
    report = tool['report']
    run = SimpleNamespace(folder=tmp_path, status=lambda: 'finished')
    assert report([run], seeds=False) == 1
    assert capfd.readouterr().err.splitlines() == [
        f'compare_runs.py: error: {tmp_path} holds no log of training'
    ]


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / 'small.py').write_text(SMALL)
    record = tmp_path / 'work_dirs/small_zoh_seed0/run.json'
    record.parent.mkdir(parents=True)
    record.write_text('{"status": ')
    done = run_all_methods(tmp_path)
    assert done.returncode == 1
    name = record.relative_to(tmp_path)
    error = f'run_all_methods.py: error: {name} is no JSON file: Expecting value'
    assert done.stdout.splitlines()[-1].startswith(error)


def logged(work_dir: Path, key: str) -> list:
    """Values of a scalar over all the times that a run was started."""
    logs = sorted(work_dir.glob('*/vis_data/scalars.json'))
    records = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    return [(record['step'], record[key]) for record in records if key in record]


RUNS = [f'small_{method}_seed{seed}' for seed in (0, 1) for method in ('zoh', 'rk4')]


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    """Where two methods with two seeds were trained, two at a time, with an interruption."""
    folder = tmp_path_factory.mktemp('all')
    write_ade20k(folder / 'data')
    (folder / 'small.py').write_text(SMALL)
    with subprocess.Popen(
        command(), cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 200
        while not [*folder.glob('work_dirs/*/iter_2.pth')]:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        interrupted = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert [line.split(' ')[-1] for line in interrupted.splitlines()[:2]] == ['begins.'] * 2
    states = [json.loads(path.read_text())['status'] for path in folder.glob('*/*/run.json')]
    assert 2 <= len(states) <= 4 and 'interrupted' in states
    done = run_all_methods(folder)
    assert done.returncode == 0, done.stdout
    (folder / 'stdout.txt').write_text(done.stdout)
    return folder


def record(folder: Path, run: str) -> dict:
    return json.loads((folder / 'work_dirs' / run / 'run.json').read_text())


@pytest.mark.slow
def test_every_run_ends_and_says_what_ran(folder):
    path = 'CPU kernel' if has_kernel('cpu') else 'PyTorch operators'
    for run in RUNS:
        found = record(folder, run)
        assert (found['status'], found['ran']['path']) == ('finished', path)
        assert found['ran']['mixers'] == 4
        assert {'torch', 'mmseg', 'python'} <= found['ran']['versions'].keys()
        assert found['commit'] and 'VIM_USE_CUDA_KERNEL' in found and 'train.py' in found['command']
        assert f'randomness.seed={run[-1]}' in found['command']
        assert {step for step, _ in logged(folder / 'work_dirs' / run, 'loss')} == {1, 2, 3, 4}
    assert 'goes on.' in (folder / 'stdout.txt').read_text()


@pytest.mark.slow
def test_prints_the_comparison_over_seeds(folder):
    printed = (folder / 'stdout.txt').read_text()
    for method in ('zoh', 'rk4'):
        ends = [
            logged(folder / 'work_dirs' / f'small_{method}_seed{seed}', 'mIoU')[-1][1]
            for seed in (0, 1)
        ]
        (row,) = re.findall(rf'^\| {method} .*$', printed, re.M)
        cells = [cell.strip() for cell in row.strip('|').split('|')]
        assert cells[1:3] == ['2', f'{sum(ends) / 2:.2f}']
    assert 'no run of the control zoh_exact' in printed


@pytest.mark.slow
def test_runs_differ_in_the_method_and_the_seed_only(folder):
    configs = [Config.fromfile(folder / 'work_dirs' / run / 'small.py').to_dict() for run in RUNS]
    found = [
        (cfg['model']['backbone'].pop('discretization_method'), cfg['randomness'].pop('seed'))
        for cfg in configs
    ]
    assert found == [('zoh', 0), ('rk4', 0), ('zoh', 1), ('rk4', 1)]
    for cfg, run in zip(configs, RUNS, strict=True):
        assert Path(cfg.pop('work_dir')).name == run
        cfg.update(load_from=None, resume=False)  # where an interrupted one goes on
        assert cfg == configs[0]
    losses = {logged(folder / 'work_dirs' / run, 'loss')[0] for run in RUNS}
    assert len(losses) == 4 and {step for step, _ in losses} == {1}


@pytest.mark.slow
def test_skips_the_finished_and_resumes_the_interrupted(folder):
    first, *others = (folder / 'work_dirs' / run for run in RUNS)
    logs = {run: [*run.glob('*/vis_data')] for run in others}
    # What a run leaves that was killed in its fourth iteration.
    found = json.loads((first / 'run.json').read_text())
    (first / 'run.json').write_text(json.dumps(found | {'status': 'interrupted'}))
    (first / 'iter_4.pth').unlink()
    (first / 'last_checkpoint').write_text(str(first / 'iter_2.pth'))
    before = logged(first, 'loss')

    done = run_all_methods(folder)
    assert done.returncode == 0, done.stdout
    assert all(f'work_dirs/{run} is finished.' in done.stdout for run in RUNS)
    assert logs == {run: [*run.glob('*/vis_data')] for run in others}
    assert [step for step, _ in logged(first, 'loss')[len(before) :]] == [3, 4]
    assert record(folder, RUNS[0])['status'] == 'finished'


@pytest.mark.slow
def test_a_run_that_was_killed_in_its_last_validation_makes_it(folder):
    last = folder / 'work_dirs' / RUNS[-1]
    found = json.loads((last / 'run.json').read_text())
    (last / 'run.json').write_text(json.dumps(found | {'status': 'interrupted'}))
    (last / 'last_validation').write_text('0\n')
    before = logged(last, 'mIoU')
    done = run_all_methods(folder)
    assert done.returncode == 0, done.stdout
    assert logged(last, 'mIoU') == [*before, before[-1]]
    assert record(folder, RUNS[-1])['status'] == 'finished'


@pytest.mark.slow
@pytest.mark.parametrize(
    ('options', 'variables', 'difference'),
    [
        (('optim_wrapper.optimizer.lr=1',), {}, 'the config with all that it inherits'),
        ((), {'VIM_USE_CUDA_KERNEL': '0'}, "VIM_USE_CUDA_KERNEL ('None', now '0')"),
    ],
)
def test_refuses_to_mix_runs_of_other_arguments(folder, options, variables, difference):
    done = run_all_methods(folder, *OPTIONS, *options, **variables)
    assert done.returncode == 1
    assert 'work_dirs/small_zoh_seed0 holds the run of other arguments' in done.stdout
    assert difference in done.stdout
