"""Runs of the study: they repeat, learn, count when they diverge, and a graph is the eager step."""

import errno
import json
import math
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from studies.discretization import pool, run, training
from studies.discretization.models.arms import ARMS, PUBLISHED, ROUND_ONE, SPACED, Size, make_net
from studies.discretization.models.other_models import PEERS
from studies.discretization.models.stiffness import stiffness_rows
from studies.discretization.pool import Plan, run_all
from studies.discretization.results import Job, append, finished, key, read_lines, take
from studies.discretization.study import read_results
from studies.discretization.tasks import SECOND, TASKS, Split
from studies.discretization.training import (
    Settings,
    Step,
    build,
    learning_rate,
    make_optimizer,
    measure_step,
    train,
)
from tests.tools.conftest import run_tool
from vim_mm.ops import METHODS


@pytest.mark.slowest
def test_same_seed_same_result(make_data):
    data = make_data('fashion')
    first, again = (train('zoh_exact', 1, data, Settings(), 10) for _ in range(2))
    other = train('zoh_exact', 2, data, Settings(), 10)
    assert first['curve'] == again['curve'] != other['curve']


def test_scenes_are_tested_at_other_sizes(make_data):
    result = train('bilinear', 0, make_data('scenes'), Settings(), 5)
    assert {*result['resolutions']} == {'1', '1.5', '2', '1.5/dt', '2/dt'}
    json.dumps(result, allow_nan=False)


@pytest.mark.slowest
@pytest.mark.parametrize('arm', SPACED)
def test_spacings_are_tested_and_stiffness_is_noted(arm, make_data):
    """Of each arm of the second round, with both ranges of dt."""
    medians = []
    for dt_range in ((1e-3, 0.1), (1e-2, 1.0)):
        found = train(arm, 0, make_data('spacing'), Settings(dt_range=dt_range), 2)
        assert [*found['spacings']] == ['8', '8, dt', '4', '2', '2, dt', '2, dt, dilated']
        assert all(0 <= value <= 100 for value in found['spacings'].values())
        json.dumps(found, allow_nan=False)
        (row,) = stiffness_rows({arm: {0: found}})
        medians.append(float(row['median']))
    assert medians[1] == pytest.approx(10 * medians[0], rel=0.3)


@pytest.mark.parametrize('arm', SECOND)
def test_other_arms_of_the_second_round_train(arm, make_data):
    found = train(arm, 0, make_data('fashion'), Settings(), 2)
    assert ('dt' in found) == arm.endswith('_published') and not found['diverged']
    if 'dt' in found:
        assert tuple(found['dt'].values()) == PUBLISHED[arm.removesuffix('_published')]


@pytest.mark.slowest
def test_it_learns(make_data):
    curve = train('zoh', 0, make_data('fashion'), Settings(lr=5e-3), 100)['curve']
    assert curve[-1][2] < 0.8 * curve[0][2]


def test_divergence_counts(make_data):
    result = train('zoh', 0, make_data('fashion'), Settings(lr=math.nan), 5)
    assert result['diverged'] and result['curve'][-1][2] is None
    assert 0 <= result['metric'] <= 100


def test_a_run_past_the_deadline_is_given_up(make_data):
    assert train('zoh', 0, make_data('fashion'), Settings(), 5, time.monotonic() - 1) is None


def test_arms_run_where_the_protocol_has_them(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(run, 'run_all', lambda jobs, plan, workers: asked.extend(jobs) or True)
    args = SimpleNamespace(
        tasks=['fashion', 'recall', 'long', 'spacing'], arms=[*ARMS, *PEERS], seeds=[0],
        label='', minutes=None, jobs=1, plan=None, dry_run=False,
        out=tmp_path, results=tmp_path, data=tmp_path, cache=tmp_path, steps=None, device='cpu',
        commit='abc',
    )  # fmt: skip
    assert run.train(args) == 0
    arms = {task: [job.arm for job in asked if job.task == task] for task in args.tasks}
    assert arms == {
        'fashion': [*ROUND_ONE, *SECOND, *PEERS],
        'recall': [*METHODS, 'foh_matched'],
        'long': ['zoh'],
        'spacing': [
            *('zoh', 'bilinear', 'zoh_exact', 'exp_trapezoidal'),
            *('exp_trapezoidal_channel', 'exp_trapezoidal_token', 'foh_two_sample'),
        ],
    }


def test_the_second_plan_is_the_protocols(monkeypatch, tmp_path, capsys):
    """Spacing with the range of S1, scenes, spacing with Mamba's range, then fashion; the longest
    runs of S1 after scenes; of a seed all arms of a part before the next; what is there is not made
    again."""
    asked = []
    monkeypatch.setattr(run, 'run_all', lambda jobs, plan, workers: asked.extend(jobs) or True)
    note(tmp_path, result('zoh', 0, 4000, 'spacing') | {'label': 'dt1'})
    args = SimpleNamespace(
        tasks=[*TASKS], arms=[*ARMS, *PEERS], seeds=None, label='', minutes=None, jobs=3,
        plan='second', dry_run=False, out=tmp_path, results=None, data=tmp_path, cache=tmp_path,
        steps=None, device='cpu', commit='abc',
    )  # fmt: skip
    assert run.train(args) == 0
    assert [job.task for job in asked] == [
        *['spacing'] * (4 * 16 - 1), *['scenes'] * (7 * 12), *['spacing'] * (6 * 16),
        *['fashion'] * (7 * 12),
    ]  # fmt: skip
    arms = [job.arm for job in asked if job.label == 'dt1']
    assert {*arms[:47]} == {'zoh', 'zoh_exact', 'bilinear'}
    assert arms[47:] == ['exp_trapezoidal'] * 16 + ['foh_two_sample'] * 16
    assert [job.label for job in asked[63 + 84 :][:16]] == ['dt1'] * 16
    assert {job.seed for job in asked[:5]} == {0, 1}
    assert all(job.arm in TASKS[job.task].arms and job.label in run.SETTINGS for job in asked)
    assert run.SETTINGS['dt1'].dt_range == (0.01, 1.0)
    args.dry_run, args.tasks = True, ['spacing']
    assert run.train(args) == 0 and len(asked) == 327
    assert 'spacing  dt1      zoh                   15 runs' in capsys.readouterr().out


@pytest.mark.slowest
@pytest.mark.parametrize('peer', PEERS)
def test_a_peer_follows_from_the_seed(make_data, peer):
    data = make_data('fashion')
    first, again = (train(peer, 1, data, Settings(), 5) for _ in range(2))
    assert first['curve'] == again['curve'] and not first['diverged']


def test_peers_are_what_their_names_say(tiny_tasks):
    task = replace(tiny_tasks['fashion'], size=Size(28, 2, 10))
    sizes = {peer: sum(p.numel() for p in build(peer, task, 0, Settings()).parameters())
             for peer in PEERS}  # fmt: skip
    # ResNet-18 for CIFAR has 11,173,962 parameters: less two of three input channels of the stem.
    assert sizes['resnet18'] == 11_173_962 - 2 * 64 * 9
    block = 12 * 128**2 + 13 * 128
    patches, positions, head, norm = 4 * 128 + 128, 196 * 128, 1290, 256
    assert sizes['deit'] == 6 * block + patches + positions + head + norm
    net = build('deit', task, 0, Settings())
    kept = make_optimizer(net, torch.tensor(1e-3), Settings()).param_groups[1]['params']
    assert any(param is net.pos_embed for param in kept)


def test_costs_are_of_the_arms_that_run(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(run, 'load_splits', lambda *_: None)
    monkeypatch.setattr(run, 'Data', lambda task, *_: task.name)
    monkeypatch.setattr(run, 'facts', lambda args: {})
    monkeypatch.setattr(run, 'append', lambda *_: None)
    monkeypatch.setattr(
        run, 'measure_step', lambda arm, task, settings: asked.append((task, arm)) or {}
    )
    args = SimpleNamespace(
        tasks=['fashion', 'recall'], arms=[*ARMS], data=tmp_path, cache=tmp_path, out=tmp_path
    )
    assert run.cost(args) == 0
    assert asked == [
        *(('fashion', arm) for arm in (*ROUND_ONE, *SECOND)),
        *(('recall', arm) for arm in (*METHODS, 'foh_matched')),
    ]


def test_the_first_arm_of_a_process_does_not_pay_for_what_stays(make_data, monkeypatch):
    """A card that keeps 65 MiB from its first step on, and takes 100 for each."""
    mebi, used, peak = 2**20, [7 * 2**20], [0]

    class FirstPays:
        def __init__(self, *args, **kwargs):
            used[0] += 65 * mebi if used[0] < 65 * mebi else 0
            peak[0] = used[0] + 100 * mebi

        def __call__(self, plan, lr):
            pass

    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda other: 1.0)
    for name, fake in {
        'empty_cache': lambda: None,
        'memory_allocated': lambda: used[0],
        'reset_peak_memory_stats': lambda: None,
        'max_memory_allocated': lambda: peak[0],
        'synchronize': lambda: None,
        'Event': lambda enable_timing: event,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(training, 'Step', FirstPays)
    monkeypatch.setattr(training, '_measured', set())
    data = make_data('fashion')
    found = [measure_step(arm, data, Settings())['mebibytes'] for arm in ('zoh', 'foh')]
    assert found == [100.0, 100.0]


@pytest.mark.parametrize(
    ('command', 'sentence'),
    [
        ('cost', 'it needs a GPU, and PyTorch finds none'),
        ('train', 'there is no GPU, and a CPU takes hours for a run; --device cpu makes it'),
    ],
)
def test_a_machine_without_a_gpu_is_one_sentence(command, sentence, tmp_path):
    printed = run_tool(
        TOOL, command, '--data', 'none', '--out', 'out', '--commit', 'abc',
        cwd=tmp_path, fails=True, CUDA_VISIBLE_DEVICES='',
    )  # fmt: skip
    assert printed.splitlines()[-1].endswith(f'error: {sentence}') and 'Traceback' not in printed
    assert not (tmp_path / 'out').exists()


def test_what_is_missing_is_told_without_a_gpu(tmp_path):
    printed = run_tool(
        TOOL, 'train', '--plan', 'second', '--dry-run', '--data', 'none', '--out', 'out',
        cwd=tmp_path, CUDA_VISIBLE_DEVICES='',
    )  # fmt: skip
    assert re.search(r'^about \d+ minutes of one H100', printed.splitlines()[-1])


@pytest.mark.parametrize('option', ['--steps', '--jobs'])
def test_no_steps_are_not_those_of_the_task(option, tmp_path):
    printed = run_tool(
        TOOL, 'train', '--data', 'none', '--out', 'out', '--device', 'cpu', option, 0,
        cwd=tmp_path, fails=True,
    )  # fmt: skip
    assert printed.splitlines()[-1].endswith(f"{option}: expected a whole number from 1, got '0'")


STEPS = {'fashion': 2340}
LABELS = ['', 'dt0.01']
TOOL = 'studies/discretization/run.py'


def result(arm='zoh', seed=0, steps=2340, task='fashion'):
    return {'task': task, 'arm': arm, 'seed': seed, 'settings': {'steps': steps}}


def note(out, record):
    """As a worker does."""
    append(out / f'{record["task"]}.jsonl', record)


def test_trials_enter_no_table(tmp_path):
    out, results = tmp_path / 'out', tmp_path / 'results'
    cost = {'task': 'fashion', 'arm': 'zoh', 'milliseconds': 1.0}
    counted = [result(), result(seed=11), cost]
    trials = [
        result(seed=100), result(seed=12), result('foh', steps=2), result(task='other'),
        result('deit', seed=3), result('nosuch'), result('rk4') | {'label': 'typo'},
        result(task='long', seed=1, steps=23_400),
    ]  # fmt: skip
    for record in (*counted, *trials):
        note(out, record)
    left_out = [
        'left out: fashion zoh 100, its seed is 100, and the study has 0 to 11.',
        'left out: fashion zoh 12, its seed is 12, and the study has 0 to 11.',
        'left out: fashion foh 0, it has 2 steps, and the task 2340.',
        'left out: fashion deit 3, its seed is 3, and the study has 0 to 2.',
        "left out: fashion nosuch 0, the task has no arm 'nosuch' with the settings ''.",
        "left out: fashion_typo rk4 0, the task has no arm 'rk4' with the settings 'typo'.",
        'left out: long zoh 1, its seed is 1, and the study has 0 to 0.',
        "left out: other zoh 0, the study has no task 'other'.",
    ]
    assert take(out, results, TASKS, LABELS) == (3, 0, left_out)
    assert [file.name for file in results.iterdir()] == ['fashion.jsonl']
    assert [key(record) for record in read_lines(results)] == [
        ('fashion', 'zoh', 0), ('fashion', 'zoh', 11), ('fashion', 'zoh', 'cost'),
    ]  # fmt: skip


def test_a_setting_has_a_file_of_its_own(tmp_path):
    note(tmp_path / 'out', result(task='recall', steps=4000) | {'label': 'dt0.01'})
    assert take(tmp_path / 'out', tmp_path / 'runs', TASKS, LABELS) == (1, 0, [])
    assert (tmp_path / 'runs/recall_dt0.01.jsonl').exists()


def test_a_cost_replaces_the_older_one_and_a_run_does_not(tmp_path):
    for number in (1.0, 2.0):
        out = tmp_path / f'out{number}'
        note(out, {'task': 'fashion', 'arm': 'zoh', 'milliseconds': number})
        note(out, result() | {'metric': number})
        take(out, tmp_path / 'results', TASKS, LABELS)
    task = read_results(tmp_path / 'results')['fashion']
    assert task.costs['zoh']['milliseconds'] == 2.0 and task.runs['zoh'][0]['metric'] == 1.0
    assert take(out, tmp_path / 'results', TASKS, LABELS) == (0, 2, [])
    assert len([*read_lines(tmp_path / 'results')]) == 3


def test_a_line_that_was_cut_off_takes_no_other_with_it(tmp_path, monkeypatch):
    """As on a disk that is full within a line."""
    note(tmp_path, result(seed=0))
    write = os.write
    with monkeypatch.context() as full, pytest.raises(OSError, match=r'fashion\.jsonl') as raised:
        full.setattr(os, 'write', lambda file, line: write(file, line[:20]))
        note(tmp_path, result(seed=1))
    assert raised.value.errno == errno.ENOSPC
    note(tmp_path, result(seed=2))
    with monkeypatch.context() as full:  # only for the end of the line was there no room
        full.setattr(os, 'write', lambda file, line: write(file, line[:-1]))
        note(tmp_path, result(seed=3))
    note(tmp_path, result(seed=4))
    assert [record['seed'] for record in read_lines(tmp_path)] == [0, 2, 3, 4]


def test_a_line_that_is_no_record_is_named(tmp_path):
    note(tmp_path, {'task': 'fashion', 'seed': 0})
    with pytest.raises(ValueError, match='a line without task or arm'):
        take(tmp_path, tmp_path / 'results', TASKS, LABELS)


@pytest.mark.parametrize(('seeds', 'steps'), [(None, None), ([3], None), (None, 5)])
def test_what_train_makes(seeds, steps, monkeypatch, tmp_path):
    """The seeds that are planned, unless others are named; of trials the results hold none."""
    asked = []
    monkeypatch.setattr(run, 'run_all', lambda jobs, plan, workers: asked.extend(jobs) or True)
    note(tmp_path / 'results', result())
    args = SimpleNamespace(
        tasks=['fashion', 'long'], arms=['zoh', 'deit'], seeds=seeds, label='', minutes=None,
        jobs=1, out=tmp_path / 'out', results=tmp_path / 'results', data=tmp_path, cache=tmp_path,
        steps=steps, device='cpu', commit='abc', plan=None, dry_run=False,
    )  # fmt: skip
    assert run.train(args) == 0
    found = {(job.task, job.arm): [] for job in asked}
    for job in asked:
        found[job.task, job.arm].append(job.seed)
    if seeds:
        assert [*found.values()] == [[3], [3], [3]]
    else:
        assert found == {
            ('fashion', 'zoh'): [*range(1 if steps is None else 0, 12)],
            ('fashion', 'deit'): [0, 1, 2],
            ('long', 'zoh'): [0],
        }


@pytest.fixture
def forked(monkeypatch):
    """Workers that have what a test patches; of the data they need nothing."""
    monkeypatch.setattr(
        pool.multiprocessing, 'get_context', lambda _, get=multiprocessing.get_context: get('fork')
    )
    monkeypatch.setattr(pool, 'load_splits', lambda *arguments: None)
    monkeypatch.setattr(pool, 'Data', lambda *arguments: None)


FIGURES = {'metric': 1.0, 'seconds': 1.0}


def plan_of(out, device='cpu', deadline=math.inf):
    settings = {'': Settings(), 'dt1': Settings(dt_range=(0.01, 1.0))}
    return Plan(TASKS, out, out, out, settings, None, device, deadline, {}, {})


def made(out):
    return [(record['arm'], record['seed']) for record in read_lines(out)]


def test_workers_are_spread_over_the_cards(forked, monkeypatch, tmp_path):
    """Two on each of three."""
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 3)
    monkeypatch.setattr(
        pool, '_work', lambda pipe, plan, gpu: (tmp_path / f'{gpu} {os.getpid()}').touch()
    )
    jobs = [Job('fashion', 'zoh', seed) for seed in range(12)]
    assert run_all(jobs, plan_of(tmp_path, 'cuda'), 2)
    assert sorted(file.name[0] for file in tmp_path.iterdir()) == [*'001122']


def test_a_run_that_fails_takes_no_other_with_it(forked, monkeypatch, tmp_path, capfd):
    """By an error or by a signal; the same command makes it once more."""

    def fake(arm, seed, *others):
        if arm == 'foh':
            raise RuntimeError('no such kernel')
        if arm == 'poly' and not (tmp_path / 'killed').exists():
            (tmp_path / 'killed').touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result(arm, seed) | FIGURES

    monkeypatch.setattr(pool, 'train', fake)
    jobs = [Job('fashion', arm, seed) for seed in range(3) for arm in ('zoh', 'foh', 'poly')]
    assert not run_all(jobs, plan_of(tmp_path), 2)
    there = {job for job in jobs if (job.arm, job.seed) in made(tmp_path)}
    assert {arm: sum(job.arm == arm for job in there) for arm in ('zoh', 'foh', 'poly')} == {
        'zoh': 3, 'foh': 0, 'poly': 2,
    }  # fmt: skip
    printed = capfd.readouterr().out
    assert printed.count('failed, exit code 1: ') == 3
    assert printed.count('failed, exit code -9: ') == 1
    assert run_all([job for job in jobs if job not in there and job.arm == 'poly'],
                   plan_of(tmp_path), 2)  # fmt: skip
    assert len(made(tmp_path)) == 6


def test_processes_that_cannot_begin(forked, monkeypatch, tmp_path):
    def fails(*arguments):
        raise RuntimeError('no GPU')

    monkeypatch.setattr(pool.torch, 'set_num_threads', fails)
    assert not run_all([Job('fashion', 'zoh', seed) for seed in range(4)], plan_of(tmp_path), 2)
    assert not made(tmp_path)


def test_runs_that_would_not_end_in_time_are_passed_over(forked, monkeypatch, tmp_path):
    """By the longest of the same arm and settings."""
    durations = {'zoh': 0.05, 'poly': 1.2, 'rk4': 0.0}

    def fake(arm, seed, *others):
        time.sleep(durations[arm])
        return result(arm, seed) | FIGURES

    monkeypatch.setattr(pool, 'train', fake)
    jobs = [Job('fashion', arm, seed) for seed, arm in enumerate(('zoh', 'poly', 'poly', 'zoh'))]
    jobs.append(Job('fashion', 'rk4', 0))
    assert run_all(jobs, plan_of(tmp_path, deadline=time.time() + 2.3), 1)
    assert made(tmp_path) == [('zoh', 0), ('poly', 1), ('zoh', 3), ('rk4', 0)]


def test_what_is_expected_counts_until_a_run_is_made(forked, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pool, 'train', lambda arm, seed, *others: result(arm, seed) | FIGURES)
    jobs = [Job('fashion', arm, seed) for arm, seed in (('poly', 0), ('zoh', 0), ('zoh', 1))]
    plan = plan_of(tmp_path, deadline=time.time() + 60)
    assert run_all(jobs, replace(plan, expected={jobs[0]: 1e3, jobs[2]: 1e3}), 1)
    assert made(tmp_path) == [('zoh', 0), ('zoh', 1)]
    assert '1 runs would not have ended in time' in capsys.readouterr().out


def test_no_run_begins_when_the_time_is_over(forked, monkeypatch, tmp_path):
    monkeypatch.setattr(pool, 'train', None)
    jobs = [Job('fashion', 'zoh', 0)]
    assert run_all(jobs, plan_of(tmp_path, deadline=time.time() - 1), 1)
    assert not any(tmp_path.iterdir())


def test_a_trial_is_not_the_run_of_its_seed(tmp_path):
    note(tmp_path, result(steps=2))
    note(tmp_path, result('foh'))
    assert finished(tmp_path, tmp_path / 'none', STEPS) == {('fashion', 'foh', 0)}
    assert finished(tmp_path, tmp_path / 'none', {'fashion': 2}) == {('fashion', 'zoh', 0)}


def test_import_says_what_it_leaves_out(tmp_path):
    """By the steps of the study's own tasks."""
    out = tmp_path / 'out'
    note(out, result())
    note(out, result('foh', steps=2))
    printed = run_tool(TOOL, 'import', 'out', '--results', 'results', cwd=tmp_path)
    assert printed == (
        'left out: fashion foh 0, it has 2 steps, and the task 2340.\n'
        '1 results appended in results, 0 were there\n'
    )


@pytest.mark.parametrize('exists', [False, True])
def test_a_folder_without_results_is_named(exists, tmp_path):
    out = tmp_path / 'lines'
    if exists:
        out.mkdir()
        (out / 'notes.txt').touch()
    with pytest.raises(FileNotFoundError, match=f'{re.escape(str(out))} holds no results'):
        take(out, tmp_path / 'results', TASKS, LABELS)
    assert finished(out, tmp_path / 'results', STEPS) == set()  # as of a first start


def test_learning_rate():
    settings = Settings(lr=1.0, warm_up=0.1)
    rates = [learning_rate(i, 100, settings) for i in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 1e-3


def test_all_parameter_groups_read_the_tensor(make_data):
    """A fill of lr reaches every group: at 0 nothing moves, above it all do."""
    data = make_data('fashion')
    net = make_net(ARMS['zoh'], data.task.size, False, 0, (1e-3, 0.1), 0.0)
    step = Step(net, data, Settings(), graph=False)
    before = [p.detach().clone() for p in net.parameters()]
    step(data.plan(0, 1)[0], 0.0)
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before))
    step(data.plan(0, 1)[0], 1e-3)
    moved = [not torch.equal(p, b) for p, b in zip(net.parameters(), before)]
    assert all(moved)


@pytest.mark.slowest
def test_processes_restart_and_import(make_data, tiny_tasks, tmp_path, monkeypatch):
    """Two workers make what is missing, once; import appends each."""
    task = replace(tiny_tasks['scenes'], steps=5)
    data = make_data('scenes')
    cache = tmp_path / 'cache'
    cache.mkdir()
    for name, split in (
        ('train', Split(data.images.numpy(), data.labels.numpy())),
        ('test', Split(data.test_images.numpy(), data.test_labels.numpy())),
    ):
        np.savez(
            cache / f'scenes_{name}_{len(split.images)}_32.npz',
            images=split.images,
            labels=split.labels,
        )
    out, results = tmp_path / 'out', tmp_path / 'results'
    results.mkdir()
    steps = {'scenes': 5}
    jobs = [Job('scenes', arm, 0) for arm in ('zoh', 'poly', 'zoh_exact_averaged')]
    note(out, {**vars(jobs[0]), 'metric': 1.0, 'settings': {'steps': 5}})
    (out / 'scenes.jsonl').open('a').write('{"cut off')
    missing = [job for job in jobs if job.key not in finished(out, results, steps)]
    assert missing == jobs[1:]
    plan = replace(
        plan_of(out), tasks={'scenes': task}, source=tmp_path, cache=cache, facts={'x': 1}
    )
    assert run_all(missing, plan, 2)
    assert {(r['arm'], r.get('x')) for r in read_lines(out)} == {
        ('zoh', None),
        ('poly', 1),
        ('zoh_exact_averaged', 1),
    }
    assert take(out, results, {'scenes': task}, ['']) == (3, 0, [])
    assert take(out, results, {'scenes': task}, ['']) == (0, 3, [])
    assert finished(tmp_path / 'empty', results, steps) == {job.key for job in jobs}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('arm', ['zoh_exact', 'poly', 'zoh_exact_averaged', *PEERS])
def test_graph_is_eager(make_data, arm):
    """The same curve and weights' bits, drop path included."""
    data = make_data('fashion', 'cuda')
    results = [train(arm, 0, data, Settings(), 10, graph=graph) for graph in (False, True)]
    eager, graph = (result['curve'] for result in results)
    assert eager == graph


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('arm', ['exp_trapezoidal', 'foh_two_sample'])
def test_a_graph_of_a_compiled_rule_is_eager(make_data, arm):
    """But for rounding, and it repeats to the bit."""
    data = make_data('spacing', 'cuda')
    eager, graph, again = (
        train(arm, 0, data, Settings(), 10, graph=graph) for graph in (False, True, True)
    )
    assert graph['curve'] == again['curve']
    losses = ([loss for _, _, loss in found['curve']] for found in (graph, eager))
    assert next(losses) == pytest.approx(next(losses), rel=1e-3)
