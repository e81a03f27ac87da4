"""budgetopt beside what people use instead, at the same measured peaks. Run by hand, with nothing else running::

    python -m examples.benchmark -o benchmark.json --plot benchmark.png
    python -m examples.benchmark --models gpt2 --rounds 9

For each model a child process per way: plain, plain again (the control: its ratio to plain is the noise, and beyond
3 % the run is void), gradient checkpointing of every block and of one in n, torch's selective policies, torch.compile
with ``activation_memory_budget``; then budgetopt at shares of the activation bytes (resident + share · (plain peak -
resident)), and given the measured peak of each of the others as its budget. Some of these processes at a time (see
--at-once), always with a plain one and its control, take their steps in turn (forward + backward from gradients that
are None); a ratio is of two steps of one round. Peaks are the allocator's own, of the same meter for all, and none is
taken from budgetopt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.benchmark.bench import Comparison
from examples.benchmark.models import MODELS
from examples.benchmark.table import CONTROL_LIMIT, show
from examples.benchmark.ways import peers


def main(arguments: list[str] | None = None) -> int:
    """Run, write, print; the exit status is 1 where a control is off by more than 3 %."""
    options = parse(arguments)
    console = Console(stderr=True)
    found = {"settings": settings(options), "models": {}}
    ways = [
        way
        for way in peers(options.backend, options.memory_budgets, options.every)
        if way.name.startswith(options.ways)
    ]
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, console.status("") as status:
            comparison = Comparison(name, options.size, options.device, Path(folder), status.update, options.at_once)
            found["models"][name] = comparison.run(ways, options.shares, options.warm_up, options.rounds)
        if options.output:
            options.output.write_text(json.dumps(found, indent=1))
        show(name, found["models"][name])
    if options.plot:
        from examples.benchmark.plot import draw

        draw(found, options.plot)
    return int(any(model["noise"] > CONTROL_LIMIT for model in found["models"].values()))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """What to compare, and how long."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmark", description="budgetopt beside its peers.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--size", choices=("large", "medium", "small"), default="medium", help="default: %(default)s")
    parser.add_argument("--ways", default="", metavar="START", help="only those whose names begin so (default: all)")
    parser.add_argument("--rounds", type=int, default=25, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=3, help="peers, and ours beside them (default: %(default)s)")
    parser.add_argument("--every", type=int, nargs="*", default=[2], help="checkpoint one block in n (default: 2)")
    parser.add_argument("--memory-budgets", type=float, nargs="*", default=[0.5], help="torch.compile's (default: 0.5)")
    parser.add_argument(
        "--shares", type=float, nargs="*", default=[], help="ours, of the activation bytes (default: none)"
    )
    parser.add_argument("--backend", default="inductor", help="torch.compile's (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write everything measured as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw step time against peak: .png, .svg or .pdf")
    return parser.parse_args(arguments)


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader has to know to run it again."""
    return {
        "command": " ".join(["python -m examples.benchmark", *sys.argv[1:]]),
        "size": options.size,
        "rounds": options.rounds,
        "device": options.device,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "budgetopt")},
    }


if __name__ == "__main__":
    sys.exit(main())
