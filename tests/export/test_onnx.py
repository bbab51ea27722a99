"""ONNX files against PyTorch: zoh at sizes that the export has not seen."""

import pytest
import torch

from vim_mm.models import VisionMamba
from vim_mm.ops.resample import averaging_matrix

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxscript')
pytest.importorskip('onnxruntime')

from vim_mm.export import differences, export_onnx, part_of, quantize  # noqa: E402

BOUND = 1e-4
LAYERS = 2


def operators(path) -> list[str]:
    nodes = onnx.load(path).graph.node
    assert {node.domain for node in nodes} <= {'', 'ai.onnx'}
    return [node.op_type for node in nodes]


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A backbone, and its file for images of any size."""
    torch.manual_seed(0)
    model = VisionMamba(
        dict(embed_dims=16, num_layers=LAYERS), 32, 8, out_indices=(0, 1),
    ).eval()  # fmt: skip
    path = tmp_path_factory.mktemp('onnx') / 'backbone.onnx'
    export_onnx(model, torch.randn(2, 3, 40, 56), path, dynamic=True)
    return model, path


@pytest.mark.slow
def test_a_backbone_takes_any_size(exported):
    model, path = exported
    assert operators(path).count('Scan') == LAYERS
    # That of the position embedding, one of another aspect, and one that patches do not divide.
    images = [torch.randn(shape) for shape in ((1, 3, 32, 32), (3, 3, 64, 48), (2, 3, 37, 91))]
    for error in differences(model, path, images):
        assert error <= BOUND


@pytest.mark.slow
def test_quantization_leaves_the_scan(exported, tmp_path):
    _, path = exported
    quantize(path, tmp_path / 'small.onnx')
    found = operators(tmp_path / 'small.onnx')
    assert found.count('Scan') == LAYERS
    # in_proj, out_proj, and of two directions x_proj and dt_proj
    assert found.count('MatMulInteger') == 6 * LAYERS


@pytest.mark.parametrize('bins', [1, 2, 3, 6])
@pytest.mark.parametrize('length', [1, 4, 6, 17])
def test_averages_are_those_of_pytorch(bins, length):
    x = torch.randn(1, 2, length, dtype=torch.float64)
    ours = x @ averaging_matrix(bins, length, x).T
    torch.testing.assert_close(ours, torch.nn.functional.adaptive_avg_pool1d(x, bins))


def test_a_part_that_is_not_there():
    with pytest.raises(ValueError, match='has no decode head'):
        part_of(torch.nn.Module(), 'mmdet', 'segmentor')
    with pytest.raises(ValueError, match='expected one of'):
        part_of(torch.nn.Module(), 'mmdet', 'neck')
