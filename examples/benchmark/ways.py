"""The ways of saving memory that are compared. Each changes the built model, or gives another callable in its place."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from examples.benchmark.models import Built

PLAIN, CONTROL = "plain", "plain again"

_aten = torch.ops.aten
HEAVY = {
    getattr(packet, name)
    for packet, name in (
        (_aten.mm, "default"),
        (_aten.addmm, "default"),
        (_aten.bmm, "default"),
        (_aten.convolution, "default"),
        (_aten._scaled_dot_product_flash_attention, "default"),
        (_aten._scaled_dot_product_flash_attention_for_cpu, "default"),
        (_aten._scaled_dot_product_efficient_attention, "default"),
    )
}
"""What torch's own examples of selective policies save: matrix products, convolutions, attention."""


class Way(NamedTuple):
    """A name for the table, a function of this file and its argument, both of which go to a child as JSON."""

    name: str
    way: str
    argument: Any = None


def as_it_is(built: Built, _: Any) -> Any:
    """Nothing."""
    return built.model


def every(built: Built, count: int) -> Any:
    """transformers' gradient checkpointing of every `count`-th block; torch's, where a model knows none of its own."""
    model = built.model
    if not model.supports_gradient_checkpointing:
        for block in built.blocks[::count]:
            _checkpointed(block)
        return model
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False}, every_n_layers=count)
    return model


def selective(built: Built, save_one_in: int) -> Any:
    """torch's selective policies: of what is dear (:data:`HEAVY`) one in so many is saved, all else made again."""

    def contexts() -> Any:
        seen = {False: 0, True: 0}  # by whether it is the recomputation: both have to decide alike

        def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
            if operator not in HEAVY:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen[context.is_recompute] += 1
            saved = seen[context.is_recompute] % save_one_in == 0
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    for block in built.blocks:
        _checkpointed(block, context_fn=contexts)
    return built.model


def compiled(built: Built, argument: list[Any]) -> Any:
    """torch.compile with ``activation_memory_budget``; its unit is a share of what compiled code would save."""
    backend, budget = argument
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget
    return torch.compile(built.model, backend=backend)


def planned(built: Built, argument: list[Any]) -> Any:
    """budgetopt, gradients bit for bit; further budgets are solved from the profile that the first one saved."""
    import budgetopt

    budget, path = argument
    return budgetopt.fit(built.model, built.sample, budget, allow=("keep", "recompute"), optimizer=None, plan=path)


def peers(backend: str, budgets: list[float], counts: list[int]) -> list[Way]:
    """What is compared with, in the order of the table."""
    return [
        Way("checkpoint every block", "every", 1),
        *(Way(f"checkpoint 1 block in {count}", "every", count) for count in counts),
        Way("selective: save heavy operators", "selective", 1),
        Way("selective: save every 2nd heavy one", "selective", 2),
        *(Way(f"compile, memory budget {budget:g}", "compiled", [backend, budget]) for budget in budgets),
    ]


def _checkpointed(block: Any, **options: Any) -> None:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
