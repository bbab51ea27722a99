"""Errors that a user's argument, config, file or machine causes: what this package raises itself.

They end a command in one sentence, see :mod:`vim_mm.mistakes`; whoever calls the package catches
them as the built-in errors that they are, too.
"""


class UserError(Exception):
    """What is wrong lies with the caller, and the message says what and where."""


class UserValueError(UserError, ValueError):
    """A value, shape or name that cannot be used."""


class UserTypeError(UserError, TypeError):
    """An argument of another type."""


class UserRuntimeError(UserError, RuntimeError):
    """What is asked for cannot be had here."""
