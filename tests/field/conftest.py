"""Fixtures of the trainings."""

import pytest

from tests.field.base import write_data

pytest.importorskip('mmseg')


@pytest.fixture
def folder(tmp_path):
    """With the images of the base."""
    write_data(tmp_path / 'data')
    return tmp_path
