"""Bytes that are there during the whole step: parameters, buffers, gradients, sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from budgetopt import _device, _torch
from budgetopt._errors import BudgetOptError, ProfileError
from budgetopt._operators import parts
from budgetopt._sample import tensors_in
from budgetopt._schema import Fixed
from budgetopt._state import leaves


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
        ProfileError: the model is a ScriptModule, or torch.compile was called on it.
    """
    _require_alone(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise ProfileError("the model is a ScriptModule, whose forward can't be planned: give the module it came from")
    if _torch.is_compiled(model):
        raise ProfileError(
            "torch.compile was called on the model, and compiled code can't be planned: give the plain model. Parts of "
            "it may be compiled: they are left alone. Or compile after fit: what is planned then runs uncompiled"
        )


def _require_alone(model: torch.nn.Module) -> None:
    """Raise where running the model waits for other processes: each measures and solves as often as it needs to."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    kinds = ("DistributedDataParallel", "FullyShardedDataParallel")
    wrapped = [path for path, module in model.named_modules() if type(module).__name__ in kinds]
    if wrapped:
        raise ProfileError(
            f"{wrapped[0] or 'the model'} is wrapped to run in several processes, which would wait for each other "
            "while they measure: fit the module inside (wrapped.module), before or after it is wrapped"
        )
    if any(_torch.is_sharded(parameter) for parameter in model.parameters()):
        raise ProfileError(
            "the model's parameters are sharded over several processes, which would wait for each other while they "
            "measure: call fit before fully_shard"
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
    """The storages that are there before, during and after the step, each counted once, by kind.

    Args:
        account: whose allocator sizes are told of; by default the model's device.
    """

    def __init__(self, model: torch.nn.Module, sample: Any, account: torch.device | None = None) -> None:
        self.device = device_of(model)
        self.account = account or self.device
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
            held = parts(tensor)
            if not held and tensor.device == self.device:
                total += tensor.numel() * tensor.element_size()
            for part in held:
                storage = part.untyped_storage()
                if id(storage) not in self.identities and part.device == self.device:
                    total += _device.rounded(self.account, storage.nbytes())
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
