"""The version of the package, and the commit of the checkout that it lies in."""

import subprocess
from pathlib import Path

__version__ = '0.1.0'


def commit(length: int = 10) -> str | None:
    """The commit of this checkout, with '-dirty' where tracked files are changed.

    Args:
        length (int): Digits of the hash, more where fewer are not unique.

    Returns:
        str | None: None where no checkout of git tracks the package, as where it is installed.
    """
    # Without locks: a training that starts must not stop a commit that is made meanwhile.
    git = ['git', '--no-optional-locks', '-C', str(Path(__file__).resolve().parent)]
    tracked = ['ls-files', '--error-unmatch', '__init__.py']
    describe = ['describe', '--always', '--dirty', f'--abbrev={length}', '--exclude=*']
    try:
        for command in (tracked, describe):
            done = subprocess.run([*git, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
