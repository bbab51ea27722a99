"""The scan of JAX against golden vectors, the PyTorch operator, differences, and vmap as a loop."""

from functools import partial

import pytest
import torch

jax = pytest.importorskip('jax', reason='JAX is not installed (the extra jax)')

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.test_util import check_grads  # noqa: E402

from tests.jax import bridge  # noqa: E402
from tests.ops import golden  # noqa: E402
from tests.ops.inputs import inputs_in, make_inputs, results_and_gradients  # noqa: E402
from vim_mm.jax import selective_scan_fn  # noqa: E402
from vim_mm.ops import METHODS  # noqa: E402
from vim_mm.ops import selective_scan_fn as of_torch  # noqa: E402

each_method = pytest.mark.parametrize('method', METHODS)


pytestmark = pytest.mark.usefixtures('float64_allowed')


def arrays_of(**sizes):
    return {name: bridge.to_jax(x) for name, x in make_inputs(**sizes).items()}


def loss_of(arrays, **options):
    """A number that depends on both results."""
    out, last_state = selective_scan_fn(**arrays, return_last_state=True, **options)
    return jnp.sin(out).sum() + jnp.sin(last_state.real).sum() + last_state.imag.sum()


def assert_same_tree(tree, expected, tolerance=1e-13):
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance), tree, expected
    )


# Kernels are those of the PyTorch operator: a situation that has every option suffices at first.
CASES = [
    pytest.param(case, marks=() if case.endswith('reverse') else pytest.mark.slow)
    for case in golden.CASES
]


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize(('dtype', 'tolerance'), golden.TOLERANCES)
def test_golden_vectors(case, dtype, tolerance):
    golden.assert_reproduced(bridge.scan, case, dtype, tolerance)


@each_method
def test_same_bits_as_the_operator_of_torch(method):
    """Every form of B and C, missing inputs, mixed dtypes; results and gradients."""
    mixed = inputs_in(torch.bfloat16) | {'B': inputs_in(torch.float16)['B']}
    grouped = make_inputs(form='constant_B_grouped_C', dtype=torch.float32)
    few = make_inputs()
    for name in ('D', 'z', 'delta_bias'):
        del few[name]
    for inputs in (mixed, grouped, few):
        options = dict(delta_softplus=True, discretization_method=method, reverse=True)
        results = results_and_gradients(bridge.scan, inputs, **options)
        expected = results_and_gradients(of_torch, inputs, **options)
        for name, value in results.items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name]), name


@each_method
def test_states_at_both_ends(method):
    inputs, options = make_inputs(), dict(discretization_method=method, delta_softplus=True)
    if METHODS[method].causal:
        inputs['initial_state'] = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    options['reset'] = torch.rand(2, 6) < 0.4
    results = results_and_gradients(bridge.scan, inputs, **options)
    for name, expected in results_and_gradients(of_torch, inputs, **options).items():
        assert torch.equal(results[name], expected), name


@pytest.mark.slow
def test_vmap_over_resets():
    arrays = arrays_of(batch=1)
    resets = jnp.asarray(np.random.default_rng(0).random((3, 1, 6)) < 0.4)
    one = jax.value_and_grad(partial(loss_of, discretization_method='poly'))
    values = jax.vmap(lambda reset: one(arrays, reset=reset))(resets)
    loop = [one(arrays, reset=reset) for reset in resets]
    assert_same_tree(values, jax.tree.map(lambda *x: jnp.stack(x), *loop))


@pytest.mark.slow
@pytest.mark.parametrize('is_complex', [False, True], ids=['real', 'complex'])
def test_gradients_are_differences(is_complex):
    """JAX's own check, and so its own convention of complex gradients."""
    arrays = arrays_of(batch=1, channels=2, length=3, states=2, is_complex=is_complex)
    loss = partial(loss_of, delta_softplus=True, discretization_method='foh')
    check_grads(loss, (arrays,), order=1, modes=['rev'])


@pytest.mark.parametrize(
    'mapped',
    [
        pytest.param(('u', 'delta', 'B', 'C', 'z'), marks=pytest.mark.slow),
        pytest.param(('u', 'A'), marks=pytest.mark.slow),
        ('C', 'delta_bias'),
    ],
    ids='-'.join,
)
def test_vmap_is_a_loop(mapped):
    """Of values and of gradients, also of what is not mapped."""
    entries = [arrays_of(channels=3, length=5) for _ in range(3)]
    arrays = entries[0] | {name: jnp.stack([e[name] for e in entries]) for name in mapped}
    axes = {name: 0 if name in mapped else None for name in arrays}
    one = jax.value_and_grad(partial(loss_of, discretization_method='poly'))
    values = jax.jit(jax.vmap(one, in_axes=(axes,)))(arrays)
    loop = [one(arrays | {name: e[name] for name in mapped}) for e in entries]
    assert_same_tree(values, jax.tree.map(lambda *x: jnp.stack(x), *loop))

    def total(arrays):
        return jax.vmap(partial(loss_of, discretization_method='poly'), in_axes=(axes,))(arrays)

    shared = jax.jit(jax.grad(lambda arrays: total(arrays).sum()))(arrays)
    expected = {
        name: values[1][name] if name in mapped else values[1][name].sum(0) for name in arrays
    }
    assert_same_tree(shared, expected)


@pytest.mark.slow
def test_vmap_in_vmap():
    """Two dimensions in front, one of them of A alone."""
    arrays = arrays_of(channels=3, length=5)
    u = jnp.stack([arrays['u'], 2 * arrays['u']])
    A = jnp.stack([arrays['A'], 3 * arrays['A'], arrays['A'] - 1])

    def scan(u, A):
        return selective_scan_fn(**arrays | {'u': u, 'A': A})

    nested = jax.vmap(jax.vmap(scan, in_axes=(None, 0)), in_axes=(0, None))(u, A)
    assert_same_tree(nested, jnp.stack([jnp.stack([scan(v, a) for a in A]) for v in u]))


@pytest.mark.slow
def test_rematerialized_and_without_optional_results():
    arrays = arrays_of()

    def loss(arrays):
        return selective_scan_fn(**arrays).sum()

    assert_same_tree(jax.grad(jax.checkpoint(loss))(arrays), jax.grad(loss)(arrays))


@pytest.mark.slow
@pytest.mark.parametrize('sizes', [dict(batch=0), dict(length=0)], ids=str)
def test_empty(sizes):
    arrays = arrays_of(**sizes)
    grads = jax.grad(loss_of)(arrays)
    assert {name: g.shape for name, g in grads.items()} == {n: x.shape for n, x in arrays.items()}
    assert not any(jnp.any(g) for g in grads.values())


@pytest.mark.parametrize(
    ('error', 'message', 'change'),
    [
        (TypeError, r'u: expected an array, got list', lambda a: {'u': [1.0]}),
        (
            TypeError,
            r'u: expected float32.* got torch.int32',
            lambda a: {'u': jnp.zeros(3, 'int32')},
        ),
        (ValueError, r'C: expected shape \(B, N, L\) = \(2, 3, 6\)', lambda a: {'C': a['C'][:1]}),
        (
            ValueError,
            r'unknown discretization method',
            lambda a: {'discretization_method': 'euler'},
        ),
        (TypeError, r'reverse: expected a bool, got 1', lambda a: {'reverse': 1}),
        (TypeError, r'reset: expected torch.bool', lambda a: {'reset': jnp.zeros((2, 6))}),
        (
            ValueError,
            r'initial_state: expected shape \(B, D, N\) = \(2, 4, 3\)',
            lambda a: {'initial_state': a['u']},
        ),
    ],
)
def test_mistakes_are_named(error, message, change):
    arrays = arrays_of()
    with pytest.raises(error, match=message):
        selective_scan_fn(**arrays | change(arrays))


@pytest.mark.slow
def test_what_has_no_derivative_says_so():
    arrays = arrays_of(batch=1, channels=1)
    with pytest.raises(TypeError, match='custom_vjp'):
        jax.jvp(loss_of, (arrays,), (arrays,))
    with pytest.raises(ValueError, match=r'vim_mm_scan_backward.*cannot be differentiated'):
        jax.grad(lambda a: sum(g.sum() for g in jax.grad(loss_of)(a).values()))(arrays)
