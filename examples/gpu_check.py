"""Does it hold on this GPU? One table: peaks predicted, measured and allowed, step times, gradients. Run::

    python examples/gpu_check.py

GPT-2 with random weights under budgets at shares of the activation bytes, exact choices and fp16. A row says
OK if the measured peak is within the budget and the gradients are those of the plain model: within 1e-5 of
their norm, as kernels on a GPU need not give the same bits twice.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import budgetopt
from budgetopt._units import show_bytes

TOLERANCE = 1e-5
FP16_LIMIT = 1e-2


def main() -> int:
    """Print the table; the exit status is 0 if every row is OK."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    model, sample = build(options)
    plain = budgetopt.measure(model, sample, steps=3)
    reference = gradients(model, sample)
    plain_ns = step_ns(model, sample, options.rounds)
    table = Table(title=f"plain: {show_bytes(plain.peak_bytes)}, {plain_ns / 1e6:.1f} ms a step")
    for name in ("share", "choices", "allowed", "predicted", "measured", "reserved", "× plain", "gradients", ""):
        table.add_column(name, justify="right")
    good = True
    for share in options.shares:
        for allow in (("keep", "recompute"), ("keep", "recompute", "fp16")):
            row, ok = check(model, sample, plain, reference, plain_ns, share, allow, options.rounds)
            table.add_row(*row)
            good = good and ok
    Console().print(table)
    return 0 if good else 1


def parse() -> argparse.Namespace:
    """Sizes and device."""
    parser = argparse.ArgumentParser(description="Check budgetopt on a GPU.")
    for name, default in (("layers", 12), ("width", 768), ("vocabulary", 50257), ("batch", 8), ("length", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5, 0.35])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def build(options: argparse.Namespace) -> tuple[Any, dict[str, torch.Tensor]]:
    """GPT-2 in train mode, without dropout, and a batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=options.layers,
        n_embd=options.width,
        n_head=max(1, options.width // 64),
        vocab_size=options.vocabulary,
        n_positions=options.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    return GPT2LMHeadModel(config).to(options.device).train(), {"input_ids": tokens, "labels": tokens.clone()}


def check(
    model: Any,
    sample: dict[str, torch.Tensor],
    plain: budgetopt.Measurement,
    reference: list[torch.Tensor],
    plain_ns: float,
    share: float,
    allow: tuple[str, ...],
    rounds: int,
) -> tuple[list[str], bool]:
    """One row and whether it is OK."""
    budget = plain.resident_bytes + round(share * (plain.peak_bytes - plain.resident_bytes))
    planned = copy.deepcopy(model)
    try:
        budgetopt.fit(planned, sample, budget, allow=allow, optimizer=None)
    except budgetopt.BudgetOptError as error:
        return [f"{share:.0%}", allow[-1], show_bytes(budget), "", "", "", "", "", type(error).__name__], isinstance(
            error, budgetopt.InfeasibleBudgetError
        )
    plan = budgetopt.plan_of(planned)
    assert plan is not None
    found = budgetopt.measure(planned, sample, steps=3)
    error = distance(gradients(planned, sample), reference)
    ok = found.peak_bytes <= budget and error <= (FP16_LIMIT if "fp16" in allow else TOLERANCE)
    ratio = step_ns(planned, sample, rounds) / plain_ns
    sizes = (budget, plan.predicted.peak_bytes, found.peak_bytes, found.reserved_bytes)
    shown = [f"{share:.0%}", allow[-1], *map(show_bytes, sizes), f"{ratio:.2f}", f"{error:.1e}", "OK" if ok else "NO"]
    return shown, ok


def gradients(model: Any, sample: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of one step, on the host."""
    model.zero_grad(set_to_none=True)
    model(**sample).loss.backward()
    found = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def distance(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of the reference, over all parameters together."""
    off = sum(float((f.double() - r.double()).square().sum()) for f, r in zip(found, reference, strict=True))
    norm = sum(float(r.double().square().sum()) for r in reference)
    return float((off / norm) ** 0.5)


def step_ns(model: Any, sample: dict[str, torch.Tensor], rounds: int) -> float:
    """Median time of forward and backward, in nanoseconds."""
    times = []
    for _ in range(rounds + 2):
        model.zero_grad(set_to_none=True)
        if sample["input_ids"].is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        model(**sample).loss.backward()
        if sample["input_ids"].is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    model.zero_grad(set_to_none=True)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
