"""The tools that export a model as a user runs them: files and packages of an untrained one."""

import re

import pytest
import torch

from tests.graphs import record_calls
from tests.scripts import TOOLS, load
from tests.stream.conftest import Task, make_task
from tests.tools.conftest import run_tool
from vim_mm.ops import library

NUMBER = r'\d\.\de-\d\d'
# One layer, and the averages of whole maps that exporters know for one size only.
SHRUNK = """
_base_ = {base!r}
model = dict(
    backbone=dict(arch=dict(num_layers=1), out_indices=(0,)),
    neck=None,
    decode_head=dict(
        _delete_=True, type='PSPHead', in_channels=8, in_index=0, channels=4, num_classes=7,
        pool_scales=(1, 2), align_corners=False, loss_decode=dict(type='CrossEntropyLoss'),
    ),
    auxiliary_head=None,
)
"""


@pytest.fixture(scope='module')
def seg(configs, tmp_path_factory) -> Task:
    folder = tmp_path_factory.mktemp('pooled')
    config = folder / 'pooled.py'
    config.write_text(SHRUNK.format(base=str(configs['seg'])))
    return make_task('seg', config, folder)


@pytest.mark.slow
def test_onnx_files_beside_pytorch(seg, data_root, tmp_path):
    """Open sizes, 8 bits, metrics: all that the tool has."""
    for name in ('onnx', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(name)
    printed = run_tool(
        'export_onnx.py', seg.config, seg.checkpoint, 'out/seg.onnx', '--dynamic', '--int8',
        '--calibration-images', 2, '--evaluate', '--threads', 1, '--size', 32, 32,
        '--cfg-options', f'data_root={data_root}', cwd=tmp_path,
    )  # fmt: skip
    assert (tmp_path / 'out/seg.int8.onnx').is_file()
    for name in ('seg', 'seg.int8'):
        sizes = re.findall(rf'^out/{name}\.onnx: (.*): differs by {NUMBER} of', printed, re.M)
        assert sizes == ['1 x 32 x 32', '2 x 40 x 44', '3 x 34 x 64']
    metrics = dict(re.findall(r'^(\S+): (aAcc .*), \d+\.\d ms an image$', printed, re.M))
    assert [*metrics] == ['PyTorch', 'out/seg.onnx', 'out/seg.int8.onnx']
    assert metrics['out/seg.onnx'] == metrics['PyTorch']


@pytest.mark.slow
@pytest.mark.skipif(library.MISSING is not None, reason=str(library.MISSING))
def test_a_package_of_a_segmentor(seg, tmp_path):
    printed = run_tool(
        'export_aoti.py', seg.config, seg.checkpoint, 'out/seg.pt2', '--dynamic', '--repeats', 3,
        cwd=tmp_path,
    )  # fmt: skip
    sizes = re.findall(rf'^out/seg\.pt2: (.*): differs by {NUMBER} of', printed, re.M)
    assert sizes == ['1 x 64 x 64', '2 x 128 x 160']
    assert [*re.findall(r'^(\w+): \d+\.\d\d ms of 1 x 3 x 64 x 64', printed, re.M)] == [
        'eager', 'package'
    ]  # fmt: skip


@pytest.mark.parametrize('tool', ['export_onnx.py', 'export_aoti.py'])
def test_another_backbone_is_refused_in_a_sentence(tool, configs, tmp_path):
    config = tmp_path / 'other.py'
    config.write_text(
        f'_base_ = {str(configs["seg"])!r}\n'
        "model = dict(backbone=dict(_delete_=True, type='UNet', base_channels=4), neck=None,\n"
        '    decode_head=dict(in_channels=[64, 32, 16, 8]), auxiliary_head=None)\n'
    )
    other = make_task('seg', config, tmp_path)
    printed = run_tool(tool, config, other.checkpoint, 'out.pt2', cwd=tmp_path, fails=True)
    assert printed.splitlines()[-1] == (
        f'{tool}: error: {config} has the backbone UNet: only models with VisionMamba are exported.'
    )


def test_on_a_gpu_a_graph_is_timed_too(monkeypatch, capsys):
    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.syspath_prepend(TOOLS)
    tool = load('export_aoti.py')
    monkeypatch.setattr('vim_mm.acceleration.record', record_calls)
    monkeypatch.setattr('vim_mm.export.load_package', lambda path: torch.cos)
    tool['report_times'](torch.sin, 'm.pt2', torch.ones(1, 3).as_subclass(OnGpu), repeats=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(':')[0] for line in lines] == ['eager', 'package', 'graph']
