"""How command lines end: in one sentence for a user's mistake, in a traceback for a bug.

What this package raises itself says so by its type, :class:`vim_mm.errors.UserError`. Errors of
libraries are told apart here, by their types and by where a library looks up what a config names.
"""

import difflib
import errno
import json
import os
import re
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vim_mm.errors import UserError, did_you_mean

# Frames between which a model already runs: what fails there is no wrong argument.
_RUNNING = (('mmengine/runner/loops.py', 'run'), ('torch/nn/modules/module.py', '_call_impl'))
_PACKAGE = Path(__file__).parent
_CONFIGS = _PACKAGE / '.mim' / 'configs'
# Where libraries look up what a config or a checkpoint holds.
_LOOKING_UP = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain')
_LOADING = ('torch/nn/modules/module.py', 'load_state_dict')
_LOOKED_UP = (KeyError, TypeError, RuntimeError)
_WRONG_CALLS = ('unexpected keyword argument', 'required positional argument', 'multiple values')
_LONGEST = 600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def end(main: Callable[[Namespace], int | None], args: Namespace) -> None:
    """Run the ``main`` of a command, whose result is the exit code.

    A user's mistake ends in one sentence, which is the last line; ``args.debug`` shows its
    traceback before. A bug keeps its traceback.
    """
    try:
        code = main(args)
    except BaseException as error:
        finish(error, args.debug)
    else:
        if code:
            sys.exit(code)


def finish(error: BaseException, debug: bool) -> NoReturn:
    """End the process by an error, as :func:`end` does; a bug is raised again."""
    program = Path(sys.argv[0]).name
    if is_interrupt(error):
        print(f'{program}: interrupted', file=sys.stderr)
        sys.exit(130)  # as a shell reports SIGINT
    line = explain(error)
    if line is None:
        raise error
    line = f'{program}: error: {line}'
    sys.stdout.flush()
    if debug:
        traceback.print_exception(error)  # as Python would, with the sentence after it
    note_for_torchrun(line)
    sys.exit(line)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether it is Ctrl-C, or what somebody made of it: MMEngine, that a config has no syntax."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def explain(error: BaseException) -> str | None:
    """One sentence on an error that a user's mistake caused, None for a bug.

    Args:
        error (BaseException): As it was caught, with its traceback.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else None
    if isinstance(error, TypeError) and isinstance(error.__context__, UserError):
        error = error.__context__  # MMEngine adds the hook's address to its message
    return sentence(error) if is_mistake(error) else None


def is_mistake(error: BaseException) -> bool:
    """Whether a user's argument, config, file or machine caused the error, and not this program."""
    if isinstance(error, UserError) or type(error).__name__ == 'OutOfMemoryError':
        return True
    # Files that are missing or unreadable; a worker of a DataLoader passes its error on as text.
    if isinstance(error, OSError | ImportError | SyntaxError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, Exception) or any(
        _is(frame, *place) for frame in frames for place in _RUNNING
    ):
        return False
    # The checks of this package raise UserError: a plain error of its own code is a bug.
    if type(error) in (ValueError, AssertionError) and frames and _is_own(frames[-1]):
        return False
    # A library's check, or of a type that a library made for it.
    if isinstance(error, ValueError | AssertionError) or type(error).__module__ != 'builtins':
        return True
    if isinstance(error, TypeError) and any(words in str(error) for words in _WRONG_CALLS):
        return True
    # MMEngine compiles a config without a file name.
    file = frames[-1].f_code.co_filename if frames else None
    return file in ('', '<string>') or (bool(frames) and _looks_up(error, frames[-1]))


def sentence(error: BaseException) -> str:
    """The error's message in one line of bounded length."""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, SyntaxError) and error.filename:
        text = f'{error.filename}, line {error.lineno}: {error.msg}'
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f'{error.filename}: {error.strerror}'
    elif isinstance(error, OSError) and error.errno in _FULL:
        text = (
            f'{error.strerror}: free some where it is written, or choose another place '
            '(--work-dir or --out)'
        )
    if 'Original Traceback' in text:  # of a worker of a DataLoader
        # Without the name of its class, which is the module's and a dot before it.
        text = re.sub(r'^[\w.]+\.\w+(Error|Exception): ', '', text.rstrip().splitlines()[-1])
    text = ' '.join(text.split())
    if ' ' not in text:  # a bare key, or nothing
        text = f'{type(error).__name__}: {text}' if text else type(error).__name__
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + ' ...'


def check_config(config: str | Path | None) -> None:
    """Raise SystemExit where there is no such file; its message has the one most like it.

    That lies beside it, or else among those of the package.
    """
    if config is None:
        return
    path = Path(config)
    if path.is_file():
        if path.suffix in ('.pth', '.pt', '.safetensors'):
            raise SystemExit(f'config: {config} is a checkpoint; CONFIG comes before CHECKPOINT.')
        return
    if path.is_dir():
        raise SystemExit(f'config: {config} is a folder, not a file.')
    suffixes = {path.suffix, '.py'} if path.suffix else {'.py', ''}
    beside = [each.name for each in path.parent.glob('*') if each.suffix in suffixes]
    beside = [name for name in beside if (path.parent / name).is_file()]
    hint = did_you_mean(path.name, beside)
    if hint:
        hint = f'{hint} (in {path.parent})'
    else:
        shipped = {each.name: each for each in sorted(_CONFIGS.glob('[!_]*/*.py'))}
        similar = difflib.get_close_matches(path.with_suffix('.py').name, shipped, n=1)
        hint = f'; did you mean {_shown(shipped[similar[0]].resolve())}?' if similar else ''
    raise SystemExit(f'config: there is no file {config}{hint or "."}')


def _shown(path: Path) -> Path:
    """A path as one would type it here."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def check_checkpoint(checkpoint: str | Path | None) -> None:
    """Raise FileNotFoundError for a local file that is not there or a folder, with those there.

    What has a scheme, such as https://, is left to who reads it.
    """
    if checkpoint is None or '://' in str(checkpoint):
        return
    path = Path(checkpoint).expanduser()
    if path.exists() and not path.is_dir():
        return
    wrong = f'{checkpoint} is a folder' if path.is_dir() else f'there is no checkpoint {checkpoint}'
    folder, suffix = (path, '.pth') if path.is_dir() else (path.parent, path.suffix or '.pth')
    others = sorted(folder.glob(f'*{suffix}'))
    names = ', '.join(other.name for other in others[:8]) + ', ...' * (len(others) > 8)
    there = f'{folder} has {names or f"no {suffix} file"}'
    if not folder.is_dir():
        there = f'there is no folder {folder} either'
    raise FileNotFoundError(f'{wrong}; {there}')


def note_for_torchrun(line: str) -> None:
    """Leave the sentence where torchrun looks for the reason of a process that failed."""
    path = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if path:
        extra = dict(py_callstack='', timestamp=str(int(time.time())))
        Path(path).write_text(json.dumps(dict(message=dict(message=line, extraInfo=extra))))


def _is_own(frame: FrameType) -> bool:
    return Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)


def _looks_up(error: Exception, frame: FrameType) -> bool:
    """Whether a library's error comes from where it reads what a user named."""
    module = frame.f_globals.get('__name__', '')
    if isinstance(error, AttributeError):  # 'ConfigDict' object has no attribute
        return module.startswith('mmengine.config.')
    in_library = module.partition('.')[0] in _LOOKING_UP or _is(frame, *_LOADING)
    return in_library and isinstance(error, _LOOKED_UP)


def _is(frame: FrameType, file: str, function: str) -> bool:
    return frame.f_code.co_filename.endswith(file) and frame.f_code.co_name == function
