import pytest
import torch

from vim_mm.models import SimpleFPN


def test_levels_and_gradients():
    neck = SimpleFPN(in_channels=16, out_channels=8, num_outs=5)
    outs = neck((torch.randn(2, 16, 4, 6),))
    assert [tuple(o.shape) for o in outs] == [
        (2, 8, 16, 24),
        (2, 8, 8, 12),
        (2, 8, 4, 6),
        (2, 8, 2, 3),
        (2, 8, 1, 2),
    ]
    sum(o.square().sum() for o in outs).backward()
    assert all(p.grad is not None and p.grad.any() for p in neck.parameters())


def test_levels_are_normalized_over_channels():
    outs = SimpleFPN(16, 32)((torch.randn(1, 16, 4, 4),))
    for out in outs:
        torch.testing.assert_close(out.mean(1), torch.zeros_like(out[:, 0]), atol=1e-5, rtol=0)
        variance = out.var(1, unbiased=False)
        torch.testing.assert_close(variance, torch.ones_like(variance), atol=1e-2, rtol=0)


def test_roi_align_reads_the_levels_right():
    roi_align = pytest.importorskip(
        'mmcv.ops', reason='needs mmcv with compiled operators'
    ).roi_align
    for stride, out in zip((4, 8, 16, 32, 64), SimpleFPN(16, 8)((torch.randn(1, 16, 8, 8),))):
        pixel = torch.tensor([[0.0, 0.0, 0.0, stride, stride]])
        torch.testing.assert_close(
            roi_align(out, pixel, 1, 1 / stride, 1)[..., 0, 0], out[..., 0, 0]
        )


def test_extra_level_subsamples():
    outs = SimpleFPN(16, 8, num_outs=6)((torch.randn(1, 16, 8, 8),))
    assert torch.equal(outs[4], outs[3][..., ::2, ::2])
    assert torch.equal(outs[5], outs[4][..., ::2, ::2])


def test_start_level_leaves_the_finer_ones_out():
    neck = SimpleFPN(16, 8, num_outs=5, start_level=1)
    outs = neck((torch.randn(1, 16, 8, 8),))
    assert [o.shape[-1] for o in outs] == [16, 8, 4, 2, 1]
    assert torch.equal(outs[3], outs[2][..., ::2, ::2])
    sum(o.square().sum() for o in outs).backward()
    assert all(p.grad is not None and p.grad.any() for p in neck.parameters())


@pytest.mark.parametrize('output_stride, sizes', [(16, [32, 16, 8, 8]), (8, [32, 16, 16, 16])])
def test_coarse_levels_keep_the_output_stride(output_stride, sizes):
    neck = SimpleFPN(16, 8, num_outs=4, output_stride=output_stride)
    outs = neck((torch.randn(1, 16, 8, 8),))
    assert [o.shape[-1] for o in outs] == sizes and not torch.equal(outs[2], outs[3])
    sum(o.square().sum() for o in outs).backward()
    assert all(p.grad is not None and p.grad.any() for p in neck.parameters())


@pytest.mark.parametrize(
    'arguments, message',
    [
        pytest.param(
            dict(in_channels=16, num_outs=2, start_level=1), 'num_outs.* 2', id='num_outs of 3'
        ),
        pytest.param(dict(in_channels=16, start_level=4), 'start_level.* 4', id='start_level'),
        pytest.param(dict(in_channels=16, num_outs=3), 'num_outs.* 3', id='num_outs'),
        pytest.param(
            dict(in_channels=16, output_stride=4), 'output_stride.* 4', id='output_stride'
        ),
        pytest.param(dict(in_channels=18), 'in_channels.* 18', id='in_channels'),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        SimpleFPN(**arguments)


def test_more_than_one_map():
    with pytest.raises(ValueError, match='one map, got 2'):
        SimpleFPN(16)((torch.zeros(1, 16, 4, 4),) * 2)


@pytest.mark.parametrize('size', [(1, 1), (1, 4), (4, 1)])
def test_a_map_too_small_to_be_halved(size):
    x = torch.randn(1, 8, *size)
    with pytest.raises(ValueError, match=rf'two rows and .*, got {size[0]} x {size[1]}'):
        SimpleFPN(8, 8)([x])
    assert SimpleFPN(8, 8, num_outs=4, output_stride=16)([x])[-1].shape[-2:] == size
