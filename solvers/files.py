"""Problems as files: JSON, or the same compressed by gzip where the name ends in ``.gz``.

One object. ``format`` and ``version`` say what it is; ``budget``, ``resident`` and ``step_ns`` are integers (bytes,
bytes, nanoseconds); ``storages`` and ``handles`` are lists of integers. ``values``, ``operators``, ``regions`` and
``events`` are objects with one list per field of :class:`Value`, :class:`Operator`, :class:`Region` and
:class:`Event`, whose n-th entries together are the n-th of them: a step has up to 100,000 events, and names beside
each of them would be most of the file. ``births``, ``reads`` and ``writes`` are lists of lists. Every key is there,
and no other one.

A file holds no names and nothing of the model but sizes, times and what reads what.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .errors import ProblemFileError
from .problem import Event, Kind, Operator, Problem, Region, Value
from .sound import MOST, faults
from .writing import write_whole

FORMAT = "budgetopt problem"
VERSION = 1

_GZIP = b"\x1f\x8b"
_LEVEL = 6  # of gzip: the levels above take twice as long for the last percent

_Index = Annotated[int, Field(ge=-1, lt=MOST)]
_Amount = Annotated[int, Field(ge=0, lt=MOST)]
_Kind = Annotated[int, Field(ge=min(Kind), le=max(Kind))]


class _Strict(BaseModel):
    """Unknown keys are errors, and so is a number where a truth value belongs."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Columns(_Strict):
    """One list per field; all have the same length."""

    @model_validator(mode="after")
    def _same_length(self) -> _Columns:
        lengths = {name: len(column) for name, column in self}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{count} of {name}" for name, count in lengths.items())
            raise ValueError(f"lists of different lengths: {told}")
        return self

    def rows(self) -> Iterable[tuple[Any, ...]]:
        """The entries that belong together, in the order of the fields; lists as tuples."""
        columns = (column if not column or type(column[0]) is not list else map(tuple, column) for _, column in self)
        return zip(*columns, strict=True)


class _Values(_Columns):
    storage: list[_Index]
    region: list[_Index]
    operator: list[_Index]
    previous: list[_Index]
    last: list[bool]
    droppable: list[bool]
    half_bytes: list[_Amount]
    codec_ns: list[_Amount]
    crossing: list[bool]
    halved: list[bool]


class _Operators(_Columns):
    region: list[_Index]
    time_ns: list[_Amount]
    births: list[list[_Index]]
    workspace: list[_Amount]
    reads: list[list[_Index]]
    writes: list[list[_Index]]
    rng_bytes: list[_Amount]
    replayable: list[bool]


class _Regions(_Columns):
    record_ns: list[_Amount]
    kind: list[str]


class _Events(_Columns):
    kind: list[_Kind]
    index: list[_Index]


class _File(_Strict):
    format: Literal["budgetopt problem"]
    version: Literal[1]
    budget: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
    resident: _Amount
    step_ns: _Amount
    storages: list[_Amount]
    values: _Values
    operators: _Operators
    handles: list[_Index]
    regions: _Regions
    events: _Events


def save_problem(problem: Problem, path: str | os.PathLike[str]) -> None:
    """Write to ``path``, whole or not at all; equal problems give equal bytes.

    Raises:
        ProblemFileError: the folder can't be written to, or the problem is none that :func:`load_problem` would
            give back equal: an index of nothing, say.
    """
    path = Path(path)
    try:
        data = _encoded(problem)
        same = _decoded(data) == problem
    except (TypeError, ValueError, AttributeError, _Unsound) as error:
        raise ProblemFileError(f"can't write {str(path)!r}: the problem makes no sense: {error}") from error
    if not same:
        raise ProblemFileError(f"can't write {str(path)!r}: the problem has parts that the file's format does not know")
    try:
        write_whole(path, gzip.compress(data, _LEVEL, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ProblemFileError(
            f"can't write {str(path)!r}: {error.strerror}. Choose a folder that exists and can be written to."
        ) from error


def load_problem(path: str | os.PathLike[str]) -> Problem:
    """Read what :func:`save_problem` wrote, compressed or not, whatever its name is.

    Raises:
        ProblemFileError: there is no such file, it is none of a problem, or what it says makes no sense; with the
            place in the file.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProblemFileError(f"can't read {str(path)!r}: {error.strerror}") from error
    try:
        return _decoded(gzip.decompress(data) if data.startswith(_GZIP) else data)
    except (_Unsound, OSError, EOFError, zlib.error) as error:  # OSError: what gzip raises
        raise ProblemFileError(
            f"{str(path)!r} is no problem that this version of budgetopt reads: {error}. "
            "Write it anew, or mend it there."
        ) from error


class _Unsound(Exception):
    """Why a text is no problem, with the place."""


def _encoded(problem: Problem) -> bytes:
    known = {
        "format": FORMAT,
        "version": VERSION,
        "budget": problem.budget,
        "resident": problem.resident,
        "step_ns": problem.step_ns,
        "storages": problem.storages,
        "values": _columns([field.name for field in fields(Value)], problem.values),
        "operators": _columns([field.name for field in fields(Operator)], problem.operators),
        "handles": problem.handles,
        "regions": _columns([field.name for field in fields(Region)], problem.regions),
        "events": _columns(Event._fields, problem.events),
    }
    return (json.dumps(known, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _columns(names: Sequence[str], rows: Sequence[object]) -> dict[str, list[Any]]:
    return {name: [getattr(row, name) for row in rows] for name in names}


def _decoded(data: bytes) -> Problem:
    try:
        file = _File.model_validate_json(data)
    except ValidationError as error:
        raise _Unsound(_first(error)) from None
    problem = Problem(
        budget=file.budget,
        resident=file.resident,
        storages=tuple(file.storages),
        values=tuple(Value(*row) for row in file.values.rows()),
        operators=tuple(Operator(*row) for row in file.operators.rows()),
        handles=tuple(file.handles),
        regions=tuple(Region(*row) for row in file.regions.rows()),
        events=tuple(Event(Kind(kind), index) for kind, index in file.events.rows()),
        step_ns=file.step_ns,
    )
    for fault in faults(problem):
        raise _Unsound(fault)
    return problem


def _first(error: ValidationError) -> str:
    """The first of what pydantic found: ``values.storage[3]: Input should be a valid integer, not 'x'``."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    shown = repr(first["input"]) if isinstance(first["input"], (int, float, str)) else ""
    found = f", not {shown}" if shown and len(shown) < 40 and first["type"] != "extra_forbidden" else ""
    return f"{where or 'the file'}: {first['msg']}{found}"
