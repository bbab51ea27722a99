"""Converts weights of Vim from elsewhere: ``python tools/convert_checkpoint.py IN OUT``."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from _command_line import ConfigOptions, add_debug, end, same_file


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description='Convert a checkpoint of Vim, from whatever code, to a checkpoint of this '
        'package, and say what became of each weight. Nothing in the file is run. OUT is written '
        'only if the model gets every weight that it needs.'
    )
    parser.add_argument('input', type=Path, metavar='IN', help='the checkpoint')
    parser.add_argument('output', type=Path, metavar='OUT', help='a .pth file')
    parser.add_argument(
        '--config',
        help='the model that the weights are for, to whose size the position embedding is resized '
        '(default: the shipped model of their kind, at the size that they have)',
    )
    parser.add_argument(
        '--part',
        choices=['all', 'backbone'],
        default='all',
        help='backbone: its weights alone, under the names that they have in a bare VisionMamba',
    )
    parser.add_argument(
        '--allow',
        nargs='+',
        default=[],
        metavar='NAME',
        help='beginnings of names of weights that may be missing or left over: neck. decode_head.',
    )
    parser.add_argument(
        '--backbone',
        nargs='+',
        action=ConfigOptions,
        default={},
        metavar='NAME=VALUE',
        help='arguments of the backbone under which the weights were trained, where the file does '
        'not tell: discretization_method=foh if_divide_out=True',
    )
    add_debug(parser)
    args = parser.parse_args()
    if args.output.suffix == '.safetensors':
        parser.error('OUT: a checkpoint of MMEngine is written, call it .pth')
    if same_file(args.input, args.output):
        parser.error(f'OUT must be another file than IN, got {args.output}')
    args.cfg_options = {}
    return args


def main(args: Namespace) -> None:
    from vim_mm.checkpoints import ConversionError, convert_checkpoint, fit
    from vim_mm.checkpoints.converted_file import (
        as_arguments,
        as_checkpoint,
        differences,
        keep_backbone,
        write,
    )
    from vim_mm.checkpoints.reading import read_as_data
    from vim_mm.engine.cli import read_config
    from vim_mm.engine.converted_model import build_model, build_target
    from vim_mm.progress import working

    with working(f'reading {args.input}'):
        checkpoint = read_as_data(args.input, 'cpu')
    try:
        with working('converting weights'):
            conversion = convert_checkpoint(checkpoint, args.backbone)
    except ValueError as error:
        raise ConversionError(f'{args.input} cannot be converted: {error}') from error
    print(f'{args.input}: a {conversion.kind} in {conversion.origin}')
    told, assumed = conversion.switches
    print(f'trained with: {as_arguments(told)}')
    if assumed:
        print(f'not told by the file, taken as released (--backbone): {as_arguments(assumed)}')
    target = build_model(read_config(args)) if args.config else build_target(conversion)
    if differing := differences(conversion, target):
        print(f'{args.config} has another backbone: trained with {"; ".join(differing)}')
    part = 'backbone.' if args.part == 'backbone' else ''
    report = fit(conversion, target, args.allow, part)
    print(*report.lines(), sep='\n')
    if not report.complete:
        raise ConversionError(
            f'{args.output} was not written: {len(report.missing)} weights are missing, '
            f'{len(report.misshapen)} have another shape, {len(report.unknown)} have no place in '
            'the model; --allow NAME lets them be.'
        )
    if part:
        keep_backbone(conversion)
    with working(f'writing {args.output}'):
        write(as_checkpoint(conversion, str(args.input)), args.output)
    print(f'{args.output} is written.')


if __name__ == '__main__':
    end(main, parse_args())
