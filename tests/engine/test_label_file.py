"""Predictions as files: several labels, equal names, many classes, full disks."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vim_mm.engine.label_file import LabelFile, LabelMaps, map_names


@pytest.mark.parametrize(
    ('images', 'names'),
    [
        (['i/0.png', 'i/1.jpg'], ['0.png', '1.png']),
        (['i/a/0.jpg', 'i/b/1.jpg'], ['0.png', '1.png']),  # as MMSegmentation calls them
        (['i/a/0.jpg', 'i/b/0.jpg', 'i/b/1.jpg'], ['a/0.png', 'b/0.png', 'b/1.png']),
        (['i/0.jpg', 'i/b/0.jpg'], ['0.png', 'b/0.png']),
        (['/x/i/0.jpg', '/y/0.jpg'], ['x/i/0.png', 'y/0.png']),
        (['i/0.jpg', 'i/0.png'], ['0.jpg.png', '0.png.png']),
        (['i/A.jpg', 'i/a.jpg', 'i/b/a.jpg'], ['A.jpg.png', 'a.jpg.png', 'b/a.jpg.png']),
        (['i/0.png', 'i/0.png'], ['0.png']),  # a data set that repeats another
        (['../i/0.tif'], ['0.png']),
        (['i/a/0.jpg', 'i/b/../../j/0.jpg'], ['i/a/0.png', 'j/0.png']),  # in the folder
        ([], []),
    ],
)
def test_names_of_maps(images, names):
    assert [str(name) for name in map_names(images).values()] == names


class Images:
    """A data set of images in two folders."""

    def __init__(self, folder, *names):
        self.infos = [dict(img_path=str(folder / name)) for name in names]

    def __len__(self):
        return len(self.infos)

    def get_data_info(self, index):
        return self.infos[index]


def predicted(path, labels, **meta):
    data = dict(data=torch.as_tensor(labels)[None])
    return dict(img_path=str(path), pred_sem_seg=data, **meta)


def test_no_map_is_replaced_by_another(tmp_path):
    metric = LabelMaps(str(tmp_path / 'out'))
    metric.dataset_meta = dict(classes=['a'] * 5)
    metric.name(Images(tmp_path, 'a/0.jpg', 'b/0.jpg'))
    samples = [predicted(tmp_path / f'{f}/0.jpg', [[i, 2]]) for i, f in enumerate('ab')]
    metric.process({}, samples)
    assert metric.evaluate(2) == {}
    for i, folder in enumerate('ab'):
        assert np.asarray(Image.open(tmp_path / f'out/{folder}/0.png')).tolist() == [[i, 2]]


@pytest.mark.parametrize(
    ('classes', 'zero', 'labels', 'expected', 'mode'),
    [
        (256, False, [[0, 255]], [[0, 255]], 'L'),
        (256, True, [[0, 255]], [[1, 256]], 'I;16'),
        (255, True, [[0, 254]], [[1, 255]], 'L'),
        (300, False, [[0, 299]], [[0, 299]], 'I;16'),
        (300, False, [[0, 1]], [[0, 1]], 'I;16'),  # all files of a data set are alike
    ],
)
def test_maps_of_many_classes(classes, zero, labels, expected, mode, tmp_path):
    metric = LabelMaps(str(tmp_path))
    metric.dataset_meta = dict(classes=['a'] * classes)
    metric.process({}, [predicted('0.jpg', labels, reduce_zero_label=zero)])
    written = Image.open(tmp_path / '0.png')
    assert np.asarray(written).tolist() == expected and written.mode == mode


@pytest.mark.parametrize('link', [Path.symlink_to, Path.hardlink_to])
def test_a_map_that_would_replace_an_image_is_refused(link, tmp_path):
    (tmp_path / 'i').mkdir()
    (tmp_path / 'i/0.png').write_bytes(b'the only copy')
    (tmp_path / 'out').mkdir()
    link(tmp_path / 'out/0.png', tmp_path / 'i/0.png')
    with pytest.raises(ValueError, match=r'another file than an image, got .*out/0\.png'):
        LabelMaps(str(tmp_path / 'out')).name(Images(tmp_path / 'i', '0.png'))


def test_a_map_on_a_full_disk_leaves_no_name(tmp_path, monkeypatch):
    def full(self, file, *args, **kwargs):
        Path(file).write_bytes(b'half')
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Image.Image, 'save', full)
    metric = LabelMaps(str(tmp_path))
    with pytest.raises(OSError, match=r'0\.png cannot be written \(No space left on device\)'):
        metric.process({}, [predicted('0.jpg', [[0]])])
    assert not [*tmp_path.iterdir()]


def test_several_labels_and_none(tmp_path):
    metric = LabelFile(str(tmp_path / 'labels.csv'))
    metric.dataset_meta = dict(classes=('cat', 'dog', 'cow'))
    score = torch.tensor([0.25, 0.125, 0.75])
    several = dict(gt_label=torch.tensor([0, 1]), pred_label=torch.tensor([0, 2]), pred_score=score)
    nothing = dict(gt_label=torch.tensor([], dtype=int), pred_label=torch.tensor([], dtype=int))
    unlabelled = dict(pred_label=torch.tensor([2]), pred_score=score)
    samples = [several, dict(nothing, pred_score=score), unlabelled]
    metric.process({}, [dict(each, img_path=f'{i}.png') for i, each in enumerate(samples)])
    metric.evaluate(3)
    with (tmp_path / 'labels.csv').open(newline='') as stream:
        assert [*csv.reader(stream)][1:] == [
            ['0.png', 'cat;dog', 'cat;cow', '0.2500;0.7500'],
            ['1.png', '', '', ''],
            ['2.png', '', 'cow', '0.7500'],
        ]
