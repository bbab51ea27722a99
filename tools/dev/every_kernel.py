"""Runs every kernel of the CUDA scan once, forward and backward, for a tool that watches kernels.

    compute-sanitizer --tool memcheck python tools/dev/every_kernel.py
    compute-sanitizer --tool racecheck python tools/dev/every_kernel.py --rows six

A case is a method, a layout of its tensors and as many rows as choose one of the block shapes;
half of a method's cases are scanned in reverse. Results are not looked at: that is what tests do.
"""

import argparse
import os
from itertools import product

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


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_methods(parser)
    parser.add_argument('--layouts', nargs='+', choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument('--rows', nargs='+', choices=ROWS, default=tuple(ROWS))
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from vim_mm.ops import selective_scan_fn
from vim_mm.ops.discretization import METHODS


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


def main(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit('the kernels need a CUDA device, and PyTorch sees none')
    cases = [
        (rows, layout, states, method)
        for rows, layout, states, method in product(
            args.rows, args.layouts, ('', 'with_states'), args.methods
        )
        if (layout in ALIGNED and not states) or rows in (args.rows[0], 'shared_by_2')
    ]
    for i, (rows, layout, states, method) in enumerate(cases):
        inputs = make_inputs(layout, rows)
        if states:
            add_states(inputs, method)
        out, last_state = selective_scan_fn(
            **inputs,
            delta_softplus=True,
            return_last_state=True,
            reverse=(i + i // len(args.methods)) % 2 == 1,
            discretization_method=method,
            use_cuda_kernel=True,
        )
        torch.autograd.backward(
            (out, last_state), (torch.ones_like(out), torch.ones_like(last_state))
        )
        torch.cuda.synchronize()
        case = ' '.join(filter(None, (method, layout, rows, states)))
        print(f'{i + 1} of {len(cases)}: {case}', flush=True)


if __name__ == '__main__':
    # Each tensor and each buffer of an operator gets an allocation of its own, whose end a
    # sanitizer knows, of memory that nothing has been written to. The first allocation looks.
    os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'
    os.environ['VIM_MM_SEPARATE_BUFFERS'] = '1'
    end(main, ARGUMENTS)
