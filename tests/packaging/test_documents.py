"""What the documents show works as it stands there."""

import re
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob('*.md'), *ROOT.glob('*/README.md')]


def test_config_in_readme_builds_its_detector():
    pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    (block,) = re.findall(r'```python\n(_base_ = .*?)```', (ROOT / 'README.md').read_text(), re.S)
    cfg = Config.fromstring(block, '.py')
    init_default_scope(cfg.default_scope)
    model = MODELS.build(cfg.model)
    assert type(model.backbone).__name__ == 'VisionMamba'
    assert type(model.neck).__name__ == 'SimpleFPN'


@pytest.mark.parametrize('document', [pytest.param(path, id=path.name) for path in DOCUMENTS])
def test_links_lead_somewhere(document):
    for target in re.findall(r'\]\(([^)#]+)', document.read_text()):
        assert '://' in target or (document.parent / target).exists(), target


@pytest.mark.parametrize('document', [pytest.param(path, id=path.name) for path in DOCUMENTS])
def test_configs_and_tools_that_are_named_exist(document):
    names = re.findall(r'(?<![\w/])(?:configs|tools)/[\w/]+\.(?:py|sh)', document.read_text())
    for name in names:
        assert (ROOT / name).exists(), name
