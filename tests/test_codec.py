"""fp16 storage: no overflow, special values preserved, error of one rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from budgetopt import _codec


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    stored = _codec.store(tensor.untyped_storage(), tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype).set_(_codec.load(stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(exponent=st.integers(-30, 37), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_error_is_one_rounding_of_eleven_bits(dtype: torch.dtype, exponent: int, seed: int) -> None:
    values = torch.randn(257, dtype=dtype, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    back = round_trip(values)
    # Half a unit in the last of 11 bits; below 2**-14 of the top, fp16's subnormal step.
    bound = torch.maximum(values.abs() * 2.0**-11, values.abs().max() * 2.0**-38)
    assert torch.isfinite(back).all()
    assert ((back - values).abs() <= bound).all()


def test_powers_of_two_are_exact_beyond_fp16s_range() -> None:
    values = torch.tensor([2.0**100, -(2.0**99), 2.0**90, 0.0])
    assert torch.equal(round_trip(values), values)


def test_special_values_stay_and_do_not_spoil_the_scale() -> None:
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 3e5, 1.0, 0.0])
    back = round_trip(values)
    assert back[0] == float("inf") and back[1] == -float("inf") and torch.isnan(back[2])
    assert back[3] == pytest.approx(3e5, rel=2**-11) and back[4] == pytest.approx(1.0, rel=2**-11) and back[5] == 0


def test_pieces_make_no_difference() -> None:
    values = torch.randn(3_000_001)
    back = round_trip(values)
    assert ((back - values).abs() <= values.abs().max() * 2.0**-11).all()
