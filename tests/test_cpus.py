"""How many CPUs a process may use: of the machine, by its affinity and by a container's limit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from armature.components.cpus import available_cpus


def test_of_all_that_it_is_bound_to(tmp_path):
    bound = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])"
    code = f"{bound}; from armature.components.cpus import available_cpus; print(available_cpus())"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"1\n"


@pytest.mark.parametrize(
    ("quota", "share"), [("max 100000", 64), ("150000 100000", 1), ("250000 100000", 2), ("5 100", 1)]
)
def test_of_a_container_with_a_limit(tmp_path, monkeypatch, quota, share):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert available_cpus(tmp_path / "cpu.max") == share
