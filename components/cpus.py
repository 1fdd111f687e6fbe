"""The CPUs that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cpus(quota: Path = _QUOTA) -> int:
    """At least one; fewer than the machine has under SLURM, in a container with a limit (cgroup v2), or by taskset."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        limit, period = quota.read_text().split()
    except (OSError, ValueError):
        return own
    return own if limit == "max" else max(1, min(own, int(limit) // int(period)))
