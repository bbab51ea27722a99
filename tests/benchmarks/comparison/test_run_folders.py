"""compare_methods.py on folders as run_all_methods.py leaves them, with planted differences."""

import json
import re
import sys

import cv2
import numpy as np
import pytest

from benchmarks.comparison.results import family
from benchmarks.comparison.run_folders import UnlikeRunsError, find_runs, read_runs
from tests.scripts import load

TOOL = 'analysis/compare_methods.py'
METHODS = ('zoh', 'foh', 'bilinear', 'zoh_exact')
PLANTED = {'foh': -3.0}  # points from the control
SEEDS = 10


LOG = '20260101_000000/vis_data/scalars.json'
RAN = {'path': 'CUDA kernel', 'card': 'a card', 'threads': 1, 'date': '2026-01-01',
       'versions': {'torch': '2.11'}}  # fmt: skip


def write_run(folder, method, seed, metric, lost=(), **record):
    """A folder with its record and a log of two validations; the metric None has no log.

    ``lost`` are numbers of lines that the log lacks.
    """
    folder.mkdir(parents=True)
    run = {'task': 'small', 'method': method, 'seed': seed, 'status': 'finished', 'commit': 'abc',
           'arguments': ['--amp'], 'ran': RAN}  # fmt: skip
    (folder / 'run.json').write_text(json.dumps(run | record))
    if metric is not None:
        lines = [{'step': 2, 'loss': 1.0}, {'step': 2, 'mIoU': metric - 5},
                 {'step': 4, 'loss': 0.5}, {'step': 4, 'mIoU': metric}]  # fmt: skip
        write_log(folder, *(line for i, line in enumerate(lines) if i not in lost))


def write_log(folder, *lines):
    """Append lines to the log of a run."""
    log = folder / LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open('a') as file:
        file.writelines(json.dumps(line) + '\n' for line in lines)


@pytest.fixture(scope='module')
def work_dirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp('work_dirs')
    rng = np.random.default_rng(0)
    for seed, level in enumerate(rng.normal(40, 2, SEEDS)):
        for method in METHODS:
            metric = level + PLANTED.get(method, 0) + rng.normal(0, 0.2)
            write_run(folder / f'small_{method}_seed{seed}', method, seed, float(metric))
    return folder


def test_the_planted_difference_is_found(work_dirs):
    folders = find_runs([work_dirs])
    assert len(folders) == len(METHODS) * SEEDS
    ((task,), left_out) = read_runs(folders)
    assert (task.name, task.seeds, left_out) == ('small mIoU', [*range(SEEDS)], [])
    found = family(task)
    assert {m for m, (_, p) in found.items() if p < 0.05} == {*PLANTED}
    assert found['foh'][0].low < -3.0 < found['foh'][0].high
    task.control = 'zoh'
    assert [*family(task)] == ['foh', 'bilinear', 'zoh_exact']


def test_interrupted_runs_are_left_out_and_diverged_ones_count(work_dirs, tmp_path):
    for seed in range(2):
        for method in ('zoh', 'zoh_exact'):
            write_run(tmp_path / f'{method}{seed}', method, seed, 30.0)
    write_run(tmp_path / 'zoh2', 'zoh', 2, 31.0, status='interrupted')
    write_run(tmp_path / 'early', 'rk4', 0, None, status='diverged')
    # Its loss was not finite when the process that starts the runs had been killed.
    write_run(tmp_path / 'late', 'rk4', 1, 20.0, status='interrupted', diverged='The loss is nan.')
    # A training by hand, of which nobody says how it ended.
    (tmp_path / 'alone').mkdir()
    (tmp_path / 'alone/run.json').write_text(json.dumps({'ran': RAN, 'diverged': 'It is nan.'}))
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert left_out == [
        f'left out: {tmp_path / "alone"} is unfinished.',
        f'left out: {tmp_path / "zoh2"} is interrupted.',
    ]
    assert task.metrics('rk4') == [0.0, 0.0]
    assert task.runs['rk4'][0]['curve'] == [[2, 0.0], [4, 0.0]]
    assert task.runs['rk4'][1]['diverged'] and task.metrics('zoh') == [30.0, 30.0]


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        ({'commit': 'def'}, 'commit is abc'),
        ({'arguments': []}, 'arguments is'),
        ({'ran': RAN | {'path': 'PyTorch operators'}}, 'path of the scans is CUDA kernel'),
        ({'ran': RAN | {'versions': {'torch': '2.12'}}}, 'torch is 2.11'),
        ({'ran': RAN | {'card': 'another card'}}, 'machine is a card'),
        ({'ran': RAN | {'threads': 2}}, 'threads is 1'),
        ({'resumed': [{'card': 'another card'}]}, 'machine is a card'),
        ({'resumed': [{'versions': {'torch': '2.12'}}, {'threads': 2}]}, 'torch is 2.11'),
        ({'processes': 2}, 'number of processes is'),
        ({'shared_sha256': 'def'}, 'config without method and seed'),
    ],
)
def test_unlike_runs_are_refused(change, words, tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0)
    write_run(tmp_path / 'b', 'foh', 0, 31.0, **change)
    with pytest.raises(UnlikeRunsError, match=words):
        read_runs(find_runs([tmp_path]))
    ((task,), _) = read_runs(find_runs([tmp_path]), allow_unlike=True)
    assert task.metrics('foh') == [31.0]


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_metric_that_is_not_finite_is_refused(value, tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0)
    write_run(tmp_path / 'b', 'foh', 0, value)
    with pytest.raises(ValueError, match=rf'b: mIoU of step 4 is {value}'):
        read_runs(find_runs([tmp_path]))


def test_the_metric_is_the_last_of_the_curve(tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0)
    write_log(tmp_path / 'a', {'step': 2, 'mIoU': 35.0})  # as of a run that was resumed
    ((task,), _) = read_runs(find_runs([tmp_path]))
    assert task.runs['zoh'][0]['curve'] == [[2, 35.0], [4, 30.0]]
    assert task.metrics('zoh') == [30.0]


def test_a_detector_that_finds_nothing_counts(tmp_path):
    """MMDetection then logs a validation without metrics."""
    for method, seed, ap in (('zoh', 0, 0.3), ('zoh', 1, None), ('foh', 0, 0.2), ('foh', 1, 0.1)):
        folder = tmp_path / f'{method}{seed}'
        write_run(folder, method, seed, None)
        found = {} if ap is None else {'coco/bbox_mAP': ap}
        write_log(folder, {'step': 4, 'loss': 1.0}, {'step': 4, 'data_time': 0.1, **found})
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert left_out == [] and task.name == 'small box AP'
    assert task.metrics('zoh') == [30.0, 0.0] and task.metrics('foh') == [20.0, 10.0]


@pytest.mark.parametrize('line', [
    pytest.param({'norm_of_a_head': 1.0}, id='a scalar of another hook'),
    # Only a detector may log a validation without metrics.
    pytest.param({'data_time': 1.0}, id='a validation of a segmentor'),
])  # fmt: skip
def test_what_has_no_metric_is_no_metric_of_0(line, tmp_path):
    write_run(tmp_path / 'killed', 'zoh', 0, 30.0, lost=(3,))
    write_log(tmp_path / 'killed', {'step': 4, **line})
    write_run(tmp_path / 'other', 'zoh', 1, 31.0)
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert [*task.runs['zoh']] == [1] and len(left_out) == 1


def test_a_folder_of_something_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/benchmark.json').write_text('{"environment": {}, "records": []}')
    with pytest.raises(SystemExit) as refused:
        run(monkeypatch, tmp_path)
    assert 'no run with a run.json of run_all_methods.py' in str(refused.value)


def test_a_run_without_a_pair_is_refused(tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0)
    write_run(tmp_path / 'b', 'zoh', 0, 31.0)
    with pytest.raises(ValueError, match='two runs of zoh with seed 0'):
        read_runs(find_runs([tmp_path]))
    write_run(tmp_path / 'c/d', 'zoh', None, 30.0)
    with pytest.raises(ValueError, match='has no seed'):
        read_runs(find_runs([tmp_path / 'c']))


# Lines of the log: loss and metric of step 2, loss and metric of step 4.
@pytest.mark.parametrize(
    ('lost', 'checkpoint', 'last'),
    [((3,), None, 'only of step 2'), ((2, 3), 4, 'only of step 2'), ((1, 3), None, 'and no other')],
)
def test_a_run_without_the_last_metric_is_left_out(lost, checkpoint, last, tmp_path):
    """Also where nothing else of its task says which step is the last."""
    write_run(tmp_path / 'killed', 'zoh', 0, 30.0, lost)
    if checkpoint:
        (tmp_path / f'killed/iter_{checkpoint}.pth').touch()
    write_run(tmp_path / 'other', 'zoh', 1, 31.0, lost=(0, 1))
    reason = f'left out: {tmp_path / "killed"} has no mIoU of step 4, the last one, {last}.'
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert left_out == [reason] and [*task.runs['zoh']] == [1]
    if last.startswith('only'):
        assert read_runs([tmp_path / 'killed']) == ([], [reason])


def test_curves_have_the_steps_that_all_runs_have(tmp_path, monkeypatch):
    """A run that was killed in a validation before the last counts, and the page is made."""
    for seed in range(2):
        for method in ('zoh', 'foh'):
            lost = (1,) if (method, seed) == ('foh', 1) else ()
            write_run(tmp_path / f'{method}{seed}', method, seed, 30.0 + seed, lost)
        write_run(tmp_path / f'rk4{seed}', 'rk4', seed, None, status='diverged')
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert left_out == [] and task.metrics('foh') == [30.0, 31.0]
    curves = {arm: [task.runs[arm][seed]['curve'] for seed in range(2)] for arm in task.arms}
    ends = [[[4, 30.0]], [[4, 31.0]]]
    assert curves == {'zoh': ends, 'foh': ends, 'rk4': [[[4, 0.0]], [[4, 0.0]]]}
    run(monkeypatch, tmp_path, '--page', tmp_path / 'page.md', '--control', 'zoh')
    assert (tmp_path / 'page.md').exists()


def test_a_run_shorter_than_the_interval_of_the_logger_counts(tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0, lost=(0, 2))
    ((task,), _) = read_runs(find_runs([tmp_path]))
    assert task.metrics('zoh') == [30.0]


@pytest.mark.parametrize(
    ('name', 'content', 'words'),
    [
        ('run.json', '{"task": ', 'is no JSON file: Expecting value'),
        ('run.json', '[1]', 'holds no JSON object'),
        ('run.json', '{"status": "finished", "task": "small"}', 'lacks method, seed, commit'),
        (LOG, '{}\n5\n', ', line 2, holds no JSON object'),
        (LOG, b'\xff\xfe', 'is no JSON file: .*decode'),
    ],
)
def test_a_damaged_file_is_named(name, content, words, tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0)
    file = tmp_path / 'a' / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f'{re.escape(str(file))}.*{words}'):
        read_runs(find_runs([tmp_path]))


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, arguments)])
    load(TOOL, '__main__')


def test_markdown_latex_and_picture(work_dirs, tmp_path, monkeypatch, capsys):
    page, latex = tmp_path / 'page.md', tmp_path / 'tables.tex'
    run(monkeypatch, work_dirs, '--page', page, '--latex', latex)
    printed = capsys.readouterr().out
    assert '### Against zoh_exact' in printed and 'no difference found' in printed
    text = page.read_text()
    assert text.startswith('# Methods compared') and printed.split('\n\n')[0] in text
    picture = cv2.imread(str(tmp_path / 'images/small_mIoU.png'))
    assert picture is not None and picture.std() > 10
    assert latex.read_text().count(r'\begin{tabular}') == 2


def test_another_control_must_have_runs(work_dirs, monkeypatch):
    with pytest.raises(SystemExit, match=r"--control: expected one of \['bilinear', .*got 'zho'"):
        run(monkeypatch, work_dirs, '--control', 'zho')


def test_nothing_to_compare_is_an_error(tmp_path, monkeypatch, capsys):
    for seed, method in enumerate(('zoh', 'foh')):
        write_run(tmp_path / method, method, seed, 30.0)
    with pytest.raises(SystemExit, match='There is nothing to compare'):
        run(monkeypatch, tmp_path)
    assert 'small mIoU: no seed that all methods finished' in capsys.readouterr().out


def test_without_the_control_nothing_is_compared(tmp_path, monkeypatch, capsys):
    for seed in range(2):
        for method in ('zoh', 'foh'):
            write_run(tmp_path / f'{method}{seed}', method, seed, 30.0 + seed)
    run(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert 'no run of the control zoh_exact' in printed and 'Against' not in printed
    run(monkeypatch, tmp_path, '--control', 'zoh')
    assert '### Against zoh\n' in capsys.readouterr().out


@pytest.mark.parametrize(('seeds', 'enough'), [(5, False), (6, True)])
def test_pairs_that_are_too_few_for_a_test_are_described(
    seeds, enough, tmp_path, monkeypatch, capsys
):
    for seed in range(seeds):
        write_run(tmp_path / f'a{seed}', 'zoh_exact', seed, 30.0)
        write_run(tmp_path / f'b{seed}', 'foh', seed, 30.0 + seed)
    run(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    for words in ('95 % interval |', 'p, Holm |'):
        assert (words in printed) == enough
    for words in ('each seed |', '| +0.00, +1.00, +2.00, +3.00, +4.00 |', '| too few pairs |'):
        assert (words in printed) != enough


def test_other_paths_beside_runs_are_ignored(tmp_path, monkeypatch, capsys):
    """As a shell's `work_dirs/*` names them: a plain training, a file, somebody's JSON."""
    for seed in range(2):
        for method in ('zoh_exact', 'foh'):
            write_run(tmp_path / f'{method}{seed}', method, seed, 30.0 + seed)
    (tmp_path / 'plain').mkdir()
    (tmp_path / 'notes.txt').write_text('no run')
    foreign = tmp_path / 'foreign/x'
    foreign.mkdir(parents=True)
    (foreign / 'list.json').write_text('[1]')
    (foreign / 'y.json').write_text('{"a": 1}')
    (foreign / 'z.json').mkdir()
    run(monkeypatch, *sorted(tmp_path.iterdir()))
    printed = capsys.readouterr().out
    assert '## small mIoU' in printed
    for name in ('plain', 'notes.txt', 'foreign'):
        assert f'ignored: {tmp_path / name} holds no run with a run.json' in printed
    assert printed.count('ignored') == 3
    with pytest.raises(SystemExit, match=r'there is no .*foreing'):
        run(monkeypatch, tmp_path / 'foh0', tmp_path / 'foreing')
    with pytest.raises(SystemExit, match=r'foreign: no run with a run\.json'):
        run(monkeypatch, tmp_path / 'foreign')


@pytest.mark.parametrize('ending', ['', '-dirty'])
def test_the_commit_of_a_run_is_short(ending, tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, 30.0, commit='0123456789' * 4 + ending)
    ((task,), _) = read_runs(find_runs([tmp_path]))
    assert task.runs['zoh'][0]['commit'] == f'0123456{ending}'


def test_a_loop_by_iterations_whose_log_counts_epochs(tmp_path):
    """As MMEngine's own log does; the last validation was lost."""
    write_run(tmp_path / 'a', 'zoh', 0, None)
    losses = ({'step': step, 'loss': 1.0, 'epoch': 1} for step in (2000, 4000))
    write_log(tmp_path / 'a', *losses, {'step': 2000, 'mIoU': 30.0})
    (tmp_path / 'a/iter_4000.pth').touch()
    assert 'only of step 2000' in read_runs(find_runs([tmp_path]))[1][0]


def test_a_loop_by_epochs_whose_checkpoints_count_iterations(tmp_path):
    write_run(tmp_path / 'a', 'zoh', 0, None)
    for epoch in range(1, 13):
        loss = {'step': 1000 * epoch, 'loss': 1.0, 'epoch': epoch}
        write_log(tmp_path / 'a', loss, {'step': epoch, 'mIoU': 30.0 + epoch})
    (tmp_path / 'a/iter_12000.pth').touch()
    ((task,), left_out) = read_runs(find_runs([tmp_path]))
    assert left_out == [] and task.metrics('zoh') == [42.0]


@pytest.mark.parametrize(
    ('unit', 'steps', 'kept'),
    [('epoch', (6, 12), True), ('epoch', (600, 1200), False), ('iter', (0,), True)],
)
def test_metrics_by_epoch(unit, steps, kept, tmp_path, monkeypatch, capsys):
    """Their steps are epochs, the losses' are iterations; by iterations MMEngine notes epoch 0.

    The log tells as well where the weights were deleted, also where epochs of two iterations are
    as many as an iteration that has a loss.
    """
    for method, metric in (('zoh', 40.0), ('zoh_exact', 41.0)):
        for seed in range(2):
            folder = tmp_path / f'{method}{seed}'
            write_run(folder, method, seed, None)
            epoch = {'epoch': steps[-1]} if unit == 'epoch' else {}
            write_log(folder, *({'step': step, 'loss': 1.0, **epoch} for step in (600, 2400)))
            write_log(folder, *({'step': step, 'mIoU': metric} for step in steps))
            if kept:
                name = 'epoch_12.pth' if unit == 'epoch' else 'iter_2400.pth'
                (folder / name).touch()
                (folder / 'last_checkpoint').write_text(str(folder / name))
    run(monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert 'left out' not in printed and '-1.000' in printed
