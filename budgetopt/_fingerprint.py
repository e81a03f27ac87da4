"""What a plan is bound to: module tree, parameters, structure of the sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from budgetopt._errors import PlanMismatchError
from budgetopt._fingerprint_digest import digest
from budgetopt._schema import Environment

MUST_MATCH = ("modules", "parameters", "sample")
VERIFIED_AGAIN = ("sizes", "trainable")


def take(model: torch.nn.Module, sample: Any, *others: Any) -> dict[str, Any]:
    """Everything that identifies `model` and its samples; ``sizes`` and ``trainable`` may differ later."""
    return {
        "modules": [[path, type(module).__name__] for path, module in model.named_modules()],
        "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in model.named_parameters()],
        "sample": _structure(sample),
        "sizes": _sizes([sample, *others] if others else sample),
        "trainable": [name for name, p in model.named_parameters() if p.requires_grad],
    }


def environment(device: torch.device, gradients: bool) -> Environment:
    """Device, torch version, autocast state and defaults, as they are now."""
    on = torch.is_autocast_enabled(device.type)
    return Environment(
        device=device.type,
        torch=torch.__version__,
        autocast=str(torch.get_autocast_dtype(device.type)) if on else "",
        default_dtype=str(torch.get_default_dtype()),
        gradients=gradients,
    )


def require_match(
    planned: Mapping[str, Any],
    full: Mapping[str, Any] | None,
    now: Mapping[str, Any],
    parts: Sequence[str] = MUST_MATCH,
) -> None:
    """Raise unless the parts that must match do.

    Args:
        planned: hashes. full: what they were made from, to name the first difference. now: of the model.

    Raises:
        PlanMismatchError: names the first difference.
    """
    hashes = digest(now)
    for part in parts:
        if planned.get(part) != hashes[part]:
            raise PlanMismatchError(
                f"the plan belongs to another model or sample: {_first_difference(part, full, now)}. "
                "Delete the plan file, or give another path, to plan anew."
            )


def differs(planned: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Parts that may differ but ask for a new verification."""
    hashes = digest(now)
    return [part for part in VERIFIED_AGAIN if planned.get(part) != hashes[part]]


def _first_difference(part: str, full: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    if full is None or not isinstance(now[part], list):
        return f"its {part} differ"
    before, after = full[part], now[part]
    for old, new in zip(before, after, strict=False):
        if json.loads(json.dumps(old)) != json.loads(json.dumps(new)):
            return f"in its {part}, {_show(old)} was planned and {_show(new)} is here"
    return f"{len(before)} {part} were planned and {len(after)} are here"


def _show(item: Any) -> str:
    return " ".join(str(part) for part in item) if isinstance(item, (list, tuple)) else str(item)


def _structure(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return ["tensor", str(tree.dtype), tree.dim()]
    if isinstance(tree, Mapping):
        return ["mapping", [[str(key), _structure(value)] for key, value in tree.items()]]
    if isinstance(tree, (list, tuple)):
        return ["sequence", [_structure(item) for item in tree]]
    return type(tree).__name__


def _sizes(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return list(tree.shape)
    if isinstance(tree, Mapping):
        return [_sizes(value) for value in tree.values()]
    if isinstance(tree, (list, tuple)):
        return [_sizes(item) for item in tree]
    return None
