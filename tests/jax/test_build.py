"""Building the handlers, and what is said where that cannot be."""

import importlib
import sys

import pytest

from vim_mm.ops import library


def test_without_jax_the_import_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith('vim_mm.jax')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'jax', None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax>=0\.6'"):
        importlib.import_module('vim_mm.jax')


@pytest.fixture
def build(tmp_path, monkeypatch):
    """The module, with a cache that is empty."""
    pytest.importorskip('jax', reason='JAX is not installed (the extra jax)')
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return importlib.import_module('vim_mm.jax.build')


def test_without_the_compiled_scan(build, monkeypatch):
    monkeypatch.setattr(library, 'MISSING', 'vim_mm._C is not built')
    with pytest.raises(RuntimeError, match=r'vim_mm.jax calls the compiled scan, but vim_mm._C'):
        build.build()


def test_without_a_compiler(build, monkeypatch):
    monkeypatch.setenv('CXX', 'no-such-compiler')
    with pytest.raises(RuntimeError, match=r'needs a C\+\+ compiler once.*no-such-compiler'):
        build.build()


def test_a_compiler_that_fails_is_quoted(build, monkeypatch, tmp_path):
    monkeypatch.setenv('CXX', f'{sys.executable} -c "raise SystemExit(\'no standard library\')"')
    with pytest.raises(RuntimeError, match='no standard library'):
        build.build()
    assert not [*tmp_path.glob('vim_mm/*')]


@pytest.mark.slow
def test_builds_once(build, monkeypatch):
    path = build.build()
    monkeypatch.setenv('PATH', '')
    assert build.build() == path
