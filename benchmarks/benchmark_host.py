"""Host time of the choice of path: ``python benchmarks/benchmark_host.py``.

Times what a layer of Vim-T does on the host before its fused operator is called: whether its
modules are what the operator assumes, and their parameters. Runs on a CPU; for the share of a
whole layer compare with the host's time per layer that ``benchmarks/benchmark_backbone.py``
finds on a GPU.
"""

from argparse import ArgumentParser, Namespace
from time import process_time
from timeit import repeat

from _command_line import add_debug, end, parse_first


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Time the choice of path of a layer, on the host.')
    add_debug(parser)
    return parser.parse_args()


# Above PyTorch, so that --help and a wrong option are answered at once.
ARGUMENTS = parse_first(parse_args) if __name__ == '__main__' else None

from vim_mm.models import Mamba
from vim_mm.models.block import Block
from vim_mm.models.fused import fused_arguments, read, why_call, why_call_all, why_call_norm


def microseconds(function, calls: int = 5000) -> float:
    """The least of several means, which other processes disturb least."""
    return min(repeat(function, number=calls, repeat=7, timer=process_time)) / calls * 1e6


def read_only(mixer: Mamba) -> list:
    """The parameters of a mixer, in any order, without asking whether they are what counts."""
    modules = mixer._modules
    parameters = [read(modules[name], 'weight') for name in modules]
    parameters += [read(modules[name], 'bias') for name in modules if 'x_proj' not in name]
    return parameters + [read(mixer, name) for name in mixer._parameters]


def main(args: Namespace) -> None:
    block = Block(192, 0.0, {})
    mixer = block.mixer
    total = microseconds(lambda: fused_arguments(mixer))
    reading = microseconds(lambda: read_only(mixer))
    layer = microseconds(
        lambda: (why_call_all(), why_call(mixer, Mamba), why_call_norm(block.norm))
    )
    checks = total - reading + layer
    print(f'parameters read: {reading:.2f} us a layer')
    print(f'checks of its modules: {checks:.2f} us a layer')


if __name__ == '__main__':
    end(main, ARGUMENTS)
