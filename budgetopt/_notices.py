"""What a fitted model says while it trains, each thing once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

from budgetopt._errors import BudgetOptError, BudgetOptWarning
from budgetopt._plan import Plan
from budgetopt._units import show_bytes


class Notices:
    """The warnings of one installed plan; its regions share them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.differed = False
        self.grew = False
        self.bypassed = False
        self.broke = False

    def differs(self, path: str) -> None:
        """A region's call ran other operators than planned."""
        if self.differed:
            return
        self.differed = True
        warnings.warn(
            f"budgetopt: {path or 'the model'} ran other operators than planned (another shape, mask or branch?). "
            "What the plan does not speak of is recomputed: exact, memory first, perhaps slower. "
            "Call budgetopt.fit again to plan for it.",
            BudgetOptWarning,
            stacklevel=7,
        )

    def bypasses(self, path: str) -> None:
        """A region was called where torch forbids saved-tensor hooks."""
        if self.bypassed:
            return
        self.bypassed = True
        warnings.warn(
            f"budgetopt: {path or 'the model'} was called in a torch.func transform, or where else torch forbids "
            "saved-tensor hooks: there it runs as without a plan, exact, and takes the memory of a plain step.",
            BudgetOptWarning,
            stacklevel=5,
        )

    def compiled(self, path: str) -> None:
        """A region was called from code that torch.compile made."""
        if self.broke:
            return
        self.broke = True
        warnings.warn(
            f"budgetopt: torch.compile was called around {path or 'the model'}, which is planned: planned layers run "
            "as they are, uncompiled, under their plan; what is around them is compiled. To have a layer compiled and "
            "not planned, compile it before budgetopt.fit.",
            BudgetOptWarning,
            stacklevel=4,
        )

    def larger(self, planned: Sequence[int], shape: Sequence[int]) -> None:
        """A region was called with a larger input than planned; the shapes are those of its first tensor."""
        if self.grew:
            return
        self.grew = True
        peak, how = self._peak(planned, shape)
        limit = self.plan.budget_bytes
        verdict = "within" if peak <= limit else "over"
        warnings.warn(
            f"budgetopt: the input is larger than planned ({_show(shape)} after {_show(planned)}): {how} peak "
            f"{show_bytes(peak)}, {verdict} the budget of {show_bytes(limit)}. Gradients stay exact. "
            "Call budgetopt.fit again, with the largest batch, to plan for it.",
            BudgetOptWarning,
            stacklevel=5,
        )

    def _peak(self, planned: Sequence[int], shape: Sequence[int]) -> tuple[int, str]:
        """Predicted from the two profiled sizes where only the batch grew, else in proportion."""
        if list(planned[1:]) == list(shape[1:]) and len(shape) == len(planned):
            try:
                batch = -(-self.plan.profile.batch * shape[0] // planned[0])
                return self.plan.peak_at(batch), "predicted"
            except BudgetOptError:
                pass  # it was profiled at one size only
        resident = self.plan.predicted.resident_bytes
        above = self.plan.predicted.peak_bytes - resident
        return resident + above * prod(shape) // max(1, prod(planned)), "in proportion a"


def _show(shape: Sequence[int]) -> str:
    return " × ".join(str(size) for size in shape)
