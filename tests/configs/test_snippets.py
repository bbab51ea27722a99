"""The drop-ins of docs/snippets for somebody's own config build, and train as they should."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, PARAM_SCHEDULERS, init_default_scope

from vim_mm import registered
from vim_mm.engine import activate

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / 'docs' / 'snippets'
# What Mamba and Vim leave without decay, besides tensors of one dimension.
MARKED = re.compile(r'backbone\.(pos_embed|layers\.\d+\.mixer\.(A_log|A_b_log))')


def groups_of(model, optim_wrapper_cfg):
    """By parameter, its learning rate and weight decay."""
    names = {param: name for name, param in model.named_parameters()}
    optimizer = build_optim_wrapper(model, optim_wrapper_cfg).optimizer
    return {
        names[param]: (group['lr'], group['weight_decay'])
        for group in optimizer.param_groups
        for param in group['params']
    }


@pytest.mark.parametrize(
    ('library', 'lr', 'decay'),
    [pytest.param('mmdet', 1e-4, 0.1, id='mmdet'), pytest.param('mmseg', 6e-5, 0.01, id='mmseg')],
)
def test_parameter_groups(library, lr, decay):
    if library == 'mmdet':
        pytest.importorskip('mmcv.ops', reason='needs mmcv with compiled operators')
    activate()
    cfg = Config.fromfile(SNIPPETS / f'{library}.py')
    init_default_scope(library)
    model = MODELS.build(cfg.model)
    assert type(model.backbone) is registered.VisionMamba

    found = groups_of(model, cfg.optim_wrapper)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == weights.keys()
    for setting in sorted({*found.values()}):
        members = [name for name in found if found[name] == setting]
        print(f'lr {setting[0]}, weight decay {setting[1]}: {len(members)}, such as {members[:4]}')
    marked = {name for name in found if MARKED.fullmatch(name)}
    assert len(marked) == 1 + 24 * 2
    for name, setting in found.items():
        free = name in marked or weights[name].dim() == 1
        assert setting == (lr, 0.0 if free else decay), name

    # MMEngine's own constructor, which the snippet had before, decays all of it.
    default = {k: v for k, v in cfg.optim_wrapper.items() if k != 'constructor'}
    assert {groups_of(model, default)[name] for name in marked} == {(lr, decay)}


def learning_rates(cfg) -> list[float]:
    """Of the whole training, by the iteration, or by the epoch where no scheduler is finer."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=cfg.optim_wrapper.optimizer.lr)
    by_iteration = 'max_iters' in cfg.train_cfg
    length = cfg.train_cfg.max_iters if by_iteration else cfg.train_cfg.max_epochs
    schedulers = [
        # As MMEngine's runner builds them.
        PARAM_SCHEDULERS.build({'end': length, **scheduler, 'optimizer': optimizer})
        for scheduler in cfg.param_scheduler
        if by_iteration or scheduler.by_epoch  # the warmup of iterations is over in an epoch
    ]
    rates = []
    optimizer.step()  # once: there is nothing to learn, but MMEngine would warn
    for _ in range(length):
        rates.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    return rates


@pytest.mark.parametrize('snippet', sorted(SNIPPETS.glob('*.py')), ids=lambda path: path.stem)
def test_the_learning_rate_ends_far_below_its_peak(snippet):
    pytest.importorskip(snippet.stem)
    activate()
    cfg = Config.fromfile(snippet)
    init_default_scope(snippet.stem)
    rates = learning_rates(cfg)
    assert max(rates) == pytest.approx(cfg.optim_wrapper.optimizer.lr, rel=0.02)
    assert rates[-1] < max(rates) / 50


def test_readme_shows_the_snippets():
    shown = re.findall(r'```python\n(_base_ = .*?)```', (ROOT / 'README.md').read_text(), re.S)
    assert sorted(shown) == sorted(path.read_text() for path in SNIPPETS.glob('*.py'))
