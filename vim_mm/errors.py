"""Errors that a user's argument, config, file or machine causes: what this package raises itself.

They end a command in one sentence, see :mod:`vim_mm.mistakes`; whoever calls the package catches
them as the built-in errors that they are, too.
"""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What is wrong lies with the caller, and the message says what and where."""


class UserValueError(UserError, ValueError):
    """A value, shape or name that cannot be used."""


class UserTypeError(UserError, TypeError):
    """An argument of another type."""


class UserRuntimeError(UserError, RuntimeError):
    """What is asked for cannot be had here."""


def brief(value: object) -> str:
    """How a message shows what a file holds: numbers and words as they are, all else by its class.

    Written out, a list that shares its elements can be larger than memory.
    """
    short = type(value) in (bool, float, type(None), str)
    if short or (type(value) is int and value.bit_length() <= 128):
        return f'{value!r:.80}'
    return f'a {type(value).__name__}'


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one most like it, empty if none is."""
    similar = difflib.get_close_matches(name, known, n=1)
    return f'; did you mean {similar[0]!r}?' if similar else ''
