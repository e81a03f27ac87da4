"""Bytes that are there during the whole step: parameters, buffers, gradients, sample, optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from budgetopt import _device, _torch
from budgetopt._errors import BudgetOptError, ProfileError
from budgetopt._operators import is_plain
from budgetopt._sample import tensors_in
from budgetopt._schema import Fixed
from budgetopt._state import leaves

_COPIES: Final = {
    "adamw": 2,
    "adam": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "sgd": 0,
    "sgd+momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "lion": 1,
}
"""Copies of every trainable parameter that the optimizer's state holds."""


def device_of(model: torch.nn.Module) -> torch.device:
    """The one device that the model is on.

    Raises:
        BudgetOptError: it is no module. ProfileError: no parameters, parameters without data, on several
            devices, or on one that can't be measured (now).
    """
    require_module(model)
    devices = {p.device for p in model.parameters()}
    if not devices:
        raise ProfileError("the model has no parameters: there is nothing to train under a budget")
    if len(devices) > 1:
        names = ", ".join(sorted(str(d) for d in devices))
        raise ProfileError(f"the model is on several devices ({names}): a budget bounds one; move it to one first")
    device = devices.pop()
    if device.type == "meta":
        raise ProfileError("the model is on the meta device: it has no data to run; use model.to_empty(device=...)")
    _require_data(model)
    if _device.backend(device).capturing(device):
        raise ProfileError("a CUDA graph is being captured: budgetopt can't measure inside one, fit before the capture")
    return device


def require_module(model: Any) -> None:
    """Raise unless `model` is one."""
    if not isinstance(model, torch.nn.Module):
        raise BudgetOptError(f"the model is of type {type(model).__name__}: give the torch.nn.Module that is trained")


def require_plannable(model: torch.nn.Module) -> None:
    """Raise where a plan could not take effect.

    Raises:
        ProfileError: the model is a ScriptModule, or torch.compile was called on it or on a part of it.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise ProfileError("the model is a ScriptModule, whose forward can't be planned: give the module it came from")
    compiled = [path for path, module in model.named_modules() if _torch.is_compiled(module)]
    if compiled:
        raise ProfileError(
            f"torch.compile was called on {compiled[0] or 'the model'}, and inside compiled code a plan has no effect: "
            "give the plain model and train that one, or compile without a plan"
        )


def _require_data(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ProfileError(f"the parameter {name!r} has no shape yet: run the model once on a batch first")
        if parameter.is_inference():
            raise ProfileError(
                f"the parameter {name!r} was made in torch.inference_mode, so it can't be trained: "
                "build the model outside of it"
            )


class Resident:
    """The storages that are there before, during and after the step, each counted once, by kind."""

    def __init__(self, model: torch.nn.Module, sample: Any) -> None:
        self.device = device_of(model)
        found = leaves(model, sample)
        self.without = [leaf for leaf in found if leaf.grad is None]
        self.identities: set[int] = set()
        self._keep: list[torch.UntypedStorage] = []
        parameters = list(model.parameters())
        self.parameter = self._add(parameters)
        self.buffer = self._add(list(model.buffers()))
        self.gradient = self._add([leaf.grad for leaf in found if leaf.grad is not None])
        self.sample = self._add(list(tensors_in(sample)))

    def _add(self, found: Sequence[torch.Tensor]) -> int:
        total = 0
        for tensor in found:
            if not is_plain(tensor):
                total += tensor.numel() * tensor.element_size()
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self.identities and tensor.device == self.device:
                total += _device.rounded(self.device, storage.nbytes())
            self.identities.add(id(storage))
            self._keep.append(storage)
        return total

    def fixed(self, optimizer_bytes: int) -> Fixed:
        """As it goes into a profile."""
        return Fixed(
            parameter=self.parameter,
            buffer=self.buffer,
            gradient=self.gradient,
            optimizer=optimizer_bytes,
            sample=self.sample,
        )


def optimizer_bytes(model: torch.nn.Module, optimizer: Any) -> int:
    """Bytes of state that the optimizer holds, or will hold after its first step.

    Args:
        optimizer: None (nothing), a name of :data:`_COPIES`, or an instance: its state is measured or,
            before its first step, derived from its class.

    Raises:
        ProfileError: unknown name, or an instance whose state can't be derived.
    """
    if optimizer is None:
        return 0
    if isinstance(optimizer, str):
        return _reserved([p for p in model.parameters() if p.requires_grad], optimizer.lower())
    if isinstance(optimizer, torch.optim.Optimizer):
        held = _held(optimizer, device_of(model))
        if held:
            return held
        name = type(optimizer).__name__.lower()
        if name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups):
            name = "sgd+momentum"
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        return _reserved(parameters, name)
    raise ProfileError(f"optimizer={optimizer!r} is neither an optimizer, nor one of {sorted(_COPIES)}, nor None")


def bytes_there(model: torch.nn.Module, sample: Any, optimizer: Any) -> int:
    """Bytes of a step that are taken before it begins: what is free does not count them, a budget does."""
    state = _held(optimizer, device_of(model)) if isinstance(optimizer, torch.optim.Optimizer) else 0
    return Resident(model, sample).fixed(state).total


def _held(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    held = [t for state in optimizer.state.values() for t in tensors_in(state) if t.device == device]
    return sum(_device.rounded(device, t.untyped_storage().nbytes()) for t in held)


def _reserved(parameters: list[torch.nn.Parameter], name: str) -> int:
    if name not in _COPIES:
        raise ProfileError(
            f"budgetopt does not know how much state the optimizer {name!r} holds: run one step of it first and "
            f"pass the instance, or name the nearest of {sorted(_COPIES)}, or pass None and use headroom="
        )
    copies = _COPIES[name]
    return sum(copies * _device.rounded(p.device, p.untyped_storage().nbytes()) for p in parameters)
