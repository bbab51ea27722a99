"""Both sides of each adapter: what newer releases of PyTorch have, and what older ones have not."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

from vim_mm import compat


def without(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, side: str) -> None:
    """Take ``owner.name`` away on the older side; on the newer one it must be there."""
    if side == 'older':
        monkeypatch.delattr(owner, name, raising=False)
    elif not hasattr(owner, name):
        pytest.skip(f'this PyTorch has no {name}')


SIDES = pytest.mark.parametrize('side', ['newer', 'older'])


@SIDES
def test_hook_before_a_state_dict_is_loaded(side, monkeypatch):
    without(monkeypatch, nn.Module, 'register_load_state_dict_pre_hook', side)
    layer, seen = nn.Linear(1, 1), []

    def double(module, state_dict, prefix, *_):
        seen.append((module, prefix))
        state_dict[f'{prefix}weight'] = state_dict[f'{prefix}weight'] * 2

    compat.before_load_state_dict(layer, double)
    nn.Sequential(layer).load_state_dict({'0.weight': torch.ones(1, 1), '0.bias': torch.zeros(1)})
    assert seen == [(layer, '0.')]
    assert layer.weight.item() == 2


@SIDES
def test_hook_after_a_state_dict_is_made(side, monkeypatch):
    without(monkeypatch, nn.Module, 'register_state_dict_post_hook', side)
    layer = nn.Linear(1, 1)

    def note(module, state_dict, prefix, metadata):
        assert module is layer
        state_dict[f'{prefix}note'] = metadata['version']

    compat.after_state_dict(layer, note)
    assert nn.Sequential(layer).state_dict()['0.note'] == 1


@pytest.mark.parametrize('kind', ['forward', 'forward_pre', 'full_backward', 'full_backward_pre'])
def test_hooks_on_all_modules_are_seen(kind):
    assert not compat.has_hooks_on_all_modules()
    handle = getattr(all_modules, f'register_module_{kind}_hook')(lambda *_: None)
    try:
        assert compat.has_hooks_on_all_modules()
    finally:
        handle.remove()
    assert not compat.has_hooks_on_all_modules()


@pytest.mark.parametrize('name', ['_channel_conversion', 'channel_conversion'])
def test_a_preprocessor_that_leaves_channels(name):
    """Of MMEngine and the maintained MMSegmentation, and of the original MMSegmentation."""
    preprocessor = nn.Module()
    for swaps in (True, False):
        setattr(preprocessor, name, swaps)
        other, swapped = compat.without_channel_swap(preprocessor)
        assert swapped is swaps
        assert getattr(other, name) is False and getattr(preprocessor, name) is swaps
