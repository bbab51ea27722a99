"""A training that cannot learn says so before its first iteration."""

import re

import numpy as np
import pytest

from tests.field.base import each_label, train, write_data

SPLITS = "for loader in (train_dataloader, val_dataloader):\n    loader['dataset']"
HEADS = "for head in (model['decode_head'], model['auxiliary_head']):\n    head"
TWO_CLASSES = f"""
{HEADS}['num_classes'] = 2
{SPLITS}['metainfo'] = dict(classes=('background', 'object'))
"""
BY_EPOCH = """
train_cfg = dict(_delete_=True, type='EpochBasedTrainLoop', max_epochs=2, val_interval=2)
train_dataloader['sampler'] = dict(type='DefaultSampler', shuffle=True)
"""
END = '\ndel loader\n'
END_HEADS = '\ndel head\n'


def schedule(**options):
    return f'param_scheduler = [{options!r}]\n'


def also_slow(*cases):
    """Further cases of what fast ones train already."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize('channels', ['num_classes=1', 'num_classes=2, out_channels=1'])
def test_a_softmax_of_one_channel(channels, folder):
    each_label(folder / 'data', lambda labels: (labels > 0).astype(np.uint8))
    rest = (
        f"""
{HEADS}.update({channels})
{SPLITS}['metainfo'] = dict(classes=('object',))
    loader['dataset']['reduce_zero_label'] = True
"""
        + END
        + END_HEADS
    )
    for kind in ('Fast', ''):  # MMSegmentation's own heads as well
        own = f"model['decode_head']['type'] = '{kind}UPerHead'\n"
        own += f"model['auxiliary_head']['type'] = '{kind}FCNHead'\n"
        with pytest.raises(
            ValueError, match=r'one output channel .*is always 0: set num_classes=2'
        ):
            train(folder, rest=rest + own)


@pytest.mark.parametrize('kind', ['TverskyLoss', 'LovaszLoss'])
def test_another_softmax_of_one_channel(kind, folder):
    of_image = ', per_image=True' if kind == 'LovaszLoss' else ''
    rest = f'{HEADS}.update(num_classes=2, out_channels=1)\n'
    rest += f"    head['loss_decode'] = dict(_delete_=True, type='{kind}'{of_image})\n"
    rest += f"{SPLITS}['metainfo'] = dict(classes=('background', 'object'))\n" + END + END_HEADS
    with pytest.raises(ValueError, match=rf'one output channel .* so that {kind} is always 0'):
        train(folder, rest=rest)


@pytest.mark.parametrize('kind', ['UPerHead', 'FastUPerHead'])
@pytest.mark.parametrize('weights', [[1.0] * 4, [1.0, 2.0]])
def test_weights_of_other_classes(kind, weights, folder):
    loss = f"dict(type='{kind}', loss_decode=dict(class_weight={weights}))"
    with pytest.raises(ValueError, match=f'a weight for each .* 3 classes, got {len(weights)}'):
        train(folder, rest=f"model['decode_head'].update({loss})")


def test_windows_that_leave_gaps(folder):
    slide = "dict(mode='slide', crop_size=(24, 24), stride=(40, 40))"
    with pytest.raises(ValueError, match=r'model\.test_cfg\.stride must be at most .*\(24, 24\)'):
        train(folder, rest=f"model['test_cfg'] = {slide}")
    assert not [*folder.glob('run*')]


def test_labels_of_0_and_255(folder):
    each_label(folder / 'data', lambda labels: ((labels > 0) * 255).astype(np.uint8))
    with pytest.raises(ValueError, match=r'all 8 maps of labels hold 0 \(background\) besides 255'):
        train(folder, rest=TWO_CLASSES + END + END_HEADS)


def test_labels_that_are_all_ignored(folder):
    each_label(folder / 'data', lambda labels: ((labels > 0) * 255).astype(np.uint8))
    rest = f"{SPLITS}['reduce_zero_label'] = True\n" + END
    with pytest.raises(ValueError, match=r'hold no class besides 255, .* reduce_zero_label=True'):
        train(folder, rest=rest)


def test_some_samples_of_many_may_have_one_class(tmp_path):
    """Others need not: that is a line of the log, and the training continues."""
    write_data(tmp_path / 'data', train=10)
    each_label(tmp_path / 'data', lambda labels: np.zeros_like(labels))
    log = train(tmp_path)
    assert (
        len(re.findall(r'WARNING - .*the first \d maps of labels hold 0 \(background\)', log)) == 1
    )


def test_a_metric_that_counts_what_is_not_learnt(folder):
    rest = f"{HEADS}['ignore_index'] = 0\n" + END_HEADS
    rest += "model['data_preprocessor'] = dict(seg_pad_val=0)\n"
    with pytest.raises(
        ValueError, match=r'val_evaluator\.ignore_index is 255, but .* ignore \[0\]'
    ):
        train(folder, rest=rest)
    train(
        folder, rest=rest + 'val_evaluator = dict(ignore_index=0)\ntest_evaluator = val_evaluator'
    )


def test_a_metric_may_leave_out_a_class(folder):
    log = train(folder, rest='val_evaluator = dict(ignore_index=0)\ntest_evaluator = val_evaluator')
    assert 'WARNING - val_evaluator.ignore_index is 0, but the heads ignore [255]' in log


def test_an_epoch_without_an_end(folder):
    rest = BY_EPOCH + "train_dataloader['sampler'] = dict(type='InfiniteSampler', shuffle=True)"
    with pytest.raises(ValueError, match=r'InfiniteSampler, which never ends, .*DefaultSampler'):
        train(folder, rest=rest)


def test_a_validation_without_an_end(folder):
    rest = "val_dataloader['sampler'] = dict(type='InfiniteSampler')"
    with pytest.raises(
        ValueError, match=r'val_dataloader\.sampler is InfiniteSampler, which never'
    ):
        train(folder, rest=rest)


def test_a_schedule_by_epochs_without_epochs(folder):
    with pytest.raises(ValueError, match=r'param_scheduler\.0 \(PolyLR\) counts epochs'):
        train(folder, rest=schedule(type='PolyLR', power=1.0))


@pytest.mark.parametrize(
    ('options', 'line'),
    [
        (dict(type='MultiStepLR', milestones=[1, 2], by_epoch=False), 'at its end after 2 of 4'),
        (dict(type='MultiStepLR', milestones=[300]), 'first changes lr after 300 epochs'),
        *also_slow(
            (dict(type='CosineAnnealingLR', T_max=2, by_epoch=False), 'at its end after 2 of 4'),
            (dict(type='LinearLR', start_factor=0.1, end=1500), 'ends after 1500 epochs'),
            (dict(type='StepLR', step_size=1000), 'first changes lr after 1000 epochs'),
        ),
    ],
)
def test_a_schedule_in_another_unit(options, line, folder):
    log = train(folder, rest=BY_EPOCH + schedule(**options))
    assert re.search(rf'WARNING - param_scheduler\.0 \({options["type"]}\) .*{line}', log)


@pytest.mark.parametrize(
    'options',
    [
        dict(type='PolyLR', by_epoch=False),
        *also_slow(
            [dict(type='CosineAnnealingLR', T_max=2)],
            [dict(type='MultiStepLR', milestones=[1])],
            [dict(type='LinearLR', start_factor=0.1, end=1, convert_to_iter_based=True)],
        ),
    ],
)
def test_a_schedule_in_its_unit(options, folder):
    log = train(folder, rest=BY_EPOCH + schedule(**options))
    assert not re.search(
        'WARNING - (param_scheduler|train_cfg|default_hooks|train_dataloader)', log
    )


@pytest.mark.parametrize(
    ('rest', 'line'),
    [
        ('train_cfg.update(val_interval=1)', r'val_interval=1 counts iterations'),
        ('default_hooks = dict(checkpoint=dict(by_epoch=True))', r'checkpoint counts epochs'),
        *also_slow(
            (BY_EPOCH + 'train_cfg.update(val_interval=500)', r'val_interval=500 counts epochs'),
            (
                'train_cfg.update(val_begin=500)',
                r'val_begin=500 lies behind the end of the training, 3',
            ),
            (
                BY_EPOCH + 'default_hooks = dict(checkpoint=dict(interval=50))',
                r'interval=50 counts iter',
            ),
        ),
    ],
)
def test_an_interval_in_another_unit(rest, line, folder):
    by_epoch = schedule(type='PolyLR') if 'EpochBased' in rest else ''
    assert re.search(f'WARNING - .*{line}', train(folder, rest=by_epoch + rest))


def test_the_base_says_nothing(folder):
    log = train(folder)
    for name in ('train_cfg', 'param_scheduler', 'train_dataloader', 'val_dataloader', 'val_eval'):
        assert f'WARNING - {name}' not in log
