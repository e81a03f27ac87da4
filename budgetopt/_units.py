"""Bytes and times as people write and read them. Inside budgetopt both are integers: bytes, nanoseconds."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from typing import NamedTuple, NoReturn, SupportsIndex

from pydantic import ByteSize, TypeAdapter, ValidationError

from budgetopt._errors import InvalidBudgetError

SMALLEST = 1024
"""No training step fits in less; a smaller number is a unit forgotten."""


class _Words(NamedTuple):
    """How messages speak of an argument: what is legal, what zero and less mean, what 100 % is."""

    legal: str
    nothing: str
    whole: str


_WORDS = {
    "budget": _Words(
        "a size such as '8GB' (8*10^9 bytes), '8GiB' (8*2^30), '80%' of the device, 'free', or an int of bytes",
        "leaves no memory",
        "the whole device",
    ),
    "headroom": _Words(
        "0 or a size below the budget, such as '500MB', '5%' of the budget, or an int of bytes",
        "takes nothing off the budget",
        "the whole budget",
    ),
    "more": _Words(
        "a size such as '2GB', '10%' of the budget, or an int of bytes",
        "adds nothing to the budget",
        "the whole budget",
    ),
}
_BYTE_SIZE = TypeAdapter(ByteSize)
_SIZE = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))\s*([A-Za-z]*|%)")
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_TIME_UNITS = ("ns", "us", "ms", "s")


def parse_bytes(
    value: str | SupportsIndex | float, *, total: int | None, free: int | None, argument: str = "budget"
) -> int:
    """Read a number of bytes; decimals are exact and what is left of a byte is dropped.

    Args:
        value: ``"8GB"``, ``"8GiB"``, ``"0.5 TB"``, an int (or numpy int, or float ≥ 1024) of bytes,
            ``"80%"`` of ``total``, or ``"free"``.
        total: bytes of the device, or None where it does not tell.
        free: bytes of the device that are free now, or None where it does not tell.
        argument: the name by which messages call the value.

    Returns:
        Bytes, at least 1024.

    Raises:
        InvalidBudgetError: the value is no such number of bytes; the message says what to write.
    """
    if isinstance(value, str):
        return _parse_text(value, total, free, argument)
    return _checked(_number(value, argument), value, argument)


def show_bytes(n: int) -> str:
    """Bytes with three significant digits in decimal units: ``7.98 GB``."""
    return _show(n, _BYTE_UNITS)


def show_enough(n: int) -> str:
    """As :func:`show_bytes`, rounded up: what to ask for where so many bytes are needed."""
    step = 10 ** max(0, len(str(n)) - 3)
    return show_bytes(-(-n // step) * step)


def show_gap(gap: float | None) -> str:
    """A proven distance from the cheapest choice; no bound, or one of nothing, proves none."""
    return f"{gap:.1%}" if gap is not None and gap < 0.9995 else "not proven"


def show_ns(n: int) -> str:
    """Nanoseconds with three significant digits: ``1.25 ms``."""
    return _show(n, _TIME_UNITS)


def _parse_text(text: str, total: int | None, free: int | None, argument: str) -> int:
    if text.strip().lower() == "free" and argument == "budget":
        return _checked(_known(free, text, argument), text, argument)
    found = _SIZE.fullmatch(text.strip())
    if not found:
        _refuse(text, argument, f"can't be read. Give {_WORDS[argument].legal}.")
    number, unit = Fraction(found[1]), found[2]
    if unit == "%":
        return _checked(_share(number, total, text, argument), text, argument)
    if not unit:
        _refuse(text, argument, f"has no unit. Did you mean '{found[1]}GB'? An int is taken as bytes.")
    return _checked(number * _unit_bytes(unit, text, argument), text, argument)


def _unit_bytes(unit: str, text: str, argument: str) -> int:
    """Bytes of one unit. Only the unit goes through pydantic, because it multiplies in floats."""
    try:
        if unit.lower().endswith("b"):  # no bits
            return int(_BYTE_SIZE.validate_python(f"1{unit}"))
    except ValidationError:
        pass
    _refuse(text, argument, f"has the unknown unit {unit!r}. Use B, kB, MB, GB, TB or KiB, MiB, GiB, TiB.")


def _share(percent: Fraction, total: int | None, text: str, argument: str) -> Fraction:
    if percent > 100:
        _refuse(text, argument, f"is more than {_WORDS[argument].whole}. Give at most '100%'.")
    if percent <= 0:
        _refuse(text, argument, f"{_WORDS[argument].nothing}. Give {_WORDS[argument].legal}.")
    return percent / 100 * _known(total, text, argument)


def _known(device_bytes: int | None, text: str, argument: str) -> Fraction:
    if device_bytes is None:
        _refuse(text, argument, "needs a device that tells its memory, and this one does not. Give '8GB', say.")
    return Fraction(device_bytes)


def _number(value: SupportsIndex | float, argument: str) -> Fraction:
    if type(value).__name__ in ("bool", "bool_"):  # bool_: numpy's
        _refuse(value, argument, f"is a truth value. Give {_WORDS[argument].legal}.")
    try:
        return Fraction(operator.index(value))  # type: ignore[arg-type]  # floats end in the except
    except TypeError:
        if not isinstance(value, Real):
            _refuse(value, argument, f"is of type {type(value).__name__}. Give {_WORDS[argument].legal}.")
    number = float(value)
    if not math.isfinite(number):
        _refuse(value, argument, f"is no finite number. Give {_WORDS[argument].legal}.")
    return Fraction(number)


def _checked(number: Fraction, value: object, argument: str) -> int:
    if number <= 0:
        _refuse(value, argument, f"{_WORDS[argument].nothing}. Give {_WORDS[argument].legal}.")
    if number < SMALLEST:
        _refuse(value, argument, f"is under {SMALLEST} bytes. {_guess(number)}Give {_WORDS[argument].legal}.")
    return int(number)


def _guess(number: Fraction) -> str:
    """What a number this small was meant to be: a share, or gigabytes."""
    if number >= 1000:
        return ""
    meant = f"{float(number * 100):g}%" if number < 1 else f"{float(number):g}GB"
    return f"Did you mean '{meant}'? "


def _refuse(value: object, argument: str, why: str) -> NoReturn:
    # from None: the int() or pydantic error below says nothing that the message does not.
    raise InvalidBudgetError(f"{argument}={value!r} {why}") from None


def _show(n: int, units: Sequence[str]) -> str:
    """Three significant digits in the unit where they read best; the smallest unit has no decimals."""
    scale = 0
    while scale + 1 < len(units) and abs(n) >= 999.5 * 1000**scale:
        scale += 1
    if scale == 0:
        return f"{n} {units[0]}"
    number = n / 1000**scale
    return f"{number:.{_decimals(abs(number))}f} {units[scale]}"


def _decimals(number: float) -> int:
    return 2 if number < 9.995 else 1 if number < 99.95 else 0
