"""Prometheus metrics of the runs in this process, served at `machine.metrics`."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import psutil
from prefect.logging import get_run_logger
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from armature.components.contracts.installation import home_folder
from armature.components.inference.pool import OPEN
from armature.components.inference.routing import PoolStatistics
from armature.components.machine.network import metrics_server

# --- Free disk and memory, with a warning before they run out ---

_GIB = 2**30

LOW_DISK = 5 * _GIB
"""Number of free bytes on the disk below which a warning is logged. On small disks it is a twentieth of the disk."""

LOW_MEMORY = 0.05
"""Share of the memory that is available, below which a warning is logged. In a container, its memory limit counts."""

_CGROUP = Path("/sys/fs/cgroup")
"""Folder with the memory limit and the memory use of this process's container (cgroup v2)."""


@dataclass(frozen=True)
class Free:
    """Free bytes and size in bytes, for the disk with the artifact store and for main memory."""

    disk: int
    disk_size: int
    memory: int
    memory_size: int


def free_bytes(store: Path, cgroup: Path = _CGROUP) -> Free:
    """Measure the free space of the disk with the folder `store`, and the available memory.

    The folder need not exist yet. In a container (cgroup v2), its memory limit counts.
    """
    there = next(path for path in (store.absolute(), *store.absolute().parents) if path.exists())
    disk, memory = shutil.disk_usage(there), psutil.virtual_memory()
    available, size = memory.available, memory.total
    try:
        limit = int((cgroup / "memory.max").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(statistics["inactive_file"])
    except (OSError, ValueError, KeyError):
        return Free(disk.free, disk.total, available, size)  # not in a container, or in one without a limit
    return Free(disk.free, disk.total, max(0, min(available, limit - used)), min(size, limit))


class ResourceWatch:
    """Warns when free disk or memory is low: once, and again only after there was enough in between."""

    def __init__(self) -> None:
        self._low: set[str] = set()

    def warnings(self, free: Free) -> Iterator[str]:
        """Yield the warnings to log for these measurements."""
        yield from self._one(
            "disk",
            free.disk < min(LOW_DISK, free.disk_size / 20),
            f"{free.disk / _GIB:.1f} GiB of the store's disk are left: make room, or the run stops when it is full",
        )
        yield from self._one(
            "memory",
            free.memory < LOW_MEMORY * free.memory_size,
            f"{free.memory / _GIB:.1f} of {free.memory_size / _GIB:.1f} GiB of memory are left: the system ends "
            "processes when it has none; fewer workers.environments, servers or trainer.loader_workers take less",
        )

    def _one(self, name: str, low: bool, text: str) -> Iterator[str]:
        """Yield the warning `text` if the resource `name` is low now and was not low at the last call."""
        if low and name not in self._low:
            yield text
        self._low = self._low | {name} if low else self._low - {name}


COUNTS = tuple(PoolStatistics().counts())
"""Names of the counts that every server pool keeps."""

_LABELS = ("run", "stage")
"""Labels of the metrics of a stage: name of the flow run and name of the stage's task run."""

_STORES: set[Path] = set()
"""Folders of the artifact stores of the running flows, whose free disk is reported."""
_ADDRESSES: set[str] = set()
"""Addresses at which this process serves metrics."""


@dataclass
class StageNumbers:
    """Latest step, metrics and progress of a running stage; safe to share between threads."""

    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    bars: dict[str, tuple[int, int]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def of_step(self, values: Mapping[str, float], step: int) -> None:
        """Set the latest step and update the metrics with the values of this step."""
        with self._lock:
            self.step = step
            self.metrics |= {name: float(value) for name, value in values.items()}

    def progress(self, name: str, done: int, total: int) -> None:
        with self._lock:
            self.bars[name] = done, total

    def copy(self) -> StageNumbers:
        """Return a copy that other threads do not change."""
        with self._lock:
            return StageNumbers(self.step, dict(self.metrics), dict(self.bars))


class RunCollector(Collector):
    """Collects the running stages, the open server pools, and free disk and memory for Prometheus."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._stages: dict[tuple[str, str], StageNumbers] = {}

    @contextmanager
    def stage(self, run: str, stage: str) -> Iterator[StageNumbers]:
        """Report the numbers of a stage while the block runs. The block writes them to the yielded object.

        `run` and `stage` are the labels: name of the flow run and name of the stage's task run.
        """
        numbers = StageNumbers()
        with self._lock:
            self._stages[run, stage] = numbers
        try:
            yield numbers
        finally:
            with self._lock:
                del self._stages[run, stage]

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            stages = {labels: numbers.copy() for labels, numbers in self._stages.items()}
        step = GaugeMetricFamily("armature_step", "The last step that was reported.", labels=_LABELS)
        metric = GaugeMetricFamily(
            "armature_step_metric", "Numbers of that step, as in MLflow.", labels=[*_LABELS, "metric"]
        )
        done = GaugeMetricFamily("armature_progress_done", "Units that are done, by bar.", labels=[*_LABELS, "bar"])
        total = GaugeMetricFamily("armature_progress_total", "Units there are, by bar.", labels=[*_LABELS, "bar"])
        for labels, numbers in stages.items():
            if numbers.step is not None:
                step.add_metric(labels, numbers.step)
            for name, value in numbers.metrics.items():
                metric.add_metric([*labels, name], value)
            for bar, (made, all_of_them) in numbers.bars.items():
                done.add_metric([*labels, bar], made)
                total.add_metric([*labels, bar], all_of_them)
        yield from (step, metric, done, total)
        yield from _pools()
        yield from _resources()


def _pools() -> Iterator[Metric]:
    """Yield the metrics of all open server pools of this process together."""
    pools = list(OPEN)
    ready = sum(replica.ready for pool in pools for replica in pool.replicas)
    yield GaugeMetricFamily("armature_pool_servers", "Servers that answer, of all open pools.", ready)
    yield GaugeMetricFamily("armature_pool_in_flight", "Requests at servers.", sum(pool.in_flight for pool in pools))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for pool in pools:
        counts.update(pool.statistics.counts())
        reasons.update(dict(pool.statistics.failures))
    for name in COUNTS:
        yield CounterMetricFamily(f"armature_pool_{name}", f"PoolStatistics.{name} of all open pools.", counts[name])
    failures = CounterMetricFamily("armature_pool_failures", "Samples without an answer.", labels=["reason"])
    for reason, count in reasons.items():
        failures.add_metric([reason], count)
    yield failures


def _resources() -> Iterator[Metric]:
    """Yield the free bytes of the disk of each artifact store, and the available memory."""
    disk = GaugeMetricFamily("armature_disk_free_bytes", "Of the disk with the artifact store.", labels=["store"])
    memory = None
    for store in sorted(_STORES):
        free = free_bytes(store)
        disk.add_metric([str(store)], free.disk)
        memory = free.memory
    yield disk
    if memory is not None:
        yield GaugeMetricFamily("armature_memory_available_bytes", "Of this machine or its container.", memory)


RUNS = RunCollector()
"""The collector of all stages that run in this process."""
_REGISTRY = CollectorRegistry()
_REGISTRY.register(RUNS)
ProcessCollector(registry=_REGISTRY)


@contextmanager
def serve_metrics(address: str | None, store: str) -> Iterator[None]:
    """Serve GET /metrics at `address` while the block runs. A flow inside another flow shares the outer flow's server.

    Args:
        address: "host:port", with port 0 for any free port; None serves nothing.
        store: folder of the artifact store, whose free disk is reported.

    Raises:
        ConfigurationError: the address is in use or not of this machine.
    """
    if address is None or address in _ADDRESSES:
        yield
        return
    with metrics_server(address, _REGISTRY, f"machine.metrics = {address!r}") as url:
        get_run_logger().info("metrics: %s", url)
        folder = home_folder() / store
        _ADDRESSES.add(address)
        _STORES.add(folder)
        try:
            yield
        finally:
            _ADDRESSES.discard(address)
            _STORES.discard(folder)
