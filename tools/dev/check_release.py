"""Checks that a publication is one command away, and builds what it would upload.

Usage: ``python tools/dev/check_release.py [--out dist]``, or ``make release-check``. Looks at the
version, the changelog and the tag, builds sdist and wheel of the CPU from a clean clone of HEAD,
and looks at what is in them. Names everything that is wrong and ends with code 1, or prints the
commands of the publication.
"""

import argparse
import email
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from pathlib import Path

from _command_line import add_debug, end
from build_wheel import ROOT, audit, build, run

# Habits of the repository, which a package has no use for.
NOT_IN_SDIST = re.compile(r'\.(ci/|clang-format|gitignore|pre-commit)')
GENERATED = re.compile(r'PKG-INFO|setup\.cfg|vim_mm\.egg-info/')
# Links to folders, which an archive holds resolved.
LINKS = ('vim_mm/.mim/configs',)
GLIBC = 28  # the minor version of the manylinux tag that PyTorch's wheels have
LARGEST_FILE = 2**20  # bytes: pictures and golden vectors are smaller, data sets are not
MODEL, LARGEST_MODEL = 'demo/earth.pth', 6 * 2**20


def version_of(root: Path) -> str:
    """``__version__`` of a checkout, without importing it."""
    (version,) = re.findall(
        r"^__version__ = '(.+)'", (root / 'vim_mm/version.py').read_text(), re.M
    )
    return version


def audit_source(root: Path) -> list[str]:
    """What in a checkout speaks against the release of its version: changelog, tag, changes."""
    version = version_of(root)
    problems = []
    if re.fullmatch(r'\d+\.\d+\.\d+((a|b|rc)\d+)?', version) is None:
        problems.append(f'vim_mm/version.py: {version!r} is no version such as 1.2.0 or 1.2.0rc1')
    _, *entries = re.split(r'^## ', (root / 'CHANGELOG.md').read_text(), flags=re.M)
    title, _, text = entries[0].partition('\n') if entries else ('', '', '')
    if title.partition(' - ')[0] != version:
        problems.append(f'CHANGELOG.md: the first entry is {title!r}, expected {version}')
    elif not re.search(r'^- ', text, re.M):
        problems.append(f'CHANGELOG.md: the entry of {version} names no change')
    tag = f'v{version}'
    if run('git', 'tag', '--list', tag, cwd=root):
        problems.append(f'the tag {tag} is taken: raise __version__ in vim_mm/version.py')
    if changed := run('git', 'status', '--porcelain', cwd=root).splitlines():
        problems.append(f'{len(changed)} files are not committed, such as {changed[0][3:]}')
    return problems


def audit_sdist(archive: Path, tracked: list[str]) -> list[str]:
    """What an sdist lacks of the files that git tracks, and what it holds beside them."""
    with tarfile.open(archive) as file:
        sizes = {m.name.partition('/')[2]: m.size for m in file.getmembers() if m.isfile()}
    wanted = {name for name in tracked if not NOT_IN_SDIST.match(name)}
    found = {_as_tracked(name) for name in sizes if not GENERATED.match(name)}
    problems = [f'{archive.name} lacks {name}' for name in sorted(wanted - found)]
    problems += [f'{archive.name} holds {name}' for name in sorted(found - wanted)]
    return problems + [
        f'{archive.name}: {name} has {size / 2**20:.1f} MiB'
        for name, size in sizes.items()
        if size > (LARGEST_MODEL if name == MODEL else LARGEST_FILE)
    ]


def _as_tracked(name: str) -> str:
    """The link of a checkout that an archive holds resolved, or the name itself."""
    return next((link for link in LINKS if name.startswith(f'{link}/')), name)


def metadata(archive: Path) -> Message:
    """The metadata of an sdist or a wheel."""
    if archive.suffix == '.whl':
        with zipfile.ZipFile(archive) as file:
            (name,) = (n for n in file.namelist() if n.endswith('.dist-info/METADATA'))
            return email.message_from_bytes(file.read(name))
    with tarfile.open(archive) as file:
        (name,) = (n for n in file.getnames() if re.fullmatch(r'[^/]+/PKG-INFO', n))
        return email.message_from_bytes(file.extractfile(name).read())


def audit_metadata(archive: Path, version: str) -> list[str]:
    """What is wrong with name, version, page and license in the metadata."""
    found = metadata(archive)
    wanted = {'Name': 'vim-mm', 'Version': version, 'License-Expression': 'Apache-2.0'}
    problems = [
        f'{archive.name}: {key} is {found[key]}, expected {value}'
        for key, value in wanted.items()
        if found[key] != value
    ]
    command = [sys.executable, '-m', 'twine', '--no-color', 'check', '--strict', str(archive)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        problems.append(f'twine check: {" ".join((done.stdout + done.stderr).split())}')
    return problems


def audit_platform(wheel: Path) -> list[str]:
    """What is wrong with a wheel's platform; what runs PyTorch's wheels must run this one."""
    found = re.search(r'manylinux_2_(\d+)_', wheel.name)
    if found is not None and int(found[1]) <= GLIBC:
        return []
    return [f'{wheel.name}: the platform is none of manylinux_2_{GLIBC} or older']


def main(args: argparse.Namespace) -> None:
    problems = audit_source(ROOT)
    version = version_of(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        clone = Path(temporary) / 'clone'
        run('git', 'clone', '--quiet', str(ROOT), str(clone))
        archives = build(clone, args.out.resolve(), cuda=False)
        tracked = run('git', 'ls-files', cwd=clone).splitlines()
    sdist, wheel = archives
    problems += audit_sdist(sdist, tracked) + audit(wheel) + audit_platform(wheel)
    for archive in archives:
        problems += audit_metadata(archive, version)
    if problems:
        raise SystemExit('\n'.join([f'{version} cannot be published:', *problems]))
    files = ' '.join(map(str, archives))
    print(f'{version} can be published:\ngit tag v{version}\ntwine upload {files}')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description='Check that HEAD can be published as a release.')
    parser.add_argument('--out', type=Path, default=ROOT / 'dist', help='folder of sdist and wheel')
    add_debug(parser)
    return parser.parse_args()


if __name__ == '__main__':
    end(main, parse_args())
