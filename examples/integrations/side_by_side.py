"""What the examples share: a tiny GPT-2 with random weights, a meter of real steps, and the table of plain and planned.

Nothing here is needed to use budgetopt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from rich import print
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH, VOCABULARY = 8, 64, 256


def tiny_gpt2() -> GPT2LMHeadModel:
    """The same random weights every time; dropout is on, so random numbers have to come out the same as well."""
    torch.manual_seed(0)
    sizes: dict[str, int] = {"n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": LENGTH}
    config = GPT2Config(**sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).train()


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    """So many random texts, each its own target."""
    texts = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in texts]


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """So many batches of such texts."""
    return [
        {name: torch.stack([text[name] for text in texts]) for name in texts[0]}
        for texts in (examples(count * BATCH)[i * BATCH : (i + 1) * BATCH] for i in range(count))
    ]


class Meter:
    """Peak bytes of real steps on the CPU, as torch's profiler sees the allocator; it knows nothing of budgetopt."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.resident = self.peak = 0
        self._model = model
        self._profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Meter:
        """Call it when the model is there, and neither gradients nor the optimizer's state."""
        parts = [part.untyped_storage() for part in (*self._model.parameters(), *self._model.buffers())]
        self.resident = sum({part.data_ptr(): part.nbytes() for part in parts}.values())
        self._profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._profiler.stop()
        events = [e for e in self._profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        self.peak = self.resident + max(accumulate((event.nbytes() for event in events), initial=0))


@dataclass
class Run:
    """What some training steps came to. Bytes."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    peak: int
    resident: int

    @classmethod
    def of(cls, model: torch.nn.Module, losses: Iterable[Any], meter: Meter) -> Run:
        """Of a model that has been trained."""
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return cls([float(loss) for loss in losses], weights, meter.peak, meter.resident)


@dataclass
class Comparison:
    """A plain run and one under a budget, from the same seeds."""

    plain: Run
    budget: int
    planned: Run

    @property
    def same(self) -> bool:
        """Whether losses and all trained weights are equal, bit for bit."""
        weights = self.plain.weights.keys() == self.planned.weights.keys() and all(
            torch.equal(value, self.planned.weights[name]) for name, value in self.plain.weights.items()
        )
        return weights and self.plain.losses == self.planned.losses


def compare(title: str, train: Callable[[int | None], Run], share: float = 0.6) -> Comparison:
    """Train plain, then under the bytes that are there anyway and a share of what plain training takes above them."""
    plain = train(None)
    budget = plain.resident + round(share * (plain.peak - plain.resident))
    found = Comparison(plain, budget, train(budget))
    table = Table("plain peak", "budget", "measured peak", "losses and weights", title=title)
    sizes = (f"{size / 1e6:.2f} MB" for size in (plain.peak, budget, found.planned.peak))
    table.add_row(*sizes, "equal, bit for bit" if found.same else "DIFFER")
    print(table)
    return found
