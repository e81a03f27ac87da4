"""Fit when the first real batch is there: what both integrations share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from budgetopt._errors import BudgetOptError
from budgetopt._fit import fit
from budgetopt._live import plan_of

_OURS = ("model", "sample", "budget", "step", "loss", "replan")
"""Arguments of `fit` that the training loop answers, or that need a sample of the model's own arguments."""


class Later:
    """What to call `fit` with, once there is a batch.

    Args:
        where: the public name, for errors.

    Raises:
        BudgetOptError: an argument that `fit` does not have, or that the loop answers.
    """

    def __init__(self, where: str, budget: int | str, arguments: dict[str, Any]) -> None:
        legal = [name for name in inspect.signature(fit).parameters if name not in _OURS]
        for name in arguments:
            if name not in legal:
                raise BudgetOptError(f"{where} takes no {name}=: beside the budget there are {', '.join(legal)}")
        self.budget = budget
        self.arguments = arguments

    def fit(
        self,
        model: torch.nn.Module,
        sample: Any,
        step: Callable[[Any, Any], torch.Tensor],
        optimizer: Any,
        *,
        accumulates: bool,
    ) -> None:
        """Fit, unless the model has a plan already.

        Args:
            optimizer: the loop's, unless the arguments name another.
            accumulates: most forward passes find the gradients of earlier ones, so the plan is made for that.
        """
        if plan_of(model) is None:
            with gradients_there(model, accumulates):
                fit(model, sample, self.budget, step=step, **({"optimizer": optimizer} | self.arguments))


@contextmanager
def gradients_there(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Zeros for the gradients that trainable parameters don't have yet, while this lasts."""
    without = [p for p in model.parameters() if wanted and p.requires_grad and p.grad is None]
    try:
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter in without:
            parameter.grad = None
