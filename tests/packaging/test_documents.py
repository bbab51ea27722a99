"""What the documents show works as it stands there, and what they claim about the code holds."""

import ast
import re
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import vim_mm

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob('*.md'), *ROOT.glob('*/README.md'), *ROOT.glob('docs/*.md')]
each_document = pytest.mark.parametrize(
    'document', [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]
)


def python_in_readme() -> list[str]:
    return re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)


def test_plain_pytorch_in_readme_runs():
    (code,) = (block for block in python_in_readme() if 'import vim_mm' in block)
    names = {}
    exec(code, names)
    assert [tuple(m.shape) for m in names['maps']] == [(2, 192, 14, 20)] * 4
    assert tuple(names['features'].shape) == (2, 384)
    assert not any(p.grad is None for p in names['model'].parameters())


@pytest.mark.parametrize('library', ['mmseg', 'mmdet'])
def test_config_in_readme_builds_and_decays_what_it_should(library):
    if library == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    vim_mm.activate()
    (code,) = (block for block in python_in_readme() if f"_base_ = '{library}::" in block)
    cfg = Config.fromstring(code, '.py')
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    assert isinstance(model.backbone, vim_mm.VisionMamba)

    optimizer = build_optim_wrapper(model, cfg.optim_wrapper).optimizer
    names = {param: name for name, param in model.named_parameters()}
    decayed = {}
    for group in optimizer.param_groups:
        members = [names[param] for param in group['params']]
        print(f'lr {group["lr"]:.2e}, weight decay {group["weight_decay"]}:', *members)
        decayed |= dict.fromkeys(members, group['weight_decay'] > 0)
    assert decayed.keys() == set(names.values())
    marked = {'A_log', 'A_b_log', 'D', 'D_b', 'pos_embed'}
    backbone = {n: d for n, d in decayed.items() if n.startswith('backbone.')}
    assert {n.split('.')[-1] for n in backbone} >= marked
    flat = {names[p] for p in names if p.dim() <= 1}
    for name, is_decayed in backbone.items():
        assert is_decayed == (name.split('.')[-1] not in marked and name not in flat), name


@each_document
def test_links_lead_somewhere(document):
    for target in re.findall(r'\]\(([^)#]+)', document.read_text()):
        assert '://' in target or (document.parent / target).exists(), target


@each_document
def test_configs_and_tools_that_are_named_exist(document):
    names = re.findall(r'(?<![\w/])(?:configs|tools)/[\w/]+\.(?:py|sh)', document.read_text())
    for name in names:
        assert (ROOT / name).exists(), name


def rooms() -> dict[str, str]:
    """What each room of the package may import, by docs/architecture.md."""
    text = (ROOT / 'docs/architecture.md').read_text()
    table = text[text.index('## The rooms') : text.index('## Where each decision')]
    rows = re.findall(r'^\| `vim_mm/([\w.]+)/?` \|.*\| (.*) \|$', table, re.M)
    return dict(rows)


@pytest.mark.parametrize('room', rooms())
def test_a_room_imports_what_the_architecture_allows(room):
    allowed = {word.lower() for word in re.findall(r'\w+', rooms()[room])}
    place = ROOT / 'vim_mm' / room
    ours = {path.stem for path in (ROOT / 'vim_mm').iterdir()}
    for path in place.rglob('*.py') if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
                if node.module == 'vim_mm':
                    modules = [f'vim_mm.{alias.name}' for alias in node.names]
            else:
                continue
            for module in modules:
                top, _, rest = module.partition('.')
                name = rest.partition('.')[0] if top == 'vim_mm' else top
                if top == 'vim_mm' and (name == Path(room).stem or name not in ours):
                    continue  # its own, or a name of the package itself
                assert name in allowed or top in sys.stdlib_module_names, f'{path}: {module}'


def test_the_page_of_the_api_names_every_public_room():
    modules = set(re.findall(r'automodule:: (\S+)', (ROOT / 'docs/api.md').read_text()))
    assert {'vim_mm', 'vim_mm.models', 'vim_mm.ops', 'vim_mm.engine', 'vim_mm.registered'} <= modules
    assert issubclass(vim_mm.VisionMamba, nn.Module)
