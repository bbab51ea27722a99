"""tools/dev/install_mmcv.py builds mmcv's operators once and never replaces them by nothing."""

import importlib.util
import json
import sysconfig
import tarfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / 'tools/dev/install_mmcv.py'
WHEEL = 'onedl_mmcv-1-py3-none-any.whl'


class Environment:
    """Stands for pip, and for the one package that it installs here: keeps the calls."""

    def __init__(self, script, root: Path):
        self.script = script
        self.metadata = root / 'site-packages/onedl_mmcv.dist-info'
        self.calls = []
        self.setup = "cxx = ['-std=c++17']\ncxx += ['-Wall']\n"

    def pip(self, command: str, *arguments: str, **environment: str) -> None:
        *_, what = arguments
        options = dict(a.partition('=')[::2] for a in arguments)
        if command == 'download':
            setup = Path(options['--dest']) / 'setup.py'
            setup.write_text(self.setup)
            with tarfile.open(setup.with_name('onedl_mmcv-1.tar.gz'), 'w:gz') as archive:
                archive.add(setup, 'onedl_mmcv-1/setup.py')
            setup.unlink()
        elif command == 'wheel':
            self.flags = environment['CFLAGS']
            self.built = (Path(what) / 'setup.py').read_text()
            (Path(options['--wheel-dir']) / WHEEL).touch()
            what = Path(what).name
        else:
            self.record(what)
        self.calls.append((command, what))

    def record(self, what: str, version: str | None = None) -> None:
        self.metadata.mkdir(parents=True, exist_ok=True)
        version = version or self.script.VERSION
        (self.metadata / 'METADATA').write_text(f'Name: onedl-mmcv\nVersion: {version}\n')
        origin = self.metadata / 'direct_url.json'
        origin.unlink(missing_ok=True)
        if what.endswith('.whl'):
            origin.write_text(json.dumps({'url': Path(what).as_uri()}))

    def distribution(self, name: str) -> Distribution:
        if not self.metadata.exists():
            raise self.script.PackageNotFoundError(name)
        return Distribution.at(self.metadata)

    def run(self, monkeypatch, *arguments: str) -> list[tuple[str, str]]:
        """Runs the script once; what it asked of pip."""
        self.calls = []
        monkeypatch.setattr('sys.argv', ['install_mmcv.py', *arguments])
        self.script.main(self.script.parse_args())
        return self.calls


@pytest.fixture
def environment(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location('install_mmcv', SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    environment = Environment(script, tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(script, 'pip', environment.pip)
    monkeypatch.setattr(script, 'distribution', environment.distribution)
    return environment


def test_flags_of_the_user_are_kept(environment, monkeypatch):
    monkeypatch.setenv('CFLAGS', '-O1 -g')
    environment.run(monkeypatch, '--with-ops')
    assert environment.flags == '-O1 -g'


def test_without_operators_from_source_once(environment, monkeypatch):
    assert environment.run(monkeypatch) == [('install', environment.script.REQUIREMENT)]
    assert environment.run(monkeypatch) == []


def test_operators_are_built_once_and_serve_every_purpose(environment, monkeypatch):
    wheel = str(environment.script.cache_folder() / WHEEL)
    monkeypatch.delenv('CFLAGS', raising=False)
    assert environment.run(monkeypatch, '--with-ops') == [
        ('download', environment.script.REQUIREMENT),
        ('wheel', 'onedl_mmcv-1'),
        ('install', wheel),
    ]
    assert environment.built == "cxx = []\ncxx += ['-Wall']\n"  # the standard is torch's choice
    assert environment.flags.startswith(sysconfig.get_config_var('CFLAGS'))  # they optimize
    assert environment.flags.endswith(' -g0')
    assert environment.run(monkeypatch, '--with-ops') == []
    assert environment.run(monkeypatch) == []


@pytest.mark.parametrize(
    ('setup', 'torch', 'refused'),
    [
        pytest.param("cxx = ['-O2', '-std=c++17']", '2.14.0+cpu', True, id='other_words'),
        pytest.param('cxx = ["-std=c++17"]', '2.15.0a0', True, id='other_quotes'),
        pytest.param("cxx = ['-std=c++14']", '2.11.0+cpu', False, id='torch_takes_it'),
        pytest.param("cxx = ['-Wall']", '2.14.0+cpu', False, id='no_standard'),
        pytest.param("cxx = ['-std=c++20']", '2.14.0+cpu', False, id='newer_standard'),
    ],
)
def test_a_standard_that_torch_refuses_is_never_left(
    setup, torch, refused, environment, monkeypatch
):
    environment.setup = setup
    monkeypatch.setattr(environment.script, 'version', lambda name: torch)
    if refused:
        with pytest.raises(SystemExit, match=r"does not hold \['-std=c\+\+17'\]"):
            environment.run(monkeypatch, '--with-ops')
        assert [command for command, _ in environment.calls] == ['download']
    else:
        environment.run(monkeypatch, '--with-ops')
        assert environment.built == setup


def test_operators_replace_an_mmcv_without(environment, monkeypatch):
    environment.run(monkeypatch)
    calls = environment.run(monkeypatch, '--with-ops')
    assert [command for command, _ in calls] == ['download', 'wheel', 'install']


@pytest.mark.parametrize(
    'arguments', [pytest.param((), id='any'), pytest.param(('--with-ops',), id='ops')]
)
def test_another_clone_takes_the_wheel_from_the_cache(environment, monkeypatch, arguments):
    folder = environment.script.cache_folder()
    folder.mkdir(parents=True)
    (folder / WHEEL).touch()
    assert environment.run(monkeypatch, *arguments) == [('install', str(folder / WHEEL))]


def test_another_version_is_replaced(environment, monkeypatch):
    environment.record('onedl-mmcv==2.0.0', version='2.0.0')
    assert environment.run(monkeypatch) == [('install', environment.script.REQUIREMENT)]


def test_a_failed_build_leaves_no_wheel(environment, monkeypatch):
    def fail(*arguments, **variables):
        environment.pip(*arguments, **variables)
        raise RuntimeError

    monkeypatch.setattr(environment.script, 'pip', fail)
    with pytest.raises(RuntimeError):
        environment.run(monkeypatch, '--with-ops')
    assert [*environment.script.cache_folder().iterdir()] == []


def test_wheels_of_another_torch_are_not_taken(environment, monkeypatch):
    before = environment.script.cache_folder()
    monkeypatch.setattr(environment.script, 'version', lambda name: '2.99.0')
    assert environment.script.cache_folder() != before
