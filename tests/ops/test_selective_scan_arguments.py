"""What selective_scan_fn refuses, and which backend it takes."""

import logging

import pytest
import torch

from tests.ops.inputs import grouped_inputs, make_inputs
from vim_mm.ops import (
    backends as choice,
)
from vim_mm.ops import (
    library,
    path_of,
    selective_scan,
    selective_scan_fn,
    selective_scan_grouped_fn,
    triton,
)
from vim_mm.ops.discretization import METHODS

B, D, L, N = 2, 4, 6, 3
f32, f64, c64 = torch.float32, torch.float64, torch.complex64


def zeros(*shape, dtype=f32, device='cpu'):
    return torch.zeros(shape, dtype=dtype, device=device)


BAD_INPUTS = [
    # argument, value, error, what the message says
    ('u', [1.0], TypeError, 'u: expected a tensor, got list'),
    ('A', None, TypeError, 'A: expected a tensor, got NoneType'),
    ('D', 1.0, TypeError, 'D: expected a tensor, got float'),
    ('u', zeros(B, D, L, dtype=torch.int64), TypeError, 'u: .* got torch.int64'),
    ('u', zeros(B, D, L, dtype=f64), TypeError, 'delta: expected float64, as u is, got .*float32'),
    ('delta', zeros(B, D, L, dtype=f64), TypeError, 'delta: .* got torch.float64'),
    ('z', zeros(B, D, L, dtype=c64), TypeError, 'z: .* got torch.complex64'),
    ('A', zeros(D, N, dtype=torch.int32), TypeError, 'A: .* got torch.int32'),
    ('B', zeros(B, N, L, dtype=c64), TypeError, 'B: expected a real dtype, as A is real'),
    ('C', zeros(B, N, L, dtype=f64), TypeError, 'C: .* got torch.float64'),
    ('D', zeros(D, dtype=torch.bool), TypeError, 'D: .* got torch.bool'),
    ('delta_bias', zeros(D, dtype=c64), TypeError, 'delta_bias: .* got torch.complex64'),
    ('u', zeros(D, L), ValueError, r'u: expected 3 dimensions \(B, D, L\), got shape \(4, 6\)'),
    ('delta', zeros(B, D, L + 1), ValueError, r'delta: .* = \(2, 4, 6\), got \(2, 4, 7\)'),
    ('z', zeros(B, D + 1, L), ValueError, r'z: .* = \(2, 4, 6\), got \(2, 5, 6\)'),
    ('A', zeros(D), ValueError, r'A: expected 2 dimensions \(D, N\), got shape \(4,\)'),
    ('A', zeros(D + 1, N), ValueError, r'A: .* = \(4, 3\), got \(5, 3\)'),
    ('A', zeros(D, 257), ValueError, 'A: expected 1 to 256 states N, got 257'),
    ('A', zeros(D, 0), ValueError, 'A: expected 1 to 256 states N, got 0'),
    ('B', zeros(N), ValueError, r'B: expected shape \(D, N\), \(B, N, L\) or \(B, G, N, L\)'),
    ('B', zeros(D, N + 1), ValueError, r'B: .*\(D, N\) = \(4, 3\), got \(4, 4\)'),
    ('C', zeros(B, N, L - 1), ValueError, r'C: .*\(B, N, L\) = \(2, 3, 6\), got \(2, 3, 5\)'),
    ('C', zeros(B, 2, N + 1, L), ValueError, r'C: .*= \(2, 2, 3, 6\), got \(2, 2, 4, 6\)'),
    ('B', zeros(B, 3, N, L), ValueError, 'B: expected a number of groups G that divides D = 4'),
    ('B', zeros(B, 0, N, L), ValueError, 'B: expected a number of groups G that divides D = 4'),
    ('D', zeros(D + 1), ValueError, r'D: .* = \(4,\), got \(5,\)'),
    ('delta_bias', zeros(D, 1), ValueError, r'delta_bias: .* = \(4,\), got \(4, 1\)'),
    ('B', zeros(B, N, L, device='meta'), ValueError, 'B: expected on cpu, where u is, got meta'),
    ('D', zeros(D, device='meta'), ValueError, 'D: expected on cpu, where u is, got meta'),
    ('C', zeros(B, N), ValueError, r'C: .*\(D, N\) = \(4, 3\), got \(2, 3\)'),
    ('C', zeros(N), ValueError, r'C: expected shape \(D, N\), \(B, N, L\) or \(B, G, N, L\)'),
    ('A', zeros(D, N, dtype=torch.float8_e5m2), TypeError, 'A: .* got torch.float8_e5m2'),
    ('A', zeros(D, N, dtype=torch.complex32), TypeError, 'A: .* got torch.complex32'),
    ('D', zeros(D, dtype=torch.float8_e5m2), TypeError, 'D: .* got torch.float8_e5m2'),
    ('delta_softplus', 'yes', TypeError, "delta_softplus: expected a bool, got 'yes'"),
    ('return_last_state', 0, TypeError, 'return_last_state: expected a bool, got 0'),
    ('reverse', 1, TypeError, 'reverse: expected a bool, got 1'),
    ('use_cuda_kernel', 1, TypeError, 'use_cuda_kernel: expected a bool, got 1'),
    ('discretization_method', 'euler', ValueError, "'euler'.*zoh.*rk4"),
    ('discretization_method', 'zho', ValueError, "^discretization_method: .*'zho'.*mean 'zoh'"),
    ('discretization_method', 'ZOH', ValueError, "did you mean 'zoh'"),
    ('u', zeros(B, D, L).to_sparse(), TypeError, 'u: expected a dense tensor, .*sparse_coo'),
    ('A', zeros(D, N).to_sparse_csr(), TypeError, 'A: expected a dense tensor, .*sparse_csr'),
    ('z', zeros(B, D, L).to_mkldnn(), TypeError, 'z: expected a dense tensor, got .*_mkldnn'),
    ('D', zeros(D).to_sparse(), TypeError, 'D: expected a dense tensor, got .*sparse_coo'),
    ('B', torch.nested.nested_tensor([zeros(N, L)] * B), TypeError, 'B: .* got a nested one'),
    ('C', torch.quantize_per_tensor(zeros(B, N, L), 1.0, 0, torch.quint8), TypeError,
     'C: .* got torch.quint8'),
    ('discretization_method', 0, ValueError, 'unknown discretization method 0'),
    ('discretization_method', ['zoh'], ValueError, r"unknown discretization method \['zoh'\]"),
    ('initial_state', 0.0, TypeError, 'initial_state: expected a tensor, got float'),
    ('initial_state', zeros(B, D, N, dtype=f64), TypeError,
     'initial_state: expected torch.float32, the dtype of the state, got torch.float64'),
    ('initial_state', zeros(B, D, N, dtype=torch.bfloat16), TypeError, 'initial_state: .*bfloat16'),
    ('initial_state', zeros(B, D, N, dtype=c64), TypeError, 'initial_state: .* got .*complex64'),
    ('initial_state', zeros(D, N), ValueError,
     r'initial_state: .*\(B, D, N\) = \(2, 4, 3\), got \(4, 3\)'),
    ('initial_state', zeros(B, N, D), ValueError, r'initial_state: .*got \(2, 3, 4\)'),
    ('initial_state', zeros(B, D, N, device='meta'), ValueError, 'initial_state: expected on cpu'),
    ('reset', [0], TypeError, 'reset: expected a tensor, got list'),
    ('reset', zeros(B, L), TypeError, 'reset: expected torch.bool, got torch.float32'),
    ('reset', zeros(B, L, dtype=torch.uint8), TypeError, 'reset: expected torch.bool, got .*uint8'),
    ('reset', zeros(L, dtype=torch.bool), ValueError, r'reset: .*\(B, L\) = \(2, 6\), got \(6,\)'),
    ('reset', zeros(B, D, L, dtype=torch.bool), ValueError, r'reset: .*got \(2, 4, 6\)'),
]  # fmt: skip


@pytest.mark.parametrize(
    ('name', 'value', 'error', 'message'),
    [pytest.param(*case, id=f'{case[0]}-{i}') for i, case in enumerate(BAD_INPUTS)],
)
@pytest.mark.parametrize('use_cuda_kernel', [None, False], ids=['kernel', 'reference'])
def test_bad_input(name, value, error, message, use_cuda_kernel):
    arguments = {'use_cuda_kernel': use_cuda_kernel, **make_inputs(dtype=f32), name: value}
    with pytest.raises(error, match=message):
        selective_scan_fn(**arguments)


@pytest.mark.parametrize('use_cuda_kernel', [None, False], ids=['kernel', 'reference'])
def test_a_method_with_two_first_steps_takes_no_state(use_cuda_kernel):
    message = "initial_state: 'poly' scans from both ends, whose states cannot both be given"
    options = dict(discretization_method='poly', use_cuda_kernel=use_cuda_kernel)
    with pytest.raises(ValueError, match=message):
        selective_scan_fn(**make_inputs(dtype=f32), initial_state=zeros(B, D, N), **options)


def test_groups_of_B_and_C_must_agree():
    inputs = make_inputs(dtype=f32) | {'B': zeros(B, 2, N, L), 'C': zeros(B, 4, N, L)}
    with pytest.raises(ValueError, match='C: expected as many groups as B, 2, or one, got 4'):
        selective_scan_fn(**inputs)


def test_bad_input_with_complex_A():
    inputs = make_inputs(dtype=f32, is_complex=True)
    with pytest.raises(ValueError, match='B: expected 2 L = 12 interleaved steps with complex A'):
        selective_scan_fn(**inputs | {'B': zeros(B, N, L)})
    with pytest.raises(TypeError, match=r'C: expected torch.complex64.* got torch.complex128'):
        selective_scan_fn(**inputs | {'C': zeros(B, N, L, dtype=torch.complex128)})
    with pytest.raises(TypeError, match=r'B: expected torch.complex64.* got torch.float32'):
        selective_scan_fn(**inputs | {'B': zeros(D, N)})


BAD_GROUPED_INPUTS = [
    ('u', zeros(B, 2, L), ValueError, r'u: expected 4 dimensions \(B, K, D, L\)'),
    ('delta', zeros(B, 3, D, L), ValueError, r'delta: .* = \(2, 2, 4, 6\), got \(2, 3, 4, 6\)'),
    ('A', zeros(D, N), ValueError, r'A: expected 3 dimensions \(K, D, N\)'),
    ('B', zeros(B, N, L), ValueError, r'B: .*\(K, D, N\) = \(2, 4, 3\)'),
    ('C', zeros(B, 1, N, L), ValueError, r'C: .*\(B, K, N, L\) = \(2, 2, 3, 6\)'),
    ('D', zeros(D), ValueError, r'D: .* = \(2, 4\), got \(4,\)'),
    ('reverse', (True,), ValueError, 'reverse: expected 2 flags, one per group, got 1'),
    ('reverse', (0, 1), TypeError, 'reverse: expected a bool, got 0'),
    ('discretization_method', 'ZOH', ValueError, "unknown discretization method 'ZOH'"),
    (
        'initial_state',
        zeros(B, D, N),
        ValueError,
        r'initial_state: .*\(B, K, D, N\) = \(2, 2, 4, 3\)',
    ),
    ('reset', zeros(B, 2, L, dtype=torch.bool), ValueError, r'reset: .*\(B, L\) = \(2, 6\)'),
]


@pytest.mark.parametrize(
    ('name', 'value', 'error', 'message'),
    [pytest.param(*case, id=f'{case[0]}-{i}') for i, case in enumerate(BAD_GROUPED_INPUTS)],
)
def test_bad_grouped_input(name, value, error, message):
    inputs = grouped_inputs(groups=2, dtype=f32)
    with pytest.raises(error, match=message):
        selective_scan_grouped_fn(**inputs | {name: value})


@pytest.fixture
def backends(monkeypatch):
    """Records which backend runs, in order; the log of 'said once' starts empty."""
    taken = []
    reference, kernel = selective_scan.grouped_scan_ref, torch.ops.vim_mm.selective_scan_fwd
    chunked = selective_scan.chunked_scan

    def record(name, function):
        def recorder(*args, **kwargs):
            taken.append(name)
            return function(*args, **kwargs)

        return recorder

    monkeypatch.setattr(selective_scan, 'grouped_scan_ref', record('reference', reference))
    monkeypatch.setattr(selective_scan, 'chunked_scan', record('torch', chunked))
    monkeypatch.setattr(torch.ops.vim_mm, 'selective_scan_fwd', record('kernel', kernel))
    for variable in ('VIM_USE_CUDA_KERNEL', 'VIM_MM_BACKEND'):
        monkeypatch.delenv(variable, raising=False)
    choice._say_once.cache_clear()
    return taken


@pytest.mark.parametrize(
    ('argument', 'variable', 'backend'),
    [
        (None, None, 'kernel'),
        (None, '', 'kernel'),
        (None, '0', 'reference'),
        (False, None, 'reference'),
        (False, '1', 'reference'),
    ],
)
def test_backend_on_the_cpu(backends, monkeypatch, argument, variable, backend):
    if variable is not None:
        monkeypatch.setenv('VIM_USE_CUDA_KERNEL', variable)
    selective_scan_fn(**make_inputs(), use_cuda_kernel=argument)
    selective_scan_grouped_fn(**grouped_inputs(groups=1), reverse=(True,), use_cuda_kernel=argument)
    assert backends == [backend, backend]


@pytest.mark.parametrize(('argument', 'variable'), [(True, None), (True, '0'), (None, '1')])
def test_cuda_kernel_demanded_on_the_cpu(backends, monkeypatch, argument, variable):
    if variable is not None:
        monkeypatch.setenv('VIM_USE_CUDA_KERNEL', variable)
    source = 'VIM_USE_CUDA_KERNEL=1' if argument is None else 'use_cuda_kernel=True'
    with pytest.raises(RuntimeError, match=f'^{source}: .*demanded, but the tensors are on cpu'):
        selective_scan_fn(**make_inputs(), use_cuda_kernel=argument)
    assert backends == []


def test_unknown_value_of_the_variable(backends, monkeypatch):
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', 'yes')
    with pytest.raises(ValueError, match="VIM_USE_CUDA_KERNEL: expected 1, 0 or empty, got 'yes'"):
        selective_scan_fn(**make_inputs())
    assert backends == []


@pytest.mark.slow
def test_the_variable_is_frozen_into_a_compiled_graph(monkeypatch):
    graphs = []

    def backend(module, example_inputs):
        graphs.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    torch.compiler.reset()
    compiled = torch.compile(selective_scan_fn, fullgraph=True, backend=backend)
    inputs = make_inputs()
    for variable in ('0', '', '1'):
        monkeypatch.setenv('VIM_USE_CUDA_KERNEL', variable)
        compiled(**inputs)
    assert len(graphs) == 1
    assert not any('vim_mm' in node for node in graphs[0])


def test_the_variable_is_read_at_each_eager_call(backends, monkeypatch):
    for variable in ('0', '', '0'):
        monkeypatch.setenv('VIM_USE_CUDA_KERNEL', variable)
        selective_scan_fn(**make_inputs())
    assert backends == ['reference', 'kernel', 'reference']


def test_without_the_extension(backends, monkeypatch, caplog):
    """PyTorch's operators take over, say so once, and why."""
    monkeypatch.setattr(library, 'MISSING', 'vim_mm._C is not built')
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            selective_scan_fn(**make_inputs())
    assert backends == ['torch'] * 3
    assert [record.getMessage() for record in caplog.records] == [
        'selective scan on cpu: PyTorch operators, because vim_mm._C is not built'
    ]


@pytest.mark.parametrize(
    ('has_kernel', 'dtype', 'wish', 'outcome'),
    [
        (True, f32, dict(), 'native'),
        (True, f32, dict(use_cuda_kernel=True), 'native'),
        (True, f32, dict(use_cuda_kernel=False), 'reference'),
        (True, f32, dict(backend='triton'), 'triton'),
        (True, f32, dict(is_complex=True), 'native'),
        (True, f64, dict(), 'torch'),
        (False, f32, dict(), 'triton'),
        (False, f32, dict(is_complex=True), 'torch'),
        (False, f64, dict(), 'torch'),
        (True, f64, dict(use_cuda_kernel=True), RuntimeError('the CUDA scan has no float64')),
        (False, f32, dict(use_cuda_kernel=True), RuntimeError('vim_mm._C has no scan for cuda')),
        (False, f32, dict(backend='native'), RuntimeError("'native' was demanded, but vim_mm._C")),
        (True, f64, dict(backend='triton'), RuntimeError('the Triton scan has no float64')),
    ],
)
def test_backend_on_cuda(backends, monkeypatch, has_kernel, dtype, wish, outcome):
    """The choice for CUDA tensors depends on device type and dtype only: no GPU is needed."""
    monkeypatch.setattr(library, 'has_kernel', lambda device_type: has_kernel)
    monkeypatch.setattr(library, 'MISSING', None)
    monkeypatch.setattr(triton, 'MISSING', None)
    wish = dict(backend=None, use_cuda_kernel=None) | wish
    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome), match=str(outcome)):
            choice.chosen_backend(device_type='cuda', dtype=dtype, **wish)
    else:
        assert choice.chosen_backend(device_type='cuda', dtype=dtype, **wish) == outcome


def test_without_triton_a_gpu_takes_operators_of_torch(backends, monkeypatch):
    monkeypatch.setattr(library, 'MISSING', 'vim_mm._C is not built')
    monkeypatch.setattr(triton, 'MISSING', 'Triton is not installed')
    assert path_of('cuda') == ('torch', 'vim_mm._C is not built')
    assert path_of('cuda', backend='triton') == ('error', 'Triton is not installed')


def test_a_library_that_is_not_built_for_the_card(backends, monkeypatch):
    reason = 'vim_mm._C is compiled for 8.0, and the GPU needs 9.0'
    monkeypatch.setattr(library, 'has_kernel', lambda device_type: True)
    monkeypatch.setattr(library, 'MISSING', None)
    monkeypatch.setattr(library, 'why_not_on_card', lambda: reason)
    monkeypatch.setattr(triton, 'MISSING', None)
    assert path_of('cuda') == ('triton', reason)
    assert path_of('cuda', use_cuda_kernel=True) == ('error', reason)


@pytest.mark.parametrize('backend', ['native', 'torch', 'reference'])
def test_a_named_backend_is_taken(backends, monkeypatch, backend):
    """By the argument, by the variable, and by the argument against the variable."""
    taken = {'native': 'kernel'}.get(backend, backend)
    selective_scan_fn(**make_inputs(), backend=backend)
    monkeypatch.setenv('VIM_MM_BACKEND', backend)
    selective_scan_fn(**make_inputs())
    selective_scan_grouped_fn(**grouped_inputs(groups=1), reverse=(True,))
    monkeypatch.setenv('VIM_MM_BACKEND', 'triton')
    monkeypatch.setenv('VIM_USE_CUDA_KERNEL', '1')
    selective_scan_fn(**make_inputs(), backend=backend)
    assert backends == [taken] * 4
    assert path_of(backend=backend) == (backend, f'backend={backend} asks for it')


@pytest.mark.parametrize(
    ('wish', 'variables', 'message'),
    [
        (dict(backend='triton', use_cuda_kernel=True), {}, 'backend=triton and use_cuda_kernel=T'),
        (dict(backend='torch', use_cuda_kernel=False), {}, 'backend=torch and use_cuda_kernel=F'),
        ({}, {'VIM_MM_BACKEND': 'native', 'VIM_USE_CUDA_KERNEL': '0'}, 'VIM_MM_BACKEND=native and'),
        (dict(backend='cuda'), {}, r"backend: expected one of \['native', .*, got 'cuda'"),
        ({}, {'VIM_MM_BACKEND': 'fast'}, "VIM_MM_BACKEND: expected one of .*, got 'fast'"),
    ],
)
def test_contradictions_and_unknown_backends(backends, monkeypatch, wish, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        selective_scan_fn(**make_inputs(), **wish)
    assert backends == []


def test_two_words_for_the_same_are_no_contradiction(backends):
    selective_scan_fn(**make_inputs(), backend='reference', use_cuda_kernel=False)
    assert backends == ['reference']
    with pytest.raises(RuntimeError, match='the tensors are on cpu'):
        selective_scan_fn(**make_inputs(), backend='native', use_cuda_kernel=True)


@pytest.mark.skipif(triton.MISSING is not None, reason=str(triton.MISSING))
def test_triton_on_the_cpu_is_an_error(backends, monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    with pytest.raises(RuntimeError, match="'triton' was demanded, but Triton has no code for cpu"):
        selective_scan_fn(**make_inputs(dtype=f32), backend='triton')


@pytest.mark.parametrize('method', METHODS)
def test_a_failing_kernel_fails(backends, monkeypatch, method):
    """Its error reaches the caller; no other method, no other path takes over."""

    def broken(*args):
        raise RuntimeError('the kernel failed')

    monkeypatch.setattr(torch.ops.vim_mm, 'selective_scan_fwd', broken)
    with pytest.raises(RuntimeError, match='the kernel failed'):
        selective_scan_fn(**make_inputs(), discretization_method=method)
    assert backends == []


@pytest.mark.skipif(library.MISSING is not None, reason=str(library.MISSING))
def test_what_an_operator_throws_comes_whole():
    """The number of the line is missing where two copies of the C++ library get mixed."""
    x, A, B = zeros(1, 1, D, L), zeros(1, D, N), zeros(1, 1, N, L)
    scan = torch.ops.vim_mm.selective_scan_fwd
    with pytest.raises(RuntimeError, match=r'arguments\.h:\d+, vim_mm: wrong shape of delta$'):
        scan(x, x[..., 1:], A, B, B, *(None,) * 5, True, 0, [0])
