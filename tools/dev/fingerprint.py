"""Fingerprints of all CUDA kernels without a GPU: hash of the machine code, registers, spills.

    python tools/dev/fingerprint.py --cache DIR --out before.json
    python tools/dev/fingerprint.py --cache DIR --compare before.json

Neither comments nor the names of kernels and types are part of a fingerprint: after a move or a
rename all are equal, or the change did more than it says. The exit code of a comparison is 1 where
machine code differs. A source whose preprocessed text is in the cache is not compiled again; all of
them take about 45 processor minutes.
"""

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _command_line import add_debug, end, parser_of, positive

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ['-std=c++17', '-O3']  # what decides about machine code in setup.py
USED = re.compile(
    r"Compiling entry function '(\w+)'.*?\n(.*?)Used (\d+) registers(.*?)$", re.M | re.S
)


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        'sources', nargs='*', type=Path, help='CUDA sources (default: all of csrc/cuda)'
    )
    parser.add_argument('--arch', default='sm_90', help='of the machine code (default: sm_90)')
    parser.add_argument('--cache', type=Path, help='folder of fingerprints by source text')
    parser.add_argument('--jobs', type=positive, default=1, help='sources compiled at once')
    parser.add_argument('--include', type=Path, nargs='+', default=[], help='folders of headers')
    parser.add_argument('--out', type=Path, help='write the fingerprints as JSON to this file')
    parser.add_argument('--compare', type=Path, metavar='OLD', help='such a file: what has changed')
    add_debug(parser)
    return parser.parse_args()


def find_nvcc() -> str:
    nvcc = shutil.which('nvcc') or shutil.which('nvcc', path='/usr/local/cuda/bin')
    if nvcc is None:
        raise FileNotFoundError('fingerprints need nvcc, and there is none in PATH')
    return nvcc


def run(*command: str) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{" ".join(command)} failed:\n{done.stderr}')
    return done


def sections(cubin: bytes) -> dict[str, bytes]:
    """The sections of an ELF file by name; one without bytes, such as shared memory, has a size."""
    from elftools.elf.elffile import ELFFile

    return {part.name: part.data() for part in ELFFile(io.BytesIO(cubin)).iter_sections()}


def fingerprints(cubin: bytes, report: str) -> dict[str, list]:
    """Of each kernel, by its mangled name: hash, registers, bytes of spills and of shared memory.

    Args:
        cubin (bytes): What nvcc made of a source for one architecture.
        report (str): What ptxas said with -v.
    """
    parts = sections(cubin)
    found = {}
    for name, properties, registers, used in USED.findall(report):
        code = parts[f'.text.{name}']
        # Bank 0 has the arguments; others have literals that the code reads.
        for section in sorted(parts):
            if re.fullmatch(rf'\.nv\.constant[1-9]\d*\.{name}', section):
                code += parts[section]
        spills = sum(map(int, re.findall(r'(\d+) bytes spill', properties)))
        shared = re.search(r'(\d+) bytes smem', used)
        digest = hashlib.sha256(code).hexdigest()[:16]
        found[name] = [digest, int(registers), spills, int(shared[1]) if shared else 0]
    return found


def of_source(source: Path, args: argparse.Namespace, nvcc: str) -> dict[str, list]:
    """The fingerprints of a source, from the cache if they are there."""
    flags = [*FLAGS, f'-arch={args.arch}', *(f'-I{path}' for path in args.include)]
    text = run(nvcc, *flags, '-E', '-Xcompiler', '-P', str(source)).stdout
    version = run(nvcc, '--version').stdout
    key = '\n'.join([version, *flags, *text.split()])
    key = hashlib.sha256(key.encode()).hexdigest()[:24]
    cached = args.cache / f'{source.stem}-{key}.json' if args.cache else None
    if cached and cached.exists():
        return json.loads(cached.read_text())
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / 'kernels.cubin'
        made = run(nvcc, *flags, '-cubin', '-Xptxas', '-v', '-o', str(cubin), str(source))
        found = fingerprints(cubin.read_bytes(), made.stderr + made.stdout)
    if cached:
        cached.parent.mkdir(parents=True, exist_ok=True)
        part = cached.with_suffix(f'.{os.getpid()}')
        part.write_text(json.dumps(found))
        part.replace(cached)
    return found


def name_of(source: Path) -> str:
    """Its path below the CUDA sources; files of two folders may have one name."""
    folder, path = ROOT / 'csrc/cuda', source.resolve()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path.name)


def readable(names: list[str]) -> list[str]:
    """Kernels and their template arguments, as they are in the sources."""
    if not names or shutil.which('c++filt') is None:
        return names
    done = subprocess.run(['c++filt'], input='\n'.join(names), capture_output=True, text=True)
    return [shorten(line) for line in done.stdout.splitlines()]


def shorten(name: str) -> str:
    """Without namespace, result, arguments and the types of constants."""
    name = re.sub(r'\(anonymous namespace\)::|vim_mm::|^void |\((unsigned )?[\w:]+\)', '', name)
    return name.partition('(')[0]


def compare(old: dict[str, dict], new: dict[str, dict]) -> tuple[list[str], bool]:
    """What differs between two tables {source: {kernel: fingerprint}}, and whether code does.

    Kernels that have other names are found again by their fingerprints, wherever they are now.
    """
    before = {(source, name): tuple(f) for source, of in old.items() for name, f in of.items()}
    after = {(source, name): tuple(f) for source, of in new.items() for name, f in of.items()}
    same = {key for key in before.keys() & after.keys() if before[key] == after[key]}
    gone = Counter(f for key, f in before.items() if key not in same)
    renamed = gone & Counter(f for key, f in after.items() if key not in same)
    lines = [f'{len(same)} equal, {renamed.total()} equal under another name']
    left = dict.fromkeys(('-', '+'))
    for sign, table in (('-', before), ('+', after)):
        matched, left[sign] = Counter(renamed), []
        for key in sorted(table.keys() - same):
            if matched[table[key]] > 0:
                matched[table[key]] -= 1
            else:
                left[sign].append((*key, table[key]))
    rows = [(source, name, sign, f) for sign, those in left.items() for source, name, f in those]
    rows.sort(key=lambda row: (row[0], row[1], row[2] == '+'))
    for (source, _, sign, f), name in zip(rows, readable([name for _, name, *_ in rows])):
        lines.append(f'{sign} {describe(source, name, f)}')
    return lines, bool(rows)


def describe(source: str, name: str, fingerprint) -> str:
    digest, registers, spills, shared = fingerprint
    return f'{source:24} {digest} {registers:4} {spills:5} {shared:6}  {name}'


def main(args: argparse.Namespace) -> int:
    nvcc = find_nvcc()
    sources = args.sources or sorted((ROOT / 'csrc/cuda').rglob('*.cu'))
    old = json.loads(args.compare.read_text()) if args.compare else None
    with ThreadPoolExecutor(args.jobs) as pool:
        made = pool.map(lambda source: of_source(source, args, nvcc), sources)
        table = {name_of(source): found for source, found in zip(sources, made)}
    if args.out:
        args.out.write_text(json.dumps(table, indent=1, sort_keys=True))
    if old is not None:
        if args.sources:
            old = {source: old.get(source, {}) for source in table}
        lines, differ = compare(old, table)
        print(*lines, sep='\n')
        return int(differ)
    print(f'{"source":24} {"hash":16} regs spill shared  kernel')
    for source, of in sorted(table.items()):
        for name, key in sorted(zip(readable([*of]), of)):
            print(describe(source, name, of[key]))
    return 0


if __name__ == '__main__':
    end(main, parse_args())
