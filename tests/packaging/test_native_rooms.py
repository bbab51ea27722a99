"""Native sources keep to the folders of docs/kernels.md, and to rules that keep them readable."""

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.packaging.rooms import ROOT, circle

NATIVE = ROOT / 'csrc'
SOURCES = sorted(
    path for path in NATIVE.rglob('*.*') if path.suffix in {'.h', '.cuh', '.cu', '.cpp'}
)
# House words, in the place of which the field has one of its own: a sequential scan, a pipeline, a
# vector-Jacobian product, a vector of entries, work sharing, producer warps, dependent launches.
HOUSE_WORDS = (
    'march', 'marches', 'marching', 'handover', 'pull back', 'pulls back', 'pack', 'packs', 'octet',
    'octets', 'relief', 'relieved', 'relieves', 'row warp', 'row warps', 'overlap', 'overlaps',
)  # fmt: skip
# A folder of the table, and the cell of those that it may include.
ROW = re.compile(r'^\| `([\w/]+)` \| .* \|(.*)\|$', re.M)


def code_of(path: Path) -> str:
    """A source without comments and texts."""
    text = re.sub(r'//.*|/\*.*?\*/', '', path.read_text())
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', text)


def words_of(name: str) -> str:
    """'kFewRows_of' as 'few rows of'."""
    parts = re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+', re.sub(r'^k(?=[A-Z])', '', name))
    return ' '.join(parts).lower()


def house_words(name: str) -> set[str]:
    return {word for word in HOUSE_WORDS if re.search(rf'\b{word}\b', words_of(name))}


def folder_of(path: Path) -> str:
    return path.parent.relative_to(NATIVE).as_posix()


def allowed_includes() -> dict[str, set[str]]:
    section = (ROOT / 'docs/kernels.md').read_text().partition('## Where things are')[2]
    rows = ROW.findall(section.partition('\n## ')[0])
    return {name: set(re.findall(r'`([\w/]+)`', cell)) for name, cell in rows}


def test_a_name_is_taken_apart():
    assert words_of('kPackWidth') == 'pack width'
    assert house_words('load_pack') == {'pack'}
    assert house_words('RowWarps') == {'row warps'}
    assert not house_words('StatePacked')


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: path.relative_to(NATIVE).as_posix())
def test_names_are_those_of_the_field(path):
    names = {*re.findall(r'[A-Za-z_]\w*', code_of(path)), *path.relative_to(NATIVE).parts}
    found = {name: words for name in names if (words := house_words(name))}
    assert not found


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: path.relative_to(NATIVE).as_posix())
def test_a_native_file_is_short(path):
    assert len(path.read_text().splitlines()) <= 500


def test_folders_are_small():
    count = Counter(path.parent for path in SOURCES)
    assert {str(folder): files for folder, files in count.items() if files > 14} == {}


def test_includes_go_one_way():
    allowed = allowed_includes()
    assert {folder_of(path) for path in SOURCES} - {'.'} == {*allowed}
    assert not circle(allowed)
    for path in SOURCES:
        own = folder_of(path)
        if own == '.':
            continue
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.M):
            other = folder_of((path.parent / name).resolve())
            assert other in allowed[own] | {own, '.'}, f'{path.relative_to(ROOT)}: {name}'
