"""One training step as the user described it: sample, loss, step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from budgetopt._errors import ProfileError
from budgetopt._operators import tensors

LossFunction = Callable[[Any], torch.Tensor]
StepFunction = Callable[[Any, Any], torch.Tensor]


class Step:
    """How to run the model once: forward and loss, or the user's own `step`.

    Attributes:
        guessed: the loss was made up (the sum of the output's means), because nothing said what it is.
    """

    def __init__(self, sample: Any, loss: LossFunction | None = None, step: StepFunction | None = None) -> None:
        if loss is not None and step is not None:
            raise ProfileError("give either loss= or step=, not both: step returns the loss itself")
        self.sample = sample
        self.loss = loss
        self.step = step
        self.guessed = False

    def forward(self, model: torch.nn.Module) -> tuple[Any, torch.Tensor]:
        """The model's output, alive as in a loop that reads it, and the scalar loss."""
        if self.step is not None:
            return None, _scalar(self.step(model, self.sample), "step")
        out = call(model, self.sample)
        if self.loss is not None:
            return out, _scalar(self.loss(out), "loss")
        found = _own_loss(out)
        self.guessed = found is None
        return out, _scalar(_sum_of_means(out) if found is None else found, "the model's output")

    def run(self, model: torch.nn.Module) -> torch.Tensor:
        """Forward and backward; returns the detached loss."""
        out, loss = self.forward(model)
        loss.backward()  # type: ignore[no-untyped-call]
        del out
        return loss.detach()


def call(model: torch.nn.Module, sample: Any) -> Any:
    """The model on a sample: a tensor, positional arguments (tuple, list) or named ones (mapping)."""
    if isinstance(sample, Mapping):
        return model(**sample)
    if isinstance(sample, (tuple, list)):
        return model(*sample)
    return model(sample)


def _own_loss(out: Any) -> torch.Tensor | None:
    with suppress(AttributeError):
        if isinstance(out.loss, torch.Tensor):
            return out.loss
    if isinstance(out, Mapping) and isinstance(out.get("loss"), torch.Tensor):
        found: torch.Tensor = out["loss"]
        return found
    return None


def _sum_of_means(out: Any) -> torch.Tensor:
    tree = list(out.values()) if isinstance(out, Mapping) else out
    means = [t.mean() for t in tensors(tree) if t.is_floating_point() and t.requires_grad]
    if not means:
        raise ProfileError(
            "nothing to differentiate: the model's output has no floating tensor that requires grad. "
            "Are all parameters frozen, or is grad mode off? Give loss= or step= if the loss is elsewhere."
        )
    return torch.stack([m.float() for m in means]).sum()


def _scalar(loss: Any, source: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{type(loss).__name__}"
        raise ProfileError(f"{source} gave {shape}, but a training step needs a scalar loss: reduce it (.mean())")
    if not loss.requires_grad:
        raise ProfileError(f"the loss that {source} gave does not require grad: there is nothing to differentiate")
    return loss
