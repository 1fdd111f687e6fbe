"""How GPUs are best divided between servers and trainer, by the seconds that a run measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from armature.components.artifacts.manifest import read_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.rl.settings import TrainVLMSettings

LEAST = 0.05
"""Of a step, that another share has to save to be worth it."""
WARM_UP = 2
"""Steps at the beginning that do not count: kernels are compiled, caches are filled."""


@dataclass(frozen=True)
class MeasuredShare:
    """Means of the steps of a run: `rollouts` and `train` are seconds on so many `servers` and `ranks`, `others` those
    of what neither shortens. `overlaps`: rollouts are played while the trainer works; `at_most`: they took no longer
    than that, and how much less is not in the records.
    """

    path: Path
    servers: int
    ranks: int
    rollouts: float
    train: float
    others: float
    overlaps: bool
    at_most: bool

    def step(self, servers: int, ranks: int) -> float:
        """Seconds of a step, if rollouts and training each take as much less as they have more GPUs."""
        rollouts, train = self.rollouts * self.servers / servers, self.train * self.ranks / ranks
        return self.others + (max(rollouts, train) if self.overlaps else rollouts + train)


def last_run(settings: TrainVLMSettings, store: ArtifactStore) -> MeasuredShare | None:
    """The newest finished run of this model with these rollouts that says on how many servers and ranks it was."""
    homes = sorted(store.root.glob("train-vlm/*/history.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    wanted = _compared(settings.model_dump(mode="json"))
    for file in homes:
        if _compared(read_manifest(file.parent).settings) != wanted:
            continue
        steps = [row for row in json.loads(file.read_text()) if row["step"] > WARM_UP][:-1]
        if steps and all("machine/servers" in row for row in steps):
            return _measured(file.parent, settings, steps)
    return None


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    rollouts = {key: value for key, value in settings["rollouts"].items() if key != "seed"}
    return {"model": settings["model"], "rollouts": rollouts, "batches": settings["batches"]}


def _measured(path: Path, settings: TrainVLMSettings, steps: list[dict[str, float]]) -> MeasuredShare:
    last = steps[-1]
    same = [row for row in steps if all(row[name] == last[name] for name in ("machine/servers", "machine/ranks"))]
    mean = {
        name: fmean(row[f"timing/{name}"] for row in same) for name in ("wait_for_rollouts", "batch", "train", "sync")
    }
    wait, overlaps = mean["wait_for_rollouts"], settings.rollouts.max_staleness > 0
    return MeasuredShare(
        path=path,
        servers=int(last["machine/servers"]),
        ranks=int(last["machine/ranks"]),
        rollouts=wait + (mean["train"] if overlaps else 0.0),
        train=mean["train"],
        others=mean["batch"] + mean["sync"],
        overlaps=overlaps,
        at_most=overlaps and wait < LEAST * mean["train"],
    )


def best_share(measured: MeasuredShare, gpus: int, gpus_per_server: int) -> tuple[int, int]:
    """Servers and ranks on `gpus` GPUs with the shortest step, all GPUs in use but for what no server has room on."""
    best, shortest = (0, 0), inf
    for servers in range(1, (gpus - 1) // gpus_per_server + 1):
        ranks = gpus - servers * gpus_per_server
        if (seconds := measured.step(servers, ranks)) < shortest:
            best, shortest = (servers, ranks), seconds
    return best


def share_lines(measured: MeasuredShare, gpus_per_server: int) -> list[str]:
    """What `measured` says of the GPUs that it had, of which each server took `gpus_per_server`."""
    gpus = measured.servers * gpus_per_server + measured.ranks
    now = measured.step(measured.servers, measured.ranks)
    said = (
        f"share of {gpus} GPUs: in {measured.path} {measured.servers} servers and {measured.ranks} ranks took "
        f"{now:.1f} s a step: rollouts {'at most ' * measured.at_most}{measured.rollouts:.1f} s, training "
        f"{measured.train:.1f} s{', at the same time' * measured.overlaps}, batch and sync {measured.others:.1f} s"
    )
    if measured.at_most:
        return [said, "  servers waited for the trainer: give it a GPU of theirs, and see what the next run says"]
    servers, ranks = best_share(measured, gpus, gpus_per_server)
    saved = 1 - measured.step(servers, ranks) / now
    if saved < LEAST:
        return [said, f"  no other share would save {LEAST:.0%} of it"]
    return [
        said,
        f"  {servers} servers and {ranks} ranks would take {measured.step(servers, ranks):.1f} s, {saved:.0%} less, if "
        "both get as much faster as they get GPUs",
    ]
