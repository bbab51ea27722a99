"""The command line that the benchmarks of ``tools/analysis`` share."""

from argparse import ArgumentParser
from pathlib import Path

import torch


def add_run_arguments(parser: ArgumentParser) -> None:
    """Where to run, how often to time, and which files to write."""
    parser.add_argument('--device', choices=['cpu', 'cuda'], default='cpu')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads(), help='of the CPU')
    parser.add_argument('--n_trials', type=int, default=20)
    parser.add_argument('--out', type=Path, help='write every figure as JSON to this file')
    parser.add_argument('--markdown', type=Path, help='write the tables to this file as well')
