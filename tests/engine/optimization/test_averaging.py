"""The average that stands beside the weights."""

import pytest
import torch

from tests.engine.toy import ToyModel, make_runner

OPTIONS = dict(custom_hooks=[dict(type='SideEMAHook', momentum=0.25)])


def load(path):
    return torch.load(path, map_location='cpu', weights_only=False)


def test_weights_are_tested_and_saved_and_the_average_is_kept(tmp_path):
    runner = make_runner(tmp_path, **OPTIONS)
    runner.train()
    first, second = (load(tmp_path / f'iter_{i}.pth') for i in (1, 2))
    weight = 'head.weight'
    torch.testing.assert_close(
        runner.model.state_dict()[weight].cpu(), second['state_dict'][weight]
    )
    # MMEngine's average begins with the weights after the first step.
    average = second['ema_state_dict'][f'module.{weight}']
    expected = 0.75 * first['state_dict'][weight] + 0.25 * second['state_dict'][weight]
    torch.testing.assert_close(average, expected)
    assert not torch.allclose(average, second['state_dict'][weight])


def test_the_average_is_resumed(tmp_path):
    longer = dict(train_cfg=dict(by_epoch=False, max_iters=4, val_interval=2), **OPTIONS)
    make_runner(tmp_path / 'whole', **longer).train()
    last = str(tmp_path / 'whole' / 'iter_2.pth')
    make_runner(tmp_path / 'on', load_from=last, resume=True, **longer).train()
    whole, resumed = (load(tmp_path / name / 'iter_4.pth') for name in ('whole', 'on'))
    for name, value in whole['ema_state_dict'].items():
        assert torch.equal(resumed['ema_state_dict'][name], value), name


def test_an_average_that_is_not_whole_is_not_resumed(tmp_path):
    """The rest would be averages of random weights."""
    make_runner(tmp_path / 'whole', **OPTIONS).train()
    cut = load(tmp_path / 'whole' / 'iter_2.pth')
    del cut['ema_state_dict']['module.head.weight']
    torch.save(cut, tmp_path / 'cut.pth')
    cut = str(tmp_path / 'cut.pth')
    runner = make_runner(tmp_path / 'on', load_from=cut, resume=True, **OPTIONS)
    runner.call_hook('before_run')
    with pytest.raises(RuntimeError, match=r'Missing key.* "module\.head\.weight"'):
        runner.load_or_resume()


def test_weights_of_a_head_of_other_classes_are_left_out(tmp_path):
    """As ``load_from`` leaves them out of the model."""
    make_runner(tmp_path / 'three').train()
    file = tmp_path / 'three' / 'iter_2.pth'
    runner = make_runner(tmp_path / 'five', ToyModel(classes=5), load_from=str(file), **OPTIONS)
    runner.call_hook('before_run')
    runner.load_or_resume()
    average = next(hook for hook in runner.hooks if type(hook).__name__ == 'SideEMAHook')
    loaded = load(file)['state_dict']
    for name, value in average.ema_model.module.state_dict().items():
        if name.startswith('backbone.'):
            assert torch.equal(value.cpu(), loaded[name]), name
