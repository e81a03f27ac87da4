"""Everything that a failed call must leave as it was, as one value that compares."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as global_hooks

import budgetopt
from budgetopt import _torch


def everything(model: Any, folder: Path | None = None) -> dict[str, Any]:
    """Attributes, hooks, parameters, buffers and gradients of `model`, random states, torch's modes, files."""
    modules = list(model.named_modules()) if isinstance(model, nn.Module) else []
    return {
        "attributes": {path: _attributes(module) for path, module in modules},
        "tensors": [_tensor(t) for _, m in modules for t in [*m._parameters.values(), *m._buffers.values()]],
        "random": (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "hooks": [_shallow(found) for name, found in vars(global_hooks).items() if name.startswith("_global_")],
        "around": (_torch.calm(), _torch.outer_hooks(), _torch.hooks_enabled(), _torch.profiler_running()),
        "stderr": os.fstat(2).st_ino,
        "files": files(folder),
    }


def files(folder: Path | None) -> dict[str, bytes]:
    """Every file under `folder` by name, hidden ones too."""
    return {} if folder is None else {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: _shallow(value) for name, value in vars(module).items()}


def _shallow(value: Any) -> Any:
    """Which object it is and, for a container, which objects are in it."""
    if isinstance(value, dict):
        return id(value), [(key, id(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return id(value), [id(item) for item in value]
    return id(value)


def _tensor(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return id(tensor), tensor.requires_grad, tensor.is_leaf, _data(tensor), id(tensor.grad), _data(tensor.grad)


def _data(tensor: torch.Tensor | None) -> Any:
    if tensor is None or tensor.is_meta or nn.parameter.is_lazy(tensor):
        return None
    return tensor.data_ptr(), tensor.detach().flatten().tolist()


@contextmanager
def refused(
    model: Any, error: type[BaseException], match: str, folder: Path | None = None
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """The block must raise `error`, and leave the model, the random states and the files as they were."""
    before = everything(model, folder)
    with pytest.raises(error, match=match) as caught:
        yield caught
    after = everything(model, folder)
    changed = [part for part in before if before[part] != after[part]]
    assert not changed, f"changed: {changed}"
    if isinstance(model, nn.Module):
        assert budgetopt.plan_of(model) is None
