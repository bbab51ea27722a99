"""What the tools share before anything heavy is imported: their arguments, and how they end.

`--help` and a wrong option are answered from here; PyTorch and MMEngine come after. A tool whose
functions all need them reads its arguments above the imports, by :func:`parse_first`.
"""

import argparse
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

# Before PyTorch: threads that wait for work leave their core to others, which on a busy machine is
# several times as fast; see docs/training.md.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')

# The rooms of the clone that a script lies in, found from wherever it is called. Their folder is on
# the path for no longer than that: an installed vim_mm must win over the sources beside them, which
# may have no compiled operators. This file has a link in each folder of scripts, so that no other
# file changes the path. Where somebody has copied tools/ alone, most of them need no room.
for _root in Path(__file__).resolve().parents:
    if (_root / 'benchmarks/__init__.py').exists():
        sys.path.insert(0, str(_root))
        for _room in ('benchmarks', 'studies', 'tools'):
            import_module(_room)
        sys.path.remove(str(_root))
        break

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


class Names(Sequence):
    """The ``type`` of an argument whose values a module knows, and their sequence as its default.

    The module is imported when a value is given, or the sequence looked at: not for ``--help``.

    Args:
        module (str): Name of the module.
        name (str): Of what it holds there, such as a table by name.
    """

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name

    def __call__(self, text: str) -> str:
        if text not in self:
            from vim_mm.mistakes import did_you_mean

            hint = did_you_mean(text, self)
            raise argparse.ArgumentTypeError(f'expected one of {[*self]}, got {text!r}{hint}')
        return text

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return (*getattr(import_module(self.module), self.name),)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index):
        return self._names[index]


METHODS = Names('vim_mm.ops', 'METHODS')
DTYPES = ('fp32', 'fp16', 'bf16')  # of benchmarks.measure.timing.DTYPES, those that are fast


def numbers(text: str) -> list[int]:
    """'0..11', '0,3,5' or a mixture of both: whole numbers from 0, each once."""
    found: dict[int, None] = {}
    try:
        for part in text.split(','):
            first, _, last = part.partition('..')
            part_of = range(int(first), int(last or first) + 1)
            if not part_of or part_of[0] < 0:
                raise ValueError
            found |= dict.fromkeys(part_of)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected numbers such as '0..11' or '0,3', got {text!r}"
        ) from None
    return [*found]


def positive(text: str) -> int:
    """A whole number from 1: of calls, images, channels or processes."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected a whole number from 1, got {text!r}')
    return int(text)


def same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two paths lead to one file, through links as well."""
    try:
        return Path(first).samefile(second)
    except OSError:  # there is none at one of them
        return False


def parser_of(docstring: str, **options: Any) -> ArgumentParser:
    """A parser whose ``--help`` shows the docstring of a script as it stands."""
    return ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def add_debug(parser: ArgumentParser) -> None:
    """Add ``--debug``, which :func:`end` looks at."""
    parser.add_argument(
        '--debug', action='store_true', help='show the traceback of a mistake as well'
    )


def device(text: str) -> str:
    """'cpu' or 'cuda'; the latter is refused where there is no GPU."""
    if text not in ('cpu', 'cuda'):
        raise argparse.ArgumentTypeError(f"expected 'cpu' or 'cuda', got {text!r}")
    if text == 'cuda' and not has_gpu():
        raise argparse.ArgumentTypeError('cuda needs a GPU, and PyTorch finds none')
    return text


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def add_device(parser: ArgumentParser, default: str | None = None) -> None:
    """Add ``--device``; a default of None is what :func:`choose_device` takes."""
    says = default or 'cuda if there is one'
    parser.add_argument(
        '--device', type=device, default=default, metavar='{cpu,cuda}', help=f'default: {says}'
    )


def choose_device(asked: str | None) -> str:
    """The device of ``--device``; of None, cuda if there is one."""
    return asked or ('cuda' if has_gpu() else 'cpu')


def add_methods(parser: ArgumentParser) -> None:
    """Add ``--methods``, some of the discretizations."""
    parser.add_argument(
        '--methods',
        nargs='+',
        type=METHODS,
        default=METHODS,
        metavar='METHOD',
        help='discretizations (default: all of vim_mm.ops.METHODS)',
    )


def add_sizes(parser: ArgumentParser, *defaults: int) -> None:
    """Add the sizes of a scan, B, D, L and N, with their defaults or without any."""
    names = {'batch': 'B', 'dim': 'D', 'seqlen': 'L', 'dstate': 'N'}
    for (name, letter), default in zip_longest(names.items(), defaults):
        parser.add_argument(f'--{name}', type=positive, default=default, help=letter)


def add_run_arguments(parser: ArgumentParser) -> None:
    """Where a benchmark runs, how often it times, and which files it writes."""
    add_device(parser, default='cpu')
    parser.add_argument('--threads', type=positive, help="of the CPU (default: PyTorch's)")
    parser.add_argument('--n_trials', type=positive, default=20)
    add_outputs(parser)
    add_debug(parser)


def add_outputs(parser: ArgumentParser) -> None:
    """Add ``--out`` and ``--markdown``, which ``benchmarks.measure.tables.publish`` writes."""
    parser.add_argument('--out', type=Path, help='write every figure as JSON to this file')
    parser.add_argument('--markdown', type=Path, help='write the tables to this file as well')


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
    add_debug(parser)
    parser.add_argument(
        '--verbose',
        action='store_true',
        help='print the whole log of MMEngine, which is in the log file of the run in any case',
    )
    parser.add_argument(
        '--allow-mismatch',
        action='store_true',
        help='test, draw or resume a checkpoint that was trained with another discretization '
        'method, or another switch that changes what its weights compute',
    )
    if launcher:
        parser.add_argument(
            '--work-dir',
            help='where logs and weights go (default: work_dirs/<name of the config>, with what '
            'changes its model, as in work_dirs/<name>_foh)',
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


def band(text: str) -> int:
    """The number of a band, from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'expected a whole number from 0, got {text!r}')
    return int(text)


class Bands(argparse.Action):
    """One band or three."""

    def __call__(self, parser, namespace, values, option_string=None):
        if len(values) not in (1, 3):
            parser.error(f'{option_string}: expected one band or three, got {len(values)}')
        setattr(namespace, self.dest, values)


def add_bands(parser: ArgumentParser) -> None:
    """Add ``--bands``, which ``vim_mm.engine.reader.displayed`` takes."""
    parser.add_argument(
        '--bands',
        nargs='+',
        type=band,
        action=Bands,
        metavar='N',
        help='of images of other than three bands, those that are drawn as red, green and blue, '
        'or one as grey; from 0',
    )


def parse_first(parse_args: Callable[[], Namespace]) -> Namespace:
    """The arguments of a tool that imports after this what takes seconds.

    ``--help``, a wrong option and a wrong file have ended it by then. A library that is missing
    ends it in one sentence, as :func:`end` has it.
    """
    args = parse_args()
    end_in_sentences(args)
    _prepare(args)
    return args


def end_in_sentences(args: Namespace) -> None:
    """Have errors that nobody catches, such as of imports, end this process as :func:`end` does."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _finish(error, args)
        except Exception:  # a bug is raised again
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def end(main: Callable[[Namespace], int | None], args: Namespace) -> None:
    """Run ``main(args)``, whose result is the exit code; see :func:`vim_mm.mistakes.end`."""
    _prepare(args)
    try:
        code = main(args)
    except BaseException as error:
        _finish(error, args)
    else:
        if code:
            sys.exit(code)


def _prepare(args: Namespace) -> None:
    """Refuse outputs that are inputs and files that are not there; then import the package."""
    try:
        from vim_mm.mistakes import check_checkpoint, check_config
        from vim_mm.outputs import check_arguments

        check_arguments(args)
        if {'config', 'cfg_options'} <= {*vars(args)}:  # as of add_arguments
            check_config(args.config)
            if 'source' not in args:  # else the output is compared with it before
                check_checkpoint(getattr(args, 'checkpoint', None))
    except BaseException as error:
        _finish(error, args)
    try:
        import_module('vim_mm.public')
    except ImportError as error:
        _finish(error, args)


def _finish(error: BaseException, args: Namespace) -> NoReturn:
    try:
        from vim_mm.mistakes import finish
    except ImportError:
        sys.exit(
            f'{Path(sys.argv[0]).name}: error: {error} for {sys.executable}; activate the '
            'environment where it is installed (. .venv/bin/activate), or set PYTHON for the '
            'scripts'
        )
    finish(error, getattr(args, 'debug', False))
