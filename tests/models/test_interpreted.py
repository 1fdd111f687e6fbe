"""Triton kernels on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = sorted(Path(__file__).parents[1].rglob("interpreted_*.py"))


def test_interpreted_kernels():
    """Each script runs in a process of its own, since Triton decides at its import whether it interprets kernels."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", *KERNELS],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
