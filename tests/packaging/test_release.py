"""tools/dev/check_release.py finds what would make a release wrong."""

import io
import subprocess
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.scripts import load

ROOT = Path(__file__).parents[2]
tool = SimpleNamespace(**load('dev/check_release.py'))
GIT = ('git', '-c', 'user.name=x', '-c', 'user.email=x@x')


def checkout(folder, version='1.2.0', entry='1.2.0 - 2026-11-24\n\n- A change.'):
    """A repository of one commit with the files that a release is about."""
    (folder / 'vim_mm').mkdir()
    (folder / 'vim_mm/version.py').write_text(f"__version__ = '{version}'\n")
    (folder / 'CHANGELOG.md').write_text(f'# Changelog\n\n## {entry}\n\n## 1.1.0\n\n- Old.\n')
    for command in (('init', '-q'), ('add', '-A'), ('commit', '-qm', 'x')):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


def test_a_checkout_that_is_ready(tmp_path):
    assert tool.audit_source(checkout(tmp_path)) == []


@pytest.mark.parametrize(
    ('version', 'entry', 'problem'),
    [
        ('1.2.0', 'Unreleased\n\n- A change.', "first entry is 'Unreleased', expected 1.2.0"),
        ('1.3.0', '1.2.0\n\n- A change.', "first entry is '1.2.0', expected 1.3.0"),
        ('1.2.0', '1.2.0\n\n### Added', 'the entry of 1.2.0 names no change'),
        ('1.2.0.dev0', '1.2.0.dev0\n\n- A change.', "'1.2.0.dev0' is no version such as"),
    ],
)
def test_version_and_changelog_disagree(tmp_path, version, entry, problem):
    (found,) = tool.audit_source(checkout(tmp_path, version, entry))
    assert problem in found


def test_a_tag_that_is_taken_and_a_file_that_is_not_committed(tmp_path):
    subprocess.run(['git', 'tag', 'v1.2.0'], cwd=checkout(tmp_path), check=True)
    (tmp_path / 'new.py').touch()
    tag, files = tool.audit_source(tmp_path)
    assert tag.startswith('the tag v1.2.0 is taken')
    assert files == '1 files are not committed, such as new.py'


def sdist(folder, **sizes):
    """An archive whose files have these sizes."""
    with tarfile.open(folder / 'vim_mm-1.tar.gz', 'w:gz') as file:
        for name, size in sizes.items():
            member = tarfile.TarInfo(f'vim_mm-1/{name}')
            member.size = size
            file.addfile(member, io.BytesIO(bytes(size)))
    return folder / 'vim_mm-1.tar.gz'


def test_an_sdist_holds_what_git_tracks(tmp_path):
    archive = sdist(tmp_path, **{'PKG-INFO': 1, 'setup.py': 1, 'vim_mm/.mim/configs/a.py': 1})
    tracked = ['.ci/run', '.gitignore', 'setup.py', 'vim_mm/.mim/configs']
    assert tool.audit_sdist(archive, tracked) == []
    assert tool.audit_sdist(archive, [*tracked, 'csrc/a.cpp']) == [
        'vim_mm-1.tar.gz lacks csrc/a.cpp'
    ]
    assert tool.audit_sdist(archive, tracked[:2]) == [
        'vim_mm-1.tar.gz holds setup.py',
        'vim_mm-1.tar.gz holds vim_mm/.mim/configs',
    ]


def test_data_in_an_sdist_is_found(tmp_path):
    archive = sdist(tmp_path, **{'tests/golden/a.npz': 3 * 2**20})
    assert tool.audit_sdist(archive, ['tests/golden/a.npz']) == [
        'vim_mm-1.tar.gz: tests/golden/a.npz has 3.0 MiB'
    ]


def test_metadata_of_another_version_is_found(tmp_path):
    with tarfile.open(tmp_path / 'vim_mm-1.tar.gz', 'w:gz') as file:
        content = b'Metadata-Version: 2.4\nName: vim-mm\nVersion: 1\n\n'
        member = tarfile.TarInfo('vim_mm-1/PKG-INFO')
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))
    found = tool.audit_metadata(tmp_path / 'vim_mm-1.tar.gz', '2')
    assert 'vim_mm-1.tar.gz: Version is 1, expected 2' in found


@pytest.mark.parametrize(('platform', 'found'), [('2_27', 0), ('2_28', 0), ('2_34', 1)])
def test_a_wheel_that_torch_s_systems_do_not_run_is_found(platform, found):
    wheel = Path(f'vim_mm-1-cp310-abi3-manylinux_{platform}_x86_64.whl')
    assert len(tool.audit_platform(wheel)) == found
