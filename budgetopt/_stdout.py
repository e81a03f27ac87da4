"""stdout is for the answer alone: while a command works, what others print there goes to stderr."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress

from budgetopt._errors import BudgetOptError

CLOSED = 141
"""The exit status where nobody reads the answer to its end: 128 + SIGPIPE, as shells have it."""


@contextmanager
def aside() -> Iterator[None]:
    """Point stdout at stderr: Python's, and file descriptor 1 for libraries in C and for child processes."""
    _flush()
    saved = _duplicate(1)
    try:
        if saved is not None:
            _point_away(2 if saved != 2 else None)  # the copy has number 2 where stderr is not open
        with open(os.devnull, "w") as nothing, redirect_stdout(sys.stderr or nothing):
            yield
    finally:
        if saved is not None:
            _flush_c()
            os.dup2(saved, 1)
            os.close(saved)


def write(text: str) -> bool:
    """Write to stdout, and see that it got there; False if nobody reads it to its end, as in ``| head``.

    Raises:
        BudgetOptError: it can't be written, the disk is full say.
    """
    if sys.stdout is None:  # started with it closed
        return True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
    except BrokenPipeError:
        _give_up()
        return False
    except OSError as error:
        _give_up()
        raise BudgetOptError(f"can't write the answer to stdout: {error.strerror}") from error


def _give_up() -> None:
    """Else Python writes what is left as it exits, and prints a traceback."""
    with suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _duplicate(descriptor: int) -> int | None:
    with suppress(OSError):  # it is not open
        return os.dup(descriptor)
    return None


def _point_away(descriptor: int | None) -> None:
    """From where descriptor 1 points to, to where this one does, or to nothing."""
    if descriptor is not None:
        os.dup2(descriptor, 1)
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)


def _flush_c() -> None:
    """What C code has printed is in a buffer of its own, and would come out with the answer."""
    with suppress(OSError, TypeError, AttributeError):  # no such library by that name
        ctypes.CDLL(None).fflush(None)
