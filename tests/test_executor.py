"""The executor's promises beside equal gradients: the in-place check, calls that are not the planned ones, fp16."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import budgetopt
from budgetopt._apply import Region, installed
from tests.forced import Around, by_lot, drop, failures, force, halve, keep
from tests.models import conv_stack, dropout_stack, fresh_batch, mlp_stack
from tests.oracle import assert_same, run_steps

MODIFIED = "modified by an inplace operation"
CHOICES = [drop, keep, halve]


# -- the in-place check --------------------------------------------------------------------------


def write_inside(h: Tensor) -> Tensor:
    y = h.exp()
    z = y.sin()
    y.add_(1)
    return z


def write_inside_and_forget(h: Tensor) -> Tensor:
    y = h.exp()
    z = y * 2
    y.zero_()
    del y
    return z


def write_to_an_older_version(h: Tensor) -> Tensor:
    y = h * 1
    y.exp_()
    z = y.sin()
    y[0].mul_(2)
    return z


def write_through_a_view(h: Tensor) -> Tensor:
    y = h.tanh()
    y.t()[1:3].fill_(0)
    return y * 2


WRITES = (write_inside, write_inside_and_forget, write_to_an_older_version, write_through_a_view)


@pytest.mark.parametrize("choose", [None, *CHOICES])
@pytest.mark.parametrize("body", WRITES)
def test_a_write_after_saving_raises(body: Callable[[Tensor], Tensor], choose: Any) -> None:
    model = Around(body)
    if choose is not None:
        force(model, choose)
    loss = model(torch.randn(4, 6)).sum()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


def write_through_a_detached_alias(h: Tensor) -> Tensor:
    y = h.sigmoid()
    y.detach().add_(1)
    return y * 2


@pytest.mark.parametrize("choose", [None, *CHOICES])
def test_a_write_through_a_detached_alias_raises(choose: Any) -> None:
    test_a_write_after_saving_raises(write_through_a_detached_alias, choose)


RETURNED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a saved input": lambda h: ((y := h * 1), y.sin()),
    "a saved output": lambda h: ((y := h.exp()), y * 2),
    "a view of a saved input": lambda h: ((y := h * 1).t(), y.sin()),
    "what a saved view looks at": lambda h: ((y := h * 1), y.t().sin()),
    "another part of it": lambda h: ((y := h * 1)[:2], y[2:].sin()),
    "a view of a saved output": lambda h: ((y := h.exp()).t(), y * 2),
    "a saved output written in place": lambda h: ((y := (h * 1).exp_()), y * 2),
}


@pytest.mark.parametrize("choose", [None, *CHOICES])
@pytest.mark.parametrize("body", RETURNED.values(), ids=RETURNED)
def test_a_write_to_what_the_region_returned_raises(body: Callable[[Tensor], Any], choose: Any) -> None:
    model = Around(body)
    if choose is not None:
        force(model, choose)
    returned, out = model(torch.randn(4, 6))
    loss = out.sum()
    del out
    with torch.no_grad():
        returned.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@pytest.mark.parametrize("choose", CHOICES)
def test_a_write_to_a_detached_alias_of_what_was_saved(choose: Any) -> None:
    """Plain training raises. What was dropped is made again as it was when it was saved: right as well."""
    model = Around(lambda h: ((y := h.exp()).detach(), y * 2))
    force(model, choose)
    x = torch.randn(4, 6)
    returned, out = model(x)
    loss = out.sum()
    del out
    returned.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        assert MODIFIED in str(error)
    else:
        assert choose is not keep
        exact = Around(lambda h: h.exp() * 2)
        exact(x).sum().backward()
        assert model.weight.grad is not None and exact.weight.grad is not None
        assert torch.allclose(model.weight.grad, exact.weight.grad, rtol=1e-2)


@pytest.mark.parametrize("choose", [None, *CHOICES])
@pytest.mark.parametrize("what", ["weight", "input"])
def test_a_write_to_an_outside_tensor_raises(what: str, choose: Any) -> None:
    model, x = Around(torch.exp), torch.randn(4, 6).requires_grad_(what == "weight")
    if choose is not None:
        force(model, choose)
    loss = model(x).sum()
    with torch.no_grad():
        (model.weight if what == "weight" else x).add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()


@pytest.mark.parametrize("choose", [drop, keep])
def test_writes_that_plain_allows(choose: Any) -> None:
    """The multiplication by 2 saves nothing, so its result may change after the region has ended."""

    def body(h: Tensor) -> tuple[Tensor, Tensor]:
        y = h * 2
        return y, y.exp()

    found = []
    for planned in (False, True):
        model = Around(body)
        if planned:
            force(model, choose)
        first, second = model(torch.ones(4, 6))
        first.add_(1)
        second = second * 2
        (first.sum() + second.sum()).backward()
        found.append(model.weight.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.equal(found[0], found[1])


class Shifted(nn.Module):
    """exp(x + bias): plain autograd saves the result alone, a replay reads x and the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias).exp()


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("what", ["bias", "input"])
def test_a_write_to_what_only_a_replay_reads_is_never_silent(what: str, snapshot: bool) -> None:
    """Plain training is right here. So is a replay from a snapshot; without one it says so instead of being wrong."""
    model, x = Shifted(), torch.ones(4, 6)
    force(model, drop, snapshot=snapshot)
    loss = model(x).sum()
    with torch.no_grad():
        (model.bias if what == "bias" else x).add_(1)
    if snapshot and what == "input":
        loss.backward()
        assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.ones(4, 6).exp().sum(0))
    else:
        with pytest.raises(RuntimeError, match=MODIFIED):
            loss.backward()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
]


@pytest.mark.parametrize("choose", [drop, keep, by_lot(0), by_lot(1)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("build", [mlp_stack, conv_stack, Shifted])
def test_an_optimizer_step_before_backward_is_never_silent(build: Any, optimizer: Any, choose: Any) -> None:
    torch.manual_seed(0)
    model, x = (Shifted(), torch.randn(4, 6)) if build is Shifted else build(2)
    plain = copy.deepcopy(model)
    force(model, choose)
    for other in (plain, model):
        run_steps(other, [x], steps=1)
    found: list[Any] = []
    for other in (plain, model):
        loss = other(x).square().mean()
        step = optimizer(other.parameters())
        step.step()
        other.zero_grad()
        try:
            loss.backward()
        except RuntimeError as error:
            assert MODIFIED in str(error)
            found.append(None)
        else:
            found.append([p.grad for p in other.parameters()])
    if found[0] is None:
        assert found[1] is None
    elif found[1] is not None:
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- fp16 ----------------------------------------------------------------------------------------


def cubic(h: Tensor) -> Tensor:
    y = h * h
    return (y * h).relu() * y.t().contiguous().view(4, 6)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(-2, 3, shape).float()


def test_fp16_is_exact_on_small_whole_numbers() -> None:
    plain, planned, x = Around(cubic), Around(cubic), whole_numbers(4, 6)
    for model in (plain, planned):
        model.weight.data = torch.eye(6) * 2
    force(planned, halve)
    assert_same(run_steps(plain, [x], steps=1), run_steps(planned, [x], steps=1))


@pytest.mark.parametrize("build", [mlp_stack, dropout_stack, conv_stack])
def test_fp16_is_near(build: Any) -> None:
    """Rounding to 11 bits moves the gradient, by little: that it moves shows that the codec was used."""
    model, x = build()
    plain = copy.deepcopy(model)
    force(model, halve, ("0", "2"))
    loss = lambda out: out.square().mean()  # noqa: E731
    a, b = run_steps(plain, [x], steps=1, loss=loss), run_steps(model, [x], steps=1, loss=loss)
    assert torch.equal(a.losses[0], b.losses[0])
    exact = torch.cat([g.flatten() for g in a.gradients[0].values() if g is not None])
    rounded = torch.cat([g.flatten() for g in b.gradients[0].values() if g is not None])
    assert 0 < (exact - rounded).norm() < 1e-2 * exact.norm()


def test_fp16_with_several_backward_passes() -> None:
    plain, planned, x = Around(cubic), Around(cubic), whole_numbers(4, 6).requires_grad_()
    force(planned, halve)
    found = []
    for model in (plain, planned):
        model.weight.data = torch.eye(6)
        out = model(x)
        first = torch.autograd.grad(out.sum(), x, create_graph=True, retain_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
        third = torch.autograd.grad(out.sum(), model.weight, retain_graph=True)[0]
        found.append((first, second, third, torch.autograd.grad(out.sum(), x)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- tensors that are not plain ------------------------------------------------------------------


class Labelled(Tensor):
    """A subclass by ``as_subclass``."""


def sparse(h: Tensor) -> Any:
    pattern = torch.eye(4).to_sparse()
    return torch.sparse.mm(pattern * 2, h.exp()) * h


def labelled(h: Tensor) -> Tensor:
    y: Tensor = (h * 2).as_subclass(Labelled)
    z = y.exp() * y
    assert type(z) is Labelled
    return z.as_subclass(Tensor).sin()


def two_in_one(h: Tensor) -> Any:
    from torch.testing._internal.two_tensor import TwoTensor

    both: Any = TwoTensor(h * 1, h * 2)  # type: ignore[no-untyped-call]
    z = both.exp() * both.sin()
    return z.a + z.b * h.exp()


def inference(h: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = torch.full((6,), 2.0)
    return (h.exp() * scale.clone()).sin() * h


def jagged(h: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor_from_jagged(h.exp(), torch.tensor([0, 1, 4]))
    found: Tensor = (parts.sin() * parts).values()
    return found * h


def efficient_zeros(h: Tensor) -> Tensor:
    """Tensors without data, as forward-mode derivatives make them."""
    zero = torch._efficientzerotensor((4, 6))
    return (h + zero * h.exp()).exp()


def of_no_gradient(h: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.float64)
    return (h * zero).float().exp() * h.to_dense() * torch.zeros(4, 6, device="meta").size(0)


UNUSUAL = [sparse, labelled, two_in_one, inference, jagged, efficient_zeros, of_no_gradient]


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested|The PyTorch API of).*:UserWarning")
@pytest.mark.parametrize(
    ("body", "choose"),
    [(body, choose) for body in UNUSUAL for choose in (drop, keep)],
)
def test_unusual_tensors(body: Callable[[Tensor], Tensor], choose: Any) -> None:
    plain, planned, x = Around(body), Around(body), torch.randn(4, 6)
    regions = force(planned, choose, verify=True)
    loss = lambda out: out.square().mean()  # noqa: E731
    assert_same(run_steps(plain, [x], loss=loss), run_steps(planned, [x], loss=loss))
    assert failures(regions) == set()


# -- calls that are not the planned ones ---------------------------------------------------------


class Masked(nn.Module):
    """A residual block with a branch for masks in front and another behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 96), nn.Linear(96, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x.masked_fill(mask, 0.0) * 1.5
        y = self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.2, self.training))
        if mask is not None:
            y = y.tanh() * mask.logical_not()
        out: Tensor = x + y
        return out


class Stack(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(depth))
        self.fail: int | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == self.fail:
                raise KeyError("planted")
            x = block(x, mask)
        return x


def fitted(model: nn.Module, sample: Any) -> list[Region]:
    """Plan for the smallest feasible budget, exact choices only, and apply."""
    found = budgetopt.profile(model, sample, optimizer=None)
    allow = ("keep", "recompute")
    with pytest.raises(budgetopt.InfeasibleBudgetError) as caught:
        budgetopt.solve(found, found.fixed.total + 8192, allow=allow, time_limit=2)
    budgetopt.apply(model, budgetopt.solve(found, caught.value.minimum, allow=allow, time_limit=2))
    state = installed(model)
    assert state is not None
    return list(state.regions.values())


@contextmanager
def expecting_one_warning() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [w for w in caught if issubclass(w.category, budgetopt.BudgetOptWarning)]
    assert ours and len({str(w.message) for w in ours}) == len(ours)  # once per region
    assert "other operators than planned" in str(ours[0].message)


BATCH, WIDTH = 64, 32


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randn(BATCH, WIDTH)


Changed = Callable[[nn.Module, Tensor], Any]
CHANGES: dict[str, Changed] = {
    "mask": lambda model, x: (x, x > 0.5),
    "larger with mask": lambda model, x: (torch.cat([x, x, x]), torch.rand(3 * BATCH, WIDTH) > 0.5),
    "no dropout": lambda model, x: (model.eval(), x)[1],
    "three dimensions": lambda model, x: x.view(8, 8, WIDTH),
    "gradients for the input": lambda model, x: x.clone().requires_grad_(),
    "frozen": lambda model, x: (model.get_submodule("blocks.1").requires_grad_(False), x)[1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_operators_are_exact(change: Changed) -> None:
    model, x = stack()
    plain = copy.deepcopy(model)
    fitted(model, x)
    torch.manual_seed(3)
    other = change(plain, x)
    torch.manual_seed(3)
    other = change(model, x)
    loss = lambda out: out.square().mean()  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        assert_same(run_steps(plain, [other, x], loss=loss), run_steps(model, [other, x], loss=loss))


@pytest.mark.parametrize("build", [mlp_stack, dropout_stack, conv_stack])
@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.slow), 8])
def test_another_batch_size_is_exact(build: Any, rows: int) -> None:
    model, x = build()
    plain = copy.deepcopy(model)
    regions = fitted(model, x)
    other = torch.cat([x] * 2)[:rows] if rows > 1 or build is not conv_stack else x[:1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        samples = [other, x, fresh_batch(x, 1)]
        assert_same(run_steps(plain, samples), run_steps(model, samples))
    assert all(region.counters.broken == 0 for region in regions)


def test_other_operators_stay_in_memory() -> None:
    """What the plan does not speak of is made again: less is held than plain training holds."""
    model, x = stack()
    plain = copy.deepcopy(model)
    regions = fitted(model, x)
    mask = torch.rand(BATCH, WIDTH) > 0.5
    with expecting_one_warning():
        model(x, mask).sum().backward()
    assert all(region.counters.differing == region.counters.calls == 1 for region in regions)
    a = budgetopt.measure(plain, (x, mask), steps=1).peak_bytes
    b = budgetopt.measure(model, (x, mask), steps=1).peak_bytes
    resident = budgetopt.measure(plain, (x, mask), steps=1).resident_bytes
    assert b - resident < 0.8 * (a - resident)


def test_a_larger_batch_is_dropped_by_the_same_plan() -> None:
    model, x = stack()
    plain = copy.deepcopy(model)
    fitted(model, x)
    larger = torch.cat([x] * 4)
    a = budgetopt.measure(plain, larger, steps=1)
    with pytest.warns(budgetopt.BudgetOptWarning, match="larger than planned"):
        b = budgetopt.measure(model, larger, steps=1)
    assert b.peak_bytes - b.resident_bytes < 0.8 * (a.peak_bytes - a.resident_bytes)
    assert a.losses[0] == b.losses[0] or len(a.losses) == len(b.losses)


def test_the_warning_comes_once() -> None:
    model, x = stack()
    regions = fitted(model, x)
    mask = x > 0
    with expecting_one_warning():
        for _ in range(3):
            model(x, mask).sum().backward()
    model(x, mask).sum().backward()
    model(x).sum().backward()
    assert [region.counters.differing for region in regions] == [4] * len(regions)


class Twofold(nn.Module):
    """Its blocks are called twice in a step, the second time with a mask and so with other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.fail = False

    def forward(self, x: Tensor) -> Any:
        y = x
        for block in self.blocks:
            y = block(y)
        if self.fail:
            raise KeyError("planted")
        mask = y > 0
        for block in self.blocks:
            y = block(y, mask)
        return y


def test_a_step_that_stopped_between_two_calls_does_not_shift_the_plan() -> None:
    """The calls of a module are counted within a step; after one that raised, the next begins anew."""
    torch.manual_seed(0)
    model, x = Twofold(), torch.randn(BATCH, WIDTH)
    regions = fitted(model, x)
    assert [len(region.scripts) for region in regions] == [2] * len(regions)
    model(x).sum().backward()
    assert [region.counters.differing for region in regions] == [0] * len(regions)
    model.fail = True
    with pytest.raises(KeyError):
        model(x)
    model.fail = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
        for _ in range(4):
            model(x).sum().backward()
    assert sum(region.counters.differing for region in regions) <= 2


class Stopping(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.fail = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.fail:
            raise KeyError("planted")
        return y * 2


def test_a_planned_forward_that_raises_gives_no_warning() -> None:
    """It ran fewer operators than planned because it stopped, not because the call is another one."""
    torch.manual_seed(0)
    parts = [Stopping(Masked()), Stopping(Masked())]
    model, x = nn.Sequential(*parts), torch.randn(BATCH, WIDTH)
    plain = copy.deepcopy(model)
    regions = fitted(model, x)
    assert regions
    for part in parts:
        part.fail = True
    with pytest.raises(KeyError, match="planted"):
        model(x)
    for part in parts:
        part.fail = False
    assert sum(region.counters.differing for region in regions) == 0
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))


@pytest.mark.parametrize(
    ("build", "use_reentrant"),
    [(Twofold, False), (Twofold, True), (Masked, False), (Masked, True)],
)
def test_checkpoint_around_a_planned_model(build: Callable[[], nn.Module], use_reentrant: bool) -> None:
    """Checkpoint runs the forward once more: both runs have to save alike."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model, x = build(), torch.randn(BATCH, WIDTH)
    plain = copy.deepcopy(model)
    fitted(model, x)
    x.requires_grad_()
    found = []
    for other in (plain, model):
        torch.manual_seed(1)
        for _ in range(2):
            y = checkpoint(other, x, use_reentrant=use_reentrant)
            y.sin().sum().backward()
        found.append([p.grad for p in other.parameters()])
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_models_by_lot(seed: int) -> None:
    for build in (mlp_stack, dropout_stack, conv_stack):
        model, x = build()
        plain = copy.deepcopy(model)
        regions = force(model, by_lot(seed), ("0", "1", "2"), verify=True)
        assert_same(run_steps(plain, [x]), run_steps(model, [x]))
        assert failures(regions) == set()
