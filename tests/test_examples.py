"""The examples run, at sizes for CI; what they print is looked at, never how fast it was."""

from __future__ import annotations

import json
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


def test_benchmark(tmp_path: Path) -> None:
    """One model and one peer: ours at the peak that was measured of it, gradients bit for bit."""
    output, plot = tmp_path / "found.json", tmp_path / "found.png"
    options = f"--size small --models llama --ways checkpoint --every --shares --rounds 2 -o {output} --plot {plot}"
    command = [sys.executable, "-m", "examples.benchmark", *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode in (0, 1), done.stderr  # 1: the control was off, as it is on a busy machine
    assert "checkpoint every block" in done.stdout
    model = json.loads(output.read_text())["models"]["llama"]
    assert not model["failed"]
    peer, ours = (model[kind]["checkpoint every block"] for kind in ("peers", "matched"))
    assert ours["peak_bytes"] <= peer["peak_bytes"] < model["plain"]["peak_bytes"]
    assert peer["gradient_error"] == ours["gradient_error"] == ours["loss_error"] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
