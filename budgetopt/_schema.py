"""What is saved and handed around: profiles and measurements. Pydantic models, no torch.

All sizes are bytes and all times nanoseconds, as exact integers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from budgetopt._arguments import CHOICES
from budgetopt._errors import BudgetOptError, PlanMismatchError
from budgetopt.solvers import writing
from budgetopt.solvers.problem import OUTSIDE, Problem

Form = TypeVar("Form", bound="Saved")


class Strict(BaseModel):
    """Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Saved(Strict):
    """A model that lives in a file.

    Attributes:
        seal: in the file alone, the hash of the rest: what was changed since it was written was never tried, and may
            train wrongly. Files of older versions have none.
    """

    seal: str = Field(default="", exclude=True, repr=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` as JSON, whole or not at all.

        Raises:
            BudgetOptError: the folder can't be written to.
        """
        text = self.model_dump_json(indent=2).removeprefix("{\n")
        write_atomically(Path(path), f'{{\n  "seal": "{self._hash()}",\n{text}\n'.encode())

    @classmethod
    def load(cls: type[Form], path: str | os.PathLike[str]) -> Form:
        """Read what :meth:`save` wrote.

        Raises:
            BudgetOptError: there is no such file.
            PlanMismatchError: the file is no such JSON, cut off, changed, or of a newer version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise BudgetOptError(f"can't read {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanMismatchError(f"{str(path)!r} is not a {cls.__name__} of budgetopt: {error}") from error
        try:
            found = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            instead = f", not {first['input']!r}" if first["type"] == "literal_error" else ""
            raise PlanMismatchError(
                f"{str(path)!r} is not a {cls.__name__} that this version of budgetopt reads: "
                f"{where}: {first['msg']}{instead}. Delete it to have it made anew."
            ) from error
        if found.seal not in ("", found._hash()):
            raise PlanMismatchError(
                f"{str(path)!r} was changed after it was written, so nobody knows whether it trains right. Delete it "
                "to have it made anew; exclude= and allow= say what may be planned."
            )
        return found.model_copy(update={"seal": ""})

    def _hash(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside `path` and rename, so that a crash leaves the old file or the new one."""
    try:
        writing.write_whole(path, data)
    except OSError as error:
        raise BudgetOptError(
            f"can't write {str(path)!r}: {error.strerror}. Choose a folder that exists and can be written to."
        ) from error


class Environment(Strict):
    """Under what a profile was taken."""

    device: str
    torch: str
    autocast: str
    default_dtype: str
    gradients: bool


class Fixed(Strict):
    """Bytes that are there during the whole step, by kind."""

    parameter: int = 0
    buffer: int = 0
    gradient: int = 0
    optimizer: int = 0
    sample: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameter + self.buffer + self.gradient + self.optimizer + self.sample


class RegionRecord(Strict):
    """One call of one module that is a unit of planning; `operators` index the profile's operators.

    `shape` is that of its first tensor argument: a call with more elements is a larger batch.
    """

    path: str
    call: int
    operators: tuple[int, ...]
    record_ns: int
    shape: tuple[int, ...] = ()


class OperatorRecord(Strict):
    """One dispatched call. `slots` are the values it makes, by the number of the result; `ranks` the numbers
    of dimensions of its tensor arguments.
    """

    name: str
    ranks: str = ""
    module: str = ""
    region: int = OUTSIDE
    backward: bool = False
    time_ns: int = 0
    workspace: int = 0
    rng_bytes: int = 0
    births: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    slots: tuple[tuple[int, int], ...] = ()
    blocked: str = ""
    snapshot: bool = False


class ValueRecord(Strict):
    """One version of one storage. `half_bytes` is 0 where fp16 saves nothing."""

    storage: int
    region: int
    operator: int
    previous: int = OUTSIDE
    last: bool = True
    half_bytes: int = 0
    codec_ns: int = 0


class LayerRecord(Strict):
    """What people read of a profile: one module's saved activation bytes and forward time."""

    path: str
    kind: str
    activation_bytes: int
    forward_ns: int


class Smaller(Strict):
    """The same step at a smaller batch: bytes per storage, workspace per operator, bytes of the sample."""

    batch: int
    storages: tuple[int, ...]
    workspaces: tuple[int, ...]
    sample: int


class Profile(Saved):
    """One measured training step.

    `batch` is the first dimension that all tensors of the sample share, 0 if they do not; `smaller` the step
    at a smaller one, from which other batch sizes are predicted, or None and `one_size` says why.
    `optimizer_workspace` is what the optimizer's step needs on top of its state, the gradients and what else is alive
    after the backward pass; `optimizer_kind` tells for which optimizer that was found.
    `modelled`: the device on which the step was modelled, not run: its times are from a table, and operators' workspace
    is unknown. `scaled_from`: the two batch sizes that were measured instead, where that of the sample did not fit.
    `replay_ns` is what running one operator again costs beside the operator itself. `peak_bytes` is the
    plain step's peak, resident bytes included, as the referee predicts it.
    """

    version: Literal[1] = 1
    environment: Environment
    fingerprint: dict[str, Any]
    fixed: Fixed
    regions: tuple[RegionRecord, ...]
    operators: tuple[OperatorRecord, ...]
    storages: tuple[int, ...]
    values: tuple[ValueRecord, ...]
    handles: tuple[int, ...]
    events: tuple[tuple[int, int], ...]
    layers: tuple[LayerRecord, ...] = ()
    batch: int = 0
    smaller: Smaller | None = None
    one_size: str = ""
    scaled_from: tuple[int, ...] = ()
    step_ns: int
    replay_ns: int
    peak_bytes: int = 0
    loss_guessed: bool = False
    not_replayable: dict[str, str] = {}
    optimizer_workspace: int = 0
    optimizer_kind: str = ""
    modelled: str = ""

    def problem(
        self,
        budget: int | str,
        *,
        allow: Iterable[str] = CHOICES,
        exclude: Iterable[str] = (),
        headroom: int | str = 0,
        between: bool = True,
    ) -> Problem:
        """What the solvers are asked where this step has to fit a budget: integers, and no names.

        Solving it gives the choices and figures of :func:`budgetopt.solve`; ``budgetopt.solvers.save_problem``
        writes it to a file.

        Args:
            budget: bytes, or text such as ``"8GB"``. The others: see :func:`budgetopt.solve`. What the headroom
                takes is off the problem's own budget.

        Raises:
            InvalidBudgetError: the budget or the headroom can't be read.
            BudgetOptError: an unknown choice or layer.
        """
        from budgetopt._problem import problem_within

        return problem_within(self, budget, allow=allow, exclude=exclude, headroom=headroom, between=between)

    def largest_batch(
        self,
        budget: int | str,
        *,
        allow: Iterable[str] = CHOICES,
        exclude: Iterable[str] = (),
        headroom: int | str = 0,
    ) -> int:
        """The largest batch for which some plan has a predicted peak within `budget`; 0 if not even one example fits.

        Args:
            budget: bytes, or text such as ``"8GB"``. The others: see :func:`budgetopt.solve`; with
                ``allow=("keep",)`` the plain step has to fit.

        Raises:
            BudgetOptError: the profile knows one batch size only (it says why), an unknown choice or layer.
            InvalidBudgetError: the budget or the headroom can't be read.
        """
        from budgetopt._batch import largest_within

        return largest_within(self, budget, allow=allow, exclude=exclude, headroom=headroom)

    def __str__(self) -> str:
        from budgetopt._report import profile_table

        return profile_table(self)

    def _repr_html_(self) -> str:
        from budgetopt._html import profile_html

        return profile_html(self)


class FrontierPoint(Strict):
    """The cheapest plan found for one budget: predicted peak and where it is, extra time, proven gap."""

    budget_bytes: int
    peak_bytes: int
    peak_at: str
    extra_ns: int
    overhead: float
    gap: float
    solver: str


class Measurement(Strict):
    """What steps of the model really took.

    Attributes:
        peak_bytes: peak of forward and backward, resident bytes included. resident_bytes: parameters,
            buffers, gradients at the start, sample, optimizer state. step_ns: median.
        reserved_bytes: what the caching allocator reserved (CUDA; 0 elsewhere). context_bytes: what else is taken
            on the device: CUDA's context, libraries, other processes.
    """

    peak_bytes: int
    resident_bytes: int
    step_ns: int
    reserved_bytes: int = 0
    context_bytes: int = 0
    losses: tuple[float, ...] = ()
