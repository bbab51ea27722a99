"""What is seen inside of a backbone, against what the backbone itself gives, and its pictures."""

import cv2
import numpy as np
import pytest
import torch

from benchmarks.pictures import panels
from benchmarks.pictures.plots import Region
from benchmarks.runs import inspect
from tests.models.small import images, small_backbone


@pytest.mark.parametrize('cls_token', ['none', 'middle'])
def test_features_are_the_residual_stream(cls_token):
    options = dict(out_feature='residual', out_indices=(0, 1), cls_token=cls_token)
    model, x = small_backbone(**options).eval(), images(40, 24)
    with torch.no_grad():
        expected = model(x)
    for given, truth in zip(inspect.feature_maps(model, x, [0, 1]), expected, strict=True):
        torch.testing.assert_close(given, truth)
    assert not any(m._forward_hooks for m in model.modules())


def test_principal_components_find_three_planted_directions():
    torch.manual_seed(0)
    planted = torch.rand(2, 3, 8, 8) * torch.tensor([9.0, 4.0, 1.0]).view(3, 1, 1)
    rotation = torch.linalg.qr(torch.randn(10, 10)).Q[:, :3]
    features = torch.einsum('ck,bkhw->bchw', rotation, planted)
    found = torch.stack(inspect.principal_components(features))
    assert found.shape == (2, 3, 8, 8) and found.min() >= 0 and found.max() <= 1
    for k in range(3):
        pair = torch.stack([found[:, k].flatten(), planted[:, k].flatten()])
        assert torch.corrcoef(pair)[0, 1].abs() > 0.95


def test_a_receptive_field_without_backward_scan_is_the_past():
    model = small_backbone(bimamba_type='none').eval()
    first, last = inspect.receptive_fields(model, images(40, 40), [0, 1])
    for field in (first, last):
        assert field.shape == (40, 40) and field.max() == 1
        # The central patch of 5 x 5 is the third of the third row.
        assert field[16:24, 16:24].min() > 0 and field[:16].max() > 0
        assert field[24:].max() == 0 and field[16:24, 24:].max() == 0


def test_shares_of_directions():
    model, x = small_backbone().eval(), images(40, 24)
    shares = inspect.forward_shares(model, x, [0, 1])
    assert all(share.shape == (2, 5, 3) and 0 < share.min() < share.max() < 1 for share in shares)
    with torch.no_grad():  # The backward scan of the second layer then adds nothing.
        mixer = model.layers[1].mixer
        mixer.D_b.zero_()
        mixer.x_proj_b.weight[-mixer.d_state :] = 0
    assert inspect.forward_shares(model, x, [1])[0].min() == 1
    with pytest.raises(ValueError, match='one direction'):
        inspect.forward_shares(small_backbone(bimamba_type='none'), x, [0])


def test_pictures(tmp_path):
    rng = np.random.default_rng(0)
    image = rng.integers(0, 255, (32, 24, 3), np.uint8)
    regions = [[Region(np.eye(32, 24, dtype=bool), 1)]]
    columns = {'ground truth': regions, 'zoh': regions}
    maps = {'layer 1': rng.random((1, 4, 3, 3))}
    panels.plot_methods([image], columns, ['a', 'b'], [[0, 0, 0], [0, 255, 0]], tmp_path / '1.png')
    panels.plot_features([image], maps, tmp_path / '2.png')
    panels.plot_receptive_fields({'layer 1': rng.random((34, 24))}, (4, 8), tmp_path / '3.png')
    panels.plot_directions([image], {'layer 1': rng.random((1, 4, 3))}, tmp_path / '4.png')
    for k in range(1, 5):
        assert cv2.imread(str(tmp_path / f'{k}.png')).std() > 1
