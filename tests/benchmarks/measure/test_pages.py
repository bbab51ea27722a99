"""The tables of whole models on the page and the front page, from the figures of the runs."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMES = {
    'Vim-T': 'upernet_vim_t_zoh',
    'DeiT-T': 'upernet_deit_t',
    'Swin-T': 'swin-tiny',
    'ConvNeXt-T': 'convnext-tiny',
}
MIB = 2**20


def records(file):
    """By backbone, form and mode."""
    content = json.loads((ROOT / f'docs/benchmarks/{file}.json').read_text())
    return {
        (backbone, record['form'], record['mode']): record
        for record in content['records']
        for backbone, name in NAMES.items()
        if record['name'].startswith(name)
    }


def rows(page, head):
    """The cells of the table that begins so."""
    table = (ROOT / page).read_text().split(head)[1].split('\n\n')[0]
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()[2:]]


def shown(value):
    """A number as the tables have it."""
    return f'{value:.0f}' if value >= 100 else f'{value:.1f}'


def test_the_table_of_graphs():
    found = records('upernet_h100')
    quoted = rows('docs/benchmarks.md', '| backbone | M parameters | inference, images/s |')
    front = rows('README.md', '| backbone | parameters, millions | inference, images/s |')
    assert [row[0] for row in quoted] == [row[0] for row in front] == [*NAMES]
    for row, short in zip(quoted, front):
        infer, train = (found[row[0], 'graph', mode] for mode in ('infer', 'train'))
        parameters = f'{infer["parameters"] / 1e6:.1f}'
        speeds = [shown(each['images_per_second']) for each in (infer, train)]
        peaks = [f'{each["peak_bytes"] / MIB:.0f}' for each in (infer, train)]
        assert row[1:] == [parameters, speeds[0], peaks[0], speeds[1], peaks[1]]
        assert short[1:] == [parameters, *speeds]


def test_the_table_of_forms():
    found = records('upernet_h100') | records('upernet_compiled_h100')
    quoted = rows('docs/benchmarks.md', '| backbone | form | inference, ms | kernels')
    assert len(quoted) == 9
    for backbone, form, *cells in quoted:
        infer, train = (found[backbone, form, mode] for mode in ('infer', 'train'))
        keys = ('latency', 'kernel_seconds')
        expected = [shown(1000 * each[key]) for each in (infer, train) for key in keys]
        assert cells == [*expected, f'{train["peak_bytes"] / MIB:.0f}']


def test_the_table_of_compiled_models():
    alone, shared = (records(f'upernet_compiled_{name}h100') for name in ('', 'shared_'))
    quoted = rows('docs/benchmarks.md', '| backbone, compiled | card |')
    assert len(quoted) == 4
    for backbone, card, *cells in quoted:
        found = alone if card == 'alone' else shared
        for mode, (speed, kernels, peak) in zip(('infer', 'train'), (cells[:3], cells[3:])):
            record = found.get((backbone, 'compiled', mode))
            if record is None:
                assert speed == kernels == peak == ''
                continue
            assert kernels == shown(1000 * record['kernel_seconds'])
            assert peak == f'{record["peak_bytes"] / MIB:.0f}'
            too_little = card == 'shared' and mode == 'train'
            assert speed == ('' if too_little else f'{record["images_per_second"]:.0f}')
