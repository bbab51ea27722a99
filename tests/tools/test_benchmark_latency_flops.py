"""The benchmarks of whole models as a user runs them, at sizes that say nothing about speed."""

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
import torch
from mmengine.config import ConfigDict

from benchmarks.measure import timing, whole_models
from benchmarks.measure.latency import (
    UnlikeMachinesError,
    best_table,
    comparison_rows,
    insist_on_one_machine,
    merge,
    read_results,
    table,
)
from tests.scripts import TOOLS, load
from tests.tools.conftest import environment
from vim_mm.config import config_path
from vim_mm.engine.watching.run_record import Observed
from vim_mm.ops.library import has_kernel

pytest.importorskip('mmseg')
ANALYSIS = TOOLS / 'analysis'
imports_anew = pytest.mark.slow  # PyTorch, in each worker
SIZES = ('--sizes', '32x64', '--batch', '2', '--n_trials', '1', '--device', 'cpu')


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """Run a tool of tools/analysis with arguments in this process."""

    def run(tool, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'argv', [str(ANALYSIS / tool), *map(str, arguments)])
            load(f'analysis/{tool}', '__main__')

    return run


def both_paths(run, config, out, *options):
    """Measure a tiny UPerNet by both paths; returns what was measured."""
    run(
        'benchmark_latency_flops.py', config, *SIZES, '--paths', 'kernel', 'python', *options,
        '--out', out, '--markdown', out.with_suffix('.md'),
    )  # fmt: skip
    return measured(out)


def measured(out):
    records = json.loads(out.read_text())['records']
    return {(r['path'], r['mode']): r for r in records if r['form'] == 'eager'}


@pytest.fixture(scope='module')
def segmentor(run, configs, tmp_path_factory):
    """The JSON of its inference, with the tables beside it."""
    out = tmp_path_factory.mktemp('segmentor') / 'seg.json'
    both_paths(run, configs['seg'], out, '--passes', 'infer', '--forms', 'eager', 'graph')
    return out


def check_paths(found, mode):
    kernel, python = found['kernel', mode], found['python', mode]
    if not has_kernel('cpu'):
        assert kernel['left_out'].endswith('the compiled scan did not run, but: PyTorch operators')
        return
    assert not {'left_out'} & (kernel.keys() | python.keys()), found
    assert kernel['parameters'] == python['parameters']
    assert kernel['ran'] == 'CPU kernel'
    assert python['ran'] == 'PyTorch operators'
    assert python['peak_bytes'] > kernel['peak_bytes'] > 4 * kernel['parameters']
    assert kernel['operations'] == python['operations'] > 1e6
    for r in (kernel, python):
        assert r['seconds'] > 0 and r['images_per_second'] == pytest.approx(2 / r['seconds'])


def test_both_paths_of_a_segmentor(segmentor):
    check_paths(measured(segmentor), 'infer')


@pytest.mark.slow
def test_both_paths_train_the_same(run, configs, tmp_path):
    found = both_paths(run, configs['seg'], tmp_path / 'seg.json', '--passes', 'train')
    check_paths(found, 'train')
    losses = [found[path, 'train']['loss'] for path in ('kernel', 'python')]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_kernel_that_does_not_run_has_no_figures(run, configs, tmp_path, monkeypatch):
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '0')
    found = both_paths(run, configs['seg'], tmp_path / 'seg.json', '--passes', 'infer')
    assert found['kernel', 'infer']['left_out'] == (
        'ValueError: the compiled scan did not run, but: PyTorch operators'
    )
    assert found['python', 'infer']['ran'] == 'PyTorch operators'
    monkeypatch.setattr(Observed, 'path', lambda *args: 'mixed')
    found = both_paths(run, configs['seg'], tmp_path / 'seg.json', '--passes', 'infer')
    assert found['kernel', 'infer']['left_out'].endswith('did not run, but: mixed')


def test_machine_commit_and_clocks_stand_with_the_figures(segmentor):
    facts = json.loads(segmentor.read_text())['environment']
    assert {'commit', 'processor', 'torch', 'versions', 'clocks', 'clock'} <= facts.keys()
    assert {'mmseg', 'mmcv', 'torch'} <= facts['versions'].keys()


def test_what_cannot_be_measured_is_said(segmentor):
    line = 'left out: tiny_seg, kernel, inference, graph: CUDA graphs need CUDA'
    assert line in segmentor.with_suffix('.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('config', ['tiny detector', 'mmpretrain::deit/deit-tiny_4xb256_in1k.py'])
def test_detectors_and_classifiers(run, config, configs, tmp_path):
    if config == 'tiny detector':
        pytest.importorskip('mmcv.ops', reason='detection needs mmcv with compiled operators')
        config, size = configs['det'], SIZES
    else:
        pytest.importorskip('mmpretrain')
        size = ('--sizes', '32', *SIZES[2:])
    run('benchmark_latency_flops.py', config, *size, '--out', tmp_path / 'a.json')
    found = measured(tmp_path / 'a.json')
    assert not any('left_out' in r for r in found.values()), found
    assert found['config', 'train']['loss'] > 0
    assert found['config', 'infer']['operations'] > 1e6


def altered(result, **environment):
    return result | {'environment': result['environment'] | environment}


def test_comparison(run, segmentor, tmp_path, capsys):
    first = json.loads(segmentor.read_text())
    second = altered(first, commit='later')
    second['records'] = [
        r if 'left_out' in r else r | {'images_per_second': 2 * r['images_per_second']}
        for r in first['records']
    ]
    files = [tmp_path / 'a.json', tmp_path / 'b.json']
    for file, result in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(result))
    run('compare_benchmarks.py', *files, '--picture', tmp_path / 'both.png')
    printed = capsys.readouterr().out
    assert printed.count(' 2.00 |') == 2 and 'commit later' in printed
    picture = cv2.imread(str(tmp_path / 'both.png'))
    assert picture is not None and picture.std() > 10
    files[1].write_text(json.dumps(altered(second, processor='another')))
    with pytest.raises(SystemExit) as refused:
        run('compare_benchmarks.py', *files)
    assert 'processor is' in str(refused.value) and '--allow-unlike' in str(refused.value)
    run('compare_benchmarks.py', *files, '--allow-unlike')


def record(form, speed, name='a', mode='train'):
    return {
        'name': name, 'path': 'config', 'heads': 'fast', 'size': [512, 512], 'batch': 8,
        'dtype': 'bf16', 'form': form, 'mode': mode, 'images_per_second': speed,
        'peak_bytes': 2**20 * speed, 'parameters': 10**6,
    }  # fmt: skip


def test_each_at_its_best():
    records = [record('eager', 10.0), record('graph', 30.0), record('eager', 90.0, mode='infer')]
    left_out = record('compiled', 0.0) | {'left_out': 'the budget is spent'}
    (row,) = best_table([*records, left_out]).splitlines()[2:]
    cells = [cell.strip() for cell in row.strip('|').split('|')]
    assert cells == ['a', '1', '90', '90', 'eager', '30', '30', 'graph']


def test_what_was_left_out_is_told_apart():
    lost = [
        record('graph', 0.0) | {'size': [side, side], 'batch': batch, 'left_out': 'no room'}
        for side in (512, 1024)
        for batch in (8, 16)
    ]
    lines = table(lost).splitlines()
    assert 'left out: a, 512 x 512, 16, training step, graph: no room' in lines
    assert len({*filter(None, lines)}) == 4


def test_latency_is_that_of_a_call_alone():
    cells = record('eager', 10.0) | {'latency': 0.25, 'seconds': 0.1, 'operations': 2e9}
    header, _, row = table([cells]).splitlines()
    found = dict(zip(*(re.split(r'\s*\|\s*', line) for line in (header, row)), strict=True))
    assert (found['latency, ms'], found['images/s'], found['G operations']) == ('250', '10', '2')


def test_figures_of_another_path_are_marked():
    results = {
        name: {'environment': {}, 'records': [record('eager', 1.0) | {'ran': ran}]}
        for name, ran in (('a', 'CPU kernel'), ('b', 'PyTorch operators'))
    }
    (row,) = comparison_rows(results)
    assert row['path that ran'] == 'CPU kernel / PyTorch operators'
    more = record('graph', 1.0) | {'ran': 'CPU kernel'}
    results['a']['records'].append(more)
    results['c'] = results['a']
    found = [row['path that ran'] for row in comparison_rows(results)]
    assert found == ['CPU kernel / PyTorch operators / CPU kernel', 'CPU kernel /  / CPU kernel']
    del results['b']
    assert 'path that ran' not in comparison_rows(results)[0]


@pytest.mark.parametrize('key', ['device', 'CUDA', 'processor', 'threads', 'torch'])
def test_figures_of_unlike_machines_are_refused(key):
    machine = dict.fromkeys(('device', 'CUDA', 'processor', 'threads', 'torch'), 1)
    results = {name: {'environment': machine} for name in 'ab'}
    insist_on_one_machine(results)
    results['b'] = {'environment': machine | {key: 2}}
    with pytest.raises(UnlikeMachinesError, match=f'{key} is 1 in a, 2 in b'):
        insist_on_one_machine(results)


def test_a_result_without_records_is_refused(tmp_path):
    (tmp_path / 'a.json').write_text('{"environment": {}, "records": []}')
    with pytest.raises(ValueError, match=r'a\.json is no result .*, or has no record'):
        read_results([tmp_path / 'a.json'])


def test_parts_of_a_run_are_merged():
    lost = record('graph', 0.0) | {'left_out': 'the budget is spent'}
    parts = {
        'a': {'environment': {'commit': 'x'}, 'records': [record('eager', 1.0), lost]},
        'b': {'environment': {'commit': 'y'}, 'records': [record('graph', 3.0)]},
    }
    found = merge(parts)
    assert [r['form'] for r in found['records']] == ['eager', 'graph']
    assert not any('left_out' in r for r in found['records'])
    assert found['environment']['commit'] == 'x and y'
    assert comparison_rows(parts) == []
    parts['b']['environment']['threads'] = 4
    with pytest.raises(UnlikeMachinesError, match='threads is None in a, 4 in b'):
        insist_on_one_machine(parts)


@pytest.mark.parametrize('script', ['benchmark_all_methods.sh', 'run_benchmark_after_training.sh'])
def test_the_scripts_say_how(script, tmp_path):
    (tmp_path / 'torch.py').write_text('raise AssertionError')
    done = subprocess.run(
        ['bash', str(ANALYSIS / script), '--help'], cwd=tmp_path, capture_output=True, text=True,
        env=environment(PYTHONPATH=str(tmp_path)),
    )  # fmt: skip
    assert done.returncode == 0 and 'benchmark_latency_flops.py' in done.stdout


@pytest.mark.slow
def test_after_training(run, configs, tmp_path):
    """A folder as a run leaves it: dumped config and weights."""
    from mmengine.config import Config
    from mmengine.model import revert_sync_batchnorm
    from mmengine.registry import MODELS, init_default_scope
    from mmengine.runner import save_checkpoint

    from vim_mm.engine import activate

    activate()
    cfg = Config.fromfile(configs['seg'])
    init_default_scope('mmseg')
    folder = tmp_path / 'run'
    folder.mkdir()
    cfg.dump(folder / 'tiny.py')
    model = revert_sync_batchnorm(MODELS.build(cfg.model))
    save_checkpoint({'state_dict': model.state_dict(), 'meta': {}}, str(folder / 'iter_4.pth'))
    (folder / 'last_checkpoint').write_text(str(folder / 'iter_4.pth'))
    run('benchmark_latency_flops.py', folder, *SIZES, '--passes', 'infer',
        '--out', tmp_path / 'a.json')  # fmt: skip
    (found,) = json.loads((tmp_path / 'a.json').read_text())['records']
    assert found['checkpoint'] == str(folder / 'iter_4.pth') and found['latency'] > 0
    assert found['name'] == 'run'
    other = ('--cfg-options', 'model.backbone.discretization_method=rk4')
    with pytest.raises(SystemExit, match='nothing was measured: every case was left out'):
        run('benchmark_latency_flops.py', folder, *SIZES, '--passes', 'infer', *other,
            '--out', tmp_path / 'b.json')  # fmt: skip
    (found,) = json.loads((tmp_path / 'b.json').read_text())['records']
    assert found['left_out'].startswith('CheckpointMismatchError') and "'rk4'" in found['left_out']


@pytest.fixture(scope='module')
def tool():
    """The functions of benchmark_latency_flops.py."""
    return load('analysis/benchmark_latency_flops.py')


def names_of(tool, monkeypatch, *sources):
    """What records call the models of these files and folders."""
    monkeypatch.setattr(sys, 'argv', ['benchmark', *map(str, sources), '--passes', 'infer'])
    args = tool['parse_args']()
    tool['complete'](args)
    return [case.name for case in tool['cases'](args)]


def test_runs_of_one_config_are_several_models(tool, monkeypatch, tmp_path):
    folders = [tmp_path / 'a' / 'zoh_seed0', tmp_path / 'a' / 'foh_seed0']
    folders.append(tmp_path / 'b' / 'zoh_seed0')
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / 'small.py').touch()
        (folder / 'iter_4.pth').touch()
        (folder / 'last_checkpoint').write_text(str(folder / 'iter_4.pth'))
    config = config_path('seg/upernet_vim_shapes.py')
    names = names_of(tool, monkeypatch, config, *folders[:2])
    assert names == ['upernet_vim_shapes', 'zoh_seed0', 'foh_seed0']
    best = best_table([record('eager', 1.0, name) for name in names])
    assert len(best.splitlines()) == 2 + len(names)
    # Of one name in two folders: the paths.
    assert names_of(tool, monkeypatch, *folders) == [*map(str, folders)]


def test_each_method_of_a_config_that_names_none(tool, configs, monkeypatch):
    names = names_of(tool, monkeypatch, configs['seg'], '--each-method', '--methods', 'zoh', 'foh')
    assert names == ['tiny_seg_zoh', 'tiny_seg_foh']
    argv = ['benchmark', str(configs['seg']), '--each-method', '--sizes', '32x64', '--batch', '1']
    monkeypatch.setattr(sys, 'argv', argv)
    args = tool['parse_args']()
    tool['complete'](args)
    found = {c.method: tool['read'](c, {}).model.backbone for c in tool['cases'](args)}
    assert {m: backbone.discretization_method for m, backbone in found.items()} == {
        m: m for m in args.methods
    }


@pytest.fixture
def measures(tmp_path, monkeypatch):
    """Measurements that a worker can import."""
    (tmp_path / 'measures.py').write_text(
        'import os, time\n'
        'def dies(*case):\n    os.abort()\n'
        'def ends(*case):\n    return {}\n'
        'def lasts(file, *case):\n    open(file, "w").write(str(os.getpid()))\n    time.sleep(90)\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module('measures')
    sys.modules.pop('measures')


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@imports_anew
def test_a_worker_that_measures_is_ended(tool, measures, tmp_path, monkeypatch):
    """As by Ctrl-C."""
    worker, file = tool['Worker'](), tmp_path / 'begun'
    monkeypatch.setitem(worker.measure.__globals__, 'measure', measures.ends)
    worker.measure(SimpleNamespace(form='graph'), None)
    worker.pool.submit(measures.lasts, str(file))
    wait_for(file.exists)
    began = time.monotonic()
    worker.close()
    assert time.monotonic() - began < 30


ORPHAN = """
import os, runpy, signal, sys
from types import SimpleNamespace

if __name__ == '__main__':
    import measures

    worker = runpy.run_path(sys.argv[1])['Worker']()
    worker.measure.__globals__['measure'] = measures.ends
    worker.measure(SimpleNamespace(form='graph'), None)
    future = worker.pool.submit(measures.lasts, sys.argv[2])
    future.add_done_callback(lambda done: None)
    while not os.path.exists(sys.argv[2]) or not open(sys.argv[2]).read():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@imports_anew
def test_a_worker_does_not_outlive_the_tool(measures, tmp_path):
    """It would keep the memory of a GPU."""
    (tmp_path / 'orphan.py').write_text(ORPHAN)
    tool, file = ANALYSIS / 'benchmark_latency_flops.py', tmp_path / 'begun'
    path = os.pathsep.join([str(tmp_path), str(ANALYSIS), *sys.path])
    subprocess.run(
        [sys.executable, str(tmp_path / 'orphan.py'), str(tool), str(file)],
        env=environment(PYTHONPATH=path), timeout=120,
    )  # fmt: skip
    stat = Path('/proc') / file.read_text() / 'stat'

    def has_ended():
        try:
            return ') Z ' in stat.read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_for(has_ended, 30)


@imports_anew
def test_the_death_of_a_worker_is_said(tool, measures, monkeypatch):
    """It is not waited for, and the next case has a worker."""
    worker = tool['Worker']()
    case = SimpleNamespace(form='graph')
    try:
        monkeypatch.setitem(worker.measure.__globals__, 'measure', measures.dies)
        lost = {'left_out': 'the process that measured it was killed'}
        assert worker.measure(case, None) == lost
        monkeypatch.setitem(worker.measure.__globals__, 'measure', measures.ends)
        assert worker.measure(case, None) == {}
    finally:
        worker.close()


class Memory:
    """The peak of a GPU's allocator, in bytes."""

    def __init__(self, monkeypatch):
        self.peak = 0
        monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
        monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: None)
        monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
        monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: self.peak)
        monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', self.reset)

    def reset(self):
        self.peak = 0

    def use(self, size):
        self.peak = max(self.peak, size)


@pytest.mark.parametrize(
    ('device', 'form', 'peak'), [('cuda', 'graph', 20), ('cuda', 'eager', 10), ('cpu', 'eager', 37)]
)
def test_a_peak_is_that_of_its_form(tool, monkeypatch, device, form, peak):
    """Counting takes 100 bytes, with the mixer unfused; capturing 20, a pass 10.

    On the CPU a call's own peak, 30 bytes, does not contain what the model holds, 7 bytes. Nothing
    is counted, which takes a profiler, before all times are taken.
    """
    memory, done = Memory(monkeypatch), []
    monkeypatch.setattr(timing, 'peak_memory', lambda call, device: 30)

    class Passes:
        def __init__(self, model, *args):
            self.model = model

        def form(self, name):
            memory.use(20)
            return lambda: memory.use(0 if name == 'graph' else 10)

        def held_bytes(self):
            return 7

    def count_operations(passes):
        memory.use(100)
        done.append('counted')
        return 1

    monkeypatch.setattr(whole_models, 'Passes', Passes)
    monkeypatch.setattr(whole_models, 'count_operations', count_operations)
    monkeypatch.setattr(whole_models, 'build', lambda cfg, device: torch.nn.Linear(1, 1))
    monkeypatch.setattr(whole_models, 'make_batch', lambda *args: {})
    figures_of = tool['figures_of']
    monkeypatch.setitem(figures_of.__globals__, 'read', lambda case, options: None)
    times = {'seconds': 1.0}
    monkeypatch.setitem(
        figures_of.__globals__, 'times', lambda run, case, args: done.append('timed') or times
    )
    size = (32, 32)
    case = tool['Case']('a', 'a.py', None, None, 'config', 'config', size, 4, 'fp32', form, 'infer')
    found = figures_of(case, SimpleNamespace(device=device, cfg_options={}))
    assert (found['peak_bytes'], found['operations']) == (peak, 0.25)
    assert done == ['timed', 'counted'] and found['seconds'] == 1.0


def test_nothing_measured_is_no_success(run, configs, capsys):
    with pytest.raises(SystemExit) as ended:
        run('benchmark_latency_flops.py', configs['seg'], *SIZES, '--forms', 'graph')
    assert 'error: nothing was measured: every case was left out' in str(ended.value)
    assert 'CUDA graphs need CUDA' in capsys.readouterr().out


def test_each_run_gets_its_figures(tmp_path):
    done = subprocess.run(
        ['bash', str(ANALYSIS / 'run_benchmark_after_training.sh'), 'a', 'b'], cwd=tmp_path,
        capture_output=True, text=True, env=environment(PYTHON='echo', BENCHMARK='--sizes 64'),
    )  # fmt: skip
    assert [line.split(' ', 1)[1] for line in done.stdout.splitlines()] == [
        f'{run} --out {run}/benchmark.json --markdown {run}/benchmark.md --sizes 64' for run in 'ab'
    ]


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    python = tmp_path / 'python'
    python.write_text('#!/bin/sh\necho "$2"\n[ "$2" != a ]\n')
    python.chmod(0o755)
    done = subprocess.run(
        ['bash', str(ANALYSIS / 'run_benchmark_after_training.sh'), 'a', 'b'], cwd=tmp_path,
        capture_output=True, text=True, env=environment(PYTHON=str(python)),
    )  # fmt: skip
    assert (done.stdout.split(), done.returncode) == (['a', 'b'], 1)


def test_any_head_of_a_segmentor_has_its_fast_form(monkeypatch):
    """Also of models without an auxiliary head, and back again."""
    change = whole_models.change_head
    for type_ in ('SegformerHead', 'UPerHead'):
        head = ConfigDict(type=type_, num_classes=3)
        change(head, 'fast')
        assert head == dict(type='FastHead', of=type_, num_classes=3)
        change(head, 'mmseg')
        assert head == dict(type=type_, num_classes=3)
    head = ConfigDict(type='FastUPerHead')
    change(head, 'mmseg')
    assert head == dict(type='UPerHead')


@pytest.mark.slow
def test_heads_of_both_kinds_are_built_and_compute_the_same(run, configs, tmp_path):
    run(
        'benchmark_latency_flops.py', configs['seg'], *SIZES, '--heads', 'mmseg', 'fast',
        '--passes', 'train', '--out', tmp_path / 'a.json',
    )  # fmt: skip
    records = json.loads((tmp_path / 'a.json').read_text())['records']
    losses = {record['heads']: record.get('loss', record.get('left_out')) for record in records}
    assert losses['fast'] == pytest.approx(losses['mmseg'], rel=1e-5)


@pytest.mark.parametrize(
    ('config', 'constant'),
    [('seg/upernet_vim_shapes.py', True), ('det/mask_rcnn_vim_shapes.py', False)],
)
def test_cudnn_compares_algorithms_where_sizes_stay(monkeypatch, config, constant):
    """Not for detectors, whose number of regions changes from step to step."""
    from mmengine.config import Config

    if config.startswith('det'):
        pytest.importorskip('mmdet')
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', not constant)
    whole_models.build(Config.fromfile(config_path(config)), 'cpu')
    assert torch.backends.cudnn.benchmark is constant
