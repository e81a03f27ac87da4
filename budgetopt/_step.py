"""One training step as the user described it: sample, loss, step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from budgetopt._arguments import function
from budgetopt._errors import ProfileError
from budgetopt._operators import tensors

LossFunction = Callable[[Any], torch.Tensor]
StepFunction = Callable[[Any, Any], torch.Tensor]
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Step:
    """How to run the model once: forward and loss, or the user's own `step`.

    Attributes:
        guessed: the loss was made up (the sum of the output's means), because nothing said what it is.
    """

    def __init__(self, sample: Any, loss: LossFunction | None = None, step: StepFunction | None = None) -> None:
        if loss is not None and step is not None:
            raise ProfileError("give either loss= or step=, not both: step returns the loss itself")
        function(loss, "loss", "loss(output) -> scalar tensor")
        function(step, "step", "step(model, sample) -> scalar tensor")
        self.sample = sample
        self.loss = loss
        self.step = step
        self.guessed = False

    def forward(self, model: torch.nn.Module) -> tuple[Any, torch.Tensor]:
        """The model's output, alive as in a loop that reads it, and the scalar loss."""
        if self.step is not None:
            with _helpful("step= on the model and the sample"):
                found = self.step(model, self.sample)
            return None, _scalar(found, "step=", model)
        _require_items(model, self.sample)
        with _helpful("the model on the sample", lambda: _on_tuples(model, self.sample)):
            out = call(model, self.sample)
        if self.loss is not None:
            with _helpful("loss= on the model's output"):
                found = self.loss(out)
            return out, _scalar(found, "loss=", model)
        own = _own_loss(out)
        self.guessed = own is None
        return out, _scalar(_sum_of_means(out, model) if own is None else own, "the model's output", model)

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


@contextmanager
def _helpful(what: str, hint: Callable[[], str] = str) -> Iterator[None]:
    """The user's own error stays; ours says where it came from, as a note (before Python 3.11 as its cause)."""
    try:
        yield
    except Exception as error:
        note = f"budgetopt ran {what}, and this error is not its own.{hint()}"
        if not hasattr(error, "add_note"):
            raise error from ProfileError(note)
        error.add_note(note)
        raise


def _parameters(model: torch.nn.Module) -> list[inspect.Parameter] | None:
    """What the model's forward takes, or None where it does not tell."""
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return None


def _on_tuples(model: torch.nn.Module, sample: Any) -> str:
    """What to say of a batch (input, target) that a model of one argument was given."""
    takes = _parameters(model)
    if takes is None or not isinstance(sample, (tuple, list)):
        return ""
    return (
        f" The sample's {len(sample)} items were passed as positional arguments (forward takes {len(takes)}); "
        "for an (input, target) batch give step=lambda model, batch: loss_fn(model(batch[0]), batch[1])."
    )


def _require_items(model: torch.nn.Module, sample: Any) -> None:
    """Raise for a sample that holds nothing where the model needs something."""
    if sample is not None and (not isinstance(sample, (Mapping, tuple, list)) or sample):
        return
    needed = [p.name for p in _parameters(model) or () if p.default is p.empty and p.kind in _NAMED]
    if needed:
        raise ProfileError(
            f"sample={sample!r} holds nothing, but the model's forward needs {', '.join(needed)}: "
            "give a batch such as you train on, or step= if that makes its own"
        )


def _own_loss(out: Any) -> torch.Tensor | None:
    with suppress(AttributeError):
        if isinstance(out.loss, torch.Tensor):
            return out.loss
    if isinstance(out, Mapping) and isinstance(out.get("loss"), torch.Tensor):
        found: torch.Tensor = out["loss"]
        return found
    return None


def _sum_of_means(out: Any, model: torch.nn.Module) -> torch.Tensor:
    tree = list(out.values()) if isinstance(out, Mapping) else out
    means = [t.mean() for t in tensors(tree) if t.is_floating_point() and t.requires_grad]
    if not means:
        raise ProfileError(
            "nothing to differentiate: the model's output has no floating tensor that requires grad"
            f"{_why_not(model)}. Give loss= or step= if the loss is elsewhere."
        )
    return torch.stack([m.float() for m in means]).sum()


def _why_not(model: torch.nn.Module) -> str:
    """Why nothing requires grad, as far as that can be told."""
    if torch.is_inference_mode_enabled():
        return ", because torch.inference_mode is on: call budgetopt outside of it"
    if not torch.is_grad_enabled():
        return ", because grad mode is off: call budgetopt outside torch.no_grad()"
    if not any(p.requires_grad for p in model.parameters()):
        return ", because all parameters are frozen: set requires_grad on those that are trained"
    return ""


def _scalar(loss: Any, source: str, model: torch.nn.Module) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise ProfileError(
            f"{source} gave {type(loss).__name__}, but a training step needs a tensor to differentiate: "
            "return the loss itself, without .item() or float()"
        )
    if loss.numel() != 1 or loss.is_complex():
        shape = f"a tensor of shape {list(loss.shape)} and {loss.dtype}"
        raise ProfileError(f"{source} gave {shape}, but a training step needs a real scalar: reduce it (.mean())")
    if not loss.requires_grad:
        raise ProfileError(
            f"nothing to differentiate: the loss that {source} gave does not require grad{_why_not(model)}"
        )
    return loss
