"""torch.autocast and a GradScaler under a budget: ``step=`` runs the same autocast. Run by hand::

python examples/integrations/amp.py
"""

from __future__ import annotations

from typing import Any

import torch
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

import budgetopt


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Forward and loss, as the loop runs them; the backward pass is outside of autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


def train(budget: int | None, **options: Any) -> Run:
    """Four steps; `options` are fit's."""
    model, data = tiny_gpt2(), batches(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if budget is not None:
        options = {"optimizer": optimizer, "allow": ("keep", "recompute")} | options
        budgetopt.fit(model, data[0], budget, step=lambda model, batch: scaler.scale(loss_of(model, batch)), **options)
    torch.manual_seed(2)
    losses = []
    with Meter(model) as meter:
        for batch in data:
            loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            losses.append(loss.detach())
            del loss
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return Run.of(model, losses, meter)


def main(**options: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("autocast and GradScaler", lambda budget: train(budget, **options))


if __name__ == "__main__":
    main()
