"""transformers' Trainer under a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from transformers import Trainer

from budgetopt._errors import BudgetOptError
from budgetopt._sample import changed, tensors_in
from budgetopt.integrations._later import Later

Trained = TypeVar("Trained", bound=Trainer)


def fit_trainer(trainer: Trained, budget: int | str, **arguments: Any) -> Trained:
    """Make a transformers Trainer train under `budget`: call it before ``trainer.train()``; returns the trainer.

    The model is fitted inside ``train()``, when its first batches are there: model and optimizer are prepared, and the
    step that is measured is the trainer's own ``training_step``, with its ``compute_loss``, label smoothing, autocast
    and loss scaling. That runs several times then, without a trace on the model and the random states; what a
    subclass counts in it is counted each time. With gradient accumulation, gradients are taken to be there from the
    start, and the batches that wait for their turn count. A model that has a plan already keeps it.

    Args:
        budget: bytes on the model's device, of a whole training step; see :func:`budgetopt.fit`.
        arguments: of :func:`budgetopt.fit`: ``plan="plan.json"``, ``allow=("keep", "recompute")`` … but not ``step``,
            ``loss`` and ``replan``. ``optimizer``: by default the trainer's. ``samples``: further batches, as the data
            collator makes them.

    Raises:
        BudgetOptError: it is no Trainer, an argument is not known, or the trainer is set up in a way that can't be
            planned: each says what to do. What :func:`budgetopt.fit` raises comes out of ``trainer.train()``.
    """
    if not isinstance(trainer, Trainer):
        raise BudgetOptError(f"trainer={type(trainer).__name__}: give the transformers.Trainer, before its train()")
    for refused, what in _REFUSED:
        if refused(trainer):
            raise BudgetOptError(f"fit_trainer can't plan this trainer: {what}")
    later = Later("fit_trainer", budget, _wrapped(arguments))
    get_batches = trainer.get_batch_samples

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        batches, items = get_batches(*args, **kwargs)
        if batches:
            _fit(trainer, later, batches, items)
        return batches, items

    trainer.get_batch_samples = get_batch_samples
    return trainer


_REFUSED: tuple[tuple[Callable[[Any], Any], str], ...] = (
    (
        lambda trainer: getattr(trainer.args, "activation_checkpointing", False) or trainer.args.gradient_checkpointing,
        "gradient_checkpointing=True runs whole layers again, and the plan decides that for each value: "
        "leave it out of the TrainingArguments",
    ),
    (
        lambda trainer: trainer.args.torch_compile,
        "torch_compile=True: compiled code can't be planned; leave it out of the TrainingArguments",
    ),
    (
        lambda trainer: trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled,
        "DeepSpeed and FSDP share the model out over processes, which would wait for each other while they measure: "
        "use one process or DDP, or call budgetopt.fit on the model before the Trainer gets it",
    ),
    (
        lambda trainer: trainer.args.n_gpu > 1,
        "it would run in nn.DataParallel on several devices, and a budget bounds one: use torchrun, or show the "
        "process one device with CUDA_VISIBLE_DEVICES",
    ),
)


def _wrapped(arguments: dict[str, Any]) -> dict[str, Any]:
    """Further samples in the shape of the first."""
    samples = arguments.get("samples")
    if not isinstance(samples, (list, tuple)):
        return arguments
    return arguments | {"samples": [_sample([batch]) for batch in samples]}


def _sample(batches: list[Any]) -> dict[str, Any]:
    """The batch that is run, and those that are in memory beside it."""
    first, *waiting = (dict(batch) for batch in batches)
    if any(tensor.device.type == "cpu" for tensor in tensors_in(first)):
        waiting.append(changed(first, torch.clone))  # accelerate's loader reads one batch ahead, on the host
    return {"inputs": first, **({"waiting": waiting} if waiting else {})}


def _fit(trainer: Any, later: Later, batches: list[Any], items: Any) -> None:
    trainer.current_gradient_accumulation_steps = len(batches)  # what the loop sets next; losses are divided by it
    optimizer = trainer.optimizer

    def step(model: Any, sample: dict[str, Any]) -> torch.Tensor:
        with _backward_taken(trainer.accelerator) as losses:
            trainer.training_step(model, sample["inputs"], items)
        if not losses:
            raise BudgetOptError("training_step never called accelerator.backward(loss): there is no step to plan")
        return losses.pop()

    trainer.model.train()
    later.fit(
        trainer.model,
        _sample(batches),
        step,
        getattr(optimizer, "optimizer", optimizer),
        accumulates=trainer.args.gradient_accumulation_steps > 1,
    )


@contextmanager
def _backward_taken(accelerator: Any) -> Iterator[list[torch.Tensor]]:
    """The loss that a backward pass would start from, as accelerate scales it, in place of that pass."""
    losses: list[torch.Tensor] = []

    def backward(loss: torch.Tensor, **kwargs: Any) -> None:
        loss = loss / accelerator.gradient_accumulation_steps
        losses.append(loss if accelerator.scaler is None else accelerator.scaler.scale(loss))

    accelerator.backward = backward
    try:
        yield losses
    finally:
        del accelerator.backward
