"""A loop with accelerate under a budget: ``fit`` after ``prepare``, with the loss scaled as ``backward`` scales it.

python examples/integrations/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

import budgetopt

ACCUMULATE = 2


def train(budget: int | None, mixed_precision: str = "bf16", **options: Any) -> Run:
    """Six batches, an optimizer step after every second; `options` are fit's."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=ACCUMULATE)
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(batches(6), batch_size=None)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    data = list(loader)
    if budget is not None:
        for parameter in model.parameters():  # later batches find gradients there: fit has to see that
            parameter.grad = torch.zeros_like(parameter)
        options = {"optimizer": optimizer, "allow": ("keep", "recompute")} | options
        budgetopt.fit(model, data[0], budget, step=lambda model, batch: model(**batch).loss / ACCUMULATE, **options)
        optimizer.zero_grad()
    torch.manual_seed(2)
    losses = []
    with Meter(model) as meter:
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.detach())
                del loss
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return Run.of(accelerator.unwrap_model(model), losses, meter)


def main(**options: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("accelerate", lambda budget: train(budget, **options))


if __name__ == "__main__":
    main()
