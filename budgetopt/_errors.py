"""Every error and warning of budgetopt. This file imports nothing.

BudgetOptError
 ├── InvalidBudgetError       the budget (or the headroom) can't be read as bytes
 ├── InfeasibleBudgetError    nothing feasible: .minimum bytes would do, .floor says what needs them
 ├── ProfileError             the model's step could not be recorded or measured
 ├── SolverError              no solver gave an answer that holds
 ├── PlanMismatchError        a saved plan belongs to another model, sample or version
 └── OverBudgetError          the planned step was run and took .measured bytes

UserWarning
 └── BudgetOptWarning         training goes on, but something is not as planned
"""


class BudgetOptError(Exception):
    """What budgetopt raises on purpose; catch it to catch them all."""


class InvalidBudgetError(BudgetOptError, ValueError):
    """The budget is no number of bytes that a model could be trained in."""


class InfeasibleBudgetError(BudgetOptError):
    """No choice fits the budget.

    Attributes:
        minimum: the smallest feasible budget, in bytes.
        floor: the layers and fixed bytes that set that minimum, as text.
    """

    minimum: int
    floor: str

    def __init__(self, message: str, minimum: int, floor: str) -> None:
        super().__init__(message, minimum, floor)  # all of them, so that the error survives pickling
        self.minimum = minimum
        self.floor = floor

    def __str__(self) -> str:
        return str(self.args[0])


class ProfileError(BudgetOptError):
    """The training step could not be recorded or measured."""


class SolverError(BudgetOptError):
    """No solver gave an answer that the referee accepts."""


class PlanMismatchError(BudgetOptError):
    """A saved plan does not belong to this model or sample; the message names the first difference."""


class OverBudgetError(BudgetOptError):
    """The planned step was run and took more than the budget.

    Attributes:
        measured: the peak of that step, in bytes.
    """

    measured: int

    def __init__(self, message: str, measured: int) -> None:
        super().__init__(message, measured)
        self.measured = measured

    def __str__(self) -> str:
        return str(self.args[0])


class BudgetOptWarning(UserWarning):
    """Training goes on, but something is not as planned."""
