"""The referee of what training does: a few optimizer steps, and everything they leave behind, bit for bit.

Usual shape of a test::

    plain, planned = plain_and_planned(model)
    budgetopt.fit(planned, sample, budget)
    assert_same(run_steps(plain, [sample]), run_steps(planned, [sample]))
"""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass
class Trace:
    """What some training steps computed and left. Tensors are copies."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Per step, by parameter name."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rng: dict[str, Any] = field(default_factory=dict)
    """States of torch's, Python's and numpy's generators afterwards."""
    training: dict[str, bool] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    hooks: dict[str, int] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    """Class of every module."""
    state_dict_keys: list[str] = field(default_factory=list)


def plain_and_planned(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A deep copy that stays plain, and the model itself, to be fitted. Call before ``fit``."""
    return copy.deepcopy(model), model


def run_steps(
    model: nn.Module,
    samples: Sequence[Any],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    step: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int = 3,
    lr: float = 0.1,
    seed: int = 0,
) -> Trace:
    """Train ``steps`` steps of SGD on the samples in turn, gradients None before each; returns the trace.

    Args:
        loss: from the model's output to a scalar; default as ``budgetopt.fit`` has it.
        step: from the model and a sample to a scalar, in place of the call and ``loss``.
        seed: every generator is set to it first (and left where the steps leave it).
    """
    _seed(seed)
    trace = Trace()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for number in range(steps):
        optimizer.zero_grad(set_to_none=True)
        sample = samples[number % len(samples)]
        value = step(model, sample) if step is not None else (loss or default_loss)(call(model, sample))
        value.backward()  # type: ignore[no-untyped-call]
        trace.losses.append(value.detach().clone())
        trace.gradients.append({name: _copied(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
    _note_state(trace, model)
    return trace


def call(model: nn.Module, sample: Any) -> Any:
    """The model on a sample: a mapping by name, a tuple or list in order, anything else as it is."""
    if isinstance(sample, Mapping):
        return model(**sample)
    return model(*sample) if isinstance(sample, (tuple, list)) else model(sample)


def default_loss(output: Any) -> Tensor:
    """The output's loss, else the sum of the means of its floating tensors that require grad."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    return torch.stack([part.mean() for part in _trainable(output)]).sum()


def assert_same(a: Trace, b: Trace) -> None:
    """Raise AssertionError naming the first thing in which two traces differ, in the order of time."""
    difference = first_difference(a, b)
    assert difference is None, difference


def first_difference(a: Trace, b: Trace) -> str | None:
    """The first difference in words, or None if the traces are bit for bit equal."""
    return next(_differences(a, b), None)


def _differences(a: Trace, b: Trace) -> Iterator[str]:
    if len(a.losses) != len(b.losses):
        yield f"number of steps: {len(a.losses)} and {len(b.losses)}"
    for step, (loss_a, loss_b) in enumerate(zip(a.losses, b.losses, strict=False)):
        yield from _compare(f"loss of step {step}", loss_a, loss_b)
        # Backward order: the last parameter's gradient is made first, so it is where an error starts.
        yield from _compare_maps(f"gradient of step {step}", _turned(a.gradients[step]), _turned(b.gradients[step]))
    yield from _compare_maps("parameter", a.parameters, b.parameters)
    yield from _compare_maps("buffer", a.buffers, b.buffers)
    yield from _compare_maps("random state", a.rng, b.rng)
    yield from _compare_maps("training flag", a.training, b.training)
    yield from _compare_maps("requires_grad", a.requires_grad, b.requires_grad)
    yield from _compare_maps("hooks", a.hooks, b.hooks)
    yield from _compare_maps("class of module", a.modules, b.modules)
    yield from _compare("state_dict keys", a.state_dict_keys, b.state_dict_keys)


def _compare_maps(what: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            yield f"{what} {name!r}: only in the {'first' if name in a else 'second'}"
        else:
            yield from _compare(f"{what} {name!r}", a[name], b[name])


def _compare(what: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        yield from _compare_tensors(what, a, b)
    elif type(a) is not type(b) or a != b:
        yield f"{what}: {a!r} and {b!r}"


def _compare_tensors(what: str, a: Tensor, b: Tensor) -> Iterator[str]:
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        yield f"{what}: {_kind(a)} and {_kind(b)}"
        return
    unequal = _bytes(a) != _bytes(b)
    if not unequal.any():
        return
    elements = unequal.any(dim=1)
    at = int(elements.nonzero()[0])
    left, right = a.reshape(-1)[at].item(), b.reshape(-1)[at].item()
    yield f"{what}: {int(elements.sum())} of {a.numel()} elements differ, the first at {at}: {left!r} and {right!r}"


def _bytes(tensor: Tensor) -> Tensor:
    """(elements, bytes of one): by bits, so that NaN equals NaN and -0 differs from 0."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _turned(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: gradients[name] for name in reversed(list(gradients))}


def _note_state(trace: Trace, model: nn.Module) -> None:
    trace.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace.buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    trace.rng = _rng_states()
    trace.training = {name: m.training for name, m in model.named_modules()}
    trace.requires_grad = {name: p.requires_grad for name, p in model.named_parameters()}
    trace.hooks = {name: sum(len(getattr(m, kind)) for kind in HOOKS) for name, m in model.named_modules()}
    trace.modules = {name: f"{type(m).__module__}.{type(m).__qualname__}" for name, m in model.named_modules()}
    trace.state_dict_keys = list(model.state_dict())


def _seed(seed: int) -> None:
    torch.manual_seed(seed)  # every device
    random.seed(seed)
    np.random.seed(seed)


def _rng_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_available():
        states |= {f"cuda:{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _trainable(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _trainable(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _trainable(part)
