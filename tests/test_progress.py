"""What long work shows on a terminal, and that a file gets nothing of it."""

import io
import sys
import time

from vim_mm.progress import slow_at_first, working


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_done_and_for_how_long(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', Terminal())
    with working('exporting model.onnx'):
        time.sleep(1.3)
    assert 'exporting model.onnx: 00:01' in sys.stderr.getvalue()


def test_a_file_gets_nothing(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    with working('exporting'):
        pass
    assert sys.stderr.getvalue() == ''


def test_an_error_ends_the_display(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', Terminal())
    try:
        with working('exporting'):
            raise ValueError('no')
    except ValueError:
        written = sys.stderr.getvalue()
    time.sleep(1.2)
    assert sys.stderr.getvalue() == written


def test_only_the_first_call_is_shown(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', Terminal())
    call = slow_at_first(lambda a, *, b: a + b, 'compiling')
    assert call(1, b=2) == 3 and 'compiling: 00:00' in sys.stderr.getvalue()
    shown = sys.stderr.getvalue()
    assert call(3, b=4) == 7 and sys.stderr.getvalue() == shown
