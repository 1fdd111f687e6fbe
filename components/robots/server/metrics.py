"""Log lines and Prometheus metrics of the policy server."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# --- Log lines ---

log = logging.getLogger("armature.components.robots.server")


def log_event(event: str, client: str, **facts: object) -> None:
    """Log an event of a connection; facts with the value None or "" are left out."""
    present = {name: value for name, value in facts.items() if value not in (None, "")}
    log.info(event, extra={"facts": {"client": client, **present}})


class EventFormatter(logging.Formatter):
    """Formats a record as a JSON object on one line.

    It has the fields time (UTC), level and event, the facts of `log_event`, and the traceback of an exception as error.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return `record` as one line of JSON."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


# --- Metrics ---

OUTCOMES = ("answered", "refused", "busy", "failed")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


class PolicyServerMetrics:
    """Metrics of one server.

    They have their own registry, so that the counts of several servers in one process stay separate.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("armature_policy_requests", "Requests by outcome.", ["outcome"], registry=self.registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        self.refused_keys = Counter(
            "armature_policy_refused_keys", "Connections refused for a wrong or missing key.", registry=self.registry
        )
        self.connections = Gauge("armature_policy_connections", "Connected robots.", registry=self.registry)
        self.waiting = Gauge("armature_policy_waiting", "Requests in the queue.", registry=self.registry)
        self.seconds = Histogram(
            "armature_policy_answer_seconds",
            "Seconds from a request to its answer, including time in the queue.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rows = Histogram(
            "armature_policy_batch_rows",
            "Number of requests computed together, for each answer.",
            buckets=_ROWS,
            registry=self.registry,
        )

    def answered(self, seconds: float, rows: int) -> None:
        """Count a request that was answered after `seconds`, in a batch of `rows` requests that includes it."""
        self.requests.labels("answered").inc()
        self.seconds.observe(seconds)
        self.rows.observe(rows)
