"""Lightning's Trainer under a budget."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from budgetopt._errors import BudgetOptError
from budgetopt.integrations._later import Later


class BudgetCallback(Callback):  # type: ignore[misc]  # the library is not read for types
    """Make a LightningModule train under `budget`: ``Trainer(callbacks=[BudgetCallback("8GB")])``.

    The module is fitted when its first training batch is there: it is on its device, the optimizer exists, and the
    step that is measured is ``training_step``, under the trainer's precision. That runs several times then, without a
    trace on the module's buffers and attributes and the random states, and without logging. Lightning frees the
    gradients of a step only after the next forward pass, so they are taken to be there from the start. A module that
    has a plan keeps it.

    Args:
        budget: bytes on the module's device, of a whole training step; see :func:`budgetopt.fit`.
        arguments: of :func:`budgetopt.fit`: ``plan="plan.json"``, ``allow=("keep", "recompute")`` … but not ``step``,
            ``loss`` and ``replan``. ``optimizer``: by default the module's.

    Raises:
        BudgetOptError: an argument is not known; when training begins: manual optimization, or a strategy that shares
            the module out over devices. What :func:`budgetopt.fit` raises comes out of ``trainer.fit()``.
    """

    def __init__(self, budget: int | str, **arguments: Any) -> None:
        self._later = Later("BudgetCallback", budget, arguments)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse early what can't be planned."""
        if not pl_module.automatic_optimization:
            raise BudgetOptError(
                "BudgetCallback can't see the steps of manual optimization: call budgetopt.fit in on_fit_start of "
                "your module, with step= for the step that takes most"
            )
        strategy = trainer.strategy
        if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise BudgetOptError(
                f"BudgetCallback plans for one device, or a copy of the module on each (DDP), not for "
                f"{type(strategy).__name__}: call budgetopt.fit on the module before Lightning gets it"
            )

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fit, on the first batch."""
        arguments = (batch_idx,) if len(inspect.signature(pl_module.training_step).parameters) > 1 else ()

        def step(module: Any, sample: Any) -> torch.Tensor:
            with _not_logging(module), trainer.precision_plugin.train_step_context():
                found = module.training_step(sample, *arguments)
            if found is None:
                raise BudgetOptError("training_step returned None on the first batch: there is no step to plan")
            loss: torch.Tensor = found["loss"] if isinstance(found, Mapping) else found
            loss = loss / trainer.accumulate_grad_batches
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            return loss if scaler is None else torch.as_tensor(scaler.scale(loss))

        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self._later.fit(pl_module, batch, step, optimizer, accumulates=True)


@contextmanager
def _not_logging(module: Any) -> Iterator[None]:
    """`self.log` writes into the trainer's results, where a measured step has no place."""
    module.__dict__["log"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del module.__dict__["log"]
