"""The integrations with the real libraries: bit-equal to a plain run, within the budget, clear where they refuse."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import budgetopt
import budgetopt.integrations
from budgetopt import BudgetOptError, InfeasibleBudgetError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Starting from v1.9.0"),
]
QUICK = {"solver": "greedy"}
"""What is tested here is the same for every solver."""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The examples import their neighbour; trainers write where they are."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "integrations"))
    monkeypatch.chdir(tmp_path)


def require_held(found: Any) -> None:
    """Equal to the plain run, within a budget that the plain run breaks."""
    assert found.same
    assert found.planned.peak <= found.budget < found.plain.peak
    assert len(set(found.plain.losses)) > 1


@pytest.mark.parametrize("name", ["accelerate_loop", "amp", "accumulation", "ema"])
def test_loops(name: str) -> None:
    require_held(importlib.import_module(name).main(**QUICK))


def test_lora() -> None:
    """Only adapters train; what is saved, loaded and merged afterwards is that of the plain run."""
    found = importlib.import_module("lora").main(**QUICK)
    require_held(found)
    assert found.planned.losses[-1] == pytest.approx(found.planned.losses[-2], rel=1e-4)
    assert any("lora_A" in name for name in found.planned.weights)


def require_held_and_reused(
    example: Any, plan: Path, options: dict[str, Any], settings: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """And a second run takes the plan from the file, which stays as it is."""
    found = example.main(options=options, **settings)
    require_held(found)
    made = plan.read_bytes()
    capfd.readouterr()
    again = example.train(found.budget, options, **settings)
    assert again.losses == found.plain.losses and again.peak <= found.budget
    assert plan.read_bytes() == made
    assert "saved plan" in capfd.readouterr().err


# -- transformers' Trainer ---------------------------------------------------------------------------


def test_trainer_with_autocast_smoothing_and_accumulation(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    example, plan = importlib.import_module("trainer"), tmp_path / "plan.json"
    settings = {"bf16": True, "label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "max_steps": 2}
    options = QUICK | {"plan": plan}
    require_held_and_reused(example, plan, options, settings, capfd)


def test_trainer_with_a_loss_of_its_own() -> None:
    example = importlib.import_module("trainer")

    class Squared(example.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            labels = inputs.pop("labels")
            found: torch.Tensor = model(**inputs).logits.square().mean() + labels.float().mean()
            return found

    require_held(example.main(options=QUICK, kind=Squared, max_steps=2))


def trainer_with(tmp_path: Path, **settings: Any) -> Any:
    """A Trainer that has not begun."""
    example = importlib.import_module("trainer")
    settings |= {"report_to": "none", "use_cpu": True, "max_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
    arguments = example.TrainingArguments(str(tmp_path), **settings)
    return example.Trainer(example.tiny_gpt2(), arguments, train_dataset=example.examples(8))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True.*leave it"),
        ({"torch_compile": True}, "comp"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_trainers_that_are_refused(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    trainer = trainer_with(tmp_path, **settings)
    with pytest.raises(BudgetOptError, match=says):
        budgetopt.integrations.fit_trainer(trainer, "1GB")
    assert "get_batch_samples" not in vars(trainer)


def test_what_a_trainer_is_told(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path)
    with pytest.raises(BudgetOptError, match=r"takes no step=.*allow"):
        budgetopt.integrations.fit_trainer(trainer, "1GB", step=print)
    with pytest.raises(BudgetOptError, match=r"trainer=Linear.*before its train"):
        budgetopt.integrations.fit_trainer(torch.nn.Linear(1, 1), "1GB")
    assert budgetopt.integrations.fit_trainer(trainer, 300_000, optimizer="sgd", **QUICK) is trainer
    with pytest.raises(InfeasibleBudgetError):
        trainer.train()
    assert budgetopt.plan_of(trainer.model) is None
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert "backward" not in vars(trainer.accelerator)


# -- Lightning ---------------------------------------------------------------------------------------


def test_lightning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    example, plan = importlib.import_module("lightning_module"), tmp_path / "plan.json"
    options, settings = QUICK | {"plan": plan}, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    require_held_and_reused(example, plan, options, settings, capfd)


def test_lightning_modules_that_are_refused() -> None:
    example = importlib.import_module("lightning_module")

    class Manual(example.Language):  # type: ignore[misc, name-defined]
        automatic_optimization = False

    with pytest.raises(BudgetOptError, match="takes no replan="):
        example.BudgetCallback("1GB", replan=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"} | {
        "max_epochs": 1
    }
    trainer = example.pl.Trainer(callbacks=[example.BudgetCallback("1GB")], enable_model_summary=False, **quiet)
    with pytest.raises(BudgetOptError, match=r"manual optimization: call budgetopt.fit"):
        trainer.fit(Manual(), torch.utils.data.DataLoader(example.batches(1), batch_size=None))


# -- both --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "library"),
    [("fit_trainer", "_trainer", "transformers"), ("BudgetCallback", "_lightning", "lightning")],
)
def test_a_library_that_is_missing(name: str, module: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"budgetopt.integrations.{module}", raising=False)
    for loaded in [other for other in sys.modules if other.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [_Without(library), *sys.meta_path])
    with pytest.raises(BudgetOptError, match=f"needs {library}.*pip install {library}"):
        getattr(budgetopt.integrations, name)


class _Without:
    """An import system without one library."""

    def __init__(self, library: str) -> None:
        self.library = library

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == self.library:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.library)


def test_a_wrapped_optimizer_is_that_inside() -> None:
    """accelerate's wrapper has another constructor: its state must still be known before the first step."""
    model = torch.nn.Linear(64, 64)
    inside = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = importlib.import_module("accelerate.optimizer").AcceleratedOptimizer
    importlib.import_module("accelerate").Accelerator(cpu=True)
    found = budgetopt.profile(model, torch.randn(4, 64), optimizer=wrapped(inside))
    assert found.fixed.optimizer == sum(p.numel() * p.element_size() for p in model.parameters())
