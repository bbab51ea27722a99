"""The compiled scan against the golden vectors, finite differences and the reference."""

import os
import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad, gradcheck

from tests.ops import golden
from tests.ops.inputs import (
    grouped_inputs,
    make_inputs,
    results_and_gradients,
    strided_copies,
    worst_error,
)
from vim_mm.ops import library, selective_scan_fn, selective_scan_grouped_fn, selective_scan_ref
from vim_mm.ops.discretization import METHODS

each_method = pytest.mark.parametrize('method', METHODS)
real_and_complex = pytest.mark.parametrize(
    'is_complex', [pytest.param(False, id='real'), pytest.param(True, id='complex')]
)


def test_the_extension_is_built():
    assert library.MISSING is None
    assert library.has_kernel('cpu')


@pytest.mark.parametrize('case', golden.CASES)
@pytest.mark.parametrize(('dtype', 'tolerance'), golden.TOLERANCES)
def test_golden_vectors(case, dtype, tolerance):
    golden.assert_reproduced(selective_scan_fn, case, dtype, tolerance)


@each_method
@real_and_complex
def test_gradcheck(method, is_complex):
    inputs = make_inputs(batch=1, channels=2, length=3, states=2, is_complex=is_complex)

    def scan(*tensors):
        return selective_scan_fn(
            **dict(zip(inputs, tensors, strict=True)),
            delta_softplus=True,
            return_last_state=True,
            discretization_method=method,
        )

    assert gradcheck(scan, tuple(inputs.values()))


# The row kernel cuts time into chunks of 64 KiB of states: 1024 steps at N = 16 in fp32, 32 at
# N = 256 in fp64.
@each_method
@pytest.mark.parametrize(
    ('dtype', 'length', 'states', 'is_complex', 'bound'),
    [
        pytest.param(torch.float64, 1, 1, False, 1e-12, id='fp64-L1-N1'),
        pytest.param(torch.float64, 33, 256, False, 1e-12, id='fp64-L33-N256'),
        pytest.param(torch.float64, 197, 5, True, 1e-12, id='complex128-L197-N5'),
        pytest.param(torch.float32, 1025, 16, False, 1e-5, id='fp32-L1025-N16'),
        pytest.param(torch.float32, 63, 17, False, 1e-5, id='fp32-L63-N17'),
        pytest.param(torch.float32, 197, 5, True, 1e-5, id='complex64-L197-N5'),
    ],
)
@pytest.mark.parametrize('reverse', [False, True], ids=['forwards', 'reverse'])
def test_equals_reference(method, dtype, length, states, is_complex, bound, reverse):
    """In fp32 the truth is the reference in fp64 on the same numbers."""
    inputs = make_inputs(length=length, states=states, is_complex=is_complex, dtype=dtype)
    wide = {
        name: x.detach().to(torch.complex128 if x.is_complex() else torch.float64).requires_grad_()
        for name, x in inputs.items()
    }
    options = {'delta_softplus': True, 'discretization_method': method, 'reverse': reverse}
    results = results_and_gradients(selective_scan_fn, inputs, **options)
    expected = results_and_gradients(selective_scan_ref, wide, **options)
    for name, value in results.items():
        error = worst_error(value, expected[name])
        assert error <= bound, f'{name} is off by {error:.1e}'


@each_method
@pytest.mark.parametrize(
    'form', ['constant', 'shared', 'grouped', 'constant_B_grouped_C', 'interleaved']
)
def test_every_form_of_B_and_C(method, form):
    inputs = make_inputs(channels=6, length=9, states=3, form=form)
    options = {'discretization_method': method}
    results = results_and_gradients(selective_scan_fn, inputs, **options)
    expected = results_and_gradients(selective_scan_ref, inputs, **options)
    for name, value in results.items():
        assert worst_error(value, expected[name]) <= 1e-12, name


@pytest.mark.parametrize('absent', ['D', 'z', 'delta_bias'])
def test_optional_inputs(absent):
    inputs = make_inputs()
    del inputs[absent]
    results = results_and_gradients(selective_scan_fn, inputs)
    expected = results_and_gradients(selective_scan_ref, inputs)
    for name, value in results.items():
        assert worst_error(value, expected[name]) <= 1e-12, name


@each_method
def test_groups_in_one_call_are_separate_scans(method):
    """One reverse flag per group, operands shared with stride 0, all in one native call."""
    inputs = grouped_inputs(groups=3, shared=('u', 'z', 'D'))
    flags = (False, True, True)
    options = {'delta_softplus': True, 'discretization_method': method}
    grouped = results_and_gradients(selective_scan_grouped_fn, inputs, reverse=flags, **options)

    def one_by_one(**kwargs):
        results = []
        for k, flag in enumerate(flags):
            group = {
                name: x[k] if name in ('A', 'D', 'delta_bias') else x[:, k]
                for name, x in kwargs.items()
                if torch.is_tensor(x)
            }
            results.append(
                selective_scan_fn(**group, reverse=flag, return_last_state=True, **options)
            )
        return tuple(torch.stack(x, dim=1) for x in zip(*results, strict=True))

    expected = results_and_gradients(one_by_one, inputs)
    for name, value in grouped.items():
        assert worst_error(value, expected[name]) <= 1e-12, name
    by_reference = results_and_gradients(
        selective_scan_grouped_fn, inputs, reverse=flags, use_cuda_kernel=False, **options
    )
    for name, value in by_reference.items():
        assert worst_error(value, expected[name]) <= 1e-12, name


MIXES = [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.bfloat16, torch.float16, torch.float32),
]


@each_method
@pytest.mark.parametrize('mix', MIXES, ids=lambda mix: '-'.join(str(t)[6:] for t in mix))
def test_dtype_mix(method, mix):
    """Results carry the dtype of u, gradients of their inputs; nothing but storage is rounded."""
    inputs = make_inputs(dtype=torch.float32, length=40)
    for names, dtype in zip((('u',), ('delta', 'z'), ('B', 'C')), mix, strict=True):
        for name in names:
            inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    options = {'delta_softplus': True, 'discretization_method': method}
    results = results_and_gradients(selective_scan_fn, inputs, **options)
    expected = results_and_gradients(selective_scan_ref, wide, **options)
    assert results['out'].dtype == mix[0]
    assert results['last_state'].dtype == torch.float32
    for name, x in inputs.items():
        assert results[f'grad_{name}'].dtype == x.dtype
    # One rounding to bfloat16 is 2^-8 of a value, to float16 2^-11.
    for name, value in results.items():
        unit = torch.finfo(value.dtype).eps
        assert worst_error(value, expected[name]) <= max(1e-5, unit), name


def test_parameters_of_any_float_dtype():
    inputs = make_inputs(dtype=torch.float32)
    for name, dtype in (('A', torch.float64), ('D', torch.bfloat16), ('delta_bias', torch.float16)):
        inputs[name] = inputs[name].detach().to(dtype).requires_grad_()
    results = results_and_gradients(selective_scan_fn, inputs)
    expected = results_and_gradients(selective_scan_ref, inputs)
    for name, x in inputs.items():
        assert results[f'grad_{name}'].dtype == x.dtype
    for name, value in results.items():
        assert value.dtype == expected[name].dtype
        bound = max(1e-5, 2 * torch.finfo(value.dtype).eps)
        assert worst_error(value, expected[name]) <= bound, name


def test_any_strides():
    """Slices, transposes and strides of 0 give what contiguous tensors give, with their layout."""
    plain = make_inputs(batch=2, channels=4, length=10, states=3)
    strided = strided_copies(plain)
    results = results_and_gradients(selective_scan_fn, strided)
    expected = results_and_gradients(selective_scan_fn, plain)
    for name, value in results.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
    assert results['out'].stride() == strided['u'].stride()
    assert results['grad_u'].stride() == strided['u'].stride()
    repeated = {
        name: x.detach()[:1].expand(2, -1, -1) if x.dim() == 3 else x.detach()
        for name, x in plain.items()
    }
    torch.testing.assert_close(
        selective_scan_fn(**repeated),
        selective_scan_fn(**{name: x.contiguous() for name, x in repeated.items()}),
        rtol=0,
        atol=0,
    )


@each_method
@pytest.mark.parametrize(
    ('batch', 'length'), [pytest.param(0, 5, id='B0'), pytest.param(2, 0, id='L0')]
)
def test_empty(method, batch, length):
    inputs = make_inputs(batch=batch, length=length)
    results = results_and_gradients(selective_scan_fn, inputs, discretization_method=method)
    assert results['out'].shape == (batch, 4, length)
    assert results['last_state'].shape == (batch, 4, 3)
    assert not results['last_state'].any()
    for name, x in inputs.items():
        assert results[f'grad_{name}'].shape == x.shape


@each_method
def test_only_the_last_state_is_used(method):
    inputs = make_inputs()
    options = {'discretization_method': method, 'return_last_state': True}
    weight = torch.randn(2, 4, 3, dtype=torch.float64)
    grads = [
        torch.autograd.grad((scan(**inputs, **options)[1] * weight).sum(), inputs['u'])[0]
        for scan in (selective_scan_fn, selective_scan_ref)
    ]
    assert worst_error(*grads) <= 1e-12


@each_method
def test_same_bits_for_any_number_of_threads(method):
    inputs = make_inputs(batch=1, channels=70, length=300, states=16, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        runs = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(
                results_and_gradients(
                    selective_scan_fn, inputs, delta_softplus=True, discretization_method=method
                )
            )
    finally:
        torch.set_num_threads(threads)
    for run in runs[1:]:
        for name, value in run.items():
            assert torch.equal(value, runs[0][name]), name


def test_double_backward_raises():
    inputs = make_inputs()
    (grad,) = torch.autograd.grad(
        selective_scan_fn(**inputs).square().sum(), inputs['u'], create_graph=True
    )
    with pytest.raises(RuntimeError, match='no second derivative'):
        grad.sum().backward()


def test_forward_mode_raises():
    """An operator without it would give a derivative of zero."""
    inputs = {name: value.detach() for name, value in make_inputs().items()}
    u = inputs.pop('u')

    def scan(u, **options):
        return selective_scan_fn(u, **inputs, **options).sum()

    with pytest.raises(NotImplementedError, match=r"jvp.*backend='reference' has"):
        torch.func.jvp(scan, (u,), (u,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(u, u)
        with pytest.raises(NotImplementedError, match='no forward-mode derivative'):
            scan(dual)
        assert scan(u).isfinite(), 'a tensor without a derivative is no other than elsewhere'
        assert forward_ad.unpack_dual(scan(dual, backend='reference')).tangent != 0


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    """Nothing of size (B, D, L, N): at N = 256 that would be 512 MiB here."""
    code = (
        'import resource, torch\n'
        'from tests.ops.inputs import make_inputs\n'
        'from vim_mm.ops import selective_scan_fn\n'
        'def run(**sizes):\n'
        '    inputs = make_inputs(batch=2, channels=64, dtype=torch.float32, **sizes)\n'
        '    selective_scan_fn(**inputs).sum().backward()\n'
        '    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n'
        'small = run(length=8, states=256)\n'
        'print(run(length=4096, states=256) - small)\n'
    )
    result = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, check=True
    )
    # B and C, their gradients and their converted copies are 8 MiB each.
    assert int(result.stdout) < 160 * 1024


@pytest.mark.slow
@pytest.mark.parametrize('capability', ['portable', 'avx2', 'avx512'])
def test_every_instruction_set(capability):
    """Golden vectors and 60-digit mathematics once more, on each set that this processor has."""
    code = (
        'import pytest, sys, torch, vim_mm.ops\n'
        'print(torch.ops.vim_mm.cpu_capability())\n'
        'sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "golden or native",\n'
        '    "tests/ops/test_selective_scan.py", "tests/ops/test_discretization.py"]))\n'
    )
    environment = os.environ | {'VIM_MM_CPU_CAPABILITY': capability}
    result = subprocess.run(
        [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=False
    )
    if capability != 'portable' and 'which this processor does not have' in result.stderr:
        pytest.skip(f'this processor has no {capability}')
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith(capability)


@pytest.mark.parametrize(
    ('method', 'step'), [('highorder', 1e14), ('foh', 1e20), ('poly', 1e14), ('zoh_exact', 1e30)]
)
def test_overflow_does_not_depend_on_the_number_of_states(method, step):
    """States are padded to a multiple of the vector length; the padding must stay out of it."""
    u = delta = torch.ones(1, 1, 2)
    outs = []
    for states in (3, 16):
        A = torch.full((1, states), -1.0)
        B = torch.zeros(1, states)
        B[:, 0] = 1
        outs.append(selective_scan_fn(u, step * delta, A, B, B, discretization_method=method))
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])


@pytest.mark.slow
def test_unknown_instruction_set():
    environment = os.environ | {'VIM_MM_CPU_CAPABILITY': 'sse9'}
    code = (
        'import torch, vim_mm.ops\n'
        'x, A = torch.ones(1, 1, 1), -torch.ones(1, 1)\n'
        'try:\n    vim_mm.ops.selective_scan_fn(x, x, A, x, x)\n'
        "except ValueError as error: raise SystemExit(f'mistake: {error}')"
    )
    result = subprocess.run(
        [sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert "mistake: VIM_MM_CPU_CAPABILITY is 'sse9', expected portable, " in result.stderr


@pytest.mark.parametrize('backend', [None, 'torch', 'reference'])
def test_a_scan_of_no_groups_is_refused(backend):
    inputs = grouped_inputs(groups=2)
    none = {name: x[:, :0] if x.dim() == 4 else x[:0] for name, x in inputs.items()}
    with pytest.raises(ValueError, match='u: expected at least one group, got none'):
        selective_scan_grouped_fn(**none, reverse=(), backend=backend)
