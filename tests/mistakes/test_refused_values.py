"""Tools refuse in one sentence what leaves nothing to do, and a missing GPU."""

from pathlib import Path

import pytest

from tests.mistakes.test_endings import ask
from tests.scripts import script
from tests.tools.conftest import run_tool

A_NUMBER = 'expected a whole number from 1, got '
A_SIZE = 'argument --sizes: expected SIDE or HEIGHTxWIDTH, got '


@pytest.mark.parametrize(
    ('tool', 'arguments', 'sentence'),
    [
        ('analysis/benchmark_latency_flops',
         'a.py --n_trials=0', f"argument --n_trials: {A_NUMBER}'0'"),
        ('analysis/benchmark_latency_flops',
         'a.py --batch=0', f"argument --batch: {A_NUMBER}'0'"),
        ('analysis/benchmark_latency_flops',
         'a.py --threads=-1', f"argument --threads: {A_NUMBER}'-1'"),
        ('analysis/benchmark_latency_flops',
         'a.py --sizes=64x', f"{A_SIZE}'64x': {A_NUMBER}''"),
        ('analysis/benchmark_latency_flops',
         'a.py --sizes=0x64', f"{A_SIZE}'0x64': {A_NUMBER}'0'"),
        ('benchmarks/measure_batch', 'a.py --steps=0', f"argument --steps: {A_NUMBER}'0'"),
        ('benchmarks/benchmark_scan', '--n_trials=0', f"argument --n_trials: {A_NUMBER}'0'"),
        ('analysis/profile_discretization', '--seqlen=0', f"argument --seqlen: {A_NUMBER}'0'"),
        ('analysis/profile_discretization', '--dim=0', f"argument --dim: {A_NUMBER}'0'"),
        ('demo_report', 'run --images=0', f"argument --images: {A_NUMBER}'0'"),
        ('run_all_methods', '--config=a.py --jobs-per-gpu=0',
         f"argument --jobs-per-gpu: {A_NUMBER}'0'"),
        ('run_all_methods', '--config=a.py --processes=-2',
         f"argument --processes: {A_NUMBER}'-2'"),
        ('stream', 'a.py weights.pth video.avi --max-frames=0',
         f"argument --max-frames: {A_NUMBER}'0'"),
        ('train', 'a.py --batch-per-gpu=0', f"argument --batch-per-gpu: {A_NUMBER}'0'"),
        ('visualize', 'methods a.py weights.pth --layers=0', f"argument --layers: {A_NUMBER}'0'"),
        ('analysis/verify_discretization', '--dstate=0', f"argument --dstate: {A_NUMBER}'0'"),
        ('analysis/verify_discretization', '--no_checks',
         '--no_checks leaves nothing to do without --pictures DIR'),
        ('analysis/verify_performance_issues', '--dim=-3', f"argument --dim: {A_NUMBER}'-3'"),
        ('analysis/verify_performance_issues', '--skip-checks=1,2,3,4,5,6,7',
         '--skip-checks skips every check: nothing would be checked'),
    ],
)  # fmt: skip
def test_a_value_that_leaves_nothing_to_do_is_refused(tool, arguments, sentence, tmp_path):
    """Before PyTorch is there."""
    *before, last = arguments.split()
    done, _ = ask((str(script(f'{tool}.py')), *before), last, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f'{Path(tool).name}.py: error: {sentence}'


@pytest.mark.parametrize(
    'call',
    [
        'benchmarks/benchmark_backbone.py',
        'benchmarks/benchmark_jax.py',
        'analysis/benchmark_latency_flops.py seg/upernet_vim_shapes.py',
        'benchmarks/benchmark_scan.py',
        'analysis/benchmark_stream.py seg/upernet_vim_shapes.py',
        'benchmarks/measure_batch.py a.py',
        'analysis/profile_discretization.py',
        'analysis/verify_performance_issues.py',
        'export_aoti.py a.py none a.pt2',
        'studies/discretization/run.py train --data . --out .',
    ],
)
def test_a_gpu_that_is_missing_is_one_sentence(call, tmp_path):
    """Also on a machine with GPUs, of which this process sees none."""
    tool, *arguments = call.split()
    log = run_tool(
        tool, *arguments, '--device', 'cuda', cwd=tmp_path, fails=True, CUDA_VISIBLE_DEVICES=''
    )
    assert log.splitlines()[-1].endswith(
        'error: argument --device: cuda needs a GPU, and PyTorch finds none'
    )
    assert 'Traceback' not in log
