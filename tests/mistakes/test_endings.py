"""How the tools end: the last line is the sentence, with and without torchrun."""

import subprocess
import sys
import time

import pytest

from tests.tools.conftest import TOOLS, configs, data_root, run_tool  # noqa: F401  fixtures

WRONG = '_base_ = {base!r}\nmodel = dict(backbone=dict(drop_path_rate=2.0))\n'
SENTENCE = r'train.py: error: drop_path_rate must lie in [0, 1), got 2.0'


@pytest.fixture
def wrong(configs, tmp_path):  # noqa: F811
    (tmp_path / 'wrong.py').write_text(WRONG.format(base=str(configs['seg'])))
    return 'wrong.py'


@pytest.mark.slow
def test_a_mistake_ends_in_its_sentence(wrong, tmp_path):
    log = run_tool('train.py', wrong, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' not in log


@pytest.mark.slow
def test_debug_shows_the_traceback_before_it(wrong, tmp_path):
    log = run_tool('train.py', wrong, '--debug', cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' in log and 'check_rate' in log


@pytest.mark.slow
def test_torchrun_does_not_bury_it(wrong, tmp_path):
    log = run_tool('dist_train.sh', wrong, 2, cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == SENTENCE
    assert 'Traceback' not in log


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


@pytest.mark.parametrize(
    'tool', ['train', 'test', 'infer', 'stream', 'compare_runs', 'demo_report']
)
def test_help_takes_no_pytorch(tool, tmp_path):
    for module in ('torch', 'mmengine', 'vim_mm', 'numpy'):
        (tmp_path / f'{module}.py').write_text('raise ImportError')
    start = time.monotonic()
    log = run_tool(f'{tool}.py', '--help', cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert log.startswith('usage: ')
    assert time.monotonic() - start < 2


def test_a_wrong_option_is_one_line(tmp_path):
    log = run_tool('train.py', 'a.py', '--cfg-options', 'model', cwd=tmp_path, fails=True)
    assert log.splitlines()[-1] == (
        "train.py: error: --cfg-options: expected KEY=VALUE, got 'model'"
    )
