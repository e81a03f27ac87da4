"""A moving average of the weights beside a fitted model: ``copy.deepcopy`` after ``fit``. Run by hand::

    python examples/integrations/ema.py

The budget is that of a training step of the model; where the copy is on the same device, give ``headroom=`` its bytes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

import budgetopt

DECAY = 0.9


def train(budget: int | None, **options: Any) -> Run:
    """Four steps, then the average's loss on one more batch, last of the losses; `options` are fit's."""
    model = tiny_gpt2()
    *data, unseen = batches(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if budget is not None:
        options = {"optimizer": optimizer, "allow": ("keep", "recompute")} | options
        budgetopt.fit(model, data[0], budget, **options)
    average = copy.deepcopy(model).requires_grad_(False).eval()
    torch.manual_seed(2)
    losses = []
    with Meter(model) as meter:
        for batch in data:
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.detach())
            del loss
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 1 - DECAY)
    with torch.no_grad():
        losses.append(average(**unseen).loss)
    return Run.of(torch.nn.ModuleDict({"model": model, "average": average}), losses, meter)


def main(**options: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("moving average", lambda budget: train(budget, **options))


if __name__ == "__main__":
    main()
