"""The greatest difference of what was exported from PyTorch."""

import math

import pytest
import torch
from torch import nn

from vim_mm.export import differences


class Twice(nn.Module):
    def forward(self, x):
        return x, x + 1


def test_differences_are_relative_to_the_greatest_value():
    x = torch.tensor([[1.0, -2.0]])
    assert differences(Twice(), lambda x: (x, x + 1.5), [x, 3 * x]) == [0.25, pytest.approx(0.1)]
    assert differences(Twice(), Twice(), [torch.full((1, 2), -1.0)]) == [0.0]  # also of zeros


def test_a_nan_is_the_greatest_difference_wherever_it_stands():
    x = torch.ones(1, 2)
    for outputs in ((x, x * math.nan), (x * math.nan, x + 1)):
        (worst,) = differences(Twice(), lambda _, outputs=outputs: outputs, [x])
        assert math.isnan(worst)
