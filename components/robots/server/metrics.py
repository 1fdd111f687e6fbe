"""Counters of the policy server for Prometheus, and the lines of its log."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# What the policy server tells its log: one JSON object a line.

log = logging.getLogger("armature.components.robots.server")


def tell(event: str, client: str, **facts: object) -> None:
    """One line about a connection; empty facts, and None, are left out."""
    kept = {name: value for name, value in facts.items() if value not in (None, "")}
    log.info(event, extra={"facts": {"client": client, **kept}})


class EventFormatter(logging.Formatter):
    """time (UTC), level, event, and the facts of `tell`; with the traceback of an error as `error`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# What the policy server counts, for Prometheus.

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
