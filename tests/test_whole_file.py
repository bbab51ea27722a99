"""Files that appear whole or not at all."""

import os
import stat
import threading
from pathlib import Path

import pytest

from vim_mm.whole_file import remove_parts, whole_file


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


@pytest.mark.parametrize(
    ('before', 'after'), [(0o600, 0o600), (0o640, 0o640), (0o666, 0o644), (0o440, 0o640)]
)
def test_a_private_file_stays_private(file, before, after):
    """Also while it is written, by its owner; nobody gets more than the umask gives."""
    file.chmod(before)
    umask = os.umask(0o022)
    try:
        with whole_file(file) as part:
            assert stat.S_IMODE(part.stat().st_mode) == after
            part.write_text('after')
    finally:
        os.umask(umask)
    assert stat.S_IMODE(file.stat().st_mode) == after


@pytest.mark.parametrize('another', ['file', 'link'])
def test_the_mode_of_what_is_not_the_users_is_not_taken(another, file, tmp_path, monkeypatch):
    """Its owner could no longer read it; what a replaced link leads to is not written at all."""
    file.chmod(0o600)
    path = file
    if another == 'link':
        path = tmp_path / 'link'
        path.symlink_to(file)
    else:
        monkeypatch.setattr(os, 'geteuid', lambda: file.stat().st_uid + 1)
    (tmp_path / 'plain').touch()
    with whole_file(path, follow_links=False) as part:
        part.write_text('after')
    assert path.lstat().st_mode == (tmp_path / 'plain').stat().st_mode


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


def test_a_link_stays_and_leads_to_the_new_file(file, tmp_path):
    (tmp_path / 'elsewhere').mkdir()
    link = tmp_path / 'elsewhere' / 'link.json'
    link.symlink_to('../run.json')
    with whole_file(link) as part:
        part.write_text('after')
        assert file.read_text() == 'before'
    assert link.is_symlink() and file.read_text() == 'after'
    assert [*link.parent.iterdir()] == [link]


def test_a_link_to_no_file_yet(tmp_path):
    link = tmp_path / 'link.json'
    link.symlink_to('run.json')
    with whole_file(link) as part:
        part.write_text('after')
    assert link.is_symlink() and (tmp_path / 'run.json').read_text() == 'after'


@pytest.mark.parametrize('linked', [False, True])
def test_a_pipe_is_written_into(linked, tmp_path):
    pipe = path = tmp_path / 'pipe'
    os.mkfifo(pipe)
    if linked:
        path = tmp_path / 'link'
        path.symlink_to(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    with whole_file(path) as part:
        part.write_text('after')
    reader.join(5)
    assert got == ['after'] and pipe.is_fifo()


def test_an_error_leaves_a_pipe(tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    with pytest.raises(OSError, match='pipe cannot be written'), whole_file(tmp_path / 'pipe'):
        raise BrokenPipeError(32, 'Broken pipe')
    assert (tmp_path / 'pipe').is_fifo()


def test_links_in_dev_are_written_into():
    """Such as /dev/stdout, which leads to a file where the output is redirected."""
    with whole_file(Path('/dev/vim_mm_is_not_there')) as part:
        assert part == Path('/dev/vim_mm_is_not_there')


def test_no_link_that_was_laid_before_is_written_through(file, tmp_path):
    """Neither one with the name that parts once had, nor, where they are not followed, the file."""
    mine = tmp_path / 'mine'
    mine.write_text('mine')
    (tmp_path / 'run.json.part').symlink_to(mine)
    link = tmp_path / 'link.json'
    link.symlink_to(mine)
    for path in (file, link):
        with whole_file(path, follow_links=False) as part:
            part.write_text('after')
    assert mine.read_text() == 'mine'
    assert file.read_text() == link.read_text() == 'after' and not link.is_symlink()


def test_it_is_on_the_disk_before_it_has_its_name(file, monkeypatch):
    done = []
    synchronize, replace = os.fsync, Path.replace

    def note_fsync(number):
        done.append(Path(f'/proc/self/fd/{number}').readlink().suffix)
        synchronize(number)

    def note_replace(self, target):
        done.append('renamed')
        replace(self, target)

    monkeypatch.setattr(os, 'fsync', note_fsync)
    monkeypatch.setattr(Path, 'replace', note_replace)
    with whole_file(file) as part:
        part.write_text('after')
    assert done == ['.part', 'renamed', '']  # the folder last


def test_the_parts_of_killed_processes_are_removed(file, tmp_path):
    ours = tmp_path / 'run.json.0123456789abcdef.part'
    others = [tmp_path / name for name in ('run.json.part', 'a.json.0123456789abcdef.part', 'a')]
    for path in (ours, *others):
        path.touch()
    remove_parts(tmp_path, ['run.json'])
    assert {*tmp_path.iterdir()} == {file, *others}
