"""How threads wait for work: tools and scripts choose it before PyTorch is imported."""

import os
import subprocess
import sys

import pytest

from tests.scripts import TOOLS
from tests.tools.conftest import environment

TELL = 'import os\nraise ImportError(f\'waits {os.environ["OMP_WAIT_POLICY"]!r}\')\n'


@pytest.mark.parametrize('given', [None, 'ACTIVE', ''])
@pytest.mark.parametrize(
    'command',
    [
        ('train.py', 'a.py'),
        ('visualize.py', 'features', 'a.py', 'weights.pth'),
        ('dist_train.sh', 'a.py', '1'),
        ('slurm_train.sh', 'partition', 'job', 'a.py'),
    ],
)
def test_waiting_is_passive_unless_the_user_says_otherwise(command, given, tmp_path):
    (tmp_path / 'torch.py').write_text(TELL)
    (tmp_path / 'srun').write_text('#!/bin/bash\necho "waits \'$OMP_WAIT_POLICY\'" >&2; exit 1\n')
    (tmp_path / 'srun').chmod(0o755)
    for name in ('a.py', 'weights.pth'):
        (tmp_path / name).write_text('')
    variables = environment(
        PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(TOOLS.parent)]),
        PATH=f'{tmp_path}:{os.environ["PATH"]}',
    )
    variables.pop('OMP_WAIT_POLICY', None)
    if given is not None:
        variables['OMP_WAIT_POLICY'] = given
    interpreter = sys.executable if command[0].endswith('.py') else 'bash'
    done = subprocess.run(
        [interpreter, str(TOOLS / command[0]), *command[1:]],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert f"waits '{'PASSIVE' if given is None else given}'" in done.stderr
