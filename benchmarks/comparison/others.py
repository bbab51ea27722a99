"""Fashion-MNIST by other models: those that the study trains as its own, and published figures."""

import numpy as np

from benchmarks.comparison.comparison import TaskResults, cost_cells, deviation, title

SOURCE = 'https://github.com/zalandoresearch/fashion-mnist#benchmark'
# As its README lists them at commit 02cf067: submitted by their authors, not tested by it.
_PUBLISHED = {
    'ResNet-18, flips, translation, rotation': '94.9',
    'DenseNet-BC, 768 thousand parameters, crops and flips': '95.4',
    'WRN-28-10, crops and flips': '95.9',
    'WRN-28-10, crops, flips, random erasing': '96.3',
    'WRN-40-4, 8.9 million parameters, crops and flips': '96.7',
    # A later paper, arXiv 2006.09042.
    'Fine-Tuning DARTS, architecture search': '96.91',
}
PAPER = 'https://arxiv.org/abs/2006.09042'


def other_rows(task: TaskResults, long: TaskResults | None) -> list[dict[str, str]]:
    """Rows of one table: methods, other people's models, the longer run, published figures.

    Args:
        task (TaskResults): Of Fashion-MNIST.
        long (TaskResults, optional): Of the longer run.

    Returns:
        list[dict[str, str]]: Empty if no other model has run.
    """
    if not task.peers:
        return []
    rows = [_row(f'Vim, {title(arm)}', task, arm, task.runs[arm], task.seeds) for arm in task.arms]
    for peer, runs in task.peers.items():
        rows.append(_row(title(peer), task, peer, runs, sorted(runs)))
    for arm, runs in long.runs.items() if long else ():
        name = f'Vim, {title(arm)}, 7 layers, 100 epochs, random erasing'
        rows.append(_row(name, long, arm, runs, sorted(runs)))
    blank = dict.fromkeys(rows[0], '')
    rows += [blank | {'model': name, 'accuracy': value} for name, value in _PUBLISHED.items()]
    return rows


def _row(name, task, arm, runs, seeds):
    values = [runs[seed]['metric'] for seed in seeds]
    (parameters,) = {runs[seed]['parameters'] for seed in seeds}
    return {
        'model': name,
        'parameters': f'{parameters:,}',
        'seeds': str(len(values)),
        'accuracy': f'{np.mean(values):.2f}',
        'standard deviation': deviation(values),
        **cost_cells(task, arm),
    }
