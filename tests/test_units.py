"""Budgets as people write them, and bytes and times as they read them."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from budgetopt._errors import InvalidBudgetError
from budgetopt._units import parse_bytes, show_bytes, show_enough, show_ns


def parse(value: Any, total: int | None = 10 * 10**9, free: int | None = 3 * 10**9) -> int:
    return parse_bytes(value, total=total, free=free)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("  8.5 GB ", 8_500_000_000),
        (".5GB", 500_000_000),
        ("1.5GiB", 3 * 2**29),
        ("512MB", 512 * 10**6),
        ("512MiB", 512 * 2**20),
        ("64kB", 64_000),
        ("64KiB", 64 * 1024),
        ("2TB", 2 * 10**12),
        ("4096B", 4096),
        ("0.29GB", 290_000_000),  # 0.29 * 1e9 is 289999999.99999994 in floats
        (8_000_000_000, 8 * 10**9),
        (1024, 1024),
        (8e9, 8 * 10**9),
        (np.int64(5_000_000), 5_000_000),
        (np.uint32(5_000_000), 5_000_000),
        (np.float32(2**20), 2**20),
        ("80%", 8 * 10**9),
        ("12.5 %", 1_250_000_000),
        ("100%", 10 * 10**9),
        ("free", 3 * 10**9),
        (" Free", 3 * 10**9),
    ],
)
def test_reads_what_people_write(value: Any, expected: int) -> None:
    assert parse(value) == expected
    assert type(parse(value)) is int


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "leaves no memory"),
        (-1, "leaves no memory"),
        ("0GB", "leaves no memory"),
        ("-8GB", "leaves no memory"),
        ("0%", "leaves no memory"),
        ("-5%", "leaves no memory"),
        (float("nan"), "no finite number"),
        (float("inf"), "no finite number"),
        (np.float32("nan"), "no finite number"),
        ("nan", "can't be read"),
        ("inf", "can't be read"),
        (True, "truth value"),
        (np.True_, "truth value"),
        ("8 apples", "unknown unit 'apples'"),
        ("8G", "unknown unit 'G'"),
        ("8Gbit", "unknown unit 'Gbit'"),
        ("8xb", "unknown unit 'xb'"),
        ("8GB please", "can't be read"),
        ("8.5.1GB", "can't be read"),
        ("1_000MB", "can't be read"),
        ("GB", "can't be read"),
        ("", "can't be read"),
        ("8", "Did you mean '8GB'"),
        (8, "Did you mean '8GB'"),
        ("12B", "Did you mean '12GB'"),
        (0.8, "Did you mean '80%'"),
        (1023, "under 1024 bytes. Give"),
        ("101%", "more than the whole device"),
        (None, "of type NoneType"),
        (Decimal(8), "of type Decimal"),
        ([8], "of type list"),
    ],
)
def test_refuses_the_rest_by_name(value: Any, says: str) -> None:
    with pytest.raises(InvalidBudgetError) as raised:
        parse(value)
    message = str(raised.value)
    assert message.startswith(f"budget={value!r} ")
    assert says in message
    assert "Give" in message or "Did you mean" in message or "Use" in message  # what to do


@pytest.mark.parametrize("value", ["80%", "free"])
def test_a_share_needs_a_device_that_tells(value: str) -> None:
    with pytest.raises(InvalidBudgetError, match="does not"):
        parse(value, total=None, free=None)


def test_names_another_argument() -> None:
    with pytest.raises(InvalidBudgetError, match=r"^headroom='8' "):
        parse_bytes("8", total=None, free=None, argument="headroom")


def test_is_a_value_error_too() -> None:
    with pytest.raises(ValueError, match="apples"):
        parse("8 apples")


@given(st.integers(min_value=1024, max_value=10**18))
def test_whole_bytes_survive(n: int) -> None:
    assert parse(n) == parse(f"{n}B") == n


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1024, "1.02 kB"),
        (7_980_000_000, "7.98 GB"),
        (12_345_678, "12.3 MB"),
        (99_949_999, "99.9 MB"),
        (99_950_000, "100 MB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_995_000, "10.0 MB"),
        (2 * 10**12, "2.00 TB"),
        (1234 * 10**15, "1234 PB"),
        (-1_500_000, "-1.50 MB"),
    ],
)
def test_shows_three_digits(n: int, expected: str) -> None:
    assert show_bytes(n) == expected


@pytest.mark.parametrize(
    ("n", "expected"),
    [(0, "0 ns"), (950, "950 ns"), (1_250, "1.25 us"), (45_600_000, "45.6 ms"), (7_890_000_000, "7.89 s")],
)
def test_shows_times(n: int, expected: str) -> None:
    assert show_ns(n) == expected


@given(st.integers(min_value=2000, max_value=10**17))
def test_what_is_shown_reads_back_within_half_a_percent(n: int) -> None:
    assert abs(parse(show_bytes(n)) - n) <= n * 0.005 + 1


@given(st.integers(min_value=2000, max_value=10**14))
def test_what_is_advised_is_enough_and_little_more(n: int) -> None:
    assert n <= parse(show_enough(n)) <= n * 1.01
