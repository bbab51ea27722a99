"""How exact the CUDA scan is: worst errors by method and dtype, over lengths and forms of B and C.

    python benchmarks/scan_accuracy.py

Errors of outputs, the last state among them, and of every gradient, relative to the largest entry
of what the scan in fp64 on the CPU gives for the same rounded inputs. All steps in both directions,
with D, gate, bias and softplus, a = -1 .. -16, dt about 0.13; outputs are written to memory full of
NaN. A table in Markdown, and exit code 1 where an error is above ``BOUNDS``.
"""

import argparse
from itertools import product

from _command_line import add_debug, add_methods, end, parse_first, parser_of, positive

LENGTHS = (1, 2, 63, 64, 197, 1000, 1024, 1025, 4097, 6084)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_methods(parser)
    parser.add_argument('--lengths', nargs='+', type=positive, default=LENGTHS)
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch

from benchmarks.measure.tables import markdown_table
from benchmarks.measure.timing import ScanShape, make_inputs
from benchmarks.scan.errors import errors_of, largest, outputs_and_gradients, random_weights
from benchmarks.scan.paths import CPU_KERNEL, CUDA_KERNEL
from vim_mm.progress import progress

BATCH, CHANNELS, STATES = 2, 36, 16
BOUNDS = {'fp32': 2e-5, 'fp16': 2e-3, 'bf16': 1e-2}
KINDS = ('outputs', 'gradients')
FORMS = ('shared', 'grouped', 'constant', 'mixed')  # mixed: constant B, grouped C


def inputs_of(form: str, length: int, dtype: str) -> dict[str, torch.Tensor]:
    """Arguments of ``selective_scan_fn`` on the CPU."""
    inputs = make_inputs(ScanShape(BATCH, CHANNELS, length, STATES, dtype), 'cpu', dt_bias=-2.0)
    inputs = {name: x.detach() for name, x in inputs.items()}
    rows = inputs['u'].dtype
    shapes = {
        'shared': (BATCH, STATES, length),
        'grouped': (BATCH, 2, STATES, length),
        'constant': (CHANNELS, STATES),
    }
    of_B, of_C = ('constant', 'grouped') if form == 'mixed' else (form, form)
    for name, form_of_it in (('B', of_B), ('C', of_C)):
        x = torch.randn(shapes[form_of_it])
        inputs[name] = x if form_of_it == 'constant' else x.to(rows)
    return inputs


def main(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise SystemExit('the CUDA scan needs a CUDA device, and PyTorch sees none')
    # New tensors hold NaN until something is written to them.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)

    cases = 0
    errors = {key: {} for key in product(args.methods, BOUNDS, KINDS)}
    for dtype, form, length in progress([*product(BOUNDS, FORMS, args.lengths)], 'inputs'):
        inputs = inputs_of(form, length, dtype)
        weights = random_weights(inputs['u'], inputs['A'])
        wide = {name: x.double() for name, x in inputs.items()}
        there = {name: x.cuda() for name, x in inputs.items()}
        for method, reverse in product(args.methods, (False, True)):
            given = outputs_and_gradients(CUDA_KERNEL, there, method, weights, reverse)
            expected = outputs_and_gradients(CPU_KERNEL, wide, method, weights, reverse)
            for name, error in errors_of(given, expected).items():
                kind = KINDS[name.startswith('grad_')]
                errors[method, dtype, kind][form, length, reverse, name] = error
            cases += 1

    worst = {key: largest(of_case)[1] for key, of_case in errors.items()}
    rows = [
        {'outputs / gradients': method}
        | {
            dtype: '{:.1e} / {:.1e}'.format(*(worst[method, dtype, kind] for kind in KINDS))
            for dtype in BOUNDS
        }
        for method in args.methods
    ]
    print(markdown_table(rows))
    print(f'{torch.cuda.get_device_name()}: {cases} cases')
    return int(not all(error <= BOUNDS[dtype] for (_, dtype, _), error in worst.items()))


if __name__ == '__main__':
    end(main, ARGUMENTS)
