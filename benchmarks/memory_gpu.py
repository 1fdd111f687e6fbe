"""GPU memory of an update, by the place of the optimizer states, and with base weights in 4 bits.

Usage: python -m benchmarks.memory_gpu [small]. Rows with equal norms of the first gradient did the same work.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.step_case import need_gpu
from benchmarks.step_gpu import sides

FULL = ("", ",cpu", ",8bit")
ADAPTERS = ("", ",rounded", ",nf4")


def main(small: bool) -> None:
    if not small:
        need_gpu("python -m benchmarks.memory_gpu small")
    size = "" if small else ",7b"
    ways = [f"A,24000,packing,bf16{words}" for words in FULL]
    ways += [f"A,8000,packing,bf16,lora{size}{words}" for words in ADAPTERS]
    print(f"{'way':<42}{'ms':>8}{'peak GiB':>10}{'gradient norm':>15}{'mismatch KL':>13}")
    for one in sides(ways, (), 3, small=small):
        ms, peak = 1e3 * statistics.median(one["seconds"]), one["peak_gib"]
        print(f"{one['way']:<42}{ms:>8.0f}{peak:>10.2f}{one['norm']:>15.6f}{one['mismatch_kl']:>13.2g}")


if __name__ == "__main__":
    main("small" in sys.argv[1:])
