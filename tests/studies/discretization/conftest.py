"""The study's runner, and a task so small that a run takes a second."""

import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from studies.discretization.tasks import TASKS, Data, Split

# What a script has beside it; run.py is imported here as a module.
sys.modules.setdefault('_command_line', import_module('tools._command_line'))


def _tiny(name, side):
    task = TASKS[name]
    size = replace(task.size, channels=16, layers=2, image=side)
    return replace(task, size=size, steps=10, batch=4, counts=(40, 20), test_batch=10)


@pytest.fixture
def tiny_tasks():
    sides = {'fashion': 28, 'scenes': 32, 'spacing': 32}
    return {name: _tiny(name, side) for name, side in sides.items()}


@pytest.fixture
def make_data(tiny_tasks):
    """Random pictures whose grey level tells the class, as the data of a tiny task."""

    def make(name, device='cpu'):
        task = tiny_tasks[name]
        rng = np.random.default_rng(0)
        splits = []
        for count in task.counts:
            shape = (count, task.size.image, task.size.image)
            labels = rng.integers(task.classes, size=shape if task.dense else count)
            grey = 20 * (labels if task.dense else labels[:, None, None])
            images = np.clip(grey + rng.integers(-5, 5, shape), 0, 255)
            splits.append(Split(images.astype(np.uint8), labels.astype(np.uint8)))
        return Data(task, splits, torch.device(device))

    return make
