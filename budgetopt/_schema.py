"""What is saved and handed around: profiles, plans, measurements. Pydantic models, no torch.

All sizes are bytes and all times nanoseconds, as exact integers.
"""

from __future__ import annotations

import base64
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from budgetopt._errors import BudgetOptError, PlanMismatchError
from budgetopt.solvers.problem import OUTSIDE

Form = TypeVar("Form", bound="Saved")


class Strict(BaseModel):
    """Unknown keys are errors: a typo in a hand-edited plan must not pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Saved(Strict):
    """A model that lives in a file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to `path` as JSON, whole or not at all.

        Raises:
            BudgetOptError: the folder can't be written to.
        """
        write_atomically(Path(path), self.model_dump_json(indent=2) + "\n")

    @classmethod
    def load(cls: type[Form], path: str | os.PathLike[str]) -> Form:
        """Read what :meth:`save` wrote.

        Raises:
            BudgetOptError: there is no such file.
            PlanMismatchError: the file is no such JSON, cut off, or of a newer version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise BudgetOptError(f"can't read {str(path)!r}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise PlanMismatchError(f"{str(path)!r} is not a {cls.__name__} of budgetopt: {error}") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            found = f", not {first['input']!r}" if first["type"] == "literal_error" else ""
            raise PlanMismatchError(
                f"{str(path)!r} is not a {cls.__name__} that this version of budgetopt reads: "
                f"{where}: {first['msg']}{found}. Delete it to have it made anew."
            ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write beside `path` and rename, so that a crash leaves the old file or the new one."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
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
    """One call of one module that is a unit of planning; `operators` index the profile's operators."""

    path: str
    call: int
    operators: tuple[int, ...]
    record_ns: int


class OperatorRecord(Strict):
    """One dispatched call. `slots` are the values it makes, by the number of the result."""

    name: str
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


class Profile(Saved):
    """One measured training step.

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
    step_ns: int
    replay_ns: int
    peak_bytes: int = 0
    loss_guessed: bool = False
    not_replayable: dict[str, str] = {}

    def __str__(self) -> str:
        from budgetopt._report import profile_table

        return profile_table(self)


class Decision(Strict):
    """What happens to one value: the `slot`-th result of the `nth` operator of its name in the region's call."""

    operator: str
    nth: int
    slot: int
    layer: str
    choice: Literal["keep", "hold", "recompute", "fp16"]
    bytes: int


class RegionPlan(Strict):
    """The decisions for one call of one module, and the operators that make the call the planned one."""

    path: str
    call: int
    decisions: tuple[Decision, ...]
    operators: tuple[str, ...]
    record: tuple[int, ...]
    blocked: tuple[int, ...]
    snapshot: tuple[int, ...]

    def exact(self) -> RegionPlan:
        """The same with values recomputed that are in fp16 here; every operator is recorded."""
        words = {"fp16": "recompute"}
        decisions = tuple(d.model_copy(update={"choice": words.get(d.choice, d.choice)}) for d in self.decisions)
        return self.model_copy(update={"decisions": decisions, "record": tuple(range(len(self.operators)))})


class Prediction(Strict):
    """What the referee says of a plan. `overhead` is extra time ÷ plain step time."""

    peak_bytes: int
    plain_peak_bytes: int
    resident_bytes: int
    overhead: float
    extra_ns: int
    peak_at: str


class Verification(Strict):
    """What running the plan showed."""

    peak_bytes: int
    step_ns: int
    values_proven: int
    values_kept_after_proof: tuple[str, ...] = ()
    grad_error: float | None = None


class Plan(Saved):
    """Decisions for every planned region, bound to a model and a sample; `profile` is compressed."""

    version: Literal[1] = 1
    budget_bytes: int
    headroom_bytes: int = 0
    predicted: Prediction
    measured: Verification | None = None
    solver: str
    status: str
    gap: float
    allow: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    regions: tuple[RegionPlan, ...]
    calls: dict[str, int] = {}
    fingerprint: dict[str, Any]
    environment: Environment
    profile_data: str = ""

    @property
    def profile(self) -> Profile:
        """The profile that the plan was solved from.

        Raises:
            PlanMismatchError: it was damaged, or written by another version.
        """
        try:
            return Profile.model_validate_json(zlib.decompress(base64.b85decode(self.profile_data)))
        except (ValueError, zlib.error) as error:
            raise PlanMismatchError(
                "the profile inside the plan can't be read: the file was damaged or written by another version of "
                "budgetopt. Delete it to have it made anew."
            ) from error

    @property
    def profile_optimizer(self) -> int:
        """Bytes that were reserved for the optimizer's state."""
        return self.profile.fixed.optimizer

    @property
    def drops(self) -> bool:
        """Whether anything is not kept: if not, the plan leaves the model untouched."""
        return any(d.choice in ("recompute", "fp16") for region in self.regions for d in region.decisions)

    @model_validator(mode="after")
    def _one_plan_per_call(self) -> Plan:
        calls = [(region.path, region.call) for region in self.regions]
        if len(set(calls)) != len(calls):
            raise ValueError("a region's call is planned twice")
        return self

    def __str__(self) -> str:
        from budgetopt._report import plan_table

        return plan_table(self)


def compress(profile: Profile) -> str:
    """The profile as text that fits into a plan's JSON."""
    return base64.b85encode(zlib.compress(profile.model_dump_json().encode(), 6)).decode()


class Measurement(Strict):
    """What steps of the model really took.

    Attributes:
        peak_bytes: peak of forward and backward, resident bytes included. resident_bytes: parameters,
            buffers, gradients at the start, sample, optimizer state. step_ns: median.
        reserved_bytes: what the caching allocator reserved (CUDA; 0 elsewhere).
    """

    peak_bytes: int
    resident_bytes: int
    step_ns: int
    reserved_bytes: int = 0
    losses: tuple[float, ...] = ()
