"""Prints which CUDA kernels a scan runs, forward and backward, and what was measured for that.

    python tools/dev/which_kernels.py --methods zoh --batch 8 --dim 384 --seqlen 1024 --dtype bf16

A line for each kernel that a row of the table chooses: the row, the blocks, and the times behind it
(csrc/cuda/dispatch/configurations.cuh). Second sweeps and sums have none. Where a scan takes the
general path, which is not tuned, the first line says why.
"""

import argparse

from _command_line import (
    DTYPES,
    add_debug,
    add_methods,
    add_sizes,
    end,
    parse_first,
    parser_of,
    positive,
)

ACTIVATIONS = ('u', 'delta', 'z', 'B', 'C')


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_methods(parser)
    add_sizes(parser, 8, 384, 1024, 16)  # D are the channels of a group
    parser.add_argument('--groups', type=positive, default=1, help='with B and C of their own')
    parser.add_argument('--dtype', choices=DTYPES, default='bf16', help='of u, delta, z, B and C')
    parser.add_argument(
        '--fp32', nargs='+', choices=ACTIVATIONS, default=(), help='those in float32 all the same'
    )
    parser.add_argument('--complex', action='store_true', help='A, B and C')
    parser.add_argument('--constant', action='store_true', help='B and C do not vary in time')
    parser.add_argument('--strided', action='store_true', help='channels are contiguous, not time')
    parser.add_argument('--initial-state', action='store_true', help='of causal methods')
    parser.add_argument('--reset', action='store_true', help='rows of several sequences')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.measure.timing import DTYPES as TYPES
from vim_mm.ops.discretization import METHODS, method_id


def make_call(args: argparse.Namespace, method: str, device: str = 'cuda') -> tuple:
    """Arguments of the operator ``selective_scan_kernels``; their values do not matter."""
    batch, groups, channels, steps = args.batch, args.groups, args.dim, args.seqlen
    states = torch.complex64 if args.complex else torch.float32

    def new(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.empty(sizes, dtype=dtype, device=device)
        if args.strided and x.dim() == 4:  # what varies in time
            return x.transpose(2, 3).contiguous().transpose(2, 3)
        return x

    dtypes = dict.fromkeys(ACTIVATIONS, TYPES[args.dtype]) | dict.fromkeys(args.fp32, torch.float32)
    if args.complex:
        dtypes |= dict.fromkeys('BC', states)
    rows = (batch, groups, channels)
    u, delta, z = (new(*rows, steps, dtype=dtypes[name]) for name in ('u', 'delta', 'z'))
    of_B = (groups, channels) if args.constant else (batch, groups)
    sizes = (*of_B, args.dstate, *(() if args.constant else (steps,)))
    B, C = (new(*sizes, dtype=dtypes[name]) for name in 'BC')
    A = new(groups, channels, args.dstate, dtype=states)
    D, bias = (new(groups, channels) for _ in range(2))
    initial_state = A.new_empty(*rows, args.dstate) if args.initial_state else None
    reset = new(batch, steps, dtype=torch.bool) if args.reset else None
    options = (True, method_id(method), [0] * groups)
    return u, delta, A, B, C, D, z, bias, initial_state, reset, *options


def main(args: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit('kernels are chosen by the GPU as well, and PyTorch sees none')
    import vim_mm.ops.library  # noqa: F401  (loads the operators)

    for method in args.methods:
        if args.initial_state and not METHODS[method].causal:
            print(f'{method}\nhas no initial state, because it scans from both ends')
            continue
        print(f'{method}\n{torch.ops.vim_mm.selective_scan_kernels(*make_call(args, method))}')


if __name__ == '__main__':
    end(main, ARGUMENTS)
