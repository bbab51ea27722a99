"""The commit that a run notes."""

import subprocess

from vim_mm import version


def test_git_takes_no_lock(monkeypatch):
    """Else a training that starts could stop a commit that is made meanwhile."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, stdout='abc\n')

    monkeypatch.setattr(version.subprocess, 'run', run)
    assert version.commit() == 'abc'
    assert commands and all(c[:2] == ['git', '--no-optional-locks'] for c in commands)
