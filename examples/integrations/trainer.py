"""transformers' Trainer under a budget: one line before ``trainer.train()``. Run by hand::

python examples/integrations/trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

from side_by_side import BATCH, Comparison, Meter, Run, compare, examples, tiny_gpt2
from transformers import Trainer, TrainerCallback, TrainingArguments

from budgetopt.integrations import fit_trainer

EXACT = {"allow": ("keep", "recompute")}


class Metered(TrainerCallback):
    """The meter runs from the first step to the end of training."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == 0:
            self.meter.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.meter.__exit__()


def train(
    budget: int | None, options: dict[str, Any] | None = None, kind: type[Trainer] = Trainer, **settings: Any
) -> Run:
    """Four optimizer steps; `options` are fit's, `settings` are TrainingArguments."""
    model = tiny_gpt2()
    settings = {"max_steps": 4, "per_device_train_batch_size": BATCH, "max_grad_norm": 1.0} | settings
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    meter = Meter(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(model, TrainingArguments(folder, **settings), train_dataset=examples(64))
        trainer.add_callback(Metered(meter))
        if budget is not None:
            fit_trainer(trainer, budget, **(EXACT | (options or {})))  # all there is to do
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run.of(model, losses, meter)


def main(**how: Any) -> Comparison:
    """Plain and planned, side by side."""
    return compare("transformers Trainer", lambda budget: train(budget, **how))


if __name__ == "__main__":
    main()
