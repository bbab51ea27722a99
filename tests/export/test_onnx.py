"""ONNX files against PyTorch: every method, at sizes that the export has not seen."""

import pytest
import torch
from torch import nn

from tests.export.pooled import Pooled
from tests.models.small import small_mixer
from vim_mm.models import SimpleFPN, VisionMamba
from vim_mm.ops import METHODS, selective_scan_fn
from vim_mm.ops.exported import recurrence
from vim_mm.ops.resample import averaging_matrix

onnx = pytest.importorskip('onnx')
pytest.importorskip('onnxscript')
pytest.importorskip('onnxruntime')

from vim_mm.export import (  # noqa: E402
    OnnxModule,
    choose_part,
    differences,
    export_onnx,
    part_of,
    put_in_place,
    quantize,
)

BOUND = 1e-4
# That of the position embedding, one of another aspect, and one that patches do not divide.
SIZES = ((1, 3, 32, 32), (3, 3, 64, 48), (2, 3, 37, 91))


def operators(path) -> list[str]:
    nodes = onnx.load(path).graph.node
    assert {node.domain for node in nodes} <= {'', 'ai.onnx'}
    return [node.op_type for node in nodes]


def backbone(layers: int = 1, **switches) -> VisionMamba:
    torch.manual_seed(0)
    arch = dict(embed_dims=16, num_layers=layers)
    model = VisionMamba(arch, 32, 8, out_indices=[*range(layers)], out_feature='norm', **switches)
    for param in model.parameters():  # at initialization the position embedding hardly shows
        param.data += 0.05 * torch.randn_like(param)
    return model.eval()


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """A segmentor, and its file for images of any size."""
    model, path = Pooled(backbone()).eval(), tmp_path_factory.mktemp('onnx') / 'model.onnx'
    export_onnx(part_of(model, 'segmentor'), torch.randn(2, 3, 40, 56), path, dynamic=True)
    return model, path


@pytest.mark.slow
def test_a_segmentor_takes_any_size(exported):
    model, path = exported
    assert operators(path).count('Scan') == 1
    images = [torch.randn(size) for size in SIZES]
    assert max(differences(part_of(model, 'segmentor'), OnnxModule(path), images)) <= BOUND


def test_a_torch_that_is_too_old_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr('torch.onnx.export', lambda model, args=(), *, dynamo=False: None)
    with pytest.raises(RuntimeError, match=r'^torch \S+ has no .*: torch 2\.6 and later have it'):
        export_onnx(nn.Identity(), torch.zeros(1), tmp_path / 'm.onnx')


@pytest.mark.slow
def test_class_tokens_and_both_ways_at_any_size(tmp_path):
    model = backbone(discretization_method='poly', cls_token='middle')
    export_onnx(model, torch.randn(2, 3, 40, 56), tmp_path / 'm.onnx', dynamic=True)
    images = [torch.randn(size) for size in SIZES]
    assert max(differences(model, OnnxModule(tmp_path / 'm.onnx'), images)) <= BOUND


class Detector(nn.Module):
    """What a detector does before its heads."""

    def __init__(self):
        super().__init__()
        self.backbone, self.neck = backbone(), SimpleFPN(16, 8)

    def extract_feat(self, x):
        return self.neck(self.backbone(x))


@pytest.mark.slow
def test_the_pyramid_of_a_detector_at_any_size(tmp_path):
    module = part_of(Detector().eval(), choose_part(None, 'mmdet'))
    export_onnx(module, torch.randn(2, 3, 80, 56), tmp_path / 'm.onnx', dynamic=True)
    images = [torch.randn(size) for size in SIZES]
    assert max(differences(module, OnnxModule(tmp_path / 'm.onnx'), images)) <= BOUND


class EveryMethod(nn.Module):
    """A scan as in a layer, by each method: steps from 0.01 to 5 times 1 / |A|."""

    def forward(self, images):
        u = images.flatten(2)  # (B, 3, L)
        delta, A = 4 * u, -torch.tensor([[1.0, 2.0], [0.5, 3.0], [1.5, 0.2]])
        options = dict(D=A[:, 0], z=u, delta_softplus=True)
        B, C = u[:, :2], u[:, 1:]
        return tuple(
            selective_scan_fn(u, delta, A, B, C, discretization_method=method, **options)
            for method in METHODS
        )


class Continued(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, u):
        A = -torch.ones(3, 2)
        return selective_scan_fn(u, u, A, u[:, :2], u[:, 1:], **self.options)


@pytest.mark.parametrize(
    ('name', 'value'),
    [('initial_state', torch.zeros(2, 3, 2)), ('reset', torch.zeros(2, 5, dtype=torch.bool))],
)
def test_states_at_the_ends_are_refused(name, value, tmp_path):
    with pytest.raises(Exception, match=f'{name}: a scan that is exported to ONNX takes none'):
        export_onnx(Continued(**{name: value}), torch.randn(2, 3, 5), tmp_path / 'm.onnx')


def test_packed_sequences_are_refused(tmp_path):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = small_mixer()

        def forward(self, x):
            return self.mixer(x, reset=torch.zeros(2, 5, dtype=torch.bool))

    with pytest.raises(Exception, match='reset: a scan that is exported to ONNX takes none'):
        export_onnx(Packed(), torch.randn(2, 5, 8), tmp_path / 'm.onnx')


@pytest.mark.slow
def test_every_method_at_any_length(tmp_path):
    path = tmp_path / 'scans.onnx'
    export_onnx(EveryMethod().eval(), torch.randn(2, 3, 4, 6), path, dynamic=True)
    assert operators(path).count('Scan') == len(METHODS)  # both ways are one loop
    images = [torch.randn(size) for size in ((1, 3, 1, 1), (3, 3, 2, 5), (2, 3, 9, 4))]
    assert max(differences(EveryMethod(), OnnxModule(path), images)) <= BOUND


@pytest.mark.slow
def test_a_file_in_the_place_of_a_part(exported):
    model, path = exported
    module, images = part_of(model, 'segmentor'), torch.randn(SIZES[1])
    with torch.no_grad():
        expected = module(images)
    other = Pooled(backbone())
    for param in other.parameters():
        nn.init.zeros_(param)
    put_in_place(other, 'segmentor', path)
    found = other.encode_decode(images, [])
    torch.testing.assert_close(found, expected, rtol=0, atol=BOUND * float(expected.abs().max()))


@pytest.mark.slow
def test_quantization_takes_the_linear_layers_alone(exported, tmp_path):
    model, path = exported
    images = [torch.randn(size) for size in SIZES]
    quantize(path, tmp_path / 'small.onnx', images)
    found = operators(tmp_path / 'small.onnx')
    assert found.count('Scan') == 1
    # The inputs of in_proj, and of two directions x_proj and dt_proj.
    assert found.count('QuantizeLinear') == 5
    module = part_of(model, 'segmentor')
    assert 1e-6 < max(differences(module, OnnxModule(tmp_path / 'small.onnx'), images)) < 0.1


class Scan(nn.Module):
    """A scan of constant matrices, whose states are not multiplied as a matrix."""

    def forward(self, images):
        u = images.flatten(2)
        A = -torch.tensor([[1.0, 2.0], [0.5, 3.0], [1.5, 0.2]])
        return selective_scan_fn(
            u, 0.1 * u, A, B=A + 1, C=A - 1, discretization_method='poly', reverse=True,
            delta_softplus=True, return_last_state=True,
        )  # fmt: skip


def test_a_scan_alone(tmp_path):
    """Of a fixed size; poly, which runs both ways, and the last state."""
    images = torch.randn(2, 3, 2, 5)
    export_onnx(Scan().eval(), images, tmp_path / 'scan.onnx')
    assert operators(tmp_path / 'scan.onnx').count('Scan') == 1
    assert max(differences(Scan(), OnnxModule(tmp_path / 'scan.onnx'), [images])) <= BOUND
    file = OnnxModule(tmp_path / 'scan.onnx')
    with pytest.raises(ValueError, match=r'scan\.onnx takes images of 3 x 2 x 5 .*got 3 x 2 x 4'):
        file(torch.randn(2, 3, 2, 4))
    for count in (6, 5, 1, 0):  # more than the batch of the file, less, and parts of it
        images = torch.randn(count, 3, 2, 5)
        for output, expected in zip(file(images), Scan()(images), strict=True):
            assert output.shape == expected.shape
            assert torch.allclose(output, expected, atol=1e-5)


def test_the_recurrence():
    torch.manual_seed(0)
    A_bar, drive = torch.rand(4, 2, 1, 3, 2), torch.randn(4, 2, 1, 3, 2)
    C = torch.randn(4, 2, 1, 2, 1)
    torch.library.opcheck(recurrence, (A_bar, drive, C))
    y, last = recurrence(A_bar, drive, C)
    # Unrolled: x_t is the sum of all earlier drives, each times the decays after it.
    x = sum(drive[s] * A_bar[s + 1 :].prod(0) for s in range(4))
    torch.testing.assert_close(last, x)
    torch.testing.assert_close(y[-1], x @ C[-1])


@pytest.mark.parametrize('bins', [1, 2, 3, 6])
@pytest.mark.parametrize('length', [1, 4, 6, 17])
def test_averages_are_those_of_pytorch(bins, length):
    x = torch.randn(1, 2, length, dtype=torch.float64)
    ours = x @ averaging_matrix(bins, length, x).T
    torch.testing.assert_close(ours, torch.nn.functional.adaptive_avg_pool1d(x, bins))


def test_a_part_that_is_not_there():
    with pytest.raises(ValueError, match='has no decode head'):
        choose_part(nn.Module(), 'mmdet', 'segmentor')
    with pytest.raises(ValueError, match='expected one of'):
        choose_part(nn.Module(), 'mmdet', 'neck')
