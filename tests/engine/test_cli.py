"""What the command lines of tools/ share, and the command that activates for other people's."""

import runpy
import sys

import pytest
from mmengine.config import Config

import vim_mm
from vim_mm.engine import cli
from vim_mm.engine.cli import import_task_library


def test_a_config_of_no_task_is_refused():
    with pytest.raises(SystemExit, match=r"must be one of \['mmseg', .*\], got 'mmpose'"):
        import_task_library(Config({'default_scope': 'mmpose'}))


@pytest.mark.parametrize(
    ('scope', 'message'),
    [
        ('mmseg', 'needs onedl-mmsegmentation or mmsegmentation, which cannot'),
        (
            'mmdet',
            'needs onedl-mmdetection or mmdet and mmcv with compiled operators, which cannot',
        ),
        ('mmpretrain', 'needs onedl-mmpretrain or mmpretrain, which cannot'),
    ],
)
def test_a_missing_library_is_named_in_both_families(scope, message, monkeypatch):
    monkeypatch.setitem(sys.modules, f'{scope}.models', None)
    with pytest.raises(SystemExit, match=message):
        import_task_library(Config({'default_scope': scope}))


@pytest.mark.parametrize(
    ('missing', 'message'),
    [
        ('mmcv', 'needs onedl-mmcv or mmcv or mmcv-lite, which cannot'),
        ('mmcv._ext', 'needs onedl-mmcv or mmcv with compiled operators, which cannot'),
        ('mmengine.model', 'needs onedl-mmengine or mmengine or mmengine-lite, which cannot'),
        ('ftfy', 'needs ftfy for onedl-mmsegmentation or mmsegmentation, which cannot'),
    ],
)
def test_what_the_library_needs_in_turn_is_named(missing, message, monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(f'No module named {missing!r}', name=missing)

    monkeypatch.setattr(cli, 'import_module', absent)
    with pytest.raises(SystemExit, match=f'{message} be imported: No module named {missing!r}'):
        import_task_library(Config({'default_scope': 'mmseg'}))


def test_activated_activates_before_the_script_of_somebody_else(tmp_path, monkeypatch, capsys):
    events = []
    monkeypatch.setattr(vim_mm, 'activate', lambda: events.append('activate'))
    (tmp_path / 'helper.py').write_text('name = "helper"')
    script = tmp_path / 'train.py'
    script.write_text('import sys, helper; print(__name__, helper.name, sys.argv[1:])')
    monkeypatch.setattr(sys, 'argv', ['vim_mm/activated.py', str(script), 'config.py'])
    monkeypatch.setattr(sys, 'path', ['where python -m was called', *sys.path])
    runpy.run_module('vim_mm.activated', run_name='__main__')
    assert events == ['activate']
    assert capsys.readouterr().out.strip() == "__main__ helper ['config.py']"

    monkeypatch.setattr(sys, 'argv', ['vim_mm/activated.py'])
    with pytest.raises(SystemExit, match=r'usage: python -m vim_mm\.activated SCRIPT'):
        runpy.run_module('vim_mm.activated', run_name='__main__')
    monkeypatch.setattr(sys, 'argv', ['vim_mm/activated.py', 'nothing.py'])
    with pytest.raises(SystemExit, match=r'error: there is no file nothing\.py'):
        runpy.run_module('vim_mm.activated', run_name='__main__')
