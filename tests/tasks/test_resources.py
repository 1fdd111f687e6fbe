"""Free disk and memory, and the warnings about them."""

from __future__ import annotations

import shutil

import psutil

from armature.tasks.prometheus import Free, ResourceWatch, free_bytes

GIB = 2**30


def test_container_memory_limit_counts(tmp_path):
    here = free_bytes(tmp_path / "not" / "made yet", tmp_path)
    assert here.disk_size == shutil.disk_usage(tmp_path).total and here.memory_size == psutil.virtual_memory().total

    for name, text in {
        "memory.max": f"{GIB}\n",
        "memory.current": f"{3 * GIB // 4}\n",
        "memory.stat": f"anon {GIB // 4}\ninactive_file {GIB // 2}\n",  # the page cache is given back when needed
    }.items():
        (tmp_path / name).write_text(text)
    limited = free_bytes(tmp_path, tmp_path)
    assert (limited.memory, limited.memory_size) == (3 * GIB // 4, GIB)
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(tmp_path, tmp_path).memory_size == here.memory_size


def test_warns_once_until_the_resource_recovers():
    watch = ResourceWatch()
    plenty = Free(disk=100 * GIB, disk_size=1000 * GIB, memory=8 * GIB, memory_size=16 * GIB)
    full = Free(disk=4 * GIB, disk_size=1000 * GIB, memory=8 * GIB, memory_size=16 * GIB)
    both = Free(disk=4 * GIB, disk_size=1000 * GIB, memory=GIB // 2, memory_size=16 * GIB)
    output = [list(watch.warnings(each)) for each in (plenty, full, full, both, plenty, full)]
    assert [len(lines) for lines in output] == [0, 1, 0, 1, 0, 1]
    assert output[1][0].startswith("4.0 GiB of the store's disk are left") and output[3][0].startswith(
        "0.5 of 16.0 GiB"
    )
    small = Free(disk=GIB, disk_size=10 * GIB, memory=GIB, memory_size=16 * GIB)
    assert not list(ResourceWatch().warnings(small))  # a tenth of a small disk
