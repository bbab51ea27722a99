"""Exported graphs at sizes that the export has not seen, and a package in C++ without Python."""

import io
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.export.pooled import Pooled
from vim_mm.export import export_graph, load_package, part_of, write_package
from vim_mm.models import SimpleFPN, VisionMamba
from vim_mm.models.patch_embed import PatchEmbed
from vim_mm.models.tokens import resize_pos_embed
from vim_mm.ops import library, selective_scan_fn

EXAMPLES = Path(__file__).parents[2] / 'examples/cpp'
compiled = pytest.mark.skipif(library.MISSING is not None, reason=str(library.MISSING))


def backbone(layers: int = 1, **options) -> VisionMamba:
    return VisionMamba(dict(embed_dims=16, num_layers=layers), 64, 16, **options).eval()


def compare(module: nn.Module, graph, *sizes: tuple[int, int, int]) -> None:
    for batch, height, width in sizes:
        images = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            torch.testing.assert_close(graph.module()(images), module(images))


class Embedding(nn.Module):
    """What of a backbone asks for the size of the images."""

    def __init__(self):
        super().__init__()
        self.patches = PatchEmbed(3, 4, 16, 16)
        self.position = nn.Parameter(torch.randn(1, 16, 4))

    def forward(self, x):
        x = self.patches(x)
        position = resize_pos_embed(self.position, (4, 4), tuple(x.shape[-2:]))
        return x.flatten(2).mT + position


@pytest.mark.slow
def test_the_embedding_takes_any_size():
    """That of the position embedding, of the example, and one that patches do not divide."""
    module = Embedding().eval()
    graph = export_graph(module, torch.randn(2, 3, 80, 112), multiple=1)
    compare(module, graph, (1, 64, 64), (2, 80, 112), (3, 37, 91))


def test_an_example_that_is_no_multiple():
    with pytest.raises(ValueError, match='must be multiples of 16, got 80 x 100'):
        export_graph(nn.Identity(), torch.randn(2, 3, 80, 100), multiple=16)


@pytest.mark.parametrize('backend', ['torch', 'reference'])
@pytest.mark.parametrize('multiple', [None, 16])
def test_a_scan_of_pytorch_is_refused(backend, multiple, monkeypatch):
    """Its graph has the steps of the example, and the package would not tell other sizes."""
    module = backbone(ssm_cfg=dict(backend=backend))
    with pytest.raises(RuntimeError, match=f"on cpu it is '{backend}' here: .*asks for it"):
        export_graph(module, torch.randn(2, 3, 32, 48), multiple)
    monkeypatch.setenv('VIM_MM_BACKEND', backend)
    with pytest.raises(RuntimeError, match=f'VIM_MM_BACKEND={backend} asks for it'):
        export_graph(backbone(), torch.randn(2, 3, 32, 48), multiple)


CASES = [
    ('zoh', 'none', dict(if_rope=True, if_rope_residual=True, out_feature='residual')),
    ('foh', 'head', dict(out_type='cls_token', out_feature='norm')),
    ('bilinear', 'middle', {}),
    ('poly', 'tail', {}),
    ('highorder', 'double', dict(out_type='avg_featmap')),
    ('rk4', 'middle', dict(bimamba_type='v1')),
    ('zoh_exact', 'none', dict(layers=2, out_indices=(0, 1))),
]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize('method, cls_token, options', CASES)
def test_a_graph_takes_other_sizes(method, cls_token, options):
    module = backbone(discretization_method=method, cls_token=cls_token, **options)
    graph = export_graph(module, torch.randn(2, 3, 80, 112), multiple=16)
    assert any('vim_mm.selective_scan_fwd' in str(node.target) for node in graph.graph.nodes)
    compare(module, graph, (1, 64, 64), (3, 48, 96))


@compiled
@pytest.mark.slow
def test_a_graph_holds_the_neck():
    module = nn.Sequential(backbone(), SimpleFPN(16, 8)).eval()
    graph = export_graph(module, torch.randn(2, 3, 192, 224), multiple=32)
    compare(module, graph, (1, 224, 256), (1, 256, 192))


class Packed(nn.Module):
    """A scan that takes a state and resets, of which all are made of the images."""

    def forward(self, images):
        u = images.flatten(2)  # (B, 3, L)
        A = -torch.tensor([[1.0, 2.0], [0.5, 3.0], [1.5, 0.2]])
        states = dict(initial_state=u[..., :2], reset=u[:, 0] > 0.5)
        options = dict(delta_softplus=True, discretization_method='foh')
        return selective_scan_fn(u, u, A, u[:, :2], u[:, 1:], **states, **options)


@compiled
def test_a_graph_holds_states_and_resets():
    module = Packed()
    graph = export_graph(module, torch.randn(2, 3, 32, 48), multiple=16)
    compare(module, graph, (1, 32, 64), (3, 48, 32))


@pytest.fixture(scope='module')
def program(tmp_path_factory) -> Path:
    """The compiled example of C++."""
    for tool in ('cmake', 'c++'):
        if shutil.which(tool) is None:
            pytest.skip(f'there is no {tool}')
    folder = tmp_path_factory.mktemp('cpp')
    torch_folder = f'-DTORCH={torch.__path__[0]}'
    for command in (['-S', EXAMPLES, '-B', folder, torch_folder], ['--build', folder]):
        done = subprocess.run(['cmake', *command], capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / 'run_package'


@pytest.mark.slow
def test_a_package_has_no_copy_of_the_cpp_library(tmp_path):
    """Whatever the compiler links by default: beside PyTorch's, a copy crashes."""
    elffile = pytest.importorskip('elftools.elf.elffile')
    compiler = tmp_path / 'c++'
    compiler.write_text(
        '#!/bin/sh\n'
        'case "$*" in *c++-header*) ;; *) set -- -static-libstdc++ "$@" ;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    graph = export_graph(nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))
    with torch._inductor.config.patch({'cpp.cxx': (None, str(compiler))}):
        write_package(graph, tmp_path / 'm.pt2')
    with zipfile.ZipFile(tmp_path / 'm.pt2') as package:
        (name,) = [name for name in package.namelist() if name.endswith('.so')]
        library = elffile.ELFFile(io.BytesIO(package.read(name)))
    symbols = library.get_section_by_name('.dynsym').iter_symbols()
    defined = [s.name for s in symbols if s['st_shndx'] != 'SHN_UNDEF']
    assert 'libstdc++.so.6' in [
        tag.needed for tag in library.get_section_by_name('.dynamic').iter_tags('DT_NEEDED')
    ]
    # Of its locales, whose identities PyTorch's copy counts.
    assert not [name for name in defined if name.startswith('_ZNSt6locale')]


@pytest.mark.slow
def test_a_package_has_the_threads_of_the_program(tmp_path):
    """Not those of the process that wrote it, whatever Inductor does by default."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        write_package(export_graph(nn.GELU(), torch.randn(1, 3, 256, 256)), tmp_path / 'm.pt2')
    finally:
        torch.set_num_threads(threads)
    with zipfile.ZipFile(tmp_path / 'm.pt2') as package:
        sources = [package.read(n).decode() for n in package.namelist() if n.endswith('.cpp')]
    parallel = [line for text in sources for line in text.splitlines() if 'omp parallel' in line]
    assert parallel and not [line for line in parallel if 'num_threads' in line]


@compiled
@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_package_for_a_gpu_runs_without_python(program, tmp_path):
    import vim_mm._C

    module = backbone(discretization_method='foh', cls_token='middle').cuda()
    images = torch.randn(2, 3, 80, 112, device='cuda')
    write_package(export_graph(module, images, multiple=16), tmp_path / 'model.pt2', multiple=16)
    with torch.no_grad():
        (expected,) = module(images)
        (found,) = load_package(tmp_path / 'model.pt2')(images)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)  # products in TF32
    images.cpu().numpy().tofile(tmp_path / 'images')
    shape = map(str, images.shape)
    done = subprocess.run(
        [program, vim_mm._C.__file__, 'model.pt2', 'images', *shape, 'out', '3'],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = torch.from_numpy(np.fromfile(tmp_path / 'out.0', np.float32))
    torch.testing.assert_close(found, expected.cpu().flatten(), rtol=1e-3, atol=1e-4)


@pytest.fixture
def run(program, tmp_path):
    """Has the example of C++ run ``model.pt2`` on images, of which it is told a shape."""
    import vim_mm._C

    def run(images: torch.Tensor, *shape: int) -> subprocess.CompletedProcess:
        images.numpy().tofile(tmp_path / 'images')
        return subprocess.run(
            [program, vim_mm._C.__file__, 'model.pt2', 'images', *map(str, shape), 'out', '3'],
            cwd=tmp_path, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    return run


@compiled
@pytest.mark.slow
def test_a_segmentor_runs_without_python(run, tmp_path):
    """Its logits have the size of the images, also where these are padded."""
    module = part_of(Pooled(backbone()).eval(), 'segmentor')
    graph = export_graph(module, torch.randn(2, 3, 80, 112), multiple=16)
    write_package(graph, tmp_path / 'model.pt2', multiple=16)
    images = torch.randn(3, 3, 37, 91)
    done = run(images, *images.shape)
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = module(nn.functional.pad(images, (0, 5, 0, 11)))[..., :37, :91]
    found = np.fromfile(tmp_path / 'out.0', np.float32)
    torch.testing.assert_close(torch.from_numpy(found), expected.flatten())


@compiled
@pytest.mark.slow
def test_a_package_runs_without_python(run, tmp_path):
    """At the size of the position embedding, and at one that is padded."""
    module = backbone(discretization_method='foh', cls_token='middle')
    graph = export_graph(module, torch.randn(2, 3, 80, 112), multiple=16)
    write_package(graph, tmp_path / 'model.pt2', multiple=16)

    for shape in ((1, 3, 64, 64), (3, 3, 37, 91)):
        images = torch.randn(shape)
        done = run(images, *shape)
        assert done.returncode == 0, done.stderr
        assert 'median of 3 runs' in done.stdout
        with torch.no_grad():
            (expected,) = module(images)
        found = np.fromfile(tmp_path / 'out.0', np.float32)
        torch.testing.assert_close(torch.from_numpy(found), expected.flatten())
    done = run(images, 1, 3, 64, 64)
    assert done.returncode == 1
    assert done.stderr == 'run_package: error: images: expected float32 numbers of B x C x H x W\n'
    done = run(torch.randn(1, 4, 64, 64), 1, 4, 64, 64)
    assert done.returncode == 1 and 'unmatched dim value' in done.stderr
