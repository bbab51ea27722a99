"""The learning rate over a whole training, by the schedules of the papers and of released code."""

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS

from vim_mm.config import config_path


def learning_rates(schedule: str) -> list[float]:
    """The factor of the learning rate in each iteration."""
    cfg = Config.fromfile(config_path(f'_base_/schedules/{schedule}.py'))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    max_iters = cfg.train_cfg.max_iters
    schedulers = [
        # As MMEngine's runner builds them.
        PARAM_SCHEDULERS.build({'end': max_iters, **scheduler, 'optimizer': optimizer})
        for scheduler in cfg.param_scheduler
    ]
    factors = []
    optimizer.step()  # once: there is nothing to learn, but MMEngine would warn
    for _ in range(max_iters):
        factors.append(optimizer.param_groups[0]['lr'])
        for scheduler in schedulers:
            scheduler.step()
    return factors


@pytest.mark.slow
@pytest.mark.parametrize(
    'schedule, max_iters, warmup',
    [
        pytest.param('ade20k_paper_160k', 160000, 1500, id='ade20k-paper'),
        pytest.param('ade20k_released_60k', 60000, 1500, id='ade20k-released'),
        pytest.param('coco_paper_380k', 380000, 250, id='coco-paper'),
    ],
)
def test_linear_warmup_and_linear_decay(schedule, max_iters, warmup):
    factors = learning_rates(schedule)
    assert len(factors) == max_iters
    assert factors[0] < 1e-2
    for i in (warmup // 2, warmup, max_iters // 2, max_iters - 1):
        expected = min(i / warmup, 1) * (1 - i / max_iters)
        assert factors[i] == pytest.approx(expected, rel=1e-2, abs=1e-4)


@pytest.mark.slow
def test_steps_of_the_released_detection():
    factors = learning_rates('coco_released_184k')
    assert len(factors) == 184375
    assert factors[0] == pytest.approx(1e-3)
    assert factors[250] == factors[163888] == pytest.approx(1)
    assert factors[163889] == factors[177545] == pytest.approx(0.1)
    assert factors[177546] == pytest.approx(0.01)
