"""The scan of JAX on a GPU: with the kernels of CUDA, on XLA's stream, as on the CPU."""

import pytest
import torch

jax = pytest.importorskip('jax', reason='JAX is not installed (the extra jax)')

import numpy as np  # noqa: E402

from tests.jax import bridge  # noqa: E402
from tests.ops.inputs import make_inputs  # noqa: E402
from vim_mm.jax import selective_scan_fn  # noqa: E402
from vim_mm.ops import METHODS, library  # noqa: E402


def gpu():
    """The first one of JAX, None if there is none."""
    try:
        return jax.devices('cuda')[0]
    except RuntimeError:  # how it says that it has no such backend
        return None


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        gpu() is None or not library.has_kernel('cuda'),
        reason='needs JAX for CUDA, a GPU and the compiled CUDA kernel',
    ),
]


@pytest.mark.parametrize('method', METHODS)
@pytest.mark.parametrize('mapped', [False, True], ids=['plain', 'vmap'])
def test_equals_the_cpu(method, mapped):
    inputs = make_inputs(batch=3, channels=6, length=150, states=16, dtype=torch.float32)
    arrays = {name: np.asarray(bridge.to_jax(x)) for name, x in inputs.items()}

    def scan(arrays):
        return selective_scan_fn(
            **arrays,
            delta_softplus=True,
            return_last_state=True,
            discretization_method=method,
            reverse=True,
        )

    def loss(arrays):
        if not mapped:
            results = scan(arrays)
        else:  # over the items of the batch, which keep a batch of one
            axes = {name: 0 if x.ndim == 3 else None for name, x in arrays.items()}
            parts = {name: x[:, None] if x.ndim == 3 else x for name, x in arrays.items()}
            results = jax.vmap(scan, in_axes=(axes,))(parts)
        weights = (jax.numpy.cos(jax.numpy.arange(x.size)).reshape(x.shape) for x in results)
        return sum((x * w).sum() for x, w in zip(results, weights)), results

    def on(device):
        given = jax.device_put(arrays, device)
        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, has_aux=True))(given))

    (_, results), grads = on(gpu())
    (_, expected), expected_grads = on(jax.devices('cpu')[0])
    for value, truth in zip((*results, *grads.values()), (*expected, *expected_grads.values())):
        assert np.abs(value - truth).max() <= 2e-5 * np.abs(truth).max()


def test_the_cuda_scan_has_no_float64(float64_allowed):
    inputs = make_inputs(length=20, dtype=torch.float64)
    arrays = {name: np.asarray(bridge.to_jax(x)) for name, x in inputs.items()}
    with pytest.raises(Exception, match='the CUDA scan has no float64'):
        jax.block_until_ready(selective_scan_fn(**jax.device_put(arrays, gpu())))
