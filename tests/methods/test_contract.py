"""A method by what csrc/methods/contract.h requires, and no more, runs everywhere.

Two toys take the place of the methods: one has its two formulas, the other one its weights. Each is
a header, a line of the table and a file that compiles its kernels, as CONTRIBUTING.md has it.
"""

import functools
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils import cpp_extension

from tests.emulation.test_emulation import HEADERS, SOURCES, build_emulation
from tests.native import ROOT, build
from tests.ops.inputs import inputs_in, make_inputs, results_and_gradients
from tests.ops.test_selective_scan_cuda import assert_close
from vim_mm.ops import discretization, selective_scan_fn, selective_scan_ref
from vim_mm.ops.discretization import Method, psi
from vim_mm.ops.library import MISSING

TOYS = Path(__file__).parent / 'toys'
SHIPPED = tuple(discretization.METHODS)  # the toys take their place
STRUCTS = {'implicit_euler': 'ImplicitEuler', 'weighted': 'Weighted'}
CPU_SOURCES = ['csrc/ops.cpp', *(str(p.relative_to(ROOT)) for p in ROOT.glob('csrc/cpu/*.cpp'))]


def implicit_euler(dt, a):
    q = 1 / (1 - dt * a)
    return q, dt * q


def weighted(dt, a):
    return torch.exp(dt * a), psi(dt, a, 1) / 4 + psi(dt, a, 2) + 1.5 * psi(dt, a, 3)


METHODS = {
    'implicit_euler': Method('implicit_euler', 0, implicit_euler),
    'weighted': Method('weighted', 1, weighted, causal=False),
}
each_toy = pytest.mark.parametrize('method', METHODS)


def replace_once(pattern: str, by: str, text: str) -> str:
    text, count = re.subn(pattern, by, text, flags=re.DOTALL)
    assert count == 1, pattern
    return text


@pytest.fixture(scope='module')
def sources(tmp_path_factory) -> Path:
    """A copy of the native sources whose methods are the toys."""
    root = tmp_path_factory.mktemp('toys')
    for folder in ('csrc', 'tests/emulation'):
        shutil.copytree(ROOT / folder, root / folder)
    table = root / 'csrc/methods/discretization.h'
    includes = ''.join(f'#include "{name}.h"\n' for name in STRUCTS)
    calls = ' '.join(f'call({number}, {name})' for number, name in enumerate(STRUCTS.values()))
    text = replace_once(r'(#include "\w+\.h"\n)+', includes, table.read_text())
    macro = 'VIM_MM_FOR_EACH_METHOD(call)'
    text = replace_once(rf'#define {re.escape(macro)}.*?\n\n', f'#define {macro} {calls}\n\n', text)
    table.write_text(text)
    kernels = (root / 'csrc/cuda/methods/zoh.cu').read_text()
    for name, struct in STRUCTS.items():
        shutil.copy(TOYS / f'{name}.h', root / 'csrc/methods')
        (root / f'csrc/cuda/methods/{name}.cu').write_text(kernels.replace('Zoh', struct))
    return root


def cuda_sources() -> list[str]:
    """Those of the scan on a GPU or in emulation."""
    of_methods = [f'csrc/cuda/methods/{name}.cu' for name in STRUCTS]
    return of_methods + [s for s in SOURCES if not s.startswith('csrc/cuda/methods/')]


def build_for_cpu(folder: Path, root: Path) -> str:
    build(folder, 'toys_cpu', CPU_SOURCES, lambda _: ['-O1'], root=root)
    return str(folder / 'libtoys_cpu.so')


def build_for_emulation(folder: Path, root: Path) -> str:
    if not HEADERS:
        pytest.skip("needs CUDA's headers")
    return str(build_emulation(folder, 'toys_emulated', cuda_sources(), root))


def build_for_gpu(folder: Path, root: Path) -> str:
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    if cpp_extension.CUDA_HOME is None:
        pytest.skip('needs a CUDA toolkit')
    flags = ['-std=c++17', '-Dvim_mm=toys_gpu', '-DUSE_CUDA']
    flags.append('-DTORCH_TARGET_VERSION=0x020a000000000000')  # as in setup.py
    cpp_extension.load(
        'toys_gpu',
        [str(root / s) for s in cuda_sources() if not s.startswith('tests/')],
        extra_cflags=flags,
        extra_cuda_cflags=flags,
        build_directory=str(folder),
        is_python_module=False,
    )
    return str(folder / 'toys_gpu.so')


BACKENDS = {  # how it is built, the key of its operators, the device they take the place on
    'cpu': (build_for_cpu, 'CPU', 'cpu'),
    'emulated': (build_for_emulation, 'CUDA', 'cpu'),
    'gpu': (build_for_gpu, 'CUDA', 'cuda'),
}


@pytest.fixture(
    scope='module',
    params=['cpu', 'emulated', pytest.param('gpu', marks=pytest.mark.cuda)],
)
def device(request, sources, tmp_path_factory):
    """Where tensors have to be for the toys to run; the operators there are the toys'."""
    if MISSING is not None:
        pytest.skip(str(MISSING))
    make, key, device = BACKENDS[request.param]
    torch.ops.load_library(make(tmp_path_factory.mktemp(request.param), sources))
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    numbers = {method.id: method.causal for method in METHODS.values()}
    with (
        torch.library._scoped_library('vim_mm', 'IMPL') as library,
        mock.patch.dict(discretization.METHODS, METHODS, clear=True),
        mock.patch.dict(discretization.IS_CAUSAL, numbers, clear=True),
    ):
        for name in ('selective_scan_fwd', 'selective_scan_bwd'):
            op = getattr(getattr(torch.ops, f'toys_{request.param}'), name).default
            kernel = functools.partial(op.redispatch, keys)
            library.impl(name, kernel, device.upper(), allow_override=True)
        yield device


def compare(inputs, device, **options):
    """Outputs and all gradients of the native scan against the reference in float64."""
    wide = {
        name: x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
        for name, x in inputs.items()
    }
    moved = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    options['delta_softplus'] = True
    results = results_and_gradients(selective_scan_fn, moved, **options)
    expected = results_and_gradients(selective_scan_ref, wide, **options)
    assert_close({name: x.cpu() for name, x in results.items()}, expected)


toys = pytest.mark.slowest  # they are compiled, for minutes
replaces = pytest.mark.filterwarnings('ignore:Warning only once for all operators:UserWarning')


@toys
@replaces
@each_toy
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(('length', 'reverse'), [(1, False), (70, True), (132, False)])
def test_dtypes(device, method, dtype, length, reverse):
    inputs = inputs_in(dtype, channels=9, length=length, states=16)
    compare(inputs, device, discretization_method=method, reverse=reverse)


# As many rows as choose each of the block shapes in emulation.
@toys
@replaces
@each_toy
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('rows', [280, 525, 1050])
def test_rows(device, method, dtype, rows):
    inputs = inputs_in(dtype, batch=rows // 35, channels=35, length=64, states=16)
    compare(inputs, device, discretization_method=method)


@toys
@replaces
@each_toy
@pytest.mark.parametrize(
    ('form', 'states', 'is_complex'),
    [('shared', 37, False), ('constant_B_grouped_C', 5, False), ('shared', 5, True),
     ('interleaved', 5, True)],
)  # fmt: skip
@pytest.mark.parametrize('reverse', [False, True])
def test_layouts(device, method, form, states, is_complex, reverse):
    inputs = make_inputs(
        channels=34, length=70, states=states, form=form, is_complex=is_complex, dtype=torch.float32
    )
    compare(inputs, device, discretization_method=method, reverse=reverse)


@toys
@replaces
@each_toy
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_states_at_both_ends(device, method, dtype, reverse):
    inputs = inputs_in(dtype, channels=9, length=132, states=16)
    if METHODS[method].causal:
        inputs['initial_state'] = torch.randn(2, 9, 16, requires_grad=True)
    reset = torch.rand(2, 132) < 0.05
    compare(inputs, device, discretization_method=method, reverse=reverse, reset=reset)


def test_no_kernel_names_a_method():
    headers = (ROOT / 'csrc/methods').glob('*.h')
    names = re.findall(
        r'^struct (\w+) : (?:MethodDefaults|PsiMethod)<\1>',
        ''.join(header.read_text() for header in headers),
        re.MULTILINE,
    )
    assert len(names) == len(SHIPPED)
    word = re.compile(rf'\b({"|".join(names)})\b')
    found = []
    for path in [p for room in ('cpu', 'cuda') for p in (ROOT / 'csrc' / room).rglob('*.*')]:
        if path.parent.name != 'methods':
            code = re.sub(r'//.*|"[^"\n]*"', '', path.read_text())
            found += [f'{path.name}: {match[0]}' for match in word.finditer(code)]
    assert not found
