"""Each tool that takes a file of weights, sent each file that would run something."""

import json

import pytest
import torch

from tests.checkpoints.bombs import BOMBS
from tests.scripts import TOOLS
from tests.tools.conftest import run_tool

pytestmark = pytest.mark.slow

# What comes before and after the file on the command line; CONFIG is the small segmentor's.
DOORS = {
    'train.py --resume': ('train.py', ('CONFIG', '--work-dir', 'WORK', '--resume', 'FILE')),
    'train.py load_from': (
        'train.py',
        ('CONFIG', '--work-dir', 'WORK', '--cfg-options', 'load_from=FILE'),
    ),
    'train.py Pretrained': (
        'train.py',
        (
            *('CONFIG', '--work-dir', 'WORK', '--cfg-options'),
            *('model.backbone.init_cfg.type=Pretrained', 'model.backbone.init_cfg.checkpoint=FILE'),
        ),
    ),
    'test.py': ('test.py', ('CONFIG', 'FILE', '--work-dir', 'WORK')),
    'infer.py': ('infer.py', ('CONFIG', 'FILE', 'IMAGES', '--out', 'WORK')),
    'stream.py': ('stream.py', ('CONFIG', 'FILE', 'IMAGES', '--out', 'WORK.mp4')),
    'visualize.py': ('visualize.py', ('features', 'CONFIG', 'FILE', '--out', 'WORK')),
    'convert_checkpoint.py': ('convert_checkpoint.py', ('FILE', 'WORK.pth')),
    'export_onnx.py': ('export_onnx.py', ('CONFIG', 'FILE', 'WORK.onnx')),
    'export_aoti.py': ('export_aoti.py', ('CONFIG', 'FILE', 'WORK.pt2')),
}
# One process for all files, because each start takes seconds.
DRIVER = """
import json, runpy, sys, traceback
from pathlib import Path

import torch


def loaded(*_, **__):
    raise SystemExit('The weights are loaded.')


# To export takes half a minute, and comes after the file.
torch.export.export = torch.onnx.export = loaded
tool, commands = json.loads(Path('commands.json').read_text())
sys.path.insert(0, str(Path(tool).parent))
for number, arguments in commands:
    sys.argv = [tool, *arguments]
    try:
        runpy.run_path(tool, run_name='__main__')
        ending = 'exit 0'
    except SystemExit as error:
        ending = str(error.code)
    except BaseException as error:
        ending = 'traceback ' + ''.join(traceback.format_exception(error))[-1500:]
    Path(f'ending{number}.txt').write_text(ending)
"""


@pytest.fixture(scope='module')
def trained(configs, data_root, tmp_path_factory):
    """The last checkpoint of the small segmentor."""
    folder = tmp_path_factory.mktemp('trained')
    options = ('--cfg-options', f'data_root={data_root}')
    run_tool('train.py', configs['seg'], '--work-dir', folder / 'run', *options, cwd=folder)
    return folder / 'run' / 'iter_4.pth'


@pytest.mark.parametrize('door', DOORS)
def test_no_tool_runs_what_a_file_holds(door, trained, configs, data_root, tmp_path):
    tool, arguments = DOORS[door]
    checkpoint, commands = torch.load(trained, weights_only=False), []
    for number, write_bomb in enumerate(BOMBS.values()):
        file = tmp_path / f'bomb{number}.pth'
        write_bomb(file, checkpoint, tmp_path / f'marker{number}')
        known = {
            'CONFIG': configs['seg'],
            'IMAGES': data_root / 'images' / 'validation',
            'FILE': file,
            'WORK': tmp_path / f'work{number}',
        }
        line = []
        for argument in arguments:
            for name, value in known.items():
                argument = argument.replace(name, str(value))
            line.append(argument)
        if tool != 'convert_checkpoint.py':
            options = () if '--cfg-options' in line else ('--cfg-options',)
            line += [*options, f'data_root={data_root}']
        commands.append((number, line))
    (tmp_path / 'commands.json').write_text(json.dumps([str(TOOLS / tool), commands]))
    (tmp_path / 'driver.py').write_text(DRIVER)
    output = run_tool(str(tmp_path / 'driver.py'), cwd=tmp_path)
    for number, name in enumerate(BOMBS):
        ending = (tmp_path / f'ending{number}.txt').read_text()
        assert not ending.startswith('traceback'), f'{name}: {ending}\n{output}'
        assert not (tmp_path / f'marker{number}').exists(), name
