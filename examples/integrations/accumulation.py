"""Gradient accumulation under a budget: gradients are there when ``fit`` is called. Run by hand::

python examples/integrations/accumulation.py
"""

from __future__ import annotations

from typing import Any

import torch
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

import budgetopt

ACCUMULATE = 2


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A batch's part of the loss."""
    return model(**batch).loss / ACCUMULATE


def train(budget: int | None, **options: Any) -> Run:
    """Six batches, an optimizer step after every second; `options` are fit's."""
    model, data = tiny_gpt2(), batches(6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if budget is not None:
        for parameter in model.parameters():  # as the second batch of a step finds them
            parameter.grad = torch.zeros_like(parameter)
        options = {"optimizer": optimizer, "allow": ("keep", "recompute")} | options
        budgetopt.fit(model, data[0], budget, step=loss_of, **options)
        optimizer.zero_grad()
    torch.manual_seed(2)
    losses = []
    with Meter(model) as meter:
        for number, batch in enumerate(data, 1):
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
            del loss
            if number % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
    return Run.of(model, losses, meter)


def main(**options: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("gradient accumulation", lambda budget: train(budget, **options))


if __name__ == "__main__":
    main()
