"""Both sides of each adapter: what newer releases of PyTorch have, and what older ones have not."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as all_modules

from vim_mm import compat

BUILDER = np.float64(0).__reduce__()[0]


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


def half(dtype: np.dtype, content: bytes) -> float:
    """Stands in for what NumPy builds scalars with, so that one can tell who was called."""
    return BUILDER(dtype, content) / 2


@SIDES
def test_names_that_files_may_hold(side, monkeypatch, tmp_path):
    without(monkeypatch, torch.serialization, 'safe_globals', side)
    before = [*torch.serialization.get_safe_globals()]
    file = tmp_path / 'scalar.pth'
    torch.save(np.float64(3), file)
    functions = {
        f'{BUILDER.__module__}.scalar': half,
        '_codecs.encode': lambda text, encoding: text.encode(encoding),
    }
    with compat.safe_globals(functions, [np.dtype, type(np.dtype('d'))]):
        assert torch.load(file, weights_only=True) == 1.5
    with pytest.raises(pickle.UnpicklingError), compat.safe_globals({}, [np.dtype]):
        torch.load(file, weights_only=True)
    assert {*torch.serialization.get_safe_globals()} == {*before}


@pytest.mark.parametrize('name', ['_channel_conversion', 'channel_conversion'])
def test_a_preprocessor_that_leaves_channels(name):
    """Of MMEngine and the maintained MMSegmentation, and of the original MMSegmentation."""
    preprocessor = nn.Module()
    for swaps in (True, False):
        setattr(preprocessor, name, swaps)
        other, swapped = compat.without_channel_swap(preprocessor)
        assert swapped is swaps
        assert getattr(other, name) is False and getattr(preprocessor, name) is swaps
