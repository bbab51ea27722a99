"""How the tools end: the last line is the sentence, with and without torchrun."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT, TOOLS, script
from tests.tools.conftest import configs, data_root, environment, run_tool  # noqa: F401  fixtures

WRONG = '_base_ = {base!r}\nmodel = dict(backbone=dict(drop_path_rate=2.0))\n'
SENTENCE = r'train.py: error: drop_path_rate must lie in [0, 1), got 2.0'


@pytest.fixture
def wrong(configs, data_root, tmp_path):  # noqa: F811
    """A config whose only mistake is the model's, and options that lead to its data."""
    (tmp_path / 'wrong.py').write_text(WRONG.format(base=str(configs['seg'])))
    return 'wrong.py', ('--cfg-options', f'data_root={data_root}')


@pytest.mark.slow
def test_a_mistake_ends_in_its_sentence(wrong, tmp_path):
    config, options = wrong
    log = run_tool('train.py', config, *options, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' not in log


@pytest.mark.slow
def test_debug_shows_the_traceback_before_it(wrong, tmp_path):
    config, options = wrong
    log = run_tool('train.py', config, '--debug', *options, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' in log and 'check_rate' in log


@pytest.mark.slow
def test_torchrun_does_not_bury_it(wrong, tmp_path):
    config, options = wrong
    log = run_tool('dist_train.sh', config, 2, *options, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' not in log


@pytest.mark.slow
def test_a_work_dir_that_cannot_be_written_is_named(configs, data_root, tmp_path):  # noqa: F811
    (tmp_path / 'read_only').mkdir(mode=0o555)
    work_dir = tmp_path / 'read_only' / 'run'
    under = []
    if os.access(work_dir.parent, os.W_OK):  # root writes everywhere, unless it gives that up
        if shutil.which('setpriv') is None:
            pytest.skip('root needs setpriv to be kept from writing')
        under = ['setpriv', '--bounding-set=-dac_override']
    options = ('--work-dir', work_dir, '--cfg-options', f'data_root={data_root}')
    log = run_tool('train.py', configs['seg'], *options, cwd=tmp_path, fails=True, under=under)
    assert log.splitlines()[-1] == f'train.py: error: {work_dir}: Permission denied'
    assert 'Traceback' not in log


@pytest.mark.slow
def test_a_full_disk_is_one_sentence(configs, data_root, tmp_path):  # noqa: F811
    """Files may have 60 kB: the log has room, a checkpoint has not."""
    options = ('--work-dir', 'run', '--cfg-options', f'data_root={data_root}')
    under = ['bash', '-c', 'ulimit -f 60 && exec "$@"', 'full']
    log = run_tool('train.py', configs['seg'], *options, cwd=tmp_path, fails=True, under=under)
    checkpoint = tmp_path / 'run' / 'iter_2.pth'
    assert log.splitlines()[-1] == (
        f'train.py: error: {checkpoint} cannot be written (File too large); there is no checkpoint '
        'before it.'
    )
    assert 'Traceback' not in log and not list(checkpoint.parent.glob('*.pth*'))


@pytest.mark.slow
def test_a_mistake_that_a_hook_finds_is_the_last_line(configs, data_root, tmp_path):  # noqa: F811
    """After all that MMEngine logs of config, hooks and parameters."""
    changes = (f'data_root={data_root}', 'model.decode_head.num_classes=9')
    options = ('--work-dir', 'run', '--cfg-options', *changes)
    log = run_tool('train.py', configs['seg'], *options, cwd=tmp_path, fails=True).splitlines()
    assert log[-1] == (
        'train.py: error: model.decode_head.num_classes is 9, but train_dataloader.dataset has 7 '
        'classes after reduce_zero_label (background, circle, square, ...)'
    )


@pytest.mark.slow
@pytest.mark.parametrize(('tool', 'further'), [('train.py', ()), ('test.py', ('iter_4.pth',))])
def test_missing_data_leave_no_work_dir(tool, further, configs, tmp_path):  # noqa: F811
    options = ('--cfg-options', 'data_root=elsewhere')
    for checkpoint in further:
        (tmp_path / checkpoint).touch()  # one that is missing is told before the data
    log = run_tool(tool, configs['seg'], *further, *options, cwd=tmp_path, fails=True)
    folder = dict(train='training', test='validation')[tool.removesuffix('.py')]
    assert log.splitlines()[-1].startswith(f'{tool}: error: there is no elsewhere/images/{folder},')
    assert 'data_root' in log and 'Traceback' not in log
    assert not (tmp_path / 'work_dirs').exists()


@pytest.mark.parametrize('processes', ['two', '0', '-1', ''])
def test_a_number_of_processes_that_is_none(processes, tmp_path):
    log = run_tool('dist_train.sh', 'config.py', processes, cwd=tmp_path, fails=True)
    assert log == (
        'torchrun.sh: error: the number of processes must be a whole number from 1, got '
        f"'{processes}'\n"
    )


@pytest.mark.slow
def test_torchrun_points_at_a_traceback(tmp_path):
    (tmp_path / 'bug.py').write_text('None + 1\n')
    done = subprocess.run(
        [sys.executable, str(TOOLS / '_torchrun.py'), '--standalone', '--local-addr', '127.0.0.1',
         '--nproc-per-node', '1', 'bug.py'],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert 'TypeError: unsupported operand' in done.stderr
    assert done.stderr.splitlines()[-1].startswith('Process 0 failed (exit code 1)')


def test_a_python_without_the_package_is_named_with_the_remedy(tmp_path):
    bare = tmp_path / 'bare'
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    every = (TOOLS.parent / 'seg/run_all_methods.sh', '--dry-run')
    several = (TOOLS / 'dist_train.sh', 'config.py', '2')
    for python, arguments, reason in (
        (bare, every, f"run_all_methods.py: error: No module named 'vim_mm' for {sys.executable}"),
        (tmp_path / 'none', every, f'run_all_methods.sh: error: there is no {tmp_path}/none; '),
        (bare, several, f"_torchrun.py: error: No module named 'torch' for {sys.executable}; "),
    ):
        done = subprocess.run(
            ['bash', *map(str, arguments)],
            cwd=tmp_path, env=environment(PYTHON=str(python), PYTHONPATH=''),
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr.startswith(reason), done.stderr
        assert 'activate the environment' in done.stderr and 'set PYTHON' in done.stderr
        assert len(done.stderr.splitlines()) == 1


# What a user or a developer calls.
COMMANDS = [
    *(
        pytest.param((str(path),), id=path.relative_to(ROOT).as_posix())
        for room in ('tools', 'benchmarks', 'studies')
        for path in sorted((ROOT / room).rglob('[!_]*.py'))
        if "__name__ == '__main__'" in path.read_text()
    ),
    *(('-m', f'vim_mm.{name}') for name in ('datasets.shapes', 'datasets.fashion', 'doctor')),
]


def ask(command, argument: str, folder):
    """Call a command where there is no PyTorch and no MMEngine: what it printed, CPU seconds."""
    for module in ('torch', 'mmengine'):
        (folder / f'{module}.py').write_text(f"raise ImportError('there is no {module}')")
    before = os.times()
    done = subprocess.run(
        [sys.executable, *command, argument],
        cwd=folder,
        env=environment(PYTHONPATH=os.pathsep.join([str(folder), str(TOOLS.parent)])),
        capture_output=True,
        text=True,
        timeout=60,
    )
    after = os.times()
    seconds = after.children_user - before.children_user
    return done, seconds + after.children_system - before.children_system


@pytest.mark.parametrize('command', COMMANDS)
def test_help_takes_no_pytorch_and_no_2_seconds(command, tmp_path):
    done, seconds = ask(command, '--help', tmp_path)
    assert done.returncode == 0 and done.stdout.startswith('usage: '), done.stderr
    assert seconds < 2


@pytest.mark.slow
@pytest.mark.parametrize('command', COMMANDS)
def test_a_wrong_argument_is_one_sentence(command, tmp_path):
    done, _ = ask(command, '--no-such-argument', tmp_path)
    assert done.returncode == 2 and 'Traceback' not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert re.match(r'([\w-]+\.py( \w+)?|python -m [\w.]+): error: ', last)
    assert re.search('--no-such-argument|required|invalid choice', last)


# Those that read no arguments of a config or of a run, which bring --debug.
@pytest.mark.parametrize(
    'tool', ['benchmark_latency_flops', 'compare_benchmarks', 'verify_performance_issues']
)
def test_tools_that_judge_speed_have_debug(tool, tmp_path):
    done, _ = ask((str(TOOLS / f'analysis/{tool}.py'),), '--help', tmp_path)
    assert '--debug' in done.stdout


@pytest.mark.parametrize(
    'tool', ['analysis/verify_discretization.py', 'benchmarks/benchmark_scan.py']
)
def test_a_missing_library_is_one_sentence(tool, tmp_path):
    done, _ = ask((str(script(tool)),), '--debug', tmp_path)
    assert done.returncode == 1
    trace, _, line = done.stderr.rstrip('\n').rpartition('\n')
    assert re.fullmatch(rf'{Path(tool).name}: error: there is no (torch|mmengine)', line)
    assert trace.startswith('Traceback')


@pytest.mark.slow
@pytest.mark.parametrize(
    'tool', ['verify_discretization', 'benchmark_latency_flops', 'verify_performance_issues']
)
def test_a_value_that_a_module_knows_is_checked(tool, tmp_path):
    """Names of methods are in vim_mm, which is imported where one is given."""
    config = ('seg/upernet_vim_t_{method}.py',) if tool == 'benchmark_latency_flops' else ()
    arguments = (*config, '--methods', 'euler')
    log = run_tool(f'analysis/{tool}.py', *arguments, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1].startswith(
        f"{tool}.py: error: argument --methods: expected one of ['zoh', "
    )
    assert log.splitlines()[-1].endswith("got 'euler'")


def test_a_batch_that_no_model_takes_is_refused(tmp_path):
    """Not answered by 'none fits'."""
    arguments = (str(script('benchmarks/measure_batch.py')), 'a.py')
    done, _ = ask(arguments, '--most=1', tmp_path)
    assert done.stderr.splitlines()[-1].endswith('error: --most must be at least 2, got 1')


@pytest.mark.parametrize('tool', ['export_onnx.py', 'export_aoti.py'])
def test_a_size_of_no_image_is_refused(tool, tmp_path):
    """Before the model is built; torch.export's own answer is a page."""
    arguments = (str(TOOLS / tool), 'a.py', 'weights.pth', 'out', '--size', '0', '64')
    done, _ = ask(arguments, '--dynamic', tmp_path)
    assert done.stderr.splitlines()[-1].endswith(
        "error: argument --size: expected a whole number from 1, got '0'"
    )


@pytest.mark.parametrize('link', [Path.symlink_to, Path.hardlink_to, None])
@pytest.mark.parametrize(
    ('tool', 'before', 'expected'),
    [
        ('stream.py', ('a.py', 'weights.pth'), '--out must be another file than the source'),
        ('convert_checkpoint.py', (), 'OUT must be another file than IN'),
    ],
)
def test_a_file_that_is_read_is_not_written(tool, before, expected, link, tmp_path):
    file = other = tmp_path / 'the_only_copy'
    file.touch()
    if link is not None:
        other = tmp_path / 'link'
        link(other, file)
    out = ('--out',) if tool == 'stream.py' else ()
    done, _ = ask((str(TOOLS / tool), *before, str(file), *out), str(other), tmp_path)
    assert done.stderr.splitlines()[-1] == f'{tool}: error: {expected}, got {other}'


def test_a_video_that_is_read_is_not_written_under_the_name_of_a_part(tmp_path):
    source = tmp_path / 'clip.partial.mp4'
    source.touch()
    (tmp_path / 'a.py').touch()
    arguments = ('a.py', 'weights.pth', source.name, '--out', 'clip.mp4')
    log = run_tool('stream.py', *arguments, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == (
        'stream.py: error: --out must be another file than the source: clip.mp4 is '
        'clip.partial.mp4 until it is closed.'
    )


def test_a_wrong_option_is_one_line(tmp_path):
    log = run_tool('train.py', 'a.py', '--cfg-options', 'model', cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == (
        "train.py: error: --cfg-options: expected KEY=VALUE, got 'model'"
    )
