"""A planned model is used in every way that a plain one is; what comes out is the same, bit for bit."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import budgetopt
from budgetopt import _device
from budgetopt._apply import install, installed, uninstall
from budgetopt.solvers import Choice
from tests.forced import Around, by_lot, drop, failures, force, keep
from tests.models import conv_stack, dropout_stack
from tests.oracle import assert_same, run_steps
from tests.plans import forced_plan


class Block(nn.Module):
    """Smooth, so that it has third derivatives, with a write in place."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.up(self.norm(x)))
        z = self.down(y * y.sigmoid())
        z.add_(x)
        return z.sin() * z.exp().add(1).reciprocal()


PATHS = ("0", "1")
JIT = "ignore:.*torch.jit.*:DeprecationWarning"
"""Forward-mode derivatives load decompositions that torch wrote in TorchScript."""


def blocks() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(Block(), Block())


def sample(seed: int = 0) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_equal(a: Any, b: Any) -> None:
    """Nested lists and tuples of tensors, by bits."""
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


# -- orders of backward passes -------------------------------------------------------------------


def retain_three_times(model: nn.Module) -> Any:
    loss = model(sample()).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    return gradients(model)


def gradient_penalty(model: nn.Module) -> Any:
    x = sample().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    ((slope.norm(dim=1) - 1).square().mean() + model(sample(1)).mean()).backward()
    return gradients(model)


def penalty_on_parameter_gradients(model: nn.Module) -> Any:
    loss = model(sample()).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in found)).backward()
    return gradients(model)


def triple_backward(model: nn.Module) -> Any:
    x = sample().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
    second.square().sum().backward()  # type: ignore[no-untyped-call]
    return gradients(model), x.grad


def inputs_only(model: nn.Module) -> Any:
    x = sample().requires_grad_()
    found = torch.autograd.grad(model(x).square().sum(), x)
    assert gradients(model) == []
    return found


def part_of_the_graph(model: nn.Module) -> Any:
    out = model(sample())
    last = list(model[1].parameters())  # type: ignore[index]
    first = torch.autograd.grad(out.sum(), last, retain_graph=True)
    out.square().mean().backward()
    return first, gradients(model)


def two_forwards_one_backward(model: nn.Module) -> Any:
    (model(sample()).square().mean() + model(sample(1)).sin().mean()).backward()
    return gradients(model)


def first_in_first_out(model: nn.Module) -> Any:
    losses = [model(sample(i)).square().mean() for i in range(3)]
    for loss in losses:
        loss.backward()
    return gradients(model)


def interleaved(model: nn.Module) -> Any:
    first = model(sample()).square().mean()
    second = model(sample(1)).square().mean()
    first.backward(retain_graph=True)
    second.backward()
    first.backward()
    return gradients(model)


def never_unpacked(model: nn.Module) -> Any:
    abandoned = [model(sample(i)) for i in range(3)]
    del abandoned[1]
    model(sample()).square().mean().backward()
    del abandoned
    return gradients(model)


def batched_gradients(model: nn.Module) -> Any:
    x = sample().requires_grad_()
    out = model(x)
    return torch.autograd.grad(out, x, torch.eye(18).view(18, 3, 6), is_grads_batched=True)


def hessian_vector_product(model: nn.Module) -> Any:
    return torch.autograd.functional.hvp(lambda x: model(x).square().sum(), sample(), sample(1))  # type: ignore[no-untyped-call]


def jacobian(model: nn.Module) -> Any:
    found = torch.autograd.functional.jacobian(model, sample())  # type: ignore[no-untyped-call]
    return found, torch.autograd.functional.jacobian(model, sample(), vectorize=True)  # type: ignore[no-untyped-call]


def under_anomaly_mode(model: nn.Module) -> Any:
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        model(sample()).square().mean().backward()
    return gradients(model)


USES: list[Callable[[nn.Module], Any]] = [
    retain_three_times,
    gradient_penalty,
    penalty_on_parameter_gradients,
    triple_backward,
    inputs_only,
    part_of_the_graph,
    two_forwards_one_backward,
    first_in_first_out,
    interleaved,
    never_unpacked,
    batched_gradients,
    hessian_vector_product,
    jacobian,
    under_anomaly_mode,
]


@pytest.mark.parametrize("paths", [("",), PATHS])
@pytest.mark.parametrize("use", USES)
def test_uses_of_the_graph(use: Callable[[nn.Module], Any], paths: tuple[str, ...]) -> None:
    planned = blocks()
    regions = force(planned, drop, paths)
    assert_equal(use(blocks()), use(planned))
    assert all(region.counters.replayed > 0 for region in regions if region.path != "0" or use is not part_of_the_graph)


@pytest.mark.parametrize("use", USES)
def test_uses_of_the_graph_by_lot(use: Callable[[nn.Module], Any]) -> None:
    expected = use(blocks())
    for seed in range(3):
        planned = blocks()
        force(planned, by_lot(seed), PATHS)
        assert_equal(expected, use(planned))


class Reversing(torch.autograd.Function):
    """Unpacks what it saved in the order of saving, and one of it twice."""

    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Tensor:
        ctx.save_for_backward(*xs)
        return torch.stack(xs).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        first, *rest = ctx.saved_tensors
        again = ctx.saved_tensors[0]
        return (grads[0] * first * again, *(grads[0] * r for r in rest))


def test_unpacking_in_the_order_of_saving() -> None:
    def body(h: Tensor) -> Tensor:
        chain = [h.exp()]
        for _ in range(4):
            chain.append(chain[-1].sin() * 2)
        found: Tensor = Reversing.apply(*chain)  # type: ignore[no-untyped-call]
        return found

    planned = Around(body)
    force(planned, drop)
    assert_same(run_steps(Around(body), [sample()]), run_steps(planned, [sample()]))


class Searching(nn.Module):
    """Runs a backward pass through its planned child while it runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
        (again,) = torch.autograd.grad(self.inner(x).sum(), x, create_graph=True)
        found: Tensor = self.inner(x - 0.1 * slope) + again
        return found


@pytest.mark.parametrize("paths", [("",), ("inner",), ("", "inner")])
def test_backward_inside_forward(paths: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    planned = Searching()
    plain, x = copy.deepcopy(planned), sample().requires_grad_()
    force(planned, drop, paths)
    loss = lambda out: out.square().mean()  # noqa: E731
    assert_same(run_steps(plain, [x], loss=loss), run_steps(planned, [x], loss=loss))


# -- regions in odd places -----------------------------------------------------------------------


def test_a_region_inside_a_region() -> None:
    plain, planned = blocks(), blocks()
    force(planned, drop, ("", "0", "1", "0.norm"))
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))


class Recursive(nn.Module):
    """A module that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y if depth == 0 else y * self(y, depth - 1).exp()


def test_a_region_that_enters_itself() -> None:
    torch.manual_seed(1)
    planned = Recursive()
    plain = copy.deepcopy(planned)
    (region,) = force(planned, drop)
    assert_same(run_steps(plain, [sample()], steps=2), run_steps(planned, [sample()], steps=2))
    assert region.counters.calls == 8


def test_a_shared_module() -> None:
    torch.manual_seed(1)
    shared = Block()
    planned = nn.Sequential(shared, nn.Tanh(), shared, shared)
    plain = copy.deepcopy(planned)
    force(planned, drop, ("0",))
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))


# -- what raises ---------------------------------------------------------------------------------


class Failing(nn.Module):
    """Raises in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.where = ""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * 2
        if self.where == "forward":
            raise KeyError("planted")
        if self.where == "operator":
            y = y @ torch.ones(5, 5)
        if self.where == "backward":
            y.register_hook(_raise)  # type: ignore[no-untyped-call]
        return y.exp() * y.sin()


def _raise(grad: Tensor) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize(
    ("where", "error"), [("forward", KeyError), ("operator", RuntimeError), ("backward", KeyError)]
)
def test_an_exception_and_then_a_right_step(where: str, error: type[Exception]) -> None:
    torch.manual_seed(1)
    planned = Failing()
    plain = copy.deepcopy(planned)
    (region,) = force(planned, drop)
    for model in (plain, planned):
        model.where = where
        with pytest.raises(error) as caught:
            model(sample()).sum().backward()
        assert type(caught.value) is error
        model.where = ""
        model.zero_grad()
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))
    assert region.counters.broken == 0


# -- where nothing is recorded -------------------------------------------------------------------


def test_without_gradients_nothing_is_recorded() -> None:
    plain, planned = blocks(), blocks()
    regions = force(planned, drop, PATHS)
    with torch.no_grad():
        assert_equal(plain(sample()), planned(sample()))
    with torch.inference_mode():
        assert_equal(plain(sample()), planned(sample()))
    assert all(region.counters.calls == 0 for region in regions)


def func_grad(model: nn.Module) -> Any:
    return torch.func.grad(lambda x: model(x).square().sum())(sample())


def func_parameters(model: nn.Module) -> Any:
    parameters: dict[str, Tensor] = dict(model.named_parameters())

    def loss(values: dict[str, Tensor]) -> Tensor:
        out: Tensor = torch.func.functional_call(model, values, (sample(),))
        return out.square().sum()

    return list(torch.func.grad(loss)(parameters).values())


def func_vmap(model: nn.Module) -> Any:
    return torch.func.vmap(model)(torch.stack([sample(i) for i in range(3)]))


def func_jvp(model: nn.Module) -> Any:
    return torch.func.jvp(model, (sample(),), (sample(1),))


def func_per_sample_gradients(model: nn.Module) -> Any:
    return torch.func.vmap(torch.func.grad(lambda x: model(x).square().sum()))(sample())


def func_hessian(model: nn.Module) -> Any:
    return torch.func.hessian(lambda x: model(x).square().sum())(sample()[:1])


@pytest.mark.filterwarnings(JIT)
@pytest.mark.parametrize(
    "transform", [func_grad, func_parameters, func_vmap, func_jvp, func_per_sample_gradients, func_hessian]
)
def test_transforms_go_straight_through(transform: Callable[[nn.Module], Any]) -> None:
    planned = blocks()
    regions = force(planned, drop, PATHS)
    assert_equal(transform(blocks()), transform(planned))
    assert all(region.counters.bypassed > 0 and region.counters.calls == 0 for region in regions)
    assert_same(run_steps(blocks(), [sample()]), run_steps(planned, [sample()]))


def test_functional_call_is_recorded() -> None:
    plain, planned = blocks(), blocks()
    force(planned, drop, PATHS)
    found = []
    for model in (plain, planned):
        values = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, values, (sample(),)).square().sum().backward()
        found.append([p.grad for p in values.values()])
        assert gradients(model) == []
    assert_equal(*found)


def dual_body(h: Tensor) -> Tensor:
    y = torch.tanh(h) * h.exp()
    z = y * 1
    z.add_(h)
    return z.sin() * y.sigmoid()


@pytest.mark.filterwarnings(JIT)
def test_forward_mode_duals() -> None:
    """Without a layer norm: torch itself computes its tangent by other operators where any dispatch mode is on."""
    plain, planned = Around(dual_body), Around(dual_body)
    regions = force(planned, drop, verify=True)
    found = []
    for model in (plain, planned):
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(model(forward_ad.make_dual(sample(), sample(1))))  # type: ignore[no-untyped-call]
            out.tangent.square().sum().backward()
        found.append((out.tangent.detach(), gradients(model)))
    assert_equal(*found)
    assert failures(regions) == set()


def test_where_hooks_are_forbidden() -> None:
    plain, planned = blocks(), blocks()
    regions = force(planned, drop, PATHS)
    for model in (plain, planned):
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            out = model(sample())
        out.square().mean().backward()
    assert_equal(gradients(plain), gradients(planned))
    assert all(region.counters.bypassed == 1 for region in regions)


def transform_inside(h: Tensor) -> Any:
    return h * torch.func.vmap(lambda t: t.sin())(h).exp()


def test_vmap_inside_a_region() -> None:
    planned = Around(transform_inside)
    force(planned, drop)
    assert_same(run_steps(Around(transform_inside), [sample()]), run_steps(planned, [sample()]))


def gradient_inside(h: Tensor) -> Any:
    return h * torch.func.grad(lambda t: t.exp().sum())(h.detach()).exp()


def test_functional_gradient_inside_a_region() -> None:
    """torch refuses it where saved-tensor hooks are on: a region around it raises, so none is planned there."""
    planned = Around(gradient_inside)
    force(planned, drop)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        planned(sample())


def test_a_module_with_a_functional_gradient_is_left_alone() -> None:
    """The modules beside it are planned all the same."""
    torch.manual_seed(0)
    planned = nn.Sequential(*(Around(torch.exp) for _ in range(3)), Around(gradient_inside))
    plain = copy.deepcopy(planned)
    profile = budgetopt.profile(planned, sample(), optimizer=None)
    assert [region.path for region in profile.regions] == ["0", "1", "2"]
    plan = forced_plan(profile, lambda value: Choice.RECOMPUTE)
    assert plan.drops
    budgetopt.apply(planned, plan)
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))


# -- threads -------------------------------------------------------------------------------------


def in_threads(*work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def train(model: nn.Module, steps: int = 8) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(steps):
        optimizer.zero_grad()
        model(sample(i)).square().mean().backward()
        optimizer.step()


def test_two_models_in_two_threads() -> None:
    plain, first, second = blocks(), blocks(), blocks()
    force(first, drop, PATHS)
    force(second, by_lot(1), PATHS)
    train(plain)
    in_threads(lambda: train(first), lambda: train(second))
    for planned in (first, second):
        assert_equal(list(plain.parameters()), list(planned.parameters()))


def test_three_threads_go_backward_through_one_graph() -> None:
    plain, planned = blocks(), blocks()
    force(planned, drop, PATHS)
    expected = torch.autograd.grad(plain(sample()).square().mean(), list(plain.parameters()))
    loss = planned(sample()).square().mean()
    found: list[Any] = []

    def backward() -> None:
        for _ in range(10):
            found.append(torch.autograd.grad(loss, list(planned.parameters()), retain_graph=True))

    in_threads(backward, backward, backward)
    assert len(found) == 30
    for one in found:
        assert_equal(expected, one)


# -- others' hooks and modes ---------------------------------------------------------------------


def plain_call(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


def within_hooks(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), 1), lambda packed: packed[0]):
        return plain_call(model, x)


def within_save_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return plain_call(model, x)


def within_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(model, x, use_reentrant=False)
    return found


def within_reentrant_checkpoint(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    return found


def within_two_checkpoints(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(within_checkpoint, model, x, use_reentrant=False)
    return found


class Passing(TorchDispatchMode):
    """A mode that does nothing but count."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def within_mode(model: nn.Module, x: Tensor) -> Tensor:
    with Passing():
        return plain_call(model, x)


def within_device(model: nn.Module, x: Tensor) -> Tensor:
    with torch.device("cpu"):
        return plain_call(model, x)


RERUNNING = (within_checkpoint, within_two_checkpoints)
"""They run the forward again, where a lot would fall differently; a plan says the same."""
AROUND = (within_hooks, within_save_on_cpu, within_reentrant_checkpoint, within_mode, within_device, *RERUNNING)


@pytest.mark.parametrize("build", [blocks, lambda: dropout_stack(2, 6)[0]])
@pytest.mark.parametrize(
    ("around", "choose"),
    [
        *((around, choose) for around in AROUND for choose in (drop, keep)),
        *((around, by_lot(3)) for around in AROUND if around not in RERUNNING),
    ],
)
def test_within(around: Callable[..., Tensor], build: Callable[[], nn.Module], choose: Any) -> None:
    plain, planned = build(), build()
    force(planned, choose, PATHS)
    found = []
    for model in (plain, planned):
        torch.manual_seed(2)
        for i in range(2):
            around(model, sample(i)).square().mean().backward()  # type: ignore[no-untyped-call]
        found.append((gradients(model), torch.get_rng_state()))
    assert_equal(*found)


class Wrapping(nn.Module):
    """Uses `inside` on its child."""

    def __init__(self, inside: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.child = nn.Sequential(Block(), nn.Dropout(0.3), Block())
        self.inside = inside

    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.inside(self.child, y * 1).sin() * y.exp()


@pytest.mark.parametrize(
    "inside", [within_hooks, within_save_on_cpu, within_checkpoint, within_mode, within_device, within_two_checkpoints]
)
def test_inside(inside: Callable[..., Tensor]) -> None:
    torch.manual_seed(1)
    planned = Wrapping(inside)
    plain = copy.deepcopy(planned)
    force(planned, drop)
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))


def reentrant(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = checkpoint(model, x, use_reentrant=True)
    return found


def test_reentrant_checkpoint_inside() -> None:
    torch.manual_seed(1)
    planned = Wrapping(reentrant)
    plain = copy.deepcopy(planned)
    force(planned, drop)
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))


def test_an_outer_mode_is_not_shown_the_replay() -> None:
    """An outer mode sees the operators that the user's code runs, forward and backward, and no more."""
    seen = []
    for choose in (keep, drop):
        model = blocks()
        force(model, choose, PATHS)
        with Passing() as mode:
            model(sample()).square().mean().backward()
        seen.append(mode.seen)
    assert seen[0] == seen[1]


def test_flops_are_those_of_plain() -> None:
    counts = []
    for planned in (False, True):
        model = blocks()
        if planned:
            force(model, drop, PATHS)
        with FlopCounterMode(display=False) as counter:
            model(sample()).square().mean().backward()
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1]
    # four products of 3 × 6 × 12, forward; backward two for each but the first, whose input needs no gradient
    assert sum(counts[1]["Global"].values()) >= 4 * (2 * 3 * 6 * 12)


# -- copies --------------------------------------------------------------------------------------


def by_deepcopy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def by_pickle(model: nn.Module) -> nn.Module:
    found: nn.Module = pickle.loads(pickle.dumps(model))
    return found


def by_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def by_two_copies(model: nn.Module) -> nn.Module:
    return by_pickle(copy.deepcopy(model))


@pytest.mark.parametrize("clone", [by_deepcopy, by_pickle, by_torch_save, by_two_copies])
def test_copies_use_their_own_weights(clone: Callable[[nn.Module], nn.Module]) -> None:
    plain, planned = blocks(), blocks()
    force(planned, drop, PATHS)
    planned(sample())
    other = clone(planned)
    with torch.no_grad():
        for model in (plain, other):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    trace = run_steps(plain, [sample()])
    assert_same(trace, run_steps(other, [sample()]))
    assert_same(run_steps(blocks(), [sample()]), run_steps(planned, [sample()]))
    del planned
    assert_same(run_steps(plain, [sample()]), run_steps(other, [sample()]))


def test_a_copied_part_uses_its_own_weights() -> None:
    planned = blocks()
    force(planned, drop, PATHS)
    part = copy.deepcopy(planned[0])  # type: ignore[index]
    with torch.no_grad():
        for parameter in planned.parameters():
            parameter.zero_()
    assert_equal(blocks()[0](sample()), part(sample()))  # type: ignore[index]


def test_replicas_use_their_own_weights() -> None:
    """What DataParallel does: a shallow copy whose parameters are set afterwards."""
    planned = Around(torch.exp)
    force(planned, drop)
    replica: Any = planned._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    replica.weight = planned.weight * 2
    assert_equal(torch.exp(sample() @ (planned.weight * 2)), replica(sample()))


def doubled(self: Any, x: Tensor) -> Tensor:
    found: Tensor = type(self).forward(self, x) * 2
    return found


def test_copies_of_a_patched_model_keep_the_patch() -> None:
    """Libraries give modules a forward of their own; a plan must not undo that in a copy."""
    planned = blocks()
    block: Any = planned[0]  # type: ignore[index]
    block.forward = types.MethodType(doubled, block)
    expected = planned(sample())
    assert_equal(expected, copy.deepcopy(planned)(sample()))
    force(planned, drop, PATHS)
    assert_equal(expected, planned(sample()))
    assert_equal(expected, copy.deepcopy(planned)(sample()))


def test_a_planned_model_is_freed_without_the_collector() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        planned = blocks()
        force(planned, drop, PATHS)
        planned(sample()).square().mean().backward()
        alive = weakref.ref(planned[0])  # type: ignore[index]
        del planned
        assert alive() is None
    finally:
        gc.enable()


# -- what a user sees of the model ---------------------------------------------------------------


def test_hooks_fire_as_in_plain() -> None:
    fired: list[list[Any]] = []
    for planned in (False, True):
        model, seen = blocks(), []  # type: ignore[var-annotated]

        def note(what: str, seen: list[Any] = seen) -> Any:
            return lambda *args, **kwargs: seen.append(what)

        block: nn.Module = model[0]  # type: ignore[index]
        block.register_forward_pre_hook(note("pre"))
        block.register_forward_hook(note("post"))
        block.register_full_backward_hook(note("backward"))
        block.register_full_backward_pre_hook(note("backward pre"))
        next(block.parameters()).register_hook(note("gradient"))  # type: ignore[no-untyped-call]
        next(block.parameters()).register_post_accumulate_grad_hook(note("accumulated"))  # type: ignore[no-untyped-call]
        if planned:
            force(model, drop, PATHS)
        block.register_forward_hook(lambda module, args, out: out * 2)
        for _ in range(2):
            model(sample().requires_grad_()).square().mean().backward()
        fired.append([seen, *gradients(model)])
    assert sorted(fired[0][0]) == sorted(["pre", "post", "backward pre", "gradient", "accumulated", "backward"] * 2)
    assert_equal(*fired)


def test_names_signatures_and_state_are_unchanged() -> None:
    plain, planned = blocks(), blocks()
    force(planned, drop, PATHS)
    assert list(plain.state_dict()) == list(planned.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in planned.named_modules()]
    assert [type(m) for m in plain.modules()] == [type(m) for m in planned.modules()]
    assert repr(plain) == repr(planned)
    for one, other in zip(plain.modules(), planned.modules(), strict=True):
        assert inspect.signature(one.forward) == inspect.signature(other.forward)
        assert one.forward.__name__ == other.forward.__name__
        assert one.forward.__doc__ == other.forward.__doc__
    planned.load_state_dict(plain.state_dict())


def test_uninstalling_leaves_nothing() -> None:
    planned = blocks()
    block: Any = planned[1]  # type: ignore[index]
    own = block.forward = types.MethodType(doubled, block)
    before = [dict(module.__dict__) for module in planned.modules()]
    force(planned, drop, PATHS)
    assert installed(planned) is not None
    planned(sample()).square().mean().backward()
    assert uninstall(planned)
    assert block.__dict__["forward"] is own
    after = [dict(module.__dict__) for module in planned.modules()]
    assert [list(d.items()) for d in before] == [list(d.items()) for d in after]
    assert installed(planned) is None
    assert not uninstall(planned)


def test_installing_again_replaces() -> None:
    plain, planned = blocks(), blocks()
    (first, _), (second,) = force(planned, drop, PATHS), force(planned, drop, ("1",))
    assert_same(run_steps(plain, [sample()]), run_steps(planned, [sample()]))
    assert (first.counters.calls, second.counters.calls) == (0, 3)
    assert "forward" not in planned[0].__dict__  # type: ignore[index]


def test_a_patch_made_after_the_plan_survives_its_removal() -> None:
    planned = blocks()
    force(planned, drop, PATHS)
    block: Any = planned[0]  # type: ignore[index]
    inner = block.forward
    block.forward = lambda x: inner(x) * 2
    assert_equal(planned[1](blocks()[0](sample()) * 2), planned(sample()))  # type: ignore[index]
    uninstall(planned)
    assert_equal(blocks()[0](sample()) * 2, block(sample()))  # type: ignore[index]


@pytest.fixture(autouse=True)
def _grad_mode_survives() -> Iterator[None]:
    yield
    assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    assert torch._C._len_torch_dispatch_stack() == 0


def test_no_region_at_all() -> None:
    model, x = conv_stack(1, 2, 1, 4)
    plain = copy.deepcopy(model)
    install(model, None, [])
    assert_same(run_steps(plain, [x]), run_steps(model, [x]))


def test_a_region_that_changes_its_stream_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: after the fourth look at the current stream it is another one."""
    model, sample = dropout_stack()
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    regions = force(planned, drop, [str(i) for i in range(4)])
    asked = iter(range(1_000_000))
    monkeypatch.setattr(_device, "stream_of", lambda first: lambda: int(next(asked) >= 4))
    assert_same(run_steps(plain, [sample]), run_steps(planned, [sample]))
    assert [region.counters.broken for region in regions] == [1, 0, 0, 0]
    assert all(region.counters.replayed for region in regions[1:])
