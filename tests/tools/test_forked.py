"""The stand-in for a fresh interpreter ends as one, whatever the script does."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import forked_python
from tests.scripts import ROOT

SCRIPT = """
import os, signal, sys, time
print(sys.argv[1:], os.getcwd(), os.environ['COLOUR'], sys.path[0], 'vim_mm' in sys.modules)
if sys.argv[1] == 'exit':
    sys.exit('A sentence')
if sys.argv[1] == 'fail':
    raise ValueError('A mistake')
if sys.argv[1] == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == 'sleep':
    sys.stdout.flush()
    time.sleep(100)
"""


@pytest.fixture
def start(tmp_path) -> Iterator:
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    started = []

    def start(python: str, argument: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [python, str(script), argument, 'two words'],
            cwd=tmp_path,
            env={**os.environ, 'COLOUR': 'red'},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize('argument', ['return', 'exit', 'fail', 'kill'])
def test_ends_as_an_interpreter_does(argument, start):
    ends = []
    for python in (sys.executable, forked_python()):
        process = start(python, argument)
        output, errors = process.communicate(timeout=60)
        ends.append((process.returncode, output, errors.splitlines()[-1:]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_script(number, start):
    process = start(forked_python(), 'sleep')
    process.stdout.readline()
    process.send_signal(number)
    errors = process.communicate(timeout=60)[1]
    # After KeyboardInterrupt the code depends on libraries: an exit handler that runs code, such as
    # one that imports, makes an interpreter end with 1.
    ends = (-number, 1) if number == signal.SIGINT else (-number,)
    assert process.returncode in ends
    assert ('KeyboardInterrupt' in errors) == (number == signal.SIGINT)


def test_what_is_no_script_goes_to_the_interpreter():
    run = [forked_python(), '-c', 'import sys; print(sys.executable)']
    assert subprocess.check_output(run, text=True).strip() == sys.executable


# The script and its own fork hold the pipe of standard error, so it ends when both have ended.
TESTS = """
import os, subprocess, sys, time
from tests.forked import start_server
script = subprocess.Popen([start_server(['torch']), sys.argv[1]], stdout=subprocess.PIPE)
assert script.stdout.readline() == b'sleeps\\n'
if sys.argv[2] == 'killed':
    os.kill(os.getpid(), 9)
"""
SLEEPS = """
import os, time
os.fork()
if os.getpid() == os.getpgid(0):
    print('sleeps')
time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.parametrize('end', ['returns', 'killed'])
def test_nothing_outlives_the_tests(end, tmp_path):
    script = tmp_path / 'sleeps.py'
    script.write_text(SLEEPS)
    # The path of a socket has 107 characters at most, which pytest's folder may exceed.
    with tempfile.TemporaryDirectory() as folders:
        done = subprocess.run(
            [sys.executable, '-c', TESTS, str(script), end],
            env={**os.environ, 'TMPDIR': folders},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            timeout=60,
        )
        assert done.returncode == (-signal.SIGKILL if end == 'killed' else 0), done.stderr
        assert end == 'killed' or not [*Path(folders).iterdir()]
