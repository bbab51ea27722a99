"""``vim_mm.activate()`` for those who cannot call it.

In a config, ``custom_imports = dict(imports=['vim_mm.activated'])`` calls it once the config has
been read. In front of somebody's script, ``python -m vim_mm.activated tools/train.py CONFIG`` calls
it before, so that the bases of the config resolve as well.
"""

import runpy
import sys
from pathlib import Path

from vim_mm import activate

activate()

if __name__ == '__main__':
    if len(sys.argv) < 2:
        sys.exit('usage: python -m vim_mm.activated SCRIPT [ARGUMENT ...]')
    del sys.argv[0]
    script = Path(sys.argv[0])
    if not (script.is_file() or (script / '__main__.py').is_file()):
        sys.exit(f'vim_mm.activated: error: there is no file {script}')
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as `python SCRIPT` has it
    runpy.run_path(sys.argv[0], run_name='__main__')
