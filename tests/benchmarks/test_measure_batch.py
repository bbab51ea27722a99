"""The search for the largest batch, and the tool on a CPU, where nothing is capped."""

import json
import time

import pytest
import torch

from tests.scripts import load
from tests.tools.conftest import run_tool
from vim_mm.config import config_path

pytest.importorskip('mmseg')


@pytest.mark.parametrize(
    ('fits', 'start', 'most', 'batch'),
    [(5, 1, 16, 4), (100, 1, 16, 16), (0, 1, 16, None), (12, 4, 64, 8), (100, 1, 24, 16)],
)
def test_the_largest_batch_that_fits(fits, start, most, batch):
    tried = []

    def try_batch(n):
        tried.append(n)
        if n > fits:
            raise torch.OutOfMemoryError
        return {'images/s': 10.0 * n}

    tool = load('benchmarks/measure_batch.py')
    expected = None if batch is None else {'batch': batch, 'images/s': 10.0 * batch}
    assert tool['largest'](try_batch, start, most) == expected
    assert tried == sorted(tried) and max(tried) <= most


def test_a_rate_is_that_of_warm_steps():
    """Five calls do not count, as with every clock of benchmarks/measure/timing.py."""
    pauses = iter([0.2] * 5 + [0.01] * 4)
    measure = load('benchmarks/measure_batch.py')['measure']
    rate = measure(lambda: time.sleep(next(pauses)), 2, 4, 'cpu')['images/s']
    # A busy machine sleeps longer, but not as long as a cold call.
    assert 2 / 0.1 < rate <= 2 / 0.01
    assert not [*pauses]


@pytest.mark.slowest
def test_the_tool_on_a_cpu(tmp_path):
    printed = run_tool(
        'benchmarks/measure_batch.py', config_path('seg/upernet_vim_shapes.py'), '--device', 'cpu',
        '--most', 2, '--steps', 1, '--with_cp', 1, '--out', 'rows.json', '--markdown', 'table.md',
        cwd=tmp_path,
    )  # fmt: skip
    rows = json.loads((tmp_path / 'rows.json').read_text())['rows']
    assert [(row['dtype'], row['card'], row['batch']) for row in rows] == [
        (dtype, card, 2) for dtype in ('float32', 'bfloat16') for card in (24, 80)
    ]
    assert all(row['images/s'] > 0 and row['size'] == '64 x 64' for row in rows)
    assert (tmp_path / 'table.md').read_text().strip() in printed
