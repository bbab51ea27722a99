"""What Linux says of the processor."""

import platform
from pathlib import Path

_CPUINFO = Path('/proc/cpuinfo')


def cpuinfo(key: str) -> list[str]:
    """What is said of each core under a key such as 'cpu MHz'; empty where nothing is."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    return [line.partition(':')[2].strip() for line in lines if line.startswith(key)]


def processor_name() -> str:
    """The processor's name, '' where the system does not tell it.

    Python's own answer is empty on most Linux systems.
    """
    return next(iter(cpuinfo('model name')), '') or platform.processor()
