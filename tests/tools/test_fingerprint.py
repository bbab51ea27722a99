"""Fingerprints of kernels: a rename leaves them equal, another instruction does not."""

import json
import shutil
import sys

import pytest

from tests.scripts import load

KERNELS = """
template <int N> __global__ void scale(float* x) { x[threadIdx.x] *= N; }
template __global__ void scale<3>(float*);
__global__ void mirror(float* x) {
  __shared__ float all[32];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[31 - threadIdx.x];  // a comment
}
"""
needs_nvcc = pytest.mark.skipif(
    not (shutil.which('nvcc') or shutil.which('nvcc', path='/usr/local/cuda/bin')),
    reason='needs nvcc',
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Calls the tool on a source of this text: its exit code, and the lines that it prints."""

    def run(text, *arguments):
        source = tmp_path / 'toy.cu'
        source.write_text(text)
        monkeypatch.setattr(sys, 'argv', ['fingerprint.py', str(source), *map(str, arguments)])
        script = load('dev/fingerprint.py')
        code = script['main'](script['parse_args']())
        return code, capsys.readouterr().out.splitlines()

    return run


@pytest.mark.slowest
@needs_nvcc
def test_names_and_comments_do_not_count(run, tmp_path):
    out = tmp_path / 'before.json'
    code, lines = run(KERNELS, '--out', out)
    assert code == 0 and len(lines) == 3
    (shared,) = (line.split() for line in lines if line.endswith('mirror'))
    assert shared[3:5] == ['0', '128'], 'no spills, and 32 floats'
    renamed = KERNELS.replace('scale', 'times').replace('a comment', 'another one')
    assert run(renamed, '--compare', out) == (0, ['1 equal, 1 equal under another name'])
    code, lines = run(KERNELS.replace('31 -', '30 -'), '--compare', out)
    assert code == 1
    assert lines[0] == '1 equal, 0 equal under another name'
    assert [(line[0], line.split()[-1]) for line in lines[1:]] == [('-', 'mirror'), ('+', 'mirror')]


@pytest.mark.slowest
@needs_nvcc
def test_a_source_is_compiled_once(run, tmp_path):
    cache = tmp_path / 'cache'
    run(KERNELS, '--cache', cache)
    (cached,) = cache.iterdir()
    table = json.loads(cached.read_text())
    cached.write_text(json.dumps({'from_the_cache': next(iter(table.values()))}))
    _, lines = run(KERNELS.replace('a comment', 'another one'), '--cache', cache)
    assert [line.split()[-1] for line in lines[1:]] == ['from_the_cache']


def test_kernels_are_found_again_by_what_they_do():
    compare = load('dev/fingerprint.py')['compare']
    one, two, three = (['1', 8, 0, 0], ['2', 8, 0, 0], ['3', 8, 0, 0])
    old = {'a': {'f': one, 'g': one, 'h': two}}
    assert compare(old, {'b': {'p': one, 'q': one, 'r': two}}) == (
        ['0 equal, 3 equal under another name'],
        False,
    )
    lines, differ = compare(old, {'a': {'f': one, 'g': three, 'h': two}})
    assert differ and lines[0] == '2 equal, 0 equal under another name'
    assert [line.split()[0:3] for line in lines[1:]] == [['-', 'a', '1'], ['+', 'a', '3']]
