"""What the policy server counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OUTCOMES = ("answered", "refused", "busy", "failed")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class PolicyServerMetrics:
    """All have a registry of their own, so that several servers of a process do not add up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "armature_policy_requests", "Requests, by what became of them.", ["outcome"], registry=self.registry
        )
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.refused_keys = Counter(
            "armature_policy_refused_keys", "Connections without the key.", registry=self.registry
        )
        self.connections = Gauge("armature_policy_connections", "Robots that are connected.", registry=self.registry)
        self.waiting = Gauge("armature_policy_waiting", "Requests that wait.", registry=self.registry)
        self.seconds = Histogram(
            "armature_policy_answer_seconds",
            "From a request to its answer, time in the queue included.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rows = Histogram(
            "armature_policy_batch_rows",
            "Of each answer, how many were computed at once.",
            buckets=_ROWS,
            registry=self.registry,
        )

    def answered(self, seconds: float, rows: int) -> None:
        self.requests.labels("answered").inc()
        self.seconds.observe(seconds)
        self.rows.observe(rows)
