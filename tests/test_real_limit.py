"""A limit that is enforced, not measured: the plain step dies of memory, the planned one trains.

Child processes let malloc map everything large by itself and give it back at free, so that the kernel's count of
private writable mappings (``VmData``) follows the tensors in use. One fits GPT-2, with AdamW, to a share of the
activation bytes and saves the plan. Another takes the plan (measuring and solving leave holes in the heap, which
tensors would fill without being counted) and one optimizer step, after which moments and libraries' buffers are
there; what is mapped then is the warm state. The limit (``RLIMIT_DATA``) is the warm state + the activation bytes of
the budget + 4 MiB for page ends and small blocks: what the plan promised, and nothing of what the plain step would
need beyond it.

That the limit is an honest one is tested as well, from both sides: with an eighth fewer activation bytes the planned
step dies, and the plain one dies with an eighth fewer than the outside meter says it takes, but lives with all of
them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limited import QUIET

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux alone")
ROOT = Path(__file__).parents[1]


def child(*arguments: Any) -> Any:
    """What :mod:`tests.limited` prints."""
    command = [sys.executable, "-m", "tests.limited", *(a if isinstance(a, str) else json.dumps(a) for a in arguments)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("gpt2", "share", "steps"),
    [
        pytest.param([3, 256, 1000, 8, 96], 0.5, 4, marks=pytest.mark.slow),
        pytest.param([8, 512, 2000, 8, 256], 0.5, 6, marks=pytest.mark.slow),
        pytest.param([8, 512, 2000, 8, 256], 0.35, 6, marks=pytest.mark.slow),
    ],
)
def test_plain_dies_and_planned_trains(gpt2: list[int], share: float, steps: int, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    fitted = child("fit", gpt2, share, plan)
    found = child("planned", gpt2, fitted, plan, steps)
    print(f"\n{fitted}\n{found}")
    assert len(set(found["losses"])) == steps
    assert found["losses"] == child("plain", gpt2, steps)["losses"]
    assert found["planned"] == ""
    for dead in ("plain", "planned, an eighth less", "plain, an eighth less than it takes"):
        assert "can't allocate memory" in found[dead], dead
    assert found["plain, with what it takes"] == ""
