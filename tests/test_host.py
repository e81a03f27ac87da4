"""How much memory a process may have, read from files such as Linux and container engines show them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import budgetopt
from budgetopt import _host

GB = 10**9
V2 = "36 25 0:31 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {inside} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {inside} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def machine(root: Path, groups: str, mounts: str, files: Mapping[str, object]) -> Path:
    """A machine of 64 GB with 40 GB free; `files` are those of its control groups."""
    parts = {
        "proc/meminfo": "MemTotal:       62500000 kB\nMemFree:         100 kB\nMemAvailable:   39062500 kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
    }
    for name, content in {**parts, **{f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in files.items()}}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))
    return root


def test_no_container(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2.format(inside="/"), {})
    assert (_host.total(root), _host.free(root)) == (64 * GB, 40 * GB)


def test_version_2_inside_a_container(tmp_path: Path) -> None:
    files = {
        "memory.max": 8 * GB,
        "memory.current": 5 * GB,
        "memory.stat": f"anon 1\ninactive_file {2 * GB}\nactive_file 7",
    }
    root = machine(tmp_path, "0::/\n", V2.format(inside="/"), files)
    assert (_host.total(root), _host.free(root)) == (8 * GB, 5 * GB)


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2.format(inside="/"), {"memory.max": "max", "memory.current": 5})
    assert (_host.total(root), _host.free(root)) == (64 * GB, 40 * GB)


def test_a_group_above_has_the_smaller_limit(tmp_path: Path) -> None:
    """The total comes from one group, what is free from another."""
    files = {
        "user/memory.max": 10 * GB,
        "user/memory.current": 9 * GB,
        "user/job/memory.max": 8 * GB,
        "user/job/memory.current": 1 * GB,
        "user/job/step/memory.max": "max",
        "user/job/step/memory.current": 1 * GB,
    }
    root = machine(tmp_path, "0::/user/job/step\n", V2.format(inside="/"), files)
    assert (_host.total(root), _host.free(root)) == (8 * GB, 1 * GB)


@pytest.mark.parametrize(
    ("inside", "own", "folder"),
    [
        ("/", "/docker/abc", "memory/docker/abc"),  # seen from outside
        ("/docker/abc", "/docker/abc", "memory"),  # the group itself is mounted
        ("/docker/abc", "/docker/abc/inner", "memory/inner"),
        ("/docker/abc", "/elsewhere", "memory"),  # its own name tells nothing in here
    ],
)
def test_version_1(inside: str, own: str, folder: str, tmp_path: Path) -> None:
    files = {
        f"{folder}/memory.limit_in_bytes": 4 * GB,
        f"{folder}/memory.usage_in_bytes": 3 * GB,
        f"{folder}/memory.stat": f"total_inactive_file {1 * GB}",
        "cpu/memory.limit_in_bytes": 1,
        "cpu/memory.usage_in_bytes": 1,
    }
    groups = f"9:name=systemd:/\n4:memory:{own}\n3:cpu,cpuacct:{own}\n0::/\n"
    root = machine(tmp_path, groups, V1.format(inside=inside), files)
    assert (_host.total(root), _host.free(root)) == (4 * GB, 2 * GB)


def test_version_1_says_no_limit_with_a_huge_one(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": 9223372036854771712, "memory/memory.usage_in_bytes": 1}
    root = machine(tmp_path, "4:memory:/\n", V1.format(inside="/"), files)
    assert (_host.total(root), _host.free(root)) == (64 * GB, 40 * GB)


def test_over_the_limit_nothing_is_free(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/\n", V2.format(inside="/"), {"memory.max": GB, "memory.current": 2 * GB})
    assert _host.free(root) == 0


def test_a_system_that_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)  # what macOS says to SC_AVPHYS_PAGES

    monkeypatch.setattr(os, "sysconf", unknown)
    assert _host.total(tmp_path) is None and _host.free(tmp_path) is None


THERE = 4 * (4 * 4 + 4) + 4 * 2 * 4
"""Bytes of the model and the sample below: a step has them already."""


@pytest.mark.parametrize(("budget", "expected"), [("50%", 4 * GB), ("free", 5 * GB + THERE)])
def test_fit_asks_the_container(budget: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.max": 8 * GB, "memory.current": 3 * GB}
    root = machine(tmp_path, "0::/\n", V2.format(inside="/"), files)
    total, free = _host.total, _host.free
    monkeypatch.setattr(_host, "total", lambda: total(root))
    monkeypatch.setattr(_host, "free", lambda: free(root))
    model = torch.nn.Linear(4, 4)
    budgetopt.fit(model, torch.ones(2, 4), budget)
    plan = budgetopt.plan_of(model)
    assert plan is not None and plan.budget_bytes == expected


def test_what_the_step_has_already_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "free", lambda: GB)
    model, sample = torch.nn.Linear(4, 4), torch.ones(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(sample).sum().backward()
    optimizer.step()
    budgetopt.fit(model, sample, "free", optimizer=optimizer)
    plan = budgetopt.plan_of(model)
    gradients, momenta = 80, 80
    assert plan is not None and plan.budget_bytes == GB + THERE + gradients + momenta


def test_fit_needs_no_telling_where_the_budget_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_host, "total", lambda: None)
    monkeypatch.setattr(_host, "free", lambda: None)
    model = torch.nn.Linear(4, 4)
    with pytest.raises(budgetopt.InvalidBudgetError, match="'free' needs a device that tells its memory"):
        budgetopt.fit(model, torch.ones(2, 4), "free")
    budgetopt.fit(model, torch.ones(2, 4), "1GB")
