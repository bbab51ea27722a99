"""What the documents show works as it stands there, and what they claim about the code holds."""

import ast
import doctest
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.packaging.rooms import imported_modules
from vim_mm.ops import METHODS
from vim_mm.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(*ROOT.glob('*.md'), *ROOT.glob('*/README.md'), *ROOT.glob('docs/*.md')),
    *ROOT.glob('studies/**/*.md'),
]
each_document = pytest.mark.parametrize(
    'document', [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]
)


@pytest.mark.slow  # a whole Vim-T
def test_plain_pytorch_runs():
    (code,) = re.findall(
        r'```python\n(import torch\n.*?)```', (ROOT / 'README.md').read_text(), re.S
    )
    names = {}
    exec(code, names)
    assert [tuple(m.shape) for m in names['maps']] == [(2, 192, 14, 20)] * 4
    sum(m.square().mean() for m in names['maps']).backward()
    assert not any(p.grad is None for p in names['model'].parameters())


def test_readme_is_short():
    """A stranger reads it to its end."""
    text = (ROOT / 'README.md').read_text()
    lines = text.splitlines()
    assert len(lines) <= 130 and len(text) <= 9000 and max(map(len, lines)) <= 120


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
    if document.name == 'CHANGELOG.md':
        return  # it names what there was
    rooms = 'configs|tools|benchmarks|studies'
    for name in re.findall(rf'(?<![\w/])(?:{rooms})/[\w/]+\.(?:py|sh)', document.read_text()):
        assert (ROOT / name).exists() or (document.parent / name).exists(), name


def python_shown(document: Path) -> list[str]:
    blocks = re.findall(r'```python\n(.*?)```', document.read_text(), re.S)
    sessions = [doctest.DocTestParser().get_examples(code) for code in blocks]
    pairs = zip(blocks, sessions, strict=True)
    return [''.join(part.source for part in session) or code for code, session in pairs]


@each_document
def test_python_that_is_shown_is_python(document):
    for code in python_shown(document):
        compile(code, document.name, 'exec')


def imports_of_names(document: Path) -> set[str]:
    """A line for each name of ours that stands with its module, such as vim_mm.ops.METHODS."""
    names = set(re.findall(r'(?<![\w./])vim_mm(?:\.[A-Za-z]\w*)+', document.read_text()))
    of_modules = {n for n in names if (ROOT / n.replace('.', '/')).with_suffix('.py').exists()}
    return {
        f'import {name}' if name in of_modules else 'from {} import {}'.format(*name.rsplit('.', 1))
        for name in names
    }


@pytest.mark.slow
def test_what_is_shown_to_be_imported_exists():
    """From modules of ours; in a process of its own, as some start threads."""
    documents = [each for each in DOCUMENTS if each.name != 'CHANGELOG.md']
    lines = set().union(*map(imports_of_names, documents)) | {
        ast.unparse(node)
        for document in DOCUMENTS
        for code in python_shown(document)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and (ROOT / (node.module or '').split('.')[0]).is_dir()
    }
    assert len(lines) > 5
    tries = [
        f'try:\n    {line}\nexcept ModuleNotFoundError as error:  # of an extra\n'
        '    if (error.name or "").split(".")[0] in ("vim_mm", "benchmarks"): raise'
        for line in sorted(lines)
    ]
    subprocess.run([sys.executable, '-c', '\n'.join(tries)], check=True, cwd=ROOT)


def options_shown() -> dict[str, set[str]]:
    """By script, the options that commands of the documents give it."""
    shown = defaultdict(set)
    for document in DOCUMENTS:
        if document.name == 'CHANGELOG.md':
            continue
        for block in re.findall(r'```bash\n(.*?)```', document.read_text(), re.S):
            for line in block.replace('\\\n', ' ').splitlines():
                command = re.split(r' #| && | \| ', line)[0]
                command = re.sub('tools/(dist|slurm)_train.sh', 'tools/train.py', command)
                found = re.search(r'(?:^|[ /])((?:tools|benchmarks)/[\w/]+\.py) (.*)', command)
                if found:
                    shown[found[1]] |= set(re.findall(r'(?<!\S)--[a-z][\w-]*', found[2]))
    return {script: options for script, options in shown.items() if options}


@pytest.mark.parametrize('script', sorted(options_shown()))
def test_options_that_are_shown_exist(script):
    command = [sys.executable, ROOT / script, '--help']
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert options_shown()[script] <= set(re.findall(r'--[a-z][\w-]*', text))


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
    # Of analysis what tools/ share; a peer is installed by who wants to time it.
    places = [f'vim_mm/{extra}']
    if extra == 'analysis':
        places = [f'benchmarks/{p}' for p in ('comparison', 'measure', 'pictures', 'runs', 'scan')]
    for path in (path for place in places for path in (ROOT / place).rglob('*.py')):
        modules = imported_modules(path)
        if 'vim_mm.progress' in modules:
            modules |= imported_modules(ROOT / 'vim_mm/progress.py')
        outside = {module.partition('.')[0] for module in modules} - {'vim_mm', 'benchmarks'}
        lacking = outside - brought - USERS_CHOICE - set(sys.stdlib_module_names)
        assert not lacking, f'{path}: {lacking}'


def test_the_page_of_the_api_has_every_public_package():
    modules = set(re.findall(r'automodule:: (\S+)', (ROOT / 'docs/api.md').read_text()))
    public = ('models', 'registered', 'ops', 'engine', 'timm_models', 'jax')
    assert modules >= {'vim_mm', *(f'vim_mm.{package}' for package in public)}


def test_the_citation_is_of_this_version():
    """As README's entry, and with what the format demands."""
    citation = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    assert citation['cff-version'] == '1.2.0' and citation['message']
    assert (citation['version'], citation['license']) == (__version__, project['license'])
    assert citation['title'] == f'{project["name"]}: {project["description"]}'
    for work in (citation, *citation['references']):
        assert work['title'] and all(person for person in work['authors'])
    readme = (ROOT / 'README.md').read_text()
    for reference in citation['references']:
        assert reference['identifiers'][0]['value'].replace(':', ' ') in readme
