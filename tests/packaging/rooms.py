"""The rooms of the code: their files, and what these import."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ('vim_mm', 'benchmarks', 'studies', 'tools')


def sources(room: str) -> Iterator[Path]:
    """The Python files of a room, without configs and without links to files of another one."""
    for path in sorted((ROOT / room).rglob('*.py')):
        within = path.relative_to(ROOT / room).parts
        if not path.is_symlink() and not {'.mim', 'configs'} & {*within}:
            yield path


def module_name(path: Path) -> str:
    """Of a file, dotted; of __init__.py that of its package."""
    parts = path.relative_to(ROOT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@functools.cache
def imported_modules(path: Path) -> frozenset[str]:
    """Dotted names of all modules that a file imports, anywhere in it.

    ``from package import name`` counts as a module of ours where there is one of that name.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else ROOT
            package = folder.joinpath(*(node.module or '').split('.'))
            above = '.'.join(folder.relative_to(ROOT).parts) if node.level else ''
            base = '.'.join(filter(None, (above, node.module)))
            for alias in node.names:
                inside = package / alias.name
                is_module = inside.is_dir() or inside.with_suffix('.py').exists()
                names.add(f'{base}.{alias.name}' if is_module else base)
    return frozenset(names)


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The names along a way that leads back to its beginning, none if there is no such way."""
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if found := follow(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next(filter(None, (follow(name, []) for name in sorted(graph))), [])
