"""One group of rollouts in full: every token, image, reward and advantage, and the task that was played."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from armature.components.artifacts.images import FORMATS
from armature.components.artifacts.tables import read_table
from armature.components.batches.scores import read_scores
from armature.components.contracts.errors import DataError
from armature.components.contracts.images import ImageRef
from armature.components.contracts.numbers import dump_json
from armature.components.environments.stage import TASKS
from armature.components.reports.records import rollout_record, token_decoder
from armature.components.rollouts.table import read_rollouts
from armature.components.view.runs import Run

MEDIA = {media: name.lower() for media, name in FORMATS.items()}
"""The suffix of an image's address by its media type."""
_decoder = lru_cache(maxsize=8)(token_decoder)


def group_document(run: Run, source: str, step: int, group_id: str) -> dict[str, Any]:
    """As the page draws it: `trajectories`, `failures`, the text of their `tokens`, their `images`, and the `task`.

    Raises:
        DataError: its tables cannot be read, or have no such group.
    """
    played = run.rollouts(source, step)
    outputs = read_rollouts(played, group_id)
    if not outputs.trajectories and not outputs.failures:
        raise DataError(f"there is no group {group_id!r} in step {step}", where=str(played))
    batch = run.batch(step) if source == "train" else None
    scores = read_scores(outputs.trajectories, batch, run.log_ratios(step), group_id) if batch is not None else {}
    tokens: dict[str, str] = {}
    images: dict[str, dict[str, Any]] = {}
    folder = run.tokenizer()

    def piece(token: int) -> str:
        if str(token) not in tokens:
            tokens[str(token)] = _decoder(folder)(token) if folder is not None else f"[{token}]"
        return tokens[str(token)]

    def image_key(ref: ImageRef) -> str:
        uri = f"/images/{ref.sha256}.{MEDIA[ref.media_type]}"
        images[ref.sha256] = {"uri": uri, "width": ref.width, "height": ref.height}
        return ref.sha256

    records = [
        rollout_record(each, step, scores.get(each.trajectory_id, ()), image_key, piece)
        for each in outputs.trajectories
    ]
    task_id = outputs.trajectories[0].task_id if outputs.trajectories else outputs.failures[0].task_id
    failures = [{"id": each.trajectory_id, "reason": each.reason, "detail": each.detail} for each in outputs.failures]
    task = task_payload(run.tasks(), task_id)
    return {"trajectories": records, "failures": failures, "tokens": tokens, "images": images, "task": task}


def task_payload(tasks: Path | None, task_id: str) -> Any:
    """What the environment keeps of a task, its right answer among it; None where the tasks are not known.

    A payload that cannot be shown, such as one that nests too deeply, is replaced by the reason.
    """
    if tasks is None:
        return None
    for table in sorted(tasks.glob("*.parquet")):
        if rows := read_table(table, TASKS, {"task_id": task_id}).to_pylist():
            try:
                payload = json.loads(rows[0]["payload"])
                dump_json(payload)
                return payload
            except (ValueError, RecursionError) as error:
                return f"the task cannot be shown: {error}"
    return None
