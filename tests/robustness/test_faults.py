"""Errors and Ctrl-C anywhere in planned steps, and plans with changed bytes: the next step is right."""

from __future__ import annotations

import copy
import gc
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import budgetopt
from budgetopt import _torch
from budgetopt._apply import installed
from tests.models import dropout_stack
from tests.oracle import assert_same, run_steps
from tests.test_interrupted import AtOperator

from .cases import case
from .sides import EXACT, budget, planned

OURS = str(Path(budgetopt.__file__).parent)
INTERRUPTS, FLIPS = 60, 250
"""In each test; `pytest -m slow` tries ten times as many."""
MANY = [pytest.param(1), pytest.param(10, marks=pytest.mark.slow)]


def step(model: nn.Module, sample: Any) -> None:
    model.zero_grad()
    model(sample).square().mean().backward()


def assert_right(plain: nn.Module, model: nn.Module, sample: Any) -> None:
    """From the same weights on, the next steps are those of plain; nothing of an earlier one is left."""
    found = installed(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain.load_state_dict(model.state_dict())
    assert_same(run_steps(plain, [sample], steps=2), run_steps(model, [sample], steps=2))
    assert found is installed(model)
    assert _torch.calm() and _torch.hooks_enabled() and not _torch.profiler_running()
    model.load_state_dict(before)
    model.zero_grad()
    plain.zero_grad()


def storages() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    return len({one.untyped_storage()._cdata for one in gc.get_objects() if type(one) is torch.Tensor})


def of_the_thread() -> tuple[Any, ...]:
    """What torch keeps per thread, and what a plan changes for a while."""
    keys = torch._C._dispatch_tls_local_exclude_set(), torch._C._dispatch_tls_local_include_set()
    return *map(str, keys), torch.is_grad_enabled(), torch.get_default_dtype(), _torch.modes(), _torch.outer_hooks()


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module, Any]:
    """A plain model, the same under a plan that drops everything, and a sample."""
    model, sample = dropout_stack()
    plain = copy.deepcopy(model)
    return plain, planned(model, sample, "dropped"), sample


@pytest.mark.parametrize("times", MANY)
@case("Company", "an error at any operator of a step", "as plain")
def test_an_error_at_any_operator(pair: tuple[nn.Module, nn.Module, Any], times: int) -> None:
    plain, model, sample = pair
    with AtOperator(0, RuntimeError()) as counted:
        step(model, sample)
    assert_right(plain, model, sample)
    alive = storages()
    for number in {round(share * counted.count / (INTERRUPTS * times)) for share in range(1, INTERRUPTS * times + 1)}:
        if number:
            with pytest.raises(RuntimeError, match="on purpose"), AtOperator(number, RuntimeError("on purpose")):
                step(model, sample)
    assert_right(plain, model, sample)
    assert storages() <= alive


@contextmanager
def nothing_reported() -> Iterator[None]:
    """Inside of a __del__ or of a weak reference's callback Python reports Ctrl-C and goes on; pytest would keep the
    frames, and all in them."""
    before, sys.unraisablehook = sys.unraisablehook, lambda report: None
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Ctrl-C after so long, if the block takes that long."""

    armed = [True]

    def interrupt(number: int, frame: Any) -> None:
        if armed[0]:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with nothing_reported():
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer on this system")
@pytest.mark.parametrize("times", MANY)
@case("Company", "Ctrl-C at any moment of a step, forward, backward or replay", "as plain")
def test_ctrl_c_at_any_moment(pair: tuple[nn.Module, nn.Module, Any], times: int) -> None:
    plain, model, sample = pair
    step(model, sample)
    start = time.perf_counter()
    step(model, sample)
    took = time.perf_counter() - start
    alive, stopped = storages(), 0
    for number in range(INTERRUPTS * times):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", budgetopt.BudgetOptWarning)
            try:
                with alarm(took * (number + 1) / (INTERRUPTS * times)):
                    step(model, sample)
            # Python swallows Ctrl-C inside of a __del__; the step may then stop with an error.
            except (KeyboardInterrupt, RuntimeError):
                stopped += 1
        if number % 10 == 9:
            assert_right(plain, model, sample)
    assert stopped > INTERRUPTS // 4
    assert storages() <= alive


class AtMoment:
    """Ctrl-C at the n-th moment at which Python lets it in: in our code, a function starts or one of C's returns."""

    def __init__(self, n: int) -> None:
        self.n, self.count = n, 0

    def __enter__(self) -> AtMoment:
        sys.setprofile(self.event)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(None)

    def event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(OURS):
            self.count += 1
            if self.count == self.n:
                raise KeyboardInterrupt


@pytest.mark.parametrize("times", MANY)
@case("Company", "Ctrl-C between any two lines of ours leaves nothing set for the thread", "as plain")
def test_ctrl_c_between_any_two_lines(pair: tuple[nn.Module, nn.Module, Any], times: int) -> None:
    """Checked while the traceback is still there, as it is in a notebook."""
    plain, model, sample = pair
    step(model, sample)
    with AtMoment(0) as counted:
        step(model, sample)
    before, alive, moments = of_the_thread(), storages(), range(1, counted.count + 1)
    tried = moments[7 :: max(1, len(moments) // (5 * INTERRUPTS * times))]
    stopped = 0
    for number in tried:
        with nothing_reported():
            try:
                with AtMoment(number):
                    step(model, sample)
            except (KeyboardInterrupt, RuntimeError):
                stopped += 1
                assert of_the_thread() == before
            assert of_the_thread() == before
    assert stopped > len(tried) // 2 > INTERRUPTS
    assert_right(plain, model, sample)
    assert storages() <= alive


# -- changed files -----------------------------------------------------------------------------------


def flipped(data: bytes, lot: random.Random) -> bytes:
    at = lot.randrange(len(data))
    return data[:at] + bytes([lot.randrange(256)]) + data[at + 1 :]


def cut(data: bytes, lot: random.Random) -> bytes:
    at = lot.randrange(len(data))
    return data[:at] + data[at + lot.randrange(1, 40) :]


def doubled(data: bytes, lot: random.Random) -> bytes:
    at, size = lot.randrange(len(data)), lot.randrange(1, 40)
    return data[: at + size] + data[at:]


def counted_up(data: bytes, lot: random.Random) -> bytes:
    """A digit for a digit: JSON as good as before."""
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    at = lot.choice(places)
    return data[:at] + str((int(chr(data[at])) + lot.randrange(1, 10)) % 10).encode() + data[at + 1 :]


@pytest.mark.parametrize("times", MANY)
@pytest.mark.parametrize("change", [flipped, cut, doubled, counted_up])
@case("Company", "a plan's file has changed bytes", "refused")
def test_changed_plans(change: Callable[[bytes, random.Random], bytes], times: int, tmp_path: Path) -> None:
    model, sample = dropout_stack(depth=2)
    profile = budgetopt.profile(model, sample)
    path, whole = tmp_path / "changed.json", tmp_path / "plan.json"
    budgetopt.fit(model, sample, budget(profile), allow=EXACT, plan=whole)
    plan, data = budgetopt.Plan.load(whole), whole.read_bytes()
    budgetopt.remove(model)
    lot, same = random.Random(7), 0
    for _ in range(FLIPS * times):
        path.write_bytes(changed := change(data, lot))
        try:
            assert budgetopt.Plan.load(path) == plan
            same += 1
        except budgetopt.PlanMismatchError as error:
            assert str(path) in str(error)
        assert path.read_bytes() == changed
    assert same < FLIPS * times // 4


@case("Company", "a plan's file was edited by hand", "refused")
def test_an_edited_plan_changes_nothing(tmp_path: Path) -> None:
    model, sample = dropout_stack(depth=2)
    path = tmp_path / "plan.json"
    budgetopt.fit(model, sample, budget(budgetopt.profile(model, sample)), allow=EXACT, plan=path)
    budgetopt.remove(model)
    text = path.read_text().replace('"choice": "recompute"', '"choice": "keep"', 1)
    path.write_text(text)
    with pytest.raises(budgetopt.PlanMismatchError, match=r"changed after it was written.*Delete it"):
        budgetopt.fit(model, sample, "1GB", plan=path)
    assert budgetopt.plan_of(model) is None and path.read_text() == text


@case("Company", "a plan's file runs code or reads other files", "refused")
def test_reading_a_plan_runs_nothing(tmp_path: Path) -> None:
    model, sample = dropout_stack(depth=2)
    path = tmp_path / "plan.json"
    budgetopt.fit(model, sample, budget(budgetopt.profile(model, sample)), allow=EXACT, plan=path)
    budgetopt.Plan.load(path).profile.environment  # whatever is loaded late is loaded  # noqa: B018
    seen: list[tuple[str, Any]] = []
    open_now = [True]

    def hook(event: str, arguments: Any) -> None:
        if open_now[0] and event in ("open", "exec", "import", "subprocess.Popen", "os.system", "pickle.find_class"):
            seen.append((event, arguments[0]))

    sys.addaudithook(hook)
    try:
        assert budgetopt.Plan.load(path).profile.operators
    finally:
        open_now[0] = False
    assert [what for event, what in seen if event == "open"] == [str(path)]
    assert {event for event, _ in seen} == {"open"}
