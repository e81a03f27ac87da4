"""Ways to train, beside calling the model and its loss: each from the model and a sample to a scalar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.oracle import default_loss

Step = Callable[[nn.Module, Any], Tensor]


def _plain(model: nn.Module, sample: Any) -> Tensor:
    return default_loss(model(sample)).float()


def _penalty(model: nn.Module, sample: Any) -> Tensor:
    """The gradient's own size is trained as well: a double backward."""
    loss = _plain(model, sample)
    trained = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, create_graph=True, allow_unused=True)
    found = [slope.abs().square().sum() for slope in slopes if slope is not None]
    return loss + 0.1 * torch.stack(found).sum() if found else loss


def _twice(model: nn.Module, sample: Any) -> Tensor:
    """One graph, two backward passes."""
    loss = _plain(model, sample)
    loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return loss


def _two_forwards(model: nn.Module, sample: Any) -> Tensor:
    """Two calls before one backward."""
    return _plain(model, sample) + _plain(model, sample.flip(0))


def _accumulated(model: nn.Module, sample: Any) -> Tensor:
    """A backward of its own before the one that counts, and a call without grad between them."""
    _plain(model, sample).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        model(sample)
    return _plain(model, sample.flip(0))


STEPS: dict[str, Step] = {
    "plain": _plain,
    "penalty": _penalty,
    "twice": _twice,
    "two_forwards": _two_forwards,
    "accumulated": _accumulated,
}
