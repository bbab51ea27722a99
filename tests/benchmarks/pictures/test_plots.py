"""Pictures: they can be read back, and show what they were given."""

import cv2
import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks.pictures.plots import (
    Line,
    Region,
    Sample,
    plot_curves,
    plot_lines,
    plot_losses,
    plot_predictions,
)

CLASSES = ('nothing', 'left', 'box')
PALETTE = [(60, 60, 60), (255, 0, 0), (0, 0, 255)]


def _read(path):
    return cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)


def _pixels_of(picture, colour):
    return int((picture == np.array(colour)).all(axis=2).sum())


def _sample(height, width, predicted):
    image = np.full((height, width, 3), 128, np.uint8)
    left = np.zeros((height, width), bool)
    left[:, : width // 2] = True
    truth = [Region(~left, 0), Region(left, 1)]
    return Sample(image, truth, truth if predicted else [Region(left | ~left, 0)])


@pytest.mark.slow
def test_curves_hold_every_series(tmp_path):
    losses = [(step, 10 / step) for step in range(1, 50)]
    path = tmp_path / 'curves.png'
    plot_curves(losses, {'mIoU': [(20, 30.0), (40, 60.0)]}, path)
    one = _read(path)
    plot_curves(losses, {'mIoU': [(20, 30.0), (40, 60.0)], 'other': [(20, 80.0), (40, 90.0)]}, path)
    two = _read(path)
    first, second = (0, 158, 115), (0, 114, 178)  # of the second metric, and of the loss
    assert one.shape == two.shape
    assert _pixels_of(one, second) > 100 and _pixels_of(one, first) == 0
    assert _pixels_of(two, first) > 50
    plot_curves(losses, {}, path)
    assert _pixels_of(_read(path), (213, 94, 0)) == 0 < _pixels_of(one, (213, 94, 0))


def test_one_point_is_drawn(tmp_path):
    plot_curves([(20, 1.0)], {'mIoU': [(20, 30.0)]}, tmp_path / 'curves.png')
    assert _pixels_of(_read(tmp_path / 'curves.png'), (213, 94, 0)) > 20


def test_metrics_are_drawn_without_a_loss(tmp_path):
    plot_curves([], {'mIoU': [(2, 30.0), (4, 60.0)]}, tmp_path / 'curves.png')
    assert _pixels_of(_read(tmp_path / 'curves.png'), (213, 94, 0)) > 20


@pytest.mark.parametrize(
    ('low', 'high', 'expected'),
    [
        (0.8, 60, ['1', '2', '5', '10', '20', '50']),
        (3, 3.5, ['3', '3.1', '3.2', '3.3', '3.4', '3.5']),
    ],
)
def test_logarithmic_figures_are_plain_numbers(low, high, expected, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Figure, 'savefig', lambda figure, path: saved.append(figure))
    plot_lines({'time': [Line('zoh', [224, 512], [low, high])]}, 'side', tmp_path / 'a.png')
    plot_losses({'run': {'zoh': [(1, high), (2, low)]}}, tmp_path / 'b.png')
    for figure in saved:
        figure.draw_without_rendering()
        (axis,) = [axes.yaxis for axes in figure.axes]
        bottom, top = axis.get_view_interval()
        figures = [
            t.get_text() for t in axis.get_ticklabels() if bottom <= t.get_position()[1] <= top
        ]
        assert figures == expected
        assert not any(t.get_text() for t in axis.get_ticklabels(minor=True))
    assert len(saved) == 2


@pytest.mark.parametrize('count', [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_predictions_stand_beside_truth(tmp_path, count):
    shapes = [(40, 64), (64, 40), (64, 64)][:count]
    path = tmp_path / 'predictions.png'
    plot_predictions([_sample(*shape, predicted=True) for shape in shapes], CLASSES, PALETTE, path)
    right = _read(path)
    plot_predictions([_sample(*shape, predicted=False) for shape in shapes], CLASSES, PALETTE, path)
    wrong = _read(path)
    assert right.shape == wrong.shape
    reddish = [
        int((picture[..., 0] > 150).sum() - (picture[..., 1] > 150).sum())
        for picture in (right, wrong)
    ]
    # Half of each of the two coloured panels is red, less what the legend has.
    assert reddish[0] == pytest.approx(2 * reddish[1], rel=0.1)


def test_pixels_without_a_label_are_hatched_in_the_truth(tmp_path):
    sample = _sample(64, 64, predicted=True)
    pictures = []
    for ignored in (None, np.zeros((64, 64), bool), np.tri(64, dtype=bool)):
        sample.ignored = ignored
        plot_predictions([sample], CLASSES, PALETTE, tmp_path / 'predictions.png')
        pictures.append(_read(tmp_path / 'predictions.png'))
    plain, without, hatched = pictures
    assert np.array_equal(plain, without)
    third = hatched.shape[1] // 3
    changed = (hatched != plain).any(axis=2)[: hatched.shape[0] // 2]
    assert changed[:, third : 2 * third].mean() > 0.2 and not changed[:, 2 * third :].any()
    assert _pixels_of(hatched, (100, 100, 100)) > 200


def test_detections_get_box_score_and_legend(tmp_path):
    image = np.full((64, 64, 3), 128, np.uint8)
    mask = np.zeros((64, 64), bool)
    mask[20:40, 20:40] = True
    samples = {
        'plain': Sample(image, [Region(mask, 2)], []),
        'boxed': Sample(image, [Region(mask, 2, box=(10, 10, 50, 50))], []),
        'scored': Sample(image, [Region(mask, 2, box=(10, 10, 50, 50), score=0.87)], []),
    }
    pictures = {}
    for name, sample in samples.items():
        plot_predictions([sample], CLASSES, PALETTE, tmp_path / 'predictions.png')
        pictures[name] = _read(tmp_path / 'predictions.png')
    # Lines are blended with what is below, so count everything bluish.
    blue = {
        name: int((picture[..., 2] > picture[..., 0] + 40.0).sum())
        for name, picture in pictures.items()
    }
    assert 0 < blue['plain'] < blue['boxed']
    assert _pixels_of(pictures['boxed'], (255, 0, 0)) == 0, 'a class that does not occur'
    assert (pictures['boxed'] != pictures['scored']).any()
