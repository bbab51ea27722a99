"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from vim_mm.whole_file import whole_file


@pytest.fixture
def file(tmp_path):
    file = tmp_path / 'run.json'
    file.write_text('before')
    return file


def test_a_file_appears_when_it_is_whole(file):
    with whole_file(file) as part:
        part.write_text('after')
        assert file.read_text() == 'before' and part.parent == file.parent
    assert file.read_text() == 'after' and not part.exists()


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_an_error_leaves_the_file_before(file, error):
    with pytest.raises(error), whole_file(file) as part:
        part.write_text('af')
        raise error
    assert file.read_text() == 'before' and not part.exists()


def test_a_full_disk_is_named(file):
    with pytest.raises(OSError) as raised, whole_file(file) as part:
        part.touch()
        Path('/dev/full').write_text('after')
    assert str(raised.value) == f'{file} cannot be written (No space left on device)'
    assert file.read_text() == 'before' and not part.exists()


def test_a_name_that_is_a_folder(tmp_path):
    with (
        pytest.raises(OSError, match=r'cannot be written \(Is a directory\)'),
        whole_file(tmp_path) as part,
    ):
        part.touch()
    assert not part.exists()
