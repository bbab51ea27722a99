"""What the documents show works as it stands there, and what they claim about the code holds."""

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vim_mm.ops import METHODS

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob('*.md'), *ROOT.glob('*/README.md'), *ROOT.glob('docs/*.md')]
each_document = pytest.mark.parametrize(
    'document', [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]
)


def test_plain_pytorch_in_readme_runs():
    (code,) = re.findall(
        r'```python\n(import torch\n.*?)```', (ROOT / 'README.md').read_text(), re.S
    )
    names = {}
    exec(code, names)
    assert [tuple(m.shape) for m in names['maps']] == [(2, 192, 14, 20)] * 4
    assert tuple(names['features'].shape) == (2, 384)
    assert not any(p.grad is None for p in names['model'].parameters())


def test_the_page_of_the_methods_has_their_names_and_numbers():
    rows = re.findall(r'^\| (\d) \| `(\w+)` \|', (ROOT / 'docs/methods.md').read_text(), re.M)
    assert {name: int(number) for number, name in rows} == {
        name: method.id for name, method in METHODS.items()
    }


@each_document
def test_links_lead_somewhere(document):
    for target in re.findall(r'\]\(([^)#]+)', document.read_text()):
        assert '://' in target or (document.parent / target).exists(), target


@each_document
def test_configs_and_tools_that_are_named_exist(document):
    names = re.findall(r'(?<![\w/])(?:configs|tools)/[\w/]+\.(?:py|sh)', document.read_text())
    for name in names:
        assert (ROOT / name).exists(), name


def packages() -> dict[str, set[str]]:
    """What each package inside of `vim_mm` may import, by the table of docs/architecture.md."""
    text = (ROOT / 'docs/architecture.md').read_text()
    rows = re.findall(r'^\| `vim_mm/([\w.]+)/?` \|.*\| (.*) \|$', text, re.M)
    return {
        package: set(re.findall(r'\w+', cell)) for package, cell in rows if 'everything' not in cell
    }


def imported_modules(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports; ``from vim_mm import x`` counts as one."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            of_package = node.module == 'vim_mm'
            names |= {f'vim_mm.{a.name}' for a in node.names} if of_package else {node.module}
    return names


@pytest.mark.parametrize('package', packages())
def test_a_package_imports_what_the_architecture_allows(package):
    place = ROOT / 'vim_mm' / package
    allowed = packages()[package] | {place.stem} | set(sys.stdlib_module_names)
    for path in place.rglob('*.py') if place.is_dir() else [place]:
        for module in imported_modules(path):
            top, _, rest = module.partition('.')
            assert (rest.split('.')[0] if top == 'vim_mm' else top) in allowed, f'{path}: {module}'


# What a distribution lets a module import, where that is not its name alone.
IMPORTED = {'opencv-python-headless': {'cv2'}, 'jax': {'jax', 'jaxlib'}}
# What the extras leave to the user: MMEngine and its kin, and what is chosen with torch.
USERS_CHOICE = {'mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'torchvision', 'triton'}


@pytest.mark.parametrize('extra', ['analysis', 'datasets', 'export', 'jax'])
def test_an_extra_brings_what_its_package_imports(extra):
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    requirements = [*project['dependencies'], *project['optional-dependencies'][extra]]
    names = [Requirement(each).name for each in requirements]
    brought = set().union(*(IMPORTED.get(name, {name}) for name in names))
    for path in (ROOT / 'vim_mm' / extra).rglob('*.py'):
        modules = imported_modules(path)
        if 'vim_mm.progress' in modules:
            modules |= imported_modules(ROOT / 'vim_mm/progress.py')
        outside = {module.partition('.')[0] for module in modules} - {'vim_mm'}
        lacking = outside - brought - USERS_CHOICE - set(sys.stdlib_module_names)
        assert not lacking, f'{path}: {lacking}'


def subpackages(package: str) -> dict[str, tuple[set[str], set[str]]]:
    """Modules of each package inside, and what of the whole it may import, by the same document.

    What is at the top is under '.'.
    """
    text = (ROOT / 'docs/architecture.md').read_text()
    section = text.partition(f'### Inside `vim_mm/{package}/`')[2].partition('\n#')[0]
    rows = re.findall(r'^\| (`\w+/`|at the top) \| .* \| (.*) \| (.*) \|$', section, re.M)
    names = {'at the top': '.'}
    return {
        names.get(inner, inner.strip('`/')): tuple(
            set(re.findall(r'`(\w+)`', cell)) if cell != 'everything' else {cell} for cell in cells
        )
        for inner, *cells in rows
    }


each_with_subpackages = pytest.mark.parametrize('package', ['engine', 'analysis'])


@each_with_subpackages
def test_the_architecture_names_every_module_inside(package):
    place = ROOT / 'vim_mm' / package
    there = defaultdict(set)
    for path in place.rglob('*.py'):
        if path.stem != '__init__':
            there[path.parent.relative_to(place).as_posix()].add(path.stem)
    assert {inner: modules for inner, (modules, _) in subpackages(package).items()} == there


@each_with_subpackages
def test_an_inner_package_imports_what_the_architecture_allows(package):
    place = ROOT / 'vim_mm' / package
    above = set()
    for inner, (modules, allowed) in subpackages(package).items():
        if allowed == {'everything'}:
            allowed = above
        assert allowed <= above, f'{inner} is not below {allowed - above}'
        own = modules if inner == '.' else {inner}
        for path in (place / inner).glob('*.py'):
            if path == place / '__init__.py':  # the public names
                continue
            for module in imported_modules(path):
                if f'{module}.'.startswith(f'vim_mm.{package}.'):
                    part = (*module.split('.'), '')[2]
                    assert part in allowed | own, f'{path}: {module}'
        above |= own


def test_the_page_of_the_api_has_every_public_package():
    modules = set(re.findall(r'automodule:: (\S+)', (ROOT / 'docs/api.md').read_text()))
    public = ('models', 'registered', 'ops', 'engine', 'timm_models', 'jax')
    assert modules >= {'vim_mm', *(f'vim_mm.{package}' for package in public)}
