"""Fixtures of the trainings that write checkpoints."""

from tests.engine.conftest import no_pause_between_epochs

__all__ = ['no_pause_between_epochs']
