"""Two processes that train together over gloo, plain and planned: ``python -m tests.robustness.ranks FOLDER``.

Every scenario returns whether this rank's parameters are, bit for bit, those of the same training without a plan, and
what else the test wants to know. Written as JSON, one file per rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import budgetopt

WORLD = 2
EXACT = ("keep", "recompute")
SAMPLE = 64, 32


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4))
    return nn.Sequential(*blocks)


class Twice(nn.Module):
    """One block used twice, and one that is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.idle = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        return self.body(self.body(x))


def fit(model: nn.Module, share: float = 0.6, like: nn.Module | None = None) -> nn.Module:
    """Under a share of the activation bytes, or the smallest budget there is."""
    sample = torch.randn(SAMPLE)
    found = budgetopt.profile(like or model, sample, optimizer="sgd")
    resident = found.fixed.total
    budget = resident + round(share * (found.peak_bytes - resident))
    try:
        return budgetopt.fit(model, sample, budget, optimizer="sgd", allow=EXACT)
    except budgetopt.InfeasibleBudgetError as error:
        return budgetopt.fit(model, sample, error.minimum, optimizer="sgd", allow=EXACT)


def train(model: nn.Module, *, accumulate: bool = False) -> list[Tensor]:
    """Three steps on this rank's own data; the parameters, whole."""
    torch.manual_seed(10 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for last in (False, True) if accumulate else (True,):
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                model(torch.randn(SAMPLE)).square().mean().backward()
        optimizer.step()
    return [whole(p).detach().clone() for p in model.parameters()]


def whole(parameter: Any) -> Tensor:
    found: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def replayed(model: nn.Module) -> int:
    from budgetopt._apply import installed

    found = installed(model)
    return 0 if found is None else sum(region.counters.replayed for region in found.regions.values())


def dropped(model: nn.Module) -> list[str]:
    """What the plan makes again, in words: equal plans, equal lists."""
    plan = budgetopt.plan_of(model)
    return (
        [] if plan is None else [f"{r.path} {d.operator} {d.nth} {d.choice}" for r in plan.regions for d in r.decisions]
    )


# -- scenarios ---------------------------------------------------------------------------------------


def fitted_before_ddp(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(layers()))
    model = fit(layers())
    return {"equal": equal(plain, train(DistributedDataParallel(model))), "replayed": replayed(model)}


def fitted_inside_ddp(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(layers()))
    model = DistributedDataParallel(layers())
    fit(model.module)
    return {"equal": equal(plain, train(model)), "replayed": replayed(model.module)}


def refused(model: nn.Module) -> dict[str, Any]:
    """Why the model isn't fitted, and whether it trains all the same."""
    try:
        budgetopt.fit(model, torch.randn(SAMPLE), "1GB", optimizer="sgd")
    except budgetopt.ProfileError as error:
        return {"said": str(error), "trained": len(train(model))}
    return {"said": ""}


def wrapped(rank: int) -> dict[str, Any]:
    return refused(DistributedDataParallel(layers()))


def already_sharded(rank: int) -> dict[str, Any]:
    return refused(sharded(layers()))


def fitted_on_one_rank(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(layers()))
    model = DistributedDataParallel(layers())
    if rank == 0:
        fit(model.module)
    return {"equal": equal(plain, train(model)), "replayed": replayed(model.module)}


def other_plans_on_each_rank(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(layers()))
    model = fit(layers(), share=(0.6, 0.85)[rank])
    done = train(DistributedDataParallel(model))
    return {"equal": equal(plain, done), "replayed": replayed(model), "dropped": dropped(model)}


def shared_block_and_accumulation(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(Twice(), find_unused_parameters=True), accumulate=True)
    model = fit(Twice())
    done = train(DistributedDataParallel(model, find_unused_parameters=True), accumulate=True)
    return {"equal": equal(plain, done), "replayed": replayed(model)}


def static_graph(rank: int) -> dict[str, Any]:
    plain = train(DistributedDataParallel(layers(), static_graph=True))
    model = fit(layers())
    return {
        "equal": equal(plain, train(DistributedDataParallel(model, static_graph=True))),
        "replayed": replayed(model),
    }


def sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fitted_before_sharding(rank: int) -> dict[str, Any]:
    plain = train(sharded(layers()))
    model = layers()
    fit(model)
    done = train(sharded(model))
    return {"equal": equal(plain, done), "replayed": replayed(model)}


SCENARIOS: list[Callable[[int], dict[str, Any]]] = [
    fitted_before_ddp,
    fitted_inside_ddp,
    wrapped,
    already_sharded,
    fitted_on_one_rank,
    other_plans_on_each_rank,
    shared_block_and_accumulation,
    static_graph,
    fitted_before_sharding,
]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {scenario.__name__: scenario(rank) for scenario in SCENARIOS}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(_rank, (sys.argv[1],), nprocs=WORLD)  # type: ignore[attr-defined,no-untyped-call]
