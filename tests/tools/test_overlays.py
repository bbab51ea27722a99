"""Overlays of infer.py, drawn from predictions made up here."""

import resource
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from tests.scripts import TOOLS


@pytest.fixture
def draw(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))  # as for a script that is run
    return import_module('infer').draw


class Prediction(SimpleNamespace):
    def __contains__(self, name):
        return hasattr(self, name)


def segments(labels):
    return Prediction(pred_sem_seg=SimpleNamespace(data=torch.as_tensor(labels)[None]))


def visualizer(*classes):
    palette = [(40 * i, 200, 100) for i in range(len(classes))]
    return SimpleNamespace(alpha=0.5, dataset_meta=dict(classes=classes, palette=palette))


@pytest.mark.parametrize('size', [(1, 1), (1, 300), (15, 15), (64, 80)])
def test_labels_over_an_image_of_any_size(size, draw, tmp_path):
    image = np.full((*size, 3), 100, np.uint8)
    labels = np.zeros(size, int)
    labels[:, size[1] // 2 :] = 1
    draw(visualizer('a', 'b'), image, segments(labels), tmp_path / 'o.png')
    drawn = cv2.imread(str(tmp_path / 'o.png'))[..., ::-1]
    assert drawn.shape == image.shape
    assert drawn[-1, -1].tolist() == [70, 150, 100]


def test_names_in_another_script_are_not_question_marks(draw, tmp_path):
    image, labels = np.full((200, 200, 3), 100, np.uint8), np.zeros((200, 200), int)
    pictures = []
    for name in ('дорога', '??????', 'Straße', '#0'):
        draw(visualizer(name), image, segments(labels), tmp_path / 'o.png')
        pictures.append(cv2.imread(str(tmp_path / 'o.png')))
    for i, one in enumerate(pictures):
        assert not any(np.array_equal(one, other) for other in pictures[:i])


@pytest.mark.parametrize('before', [None, b'of an earlier run'])
def test_a_full_disk_leaves_no_half_overlay(before, draw, tmp_path):
    grain = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    overlay = tmp_path / 'o.png'
    if before is not None:
        overlay.write_bytes(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r'o\.png cannot be written'):
            draw(visualizer('a'), grain, segments(np.zeros((64, 64), int)), overlay)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*tmp_path.iterdir()] == ([] if before is None else [overlay])
    assert before is None or overlay.read_bytes() == before


def test_an_overlay_has_the_name_of_its_picture(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    overlays_of = import_module('infer').overlays_of

    def names(*files):
        return [str(each) for each in overlays_of([*map(Path, files)], Path('o'))]

    assert names('p/0.jpg', 'p/a.b.png') == ['o/0.png', 'o/a.b.png']
    assert names('p/0.jpg', 'p/0.png') == ['o/0.jpg.png', 'o/0.png.png']
