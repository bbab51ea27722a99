"""What a tool prints of a run: some lines on the screen, MMEngine's whole log in its file.

A tool opens the screen, see :func:`open_screen`; without that, and with ``--verbose``, nothing is
changed. On the screen are the messages of this package and of a user's own code, what MMEngine says
of an interval, of a validation and of the best checkpoint, and every warning and error but for
``FALSE_ALARMS`` and what Python says of the libraries' syntax.
"""

import builtins
import logging
import re
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module

from mmengine.config import Config
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import logger_hook
from mmengine.logging import MMLogger
from mmengine.logging.logger import MMFormatter, print_log

from vim_mm.config import part, type_name

WIDTH = 120  # columns of a line about an interval
# Of whose messages those below alone are shown; all that others say is.
_LIBRARIES = ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'pycocotools')
# Rows of a table that is shown whole, and of a longer one those from either end; by the name of its
# first column. MMDetection has two tables, of boxes and of masks.
_MOST_ROWS, _ENDS = {'Class': 20, 'category': 7}, {'Class': 8, 'category': 3}
_OF_A_CLASS = re.compile(r'(coco|lvis)\w*/.+_precision$')  # metrics that stand in the table as well
_PATIENCE = 10.0  # seconds of a validation before its first interval is shown; doubled each time
# Modules that print what they do. A `print` of their own goes to the log.
_PRINTING = (
    'mmengine.logging.logger',
    'pycocotools.coco',
    'pycocotools.cocoeval',
    'mmdet.datasets.api_wrappers.coco_api',
    'mmdet.datasets.api_wrappers.cocoeval_mp',
)
# What they print of their steps, and of metrics that the table has; all else stays on the screen.
_CHATTER = re.compile(
    r'Loads checkpoint by \w+ backend'
    r'|(loading annotations|Loading and preparing|creating index|index created|Converting ndarray)'
    r'|(Running per image|Evaluate annotation type|Accumulating evaluation)'
    r'|(DONE|Done) ?\(t=|\s*Average (Precision|Recall) |\d+/\d+$|\(\d+, 7\)$'
)
# Of MMEngine's and the task libraries' log: the title of a table, and where the best weights are.
_SHOWN = re.compile(r'Evaluating \w+\.\.\.|The best checkpoint with ')
_HEAD = re.compile(r'(?:Iter|Epoch)\((train|val|test)\)\s*(?:\[[^\]]*\])+')
_FIRST = ('lr', 'eta', 'time', 'memory', 'loss')  # of an interval's line, before what else fits
_KEYED = (Mapping, Config)  # MMEngine's config is no Mapping
# What meets the data: it warns of a file or an image, or calls a user's code that does so in the
# name of its caller (``stacklevel=2``).
_WITH_DATA = re.compile(
    r'/(mmengine/(dataset|evaluator/evaluator\.py)|mmcv/transforms|(mmdet|mmseg|mmpretrain)/datasets'
    r'|torch/(utils/data/_utils|nn/modules/module\.py))(/|$)'
)
_TIMES = {'time', 'data_time', 'memory', 'eta'}
_IN_16_BITS = ('BFloat16OptimWrapper', 'AmpOptimWrapper', 'ApexOptimWrapper')


def _uses(cfg: Mapping, *names: str) -> bool:
    """Whether a config holds one of these texts, as a key, as a type or in one."""
    return any(name in text for text in _texts(cfg) for name in names)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, _KEYED):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str | type):
        yield value if isinstance(value, str) else value.__name__


def _metrics(cfg: Mapping) -> int:
    """The most metrics that an evaluator has; their names cannot be mixed up with one."""
    given = (cfg.get(f'{split}_evaluator') for split in ('val', 'test'))
    metrics = (each.get('metrics') if isinstance(each, Mapping) else each for each in given)
    many = (each if isinstance(each, list | tuple) else [each] for each in metrics)
    writers = ('LabelMaps', 'LabelFile')  # of `test.py --out`, which give no value
    return max(
        sum(not (isinstance(one, Mapping) and type_name(one) in writers) for one in each)
        for each in many
    )


# By what a library's warning begins with, when it does not concern a run: it is shown unless
# that holds.
FALSE_ALARMS: dict[str, Callable[['Screen'], bool]] = {
    # No data set or transform is one of OneDL.
    r'Could not import OneDL': lambda run: not _uses(run.cfg, 'OneDL'),
    # '... This model cannot work without CUDA': no head is the CLRHead, which alone calls it.
    r'Line NMS is not compiled': lambda run: not _uses(run.cfg, 'CLRHead', 'CLRerNet', 'CLRNet'),
    r'faster_coco_eval is not installed': lambda run: not _uses(run.cfg, 'FasterCocoMetric'),
    # Each evaluator has one metric, whose names cannot be mixed up with those of another.
    r'The prefix is not set in metric class': lambda run: _metrics(run.cfg) == 1,
    # The config sets no file_client_args; it is MMEngine that calls its own old class.
    r'"FileClient" will be deprecated|"HardDiskBackend" is the alias': lambda run: (
        not _uses(run.cfg, 'file_client_args', 'HardDiskBackend')
    ),
    # The hook for drawings is asked neither to draw nor to show.
    r'The draw is False, it means that the hook for visualization': lambda run: (
        not any(part(run.cfg, 'default_hooks.visualization').get(name) for name in ('draw', 'show'))
    ),
    # No loss is computed.
    r'Default ``avg_non_ignore`` is False': lambda run: not run.learns,
    # In 16 bits: the compiler says it whatever it compiles.
    r'TensorFloat32 tensor cores for float32 matrix multiplication available': lambda run: (
        type_name(part(run.cfg, 'optim_wrapper')) in _IN_16_BITS if run.learns else run.amp
    ),
}


class Screen(logging.Filter):
    """A filter of a logger's console, which gives each record its text there.

    Args:
        cfg (Mapping): Of the run, which decides what is a false alarm.
        amp (bool): Whether predictions are made in 16 bits; of a training the config says it.

    Attributes:
        learns (bool): Whether losses may be computed, see :func:`expect_no_loss`.
    """

    def __init__(self, cfg: Mapping, amp: bool = False):
        super().__init__()
        self.cfg, self.amp, self.learns = cfg, amp, True
        # What is logged before the run has a file.
        self.early: deque[logging.LogRecord] | None = deque(maxlen=1000)
        self._due: dict[str, tuple[float, float]] = {}  # by stage: next interval, and its patience

    def attach(self, logger: MMLogger) -> None:
        """Filter the console of a logger; its file, if it has one, gets what was said before."""
        files = [each for each in logger.handlers if isinstance(each, logging.FileHandler)]
        for handler in logger.handlers:
            if handler not in files and self not in handler.filters:
                handler.addFilter(self)
                handler.setFormatter(_OnScreen())
        if files and self.early is not None:
            for record in self.early:
                for handler in files:
                    handler.handle(record)
            self.early = None

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown; its text is ``record.on_screen``."""
        if self.early is not None:
            self.early.append(record)
        record.on_screen = self.text(record)
        return record.on_screen is not None

    def text(self, record: logging.LogRecord) -> str | None:
        """What the screen has of a record, None if nothing."""
        message = record.getMessage()
        if record.levelno >= logging.WARNING:
            # Python compiles a library's text when it is imported for the first time.
            syntax = message.startswith('SyntaxWarning: ') and _is_in(record.pathname, *_LIBRARIES)
            hidden = syntax or self._is_false_alarm(message)
            return None if hidden else _with_trace(record, message)
        if getattr(record, 'is_printed', False):
            return message if self.shows_print(message) else None
        if not _is_of_library(record):
            return message
        head = _HEAD.match(message)
        if head:
            return self._of_stage(head, record)
        # A user's own LogProcessor writes what it likes.
        if record.pathname == logger_hook.__file__ and not message.startswith('Exp name: '):
            return message
        return _of_library(message)

    def shows_print(self, message: str) -> bool:
        """Whether what a module of ``_PRINTING`` prints is shown."""
        return not (_CHATTER.match(message) or self._is_false_alarm(message))

    def _is_false_alarm(self, message: str) -> bool:
        return any(
            re.match(rf'(\w+: )?({pattern})', message) and holds(self)
            for pattern, holds in FALSE_ALARMS.items()
        )

    def _of_stage(self, head: re.Match, record: logging.LogRecord) -> str | None:
        """The line of an interval, or the metrics at the end of a validation."""
        message = record.getMessage()
        stage, values = head[1], message[head.end() :].strip()
        pairs = _pairs(values)
        if '\n' in values or not pairs:  # a matrix, or what another LogProcessor writes
            return message
        clock = time.strftime('%H:%M:%S', time.localtime(record.created))
        begin = f'{clock} {head[0]}'
        if stage == 'train':
            return _one_line(begin, pairs)
        if 'eta' not in pairs and {*pairs} - _TIMES:
            self._due.pop(stage, None)
            return _several_lines(begin, pairs)
        # Shown after 10 seconds, 20 more, 40 more, so that no length of a validation is many lines.
        due, patience = self._due.setdefault(stage, (record.created + _PATIENCE, _PATIENCE))
        if record.created < due:
            return None
        self._due[stage] = record.created + 2 * patience, 2 * patience
        return _one_line(begin, pairs)


class _OnScreen(logging.Formatter):
    """The text that :class:`Screen` gave a record."""

    def format(self, record: logging.LogRecord) -> str:
        return record.on_screen


def _is_of_library(record: logging.LogRecord) -> bool:
    """Whether one of ``_LIBRARIES`` says it; asked while it is logged."""
    file = record.pathname
    if file == print_log.__code__.co_filename:  # then its caller says it
        frame = sys._getframe()
        while frame is not None and frame.f_code is not print_log.__code__:
            frame = frame.f_back
        if frame is not None and frame.f_back is not None:
            file = frame.f_back.f_code.co_filename
    return _is_in(file, *_LIBRARIES)


def _is_in(file: str, *packages: str) -> bool:
    """Whether a file is of one of these packages, as far as they are imported."""
    folders = (getattr(sys.modules.get(name), '__path__', None) for name in packages)
    return any(file.startswith(f'{folder[0]}/') for folder in folders if folder)


def _with_trace(record: logging.LogRecord, message: str) -> str:
    trace = ''.join(traceback.format_exception(*record.exc_info)) if record.exc_info else ''
    return f'{record.levelname} - {message}' + (f'\n{trace.rstrip()}' if trace else '')


def _pairs(text: str) -> dict[str, str]:
    """The values of a line such as 'lr: 1e-4  eta: 1 day, 2:03:04  loss: 0.5'."""
    chunks = re.split(r'\s{2,}', text.strip())
    return {
        key: value
        for chunk in chunks
        for key, value in re.findall(r'(\S+): (.+?)(?= \S+: |$)', chunk)
    }


def _one_line(begin: str, pairs: Mapping[str, str]) -> str:
    """As many values as fit, the important ones first."""
    rest = [key for key in pairs if key not in (*_FIRST, 'data_time')]
    if pairs.get('base_lr') == pairs.get('lr'):  # no other unless layers have rates of their own
        rest = [key for key in rest if key != 'base_lr']
    line = begin
    for key in (*_FIRST, *rest, 'data_time'):
        if key in pairs:
            longer = f'{line}  {key}: {pairs[key]}'
            if len(longer) > WIDTH:
                break
            line = longer
    return line


def _several_lines(begin: str, pairs: Mapping[str, str]) -> str:
    """The metrics of a validation."""
    lines = [begin]
    for key, value in pairs.items():
        if key == 'data_time' or _OF_A_CLASS.match(key):
            continue
        if len(lines[-1]) + len(f'  {key}: {value}') > WIDTH:
            lines.append('  ')
        lines[-1] += f'  {key}: {value}'
    return '\n'.join(lines)


def _of_library(message: str) -> str | None:
    """What is shown of a library's own message: a table, and what ``_SHOWN`` has."""
    lines = message.strip().splitlines()
    if lines and all(line.startswith(('+', '|')) for line in lines):
        return '\n'.join(_folded(lines))
    return message if _SHOWN.match(message) else None


def _folded(lines: list[str]) -> list[str]:
    """A table, of a long one the rows with the lowest and the highest first value."""
    title, *rows = [line for line in lines if line.startswith('|')] or ['']
    kind = 'category' if title.startswith('| category') else 'Class'
    if len(rows) <= _MOST_ROWS[kind]:
        return lines

    def first_value(row: str) -> float:
        try:
            value = float(row.split('|')[2])
        except ValueError:
            return float('inf')
        return float('inf') if value != value else value

    ranked = sorted(rows, key=first_value)
    ends = _ENDS[kind]
    left_out = f'... {len(rows) - 2 * ends} of {len(rows)} rows are in the log file alone'
    return [*lines[:3], *ranked[:ends], left_out, *ranked[-ends:], lines[0]]


_opened: Screen | None = None
_show_warning = warnings.showwarning


def open_screen(cfg: Mapping, amp: bool = False) -> Screen:
    """Let loggers of this process, and those that runners make later, print to a screen.

    Warnings of Python and of this package's own logger go there as well, and to the run's file. Of
    the arguments see :class:`Screen`.
    """
    global _opened
    close_screen()
    _opened = Screen(cfg, amp)
    _opened.attach(MMLogger.get_current_instance())
    warnings.showwarning = _log_warning
    logging.getLogger('vim_mm').addHandler(_FORWARD)
    catch_prints()
    return _opened


def close_screen() -> None:
    """Undo :func:`open_screen`; loggers that were made meanwhile keep theirs."""
    global _opened
    if _opened is None:
        return
    for logger in MMLogger._instance_dict.values():
        for handler in logger.handlers:
            if _opened in handler.filters:
                handler.removeFilter(_opened)
                handler.setFormatter(MMFormatter(color=True, datefmt='%m/%d %H:%M:%S'))
    if warnings.showwarning is _log_warning:
        warnings.showwarning = _show_warning
    logging.getLogger('vim_mm').removeHandler(_FORWARD)
    for name in _PRINTING:
        if name in sys.modules:
            vars(sys.modules[name]).pop('print', None)
    _opened = None


def opened() -> Screen | None:
    """The screen of this process; None where a run is logged as in MMEngine."""
    return _opened


def expect_no_loss() -> None:
    """Tell the screen, if one is open, that a model which is built next only predicts."""
    if _opened is not None:
        _opened.learns = False


def catch_prints() -> None:
    """Let the modules of ``_PRINTING`` print to the log, of a library that is imported by now."""
    for name in _PRINTING if _opened is not None else ():
        if name.startswith('mmengine') or 'mmdet' in sys.modules:
            with suppress(ImportError):
                vars(import_module(name))['print'] = _log_print


def _log_print(*values: object, sep: str | None = None, **options) -> None:
    """Stands in for ``print``: a line of the log, which :class:`Screen` decides about."""
    if options.get('file') not in (None, sys.stdout) or options.get('end', '\n') != '\n':
        builtins.print(*values, sep=sep, **options)
        return
    text = (' ' if sep is None else sep).join(map(str, values))
    logger = MMLogger.get_current_instance()
    logger.info(text, stacklevel=2, extra=dict(is_printed=True))
    # What is printed has no level: no log_level leaves it out.
    consoles = [each for each in logger.handlers if not isinstance(each, logging.FileHandler)]
    hidden = _opened is not None and not _opened.shows_print(text)
    if not hidden and all(each.level > logging.INFO for each in consoles):
        builtins.print(text, **options)


def _log_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """Stands in for ``warnings.showwarning``."""
    if file is not None or _opened is None:
        _show_warning(message, category, filename, lineno, file, line)
        return
    place = filename.rpartition('/site-packages/')[2]
    text = f'{category.__name__}: {" ".join(str(message).split())} ({place}, line {lineno})'
    logger = MMLogger.get_current_instance()
    _handle(logger.makeRecord(logger.name, logging.WARNING, filename, lineno, text, (), None))


def _handle(record: logging.LogRecord) -> None:
    """Give a record to the run's logger, or a warning that none of its handlers takes to stderr.

    In processes but the first, MMEngine's logger has a console for errors alone, and no file. What
    PyTorch and the libraries warn of there is the config and the machine, as in the first; but what
    a process reads is its own.
    """
    logger = MMLogger.get_current_instance()
    taken = any(record.levelno >= each.level for each in logger.handlers)
    if taken or record.levelno < logging.WARNING:
        logger.handle(record)
    elif _opened is not None and (text := _opened.text(record)) is not None:
        file = record.pathname
        if get_rank() > 0 and _is_in(file, *_LIBRARIES, 'torch') and not _WITH_DATA.search(file):
            return
        rank = f'rank {get_rank()}: ' if get_world_size() > 1 else ''
        # At one go, which lines of other processes do not come between.
        sys.stderr.write(f'{rank}{text}\n')
        sys.stderr.flush()


class _Forward(logging.Handler):
    """Passes records of Python's loggers on to the run's."""

    def emit(self, record: logging.LogRecord) -> None:
        _handle(record)


_FORWARD = _Forward()
