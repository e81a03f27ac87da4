"""The script for GPUs runs, at a size for CI; what it prints is looked at, never how fast it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_gpu_check_on_the_cpu() -> None:
    """The script itself, where there is no GPU; on one it is run as it is."""
    sizes = "--layers 3 --width 64 --vocabulary 128 --batch 4 --length 32 --rounds 1 --shares 0.8"
    command = [sys.executable, str(EXAMPLES / "gpu_check.py"), *f"--device cpu --time-limit 1 {sizes}".split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK") == 6  # three models, exact and fp16
