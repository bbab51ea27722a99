"""Tables and pictures of what a classifier predicts, from predictions made up here."""

import csv

import numpy as np
import torch
from PIL import Image

from benchmarks.runs.labels import Labelled, confusions, names_of, plot_labels
from vim_mm.engine import LabelFile

CLASSES = ('coat', 'bag', 'shirt')


def test_confusions_are_ranked_and_hold_no_hits():
    pairs = [(0, 2), (1, 1), (2, 0), (0, 2), (1, 1), (2, 1), (0, 2), (2, 0)]
    found = [Labelled(i, truth, label, 0.9) for i, (truth, label) in enumerate(pairs)]
    expected = [('coat', 'shirt', 3), ('shirt', 'coat', 2), ('shirt', 'bag', 1)]
    assert confusions(found, CLASSES, 5) == expected
    assert confusions(found, CLASSES, 1) == expected[:1]


def test_a_mistake_is_red(tmp_path):
    pictures = [np.zeros((28, 28, 3), np.uint8)] * 2

    def red_pixels(second: int) -> int:
        found = [Labelled(0, 1, 1, 0.9), Labelled(1, 1, second, 0.6)]
        plot_labels(pictures, found, CLASSES, tmp_path / 'labels.png', columns=1)
        rgb = np.asarray(Image.open(tmp_path / 'labels.png').convert('RGB')).astype(int)
        return int((rgb[..., 0] - rgb[..., 1:].max(-1) > 80).sum())

    assert red_pixels(second=1) == 0
    assert red_pixels(second=2) > 20


def test_the_table_of_labels(tmp_path):
    metric = LabelFile(str(tmp_path / 'labels.csv'))
    metric.dataset_meta = dict(classes=CLASSES)
    score = torch.tensor([0.2, 0.1, 0.7])
    truth, label = torch.tensor([0]), torch.tensor([2])
    sample = dict(gt_label=truth, pred_label=label, pred_score=score)
    metric.process({}, [dict(sample, img_path='a.png'), dict(sample, sample_idx=7)])
    assert metric.evaluate(2) == {}
    with (tmp_path / 'labels.csv').open(newline='') as stream:
        assert [*csv.reader(stream)] == [
            ['image', 'truth', 'prediction', 'score'],
            ['a.png', 'coat', 'shirt', '0.7000'],
            ['7', 'coat', 'shirt', '0.7000'],
        ]


def test_several_labels_and_none_are_drawn(tmp_path):
    found = [
        Labelled(0, (0, 1), (0, 2), (0.9, 0.6)),
        Labelled(1, (), (), ()),
        Labelled(2, None, 1, 0.5),  # without a label
    ]
    assert [each.wrong for each in found] == [True, False, False]
    assert [names_of(each.prediction, CLASSES) for each in found] == ['coat, shirt', 'none', 'bag']
    assert names_of((0, 2), None) == '0, 2'
    assert confusions(found, CLASSES, 3) == [('coat, bag', 'coat, shirt', 1)]
    plot_labels([np.zeros((28, 28, 3), np.uint8)] * 3, found, CLASSES, tmp_path / 'labels.png')
    assert Image.open(tmp_path / 'labels.png').size[0] > 28
