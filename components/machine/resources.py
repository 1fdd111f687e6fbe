"""GPUs that this process may use, and the objects that its garbage collector visits."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import takewhile

from armature.components.contracts.errors import ConfigurationError

# --- GPUs that CUDA_VISIBLE_DEVICES leaves to this process, numbered from 0 as in torch ---

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_count() -> int:
    """Return the number of GPUs that the driver lists and CUDA_VISIBLE_DEVICES leaves."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    count = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    left = _left()
    return count if left is None else min(count, len(left))


def visible_devices(gpus: Sequence[int]) -> str:
    """Return CUDA_VISIBLE_DEVICES for a child program that may use only `gpus`.

    Raises:
        ConfigurationError: `gpus` has a number that CUDA_VISIBLE_DEVICES does not leave to this process.
    """
    left = _left()
    if left is None:
        return ",".join(map(str, gpus))
    if missing := [gpu for gpu in gpus if gpu >= len(left)]:
        raise ConfigurationError(
            f"GPU {missing[0]} is named, but {VISIBLE} leaves {len(left)} GPUs, counted from 0",
            code="gpu_not_visible",
            where="machine.servers.gpus, machine.trainer.gpus",
            remedy="name devices that are left, or leave the variable out",
        )
    return ",".join(left[gpu] for gpu in gpus)


def _left() -> list[str] | None:
    """Return the device names in CUDA_VISIBLE_DEVICES before the first invalid one; None if the variable is not set."""
    devices = os.environ.get(VISIBLE)
    if devices is None:
        return None
    return list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, devices.split(","))))


# --- The garbage collector ---


def exempt_from_collection() -> None:
    """Exclude all existing objects from garbage collection.

    After a training step with compiled layers 7e5 objects exist. A full collection takes 0.3 s, in which a GPU runs out
    of queued work.
    """
    gc.collect()
    gc.freeze()
