"""The best division of GPUs between servers and trainer, from the times that an earlier run measured."""

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
"""Share of a step's time that another division of the GPUs must save to be recommended."""
WARM_UP = 2
"""Number of first steps that are ignored, in which kernels are compiled and caches are filled."""


@dataclass(frozen=True)
class MeasuredShare:
    """Mean times of the steps of a run in seconds, and the numbers of servers and ranks that it used."""

    path: Path
    """Folder of the run."""
    servers: int
    ranks: int
    rollouts: float
    """Seconds of rollouts, on `servers` servers."""
    train: float
    """Seconds of training, on `ranks` ranks."""
    others: float
    """Seconds of everything that more servers or ranks do not shorten."""
    overlaps: bool
    """True if rollouts are played while the trainer works."""
    at_most: bool
    """True if `rollouts` is only an upper bound, because rollouts took at most as long as training.

    Their exact time is unknown because nothing waited for them.
    """

    def step(self, servers: int, ranks: int) -> float:
        """Return the seconds that a step would take on `servers` servers and `ranks` ranks.

        Rollouts and training are both assumed to scale perfectly.
        """
        rollouts, train = self.rollouts * self.servers / servers, self.train * self.ranks / ranks
        return self.others + (max(rollouts, train) if self.overlaps else rollouts + train)


def last_run(settings: TrainVLMSettings, store: ArtifactStore) -> MeasuredShare | None:
    """Return the times of the newest finished run with the same model, rollouts and batches, or None.

    Runs whose history lacks the numbers of servers and ranks, or the time of checkpoints, are ignored.
    """
    homes = sorted(store.root.glob("train-vlm/*/history.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    wanted = _compared(settings.model_dump(mode="json"))
    for file in homes:
        if _compared(read_manifest(file.parent).settings) != wanted:
            continue
        steps = [row for row in json.loads(file.read_text()) if row["step"] > WARM_UP][:-1]
        if steps and all({"machine/servers", "timing/save"} <= row.keys() for row in steps):
            return _measured(file.parent, settings, steps)
    return None


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's settings that two runs must share for their times to be comparable."""
    rollouts = {key: value for key, value in settings["rollouts"].items() if key != "seed"}
    return {"model": settings["model"], "rollouts": rollouts, "batches": settings["batches"]}


def _measured(path: Path, settings: TrainVLMSettings, steps: list[dict[str, float]]) -> MeasuredShare:
    last = steps[-1]
    same = [row for row in steps if all(row[name] == last[name] for name in ("machine/servers", "machine/ranks"))]
    names = ("wait_for_rollouts", "batch", "train", "save", "sync")
    mean = {name: fmean(row[f"timing/{name}"] for row in same) for name in names}
    wait, overlaps = mean["wait_for_rollouts"], settings.rollouts.max_staleness > 0
    return MeasuredShare(
        path=path,
        servers=int(last["machine/servers"]),
        ranks=int(last["machine/ranks"]),
        rollouts=wait + (mean["train"] if overlaps else 0.0),
        train=mean["train"],
        others=mean["batch"] + mean["save"] + mean["sync"],
        overlaps=overlaps,
        at_most=overlaps and wait < LEAST * mean["train"],
    )


def best_share(measured: MeasuredShare, gpus: int, gpus_per_server: int) -> tuple[int, int]:
    """Return the number of servers and the number of ranks that use `gpus` GPUs and make a step shortest.

    Example:
        >>> measured = MeasuredShare(Path(), 1, 3, rollouts=30.0, train=10.0, others=0.0, overlaps=True, at_most=False)
        >>> best_share(measured, gpus=4, gpus_per_server=1)
        (2, 2)
    """
    best, shortest = (0, 0), inf
    for servers in range(1, (gpus - 1) // gpus_per_server + 1):
        ranks = gpus - servers * gpus_per_server
        if (seconds := measured.step(servers, ranks)) < shortest:
            best, shortest = (servers, ranks), seconds
    return best


def share_lines(measured: MeasuredShare, gpus_per_server: int) -> list[str]:
    """Return lines that compare the measured division of GPUs with the best one.

    Args:
        gpus_per_server: number of GPUs that each server of the run used.
    """
    gpus = measured.servers * gpus_per_server + measured.ranks
    now = measured.step(measured.servers, measured.ranks)
    line = (
        f"share of {gpus} GPUs: in {measured.path} {measured.servers} servers and {measured.ranks} ranks took "
        f"{now:.1f} s a step: rollouts {'at most ' * measured.at_most}{measured.rollouts:.1f} s, training "
        f"{measured.train:.1f} s{', at the same time' * measured.overlaps}, batch and sync {measured.others:.1f} s"
    )
    if measured.at_most:
        return [line, "  servers waited for the trainer: move a GPU from servers to trainer and compare the next run"]
    servers, ranks = best_share(measured, gpus, gpus_per_server)
    saved = 1 - measured.step(servers, ranks) / now
    if saved < LEAST:
        return [line, f"  no other share would save {LEAST:.0%} of this time"]
    return [
        line,
        f"  {servers} servers and {ranks} ranks would take {measured.step(servers, ranks):.1f} s, {saved:.0%} less, if "
        "both sides scale perfectly",
    ]
