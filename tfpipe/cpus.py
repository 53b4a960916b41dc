"""How many CPUs this process may use: affinity and container limits, not what the host has."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """Counts the CPUs that this process may keep busy.

    Args:
        root: where /proc and /sys are looked for.

    Returns:
        The CPUs of its affinity mask, or of its cgroup's quota where that is less; at least 1.

    Source: Linux kernel documentation, cgroup v2 (`cpu.max`) and CFS bandwidth control (v1).
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cpus, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> list[float]:
    """CPUs that each enclosing cgroup allows; nothing where there is no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        mount = root / "sys/fs/cgroup"
        if controllers:
            if "cpu" not in controllers.split(","):
                continue
            mount /= "cpu" if (mount / "cpu").exists() else controllers
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(mount):
                break
            quotas += _quota(directory)
    return quotas


def _quota(directory: Path) -> list[float]:
    try:
        if (directory / "cpu.max").exists():
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    except (OSError, ValueError, ZeroDivisionError):
        return []
