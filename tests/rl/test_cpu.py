"""Seconds on a CPU, against what the kernel counts for processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from armature.components.rl.metrics import CpuTimes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="schedstat is Linux's")
SPIN = "import time\nwhile time.process_time() < 0.5: pass\nprint('spun', flush=True)\ninput()"


def test_threads_and_children_are_counted_since_the_last_time() -> None:
    times = CpuTimes()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        own = time.process_time()
        while time.process_time() < own + 0.3:
            pass
        found = times.since()
        ticks = sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        child.stdin.close()
    spun = ticks / os.sysconf("SC_CLK_TCK") + 0.3
    assert found["timing/cpu"] == pytest.approx(spun, abs=0.1)
    assert found["timing/cpu_wait"] >= 0
    assert times.since()["timing/cpu"] < 0.3
