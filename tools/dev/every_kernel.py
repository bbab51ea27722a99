"""Runs every CUDA kernel once, forward and backward, for a tool that watches kernels.

    compute-sanitizer --tool memcheck python tools/dev/every_kernel.py
    compute-sanitizer --tool racecheck python tools/dev/every_kernel.py --what scan --rows six
    compute-sanitizer --tool racecheck python tools/dev/every_kernel.py --what block

A case of the scan is a method, a layout of its tensors and as many rows as choose one of the block
shapes; half of a method's cases are scanned in reverse. A case of the block is an operator around
the scan, in float32 and bfloat16, whose kernels float16 has as well. Results are not looked at:
that is what tests do.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

from _command_line import add_debug, add_methods, end, parse_first, parser_of

# By what chooses kernels (csrc/cuda/dispatch/configurations.cuh) on a GPU of about 132
# multiprocessors: batch and channels. Last chunks of few steps have a launch of their own in `most`
# and `tails`. Two, three or four blocks share a chunk in the last three. Time is split in `splits`,
# which has more steps.
ROWS = {
    'six': (2, 60),
    'eight': (2, 64),
    'six_sweep': (10, 60),
    'eight_sweep': (10, 64),
    'segments': (22, 60),
    'few': (40, 60),
    'most': (72, 60),
    'tails': (128, 64),
    'splits': (1, 12),
    'shared_by_2': (2, 72),
    'shared_by_3': (2, 130),
    'shared_by_4': (2, 200),
}
STEPS = {'splits': 8192}  # besides those of the layout
# dtype, and the length: rows are aligned as it says.
ALIGNED = {
    'bf16_aligned': ('bfloat16', 196),
    'bf16_odd': ('bfloat16', 197),
    'fp16_aligned': ('float16', 136),
    'fp32_aligned': ('float32', 200),
    'fp32_odd': ('float32', 197),
}
# For the general kernels, and for those of scans with an initial state and resets: with the fewest
# rows, and where blocks share a chunk.
GENERAL = ('strided', 'complex', 'constant')
LAYOUTS = (*ALIGNED, *GENERAL)
STATES = 16

# The block. By what chooses kernels in csrc/cuda/block: how many steps, channels or entries a
# vector has, the taps of a convolution, by fours, the rank of step sizes, by sixteens up to 64,
# and the dtypes.
DTYPES = ('float32', 'bfloat16')
# Rows and channels of a norm: with parts of the weight's gradient for each of some blocks, or
# blocks of fewer warps.
NORMS = {'quads': (300, 64), 'singles': (5, 7), 'few_warps': (5, 1800)}
# Changes of MIXER: arguments of vim_mm.models.Mamba, and of run_mixer below.
MIXER = dict(
    d_model=16, expand=1.5, dt_rank=3, bias=True, norm='update', steps=64, reset=False, train=True
)
MIXERS: dict[str, dict[str, Any]] = {
    'none': dict(bimamba_type='none', norm=None, bias=False, conv_bias=False),
    'v1_quads': dict(bimamba_type='v1', norm='first', steps=68),
    'v2_odd': dict(d_model=23, expand=1, d_state=5, steps=67),
    'taps_8': dict(d_conv=8, dt_rank=20),
    'taps_5_quads': dict(d_conv=5, dt_rank=40, bimamba_type='v1', norm='first', steps=68),
    'taps_6_odd': dict(
        d_conv=6, bimamba_type='none', discretization_method='foh', norm=None, steps=67
    ),
    'reset': dict(dt_rank=60, reset=True),
    'reset_quads': dict(dt_rank=70, bimamba_type='v1', steps=68, reset=True),
    'reset_odd': dict(bimamba_type='none', norm='first', steps=67, reset=True),
    'reset_taps_8': dict(d_conv=8, norm=None, reset=True),
    'reset_taps_8_quads': dict(d_conv=8, bimamba_type='none', steps=68, reset=True),
    'reset_taps_8_odd': dict(
        d_conv=8, bimamba_type='v1', discretization_method='poly', steps=67, reset=True
    ),
    'poly': dict(discretization_method='poly'),
    'poly_odd': dict(bimamba_type='v1', discretization_method='poly', steps=67),
    'one_step': dict(steps=1),
    'low_precision': dict(stored='activations', steps=200),  # parameters and the residual stream
    'fp64_parameters': dict(stored='float64', d_state=20),
    'inference': dict(train=False),
}
WHAT = ('scan', 'block')


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument('--what', nargs='+', choices=WHAT, default=WHAT, help='default: both')
    add_methods(parser)
    for name, choices in (('--layouts', LAYOUTS), ('--rows', (*ROWS,))):
        parser.add_argument(
            name, nargs='+', choices=choices, default=choices, help='of the scan (default: all)'
        )
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from vim_mm.models import Mamba
from vim_mm.models.fused import fused_arguments
from vim_mm.ops import selective_scan_fn
from vim_mm.ops.block import add_rms_norm, fused_block, fused_mixer
from vim_mm.ops.discretization import METHODS, method_id

Cases = Iterator[tuple[str, Callable[[], None]]]


def make_inputs(layout: str, rows: str) -> dict[str, torch.Tensor]:
    """Arguments of ``selective_scan_fn`` on the GPU, requiring grad."""
    batch, channels = ROWS[rows]
    name, length = ALIGNED.get(layout, ('float32', 100))
    length += STEPS.get(rows, 0)
    dtype = getattr(torch, name)
    states = torch.complex64 if layout == 'complex' else torch.float32
    of_B = (channels, STATES) if layout == 'constant' else (batch, STATES, length)
    inputs = {name: torch.randn(batch, channels, length).to(dtype) for name in ('u', 'delta', 'z')}
    inputs['A'] = -torch.rand(channels, STATES, dtype=states)
    for name in ('B', 'C'):
        inputs[name] = torch.randn(of_B, dtype=states).to(dtype if layout in ALIGNED else states)
    for name in ('D', 'delta_bias'):
        inputs[name] = torch.randn(channels)
    if layout == 'strided':
        for name in ('u', 'delta', 'z', 'B', 'C'):
            inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    return {name: x.cuda().requires_grad_() for name, x in inputs.items()}


def add_states(inputs: dict[str, torch.Tensor], method: str) -> None:
    """Resets, and of a causal method an initial state."""
    (batch, channels, length), A = inputs['u'].shape, inputs['A']
    inputs['reset'] = torch.rand(batch, length, device='cuda') < 0.05
    if METHODS[method].causal:
        inputs['initial_state'] = A.new_ones(batch, channels, STATES).requires_grad_()


def run_scan(layout: str, rows: str, states: str, method: str, reverse: bool) -> None:
    inputs = make_inputs(layout, rows)
    if states:
        add_states(inputs, method)
    results = selective_scan_fn(
        **inputs,
        delta_softplus=True,
        return_last_state=True,
        reverse=reverse,
        discretization_method=method,
        use_cuda_kernel=True,
    )
    differentiate(*results)


def differentiate(*results: torch.Tensor) -> None:
    torch.autograd.backward(results, [torch.ones_like(x) for x in results])


def scan_cases(args: argparse.Namespace) -> Cases:
    cases = [
        (rows, layout, states, method)
        for rows, layout, states, method in product(
            args.rows, args.layouts, ('', 'with_states'), args.methods
        )
        if (layout in ALIGNED and not states) or rows in (args.rows[0], 'shared_by_2')
    ]
    for i, (rows, layout, states, method) in enumerate(cases):
        reverse = (i + i // len(args.methods)) % 2 == 1
        name = ' '.join(filter(None, (method, layout, rows, states)))
        yield name, partial(run_scan, layout, rows, states, method, reverse)


def run_discretize(method: str, device: str) -> None:
    delta = torch.rand(300, device=device)
    for dtype in (torch.float32, torch.complex64):
        A = -torch.rand(300, dtype=dtype, device=device)
        torch.ops.vim_mm.discretize(delta, A, method_id(method))


def run_norm(
    dtype: torch.dtype, stored: torch.dtype, of_weight: torch.dtype, rows: str, device: str
) -> None:
    """As of the first layer of a model, and of any other, whose sum is used besides."""

    def new(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(sizes, dtype=dtype, device=device, requires_grad=True)

    sizes, weight = NORMS[rows], new(NORMS[rows][1], dtype=of_weight)
    residual, update = new(*sizes, dtype=stored), new(*sizes, dtype=dtype)
    differentiate(add_rms_norm(residual, None, weight, 1e-5, dtype)[0])
    differentiate(*add_rms_norm(residual, update, weight, 1e-5, dtype))


def run_mixer(
    dtype: torch.dtype,
    device: str,
    *,
    norm: str | None,
    steps: int,
    reset: bool,
    train: bool,
    stored: str = 'float32',
    **arguments: Any,
) -> None:
    """The mixer alone, or with the norm of the first layer (which has no update) or another.

    Parameters are `stored` in a dtype, or in that of activations, as then is the residual stream.
    """
    stream = dtype if stored == 'activations' else torch.float32
    parameters = dtype if stored == 'activations' else getattr(torch, stored)
    mixer = fused_arguments(Mamba(**arguments).to(device, parameters))
    sizes = (2, steps, arguments['d_model'])
    x, update = (
        torch.randn(sizes, dtype=of, device=device, requires_grad=True)
        for of in (stream if norm else dtype, dtype)
    )
    begins = torch.rand(sizes[:2], device=device) < 0.1 if reset else None
    with torch.set_grad_enabled(train):
        if norm is None:
            results = (fused_mixer(x, mixer, begins),)
        else:
            weight = torch.ones(sizes[2:], dtype=stream, device=device, requires_grad=train)
            added = update if norm == 'update' else None
            out, total = fused_block(x, added, weight, 1e-5, dtype, mixer, begins)
            results = (out,) if added is None else (out, total)
    if train:
        differentiate(*results)


def block_cases(methods: Iterable[str], device: str = 'cuda') -> Cases:
    for method in methods:
        yield f'{method} discretize', partial(run_discretize, method, device)
    for name in DTYPES:
        dtype = getattr(torch, name)
        either = dict.fromkeys((dtype, torch.float32))
        for stored, of_weight, rows in product(either, either, NORMS):
            case = f'norm {rows} {name} of {stored} by {of_weight}'.replace('torch.', '')
            yield case, partial(run_norm, dtype, stored, of_weight, rows, device)
        for case, changes in MIXERS.items():
            if changes.get('discretization_method', 'zoh') in methods:
                options = MIXER | changes
                yield f'mixer {case} {name}', partial(run_mixer, dtype, device, **options)


def main(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit('the kernels need a CUDA device, and PyTorch sees none')
    cases = [
        *(scan_cases(args) if 'scan' in args.what else ()),
        *(block_cases(args.methods) if 'block' in args.what else ()),
    ]
    for i, (case, run) in enumerate(cases):
        run()
        torch.cuda.synchronize()
        print(f'{i + 1} of {len(cases)}: {case}', flush=True)


if __name__ == '__main__':
    # Each tensor and each buffer of an operator gets an allocation of its own, whose end a
    # sanitizer knows, of memory that nothing has been written to. The first allocation looks.
    os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'
    os.environ.setdefault('VIM_MM_SEPARATE_BUFFERS', '1')
    end(main, ARGUMENTS)
