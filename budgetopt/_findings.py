"""What a training loop wastes, as it is told: each kind with its bytes and the line that mends it. No torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

from budgetopt._schema import Strict
from budgetopt._units import show_bytes

Kind: TypeAlias = Literal[
    "held", "graphs", "validation", "zero gradients", "frozen gradients", "unused gradients", "cache", "fragmentation"
]

_WHAT: dict[Kind, str] = {
    "held": "outputs of an earlier step, or what its graph saved, are there when the next forward begins",
    "graphs": "the graphs of all earlier steps are still there, by losses that are summed up or listed, and each step "
    "adds one; their nodes take host memory on top",
    "validation": "a forward in eval mode saved activations for a backward pass that never came",
    "zero gradients": "gradients are filled with zeros between steps instead of being freed",
    "frozen gradients": "parameters that need no gradient have one",
    "unused gradients": "gradients are computed for parameters that the optimizer does not step",
    "cache": "the model returns a cache for generation (past_key_values) while it trains",
    "fragmentation": "the allocator reserved more at its peak than was allocated at the peak",
}
_MEND: dict[Kind, str] = {
    "held": "del out, loss  # before the next forward; keep loss.item() or out.detach().cpu() instead",
    "graphs": "total += loss.item()  # or losses.append(loss.detach())",
    "validation": "with torch.no_grad():  # around validation",
    "zero gradients": "optimizer.zero_grad(set_to_none=True)",
    "frozen gradients": "parameter.grad = None  # where requires_grad is False",
    "unused gradients": "parameter.requires_grad_(False)  # for what is not in the optimizer",
    "cache": "model.config.use_cache = False  # or use_cache=False in the call",
    "fragmentation": "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # in the environment, before the start",
}


class Finding(Strict):
    """One kind of waste.

    Attributes:
        bytes: at most at one time, freed by the mend. calls: of the model in which it was seen.
    """

    kind: Kind
    bytes: int
    calls: int = 1

    @property
    def what(self) -> str:
        """In words."""
        return _WHAT[self.kind]

    @property
    def mend(self) -> str:
        """The line of code or of the shell that frees the bytes."""
        return _MEND[self.kind]

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)}: {self.what}\n    {self.mend}"


class Waste(Strict):
    """What was found in some calls of a model, the largest first."""

    calls: int
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        if not self.calls and not self.findings:
            return "nothing seen, the model was not called: inspect the module that the loop calls, wrapped or compiled"
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'} of the model"
        if not self.findings:
            return f"nothing found in {calls}"
        return "\n".join([f"found in {calls}:", *map(str, self.findings)])
