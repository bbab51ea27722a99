"""What trainings have left in their work directory: the last checkpoint, and all that they wrote.

``last_checkpoint`` is MMEngine's pointer, a path. ``checkpoints.json`` lists the files that the run
of this folder wrote: no others are removed, whatever a checkpoint says.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vim_mm.errors import UserError
from vim_mm.json_lines import read_json
from vim_mm.whole_file import whole_file

POINTER = 'last_checkpoint'
LIST = 'checkpoints.json'
_NUMBERED = re.compile(r'(iter|epoch)_(\d+)\.pth')
_MOST_NAMES = 5
# What the strategies of MMEngine write into the folder of a checkpoint: FSDP, ColossalAI and
# DeepSpeed; and torch.distributed.checkpoint.
_OF_FOLDERS = ('rank*.pth', 'meta.pth', '*_states.pt', '.metadata')


class PointerError(UserError, ValueError):
    """``last_checkpoint`` names no checkpoint of its run."""


@dataclass
class Written:
    """The files of a run.

    Attributes:
        folder (Path): Where its checkpoints are.
        checkpoints (dict): Steps by name, those that were saved last at the end. The last may have
            been killed before it appeared.
        best (dict): Metrics by name of the checkpoint that was best in it.
        run (dict): What trained them: 'config', 'methods', 'seed' and 'job'.
    """

    folder: Path
    checkpoints: dict[str, int] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, work_dir: Path) -> 'Written':
        """What the list in a work directory says; nothing without a list.

        Raises:
            ValueError: It holds something else; names the file.
        """
        file = work_dir / LIST
        found = read_json(file) if file.is_file() else {}
        folder = found.get('folder')
        folder = work_dir / folder if isinstance(folder, str) else work_dir
        checkpoints, best = (_entries(found, name, folder) for name in ('checkpoints', 'best'))
        return cls(
            folder,
            {n: step for n, step in checkpoints if isinstance(step, int)},
            {n: metric for n, metric in best if isinstance(metric, str)},
            dict(found['run']) if isinstance(found.get('run'), dict) else {},
        )

    def write(self, work_dir: Path) -> None:
        """Write the list, whole or not at all."""
        # Relative, so that the list of a copied folder names the copies.
        folder = '.' if self.folder == work_dir.absolute() else str(self.folder)
        text = json.dumps({**asdict(self), 'folder': folder}, indent=1)
        with whole_file(work_dir / LIST, follow_links=False) as part:
            part.write_text(f'{text}\n')

    def note(self, name: str, step: int) -> None:
        """Add a checkpoint, as the last one; what is gone is forgotten."""
        self.checkpoints.pop(name, None)
        self.checkpoints = {n: s for n, s in self.checkpoints.items() if self.has(n)}
        self.checkpoints[name] = step

    def has(self, name: str) -> bool:
        """Whether a checkpoint of this run is there."""
        path = self.folder / name
        return name in {*self.checkpoints, *self.best} and path.exists() and is_checkpoint(path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints of this run."""
        for name in filter(self.has, {*names}):
            remove(self.folder / name)


def _entries(found: dict, name: str, folder: Path) -> list[tuple[str, Any]]:
    """Those whose names, with links resolved, stay in the folder."""
    entries = found.get(name)
    items = entries.items() if isinstance(entries, dict) else ()
    return [(n, value) for n, value in items if _is_below(n, folder)]


def _is_below(name: str, folder: Path) -> bool:
    path = PurePosixPath(name)
    try:
        return bool(path.parts) and '..' not in path.parts and is_within(folder / path, folder)
    except (ValueError, RuntimeError):  # a zero byte in it, or a loop of links
        return False


def is_checkpoint(path: Path) -> bool:
    """Whether a path is that of a checkpoint, by its suffix or else by what it holds."""
    if path.is_dir():
        return any(any(path.glob(pattern)) for pattern in _OF_FOLDERS)
    if path.suffix in ('.pth', '.pt'):
        return True
    if path.is_file():
        with suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            return any(name.endswith('/data.pkl') for name in archive.namelist())
    return False


def is_within(path: Path, *folders: Path) -> bool:
    """Whether a path, itself maybe a link, lies in one of the folders."""
    parent = path.expanduser().absolute().parent.resolve()
    return any(parent.is_relative_to(folder.resolve()) for folder in folders)


def remove(path: Path) -> None:
    """Remove a checkpoint, which some of MMEngine's strategies write as a folder; a link by itself.

    One that is gone is no error.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_pointer(work_dir: Path, checkpoint: Path) -> None:
    """Make a checkpoint the one at which ``--resume`` continues."""
    with whole_file(work_dir / POINTER, follow_links=False) as part:
        part.write_text(str(checkpoint))


def last_checkpoint(work_dir: str | Path, *folders: Path) -> Path | None:
    """The last checkpoint of the run in a work directory, None if there is none yet.

    It is the one that ``last_checkpoint`` names. Where the folder has moved, the one of its name.
    Without this file, as in a folder of copies, or of a run that was killed in its first save, it
    is the last that the run wrote or that has the highest number.

    Args:
        work_dir (str | Path): Of the run.
        *folders (Path): Where its checkpoints may be as well.

    Raises:
        PointerError: ``last_checkpoint`` names none, one that is gone or one of another folder; the
            message lists those that are there.
    """
    work_dir = Path(work_dir).absolute()
    written = Written.read(work_dir)
    own = [*dict.fromkeys([work_dir, *folders, written.folder])]
    pointer = work_dir / POINTER
    if not pointer.is_file():
        return _last_without_pointer(work_dir, written)
    text = pointer.read_text(errors='replace').strip()
    here = f'({listed(checkpoints_in(work_dir, *folders))})'
    remedy = f'choose one by --resume FILE {here}'
    if not text:
        raise PointerError(f'{pointer} is empty: {remedy}')
    named = Path(text).absolute()
    if named.exists() and is_within(named, *own):
        return named
    if named.exists() and not written.has(named.name):
        raise PointerError(
            f'{pointer} names {named}, which is no checkpoint of this folder: {remedy}'
        )
    moved = next((f / named.name for f in own if (f / named.name).exists()), None)
    if moved is None or not named.name:
        raise PointerError(f'{pointer} names {named}, which is gone: {remedy}')
    return moved


def _last_without_pointer(work_dir: Path, written: Written) -> Path | None:
    listed = [written.folder / name for name in written.checkpoints if written.has(name)]
    if listed:
        return listed[-1]
    numbers = {
        int(match[2]): path
        for path in work_dir.glob('*.pth')
        if (match := _NUMBERED.fullmatch(path.name))
    }
    return numbers[max(numbers)] if numbers else None


def checkpoints_in(work_dir: Path, *folders: Path, template: str | None = None) -> list[Path]:
    """The checkpoints of any training in a work directory, and in folders of its checkpoints.

    They are those that a list names, and those with the names that MMEngine gives.

    Args:
        work_dir (Path): May be missing.
        *folders (Path): May be missing.
        template (str, optional): ``filename_tmpl`` of MMEngine's CheckpointHook.

    Returns:
        list[Path]: The best ones last, else by number.
    """
    names = [r'(best_.+_)?(iter|epoch)_\d+\.pth']
    if template is not None:
        parts = map(re.escape, re.split(r'\{[^}]*\}', template))
        names.append('(best_.+_)?' + r'\d+'.join(parts))
    known = re.compile('|'.join(names))
    work_dir = work_dir.absolute()
    written = Written.read(work_dir)
    names_of_list = (*written.checkpoints, *written.best)
    if written.folder not in (work_dir, *folders):  # that of another run, of which this is a copy
        names_of_list = ()
    found = [written.folder / name for name in names_of_list if written.has(name)]
    for folder in dict.fromkeys([work_dir, *folders]):
        paths = folder.iterdir() if folder.is_dir() else ()
        named = [path for path in paths if known.fullmatch(path.name)]
        found += [path for path in named if not path.is_dir() or is_checkpoint(path)]
    return sorted({*found}, key=lambda path: (path.name.startswith('best_'), _numbers(path)))


def _numbers(path: Path) -> tuple:
    """To sort by: the numbers of a name count as numbers."""
    return tuple(int(x) if i % 2 else x for i, x in enumerate(re.split(r'(\d+)', path.name)))


def listed(paths: list[Path]) -> str:
    """Names for a message, not all of many: 'there are iter_2.pth, iter_4.pth'."""
    names = [path.name for path in paths]
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], '...', names[-1]]
    return f'there are {", ".join(names)}' if names else 'there is none'
