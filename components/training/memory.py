"""How much memory training takes."""

from __future__ import annotations

import gc
import resource
import sys

import torch


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used since the last call: of the GPU; on CPU of the process since it began."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return float(peak / 2**30)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def exempt_from_collection() -> None:
    """Exclude every object that exists now from Python's garbage collection.

    After a step with compiled layers there are 7e5 of them. A full collection takes 0.3 s, and meanwhile the GPU runs
    out of queued work.
    """
    gc.collect()
    gc.freeze()
