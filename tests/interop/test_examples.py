"""The examples in Python train a step."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    'name, arguments, expected',
    [
        ('torchvision_mask_rcnn', ['--size', '128', '--method', 'foh'], ' objects'),
        ('timm_vit_with_a_vim_block', ['--method', 'foh'], 'loss '),
        ('packed_images', ['--images', '3', '--rows', '2', '--depth', '1'], 'step 2: loss '),
    ],
)
def test_an_example_runs(name, arguments, expected, monkeypatch, capsys):
    script = ROOT / 'examples' / f'{name}.py'
    monkeypatch.setattr(sys, 'argv', [str(script), *arguments])
    runpy.run_path(str(script), run_name='__main__')
    printed = capsys.readouterr().out
    assert expected in printed and 'nan' not in printed


def test_every_example_is_run():
    scripts = {path.stem for path in (ROOT / 'examples').glob('*.py')}
    assert scripts == {'torchvision_mask_rcnn', 'timm_vit_with_a_vim_block', 'packed_images'}
