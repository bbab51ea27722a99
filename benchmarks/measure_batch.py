"""Finds the largest batch that fits a card, its memory and its images per second, for configs.

    python benchmarks/measure_batch.py configs/seg/upernet_vim_t_zoh.py \
        configs/seg/upernet_vim_s_zoh.py --memory 24 80 --out batch.json --markdown batch.md

Trains each config's own model and optimizer on random pictures of its size, in float32 and in
bfloat16 (``--amp``), with and without ``with_cp``, without a loader. Batches are doubled from 2,
which batch norm needs, up to the recipe's. For a card of M GB the allocator gets M GiB less 1.5
GiB, for what CUDA itself needs, by ``torch.cuda.set_per_process_memory_fraction``; more is an
out-of-memory error, as on that card. Memory is the allocator's peak. The card itself must have the
memory of the largest M.
``--device cpu`` shows that it runs: nothing is capped there, so give ``--most``.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from _command_line import (
    add_debug,
    add_device,
    add_outputs,
    choose_device,
    end,
    parse_first,
    positive,
)

LEAST = 2  # images: batch norm of UPerNet's pooled maps needs as many
DTYPES = {'float32': 'OptimWrapper', 'bfloat16': 'BFloat16OptimWrapper'}


def parse_args() -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('configs', nargs='+')
    parser.add_argument('--memory', nargs='+', type=float, default=[24, 80], help='of cards, in GB')
    parser.add_argument('--dtypes', nargs='+', choices=DTYPES, default=[*DTYPES])
    parser.add_argument('--with_cp', nargs='+', type=int, choices=(0, 1), default=[0, 1])
    parser.add_argument('--most', type=positive, help='largest batch to try (default: the recipe)')
    parser.add_argument('--steps', type=positive, default=4, help='steps that are timed')
    add_device(parser)
    add_outputs(parser)
    add_debug(parser)
    args = parser.parse_args()
    if args.most is not None and args.most < LEAST:
        parser.error(f'--most must be at least {LEAST}, got {args.most}')
    return args


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, build_optim_wrapper

from benchmarks.measure.tables import figures, markdown_table, publish
from benchmarks.measure.timing import begin_peak, describe, environment, steady_times
from benchmarks.measure.whole_models import (
    build,
    forget_pretrained,
    make_batch,
    on_device,
)
from vim_mm.engine.cli import read_config
from vim_mm.progress import progress

GIB = 2**30
# What CUDA's context and libraries take of a card besides the allocator's memory.
RESERVED = 1.5


def resolution(cfg: Config) -> tuple[int, int]:
    """Height and width of the pictures that a config trains on."""
    if cfg.default_scope == 'mmseg':
        height, width = cfg.model.data_preprocessor.size
        return height, width
    # Padded to it, or of about as many pixels, as DINO's 800 x 1333 are.
    divisor = cfg.model.data_preprocessor.get('pad_size_divisor', 1)
    side = max(divisor, cfg.model.backbone.img_size)
    return side, side


def trained(cfg: Config, dtype: str, with_cp: bool, device: str) -> tuple[BaseModel, OptimWrapper]:
    """The model of a config, in training mode, and its optimizer."""
    cfg.model.backbone.with_cp = with_cp
    forget_pretrained(cfg.model)
    model = build(cfg, device)
    optimizer = build_optim_wrapper(model, {**cfg.optim_wrapper, 'type': DTYPES[dtype]})
    optimizer.initialize_count_status(model, 0, -1)
    return model, optimizer


def measure(step: Callable[[], Any], images: int, steps: int, device: str) -> dict[str, Any]:
    """Peak of the memory in GiB and images per second of training steps with so many images.

    Raises:
        torch.OutOfMemoryError: It does not fit.
    """
    begin_peak()
    (seconds,) = steady_times(step, steps, rounds=1)
    peak = torch.cuda.max_memory_reserved() / GIB if device != 'cpu' else None
    return {'memory': peak, 'images/s': images / seconds}


def largest(
    try_batch: Callable[[int], dict[str, Any]], start: int, most: int
) -> dict[str, Any] | None:
    """What ``try_batch`` returns for the largest batch that fits, None if ``start`` does not.

    Args:
        try_batch (Callable): Raises torch.OutOfMemoryError where a batch does not fit.
        start (int): First batch; then it is doubled.
        most (int): No larger one is tried.
    """
    found, batch = None, start
    while batch <= most:
        try:
            found = {'batch': batch, **try_batch(batch)}
        except torch.OutOfMemoryError:
            break
        batch *= 2
    return found


def rows_of(path: str, dtype: str, with_cp: bool, args: Namespace) -> Iterator[dict[str, Any]]:
    """A row for each card, smallest first; the search goes on where the card before ended."""
    device = args.device
    cfg = read_config(Namespace(config=path, cfg_options={}))
    model, optimizer = trained(cfg, dtype, with_cp, device)
    size = resolution(cfg)
    most = args.most or cfg.auto_scale_lr.base_batch_size
    start = LEAST
    for card in sorted(args.memory):
        if device != 'cpu':
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1, (card - RESERVED) * GIB / total))

        def try_batch(batch: int) -> dict[str, Any]:
            data = make_batch(cfg, size, batch)

            def step() -> None:
                model.train_step(on_device(data, device), optimizer)

            try:
                data = on_device(data, device)
                return measure(step, batch, args.steps, device)
            finally:
                # Of a step that broke off as well.
                optimizer.zero_grad()

        row = largest(try_batch, start, most)
        head = {'config': Path(path).stem, 'size': '{} x {}'.format(*size), 'dtype': dtype}
        head |= {'with_cp': with_cp, 'card': card, 'recipe': cfg.auto_scale_lr.base_batch_size}
        yield head | (row or {'batch': 0, 'memory': None, 'images/s': None})
        start = row['batch'] if row else start


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""

    def cell(value: float | None) -> str:
        return '–' if value is None else figures(value)

    return markdown_table(
        [
            {
                'config': row['config'],
                'size': row['size'],
                'dtype': row['dtype'],
                'with_cp': 'yes' if row['with_cp'] else 'no',
                'card, GB': str(row['card']),
                'batch': f'{row["batch"]} of {row["recipe"]}' if row['batch'] else 'none fits',
                'memory, GiB': cell(row['memory']),
                'images/s': cell(row['images/s']),
            }
            for row in rows
        ]
    )


def report(rows: list[dict[str, Any]], args: Namespace) -> None:
    """Print the table, and write the files."""
    facts = environment(args.device)
    publish(args, f'{describe(facts)}\n\n{table(rows)}', {'environment': facts, 'rows': rows})


def main(args: Namespace) -> None:
    MMLogger.get_instance('mmengine', log_level='ERROR')  # it lists every parameter
    args.device = choose_device(args.device)
    rows: list[dict[str, Any]] = []
    cases = [*product(args.configs, args.dtypes, map(bool, args.with_cp))]
    try:
        for path, dtype, with_cp in progress(cases, 'cases'):
            for row in rows_of(path, dtype, with_cp, args):
                rows.append(row)
                print(json.dumps(row), flush=True)
    finally:  # also of what was measured before Ctrl-C
        if rows:
            report(rows, args)


if __name__ == '__main__':
    end(main, ARGUMENTS)
