"""How the step at its full batch runs while it is profiled: as the plan of least memory, not dropping everything.

To drop everything is not the least: where a region holds many blocks, all of it is made again at once. A pass at a
smaller batch, which has room for that, tells what the solver's referee needs to find a choice that takes less.
"""

from __future__ import annotations

from budgetopt import _apply, _fingerprint, solvers
from budgetopt._answer import every_region
from budgetopt._batch import at_batch
from budgetopt._calibrate import Costs
from budgetopt._fixed import Resident
from budgetopt._passes import Pass, Scripts, may_drop
from budgetopt._problem import to_problem
from budgetopt._recorded import operators_of, recorded
from budgetopt._schema import Profile, Smaller


def least_memory(run: Pass, resident: Resident, batch: int, wanted: int, smaller: Smaller | None = None) -> Scripts:
    """What to keep and what to make again at a batch of `wanted`, from a pass at one of `batch`.

    Whether it is right does not hang on the sizes that are predicted here, only how much memory it takes.

    Args:
        smaller: a second size; without one, how bytes grow is guessed.
    """
    profile = _predicted(run, resident, batch, wanted, smaller)
    problem = to_problem(profile, 0, allow=("keep", "recompute"), kept=_kept(run))
    planned = every_region(profile, problem, solvers.leanest(problem))
    return {(region.path, region.call): _apply.script_of(region) for region in planned}


def _predicted(run: Pass, resident: Resident, batch: int, wanted: int, smaller: Smaller | None) -> Profile:
    profile = recorded(
        run,
        operators_of(run),
        environment=_fingerprint.environment(resident.device, resident.gradient > 0),
        fingerprint={"modules": []},
        fixed=resident.fixed(0),
        costs=Costs(0, 0),
        codec_ns=lambda size: 0,
    )
    smaller = smaller or _no_batch(run)
    return at_batch(profile.model_copy(update={"batch": batch, "smaller": smaller}), wanted)


def _no_batch(run: Pass) -> Smaller:
    """The step on no examples, if only the gradients of parameters did not grow with the batch."""
    constant = run.tape.leaf_gradients
    return Smaller(
        batch=0,
        storages=tuple(size if i in constant else 0 for i, size in enumerate(run.tape.sizes)),
        workspaces=(0,) * len(run.tape.drafts),
        sample=0,
    )


def _kept(run: Pass) -> frozenset[tuple[int, int]]:
    """Results, by operator and slot, that are not dropped unless a plan was proven."""
    tape = run.tape
    return frozenset(
        (number, slot)
        for number, draft in enumerate(tape.drafts)
        for slot, value in draft.slots
        if not may_drop(tape.dtypes[value])
    )
