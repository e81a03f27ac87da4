"""The meter that checks the others: against bytes derived by hand, and against the operating system."""

from __future__ import annotations

import pytest
import torch

from tests.models import gpt2_small, plain_mlp
from tests.outside_meter import peak_bytes, resident_bytes, rss_peak_growth, running_bytes

FLOAT = 4


def derived_peak(depth: int, width: int, batch: int, hold_output: bool) -> int:
    """Peak of forward + backward of linear, relu, linear, relu … summed, above what was resident.

    Autograd holds every relu's result (one activation each, which is the next linear's input as well); a
    linear's result dies as soon as relu has read it. The scalar loss and the 1 that backward starts from
    stay to the end. Going back through layer k, with `done` layers behind it:

    * relu reads its result and the gradient that came in, and makes one more: k + 2 activations
      (k + 1 in the last layer, where what comes in is that 1, expanded without a copy);
    * linear makes the gradients of input, weight and bias, while relu's result is gone: k + 1 activations
      (one less in the first layer, whose input needs no gradient).

    The output is the last relu's result: held, it is one activation more from where it would have died.
    """
    activation, parameters = batch * width * FLOAT, (width * width + width) * FLOAT
    peaks = []
    for k in range(depth, 0, -1):
        done = depth - k
        at_relu = (k + 1 + (done > 0) * (1 + hold_output)) * activation + done * parameters
        at_linear = (k + (k > 1) + hold_output) * activation + (done + 1) * parameters
        peaks += [at_relu, at_linear]
    return max(peaks) + 2 * FLOAT


@pytest.mark.parametrize("hold_output", [True, False])
@pytest.mark.parametrize(
    ("depth", "width", "batch"),
    [(3, 64, 32), (3, 16, 1024), (5, 32, 33), (2, 128, 8), (8, 8, 256), (1, 32, 32)],
)
def test_exact_on_an_mlp_derived_by_hand(depth: int, width: int, batch: int, hold_output: bool) -> None:
    model, sample = plain_mlp(depth, width, batch)
    measured = peak_bytes(model, sample, torch.sum, hold_output=hold_output)
    assert measured == derived_peak(depth, width, batch, hold_output)


def test_a_step_leaves_nothing() -> None:
    model, sample = plain_mlp()
    assert running_bytes(model, sample)[-1] == 0
    assert all(p.grad is None for p in model.parameters())


def test_resident_counts_a_storage_once() -> None:
    model, sample = plain_mlp(3, 64, 32)
    parameters = 3 * (64 * 64 + 64) * FLOAT
    assert resident_bytes(model, sample) == parameters + 32 * 64 * FLOAT
    assert resident_bytes(model, (sample, sample[1:], {"again": sample.t()})) == parameters + 32 * 64 * FLOAT


def test_tied_weights_are_resident_once() -> None:
    model, sample = gpt2_small()
    parameters = sum(p.numel() for p in model.parameters()) * FLOAT  # parameters() has the tied one once
    assert resident_bytes(model, sample) == parameters + 2 * 4 * 32 * 8


def test_resident_memory_of_a_fresh_process_agrees() -> None:
    """Two meters without a common part; 2 % and half a MiB for pages and the interpreter's own growth."""
    arguments = {"depth": 6, "width": 256, "batch": 4096}
    exact = peak_bytes(*plain_mlp(**arguments))
    assert exact > 20e6
    assert rss_peak_growth("tests.models:plain_mlp", arguments) == pytest.approx(exact, rel=0.02, abs=2**19)
