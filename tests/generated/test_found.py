"""What generated models found, each as the smallest model that shows it."""

from __future__ import annotations

import pytest

from tests.generated.check import all_plans, dropped_by_lot, pair, planned_by_lot
from tests.generated.grammar import Fn, Layer, Model, Part, Repeat, Seq

pytestmark = pytest.mark.filterwarnings("ignore")


def holds(body: Part, train: str = "plain") -> None:
    """Under every kind of plan."""
    model = Model(body=body, train=train, batch=8, length=4, width=16)
    for seed in range(4):
        assert dropped_by_lot(model, seed, True)
    assert all_plans(model, 0, 3, 0.3) in ("planned", "kept")


def test_pieces_of_one_storage_that_are_written_to_one_by_one() -> None:
    """A GRU splits its gates and writes to each: the plan's record must know, though no replay needs the split."""
    holds(Seq(Layer("gru")))


@pytest.mark.parametrize("train", ["penalty", "twice", "accumulated"])
def test_steps_that_differentiate_on_the_way(train: str) -> None:
    """The survey of what is saved where has no graph to go back through, unless one is asked for."""
    holds(Seq(Layer("mlp")), train)


def test_forwards_that_differentiate_inside() -> None:
    """The same within the model, as where forces are derivatives of an energy."""
    holds(Seq(Fn("penalised_inside"), Fn("exp")))


def test_empty_tensors_that_are_saved_before_they_are_filled() -> None:
    """The noise of a leaky ReLU with random slopes is: it can't be made again from an ``empty``."""
    holds(Seq(Fn("tanh"), Fn("rrelu"), Fn("exp")))


def test_other_operators_than_planned_around_writes_in_place() -> None:
    """A batch of one needs no copy before the linear layer: the plan's word on the third ``clone`` then meets another,
    which reads what no replay was to need and what is overwritten right after."""
    body = Seq(Repeat(Fn("silu_")), Layer("conv1d"), Layer("linear"), Fn("silu_"))
    both = pair(Model(body=body, batch=4, length=4, width=16))
    _, profile = both.profile()
    for seed in range(4):
        planned_by_lot(both.description.build(), profile, both, seed, 1)
