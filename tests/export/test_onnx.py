"""ONNX files against PyTorch: every method, both directions, sizes that the export has not seen."""

import pytest
import torch

from vim_mm.models import VisionMamba
from vim_mm.ops import METHODS, selective_scan_grouped_fn
from vim_mm.ops.resample import averaging_matrix

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxscript')
pytest.importorskip('onnxruntime')

from vim_mm.export import differences, export_onnx, part_of, quantize  # noqa: E402

BOUND = 1e-4
LAYERS = 2


class AllMethods(torch.nn.Module):
    """From (B, 2, 3, L) to the scan of every method, forward in one group, backward in the other.

    One graph of all methods: the exporter takes seconds of each graph.
    """

    def __init__(self, states: int = 4):
        super().__init__()
        self.A = torch.nn.Parameter(-torch.rand(2, 3, states) * 3)
        self.bias = torch.nn.Parameter(torch.randn(2, 3))
        self.states = states

    def forward(self, x):
        B = torch.cat([x, x.sin()], dim=2)[:, :, : self.states]
        inputs = (x, 2 * x.cos(), self.A, B, B.cos(), self.bias, x.sin(), self.bias)
        return tuple(
            selective_scan_grouped_fn(
                *inputs, delta_softplus=True, discretization_method=method, reverse=(False, True)
            )
            for method in METHODS
        )


def operators(path) -> list[str]:
    nodes = onnx.load(path).graph.node
    assert {node.domain for node in nodes} <= {'', 'ai.onnx'}
    return [node.op_type for node in nodes]


@pytest.mark.slow
def test_scans_of_all_methods(tmp_path):
    torch.manual_seed(0)
    path, module = tmp_path / 'scans.onnx', AllMethods().eval()
    export_onnx(module, torch.randn(2, 2, 3, 7), path)
    averaged = sum(not method.causal for method in METHODS.values())
    assert averaged and operators(path).count('Scan') == len(METHODS) + averaged
    for error in differences(module, path, [torch.randn(2, 2, 3, 7) for _ in range(2)]):
        assert error <= BOUND


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A backbone with class token, and its file for images of any size."""
    torch.manual_seed(0)
    model = VisionMamba(
        dict(embed_dims=16, num_layers=LAYERS), 32, 8, out_indices=(0, 1), cls_token='middle',
        discretization_method='poly',
    ).eval()  # fmt: skip
    path = tmp_path_factory.mktemp('onnx') / 'backbone.onnx'
    export_onnx(model, torch.randn(2, 3, 40, 56), path, dynamic=True)
    return model, path


@pytest.mark.slow
def test_a_backbone_takes_any_size(exported):
    model, path = exported
    assert operators(path).count('Scan') == 2 * LAYERS  # poly scans both ways
    # That of the position embedding, one of another aspect, and one that patches do not divide.
    images = [torch.randn(shape) for shape in ((1, 3, 32, 32), (3, 3, 64, 48), (2, 3, 37, 91))]
    for error in differences(model, path, images):
        assert error <= BOUND


@pytest.mark.slow
def test_quantization_leaves_the_scan(exported, tmp_path):
    model, path = exported
    quantize(path, tmp_path / 'small.onnx')
    found = operators(tmp_path / 'small.onnx')
    assert found.count('Scan') == 2 * LAYERS
    # in_proj, out_proj, and of two directions x_proj and dt_proj
    assert found.count('MatMulInteger') == 6 * LAYERS
    (error,) = differences(model, tmp_path / 'small.onnx', [torch.randn(1, 3, 64, 48)])
    assert BOUND < error < 0.1


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
