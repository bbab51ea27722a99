"""Names of classes that OpenCV's letters do not hold."""

import numpy as np
import pytest
from matplotlib import font_manager

from vim_mm.stream import lettering
from vim_mm.stream.lettering import drawable_names, put_name


def drawn(name, size=20):
    image = np.full((60, 240, 3), 200, np.uint8)
    put_name(image, name, (5, 5), size, (10, 20, 30))
    return image


def test_names_that_a_font_has_are_drawn_as_they_are(capfd):
    names = ['straße', 'дорога', 'δρόμος', 'road']
    assert drawable_names(names) == names
    pictures = [drawn(name) for name in names]
    questions = drawn('?' * 6)
    for i, picture in enumerate(pictures):
        assert (picture != 200).any() and not np.array_equal(picture, questions)
        assert not any(np.array_equal(picture, other) for other in pictures[:i])
    assert not capfd.readouterr().out


def test_names_that_no_font_has_become_numbers_that_are_told(monkeypatch, capfd):
    usual = lettering._usual_font()
    monkeypatch.setattr(font_manager.fontManager, 'ttflist', [])
    lettering._font_of.cache_clear()
    try:
        assert drawable_names(['road', '树', 'дом', '河']) == ['road', '#1', 'дом', '#3']
    finally:
        lettering._font_of.cache_clear()
    assert '#1 is 树, #3 is 河' in capfd.readouterr().out
    assert usual == lettering._usual_font()


@pytest.mark.parametrize('place', [(-50, -50), (230, 50), (1000, 1000)])
@pytest.mark.parametrize('name', ['a very long name of a class that does not fit', 'ö', ''])
def test_a_name_stays_inside_of_the_image(name, place):
    image = np.zeros((12, 30, 3), np.uint8)
    put_name(image, name, place, 11, (100, 100, 100))
    assert image.shape == (12, 30, 3) and (image.any() or not name)
