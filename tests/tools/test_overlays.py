"""Overlays of infer.py, drawn from predictions made up here."""

import resource
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.scripts import TOOLS
from vim_mm.stream.overlay import draw_sample, enlarge


class Prediction(SimpleNamespace):
    def __contains__(self, name):
        return hasattr(self, name)


def segments(labels):
    return Prediction(pred_sem_seg=SimpleNamespace(data=torch.as_tensor(labels)[None]))


def visualizer(*classes):
    palette = [(40 * i, 200, 100) for i in range(len(classes))]
    return SimpleNamespace(alpha=0.5, dataset_meta=dict(classes=classes, palette=palette))


@pytest.mark.parametrize('size', [(1, 1), (1, 300), (15, 15), (64, 80), (600, 500)])
def test_labels_over_an_image_of_any_size(size):
    image = np.full((*size, 3), 100, np.uint8)
    labels = np.zeros(size, int)
    labels[:, size[1] // 2 :] = 1
    drawn = draw_sample(visualizer('a', 'b'), image, segments(labels))
    height, width = drawn.shape[:2]
    factor = width // size[1]
    assert width == factor * size[1] and height > factor * size[0]
    assert 512 <= factor * max(size) < 512 + max(size) or factor == 1
    for place, label in (((0, 0), 0), ((size[0] - 1, size[1] - 1), 1)):
        row, column = (factor * n + factor // 2 for n in place)
        expected = [70, 150, 100] if label or size[1] == 1 else [50, 150, 100]
        assert drawn[row, column].tolist() == expected


def test_the_legend_has_the_classes_that_were_found():
    image, labels = np.full((100, 600, 3), 100, np.uint8), np.ones((100, 600), int)
    legend = draw_sample(visualizer('a', 'b', 'c'), image, segments(labels))[100:]
    colours = {tuple(map(int, c)) for c in legend.reshape(-1, 3)}
    assert (40, 200, 100) in colours and not {(0, 200, 100), (80, 200, 100)} & colours
    assert (legend == 255).mean() > 0.8 and (legend.max(2) < 128).any()


@pytest.mark.parametrize('width', [20, 300])
def test_a_legend_takes_as_many_rows_as_it_needs(width):
    from vim_mm.stream.lettering import draw_legend

    rows = [draw_legend({f'class {i}': (i, 0, 0) for i in range(n)}, width, 13) for n in (0, 1, 9)]
    assert [row.shape[1:] for row in rows] == [(width, 3)] * 3
    assert [row.shape[0] // 26 for row in rows] == [0, 1, 9 if width == 20 else 3]


def test_detections_of_a_small_image_are_enlarged_with_it():
    masks = torch.zeros(2, 4, 5, dtype=torch.bool)
    masks[0, 1, 2] = True

    class Instances(Prediction):
        labels, scores = torch.tensor([4, 7]), torch.tensor([0.9, 0.1])

    found = Instances(bboxes=torch.tensor([[2.0, 1, 3, 2], [0, 0, 5, 4]]), masks=masks)
    assert enlarge(found, 10).tolist() == [4]  # that of a high score
    assert found.bboxes[0].tolist() == [20, 10, 30, 20]
    assert found.masks.shape == (2, 40, 50)
    assert found.masks[0, 10:20, 20:30].all() and found.masks.sum() == 100


def test_names_in_another_script_are_not_question_marks():
    image, labels = np.full((200, 200, 3), 100, np.uint8), np.zeros((200, 200), int)
    pictures = []
    for name in ('дорога', '??????', 'Straße', '#0'):
        pictures.append(draw_sample(visualizer(name), image, segments(labels)))
    for i, one in enumerate(pictures):
        assert not any(np.array_equal(one, other) for other in pictures[:i])


@pytest.mark.parametrize('before', [None, b'of an earlier run'])
def test_a_full_disk_leaves_no_half_overlay(before, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(TOOLS))  # as for a script that is run
    write = import_module('infer').write
    grain = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    overlay = tmp_path / 'o.png'
    if before is not None:
        overlay.write_bytes(before)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match=r'o\.png cannot be written'):
            write(grain, overlay)
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
