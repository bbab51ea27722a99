"""The seven checks of a comparison: each is shown a fault, and what is right passes."""

import json
import queue
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from benchmarks.measure import fairness
from benchmarks.measure.fairness import (
    TITLES,
    check_comparison,
    check_inputs,
    check_operations,
    check_paths,
    check_synchronization,
    check_threads,
    check_warm_up,
)
from benchmarks.measure.timing import (
    ScanShape,
    device_times,
    make_inputs,
    steady_times,
    wall_times,
)
from tests.scripts import load
from vim_mm.ops import selective_scan_fn
from vim_mm.ops.library import has_kernel

TOOL = 'analysis/verify_performance_issues.py'
CPU = ('--device', 'cpu')
METHODS = ('zoh', 'foh')
needs_kernel = pytest.mark.skipif(not has_kernel('cpu'), reason='vim_mm._C is not built')
SHAPE = ScanShape(1, 4, 16, 4)


def wall(call):
    return wall_times(call, 5)


def steady(call):
    return steady_times(call, 1, 5)


def scan(method, given, kernel=None):
    return lambda: selective_scan_fn(
        **given, delta_softplus=True, discretization_method=method, use_cuda_kernel=kernel
    )


@pytest.fixture(scope='module')
def given():
    return {method: make_inputs(SHAPE, 'cpu') for method in METHODS}


@pytest.fixture(scope='module')
def calls(given):
    return {method: scan(method, given[method]) for method in METHODS}


def faults(result):
    """The lines of a check that has failed."""
    assert result.status == 'failed', result
    return '\n'.join(result.evidence)


def test_equal_inputs_pass(calls, given):
    assert check_inputs(calls, given).status == 'passed'


def test_other_values_are_seen(given):
    other = {**given, 'foh': make_inputs(SHAPE, 'cpu', seed=1)}
    found = check_inputs({m: scan(m, other[m]) for m in METHODS}, other)
    assert 'inputs differ: u is (1, 4, 16)' in faults(found)


@needs_kernel
def test_a_method_that_changes_its_inputs_is_seen(calls, given):
    """Both start from the same tensors; one rounds them before the scan."""
    rounded = {name: x.bfloat16() if name in 'uzBC' or name == 'delta' else x
               for name, x in given['foh'].items()}  # fmt: skip
    found = faults(check_inputs({**calls, 'foh': scan('foh', rounded)}, given))
    assert 'the scan receives: u is' in found and 'torch.bfloat16' in found
    assert 'inputs differ' not in found


def test_another_preprocessing_is_seen(calls, given):
    configs = {'zoh': {'size': '512'}, 'foh': {'size': '512', 'mean': '0'}}
    found = faults(check_inputs(calls, given, configs))
    assert 'config: mean is absent for zoh; 0 for foh' in found


class Asynchronous:
    """A device that works while its caller goes on, 20 ms for each piece of work."""

    def __init__(self):
        self.work = queue.Queue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            time.sleep(self.work.get())
            self.work.task_done()

    def run(self):
        self.work.put(0.02)

    def wait(self):
        self.work.join()

    def busy_seconds(self):
        return 0.02


def clock_of(device, before=True, after=True):
    """A clock that waits for the device before it starts and before it stops, or does not."""

    def clock(call):
        for _ in range(5):
            call()
        times = []
        for _ in range(3):
            if before:
                device.wait()
            start = time.perf_counter()
            call()
            if after:
                device.wait()
            times.append(time.perf_counter() - start)
        return times

    return clock


def test_an_unsynchronized_timer_is_seen():
    device = Asynchronous()
    clocks = {'good': clock_of(device), 'bad': clock_of(device, after=False)}
    assert check_synchronization({'good': clocks['good']}, device).status == 'passed'
    found = faults(check_synchronization(clocks, device))
    assert 'bad stops before the device has finished' in found
    assert 'good stops' not in found


def test_a_timer_that_counts_earlier_work_is_seen():
    device = Asynchronous()

    def clock(call):
        start = time.perf_counter()
        call()
        device.wait()
        return [time.perf_counter() - start]

    assert 'counts work that was started before' in faults(
        check_synchronization({'late': clock}, device)
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_our_clocks_wait_for_the_gpu():
    gpu = load(TOOL)['Gpu']()

    def unsynchronized(call):
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]

    ours = {'wall': wall, 'steady': steady, 'graph': lambda c: device_times(lambda: c, 5)}
    # Other processes may use the GPU: one comparison that they do not disturb is enough.
    results = (check_synchronization(ours, gpu) for _ in range(5))
    assert any(result.status == 'passed' for result in results)
    found = check_synchronization({'bad': unsynchronized}, gpu)
    assert 'bad stops before the device has finished' in faults(found)


def test_another_thread_count_is_seen(calls):
    assert check_threads(calls).status == 'passed'
    before = torch.get_num_threads()

    def greedy():
        torch.set_num_threads(before + 1)
        calls['foh']()
        torch.set_num_threads(before)

    found = faults(check_threads({**calls, 'foh': greedy}))
    assert f'threads is {before} for zoh; {before}, {before + 1} for foh' in found
    # Also where all methods do.
    found = faults(check_threads(dict.fromkeys(METHODS, greedy)))
    assert all(f'method {method} changes the number of threads' in found for method in METHODS)


def test_runs_of_other_threads_are_seen(calls):
    recorded = {'zoh_seed0': {'threads': 1}, 'foh_seed0': {'threads': 4}}
    found = check_threads(calls, recorded)
    assert 'runs: threads is 1 for zoh_seed0; 4 for foh_seed0' in faults(found)


@needs_kernel
def test_a_fallback_is_seen(calls, given):
    assert check_paths(calls, 'CPU kernel').status == 'passed'
    fallback = {**calls, 'foh': scan('foh', given['foh'], kernel=False)}
    found = faults(check_paths(fallback, 'CPU kernel'))
    assert 'foh takes the PyTorch operators where the CPU kernel was expected' in found
    assert 'zoh takes' not in found
    both = {'zoh': lambda: [call() for call in fallback.values()]}
    assert 'zoh takes the mixed' in faults(check_paths(both, 'CPU kernel', scans={'zoh': 2}))


def test_a_fallback_in_a_run_is_seen(given):
    python = {m: scan(m, given[m], kernel=False) for m in METHODS}
    assert check_paths(python, 'PyTorch operators').status == 'passed'
    recorded = {'zoh_seed0': 'CUDA kernel', 'foh_seed0': 'PyTorch operators'}
    found = check_paths(python, 'PyTorch operators', recorded=recorded)
    assert 'runs: path is CUDA kernel for zoh_seed0' in faults(found)


def test_our_clocks_warm_up():
    assert check_warm_up({'wall': wall, 'steady': steady}, {}).status == 'passed'


def graph_clock(monkeypatch, warm_up_calls):
    """A clock that calls while it captures a CUDA graph, and times nothing but the replays."""
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)

    def clock(call):
        for capturing, calls in ((False, warm_up_calls), (True, 3)):
            monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda c=capturing: c)
            for _ in range(calls):
                call()
        return [1e-3] * 7

    return clock


def test_a_clock_of_graphs_warms_up_before_it_captures(monkeypatch):
    """Its figures are more than the calls that it makes."""
    warm, cold = (check_warm_up({'graph': graph_clock(monkeypatch, n)}, {}) for n in (5, 1))
    assert warm.status == 'passed'
    assert warm.evidence == ['graph: 5 calls before the first that counts']
    assert 'graph makes 1 calls before it counts, fewer than 5' in faults(cold)


@pytest.mark.parametrize(('device', 'clocks'), [('cpu', 2), ('cuda', 3)])
def test_every_clock_of_ours_is_asked_for_its_warm_up(monkeypatch, device, clocks):
    asked = []
    monkeypatch.setattr(fairness, 'check_warm_up', lambda *args: asked.extend(args))
    perform = load(TOOL)['perform']
    perform(5, SimpleNamespace(device=device, scans={}))
    assert [*asked[0]] == ['wall_times', 'steady_times', 'device_times'][:clocks]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_our_clocks_warm_up_on_a_gpu():
    ours = {'wall': wall, 'steady': steady, 'graph': lambda c: device_times(lambda: c, 5)}
    found = check_warm_up(ours, {}, load(TOOL)['busy_gpu'])
    assert found.status == 'passed', found
    assert found.evidence == [f'{name}: 5 calls before the first that counts' for name in ours]


def test_a_cold_first_call_is_seen():
    def hasty(call):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return times

    found = faults(check_warm_up({'hasty': hasty}, {}))
    assert 'hasty makes 0 calls before it counts, fewer than 5' in found
    assert 'hasty counts a cold call: ' in found


def test_a_method_that_stays_cold_is_seen():
    pauses = iter(([0.001] * 5 + [0.1] + [0.001] * 4) * 4)
    found = check_warm_up({'wall': wall}, {'zoh': lambda: time.sleep(next(pauses))})
    assert 'zoh is still cold in its first timed call' in faults(found)


@needs_kernel
def test_a_loop_in_python_is_seen():
    def of(method, kernel=None):
        return lambda length: scan(
            method, make_inputs(ScanShape(1, 4, length, 4), 'cpu'), kernel=kernel
        )

    mine, python = ({m: of(m, kernel) for m in METHODS} for kernel in (None, False))
    assert check_operations(mine, (64, 128), wall, python).status == 'passed'
    found = faults(check_operations({**mine, 'foh': python['foh']}, (64, 128), wall, python))
    assert 'foh dispatches more operators for more steps' in found
    assert 'zoh dispatches' not in found


def test_a_scan_slower_than_python_is_seen():
    calls = {'zoh': lambda length: lambda: 2.0, 'foh': lambda length: lambda: 1.0}
    python = dict.fromkeys(calls, lambda length: lambda: 1.5)
    found = faults(check_operations(calls, (64, 128), lambda call: [call()], python))
    assert 'zoh is slower than its Python reference' in found
    assert 'foh is slower' not in found


def test_a_comparison_that_does_not_repeat_is_seen():
    def clock(call):
        return [call()]

    quiet = {'zoh': lambda: 1.0, 'foh': lambda: 2.0}
    assert check_comparison(quiet, clock).status == 'passed'
    for second, passes in ((1.5, False), (1.21, False), (1.19, True)):
        values = iter([1.0, second])
        result = check_comparison({**quiet, 'rk4': lambda values=values: next(values)}, clock)
        assert (result.status == 'passed') == passes
        if not passes:
            assert f'rk4 took {100 * second - 100:.0f} % longer in one pass' in faults(result)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the tool with arguments; returns its exit code and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, 'argv', [str(TOOL), *arguments])
        with pytest.raises(SystemExit) as ended:
            load(TOOL, '__main__')
        return ended.value.code, capsys.readouterr().out

    return run


def test_the_tool_prints_json(run):
    """Of the checks that time nothing: the machine that tests is busy."""
    code, printed = run('--skip-checks', '5,6,7', '--methods', 'zoh', 'rk4', '--json', *CPU)
    result = json.loads(printed)
    found = {check['number']: check['status'] for check in result['checks']}
    path = 'passed' if has_kernel('cpu') else 'failed'
    assert found == {1: 'passed', 2: 'not applicable', 3: 'passed', 4: path}
    assert code == ('failed' in found.values())
    assert result['environment']['torch'] == torch.__version__


def write_run(folder, name, threads, path):
    """A run as far as the checks look at it."""
    folder.mkdir(parents=True)
    (folder / 'small.py').write_text(f"lr = 1\nname = '{name}'\n")
    ran = {'threads': threads, 'path': path}
    (folder / 'run.json').write_text(json.dumps({'task': 'small', 'ran': ran}))


def test_the_tool_sees_runs_that_do_not_compare(run, tmp_path):
    """A run with another entry, other threads and another path than its pair."""
    for name, threads, path in (('zoh', 1, 'CPU kernel'), ('rk4', 2, 'PyTorch operators')):
        write_run(tmp_path / f'small_{name}_seed0', name, threads, path)
    code, printed = run(
        '--skip-checks', '2,5,6,7', '--methods', 'zoh', '--work-dirs', str(tmp_path), *CPU
    )
    assert code == 1
    assert "runs: name is 'rk4' for small_rk4_seed0; 'zoh' for small_zoh_seed0" in printed
    assert 'runs: threads is 2 for small_rk4_seed0; 1 for small_zoh_seed0' in printed
    assert printed.rstrip().endswith('3 of 3 checks failed: 1, 3, 4')


def test_runs_of_one_name_in_two_folders_are_both_seen(run, tmp_path):
    first, second = (tmp_path / parent / 'small_zoh_seed0' for parent in 'ab')
    write_run(first, 'zoh', 1, 'CPU kernel')
    write_run(second, 'zoh', 2, 'CPU kernel')
    folders = ('--work-dirs', str(first.parent), str(second.parent))
    code, printed = run('--skip-checks', '1,2,4,5,6,7', '--methods', 'zoh', *folders, *CPU)
    assert code == 1
    assert f'runs: threads is 1 for {first}; 2 for {second}' in printed
    assert '2 runs compared' in printed


def test_a_record_that_was_cut_off_is_named(run, tmp_path):
    write_run(tmp_path / 'run', 'zoh', 1, 'CPU kernel')
    record = tmp_path / 'run' / 'run.json'
    record.write_text(record.read_text()[:9])
    code, _ = run('--skip-checks', '1,2,4,5,6,7', '--work-dirs', str(tmp_path), *CPU)
    assert f'error: {record} is no JSON file' in code


def test_the_tool_knows_every_check():
    """Its arguments are read before PyTorch, and so without the titles."""
    assert load(TOOL)['CHECKS'] == {*TITLES}
