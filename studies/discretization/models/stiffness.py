"""How stiff a trained model is: histograms of |z| = dt |a|, a layer each.

Where |z| is small all methods but `foh` and `poly` are the same function.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.comparison.results import Rows
from studies.discretization.models.arms import Net

# Bins of log10 |z|, a quarter each; what lies outside counts in the first and the last.
EDGES = np.arange(-6, 3.01, 0.25)
IMAGES = 16
QUANTILES = (0.05, 0.5, 0.95)


@torch.no_grad()
def stiffness(net: Net, images: Tensor) -> dict[str, Any]:
    """Shares of |z| in each bin of ``EDGES``, over tokens, channels, states and directions.

    Args:
        net (Net): Whose mixers become the study's; in evaluation mode afterwards.
        images (Tensor): (B, 1, H, W), normalized.

    Returns:
        dict: ``log10_edges``, and ``shares``, a list for each layer with one number a bin.
    """
    layers: list[list[float]] = []
    inner = torch.tensor(EDGES[1:-1], dtype=torch.float32, device=images.device)

    def observe(dt: Tensor, A: Tensor) -> None:
        counts = torch.zeros(len(EDGES) - 1, dtype=torch.float64, device=images.device)
        for state in A.abs().log10().unbind(2):  # one at a time: N times the memory else
            bins = torch.bucketize((dt.log10() + state[:, :, None]).flatten(), inner)
            counts += torch.bincount(bins, minlength=len(counts))
        layers.append([round(share, 6) for share in (counts / counts.sum()).tolist()])

    net.use_study_mixers(observe=observe)
    net.eval()(images)
    net.use_study_mixers(observe=None)
    return {'log10_edges': EDGES.tolist(), 'shares': layers}


def quantiles(shares: Sequence[float], levels: Sequence[float] = QUANTILES) -> list[float]:
    """Quantiles of |z| of a histogram, taken as even in log10 within a bin."""
    reached = np.concatenate([[0], np.cumsum(shares)])
    return [float(10 ** np.interp(level * reached[-1], reached, EDGES)) for level in levels]


def mean_shares(runs: Mapping[int, Mapping[str, Any]]) -> np.ndarray:
    """(layers, bins): the mean over the runs that have histograms; none is an empty array.

    Without runs that diverged, whose |z| is no number.
    """
    found = [
        run['stiffness']['shares']
        for run in runs.values()
        if 'stiffness' in run and not run.get('diverged')
    ]
    return np.mean(found, axis=0) if found else np.zeros((0, len(EDGES) - 1))


def stiffness_rows(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> Rows:
    """A row for each arm that has histograms: quantiles of |z| over all layers, and shares."""
    rows = []
    for arm, of_seed in runs.items():
        shares = mean_shares(of_seed)
        if not len(shares):
            continue
        whole = shares.mean(axis=0)
        low, median, high = (f'{value:.2g}' for value in quantiles(whole))
        row = {'method': arm, 'size of z, 5 %': low, 'median': median, '95 %': high}
        for level in (0.1, 1, 10):  # edges of bins
            above = np.searchsorted(EDGES, np.log10(level))
            row[f'above {level:g}'] = f'{100 * whole[above:].sum():.1f} %'
        medians = [quantiles(layer, (0.5,))[0] for layer in shares]
        row['median by layer'] = ', '.join(f'{value:.2g}' for value in medians)
        rows.append(row)
    return rows
