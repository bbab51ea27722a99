"""Times functions of mamba_ssm and VMamba beside ours in their place (vim_mm.interop.mamba_ssm).

    python benchmarks/benchmark_drop_in.py --device cuda --markdown drop_in.md
    python benchmarks/benchmark_drop_in.py --batch 1 --dim 8 --seqlen 64 --n_trials 3

``selective_scan_fn`` is a call through autograd, ``fwd`` and ``bwd`` are those of the extension
selective_scan_cuda, of which ``bwd`` alone is timed. Inputs are those of a Mamba layer, with gate
and softplus; without ``--batch``, ``--dim`` and ``--seqlen`` of Vim-T at 512 and 1,024 pixels and
of Mamba-130M. ``mamba_inner_fn`` is such a layer without its first projection, and Vim's
``mamba_inner_fn_no_out_proj`` without its last one either. VMamba's extension
selective_scan_cuda_oflex has no gate, and an output in float32. A call is what its caller waits
for; a time on the GPU is that inside a CUDA graph. Medians. The difference is the largest of the
output's and every gradient's, each over its largest entry. Where a library is not installed, or
without a GPU, ours is timed alone. mamba_ssm's layer needs causal_conv1d too, and Vim's the two
that come with it.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from _command_line import DTYPES, add_run_arguments, add_sizes, end, parse_first, parser_of

SHAPES = ((8, 384, 1024), (2, 384, 4096), (8, 1536, 2048))  # (B, D, L)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_sizes(parser, None, None, None, 16)
    parser.add_argument('--dtype', choices=DTYPES, default='bf16', help='default: %(default)s')
    add_run_arguments(parser)
    args = parser.parse_args()
    sizes = (args.batch, args.dim, args.seqlen)
    if any(sizes) and not all(sizes):
        parser.error('--batch, --dim and --seqlen: expected all of them or none')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.measure.tables import figures, markdown_table, publish, without_empty_columns
from benchmarks.measure.timing import (
    Scan,
    ScanShape,
    describe,
    device_times,
    environment,
    make_inputs,
    wall_times,
)
from benchmarks.peers.scans import (
    RawScanFunction,
    installed_extensions,
    peer_version,
    raw_oflex,
    raw_scan,
)
from benchmarks.scan.errors import relative_error
from vim_mm.interop import mamba_ssm as drop_in
from vim_mm.progress import progress

MAMBA, VMAMBA = 'mamba_ssm', 'VMamba'
LAYERS = ('mamba_inner_fn', 'mamba_inner_fn_no_out_proj')  # the latter Vim's alone
THEIRS, OURS = 'theirs', 'vim_mm'
Record = dict[str, Any]


def differentiated(function: Any, inputs: dict[str, Tensor], grad_out: Tensor) -> Scan:
    """A scan whose backward pass runs its forward pass too, as a training step does."""
    tensors = [*inputs.values()]

    def both(_: object = None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*tensors), tensors, grad_out)

    def forward() -> tuple:
        with torch.no_grad():
            return (function(*tensors),)

    return Scan(forward, both)


def layer_inputs(scan: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a layer, where the scan of the layer has these inputs."""
    batch, channels, length = scan['u'].shape
    states, rank = scan['A'].shape[1], -(-channels // 32)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape)).to(scan['u']).requires_grad_()

    return {
        'xz': normal(batch, 2 * channels, length),
        'conv1d_weight': normal(channels, 1, 4, scale=0.5),
        'conv1d_bias': normal(channels, scale=0.5),
        'x_proj_weight': normal(rank + 2 * states, channels, scale=channels**-0.5),
        'delta_proj_weight': normal(channels, rank, scale=rank**-0.5),
        'out_proj_weight': normal(-(-channels // 2), channels, scale=channels**-0.5),
        **{name: scan[name] for name in ('A', 'D', 'delta_bias')},
    }


def their_layer(name: str) -> Any:
    """The installed mamba_ssm's function of this name, None where it cannot run."""
    try:
        import causal_conv1d_cuda  # noqa: F401  mamba_ssm is importable without it
        from mamba_ssm.ops import selective_scan_interface
    except ImportError:
        return None
    return getattr(selective_scan_interface, name, None)


def beside(theirs: Any, ours: Any) -> dict[str, Any]:
    """By whose they are; ours alone where theirs is None."""
    return {OURS: ours} if theirs is None else {THEIRS: theirs, OURS: ours}


def layers(
    name: str, scan: dict[str, Tensor], grad_scan: Tensor, with_theirs: bool
) -> dict[str, Scan]:
    """A function of :data:`LAYERS` by whose it is, for inputs of its scan and their gradient."""
    inputs, more, grad_out = layer_inputs(scan), {}, grad_scan
    if name == 'mamba_inner_fn':
        more['out_proj_bias'] = None
        shape = len(grad_scan), grad_scan.shape[2], len(inputs['out_proj_weight'])
        grad_out = torch.randn(shape).to(grad_scan)
    else:
        del inputs['out_proj_weight']

    def layer(function: Any, *tensors: Tensor) -> Tensor:
        return function(**dict(zip(inputs, tensors, strict=True)), **more)

    functions = beside(their_layer(name) if with_theirs else None, getattr(drop_in, name))
    return {
        library: differentiated(partial(layer, function), inputs, grad_out)
        for library, function in functions.items()
    }


def scans(
    peers: dict[str, Any], inputs: dict[str, Tensor], grad_out: Tensor
) -> dict[str, tuple[tuple[str, str], dict[str, Scan]]]:
    """By function: what its two passes are called, and its scan by whose it is.

    ``peers`` has the extensions of mamba_ssm and VMamba that are there.
    """
    theirs = peers.get(MAMBA)
    passes = 'forward', 'forward and backward'
    functions = beside(
        partial(RawScanFunction.apply, theirs) if theirs is not None else None,
        partial(drop_in.selective_scan_fn, delta_softplus=True),
    )
    extensions = beside(theirs, drop_in.selective_scan_cuda)
    oflexes = beside(peers.get(VMAMBA), drop_in.selective_scan_cuda_oflex)
    return {
        'selective_scan_fn': (
            passes,
            {name: differentiated(f, inputs, grad_out) for name, f in functions.items()},
        ),
        **{name: (passes, layers(name, inputs, grad_out, theirs is not None)) for name in LAYERS},
        'selective_scan_cuda': (
            ('fwd', 'bwd'),
            {name: raw_scan(x, inputs, grad_out) for name, x in extensions.items()},
        ),
        'selective_scan_cuda_oflex': (
            ('fwd', 'bwd'),
            {name: raw_oflex(x, inputs, grad_out) for name, x in oflexes.items()},
        ),
    }


def differences(scans: dict[str, Scan]) -> tuple[float, float]:
    """Ours and theirs: of the output, and the largest of the gradients."""
    (theirs, of_theirs), (ours, of_ours) = (
        (result[0], scan.backward(result))
        for scan in (scans[THEIRS], scans[OURS])
        for result in [scan.forward()]
    )
    gradients = zip(of_ours, of_theirs, strict=True)
    return (
        relative_error(ours.float(), theirs.float()),
        max(relative_error(a.float(), b.float()) for a, b in gradients),
    )


def records_of(args: argparse.Namespace, peers: dict[str, Any]) -> Iterator[Record]:
    """One record for each shape, function, pass and library."""
    given = (args.batch, args.dim, args.seqlen)
    for sizes in progress([given] if args.batch else [*SHAPES], 'shapes'):
        inputs = make_inputs(ScanShape(*sizes, args.dstate, args.dtype), args.device)
        grad_out = torch.randn_like(inputs['u'])
        for function, (passes, of_library) in scans(peers, inputs, grad_out).items():
            differ = differences(of_library) if len(of_library) == 2 else (None, None)
            for index, (label, difference) in enumerate(zip(passes, differ, strict=True)):
                for library, scan in of_library.items():
                    result = scan.forward()
                    run = partial(scan.backward, result) if index else scan.forward
                    record = {'function': function, 'pass': label, 'library': library}
                    record |= {'batch': sizes[0], 'dim': sizes[1], 'seqlen': sizes[2]}
                    record['call'] = median(wall_times(run, args.n_trials))
                    if args.device == 'cuda':
                        record['gpu'] = gpu_seconds(scan, bool(index), args.n_trials)
                    yield record | {'difference': difference}


def gpu_seconds(scan: Scan, backward: bool, trials: int) -> float:
    """Of a pass alone; the forward pass that a backward one needs runs outside of its graph."""

    def prepare() -> Any:
        result = scan.forward()
        return partial(scan.backward, result) if backward else scan.forward

    return median(device_times(prepare, trials))


def report(records: list[Record]) -> str:
    """A row for each shape, function and pass, times in microseconds; gaps where one is missing."""
    labels = {'call': 'call', 'gpu': 'on the GPU'}
    columns = [f'{name}, {label}' for name in (THEIRS, OURS) for label in labels.values()]
    gaps = dict.fromkeys([*columns, 'difference'], '')
    rows: dict[tuple, dict[str, str]] = {}
    for r in records:
        sizes = f'({r["batch"]}, {r["dim"]}, {r["seqlen"]})'
        case = {'function': r['function'], 'pass': r['pass'], '(B, D, L)': sizes}
        row = rows.setdefault((*case.values(),), case | gaps)
        for key, label in labels.items():
            if key in r:
                row[f'{r["library"]}, {label}'] = figures(1e6 * r[key])
        if r['difference'] is not None and r['library'] == OURS:
            row['difference'] = f'{r["difference"]:.1e}'
    return markdown_table(without_empty_columns([*rows.values()]))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads or torch.get_num_threads())
    peers = installed_extensions() if args.device == 'cuda' else {}
    facts = environment(args.device)
    facts |= {
        name: peer_version(name) if name in peers else 'not timed' for name in (MAMBA, VMAMBA)
    }
    records = [*records_of(args, peers)]
    result = {'environment': facts, 'n_trials': args.n_trials, 'units': 'seconds'}
    publish(args, f'{describe(facts)}\n\n{report(records)}', result | {'records': records})


if __name__ == '__main__':
    end(main, ARGUMENTS)
