"""The main job on real input: a small GPT trained plain and under two memory budgets, side by side.

Every figure that is shown is measured in this run. The models take their steps in turn, with the same
batches and seeds, so that the losses can be compared bit for bit and the step times fairly.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import budgetopt
from budgetopt._report import text_of
from budgetopt._units import show_bytes, show_ns

LAYERS, WIDTH, HEADS, CONTEXT, BATCH, VOCABULARY = 4, 256, 4, 128, 16, 256
SHARES = (0.7, 0.4)
"""Budgets, as shares of the activation bytes: resident + share · (plain peak - resident)."""
WARM_UP = 2

Batch = dict[str, Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        y: Tensor = self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x)))))
        return x + y


class GPT(nn.Module):
    """A GPT on bytes; ``forward(tokens, targets)`` of (batch, context) returns ``{"loss": scalar}``."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Batch:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), targets.flatten())}


@dataclass
class Run:
    """One model in the race."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    budget: int | None = None
    fit_ns: int = 0
    stages: list[str] = field(default_factory=list)
    """What ``fit`` did, as it told its ``progress``."""
    losses: list[Tensor] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def median_ns(self) -> int:
        """Median step, the first ones aside if there are enough."""
        return round(statistics.median(self.step_ns[WARM_UP:] or self.step_ns))


def demo(steps: int = 20, plan_dir: Path | None = None) -> str:
    """Train and compare; returns what was found as text, see the module. What is being done goes to stderr.

    Args:
        steps: training steps of each model.
        plan_dir: where the plans go; None makes a new folder under the system's temporary one.

    Raises:
        BudgetOptError: what ``budgetopt.fit`` raises.
    """
    folder = plan_dir or Path(tempfile.mkdtemp(prefix="budgetopt-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    err = Console(stderr=True)

    text = python_documentation()
    err.print(f"A GPT of {LAYERS} × {WIDTH} on {show_bytes(len(text))} of Python's documentation, {steps} steps.")
    start = new_model()
    whole = measure(new_run("plain", start), text)
    runs = [new_run("plain", start)]
    for share in SHARES:
        budget = whole.resident_bytes + round(share * (whole.peak_bytes - whole.resident_bytes))
        runs.append(planned_run(f"at {share:.0%}", start, budget, batch(text, 0), folder, err))
    train(runs, text, steps, err)
    for run in runs:
        run.peak_bytes = measure(run, text).peak_bytes

    again = fit_again(start, runs[-1], text, folder, err)
    return f"{text_of(table(runs))}Plans saved in {folder}\n{again}"


def python_documentation() -> Tensor:
    """The text behind ``help()``, as bytes in one tensor."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def batch(text: Tensor, step: int) -> Batch:
    """The batch of a step: excerpts from places that depend on the step alone."""
    places = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([text[place : place + CONTEXT + 1] for place in places.tolist()]).long()
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def new_model() -> nn.Module:
    """The model with its first weights, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT().train()


def new_run(name: str, start: nn.Module) -> Run:
    """A copy of the model and AdamW for it."""
    model = copy.deepcopy(start)
    return Run(name, model, torch.optim.AdamW(model.parameters(), lr=3e-4))


def planned_run(name: str, start: nn.Module, budget: int, sample: Batch, folder: Path, err: Console) -> Run:
    """A copy of the model that fits the budget, its plan saved."""
    run = new_run(name, start)
    run.budget = budget
    fit(run, sample, folder, err)
    return run


def measure(run: Run, text: Tensor) -> budgetopt.Measurement:
    """The real peak of a whole step, the optimizer's state included, with gradients None as a step begins."""
    run.optimizer.zero_grad(set_to_none=True)
    return budgetopt.measure(run.model, batch(text, 0), optimizer=run.optimizer, steps=1)


def plan_path(folder: Path, run: Run) -> Path:
    """The file of a run's plan: named by its budget, so that another budget gets another plan."""
    return folder / f"plan-{run.budget}.json"


def fit(run: Run, sample: Batch, folder: Path, err: Console) -> None:
    """``budgetopt.fit`` on the run's model, which notes the time and the stages."""
    assert run.budget is not None
    begin = time.perf_counter_ns()
    with err.status(f"fitting to {show_bytes(run.budget)}") as status:

        def progress(stage: str) -> None:
            run.stages.append(stage)
            status.update(f"fitting to {show_bytes(run.budget or 0)}: {stage}")

        budgetopt.fit(
            run.model,
            sample,
            run.budget,
            optimizer=run.optimizer,
            allow=("keep", "recompute"),
            plan=plan_path(folder, run),
            progress=progress,
        )
    run.fit_ns = time.perf_counter_ns() - begin


def train(runs: list[Run], text: Tensor, steps: int, err: Console) -> None:
    """Every model takes each step before any takes the next."""
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        for step in progress.track(range(steps), description="training"):
            sample = batch(text, step)
            for run in runs:
                train_step(run, sample, step)


def train_step(run: Run, sample: Batch, seed: int) -> None:
    """One step of AdamW, timed; the seed sets dropout's random numbers."""
    torch.manual_seed(seed)
    begin = time.perf_counter_ns()
    run.optimizer.zero_grad(set_to_none=True)
    loss: Tensor = run.model(**sample)["loss"]
    loss.backward()  # type: ignore[no-untyped-call]
    run.optimizer.step()
    run.step_ns.append(time.perf_counter_ns() - begin)
    run.losses.append(loss.detach())


def table(runs: list[Run]) -> Table:
    """One row per model; the first is the plain one."""
    plain = runs[0]
    found = Table(
        title=f"{len(plain.losses)} steps, the models in turn, same batches and seeds",
        caption="budgets at a share of the activation bytes; peak measured in a step of its own; step: median",
        box=SIMPLE,
    )
    for name in ("model", "budget", "peak", "step", "× plain", "last loss", "losses"):
        found.add_column(name, no_wrap=True, justify="left" if name == "model" else "right")
    for run in runs:
        found.add_row(
            run.name,
            "none" if run.budget is None else show_bytes(run.budget),
            show_bytes(run.peak_bytes),
            show_ns(run.median_ns),
            f"{run.median_ns / plain.median_ns:.2f}",
            f"{run.losses[-1].item():.4f}",
            same_losses(run, plain),
        )
    return found


def same_losses(run: Run, plain: Run) -> str:
    """In words, whether every loss equals the plain model's, bit for bit."""
    if run is plain:
        return "-"
    unequal = sum(a.item() != b.item() for a, b in zip(run.losses, plain.losses, strict=True))
    return "all equal" if not unequal else f"{unequal} of {len(run.losses)} differ"


def fit_again(start: nn.Module, first: Run, text: Tensor, folder: Path, err: Console) -> str:
    """Fit a fresh copy with the saved plan, and say what that took next to the first time."""
    again = planned_run(first.name, start, first.budget or 0, batch(text, 0), folder, err)
    return (
        f"First fit to {show_bytes(again.budget or 0)}: {_took(first)}.\n"
        f"A fresh copy with the saved plan: {_took(again)}."
    )


def _took(run: Run) -> str:
    return f"{show_ns(run.fit_ns)} ({', '.join(run.stages) or 'no profiling, no solving'})"
