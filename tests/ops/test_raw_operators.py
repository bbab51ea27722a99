"""The compiled operators by themselves: wrong, empty and infinite input, and random calls."""

import os
import subprocess
import sys

import pytest
import torch

from tests.native import ROOT, ask_compiler, build
from tests.ops.inputs import make_inputs, results_and_gradients
from tests.ops.raw import HUGE, assert_refused, assert_too_large, each_wrong_call, legal_call, scan
from vim_mm.ops import selective_scan_fn
from vim_mm.ops.discretization import METHODS
from vim_mm.ops.library import MISSING
from vim_mm.ops.reference import TENSORS

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def test_the_legal_call():
    assert scan(legal_call())[0].isfinite().all()
    assert all(x.isfinite().all() for x in scan(legal_call(), backward=True))


@pytest.mark.slow
def test_opcheck_with_a_state_and_resets():
    """Of any strides; without a GPU nothing else holds the fake kernels to the real ones."""
    call = legal_call()
    call['initial_state'] = call['grad_last_state'].mT.contiguous().mT
    call['reset'] = call['u'][:, 0, 0].T.contiguous().T < 0.4
    arguments = [
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in (call[name] for name in (*TENSORS, 'delta_softplus', 'method', 'reverse'))
    ]
    ops = torch.ops.vim_mm
    torch.library.opcheck(ops.selective_scan_fwd.default, arguments)
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    results = ops.selective_scan_fwd(*given)
    torch.library.opcheck(ops.selective_scan_bwd.default, (*results, *given))


@each_wrong_call
def test_a_wrong_argument(name, value, message):
    assert_refused(name, value, message)


@pytest.mark.parametrize('sizes', HUGE)
def test_sizes_that_overflow(sizes):
    assert_too_large(sizes)


def test_an_expanded_batch_that_overflows():
    u, A, B = (torch.zeros(1, 1, 1), -torch.ones(1, 1), torch.zeros(1, 1, 1))
    rows, matrix = u.expand(2**58, 1, 1), B.expand(2**58, 1, 1)
    with pytest.raises(RuntimeError, match='sizes of a scan are too large'):
        selective_scan_fn(rows, rows, A, matrix, matrix)


DELTA, OF_A = torch.rand(3, 4), -torch.rand(3, 4)


@pytest.mark.parametrize(
    ('delta', 'A', 'method', 'message'),
    [
        (DELTA.int(), OF_A, 0, 'wrong dtype of delta$'),
        (DELTA.half(), OF_A.half(), 0, 'wrong dtype of delta$'),
        (DELTA, OF_A.int(), 0, 'wrong dtype of A$'),
        (DELTA, OF_A.double(), 0, 'wrong dtype of A$'),
        (DELTA.double(), OF_A.cfloat(), 0, 'wrong dtype of A$'),
        (DELTA.cfloat(), OF_A.cfloat(), 0, 'wrong dtype of delta$'),
        (DELTA[:2], OF_A, 0, 'wrong shape of delta$'),
        (DELTA.flatten(), OF_A, 0, 'wrong shape of delta$'),
        (DELTA.T, OF_A.T, 0, 'expected contiguous delta and A'),
        (DELTA, OF_A, 7, 'unknown discretization number 7'),
    ],
)
def test_wrong_arguments_of_discretize(delta, A, method, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.vim_mm.discretize(delta, A, method)


@pytest.mark.parametrize('shape', [(0,), (2, 0), (0, 3), ()])
def test_few_coefficients(shape):
    found = torch.ops.vim_mm.discretize(torch.ones(shape), -torch.ones(shape), 0)
    assert found.shape == (6, *shape)


@pytest.mark.parametrize('backend', ['native', 'torch', 'reference'])
@pytest.mark.parametrize('form', ['constant', 'shared', 'constant_B_grouped_C', 'interleaved'])
@pytest.mark.parametrize('nothing', ['batch', 'channels', 'length'])
def test_scans_of_nothing(nothing, form, backend):
    """Outputs of no entries or, without steps, of zeros; and gradients likewise."""
    inputs = make_inputs(form=form, dtype=torch.float32, **{nothing: 0})
    results = results_and_gradients(selective_scan_fn, inputs, backend=backend)
    for name, x in inputs.items():
        assert results[f'grad_{name}'].shape == x.shape
    assert results['out'].shape == inputs['u'].shape
    assert results['last_state'].shape == (*inputs['u'].shape[:2], inputs['A'].shape[1])
    assert all(not x.any() for x in results.values())  # NaN would be true


def infinite_inputs(name, value, states, is_complex, **given):
    inputs = make_inputs(
        dtype=torch.float32, length=5, states=states, is_complex=is_complex, **given
    )
    with torch.no_grad():
        x = torch.view_as_real(inputs[name]) if inputs[name].is_complex() else inputs[name]
        x.view(-1)[torch.randint(x.numel(), ())] = value
    return inputs


@pytest.mark.parametrize('backend', ['native', 'torch'])
@pytest.mark.parametrize(
    'is_complex',
    [pytest.param(False, id='real'), pytest.param(True, id='complex', marks=pytest.mark.slow)],
)
@pytest.mark.parametrize('method', METHODS)
def test_what_is_infinite(method, is_complex, backend):
    """As in the reference: nothing that only fills lanes, nor an absent D, makes NaN of it.

    A step of infinite length has coefficients in the kernel that are NaN in the reference.
    """
    for states in (1, 3, 16, 17) if backend == 'native' else (3,):  # PyTorch fills no lanes
        for name in ('u', 'delta', 'A', 'B', 'C', 'D', 'z', 'delta_bias'):
            for value in (torch.inf, -torch.inf, torch.nan):
                inputs = infinite_inputs(name, value, states, is_complex)
                for missing in ((), ('D', 'z', 'delta_bias')):
                    if name in missing:
                        continue
                    some = {k: x.detach() for k, x in inputs.items() if k not in missing}
                    options = dict(discretization_method=method, return_last_state=True)
                    found = selective_scan_fn(**some, **options, backend=backend)
                    wanted = selective_scan_fn(**some, **options, backend='reference')
                    for x, y in zip(found, wanted, strict=True):
                        x, y = (torch.view_as_real(t) if t.is_complex() else t for t in (x, y))
                        known = ~y.isnan()
                        torch.testing.assert_close(x[known], y[known], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('method', [name for name in METHODS if METHODS[name].causal])
def test_gradients_of_what_is_infinite(method):
    """A scan in both directions adds them up in another order than the reference."""
    for name in ('u', 'B', 'C'):
        for states in (1, 3):
            inputs = infinite_inputs(name, torch.inf, states, False)
            del inputs['D'], inputs['z']
            found, wanted = (
                results_and_gradients(
                    selective_scan_fn, inputs, discretization_method=method, backend=backend
                )
                for backend in ('native', 'reference')
            )
            for k, x in found.items():
                known = ~wanted[k].isnan()
                torch.testing.assert_close(x[known], wanted[k][known], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_views_that_are_conjugate_or_negative(is_complex):
    inputs = make_inputs(is_complex=is_complex)
    if is_complex:
        views = inputs | {k: inputs[k].detach().conj() for k in 'ABC'}
    else:
        negative = torch.complex(inputs['u'].detach(), -inputs['u'].detach()).conj().imag
        assert negative.is_neg()
        views = inputs | {'u': negative}
    plain = {k: x.detach().resolve_conj().resolve_neg().clone() for k, x in views.items()}
    assert torch.equal(
        selective_scan_fn(**views, backend='native'), selective_scan_fn(**plain, backend='native')
    )


SOURCES = ['kernels', 'scan_row_avx2', 'scan_row_avx512', 'scan_row_portable', 'selective_scan']
SANITIZERS = '-fsanitize=address,undefined'


@pytest.fixture(scope='module')
def sanitized(tmp_path_factory):
    """The operators of the CPU under sanitizers, and what a process needs that loads them."""
    found = [
        ask_compiler(f'-print-file-name={name}').stdout.strip()
        for name in ('libasan.so', 'libubsan.so')
    ]
    if not all(map(os.path.isabs, found)):
        pytest.skip('the compiler has no libasan.so and libubsan.so')
    flags = [SANITIZERS, '-fno-sanitize-recover=all', '-O0', '-g1', '-fvisibility=hidden']
    library = build(
        tmp_path_factory.mktemp('sanitized'),
        'vim_mm_sanitized',
        ['csrc/ops.cpp', *(f'csrc/cpu/{name}.cpp' for name in SOURCES)],
        lambda source: flags,
        link=[SANITIZERS],
    )
    return library, {
        'LD_PRELOAD': ' '.join(found),
        'ASAN_OPTIONS': 'detect_leaks=0',  # of Python
        'UBSAN_OPTIONS': 'print_stacktrace=1',
    }


@pytest.mark.slowest
@pytest.mark.parametrize('capability', ['portable', 'avx2', 'avx512'])
def test_random_calls_under_sanitizers(sanitized, capability):
    """Right, or refused; and no sanitizer ends the process."""
    library, variables = sanitized
    seed = str(['portable', 'avx2', 'avx512'].index(capability))
    done = subprocess.run(
        [
            sys.executable,
            '-W',
            'ignore',
            '-m',
            'tests.ops.fuzzed',
            library,
            'vim_mm_sanitized',
            '1000',
            seed,
        ],
        cwd=ROOT,
        env=os.environ
        | variables
        | {
            'VIM_MM_CPU_CAPABILITY': capability,
            'PYTHONPATH': os.pathsep.join([str(ROOT), *sys.path]),
        },
        capture_output=True,
        text=True,
    )
    if capability != 'portable' and 'which this processor does not have' in done.stderr:
        pytest.skip(f'this processor has no {capability}')
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert capability in done.stdout
