"""What the policy server tells its log: one JSON object a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

log = logging.getLogger("armature.components.policy_server")


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
