"""A training that cannot learn says so before its first iteration."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.field.base import each_label, train, write_data
from vim_mm.engine import VimRunner
from vim_mm.engine.batches.samples import SampleError
from vim_mm.mistakes import explain

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    'kind', ['TverskyLoss', 'LovaszLoss', 'OhemCrossEntropy', 'HuasdorffDisstanceLoss']
)
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


@pytest.mark.parametrize(
    ('weights', 'said'),
    [([0.0] * 3, 'must not be 0 for all'), ([1.0, -1.0, 1.0], 'finite and not negative')],
)
def test_weights_that_teach_nothing(weights, said, folder):
    with pytest.raises(ValueError, match=rf'decode_head\.loss_decode\.class_weight .*{said}'):
        loss = f"dict(type='UPerHead', loss_decode=dict(class_weight={weights}))"
        train(folder, rest=f"model['decode_head'].update({loss})")


def test_weights_that_are_words(folder):
    loss = "dict(type='UPerHead', loss_decode=dict(class_weight=['1', '2', '3']))"
    with pytest.raises(TypeError) as caught:
        train(folder, rest=f"model['decode_head'].update({loss})")
    said = "model.decode_head.loss_decode.class_weight must be a number, got '1'"
    assert explain(caught.value) == said


def test_losses_of_no_weight(folder):
    rest = f"{HEADS}['loss_decode'] = dict(type='CrossEntropyLoss', loss_weight=0.0)\n" + END_HEADS
    with pytest.raises(ValueError, match='loss_weight is 0 in every loss of the model'):
        train(folder, rest=rest)


@pytest.mark.parametrize(
    'rest',
    [
        'optim_wrapper = dict(optimizer=dict(lr=0.0))',
        *also_slow(
            (
                'none = dict(lr_mult=0)\nkeys = dict(backbone=none, neck=none, head=none)\n'
                'optim_wrapper = dict(paramwise_cfg=dict(custom_keys=keys))\ndel none, keys',
            )
        ),
    ],
)
def test_a_learning_rate_of_0(rest, folder):
    log = train(folder, rest=rest)
    assert 'WARNING - the learning rate of every parameter is 0' in log


def test_a_frozen_model(folder, monkeypatch):
    """As by a hook or a model of one's own."""
    build = VimRunner.build_optim_wrapper

    def freeze(self, cfg):
        self.model.requires_grad_(False)
        return build(self, cfg)

    monkeypatch.setattr(VimRunner, 'build_optim_wrapper', freeze)
    plain = "optim_wrapper = dict(_delete_=True, optimizer=dict(type='SGD', lr=0.1))"
    with pytest.raises(ValueError, match=r'takes gradients .* everything is frozen'):
        train(folder, rest=plain)


def test_a_text_in_place_of_classes(folder):
    """Whose letters are as many as the heads' classes."""
    rest = f"{SPLITS}['metainfo'] = dict(classes='abc')\n" + END
    with pytest.raises(
        ValueError, match=r"metainfo\['classes'\] must be a list .*'abc'.*with a comma"
    ):
        train(folder, rest=rest)


STOPPING = "custom_hooks = [dict(type='EarlyStoppingHook', monitor={!r}, rule='greater')]\n"


@pytest.mark.parametrize(
    'rest',
    [
        STOPPING.format('mIou'),
        *also_slow(
            (BY_EPOCH + "param_scheduler = [dict(type='ReduceOnPlateauLR', monitor='mIou')]",),
        ),
    ],
)
def test_a_metric_that_somebody_waits_for(rest, folder):
    with pytest.raises(ValueError, match=r"monitor='mIou' is no metric .* did you mean 'mIoU'"):
        train(folder, rest=rest)


def test_a_wait_without_a_validation(folder):
    none = 'val_dataloader = val_cfg = val_evaluator = None\n'
    rest = none + STOPPING.format('mIoU')
    with pytest.raises(ValueError, match=r"monitor='mIoU' needs a validation"):
        train(folder, rest=rest)


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


@pytest.mark.slow
def test_some_samples_of_many_may_have_one_class(tmp_path):
    """Others need not: that is a line of the log, and the training continues."""
    write_data(tmp_path / 'data', train=10)
    each_label(tmp_path / 'data', lambda labels: np.zeros_like(labels))
    log = train(tmp_path)
    assert (
        len(re.findall(r'WARNING - .*the first \d maps of labels hold 0 \(background\)', log)) == 1
    )


@pytest.mark.slow
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


def test_another_label_that_is_ignored(folder):
    """By heads, padding and metric: it is no fault of a file."""
    each_label(
        folder / 'data', lambda labels: np.where(np.arange(64) < 8, 254, labels).astype(np.uint8)
    )
    rest = f"{HEADS}['ignore_index'] = 254\n" + END_HEADS
    rest += "model['data_preprocessor'] = dict(seg_pad_val=254)\n"
    rest += 'val_evaluator = dict(ignore_index=254)\ntest_evaluator = val_evaluator'
    assert 'WARNING - val' not in train(folder, rest=rest)


def of_validation(folder, change) -> None:
    for path in (folder / 'data/annotations/validation').iterdir():
        Image.fromarray(change(np.array(Image.open(path)))).save(path)


def test_labels_of_validation_are_looked_at_before_the_training(folder):
    of_validation(folder, lambda labels: labels + 1)
    said = r'validation/000\.png: a label is 3, but there are 3 .* set reduce_zero_label=True'
    with pytest.raises(SampleError, match=said):
        train(folder)
    assert not [*folder.rglob('*.pth')]


def test_labels_of_validation_that_hold_one_class(folder):
    of_validation(folder, lambda labels: ((labels > 0) * 255).astype(np.uint8))
    line = (
        r'WARNING - val_dataloader\.dataset: all 4 maps of labels hold 0 \(background\) besides 255'
    )
    assert re.search(line, train(folder))


def test_classes_that_validation_numbers_otherwise(folder):
    rest = "val_dataloader['dataset']['reduce_zero_label'] = True"
    line = 'WARNING - reduce_zero_label is False in train_dataloader.dataset and True in val'
    assert line in train(folder, rest=rest)


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


@pytest.mark.slow
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


SHORT_OF_EPOCHS = 'train_cfg = dict(max_iters=40, val_interval=40)\n'


@pytest.mark.parametrize(
    'options',
    [
        dict(type='MultiStepLR', milestones=[1, 2]),
        *also_slow(
            (dict(type='StepLR', step_size=1),),
            (dict(type='ExponentialLR', gamma=0.1),),
            (dict(type='CosineAnnealingLR', T_max=2),),
            (dict(type='PolyLR', end=2),),
        ),
    ],
)
def test_a_schedule_of_epochs_among_iterations(options, folder):
    log = train(folder, rest=SHORT_OF_EPOCHS + schedule(**options, by_epoch=False))
    assert re.search(
        rf'WARNING - param_scheduler\.0 \({options["type"]}\) has decayed lr .*by the 2 iter', log
    )


@pytest.mark.slow
def test_a_schedule_of_iterations(folder):
    """Warm-ups, and parts that others follow, are short."""
    parts = [
        dict(type='LinearLR', start_factor=0.1, end=2, by_epoch=False),
        dict(type='CosineAnnealingLR', T_max=2, begin=0, end=2, by_epoch=False),
        dict(type='StepLR', step_size=4, gamma=0.97, begin=2, by_epoch=False),
    ]
    log = train(folder, rest=SHORT_OF_EPOCHS + f'param_scheduler = {parts!r}\n')
    assert 'WARNING - param_scheduler' not in log


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ('rest', 'line'),
    [
        ('train_cfg.update(val_interval=1)', r'val_interval=1 counts iterations'),
        ('default_hooks = dict(checkpoint=dict(by_epoch=True))', r'checkpoint counts epochs'),
        (
            'log_processor = dict(by_epoch=True)',
            r'log_processor\.by_epoch should be False with Iter',
        ),
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


STRATEGY = "runner_type = 'FlexibleRunner'\nstrategy = dict(type='SingleDeviceStrategy')\n"


@pytest.mark.parametrize(
    ('rest', 'said'),
    [
        (schedule(type='PolyLR', power=1.0), r'param_scheduler\.0 \(PolyLR\) counts epochs'),
        (f"{HEADS}['num_classes'] = 4\n" + END_HEADS, r'num_classes is 4, but train_dataloader'),
    ],
)
def test_trainings_by_a_strategy(rest, said, folder):
    assert 'WARNING - param_scheduler' not in train(folder, rest=STRATEGY)
    log = train(folder, rest=STRATEGY + 'log_processor = dict(by_epoch=True)\n')
    assert log.count('WARNING - log_processor.by_epoch should be False') == 1
    with pytest.raises(ValueError, match=said):
        train(folder, rest=STRATEGY + rest)


def test_the_base_says_nothing(folder):
    log = train(folder)
    for name in ('train_cfg', 'param_scheduler', 'train_dataloader', 'val_dataloader', 'val_eval'):
        assert f'WARNING - {name}' not in log
