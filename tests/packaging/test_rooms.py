"""The code keeps to the rooms of docs/architecture.md, and to the rules that keep them small."""

import re
import runpy
import shutil
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.packaging.rooms import (
    ROOMS,
    ROOT,
    circle,
    imported_modules,
    module_name,
    sources,
)

ARCHITECTURE = (ROOT / 'docs/architecture.md').read_text()
# File names that stand twice in the package, for one thing in two forms.
ONE_THING = {
    'block.py': 'the mixer of a layer as an operator, and its backend Triton',
    'flops.py': 'the operations of a scan, and what MMEngine is told of them',
    'upsampled.py': 'loss and labels of upsampled logits, and their kernels for Triton',
    'selective_scan.py': 'the scan for PyTorch and for JAX',
    'simple_fpn.py': 'the neck, and what MMEngine registers of it',
    'vim.py': "Vim's sizes for PyTorch and for timm",
    'vision_mamba.py': 'the backbone, and what MMEngine registers of it',
}
COMMANDS = ROOT / 'tools'  # a user types them, so that they stay where they are
PATH = re.compile(r'\bsys\.path(\[[^]]*\] *=|\.(append|insert|extend|remove)\()')


def rooms() -> dict[str, set[str]]:
    """What each room may import of the others, by the first table."""
    section = ARCHITECTURE.partition('## The rooms')[2].partition('\n## ')[0]
    rows = re.findall(r'^\| `(\w+)/` \| .* \| (.*) \|$', section, re.M)
    return {room: set(re.findall(r'`(\w+)`', cell)) for room, cell in rows}


def test_every_room_is_in_the_table_above_what_imports_it():
    assert {*rooms()} == {*ROOMS}
    above = set()
    for room, allowed in rooms().items():
        assert allowed <= above, f'{room} is not below {allowed - above}'
        above.add(room)


@pytest.mark.parametrize('room', ROOMS)
def test_a_room_imports_what_the_architecture_allows(room):
    allowed = rooms()[room] | {room}
    for path in sources(room):
        for module in imported_modules(path):
            top = module.partition('.')[0]
            assert top not in ROOMS or top in allowed, f'{path}: {module}'


@pytest.mark.parametrize('depth', [None, 2], ids=['files', 'packages'])
def test_imports_make_no_circle(depth):
    """Neither of files nor of the packages of a room, wherever in a file the import stands."""
    names = {module_name(path) for room in ROOMS for path in sources(room)}
    graph = defaultdict(set)
    for room in ROOMS:
        for path in sources(room):
            own = '.'.join(module_name(path).split('.')[:depth])
            found = {m for m in imported_modules(path) if m in names}
            if depth:  # a room's own file at the top imports what it offers
                found = {m for m in found if m.count('.') and own.count('.')}
            graph[own] |= {'.'.join(m.split('.')[:depth]) for m in found} - {own}
    assert not circle(graph)


def test_a_circle_is_found():
    assert circle({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c', 'b']
    assert circle({'a': {'b', 'c'}, 'b': {'c'}}) == []


def packages() -> dict[str, set[str]]:
    """What each package inside of `vim_mm` may import, by the table of docs/architecture.md."""
    rows = re.findall(r'^\| `vim_mm/([\w.]+)/?` \|.*\| (.*) \|$', ARCHITECTURE, re.M)
    return {
        package: set(re.findall(r'\w+', cell)) for package, cell in rows if 'everything' not in cell
    }


@pytest.mark.parametrize('package', packages())
def test_a_package_imports_what_the_architecture_allows(package):
    place = ROOT / 'vim_mm' / package
    allowed = packages()[package] | {place.stem} | set(sys.stdlib_module_names)
    for path in place.rglob('*.py') if place.is_dir() else [place]:
        for module in imported_modules(path):
            top, _, rest = module.partition('.')
            assert (rest.split('.')[0] if top == 'vim_mm' else top) in allowed, f'{path}: {module}'


def subpackages(place: str) -> dict[str, tuple[set[str], set[str]]]:
    """Modules of each package inside, and what of the whole it may import, by the same document.

    What is at the top is under '.'.
    """
    section = ARCHITECTURE.partition(f'### Inside `{place}/`')[2].partition('\n#')[0]
    rows = re.findall(r'^\| (`\w+/`|at the top) \| .* \| (.*) \| (.*) \|$', section, re.M)
    names = {'at the top': '.'}
    return {
        names.get(inner, inner.strip('`/')): tuple(
            set(re.findall(r'`(\w+)`', cell)) if cell != 'everything' else {cell} for cell in cells
        )
        for inner, *cells in rows
    }


each_with_subpackages = pytest.mark.parametrize('place', ['vim_mm/engine', 'benchmarks'])


@each_with_subpackages
def test_the_architecture_names_every_module_inside(place):
    there = defaultdict(set)
    for path in (ROOT / place).rglob('*.py'):
        if path.stem != '__init__' and 'configs' not in path.parts and not path.is_symlink():
            there[path.parent.relative_to(ROOT / place).as_posix()].add(path.stem)
    assert {inner: modules for inner, (modules, _) in subpackages(place).items()} == there


@each_with_subpackages
def test_an_inner_package_imports_what_the_architecture_allows(place):
    prefix = place.replace('/', '.') + '.'
    above = set()
    for inner, (modules, allowed) in subpackages(place).items():
        if allowed == {'everything'}:
            allowed = above
        assert allowed <= above, f'{inner} is not below {allowed - above}'
        own = modules if inner == '.' else {inner}
        for path in (ROOT / place / inner).glob('*.py'):
            if path == ROOT / place / '__init__.py':  # the public names
                continue
            for module in imported_modules(path):
                if f'{module}.'.startswith(prefix):
                    part = f'{module}.'.removeprefix(prefix).partition('.')[0]
                    assert part in allowed | own, f'{path}: {module}'
        above |= own


def test_no_file_name_of_the_package_stands_for_two_things():
    count = Counter(path.name for path in sources('vim_mm') if path.name != '__init__.py')
    assert {name for name, times in count.items() if times > 1} <= {*ONE_THING}


@pytest.mark.parametrize('room', ROOMS)
def test_folders_and_files_are_small(room):
    """At most 16 files and 500 lines each; commands of users may be more."""
    files = defaultdict(list)
    for path in (ROOT / room).rglob('*'):
        built = path.suffix in ('.pyc', '.so') or '.mim' in path.parts
        if path.is_file() and not built:
            files[path.parent].append(path)
    for folder, paths in files.items():
        assert len(paths) <= 16 or folder == COMMANDS, f'{folder}: {len(paths)} files'
    for path in sources(room):
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f'{path}: {lines} lines'


def test_two_files_change_the_path():
    """What makes the rooms importable for scripts, and what stands in front of a user's script."""
    places = [path for room in ROOMS for path in sources(room)]
    places += [*ROOT.glob('*.py'), *ROOT.glob('docs/*.py'), *ROOT.glob('examples/**/*.py')]
    changing = {path.relative_to(ROOT) for path in places if PATH.search(path.read_text())}
    assert changing == {Path('tools/_command_line.py'), Path('vim_mm/activated.py')}


def test_every_folder_of_scripts_has_the_command_line():
    """A link, which a script finds beside it."""
    for room in ROOMS[1:]:
        for path in sources(room):
            if re.search(r'^from _command_line import', path.read_text(), re.M):
                link = path.parent / '_command_line.py'
                assert link.resolve() == ROOT / 'tools/_command_line.py'


def test_tools_that_were_copied_alone_need_no_room(tmp_path):
    copy = shutil.copy(ROOT / 'tools/_command_line.py', tmp_path)
    path = [*sys.path]
    assert runpy.run_path(str(copy))['numbers']('0..2') == [0, 1, 2]
    assert sys.path == path
