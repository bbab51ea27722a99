"""Times the compiled scan as JAX calls it beside the same scan written in JAX.

    python benchmarks/benchmark_jax.py --threads 1 --markdown jax.md
    python benchmarks/benchmark_jax.py --shapes 1x192x4096 --clock wall

``ffi`` is ``vim_mm.jax.selective_scan_fn``; ``associative`` is ``jax.lax.associative_scan`` over
time, ``sequential`` is ``jax.lax.scan``: all with bias, softplus, skip connection and gate, `zoh`,
float32, inside ``jax.jit``. ``torch`` is the operator of PyTorch, with the same kernels. The
gradient is of all eight inputs and contains the forward pass. All take turns, and the fastest call
of each counts; before that their outputs and gradients are compared. Seconds are those of the
processor, of all threads together, unless ``--clock wall``; with ``--device cuda`` they are those
that a caller waits until the GPU is done. ``--threads`` holds for PyTorch, and so for ``ffi``; XLA
takes a thread for every processor that this process may use (``taskset`` limits them).
"""

import argparse
from collections.abc import Callable
from typing import Any

from _command_line import add_run_arguments, end, parse_first, parser_of

SHAPES = [(1, 192, 196), (32, 60, 512), (2, 384, 1024), (1, 192, 4096)]


def shape(word: str) -> tuple[int, int, int]:
    """'2x384x1024' as (B, D, L)."""
    try:
        batch, channels, length = map(int, word.split('x'))
    except ValueError:
        raise argparse.ArgumentTypeError(f'expected BxDxL, got {word!r}') from None
    return batch, channels, length


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--shapes', nargs='+', type=shape, default=SHAPES, metavar='BxDxL')
    parser.add_argument('--clock', choices=['processor', 'wall'], default='processor')
    add_run_arguments(parser)
    args = parser.parse_args()
    if args.device == 'cuda':
        args.clock = 'wall'
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from time import perf_counter, process_time

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

from benchmarks.measure.tables import figures, markdown_table, publish
from benchmarks.measure.timing import ScanShape, describe, environment, make_inputs
from vim_mm.jax import selective_scan_fn
from vim_mm.ops import selective_scan_fn as torch_scan
from vim_mm.progress import progress

FORMS = ('ffi', 'torch', 'associative', 'sequential')
# Of results in float32, relative to the largest.
TOLERANCE = 1e-3


def ffi(arrays: dict[str, Array]) -> Array:
    return selective_scan_fn(**arrays, delta_softplus=True)


def associative(arrays: dict[str, Array]) -> Array:
    """All states [B, D, L, N] at once, by pairs of steps."""

    def after(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return second[0] * first[0], second[0] * first[1] + second[1]

    u, A, B, C = (arrays[name] for name in 'uABC')
    dt = step_sizes(arrays)
    a_bar = jnp.exp(dt[..., None] * A[:, None])
    drive = (dt * u)[..., None] * B[:, 0].swapaxes(1, 2)[:, None]
    _, states = jax.lax.associative_scan(after, (a_bar, drive), axis=2)
    return skip_and_gate(jnp.einsum('bdln,bnl->bdl', states, C[:, 0]), arrays)


def sequential(arrays: dict[str, Array]) -> Array:
    """One state [B, D, N], step by step."""
    A = arrays['A']

    def step(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        dt, u, B, C = now
        state = jnp.exp(dt[..., None] * A) * state + (dt * u)[..., None] * B[:, None]
        return state, jnp.einsum('bdn,bn->bd', state, C)

    u, B, C = arrays['u'], arrays['B'][:, 0], arrays['C'][:, 0]
    in_time = tuple(jnp.moveaxis(x, -1, 0) for x in (step_sizes(arrays), u, B, C))
    first = jnp.zeros((*u.shape[:2], A.shape[1]), u.dtype)
    _, y = jax.lax.scan(step, first, in_time)
    return skip_and_gate(jnp.moveaxis(y, 0, -1), arrays)


def step_sizes(arrays: dict[str, Array]) -> Array:
    return jax.nn.softplus(arrays['delta'] + arrays['delta_bias'][:, None])


def skip_and_gate(y: Array, arrays: dict[str, Array]) -> Array:
    return (y + arrays['D'][:, None] * arrays['u']) * jax.nn.silu(arrays['z'])


def of_jax(
    form: Callable[[dict[str, Array]], Array], inputs: dict[str, np.ndarray], weight: np.ndarray
) -> tuple[Callable[[], Array], Callable[[], dict[str, Array]]]:
    """Calls that wait for the output, and for all gradients of its sum with weights.

    The sum is asked for too: XLA would leave out a forward pass that no gradient needs.
    """
    arrays = {name: jnp.asarray(x) for name, x in inputs.items()}
    forward = jax.jit(form)
    gradient = jax.jit(jax.value_and_grad(lambda arrays: (form(arrays) * weight).sum()))
    return (
        lambda: jax.block_until_ready(forward(arrays)),
        lambda: jax.block_until_ready(gradient(arrays))[1],
    )


def of_torch(
    inputs: dict[str, np.ndarray], weight: np.ndarray, device: str
) -> tuple[Callable[[], torch.Tensor], Callable[[], dict[str, torch.Tensor]]]:
    """Likewise."""
    tensors = {
        name: torch.tensor(x, device=device, requires_grad=True) for name, x in inputs.items()
    }
    weights = torch.tensor(weight, device=device)

    def wait() -> None:
        if device == 'cuda':
            torch.cuda.synchronize()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            out = torch_scan(**tensors, delta_softplus=True)
        wait()
        return out

    def gradient() -> dict[str, torch.Tensor]:
        out = torch_scan(**tensors, delta_softplus=True)
        grads = torch.autograd.grad(out, [*tensors.values()], weights)
        wait()
        return dict(zip(tensors, grads))

    return forward, gradient


def on_host(x: Array | torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def check(results: dict[str, dict[str, Any]]) -> None:
    """All forms have the values of the first, or RuntimeError."""
    first = results[FORMS[0]]
    for form, values in results.items():
        for name, value in values.items():
            expected = on_host(first[name])
            error = np.abs(on_host(value) - expected).max() / np.abs(expected).max()
            if not error <= TOLERANCE:
                raise RuntimeError(f'{form}: {name} is off by {error:.1e}')


def measure(
    sizes: tuple[int, int, int], trials: int, clock: Callable[[], float], device: str
) -> dict[str, Any]:
    """Seconds of the fastest call of each form, by pass."""
    tensors = make_inputs(ScanShape(*sizes), 'cpu')
    inputs = {name: x.detach().numpy() for name, x in tensors.items()}
    weight = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    calls = {
        form.__name__: of_jax(form, inputs, weight) for form in (ffi, associative, sequential)
    } | {'torch': of_torch(inputs, weight, device)}
    check({name: {'out': calls[name][0](), **calls[name][1]()} for name in FORMS})
    record: dict[str, Any] = {'shape': sizes}
    for number, name in enumerate(('forward', 'gradient')):
        times: dict[str, list[float]] = {form: [] for form in FORMS}
        for _ in range(trials):
            for form in FORMS:
                start = clock()
                calls[form][number]()
                times[form].append(clock() - start)
        record[name] = {form: min(values) for form, values in times.items()}
    return record


def table(records: list[dict[str, Any]]) -> str:
    """Milliseconds, with the time over that of ``ffi`` in brackets."""
    rows = []
    for record in records:
        for name in ('forward', 'gradient'):
            times = record[name]
            cells = {
                form: figures(1e3 * times[form])
                + ('' if form == 'ffi' else f' ({figures(times[form] / times["ffi"])})')
                for form in FORMS
            }
            rows.append({'(B, D, L)': str(record['shape']), 'pass': name} | cells)
    return markdown_table(rows)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    jax.config.update('jax_platforms', args.device)
    jax.config.update('jax_default_matmul_precision', 'highest')  # no TF32
    facts = environment(args.device) | {'jax': jax.__version__, 'clock': args.clock}
    clock = process_time if args.clock == 'processor' else perf_counter
    records = []
    for sizes in progress(args.shapes, 'shapes'):
        records.append(measure(sizes, args.n_trials, clock, args.device))
    result = {'environment': facts, 'units': 'seconds', 'records': records}
    publish(args, f'{describe(facts)}\n\nMilliseconds:\n\n{table(records)}', result)


if __name__ == '__main__':
    end(main, ARGUMENTS)
