"""Results of ``tools/analysis/benchmark_latency_flops.py``: read, named, in tables and pictures."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.measure.tables import figures, markdown_table
from vim_mm.json_lines import read_json

Record = dict[str, Any]
Result = dict[str, Any]
MIB = 2**20
MODES = {'infer': 'inference', 'train': 'training step'}
# What two records have in common if they measure the same thing.
CASE = ('name', 'path', 'heads', 'size', 'batch', 'dtype', 'form', 'mode')
# Figures of unlike machines do not compare; the commit may differ, it is what is compared.
MACHINE = ('device', 'CUDA', 'processor', 'threads', 'torch')


class UnlikeMachinesError(ValueError):
    """Results come from machines whose figures do not compare."""


def own_name(path: Path) -> str:
    """The name of a file or folder, also of '.' and of '..'."""
    return path.resolve().name


def folder_name(file: Path) -> str:
    """The name of the folder that a file lies in."""
    return own_name(file.parent)


def distinct_names(
    paths: Iterable[str | Path], *rules: Callable[[Path], str]
) -> dict[str | Path, str]:
    """A name for each path, no two of which are equal.

    Args:
        paths: Of files or folders.
        rules: From a path to a name. The first that tells all the paths apart names them; where
            none does, the whole paths are the names.
    """
    paths = [*dict.fromkeys(paths)]
    for rule in rules:
        names = [rule(Path(path)) for path in paths]
        if len({*names}) == len(paths):
            return dict(zip(paths, names, strict=True))
    return {path: str(path) for path in paths}


def read_results(files: Iterable[Path]) -> dict[str, Result]:
    """Results by the name of their file.

    Raises:
        ValueError: A file holds no such result.
    """
    found = {}
    for file in files:
        result = read_json(file)
        if not {'environment', 'records'} <= result.keys() or not result['records']:
            raise ValueError(f'{file} is no result of benchmark_latency_flops.py, or has no record')
        found[str(file)] = result
    return found


def labels(results: Iterable[str]) -> dict[str, str]:
    """What columns and legends call results, by file: short, and no two alike.

    ``run_benchmark_after_training.sh`` calls each file benchmark.json; the folder tells the run.
    """
    return distinct_names(results, lambda file: file.stem, folder_name)


def insist_on_one_machine(results: dict[str, Result]) -> None:
    """Raise UnlikeMachinesError where results are of different machines or versions of torch."""
    for key in MACHINE:
        values = {name: str(r['environment'].get(key)) for name, r in results.items()}
        if len({*values.values()}) > 1:
            each = ', '.join(f'{value} in {name}' for name, value in values.items())
            raise UnlikeMachinesError(f'{key} is {each}. Insist with --allow-unlike.')


def measured(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if 'left_out' not in record]


def size_name(size: list[int]) -> str:
    return f'{size[0]} x {size[1]}'


def case_of(record: Record) -> tuple:
    return tuple(str(record[key]) for key in CASE)


def varying(records: list[Record]) -> list[str]:
    """The parts of the case in which records differ, and always the name."""
    names = ('path', 'heads', 'size', 'batch', 'dtype', 'form')
    return [name for name in names if len({str(r[name]) for r in records}) > 1]


def described(record: Record, columns: list[str]) -> dict[str, str]:
    """The cells that say what a record is of."""
    size = size_name(record['size'])
    cells = {'model': record['name']}
    return cells | {c: size if c == 'size' else str(record[c]) for c in columns}


def table(records: list[Record]) -> str:
    """A row for each record that was measured, and a line for each that was left out."""
    rows, columns = [], varying(records)
    for r in measured(records):
        row = described(r, columns) | {'pass': MODES[r['mode']]}
        row |= {
            'latency, ms': figures(1e3 * r['latency']),
            'images/s': figures(r['images_per_second']),
            'peak MiB': figures(r['peak_bytes'] / MIB),
            'G operations': figures(r['operations'] / 1e9) if 'operations' in r else '',
            'M parameters': figures(r['parameters'] / 1e6),
            'path that ran': r.get('ran', ''),
        }
        if any('kernel_seconds' in other for other in records):
            row['kernels, ms'] = figures(1e3 * r['kernel_seconds']) if 'kernel_seconds' in r else ''
        rows.append(row)
    parts = [markdown_table(rows)] if rows else []
    others = [name for name in columns if name != 'form']
    parts += [
        f'left out: {", ".join([*described(r, others).values(), MODES[r["mode"]], r["form"]])}: '
        f'{r["left_out"]}'
        for r in records
        if 'left_out' in r
    ]
    return '\n\n'.join(parts)


def best_table(records: list[Record]) -> str:
    """A row for each model: both passes at the form with the most images per second."""
    keys = ('name', 'path', 'heads', 'size', 'batch', 'dtype')
    columns = [name for name in varying(measured(records)) if name != 'form']
    rows: dict[tuple, dict[str, str]] = {}
    best: dict[tuple, Record] = {}
    for r in measured(records):
        key = (*(str(r[k]) for k in keys), r['mode'])
        if key not in best or r['images_per_second'] > best[key]['images_per_second']:
            best[key] = r
    modes = [mode for mode in MODES if any(key[-1] == mode for key in best)]
    for (*what, mode), r in best.items():
        empty = {f'{MODES[m]}, {unit}': '' for m in modes for unit in ('images/s', 'MiB', 'form')}
        start = described(r, columns) | {'M parameters': figures(r['parameters'] / 1e6)}
        row = rows.setdefault(tuple(what), start | empty)
        row[f'{MODES[mode]}, images/s'] = figures(r['images_per_second'])
        row[f'{MODES[mode]}, MiB'] = f'{r["peak_bytes"] / MIB:.0f}'
        row[f'{MODES[mode]}, form'] = r['form']
    return markdown_table([*rows.values()])


def head(result: Result) -> str:
    """The machine in a line, and what all records have in common."""
    facts = {k: v for k, v in result['environment'].items() if isinstance(v, str | int)}
    facts.pop('clock', None)
    line = ', '.join(f'{name} {value}' for name, value in facts.items())
    clocks = ', '.join(f'{k} {v}' for k, v in result['environment'].get('clocks', {}).items())
    return f'{line}{", " if clocks else ""}{clocks}'


def common(records: list[Record]) -> str:
    """What all records have in common, in a line."""
    same = [k for k in ('size', 'batch', 'dtype', 'heads', 'path') if k not in varying(records)]
    first = records[0]
    words = {k: size_name(first[k]) if k == 'size' else first[k] for k in same}
    return ', '.join(f'{name} {value}' for name, value in words.items())


def report(result: Result) -> str:
    """All that one run has to say, in Markdown."""
    records = result['records']
    parts = [head(result), common(records), table(records)]
    if len({r['form'] for r in measured(records)}) > 1:
        parts += ['Each at its best:', best_table(records)]
    return '\n\n'.join(parts)


def under_one_name(results: dict[str, Result]) -> dict[str, Result]:
    """Results of one model each, such as those of two runs, as of one model that bears all names.

    Then each case of one finds that of the other. Where a result holds several models, only their
    names tell which belong together, and nothing is changed.
    """
    models = [{r['name'] for r in result['records']} for result in results.values()]
    if any(len(names) != 1 for names in models):
        return results
    name = ' / '.join(dict.fromkeys(name for names in models for name in names))
    return {
        file: result | {'records': [r | {'name': name} for r in result['records']]}
        for file, result in results.items()
    }


def comparison_rows(results: dict[str, Result]) -> list[dict[str, str]]:
    """A row for each case that several results have: images per second, memory and ratios."""
    by_case: dict[tuple, dict[str, Record]] = {}
    for name, result in results.items():
        for record in measured(result['records']):
            by_case.setdefault(case_of(record), {})[name] = record
    first, *others = results
    label = labels(results)
    shared = [found for found in by_case.values() if first in found and len(found) > 1]
    columns = varying([r for found in shared for r in found.values()])
    paths = [
        [found[name].get('ran', 'no scan') if name in found else '' for name in results]
        for found in shared
    ]
    rows = []
    for found, ran in zip(shared, paths, strict=True):
        base = found[first]
        row = described(base, columns) | {'pass': MODES[base['mode']]}
        if any(len({*each} - {''}) > 1 for each in paths):
            row['path that ran'] = ' / '.join(ran)
        for name in results:
            r = found.get(name)
            row[f'{label[name]}, images/s'] = figures(r['images_per_second']) if r else ''
            row[f'{label[name]}, MiB'] = f'{r["peak_bytes"] / MIB:.0f}' if r else ''
        for name in others:
            r = found.get(name)
            ratio = r['images_per_second'] / base['images_per_second'] if r else 0
            row[f'{label[name]} over {label[first]}'] = f'{ratio:.2f}' if r else ''
        rows.append(row)
    return rows


def merge(results: dict[str, Result]) -> Result:
    """The records of all results as if of one run; of a case that several have, the last.

    Raises:
        ValueError: Two runs of one name are no parts of one run, and one would hide the other.
    """
    records: dict[tuple, Record] = {}
    weights: dict[str, str] = {}
    for result in results.values():
        for record in result['records']:
            known = records.get(case_of(record))
            file = record.get('checkpoint')
            found = str(Path(file).resolve()) if file else 'random weights'
            if weights.setdefault(record['name'], found) != found:
                raise ValueError(
                    f'{record["name"]} has {weights[record["name"]]} in one result and {found} in '
                    'another: these are no parts of one run'
                )
            if known is None or 'left_out' in known or 'left_out' not in record:
                records[case_of(record)] = record
    environment = dict(next(iter(results.values()))['environment'])
    commits = dict.fromkeys(str(r['environment'].get('commit')) for r in results.values())
    environment['commit'] = ' and '.join(commits)
    return {'environment': environment, 'records': [*records.values()]}


def draw(results: dict[str, Result], picture: Path) -> None:
    """Bars of images per second and of memory, a group for each case, a colour for each result."""
    from matplotlib.figure import Figure

    cases: dict[tuple, str] = {}
    everything = [r for result in results.values() for r in measured(result['records'])]
    columns = varying(everything)
    for r in everything:
        words = [*described(r, columns).values(), MODES[r['mode']]]
        cases.setdefault(case_of(r), ', '.join(words))
    # The legend has a line for each result, above the bars: on them it would hide some.
    figure = Figure(figsize=(13, 1.5 + (0.3 * len(cases) + 0.2) * len(results)), dpi=120,
                    layout='constrained')  # fmt: skip
    names = labels(results)
    speed, memory = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(results)
    for i, (name, result) in enumerate(results.items()):
        found = {case_of(r): r for r in measured(result['records'])}
        rows = [j + i * height for j, case in enumerate(cases) if case in found]
        known = [found[case] for case in cases if case in found]
        label = f'{names[name]}, {result["environment"].get("commit")}'
        speed.barh(rows, [r['images_per_second'] for r in known], height, label=label)
        memory.barh(rows, [r['peak_bytes'] / MIB for r in known], height)
    middle = (len(results) - 1) * height / 2
    speed.set_yticks([j + middle for j in range(len(cases))], [*cases.values()], fontsize=7)
    speed.invert_yaxis()
    speed.set(xlabel='images per second')
    memory.set(xlabel='peak MiB')
    figure.legend(loc='outside upper left', fontsize=7, frameon=False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture)
