"""Several processes: what is made again holds no communication, so plans may differ and nobody waits for anybody."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from .cases import case

ROOT = Path(__file__).parents[2]
Found = Callable[[str], list[dict[str, Any]]]

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each rank says of a scenario; all are run once, in two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.robustness.ranks", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return lambda name: [rank[name] for rank in ranks]


def assert_all(found: list[dict[str, Any]]) -> None:
    assert all(rank["equal"] for rank in found)
    assert all(rank["replayed"] for rank in found)


@pytest.mark.parametrize("when", ["fitted_before_ddp", "fitted_inside_ddp", "static_graph"])
@case("Distributed", "DDP marks parameters ready twice, or does not average", "exact",
      threads="pytorch#24005, pytorch#109191, accelerate#2017")  # fmt: skip
def test_ddp_averages_as_in_plain(found: Found, when: str) -> None:
    assert_all(found(when))


@case("Distributed", "DDP with a shared block, an idle one and accumulation without syncing", "exact",
      threads="pytorch#108556")  # fmt: skip
def test_ddp_with_accumulation(found: Found) -> None:
    assert_all(found("shared_block_and_accumulation"))


@case("Distributed", "ranks choose different plans and hang", "exact", threads="pytorch#152264")
def test_other_plans_on_each_rank(found: Found) -> None:
    ranks = found("other_plans_on_each_rank")
    assert_all(ranks)
    assert ranks[0]["dropped"] != ranks[1]["dropped"]


@case("Distributed", "one rank plans and the others wait for it", "exact")
def test_a_plan_on_one_rank(found: Found) -> None:
    ranks = found("fitted_on_one_rank")
    assert [rank["equal"] for rank in ranks] == [True, True]
    assert [bool(rank["replayed"]) for rank in ranks] == [True, False]


@case("Distributed", "a planned model is sharded (FSDP)", "exact",
      threads="pytorch#82203, accelerate#3897, DeepSpeed#8148")  # fmt: skip
def test_fsdp(found: Found) -> None:
    assert_all(found("fitted_before_sharding"))


@pytest.mark.parametrize(
    ("when", "said"), [("wrapped", "fit the module inside"), ("already_sharded", "call fit before fully_shard")]
)
@case("Distributed", "processes wait for each other while they measure", "refused")
def test_measuring_waits_for_nobody(found: Found, when: str, said: str) -> None:
    for rank in found(when):
        assert said in rank["said"] and rank["trained"]
