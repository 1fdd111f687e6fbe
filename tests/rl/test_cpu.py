"""CPU times of threads compared with the kernel's counts for processes."""

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


def test_cpu_times_include_threads_and_children() -> None:
    times = CpuTimes()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        start = time.process_time()
        while time.process_time() < start + 0.3:
            pass
        measured = times.since()
        ticks = sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        child.stdin.close()
    spun = ticks / os.sysconf("SC_CLK_TCK") + 0.3
    assert measured["timing/cpu"] == pytest.approx(spun, abs=0.1)
    assert measured["timing/cpu_wait"] >= 0
    assert times.since()["timing/cpu"] < 0.3
