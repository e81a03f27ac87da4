"""The plain model and one whose values are stored in fp16: near, finite, and equal in all but the gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import Trace, assert_same, run_steps

from .sides import planned


def near_plain(
    model: nn.Module, sample: Any, tolerance: float, *, options: dict[str, Any] | None = None, **steps: Any
) -> float:
    """Train both; the first gradients' error, which is at most `tolerance`. Later losses may differ by a hundredth.

    Args:
        tolerance: of ‖g - g*‖ ÷ ‖g*‖. options: as ``planned`` takes them. steps: as ``run_steps`` takes them.
    """
    plain = copy.deepcopy(model)
    planned(model, sample, "halved", **(options or {}))
    a, b = run_steps(plain, [sample], **steps), run_steps(model, [sample], **steps)
    assert torch.equal(a.losses[0], b.losses[0])
    for one, other in zip(a.losses, b.losses, strict=True):
        assert torch.allclose(one, other, rtol=1e-2), (one, other)
    error = gradient_error(a, b)
    assert error <= tolerance, error
    for name, parameter in a.parameters.items():
        assert torch.equal(parameter.isfinite(), b.parameters[name].isfinite()), name
    b.losses, b.gradients, b.parameters = a.losses, a.gradients, a.parameters
    near = {name: torch.allclose(x, b.buffers[name].to(x), rtol=1e-2, atol=1e-3) for name, x in a.buffers.items()}
    assert all(near.values()), near
    b.buffers = a.buffers
    assert_same(a, b)
    return error


def gradient_error(exact: Trace, rounded: Trace) -> float:
    """‖g - g*‖ ÷ ‖g*‖ of the first step, over all parameters together."""
    found = [_flat(trace) for trace in (exact, rounded)]
    return float((found[0] - found[1]).norm() / found[0].norm()) if found[0].norm() else math.inf


def _flat(trace: Trace) -> Tensor:
    gradients = [g for g in trace.gradients[0].values() if g is not None]
    return torch.cat([torch.view_as_real(g).flatten() if g.is_complex() else g.flatten() for g in gradients]).double()
