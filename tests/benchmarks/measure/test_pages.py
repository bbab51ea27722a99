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
    names = {**NAMES, 'Vim-S': 'upernet_vim_s_zoh'}
    return {
        (backbone, record['form'], record['mode']): record
        for record in content['records']
        for backbone, name in names.items()
        if record['name'].startswith(name)
    }


def rows(page, head):
    """The cells of the table that begins so."""
    table = (ROOT / page).read_text().split(head)[1].split('\n\n')[0]
    return [[cell.strip() for cell in line.split('|')[1:-1]] for line in table.splitlines()[2:]]


def shown(value):
    """A number as the tables have it."""
    return f'{value:.0f}' if value >= 100 else f'{value:.1f}'


def three_digits(value):
    return f'{float(f"{value:.3g}"):.0f}'


def test_the_table_of_graphs():
    found = records('upernet_h100')
    quoted = rows('docs/benchmarks.md', '| backbone | M parameters | inference, images/s |')
    assert [row[0] for row in quoted] == [*NAMES]
    for row in quoted:
        infer = found[row[0], 'graph', 'infer']
        assert row[1:] == [
            f'{infer["parameters"] / 1e6:.1f}', shown(infer['images_per_second']),
            f'{infer["peak_bytes"] / MIB:.0f}',
        ]  # fmt: skip


FORMS = {'`--graph`': 'graph', '`--graph --compile`': 'tools'}


def test_the_table_of_training_steps():
    found = records('upernet_tools_h100')
    quoted = rows('docs/benchmarks.md', '| model | form | ms | images/s | peak MiB | kernels')
    assert len(quoted) == 6
    for model, form, *cells in quoted:
        record = found[model, FORMS[form], 'train']
        milliseconds = [shown(1000 * record[key]) for key in ('latency', 'kernel_seconds')]
        peak = three_digits(record['peak_bytes'] / MIB)
        assert cells == [milliseconds[0], shown(record['images_per_second']), peak, milliseconds[1]]


def test_the_front_page():
    found = records('upernet_tools_h100')
    quoted = rows('README.md', '| backbone | parameters, millions | training with')
    assert [row[0] for row in quoted] == [*NAMES]
    for backbone, parameters, *speeds in quoted:
        assert parameters == f'{found[backbone, "graph", "train"]["parameters"] / 1e6:.1f}'
        for speed, form in zip(speeds, FORMS.values()):
            record = found.get((backbone, form, 'train'))
            assert speed == ('not run' if record is None else shown(record['images_per_second']))


def test_the_table_of_predictions_has_the_run():
    found = records('upernet_tools_h100')
    first, *_ = rows('docs/benchmarks.md', '| | `--graph`, ms | images/s | `--graph --compile`, ms')
    graph, tools = (found['Vim-T', form, 'infer'] for form in FORMS.values())
    assert first[1:4] == [
        f'{1000 * graph["latency"]:.1f}', shown(graph['images_per_second']),
        f'{1000 * tools["latency"]:.2f}',
    ]  # fmt: skip


def test_the_table_of_detectors():
    runs = json.loads((ROOT / 'docs/benchmarks/mask_rcnn_steps_h100.json').read_text())['steps']
    steps = {
        (name, step['form']): step
        for name, part in (('Vim-T', 'vim_t'), ('Swin-T', 'swin-t'))
        for config, forms in runs.items()
        if part in config
        for step in forms
    }
    quoted = rows(
        'docs/benchmarks.md', '| backbone | form | ms | peak MiB | kernels, ms | launches'
    )
    assert len(quoted) == len(steps) == 8
    for (backbone, form, *cells), ((name, _), step) in zip(quoted, steps.items(), strict=True):
        assert backbone == name
        peak = three_digits(step['peak MiB'])
        assert cells[:4] == [
            shown(step['ms']), f'{peak} *' if 'graph' in form else peak,
            shown(step['kernel ms']), f'{step["launches"]:.0f}',
        ]  # fmt: skip
        assert cells[4] == (shown(step['waits']) if step['waits'] > 1 else 'at most 1')


def test_the_table_of_forms():
    found = records('upernet_h100')
    quoted = rows('docs/benchmarks.md', '| backbone | form | inference, ms | kernels')
    assert len(quoted) == 8
    for backbone, form, *cells in quoted:
        infer = found[backbone, form, 'infer']
        assert cells == [shown(1000 * infer[key]) for key in ('latency', 'kernel_seconds')]
