"""An output that is an input, by whatever path it is named."""

import os
from argparse import Namespace
from pathlib import Path

import pytest

from vim_mm.outputs import check_arguments, check_outputs, written_by


def a_link(path, to):
    path.symlink_to(to)
    return path


def a_hard_link(path, to):
    path.hardlink_to(to)
    return path


SAME = {
    'the file': lambda folder, file: file,
    'a relative path': lambda folder, file: Path(os.path.relpath(file)),
    'by way of a folder': lambda folder, file: folder / 'sub' / '..' / file.name,
    'a link': lambda folder, file: a_link(folder / 'link', file),
    'a link to a link': lambda folder, file: a_link(folder / '2', a_link(folder / '1', file)),
    'a hard link': lambda folder, file: a_hard_link(folder / 'hard', file),
    'through a linked folder': lambda folder, file: a_link(folder / 'there', folder) / file.name,
}


@pytest.mark.parametrize('name', SAME)
def test_a_file_is_found_by_any_path(name, tmp_path):
    (tmp_path / 'sub').mkdir()
    file = tmp_path / 'weights.pth'
    file.touch()
    output = SAME[name](tmp_path, file)
    with pytest.raises(ValueError, match=r'^the output must be another file than the weights, got'):
        check_outputs([tmp_path / 'new', output], [('the weights', str(file))])


def test_what_is_not_there_replaces_nothing(tmp_path):
    (tmp_path / 'a').touch()
    check_outputs(
        [tmp_path / 'b', '\0'], [('the input', tmp_path / 'a'), ('absent', tmp_path / 'c')]
    )


@pytest.mark.parametrize('written', ['out', 'output', 'markdown', 'latex', 'page', 'record'])
@pytest.mark.parametrize(
    ('read', 'value'),
    [
        ('config', '{}'),
        ('checkpoint', '{}'),
        ('checkpoints', ['zoh=absent.pth', 'foh={}']),
        ('resume', '{}'),
        ('source', '{}'),
        ('input', '{}'),
        ('results', ['absent.json', '{}']),
    ],
)
def test_arguments_of_commands(written, read, value, tmp_path):
    file = tmp_path / 'file'
    file.touch()
    value = [each.format(file) for each in value] if isinstance(value, list) else value.format(file)
    args = Namespace(**{written: file, read: value, 'threads': 3, 'amp': True})
    assert written_by(args) == [file]
    with pytest.raises(ValueError, match=rf'another file than the {read}, got {file}'):
        check_arguments(args)
    check_arguments(Namespace(**{written: tmp_path / 'other', read: value}))


def test_an_option_is_no_input(tmp_path, monkeypatch):
    """'visualize.py features ... --out features' writes into a folder of this name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'features').mkdir()
    check_arguments(Namespace(what='features', out=Path('features'), part='features'))
