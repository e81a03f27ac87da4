"""A LightningModule under a budget: one callback. Run by hand::

python examples/integrations/lightning_module.py
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from side_by_side import Comparison, Meter, Run, batches, compare, tiny_gpt2

from budgetopt.integrations import BudgetCallback

EXACT = {"allow": ("keep", "recompute")}


class Language(pl.LightningModule):
    """GPT-2 on batches of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_gpt2()
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Metered(Callback):
    """Meter and losses; after BudgetCallback in the list, so that fitting is over when the meter starts."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.meter.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.meter.__exit__()


def train(budget: int | None, options: dict[str, Any] | None = None, **settings: Any) -> Run:
    """Four batches; `options` are fit's, `settings` are the Trainer's."""
    module = Language()
    metered = Metered(Meter(module))
    callbacks: list[Callback] = [metered]
    if budget is not None:
        callbacks.insert(0, BudgetCallback(budget, **(EXACT | (options or {}))))  # all there is to do
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, callbacks=callbacks, **(quiet | settings))
    torch.manual_seed(2)
    trainer.fit(module, torch.utils.data.DataLoader(batches(4), batch_size=None))
    return Run.of(module, metered.losses, metered.meter)


def main(**how: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("Lightning", lambda budget: train(budget, **how))


if __name__ == "__main__":
    main()
