"""What a memory budget costs in step time, on the CPU, next to gradient checkpointing. Run by hand::

    python examples/step_time.py
    python examples/step_time.py --layers 4 --width 256 --rounds 7 --json

GPT-2 with random weights, as copies that take their steps in turn: plain, plain again (the control: its ratio
to plain is the noise, and beyond 3 % the run is void), transformers' own gradient checkpointing, and
budgetopt at shares of the activation bytes (budget = resident + share · (plain peak - resident)).

Memory and time are taken in two processes. Plans are made and peaks measured with the allocator as it is.
Times are taken with glibc's malloc told to keep what it has: with its defaults a step spends much of its time
in page faults, and the more a model frees and allocates again, the more of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTROL_LIMIT = 0.03
CAPTION = "forward + backward, median of {rounds} steps; share of the plain model's activation bytes"
KEEP_ALL = str(1 << 40)
QUIET_MALLOC = {"MALLOC_MMAP_THRESHOLD_": KEEP_ALL, "MALLOC_TRIM_THRESHOLD_": KEEP_ALL, "MALLOC_TOP_PAD_": str(1 << 28)}
PLAIN, CONTROL, CHECKPOINTED = "plain", "plain again", "checkpointed"


def main() -> None:
    """Measure in one child, time in another, print."""
    options = parse()
    if options.role:
        ROLES[options.role](options)
        return
    with tempfile.TemporaryDirectory() as folder:
        for role, environment in (("memory", {}), ("time", QUIET_MALLOC)):
            command = [sys.executable, __file__, *sys.argv[1:], "--role", role, "--folder", folder]
            subprocess.run(command, env=os.environ | environment, check=True)
        memory, times = (json.loads((Path(folder) / f"{role}.json").read_text()) for role in ROLES)
    found = results(options, memory, times)
    print(json.dumps(found, indent=1)) if options.json else show(found)


def parse() -> argparse.Namespace:
    """The sizes, and what the children are told."""
    parser = argparse.ArgumentParser(description="Step time of GPT-2 on the CPU under memory budgets.")
    for name, default in (("layers", 8), ("width", 512), ("vocabulary", 2000), ("batch", 8), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--dropout", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5, 0.3], help="of the activation bytes")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each model (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each before those (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--role", choices=list(ROLES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def build(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """GPT-2 in train mode and its sample, the same in both children."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(1, options.width // 64),
        vocab_size=options.vocabulary,
        n_positions=options.length,
        resid_pdrop=options.dropout,
        embd_pdrop=options.dropout,
        attn_pdrop=options.dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(options.vocabulary, (options.batch, options.length))
    return GPT2LMHeadModel(config).train(), {"input_ids": tokens, "labels": tokens.clone()}


def checkpointed(model: Any) -> Any:
    """transformers' own checkpointing: every block is kept as its input and run again."""
    if hasattr(model, "activation_checkpointing_enable"):  # its name since the other one is deprecated
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def name_of(share: float) -> str:
    """The row of a share."""
    return f"budgetopt {share:.0%}"


def memory_role(options: argparse.Namespace) -> None:
    """Measure the plain and the checkpointed peak, make a plan for every share, measure each."""
    import budgetopt

    model, sample = build(options)
    plain = budgetopt.measure(model, sample, optimizer=None, steps=1)
    other = checkpointed(copy.deepcopy(model))
    rows = {
        PLAIN: {"peak_bytes": plain.peak_bytes},
        CHECKPOINTED: {"peak_bytes": budgetopt.measure(other, sample, optimizer=None, steps=1).peak_bytes},
    }
    del other
    for share in options.shares:
        budget = plain.resident_bytes + round(share * (plain.peak_bytes - plain.resident_bytes))
        planned, path = copy.deepcopy(model), options.folder / f"{share}.json"
        begin = time.perf_counter_ns()
        budgetopt.fit(planned, sample, budget, allow=("keep", "recompute"), optimizer=None, plan=path)
        rows[name_of(share)] = {
            "budget": budget,
            "fit_ns": time.perf_counter_ns() - begin,
            "peak_bytes": budgetopt.measure(planned, sample, optimizer=None, steps=1).peak_bytes,
        }
    (options.folder / "memory.json").write_text(json.dumps({"resident_bytes": plain.resident_bytes, "rows": rows}))


def time_role(options: argparse.Namespace) -> None:
    """Steps of all models in turn, each round beginning with another one; medians and losses."""
    import budgetopt

    model, sample = build(options)
    models = {PLAIN: model, CONTROL: copy.deepcopy(model), CHECKPOINTED: checkpointed(copy.deepcopy(model))}
    for share in options.shares:
        plan = budgetopt.Plan.load(options.folder / f"{share}.json")
        models[name_of(share)] = budgetopt.apply(copy.deepcopy(model), plan)
    names = list(models)
    taken: dict[str, list[int]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for number in range(options.warm_up + options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            nanoseconds, loss = step(models[name], sample, seed=number)
            losses[name].append(loss)
            if number >= options.warm_up:
                taken[name].append(nanoseconds)
    found = {name: {"step_ns": taken[name], "losses_equal": losses[name] == losses[PLAIN]} for name in names}
    (options.folder / "time.json").write_text(json.dumps(found))


ROLES = {"memory": memory_role, "time": time_role}


def step(model: Any, sample: dict[str, Any], seed: int) -> tuple[int, float]:
    """Forward and backward from gradients that are None; nanoseconds and the loss."""
    import torch

    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    begin = time.perf_counter_ns()
    loss = model(**sample).loss
    loss.backward()
    return time.perf_counter_ns() - begin, loss.item()


def results(options: argparse.Namespace, memory: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
    """Everything measured, joined; bytes and nanoseconds."""
    plain = statistics.median(times[PLAIN]["step_ns"])
    resident = memory["resident_bytes"]
    activations = memory["rows"][PLAIN]["peak_bytes"] - resident
    rows = {}
    for name, timed in times.items():
        known = memory["rows"].get(name, memory["rows"][PLAIN])  # the control's memory is the plain model's
        median = statistics.median(timed["step_ns"])
        rows[name] = {
            **known,
            "share_of_activations": (known["peak_bytes"] - resident) / activations,
            "median_step_ns": round(median),
            "ratio": median / plain,
            "losses_equal": timed["losses_equal"],
        }
    noise = abs(rows[CONTROL]["ratio"] - 1)
    sizes = {name: getattr(options, name) for name in ("layers", "width", "vocabulary", "batch", "length", "dropout")}
    return {"sizes": sizes, "rounds": options.rounds, "void": noise > CONTROL_LIMIT, "noise": noise, "rows": rows}


def show(found: dict[str, Any]) -> None:
    """The results as a table."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    sizes = found["sizes"]
    title = "GPT-2 {layers} × {width}, vocabulary {vocabulary}, batch {batch} × {length}".format(**sizes)
    table = Table(title=title, caption=CAPTION.format(rounds=found["rounds"]), box=SIMPLE)
    table.add_column("model", no_wrap=True)
    for name in ("budget MB", "peak MB", "share", "step ms", "× plain", "same losses"):
        table.add_column(name, justify="right")
    for name, row in found["rows"].items():
        table.add_row(
            name,
            f"{row['budget'] / 1e6:.1f}" if "budget" in row else "",
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['share_of_activations']:.1%}",
            f"{row['median_step_ns'] / 1e6:.1f}",
            f"{row['ratio']:.3f}",
            "yes" if row["losses_equal"] else "NO",
        )
    console = Console()
    console.print(table)
    verdict = "VOID: run again on a quiet machine" if found["void"] else "valid"
    console.print(f"control: {found['noise']:.1%} from plain (limit {CONTROL_LIMIT:.0%}): {verdict}")


if __name__ == "__main__":
    main()
