"""The scripts of the repository, in this process. Needs nothing but pytest."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / 'tools'


def script(tool: str) -> Path:
    """The file of a script in tools/, or of one that begins with the name of another room."""
    return (ROOT if tool.startswith(('benchmarks/', 'studies/')) else TOOLS) / tool


def load(tool: str, run_name: str = '<run_path>') -> dict[str, Any]:
    """What a script defines, run in this process with its folder on the path, as Python has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(script(tool).parent))
        return runpy.run_path(str(script(tool)), run_name=run_name)
