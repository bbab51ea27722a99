"""Makes a small file of a checkpoint: its weights in half precision, and what they were trained as.

Usage: ``python tools/dev/publish_model.py work_dirs/RUN/iter_N.pth demo/NAME.pth``
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import add_debug, end

# Of a checkpoint's meta: the versions and switches of vim_mm, the classes, the length of training.
KEPT = ('vim_mm', 'dataset_meta', 'epoch', 'iter', 'seed')


def parse_args() -> Namespace:
    parser = ArgumentParser(description='Write the weights of a checkpoint in half precision.')
    parser.add_argument('checkpoint', type=Path, metavar='IN', help='a checkpoint of a training')
    parser.add_argument('out', type=Path, metavar='OUT', help='a .pth file')
    add_debug(parser)
    return parser.parse_args()


def halved(checkpoint: dict) -> dict:
    """'state_dict' with its notes, floating weights in float16, and the ``KEPT`` part of 'meta'."""
    weights = checkpoint['state_dict']
    for name, weight in weights.items():
        if weight.is_floating_point():
            weights[name] = weight.half()
    meta = checkpoint['meta']
    return dict(state_dict=weights, meta={name: meta[name] for name in KEPT if name in meta})


def main(args: Namespace) -> None:
    from vim_mm.checkpoints.converted_file import write
    from vim_mm.checkpoints.reading import read_as_data

    write(halved(read_as_data(args.checkpoint)), args.out)
    print(f'{args.out}: {args.out.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    end(main, parse_args())
