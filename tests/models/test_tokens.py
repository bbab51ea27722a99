import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from vim_mm.models import tokens
from vim_mm.models.tokens import (
    CLS_TOKENS,
    insert_cls,
    resize_pos_embed,
    rotary_table,
    rotate,
    split_cls,
)
from vim_mm.ops import resample


@pytest.mark.parametrize(
    'placement, num_patches, expected',
    [
        pytest.param('none', 3, [0, 1, 2], id='none'),
        pytest.param('head', 3, [-1, 0, 1, 2], id='head'),
        pytest.param('middle', 3, [0, -1, 1, 2], id='middle-odd'),
        pytest.param('middle', 4, [0, 1, -1, 2, 3], id='middle-even'),
        pytest.param('tail', 3, [0, 1, 2, -1], id='tail'),
        pytest.param('double', 3, [-1, 0, 1, 2, -2], id='double'),
    ],
)
def test_class_tokens_stand_where_the_word_says(placement, num_patches, expected):
    patches = torch.arange(num_patches).float().view(1, -1, 1)
    cls = torch.tensor([-1.0, -2.0])[: len(expected) - num_patches].view(1, -1, 1)
    tokens = insert_cls(patches, cls, placement)
    assert tokens.flatten().tolist() == expected
    back, back_cls = split_cls(tokens, placement)
    assert torch.equal(back, patches) and torch.equal(back_cls, cls)


def test_middle_of_vims_checkpoints_is_index_98():
    assert CLS_TOKENS['middle'](14 * 14) == (98,)


@pytest.mark.parametrize('placement', CLS_TOKENS)
def test_resizing_leaves_class_tokens_alone(placement):
    num_cls = len(CLS_TOKENS[placement](0))
    pos_embed = torch.randn(1, 4 * 6 + num_cls, 5)
    patches, cls = split_cls(pos_embed, placement)
    resized = resize_pos_embed(pos_embed, (4, 6), (7, 3), placement)
    new_patches, new_cls = split_cls(resized, placement)
    assert torch.equal(new_cls, cls)
    expected = resample_abs_pos_embed(patches, [7, 3], [4, 6], 0, antialias=False)
    torch.testing.assert_close(new_patches, expected)


def test_resizing_asks_for_the_kernel_once_a_size(monkeypatch):
    """It goes through the channels one after the other: a millisecond in each forward pass."""

    class Calls(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function is torch.ops.aten.upsample_bicubic2d.default
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(resample, '_matrices', {})  # other tests may have asked for these sizes
    pos_embed = torch.randn(1, 4 * 6, 5, requires_grad=True)
    grad = torch.randn(1, 11 * 5, 5)
    for expected in (2, 0):
        with Calls() as calls:
            resized = resize_pos_embed(pos_embed, (4, 6), (11, 5))
            (own,) = torch.autograd.grad(resized, pos_embed, grad)
        assert calls.number == expected
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(resize_pos_embed(pos_embed, (4, 6), (11, 5)), resized)
    image = pos_embed.view(1, 4, 6, 5).permute(0, 3, 1, 2)
    truth = F.interpolate(image, (11, 5), mode='bicubic').permute(0, 2, 3, 1).reshape(1, -1, 5)
    torch.testing.assert_close(resized, truth)
    torch.testing.assert_close(own, torch.autograd.grad(truth, pos_embed, grad)[0])


def test_resizing_of_float64_keeps_its_digits():
    pos_embed = torch.randn(1, 4 * 6, 5, dtype=torch.float64)
    image = pos_embed.view(1, 4, 6, 5).permute(0, 3, 1, 2)
    truth = F.interpolate(image, (11, 5), mode='bicubic').permute(0, 2, 3, 1).reshape(1, -1, 5)
    resized = resize_pos_embed(pos_embed, (4, 6), (11, 5))
    torch.testing.assert_close(resized, truth, rtol=1e-12, atol=1e-12)


def test_resizing_to_a_square_of_as_many_patches():
    rows = torch.arange(2.0)[:, None].expand(2, 8).reshape(1, 16, 1)
    resized = resize_pos_embed(rows, (2, 8), (4, 4)).view(4, 4)
    torch.testing.assert_close(resized, resized[:, :1].expand(4, 4))
    assert (resized[1:, 0] > resized[:-1, 0]).all()


def test_resizing_to_the_same_grid_is_the_identity():
    pos_embed = torch.randn(1, 7, 5)
    assert resize_pos_embed(pos_embed, (2, 3), (2, 3), 'middle') is pos_embed


def test_rotation_depends_on_distance_only():
    """The defining property of a rotary embedding, along each axis of the image."""
    table = rotary_table((5, 6), 8, 5, 'none', 'cpu')
    q, k = (rotate(torch.randn(8).expand(1, 30, 8), table).view(5, 6, 8).double() for _ in range(2))
    inner = torch.einsum('hwc,xyc->hwxy', q, k)
    torch.testing.assert_close(inner[:-1, :, 1:][0, 0, 0, 0], inner[1, 0, 2, 0])
    torch.testing.assert_close(inner[0, 0, 1, 2], inner[3, 2, 4, 4])
    torch.testing.assert_close(inner[2, 3, 0, 1], inner[4, 5, 2, 3])
    assert not torch.isclose(inner[0, 0, 1, 2], inner[0, 0, 2, 1])


def test_rotation_by_hand():
    """Channels 0, 1 turn with the row at frequency 1; channels 2, 3 with the column."""
    x = torch.tensor([1.0, 0, 1, 0]).expand(1, 6, 4)
    turned = rotate(x, rotary_table((2, 3), 4, 14, 'none', 'cpu')).view(2, 3, 4)
    for row in range(2):
        for column in range(3):
            a, b = torch.tensor(row * 14 / 2), torch.tensor(column * 14 / 3)
            expected = torch.stack([a.cos(), a.sin(), b.cos(), b.sin()])
            torch.testing.assert_close(turned[row, column], expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize('placement', ['head', 'middle', 'tail', 'double'])
def test_class_tokens_do_not_turn(placement):
    num_cls = len(CLS_TOKENS[placement](0))
    x = torch.randn(1, 12 + num_cls, 8)
    turned = rotate(x, rotary_table((3, 4), 8, 14, placement, 'cpu'))
    patches, cls = split_cls(turned, placement)
    assert torch.equal(cls, split_cls(x, placement)[1])
    alone = rotate(split_cls(x, placement)[0], rotary_table((3, 4), 8, 14, 'none', 'cpu'))
    torch.testing.assert_close(patches, alone)


def test_tables_of_a_rotation_stay_where_they_are_and_no_fake_one_is_kept():
    """CUDA graphs read them for ever."""
    with FakeTensorMode():
        assert isinstance(rotary_table((2, 7), 12, 14, 'none', torch.device('cpu'))[0], FakeTensor)
    device = torch.device('cpu')
    first = tokens._kept_turns(7, 6, 14, device)
    assert type(first[0]) is torch.Tensor
    for length in range(8, 150):
        tokens._kept_turns(length, 6, 14, device)
    assert tokens._kept_turns(7, 6, 14, device)[0] is first[0]
