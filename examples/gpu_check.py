"""Does it hold on this GPU? One table: peaks predicted, measured and allowed, step times, gradients. Run::

    python examples/gpu_check.py

Models with random weights under budgets at shares of the activation bytes, with exact choices and with fp16: GPT-2,
Llama under bfloat16 autocast, a convolutional net with batch norm. A row says OK if the measured peak is within the
budget and the gradients are those of the plain model: within 1e-5 of their norm (1e-2 with fp16), as kernels on a
GPU need not give the same bits twice. Then the allocator is capped below what the plain step takes: it must die of
out-of-memory, and the planned one must train.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import budgetopt
from budgetopt._units import show_bytes

TOLERANCE = 1e-5
FP16_LIMIT = 1e-2
EXACT = ("keep", "recompute")


@dataclass
class Task:
    """A model, its sample, and how to get a loss from the two."""

    model: Any
    sample: Any
    step: Callable[[Any, Any], torch.Tensor]


def main() -> int:
    """Print the tables; the exit status is 0 if everything is OK."""
    options = parse()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    good = True
    for name in options.models:
        task = TASKS[name](options)
        good = table(name, task, options) and good
        if name == options.models[0]:
            good = out_of_memory(task, options) and good
        del task
    return 0 if good else 1


def parse() -> argparse.Namespace:
    """Sizes and device."""
    parser = argparse.ArgumentParser(description="Check budgetopt on a GPU.")
    for name, default in (("layers", 12), ("width", 768), ("vocabulary", 50257), ("batch", 8), ("length", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--models", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--shares", type=float, nargs="+", default=[0.7, 0.5])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for each solve; default: %(default)s")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def gpt2(options: argparse.Namespace) -> Task:
    """GPT-2, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

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
    torch.manual_seed(0)
    return Task(GPT2LMHeadModel(config).to(options.device).train(), tokens(options), own_loss)


def llama(options: argparse.Namespace) -> Task:
    """Llama with grouped heads of keys and values, under autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=options.layers,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.length,
        use_cache=False,
    )

    def step(model: Any, sample: Any) -> torch.Tensor:
        with torch.autocast(options.device, torch.bfloat16):
            return own_loss(model, sample)

    torch.manual_seed(0)
    return Task(LlamaForCausalLM(config).to(options.device).train(), tokens(options), step)


class Block(nn.Module):
    """Two convolutions with batch norm, the input added, all but the convolutions in place where they can be."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, of the input's shape."""
        y = nn.functional.relu_(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(y))
        y += x
        return nn.functional.relu_(y)


def convolutions(options: argparse.Namespace) -> Task:
    """Residual blocks with batch norm."""
    channels = max(8, options.width // 12)
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, channels, 3, padding=1), *(Block(channels) for _ in range(options.layers))]
    model = nn.Sequential(*layers).to(options.device).train()
    sample = torch.randn(options.batch, 3, 64, 64, device=options.device)
    return Task(model, sample, lambda model, x: model(x).square().mean())


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {"gpt2": gpt2, "llama": llama, "convolutions": convolutions}


def tokens(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A batch of random text."""
    found = torch.randint(options.vocabulary, (options.batch, options.length), device=options.device)
    return {"input_ids": found, "labels": found.clone()}


def own_loss(model: Any, sample: Any) -> torch.Tensor:
    """The loss that the model computes itself."""
    loss: torch.Tensor = model(**sample).loss
    return loss


def table(name: str, task: Task, options: argparse.Namespace) -> bool:
    """Print a row per share and choices; whether all are OK."""
    plain = budgetopt.measure(task.model, task.sample, step=task.step, steps=3)
    reference = gradients(task.model, task)
    plain_ns = step_ns(task.model, task, options)
    shown = Table(
        title=f"{name}: plain {show_bytes(plain.peak_bytes)}, reserved {show_bytes(plain.reserved_bytes)}, context "
        f"{show_bytes(plain.context_bytes)}, {plain_ns / 1e6:.1f} ms a step"
    )
    for column in ("share", "choices", "allowed", "predicted", "measured", "reserved", "× plain", "gradients", ""):
        shown.add_column(column, justify="right")
    good = True
    for share in options.shares:
        for allow in (EXACT, (*EXACT, "fp16")):
            budget = plain.resident_bytes + round(share * (plain.peak_bytes - plain.resident_bytes))
            row, ok = check(task, budget, allow, reference, plain_ns, options)
            shown.add_row(f"{share:.0%}", allow[-1], show_bytes(budget), *row)
            good = good and ok
    Console().print(shown)
    return good


def check(
    task: Task, budget: int, allow: tuple[str, ...], reference: list[Any], plain_ns: float, options: argparse.Namespace
) -> tuple[list[str], bool]:
    """The rest of one row and whether it is OK."""
    planned = copy.deepcopy(task.model)
    how: dict[str, Any] = {"step": task.step, "optimizer": None, "time_limit": options.time_limit}
    try:
        budgetopt.fit(planned, task.sample, budget, allow=allow, **how)
    except budgetopt.BudgetOptError as error:
        return ["", "", "", "", "", type(error).__name__], isinstance(error, budgetopt.InfeasibleBudgetError)
    plan = budgetopt.plan_of(planned)
    assert plan is not None
    found = budgetopt.measure(planned, task.sample, step=task.step, steps=3)
    error = distance(gradients(planned, task), reference)
    ok = found.peak_bytes <= budget and error <= (FP16_LIMIT if "fp16" in allow else TOLERANCE)
    ratio = step_ns(planned, task, options) / plain_ns
    sizes = (plan.predicted.peak_bytes, found.peak_bytes, found.reserved_bytes)
    return [*map(show_bytes, sizes), f"{ratio:.2f}", f"{error:.1e}", "OK" if ok else "NO"], ok


def out_of_memory(task: Task, options: argparse.Namespace) -> bool:
    """Under the same cap of the allocator the plain step dies and the planned one trains."""
    if options.device != "cuda":
        print("out of memory: not checked, only CUDA's allocator can be capped")
        return True
    plain = budgetopt.measure(task.model, task.sample, step=task.step)
    budget = plain.resident_bytes + (plain.peak_bytes - plain.resident_bytes) * 6 // 10
    planned = budgetopt.fit(copy.deepcopy(task.model), task.sample, budget, step=task.step, optimizer=None)
    task.model.to("cpu")  # one model at a time, as in training
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.mem_get_info()[1])
    trains = not dies(planned, task)
    del planned
    task.model.to(options.device)
    torch.cuda.empty_cache()
    died = dies(task.model, task)
    torch.cuda.set_per_process_memory_fraction(1.0)
    verdict = "OK" if trains and died else "NO"
    print(f"cap {show_bytes(budget)}: plain {'dies' if died else 'trains'}, planned {'trains' if trains else 'dies'}")
    print(verdict)
    return verdict == "OK"


def dies(model: Any, task: Task) -> bool:
    """Whether a step runs out of memory."""
    try:
        gradients(model, task)
    except torch.OutOfMemoryError:
        model.zero_grad(set_to_none=True)
        return True
    return False


def gradients(model: Any, task: Task) -> list[torch.Tensor]:
    """Of one step, on the host."""
    model.zero_grad(set_to_none=True)
    task.step(model, task.sample).backward()
    found = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def distance(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Norm of the difference over the norm of the reference, over all parameters together."""
    off = sum(float((f.double() - r.double()).square().sum()) for f, r in zip(found, reference, strict=True))
    norm = sum(float(r.double().square().sum()) for r in reference)
    return float((off / norm) ** 0.5)


def step_ns(model: Any, task: Task, options: argparse.Namespace) -> float:
    """Median time of forward and backward, in nanoseconds."""
    times = []
    for _ in range(options.rounds + 2):
        model.zero_grad(set_to_none=True)
        if options.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        task.step(model, task.sample).backward()
        if options.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter_ns() - start)
    model.zero_grad(set_to_none=True)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
