"""The neck as a module of MMEngine."""

from pathlib import Path

import pytest
import torch

from vim_mm.checkpoints.file import UnsafeCheckpointError
from vim_mm.registered import SimpleFPN


def test_a_neck_reads_its_weights_as_data(tmp_path):
    """Without activate(), too."""
    first = SimpleFPN(in_channels=8, out_channels=4, num_outs=4)
    weights = {f'neck.{name}': x + 1 for name, x in first.state_dict().items()}
    torch.save({'state_dict': weights}, tmp_path / 'weights.pth')
    cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth'), prefix='neck.')
    second = SimpleFPN(in_channels=8, out_channels=4, num_outs=4, init_cfg=cfg)
    second.init_weights()
    for name, x in second.state_dict().items():
        assert torch.equal(x, weights[f'neck.{name}'])
    other = SimpleFPN(in_channels=8, out_channels=4, num_outs=4, init_cfg=dict(cfg, prefix='head'))
    with pytest.raises(ValueError, match="no weights under the prefix 'head'"):
        other.init_weights()

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / 'ran',)

    torch.save({'state_dict': Bomb()}, tmp_path / 'weights.pth')
    with pytest.raises(UnsafeCheckpointError):
        SimpleFPN(in_channels=8, out_channels=4, num_outs=4, init_cfg=cfg).init_weights()
    assert not (tmp_path / 'ran').exists()
