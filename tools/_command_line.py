"""What the tools share before anything heavy is imported: their arguments, and how they end.

`--help` and a wrong option are answered from here; PyTorch and MMEngine come after.
"""

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

_OPENING = {'[': ']', '(': ')'}


def parse_value(text: str):
    """A value of --cfg-options: number, True, False, None, text, or lists and tuples of these.

    As MMEngine's DictAction reads it (``1,2``, ``[a, b]``, ``[(1, 2), c]``), but spaces inside of a
    text stay: they are parts of paths. Quotes around a text or an element are dropped.

    Raises:
        ValueError: Brackets do not match.
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in '\'"' and text[0] not in text[1:-1]:
        inner = text[1:-1].strip()
        # The shell's own quotes may have been doubled: "[1,2]" is a list all the same.
        return parse_value(inner) if inner[:1] in _OPENING else inner
    parts = split_at_commas(text)
    if _OPENING.get(text[:1]) == text[-1:] and len(parts) == 1:
        values = [parse_value(part) for part in split_at_commas(text[1:-1]) if part.strip()]
        return tuple(values) if text[0] == '(' else values
    if len(parts) > 1:
        return [parse_value(part) for part in parts if part.strip()]
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return {'true': True, 'false': False}.get(text.lower(), None if text == 'None' else text)


def split_at_commas(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and in no quotes."""
    parts, closing, quote, start = [], [], None, 0
    for i, char in enumerate(text):
        if quote:
            quote = None if char == quote else quote
        elif char in '\'"' and not text[start:i].strip('[( '):
            quote = char
        elif char in _OPENING:
            closing.append(_OPENING[char])
        elif char in ')]':
            if not closing or closing.pop() != char:
                raise ValueError(f'{char!r} closes nothing in {text!r}')
        elif char == ',' and not closing:
            parts.append(text[start:i])
            start = i + 1
    if closing or quote:
        raise ValueError(f'{(quote or closing[-1])!r} is missing in {text!r}')
    return [*parts, text[start:]]


class ConfigOptions(argparse.Action):
    """Collects ``KEY=VALUE`` arguments in a dict."""

    def __call__(self, parser, namespace, values, option_string=None):
        options = dict(getattr(namespace, self.dest) or {})
        for argument in values:
            key, sign, value = argument.partition('=')
            if not sign or not key.strip():
                parser.error(f'{option_string}: expected KEY=VALUE, got {argument!r}')
            try:
                options[key.strip()] = parse_value(value)
            except ValueError as error:
                parser.error(f'{option_string} {key}: {error}')
        setattr(namespace, self.dest, options)


def add_arguments(parser: ArgumentParser, launcher: bool = True) -> None:
    """Add what ``vim_mm.engine.cli.read_config`` reads, named as in MMDetection's tools.

    Args:
        parser (ArgumentParser): Gets them.
        launcher (bool): Whether the tool can run in several processes.
    """
    parser.add_argument('config', help='path of a config')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=ConfigOptions,
        default={},
        metavar='KEY=VALUE',
        help='override entries of the config: a.b=1 c="[1,2]"; data_root=DIR moves all paths in it',
    )
    parser.add_argument(
        '--discretization-method',
        metavar='NAME',
        help='of the backbone, short for --cfg-options model.backbone.discretization_method=NAME',
    )
    parser.add_argument(
        '--debug', action='store_true', help='show the traceback of a mistake as well'
    )
    parser.add_argument(
        '--allow-mismatch',
        action='store_true',
        help='test, draw or resume a checkpoint that was trained with another discretization '
        'method, or another switch that changes what its weights compute',
    )
    if launcher:
        parser.add_argument(
            '--work-dir', help='where logs and weights go (default: work_dirs/<name of the config>)'
        )
        parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm'], default='none')
        # torch.distributed.launch passes this; torchrun sets the variable.
        parser.add_argument('--local-rank', '--local_rank', type=int, default=0)


def add_speed_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``vim_mm.accelerate``."""
    parser.add_argument('--amp', action='store_true', help='predict in bfloat16')
    parser.add_argument(
        '--graph', action='store_true', help='on a GPU, a CUDA graph for each size that comes again'
    )
    parser.add_argument('--compile', action='store_true', help='predict through torch.compile')


def end(main: Callable[[Namespace], None], args: Namespace) -> None:
    """Run ``main(args)``; a user's mistake ends in one sentence, which is the last line.

    ``--debug`` shows its traceback before. A bug keeps its traceback.
    """
    try:
        main(args)
    except KeyboardInterrupt:
        print(f'{Path(sys.argv[0]).name}: interrupted', file=sys.stderr)
        sys.exit(130)  # as a shell reports SIGINT
    except (Exception, SystemExit) as error:
        try:
            from vim_mm import mistakes
        except ImportError:  # then the error says what is missing
            if isinstance(error, ImportError):
                sys.exit(f'{Path(sys.argv[0]).name}: error: {error}')
            raise error from None
        line = mistakes.explain(error)
        if line is None:
            raise
        line = f'{Path(sys.argv[0]).name}: error: {line}'
        sys.stdout.flush()
        if getattr(args, 'debug', False):
            mistakes.print_traceback(error)
        mistakes.note_for_torchrun(line)
        sys.exit(line)
