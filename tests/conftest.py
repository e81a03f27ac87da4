"""What every test gets: the same seeds, and a skip for those that need a device that is not here."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # two processes of one thread each take half the time of one with two
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
