"""Fixtures of the trainings of toy models."""

import time
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def no_pause_between_epochs(monkeypatch):
    """MMEngine gives loaders' workers two seconds to end; these loaders have none."""
    without = SimpleNamespace(**{**vars(time), 'sleep': lambda seconds: None})
    monkeypatch.setattr('mmengine.runner.loops.time', without)
